"""A Hub that fails: every download ends with right bytes, or a `DownloadError` that names file, revision and cause."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub_server import HubServer
from huggingface_hub import constants
from waiting import wait_until

from raypipe.dataset import DownloadSpec, download_dataset
from raypipe.errors import DownloadError

REPO = "lab/arm"
BIG = "videos/top/big.mp4"
SMALL = "meta/info.json"
BIG_BYTES = 5 << 20
SCRIPT = (
    "import sys, json; from raypipe.dataset import DownloadSpec, download_dataset;"
    "print(json.dumps(download_dataset(sys.argv[1], DownloadSpec(out=sys.argv[2])).to_json()))"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A repo of small and large files; what they hold does not matter to a download."""
    top = tmp_path_factory.mktemp("repo")
    contents = {SMALL: b'{"fps": 10}\n', "README.md": b"x" * 3000, BIG: os.urandom(BIG_BYTES), "meta/empty.txt": b""}
    contents |= {f"data/chunk-000/file-{number:03d}.parquet": os.urandom(20_000) for number in range(12)}
    for name, content in contents.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(content)
    return top


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("raypipe.storage.hub.client.FIRST_WAIT_S", 0.02)
    with HubServer() as server, server.as_hub(tmp_path / "cache"):
        server.add_repo(REPO, folder, tags=("v3.0",))
        yield server


def files_of(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and ".cache" not in path.parts
    }


def snapshot_files(cache):
    return {name for one in Path(cache).glob("datasets--*/snapshots/*") for name in files_of(one)}


def fail(hub, fault, times):
    """Let the Hub fail; where it is slow, do not wait for it for long."""
    hub.fail(**{"times": times, **fault})
    return hub.as_hub(constants.HF_HUB_CACHE, timeout_s=0.5 if fault.get("delay_s") or fault.get("pause_s") else 10)


def assert_nothing_wrong_is_kept(cache, folder):
    """Every file under a final name is whole."""
    right = files_of(folder)
    for snapshot in Path(cache).glob("datasets--*/snapshots/*"):
        for name, content in files_of(snapshot).items():
            assert content == right[name], name
    for blob in Path(cache).glob("datasets--*/blobs/*"):
        assert blob.read_bytes() in right.values()


PASSING = {
    "429 for the listing": {"path": "", "kind": "tree", "status": 429, "headers": {"Retry-After": "1"}},
    "500 for the revision": {"path": "", "kind": "revision", "status": 500, "times": 3},
    "503 for a small file": {"path": SMALL, "status": 503, "times": 2},
    "500 for a large file": {"path": BIG, "kind": "lfs", "status": 500, "times": 3},
    "cut before the answer": {"path": SMALL, "cut_after": 0, "times": 2},
    "cut in a small file": {"path": "README.md", "cut_after": 100, "times": 2},
    "cut in a large file": {"path": BIG, "kind": "lfs", "cut_after": (3 << 20) + 5, "times": 1},
    "truncated listing": {"path": "", "kind": "tree", "truncate_to": 50},
    "truncated small file": {"path": "README.md", "truncate_to": 100, "times": 3},
    "truncated large file": {"path": BIG, "kind": "lfs", "truncate_to": 1 << 20, "times": 3},
    "slow answer": {"path": SMALL, "delay_s": 1},
    "slow body": {"path": BIG, "kind": "lfs", "pause_after": 2 << 20, "pause_s": 1},
    "wrong content": {"path": SMALL, "content": b'{"fps": 11}\n'},
    "short content that seems whole": {"path": BIG, "kind": "lfs", "content": b"<html>sorry</html>"},
    "long content": {"path": SMALL, "content": b"x" * 100_000},
    "wrong content of the right length": {"path": BIG, "kind": "lfs", "content": b"\0" * BIG_BYTES},
}


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_leaves_right_bytes(hub, folder, tmp_path, name):
    with fail(hub, PASSING[name], times=1):
        report = download_dataset(REPO)

    assert files_of(report.folder) == files_of(folder)
    assert not any(fault.times for fault in hub.faults), "the fault was not met"
    assert_nothing_wrong_is_kept(tmp_path / "cache", folder)


