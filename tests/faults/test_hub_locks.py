"""Locks in the Hub's cache, which others may share and hold: waits for them are said, and end."""

import fcntl
import os
import threading
import time

import pytest
from hub_server import HubServer

from raypipe.dataset import download_dataset
from raypipe.errors import DownloadError
from raypipe.storage.hub.cache import cache_place, locked, resolve
from raypipe.storage.hub.files import open_files

REPO = "lab/arm"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("raypipe.storage.local_files.SAY_S", 0.5)
    monkeypatch.setattr("raypipe.storage.local_files.WAIT_S", 3.0)
    (tmp_path / "arm/meta").mkdir(parents=True)
    (tmp_path / "arm/meta/info.json").write_text("{}")
    with HubServer() as server, server.as_hub(tmp_path / "cache"):
        server.add_repo(REPO, tmp_path / "arm", tags=("v3.0",))
        yield server


def take(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o664)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def test_a_lock_that_another_holds_for_ever_is_said_and_given_up(hub, tmp_path):
    fd = take(tmp_path / "cache/.locks/datasets--lab--arm/raypipe.lock")

    with (
        pytest.warns(UserWarning, match=r"waits for the lock of .*raypipe\.lock"),
        pytest.raises(DownloadError, match=r"raypipe\.lock' for \d+ s, and nothing has moved\. .*fuser"),
    ):
        download_dataset(REPO)

    os.close(fd)
    assert download_dataset(REPO).num_files == 1


@pytest.mark.filterwarnings("ignore:waits for the lock")
def test_a_holder_that_is_at_work_is_waited_for(hub, tmp_path):
    fd = take(tmp_path / "cache/.locks/datasets--lab--arm/raypipe.lock")
    partial = tmp_path / "cache/datasets--lab--arm/raypipe/partial"
    partial.mkdir(parents=True)

    def work():
        # Longer than the wait, and so often that no pause of a busy machine is taken for a standstill.
        for size in range(48):
            (partial / "half").write_bytes(b"x" * size)
            time.sleep(0.1)
        os.close(fd)

    worker = threading.Thread(target=work)
    worker.start()
    report = download_dataset(REPO)
    worker.join()

    assert report.num_files == 1


@pytest.mark.filterwarnings("ignore:waits for the lock")
def test_a_holder_that_fetches_nothing_yet_is_waited_for(hub, monkeypatch):
    monkeypatch.setattr("raypipe.storage.hub.cache._TOUCH_S", 0.3, raising=False)
    place = cache_place(resolve(REPO))
    is_held = threading.Event()

    def compare_hashes():
        with locked(place):
            is_held.set()
            time.sleep(5)

    holder = threading.Thread(target=compare_hashes)
    holder.start()
    is_held.wait()

    report = download_dataset(REPO)
    holder.join()

    assert report.num_files == 1
    assert "raypipe-lock" not in {thread.name for thread in threading.enumerate()}


def test_a_lock_of_the_listing_that_another_holds_for_ever_does_not_keep_readers_from_asking(hub, tmp_path):
    source = resolve(REPO)
    fd = take(tmp_path / f"cache/.locks/datasets--lab--arm/{source.commit}.lock")

    with pytest.warns(UserWarning, match="waits for the lock"):
        assert list(open_files(source).listing) == ["meta/info.json"]
    os.close(fd)
