"""S3 that fails: a run ends with right data, or an error that names file, root and cause; no half file is kept."""

import os
import signal
import threading
import time
import tracemalloc
from contextlib import ExitStack
from pathlib import Path

import pytest
from batches import TOP, assert_equals_samples, frames_of_all, frames_of_dataset, local_loader
from s3_server import S3Server

from raypipe.dataset import open_dataset
from raypipe.errors import DatasetError, DownloadError
from raypipe.pipeline import Pipeline
from raypipe.storage import CacheSpec, Storage, retry_transient
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

ROWS = "data/chunk-000/file-000.parquet"
VIDEO = f"videos/{TOP}/chunk-000/file-000.mp4"
ORDER = {"live_spans": 2}

KEPT = {"whole": 1 << 30, "ranged": 0}
"""The `whole_bytes` of a cache that fetches files whole, and of one that fetches parts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    spec = SynthSpec(lengths=(7, 3, 5), cameras=(CameraSpec(name=TOP, height=32, width=32),), state_dim=2, action_dim=2)
    return write_dataset(tmp_path_factory.mktemp("s3") / "arm", spec)


@pytest.fixture(scope="module")
def dataset(folder):
    return open_dataset(str(folder))


@pytest.fixture(scope="module")
def server():
    with S3Server() as running:
        yield running


@pytest.fixture
def s3(server, monkeypatch, request):
    """Waits are short: what is tried again is tried soon. So is patience, where a server is slow on purpose."""
    monkeypatch.setattr("raypipe.storage.retry.RETRY_WAITS_S", (0.0, 0.01, 0.02))
    with server.as_s3(timeout_s=0.4 if "slow" in request.node.name else 20):
        yield server
    server.reset()


@pytest.fixture
def root(s3, folder, request):
    return s3.add("".join(one if one.isalnum() else "-" for one in request.node.name), folder)


def make_loader(root, tmp_path, kept):
    cache = CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 30, whole_bytes=KEPT[kept])
    return local_loader(Pipeline(open_dataset(root), batch_size=6, seed=0, order=ORDER, cache=cache))


def assert_all_of(batches, dataset):
    assert sorted(frames_of_all(batches)) == frames_of_dataset(dataset)
    for batch in batches:
        assert_equals_samples(batch, dataset)


def cached_contents(tmp_path):
    return [path.read_bytes() for path in (tmp_path / "cache").iterdir() if len(path.name) == 32]


def assert_nothing_wrong_is_kept(tmp_path, folder):
    """Whatever has a final name is a file of the dataset, a part of one, or the listing."""
    right = [path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()]
    for content in cached_contents(tmp_path):
        assert content.startswith(b"[[") or any(content in one for one in right)


PASSING = {
    "503 with Retry-After": {"status": 503, "headers": {"Retry-After": "1"}, "times": 2},
    "429 with Retry-After": {"status": 429, "headers": {"Retry-After": "1"}, "times": 2},
    "500": {"status": 500, "times": 2},
    "slow": {"delay_s": 0.8},
    "cut before the body": {"cut_after": 0, "times": 2},
    "cut in the body": {"cut_after": 100, "times": 2},
    "truncated": {"truncate_to": 100, "times": 2},
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_leaves_right_data(s3, root, folder, dataset, tmp_path, name, kept):
    loader = make_loader(root, tmp_path, kept)
    s3.fail(ROWS, **PASSING[name])
    s3.fail(VIDEO, **PASSING[name])

    batches = list(loader)

    assert_all_of(batches, dataset)
    assert not any(fault.times for fault in s3.faults), "the fault was not met"
    assert_nothing_wrong_is_kept(tmp_path, folder)


LASTING = {
    "503": ({"status": 503, "headers": {"Retry-After": "0"}}, "as asked"),
    "500": ({"status": 500}, "as asked"),
    "slow": ({"delay_s": 0.6}, "[Tt]imeout"),
    "cut": ({"cut_after": 100}, "Error"),
    "truncated": ({"truncate_to": 100}, "ContentLengthError|IncompleteRead|PayloadError"),
    "short": ({"content": b"sorry"}, "5 of the [0-9]+ bytes|other bytes came than the storage has"),
    "long": ({"content": b"x" * (1 << 20)}, "bytes"),
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", LASTING)
def test_a_fault_that_lasts_names_file_root_and_cause_in_bounded_time(
    s3, root, folder, tmp_path, monkeypatch, name, kept
):
    fault, cause = LASTING[name]
    monkeypatch.setattr("raypipe.storage.retry.RETRY_WAITS_S", (0.01,))
    loader = make_loader(root, tmp_path, kept)
    s3.fail(VIDEO, times=10_000, **fault)
    began = time.monotonic()

    with pytest.raises(DownloadError) as raised:
        list(loader)

    told = "; ".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert VIDEO in told
    assert root in told
    assert raised.match(cause)
    assert time.monotonic() - began < 60
    assert_nothing_wrong_is_kept(tmp_path, folder)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", [ROWS, VIDEO], ids=["rows", "video"])
def test_a_file_that_is_gone_is_a_dataset_error(s3, root, folder, tmp_path, name, kept):
    loader = make_loader(root, tmp_path, kept)
    s3.remove(f"{root.rpartition('/')[2]}/{name}")

    with pytest.raises(DatasetError, match=f"missing file '.*{name}'") as raised:
        list(loader)

    assert root in str(raised.value)
    assert_nothing_wrong_is_kept(tmp_path, folder)


def test_a_root_without_the_file_is_told_by_the_listing_alone(s3, root, tmp_path):
    storage = Storage(root, CacheSpec(folder=str(tmp_path / "cache")))

    assert storage.exists("meta/info.json")
    with pytest.raises(DatasetError, match=r"missing file '.*/data/none\.parquet'"):
        storage.open_file("data/none.parquet")
    assert dict(s3.counts) == {"list": 1}


def altered(folder, name):
    content = bytearray((Path(folder) / name).read_bytes())
    content[len(content) // 2] ^= 1
    return bytes(content)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", [ROWS, VIDEO], ids=["rows", "video"])
def test_a_file_that_changed_after_the_listing_is_an_error(s3, root, folder, tmp_path, name, kept):
    loader = make_loader(root, tmp_path, kept)
    s3.put(f"{root.rpartition('/')[2]}/{name}", altered(folder, name))

    with pytest.raises(DownloadError, match=f"'{name}' changed while it was read: it was size .*ETag") as raised:
        list(loader)

    assert root in "; ".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert_nothing_wrong_is_kept(tmp_path, folder)


def test_a_file_that_changes_between_two_parts_gives_no_part_of_the_new_one(s3, root, folder, tmp_path):
    storage = Storage(root, CacheSpec(folder=str(tmp_path / "cache"), whole_bytes=0))
    content = (Path(folder) / VIDEO).read_bytes()
    stream = storage.open_ranged(VIDEO)
    stream.need(0, 100)
    s3.put(f"{root.rpartition('/')[2]}/{VIDEO}", bytes(len(content)))

    stream.seek(0)
    assert stream.read(100) == content[:100]
    with pytest.raises(DownloadError, match="changed while it was read"):
        stream.need(100, 300)

    assert_nothing_wrong_is_kept(tmp_path, folder)


def test_a_file_that_changes_while_it_is_fetched_is_not_kept(s3, root, folder, tmp_path):
    storage = Storage(root, CacheSpec(folder=str(tmp_path / "cache")))
    storage.size_bytes(VIDEO)
    key = f"{root.rpartition('/')[2]}/{VIDEO}"
    s3.fail(VIDEO, kind="get", before=lambda: s3.put(key, altered(folder, VIDEO)))

    with pytest.raises(DownloadError, match="changed while it was read"):
        storage.read_bytes(VIDEO)

    assert_nothing_wrong_is_kept(tmp_path, folder)


@pytest.mark.parametrize(("times", "is_right"), [(1, True), (1000, False)])
def test_an_answer_of_another_range_is_not_taken(s3, root, tmp_path, times, is_right):
    key, content = f"{root.rpartition('/')[2]}/big.mp4", bytes(range(256)) * 10_000
    s3.put(key, content)
    storage = Storage(root, CacheSpec(folder=str(tmp_path / "cache"), whole_bytes=0))
    s3.fail("big.mp4", ignores_ranges=True, times=times)
    file = storage.open_ranged("big.mp4")

    if is_right:
        retry_transient(lambda: file.need(1_000_000, 1_100_000))
        file.seek(1_000_000)
        assert file.read(100_000) == content[1_000_000:1_100_000]
    else:
        with pytest.raises(DownloadError, match=r"more than the 100000 bytes from 1000000 of 'big\.mp4' came"):
            retry_transient(lambda: file.need(1_000_000, 1_100_000))
    assert dict(s3.ranges)[key] == "bytes=1000000-1099999"


def test_a_listing_that_fails_for_a_while_is_asked_for_again(s3, root, tmp_path):
    storage = Storage(root, CacheSpec(folder=str(tmp_path / "cache")))
    s3.fail("", kind="list", status=500, times=2)

    assert retry_transient(lambda: storage.exists("meta/info.json"))


@pytest.mark.parametrize("times", [1, 1000])
def test_other_bytes_of_the_right_length_are_not_kept(s3, root, folder, tmp_path, times):
    storage = Storage(root, CacheSpec(folder=str(tmp_path / "cache")))
    # Others every time: what comes twice would be what the store has.
    bad = [altered(folder, VIDEO)[:-1] + bytes([number]) for number in range(4)]
    for content in bad[: min(times, 4)]:
        s3.fail(VIDEO, content=content)

    if times == 1:
        assert storage.read_bytes(VIDEO) == (Path(folder) / VIDEO).read_bytes()
    else:
        with pytest.raises(DownloadError, match=r"other bytes came than the storage has, 3 times"):
            storage.read_bytes(VIDEO)
    assert_nothing_wrong_is_kept(tmp_path, folder)


def test_an_etag_that_is_no_sum_of_the_content_is_known_for_that(s3, root, folder, tmp_path):
    storage = Storage(root, CacheSpec(folder=str(tmp_path / "cache")))
    s3.fail("", times=1000, content=altered(folder, VIDEO))

    assert storage.read_bytes(VIDEO) == altered(folder, VIDEO)
    assert s3.keys[f"{root.rpartition('/')[2]}/{VIDEO}"] == 2


@pytest.mark.parametrize("kept", KEPT)
def test_a_body_that_goes_on_behind_what_was_asked_for_is_left_there(s3, root, folder, tmp_path, kept):
    size = (Path(folder) / VIDEO).stat().st_size
    storage = Storage(root, CacheSpec(folder=str(tmp_path / "cache"), whole_bytes=KEPT[kept]))
    assert storage.size_bytes(VIDEO) == size
    s3.fail(VIDEO, times=1000, content=bytes(100 << 20))

    tracemalloc.start()
    with pytest.raises(DownloadError, match=r"more than the \d+ bytes"):
        storage.read_bytes(VIDEO) if kept == "whole" else storage.open_ranged(VIDEO).need(0, size)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 16 << 20
    assert_nothing_wrong_is_kept(tmp_path, folder)


@pytest.fixture
def _pythons_ctrl_c():
    """Ray Train leaves a handler of its own in a process that has trained."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_pythons_ctrl_c")
