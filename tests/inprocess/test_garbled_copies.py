"""Copies in the cache of a node that the disk has garbled: they are fetched again, and the dataset is not blamed."""

import errno
import warnings
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
from batches import frames_of_all, local_loader, varied_spec
from hub_server import HubServer
from s3_server import S3Server

from raypipe.dataset import open_dataset
from raypipe.errors import DatasetError, DownloadError
from raypipe.format import forget_indexes
from raypipe.pipeline import Pipeline
from raypipe.storage import CacheSpec, Storage, resolve, retry
from raypipe.testing import write_dataset

FOUND = "fetched again"
KEPT = {"whole": 1 << 30, "ranged": 0}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("local") / "arm", varied_spec())


@pytest.fixture
def memory():
    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/bucket", recursive=True)


@pytest.fixture
def remote(local, memory):
    memory.put(str(local), "/bucket/arm", recursive=True)
    return "memory://bucket/arm"


@pytest.fixture(autouse=True)
def _new_process():
    """As in a new process, which knows nothing of the files."""
    yield
    retry._sure.clear()
    forget_indexes()


def read_all(root, tmp_path, kept, policy):
    cache = CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 30, whole_bytes=KEPT[kept])
    parts = {"on_bad_episode": policy, "max_bad_episodes": 100} if policy == "skip" else {}
    dataset = open_dataset(Storage(str(root), cache))
    return frames_of_all(local_loader(Pipeline(dataset, batch_size=6, seed=3, cache=cache, **parts)))


def cached_files(tmp_path):
    return [path for path in (tmp_path / "cache").iterdir() if len(path.name) == 32]


def is_part_of(path, pattern, local):
    content = path.read_bytes()
    return any(content in one.read_bytes() for one in Path(local).rglob(pattern) if one.is_file())


def garble(path):
    size = path.stat().st_size
    with open(path, "r+b") as stream:
        stream.write(b"\x5a" * size)


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("pattern", ["data/**/*.parquet", "videos/**/*.mp4", "meta/*.json", "meta/**/*.parquet"])
def test_a_copy_that_the_disk_has_garbled_is_fetched_again(local, remote, tmp_path, pattern, kept, policy):
    right = read_all(remote, tmp_path, kept, policy)
    forget_indexes()
    found = [path for path in cached_files(tmp_path) if is_part_of(path, pattern, local)]
    for path in found:
        garble(path)

    with pytest.warns(UserWarning, match=FOUND):
        again = read_all(remote, tmp_path, kept, policy)

    assert found
    assert again == right
    # Of a ranged video, the parts that were read.
    replaced = [is_part_of(path, "*.*", local) for path in found]
    assert any(replaced) if kept == "ranged" and "mp4" in pattern else all(replaced)


