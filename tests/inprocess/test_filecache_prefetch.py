"""Files that are fetched ahead: there in time, without taking the room of each other or of what is in use."""

import os
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
from filecache_cases import Fetch, Gated, data_bytes, extras, is_there, never, put
from waiting import PATIENCE_S, wait_until

from raypipe.errors import ConfigError, DownloadError
from raypipe.storage import FileCache
from raypipe.storage.cache_folder import KEEP_AHEAD_NS, name_of


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def test_prefetch_brings_a_file_that_is_then_there_and_free_to_go(folder):
    cache = FileCache(folder, 300)

    assert cache.prefetch("a", Fetch("a", 300), 300).result(PATIENCE_S)
    assert cache.prefetch("a", never, 300).result(PATIENCE_S)
    with cache.hold("a", never, 300) as held:
        assert os.path.getsize(held.path) == 300
    put(cache, "b")

    assert not is_there(cache, "a")
    stats = cache.stats()
    assert (stats.prefetched, stats.hits, stats.misses, stats.bytes_fetched) == (1, 1, 1, 400)


def test_prefetch_takes_the_room_of_used_files_but_not_of_files_that_were_fetched_ahead(folder):
    cache, other = FileCache(folder, 300), FileCache(folder, 300)
    put(cache, "old")
    for key in "abc":
        assert cache.prefetch(key, Fetch(key, 100), 100).result(PATIENCE_S)
    assert not is_there(cache, "old")

    assert not other.prefetch("d", never, 100).result(PATIENCE_S)
    assert other.stats().prefetches_refused == 1
    with other.hold("a", never, 100):
        pass
    assert other.prefetch("d", Fetch("d", 100), 100).result(PATIENCE_S)

    assert [is_there(cache, key) for key in "abcd"] == [False, True, True, True]
    assert extras(folder) == []


def test_prefetch_takes_the_room_of_an_older_copy_of_another_size(folder):
    cache = FileCache(folder, 100)
    assert cache.prefetch("a", Fetch("a", 90), 90).result(PATIENCE_S)

    assert cache.prefetch("a", Fetch("a", 95), 95).result(PATIENCE_S)

    assert data_bytes(folder) == 95
    assert cache.stats().prefetches_refused == 0


def test_prefetch_of_unknown_size_is_refused_when_it_has_grown_into_others(folder):
    cache = FileCache(folder, 300)
    assert cache.prefetch("a", Fetch("a", 200), 200).result(PATIENCE_S)

    assert not cache.prefetch("b", Fetch("b", 200, piece=10)).result(PATIENCE_S)

    assert data_bytes(folder) == 200
    assert extras(folder) == []


def test_a_file_that_is_asked_for_takes_used_ones_first_and_then_the_last_fetched_ahead(folder):
    cache = FileCache(folder, 300)
    for key in "ab":
        assert cache.prefetch(key, Fetch(key, 100), 100).result(PATIENCE_S)
    put(cache, "c", "d")
    assert [is_there(cache, key) for key in "abcd"] == [True, True, False, True]

    put(cache, "e", size=200)

    assert [is_there(cache, key) for key in "abde"] == [True, False, False, True]


def test_what_was_fetched_ahead_and_forgotten_is_no_hindrance_for_ever(folder):
    cache = FileCache(folder, 100)
    assert cache.prefetch("a", Fetch("a", 100), 100).result(PATIENCE_S)
    long_ago = time.time_ns() - KEEP_AHEAD_NS
    os.utime(folder / name_of("a"), ns=(0, long_ago))

    assert cache.prefetch("b", Fetch("b", 100), 100).result(PATIENCE_S)


def test_asking_ahead_for_a_file_that_is_there_keeps_it(folder):
    cache = FileCache(folder, 200)
    put(cache, "a", "b")

    assert cache.prefetch("a", never, 100).result(PATIENCE_S)
    put(cache, "c")

    assert [is_there(cache, key) for key in "abc"] == [True, False, True]


def test_a_use_waits_for_what_is_being_fetched_ahead_of_the_file_itself_or_in_its_room(folder):
    cache, ahead = FileCache(folder, 300), Gated("a", 300)
    coming = cache.prefetch("a", ahead, 300)
    assert cache.prefetch("a", never, 300) is coming
    assert ahead.started.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(cache.hold, "b", Fetch("b", 100), 100)
        wait_until((folder / f"{name_of('b')}.lock").exists)
        ahead.gate.set()
        assert os.path.getsize(held.result(PATIENCE_S).path) == 100

    assert coming.result(PATIENCE_S)
    assert not is_there(cache, "a")


def test_a_use_does_not_wait_for_a_fetch_ahead_whose_room_would_not_be_enough(folder):
    cache, ahead = FileCache(folder, 300), Gated("a", 100)
    with cache.hold("used", Fetch("used", 100), 100):
        coming = cache.prefetch("a", ahead, 100)
        assert ahead.started.wait(PATIENCE_S)

        with pytest.raises(DownloadError, match=r"100 are in use.*0 are being fetched for others, 100 ahead"):
            cache.hold("b", never, 201)

        ahead.gate.set()
        assert coming.result(PATIENCE_S)


def test_an_error_ahead_is_in_the_result_and_keeps_nobody_from_the_file(folder):
    cache = FileCache(folder, 300)
    coming = cache.prefetch("a", Fetch("a", 99), 100)

    with pytest.raises(DownloadError, match="99 were fetched"):
        coming.result(PATIENCE_S)

    assert cache.stats().prefetches_failed == 1
    put(cache, "a")


def test_closing_cancels_what_is_fetched_ahead(folder):
    cache, running = FileCache(folder, 1000, prefetch_threads=1), Gated("a", 300)
    first, second = cache.prefetch("a", running, 300), cache.prefetch("b", never, 300)
    assert running.started.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(cache.close)
        wait_until(second.cancelled)
        running.gate.set()
        closing.result(PATIENCE_S)

    with pytest.raises(CancelledError):
        first.result(0)
    assert extras(folder) == []
    assert data_bytes(folder) == 0
    with pytest.raises(ConfigError, match="the cache is closed"):
        cache.prefetch("c", never, 300)
    put(cache, "c")