def test_ctrl_c_in_a_transfer_writes_to_no_other_file(s3, root, folder, tmp_path):
    storage = Storage(root, CacheSpec(folder=str(tmp_path / "cache")))
    assert storage.exists(VIDEO)
    press = threading.Timer(0.5, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    s3.fail(VIDEO, drip_s=0.01, before=press.start)

    with pytest.raises(KeyboardInterrupt):
        storage.read_bytes(VIDEO)

    with ExitStack() as opened:
        # One of them has the number of the file that was closed.
        others = [opened.enter_context(open(tmp_path / str(number), "w+b")) for number in range(20)]
        time.sleep(0.5)
        assert [other.read() for other in others] == [b""] * 20
    assert_nothing_wrong_is_kept(tmp_path, folder)


def test_a_disk_that_takes_less_than_it_is_given_leaves_no_holes(s3, root, folder, tmp_path, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr("raypipe.storage.bodies.os.pwrite", lambda fd, piece, start: write(fd, piece[:100], start))
    storage = Storage(root, CacheSpec(folder=str(tmp_path / "cache")))

    assert storage.read_bytes(VIDEO) == (Path(folder) / VIDEO).read_bytes()


@pytest.mark.parametrize("has_md5", [True, False])
def test_a_server_that_sends_less_than_it_was_asked_for_leaves_no_holes(s3, tmp_path, monkeypatch, has_md5):
    monkeypatch.setattr("raypipe.storage.bodies.PART_BYTES", 1000)
    content, answer, is_short = os.urandom(2500), s3._app, [True]

    def answer_less(environ, start_response):
        start, _, last = environ.get("HTTP_RANGE", "").removeprefix("bytes=").partition("-")
        if last and is_short[-1] and environ["REQUEST_METHOD"] == "GET":
            # The last part is shorter, so the file has the right size.
            environ["HTTP_RANGE"] = f"bytes={start}-{min(int(last), int(start) + 699)}"
        return answer(environ, start_response)

    monkeypatch.setattr(s3, "_app", answer_less)
    s3.put("short/file.bin", content)
    storage = Storage(f"s3://{s3.bucket}/short", CacheSpec(folder=str(tmp_path / "cache")))
    # False for an object that was uploaded in parts: its ETag is no sum of its bytes.
    storage._remote._s3._has_md5 = has_md5

    with pytest.raises(DownloadError, match=r"1900 of the 2500 bytes of 'lab-.*/short/file\.bin' came"):
        storage.read_bytes("file.bin")
    is_short.append(False)
    assert storage.read_bytes("file.bin") == content


@pytest.mark.parametrize("kept", KEPT)
def test_objects_that_stand_for_folders_are_no_files(s3, root, dataset, tmp_path, kept):
    top = root.rpartition("/")[2]
    files = Storage(root).list_files()
    for folder in ("", "meta/", "data/", "videos/", "empty/"):
        s3.put(f"{top}/{folder}", b"")

    assert Storage(root).list_files() == open_dataset(root).meta.storage.list_files() == files
    assert Storage(root).list_files("meta") == [name for name in files if name.startswith("meta/")]
    assert_all_of(list(make_loader(root, tmp_path, kept)), dataset)


def test_a_slow_answer_is_asked_for_as_often_as_s3fs_does_and_not_more(s3, root, tmp_path):
    storage = Storage(root, CacheSpec(folder=str(tmp_path / "cache")))
    s3.fail(VIDEO, times=1000, delay_s=0.8)

    with pytest.raises(DownloadError, match=r"[Tt]imeout"):
        storage.read_bytes(VIDEO)

    assert s3.keys[f"{root.rpartition('/')[2]}/{VIDEO}"] == 2


def test_the_same_damage_every_time_is_an_error_where_another_etag_was_right(s3, root, folder, tmp_path):
    storage = Storage(root, CacheSpec(folder=str(tmp_path / "cache")))
    assert storage.read_bytes(ROWS) == (Path(folder) / ROWS).read_bytes()
    s3.fail(VIDEO, times=1000, content=altered(folder, VIDEO))

    with pytest.raises(DownloadError, match="other bytes came than the storage has, 2 times"):
        storage.read_bytes(VIDEO)

    assert_nothing_wrong_is_kept(tmp_path, folder)


def test_an_object_with_a_key_of_its_own_is_read_where_another_etag_was_right(s3, root, folder, tmp_path):
    content = (Path(folder) / VIDEO).read_bytes()
    s3.put(f"{root.rpartition('/')[2]}/{VIDEO}", altered(folder, VIDEO), ServerSideEncryption="aws:kms")
    storage = Storage(root, CacheSpec(folder=str(tmp_path / "cache")))
    assert storage.read_bytes(ROWS) == (Path(folder) / ROWS).read_bytes()
    # As S3 has it: an ETag that is the sum of other bytes.
    s3.fail(VIDEO, times=1000, content=content)

    assert storage.read_bytes(VIDEO) == content


WITHOUT_CACHE = {"slow": {"delay_s": 0.6}, "cut": {"cut_after": 0}, "truncated": {"truncate_to": 100}}


@pytest.mark.parametrize("file", [ROWS, VIDEO], ids=["rows", "video"])
@pytest.mark.parametrize("name", WITHOUT_CACHE)
def test_storage_that_fails_is_no_bad_data_without_a_cache(s3, root, monkeypatch, name, file):
    monkeypatch.setattr("raypipe.storage.retry.RETRY_WAITS_S", (0.01,))
    pipe = Pipeline(open_dataset(root), batch_size=6, seed=0, order=ORDER, cache="off", on_bad_episode="skip")
    s3.fail(file, times=10_000, **WITHOUT_CACHE[name])

    with pytest.raises(DownloadError, match=rf"cannot reach .*{file}"):
        list(local_loader(pipe))


@pytest.mark.parametrize("file", [ROWS, VIDEO], ids=["rows", "video"])
@pytest.mark.parametrize("name", WITHOUT_CACHE)
def test_storage_that_fails_for_a_while_costs_no_episode_without_a_cache(s3, root, dataset, name, file):
    pipe = Pipeline(open_dataset(root), batch_size=6, seed=0, order=ORDER, cache="off", on_bad_episode="skip")
    # As often as s3fs asks.
    s3.fail(file, times=2, **WITHOUT_CACHE[name])

    assert_all_of(list(local_loader(pipe)), dataset)