LASTING = {
    "500": ({"path": BIG, "kind": "lfs", "status": 500}, "the Hub answers 500"),
    "429": ({"path": BIG, "kind": "resolve", "status": 429}, "the Hub answers 429"),
    "long wait": (
        {"path": BIG, "kind": "lfs", "status": 429, "headers": {"Retry-After": "3600"}},
        "after 1 attempts: the Hub answers 429; it asks to wait for 3600 s",
    ),
    "cut": ({"path": BIG, "kind": "lfs", "cut_after": 10}, "Error: "),
    "truncated": ({"path": BIG, "kind": "lfs", "truncate_to": 10}, "RemoteProtocolError: "),
    "slow": ({"path": BIG, "kind": "lfs", "delay_s": 1}, "ReadTimeout: "),
    "wrong": ({"path": BIG, "kind": "lfs", "content": b"\0" * BIG_BYTES}, "its content is not what the Hub lists"),
    "short": ({"path": BIG, "kind": "lfs", "content": b"sorry"}, "it ended after 5 of 5242880 bytes"),
    "missing": ({"path": BIG, "kind": "resolve", "is_missing": True}, "has no file "),
    "refused": ({"path": BIG, "kind": "resolve", "status": 418}, r"refuses it \(status 418 as asked\)"),
}


@pytest.mark.parametrize("name", LASTING)
def test_a_fault_that_lasts_names_file_revision_and_cause(hub, folder, tmp_path, name):
    fault, cause = LASTING[name]

    with (
        fail(hub, fault, times=1000),
        pytest.raises(DownloadError, match=rf"'{BIG}' of dataset 'lab/arm' at revision 'v3.0'") as raised,
    ):
        download_dataset(REPO)

    assert raised.match(cause)
    assert BIG not in snapshot_files(tmp_path / "cache")
    assert_nothing_wrong_is_kept(tmp_path / "cache", folder)
    hub.reset()
    assert files_of(download_dataset(REPO).folder) == files_of(folder)


def test_a_listing_that_fails_names_the_revision(hub):
    hub.fail("", kind="tree", status=502, times=1000)

    with pytest.raises(DownloadError, match=r"dataset 'lab/arm' at revision 'v3.0' .*after 6 attempts: .* 502"):
        download_dataset(REPO)


def test_a_server_that_is_no_hub_is_said(hub):
    hub.fail("", kind="revision", content=b"<html>Log in</html>", times=1000)

    with pytest.raises(DownloadError, match=r"'lab/arm' at revision 'v3.0'.*no JSON, so http.* may be no Hub"):
        download_dataset(REPO)


def test_a_broken_file_is_continued_where_it_broke(hub, folder):
    hub.fail(BIG, kind="lfs", truncate_to=(2 << 20) + 5)
    hub.fail(BIG, kind="lfs", truncate_to=1 << 20)

    report = download_dataset(REPO)

    assert files_of(report.folder) == files_of(folder)
    assert hub.ranges == [f"bytes={(2 << 20) + 5}-", f"bytes={(3 << 20) + 5}-"]


def test_a_server_that_ignores_ranges_does_not_keep_a_download_for_ever(hub, folder):
    hub.fail(BIG, kind="lfs", truncate_to=3 << 20, ignores_ranges=True, times=100)

    with pytest.raises(DownloadError, match=BIG):
        download_dataset(REPO)

    assert hub.counts["lfs"] < 30


def test_a_file_that_changes_in_the_middle_is_fetched_anew(hub, folder):
    hub.fail(BIG, kind="lfs", content=os.urandom(BIG_BYTES), truncate_to=3 << 20)

    report = download_dataset(REPO)

    assert hub.ranges == [f"bytes={3 << 20}-"]
    assert files_of(report.folder) == files_of(folder)


