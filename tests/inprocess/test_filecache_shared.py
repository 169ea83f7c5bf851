"""A file cache in a folder in which others may put things: links are not followed, and waits end."""

import fcntl
import os
import threading
import time

import pytest
from filecache_cases import Fetch, put

from raypipe.errors import ConfigError, DownloadError
from raypipe.storage import FileCache, local_files
from raypipe.storage.cache_folder import name_of


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    return tmp_path / "cache"


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_bytes(b"precious")
    return path


@pytest.mark.parametrize("kind", ["link", "hard link", "link to nothing"])
@pytest.mark.parametrize("name", ["ledger", "bound", f"{name_of('a')}.lock"])
def test_no_link_is_followed(folder, victim, name, kind):
    if kind == "hard link":
        os.link(victim, folder / name)
    else:
        (folder / name).symlink_to(victim if kind == "link" else victim.with_name("new"))

    with pytest.raises(ConfigError, match=rf"(?s){name}.*link"):
        put(FileCache(folder, 1000), "a")

    assert victim.read_bytes() == b"precious"
    assert sorted(os.listdir(victim.parent)) == ["cache", "victim"]


def test_a_link_in_place_of_a_file_is_neither_read_nor_counted(folder, victim):
    (folder / name_of("a")).symlink_to(victim)

    cache = FileCache(folder, 1000)

    assert int((folder / "ledger").read_bytes()) == 0
    with pytest.raises(ConfigError, match="link"):
        cache.hold("a", Fetch("a", 8), 8)
    with pytest.raises(ConfigError, match="link"):
        cache.prefetch("a", Fetch("a", 8), 8).result(30)
    assert victim.read_bytes() == b"precious"


def test_a_fetch_that_links_its_file_leaves_the_others_their_room(folder, victim):
    cache = FileCache(folder, 100)

    with pytest.raises(ConfigError, match="link"):
        cache.hold("a", lambda path, progress: os.link(victim, path))

    put(cache, "b")
    put(cache, "c")


def test_a_pipe_in_place_of_the_ledger_makes_nobody_wait(folder):
    os.mkfifo(folder / "ledger")

    with pytest.raises(ConfigError, match="ledger"):
        FileCache(folder, 1000)


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: os.stat(folder).st_uid + 1)
    monkeypatch.setattr(local_files, "ROOT", -1)

    with pytest.raises(ConfigError, match="belongs to another user"):
        FileCache(folder, 1000)

    assert os.listdir(folder) == []


def test_a_folder_is_made_for_this_user_alone_and_may_be_a_link_of_this_user(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")

    put(FileCache(tmp_path / "link", 1000), "a")
    put(FileCache(tmp_path / "made/cache", 1000), "a")

    assert name_of("a") in os.listdir(tmp_path / "disk")
    assert os.stat(tmp_path / "made/cache").st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["ledger", f"{name_of('a')}.lock"])
def test_a_wait_for_a_lock_that_nobody_gives_up_is_said_and_ends(folder, name, monkeypatch):
    cache = FileCache(folder, 1000)
    monkeypatch.setattr(local_files, "SAY_S", 0.05)
    monkeypatch.setattr(local_files, "WAIT_S", 0.3)
    with open(folder / name, "ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)

        with pytest.warns(UserWarning, match=f"waits for .*{name}"), pytest.raises(DownloadError, match=name):
            put(cache, "a")

    put(cache, "a")


def test_a_wait_for_a_fetch_that_goes_on_has_no_end(folder, monkeypatch):
    class Slow(Fetch):
        def during(self, written):
            started.set()
            time.sleep(0.03)

    # It takes longer than the wait, and moves so often that no pause of a busy machine is taken for a standstill.
    started, slow = threading.Event(), Slow("a", 1000, piece=10)
    monkeypatch.setattr(local_files, "WAIT_S", 2.0)
    cache = FileCache(folder, 2000)
    thread = threading.Thread(target=lambda: cache.hold("a", slow, 1000).close())
    thread.start()
    assert started.wait(30)

    cache.hold("a", slow, 1000).close()

    thread.join()
    assert slow.calls == 1