def counted(right, asked):
    def ask(self, path, *arguments, **options):
        asked.append(path)
        return right(self, path, *arguments, **options)

    return ask


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("pattern", ["data/**/*.parquet", "videos/**/*.mp4"])
def test_a_file_that_is_bad_where_it_comes_from_is_fetched_once_more_and_no_more(
    local, remote, memory, tmp_path, monkeypatch, pattern, kept
):
    name = sorted(path.relative_to(local).as_posix() for path in local.glob(pattern))[0]
    size = (local / name).stat().st_size
    memory.pipe(f"/bucket/arm/{name}", b"\x5a" * size)
    asked = []
    for what in ("get_file", "cat_file"):
        monkeypatch.setattr(type(memory), what, counted(getattr(type(memory), what), asked))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frames = read_all(remote, tmp_path, kept, "skip")

    num_asked = sum(path.endswith(name) for path in asked)
    assert frames
    assert len(frames) < len(read_all(local, tmp_path, kept, "raise"))
    # Once for each part that was read, and once more for each.
    assert 2 <= num_asked <= (2 if kept == "whole" else 2 * (2 + size // (1 << 20)) + 2)


def test_an_error_of_the_storage_while_a_copy_is_looked_at_again_is_no_bad_data(remote, memory, tmp_path, monkeypatch):
    storage = Storage(remote, CacheSpec(folder=str(tmp_path / "cache")))
    storage.read_bytes("meta/info.json")

    def fail(*_arguments, **_options):
        raise ConnectionResetError("gone")

    monkeypatch.setattr(type(memory), "get_file", fail)

    def read():
        raise DatasetError("no sense")

    with pytest.raises(DownloadError, match="gone"):
        storage.read_again("meta/info.json", read)


def test_a_copy_in_use_is_replaced_under_its_user(remote, tmp_path):
    storage = Storage(remote, CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 20))
    right = storage.read_bytes("meta/info.json")
    held = storage.hold("meta/info.json")
    garble(Path(held.path))
    total = ledger_of(tmp_path)

    def read():
        content = storage.read_bytes("meta/info.json")
        if content != right:
            raise DatasetError("no sense")
        return content

    with open(held.path, "rb") as opened:
        with pytest.warns(UserWarning, match=FOUND):
            again = storage.read_again("meta/info.json", read)

        assert again == right
        assert opened.read() == b"\x5a" * len(right)

    held.close()
    assert Path(held.path).read_bytes() == right
    assert ledger_of(tmp_path) == total


def ledger_of(tmp_path):
    return int((tmp_path / "cache/ledger").read_bytes())


def fail_with(error):
    def fail(*_arguments, **_options):
        raise error

    return fail


def a_file_in_a_small_cache(remote, tmp_path):
    """A storage whose cache has room for one copy of a file, and a reader of it that opens it and meets bad data."""
    probe = Storage(remote, CacheSpec(folder=str(tmp_path / "probe")))
    right = probe.read_bytes("meta/info.json")
    storage = Storage(remote, CacheSpec(folder=str(tmp_path / "cache"), max_bytes=len(right) * 3 // 2))

    def read():
        stream = storage.open_file("meta/info.json")
        if stream.read() != right:
            raise DatasetError("no sense")
        return right

    assert read() == right
    for path in cached_files(tmp_path):
        garble(path)
    return storage, read, right


def test_what_a_reader_that_failed_had_open_takes_no_room_of_the_new_copy(remote, tmp_path):
    storage, read, right = a_file_in_a_small_cache(remote, tmp_path)

    with pytest.warns(UserWarning, match=FOUND):
        assert storage.read_again("meta/info.json", read) == right


def test_bad_data_in_a_copy_that_another_has_open_in_a_full_cache_is_bad_data(remote, tmp_path):
    storage, read, _ = a_file_in_a_small_cache(remote, tmp_path)

    with storage.hold("meta/info.json"), pytest.raises(DatasetError, match="no sense"):
        storage.read_again("meta/info.json", read)


def test_bad_data_in_a_copy_on_a_full_disk_is_bad_data(remote, memory, tmp_path, monkeypatch):
    storage, read, _ = a_file_in_a_small_cache(remote, tmp_path)
    monkeypatch.setattr(type(memory), "get_file", fail_with(OSError(errno.ENOSPC, "No space left on device")))

    with storage.hold("meta/info.json"), pytest.raises(DatasetError, match="no sense"):
        storage.read_again("meta/info.json", read)


@pytest.mark.parametrize("is_garbled", [False, True])
@pytest.mark.parametrize("kind", ["hub", "s3"])
def test_a_copy_that_has_the_sum_of_its_storage_is_not_fetched_again(kind, is_garbled, local, tmp_path):
    name = "meta/tasks.parquet"

    with opened_server(kind, local, tmp_path) as (server, root, num_fetched):
        storage = Storage(root, CacheSpec(folder=str(tmp_path / "cache")))
        right, contents = storage.read_bytes(name), []
        if is_garbled:
            for path in cached_files(tmp_path):
                garble(path)
        server.reset()

        def read():
            contents.append(storage.read_bytes(name))
            raise DatasetError("no sense")

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(DatasetError, match="no sense"):
                storage.read_again(name, read)

        assert num_fetched(name) == int(is_garbled)
        assert contents[1] == right
        assert (contents[0] != right) is is_garbled


@contextmanager
def opened_server(kind, folder, tmp_path):
    """Give a server, the root of a dataset on it, and a function that tells how often a file was sent."""
    if kind == "s3":
        with S3Server() as server, server.as_s3():
            root = server.add("arm", folder)
            yield server, root, lambda name: server.keys[f"arm/{name}"]
        return
    with HubServer() as server, server.as_hub(tmp_path / "hub"):
        server.add_repo("lab/arm", folder, tags=("v3.0",))
        yield server, resolve("lab/arm").uri, lambda _: server.counts["lfs"]