def test_all_threads_wait_when_one_is_told_to(hub, folder):
    hub.fail("", kind="resolve", status=429, headers={"Retry-After": "1"}, times=4)

    began = time.monotonic()
    report = download_dataset(REPO)

    # What was under way when the first 429 came may arrive within moments; then nothing for most of the second.
    gaps = [later - earlier for earlier, later in zip(hub.times, hub.times[1:], strict=False)]
    assert max(gaps) > 0.8
    assert time.monotonic() - began < 60
    assert files_of(report.folder) == files_of(folder)


def test_a_rate_limit_without_retry_after_is_read_from_its_header(hub, folder):
    hub.fail(SMALL, status=429, headers={"RateLimit": '"resolvers";r=0;t=1'})

    began = time.monotonic()
    download_dataset(REPO)

    assert time.monotonic() - began > 1


def test_a_full_disk_is_said(hub, folder, tmp_path, monkeypatch):
    def full(_number):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("raypipe.storage.hub.files.os.fsync", full)
        with pytest.raises(DownloadError, match=r"cannot keep '.*' of dataset 'lab/arm'.*: the disk is full"):
            download_dataset(REPO)

    assert files_of(download_dataset(REPO).folder) == files_of(folder)


def start_download(hub, tmp_path, out="", **variables):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env = {**clean, **hub.environment(tmp_path / "cache"), **variables}
    program = [sys.executable, "-c", SCRIPT, REPO, out]
    return subprocess.Popen(program, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("out", ["", "mine"])
def test_processes_at_once_fetch_each_file_once(hub, folder, tmp_path, out):
    hub.fail("README.md", kind="resolve", delay_s=1)
    target = str(tmp_path / out) if out else ""

    started = [start_download(hub, tmp_path, target) for _ in range(3)]
    reports = [json.loads(one.communicate(timeout=150)[0]) for one in started]

    assert all(one.returncode == 0 for one in started)
    assert len({one["folder"] for one in reports}) == 1
    assert files_of(reports[0]["folder"]) == files_of(folder)
    assert sorted(one["num_fetched"] for one in reports) == [0, 0, len(files_of(folder))]
    assert hub.counts["tree"] == 1
    assert hub.counts["resolve"] == len(files_of(folder))


def test_a_killed_download_goes_on_and_leaves_no_half_file(hub, folder, tmp_path):
    # It is killed long before the pause is over, also on a machine that stands still for a while.
    hub.fail(BIG, kind="lfs", pause_after=(3 << 20) + 7, pause_s=60)
    killed = start_download(hub, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="120")
    partial = tmp_path / "cache/datasets--lab--arm/raypipe/partial"
    wait_until(lambda: any(size_of(path) == (3 << 20) + 7 for path in partial.glob("*")))
    wait_until(lambda: len(snapshot_files(tmp_path / "cache")) == len(files_of(folder)) - 1)

    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)

    assert BIG not in snapshot_files(tmp_path / "cache")
    assert_nothing_wrong_is_kept(tmp_path / "cache", folder)
    hub.reset()
    report = download_dataset(REPO)
    assert files_of(report.folder) == files_of(folder)
    assert hub.ranges == [f"bytes={(3 << 20) + 7}-"]
    assert set(hub.paths) == {BIG}
    assert not list(partial.glob("*"))


def test_a_failed_download_to_a_folder_leaves_the_old_file(hub, folder, tmp_path):
    out = tmp_path / "mine"
    download_dataset(REPO, DownloadSpec(out=str(out)))
    (out / BIG).write_bytes(b"damaged")
    hub.fail(BIG, kind="lfs", status=500, times=1000)

    with pytest.raises(DownloadError, match=BIG):
        download_dataset(REPO, DownloadSpec(out=str(out)))

    assert (out / BIG).read_bytes() == b"damaged"
    hub.reset()
    download_dataset(REPO, DownloadSpec(out=str(out)))
    assert files_of(out) == files_of(folder)


def size_of(path):
    """0 where it has been moved to its place meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
