"""What goes first when a file cache needs room, and what its records say."""

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import ConfigError, DownloadError
from raypipe.storage import FileCache
from raypipe.storage.cache_folder import (
    KEEP_AHEAD_NS,
    FolderEntry,
    Survey,
    name_of,
    removal_order,
)
from raypipe.storage.node_cache import is_disk_full

NOW_NS = 1_800_000_000 * 10**9

entries = st.lists(
    st.builds(
        FolderEntry,
        name=st.integers(0, 10**6).map(lambda number: name_of(str(number))),
        size_bytes=st.integers(0, 10**12),
        stamp_ns=st.integers(NOW_NS - 3 * KEEP_AHEAD_NS, NOW_NS + KEEP_AHEAD_NS // 2),
        is_unused=st.booleans(),
    ),
    max_size=30,
)


@given(entries)
def test_removal_order_has_every_file_once(found):
    ordinary, awaited = removal_order(found, NOW_NS)

    assert sorted([*ordinary, *awaited]) == sorted(found)


@given(entries)
def test_removal_order_starts_with_the_least_recently_used(found):
    ordinary, _ = removal_order(found, NOW_NS)

    stamps = [entry.stamp_ns for entry in ordinary]
    assert stamps == sorted(stamps)


@given(entries)
def test_removal_order_keeps_what_was_just_fetched_ahead_to_the_last_and_nothing_else(found):
    ordinary, awaited = removal_order(found, NOW_NS)

    assert all(entry.is_unused for entry in awaited)
    assert all(not entry.is_unused or NOW_NS - entry.stamp_ns >= KEEP_AHEAD_NS for entry in ordinary)


def test_removal_order_takes_the_last_fetched_ahead_first_since_it_is_needed_last():
    first, second = (
        FolderEntry(name_of(text), 1, stamp, True) for text, stamp in (("a", NOW_NS - 2), ("b", NOW_NS - 1))
    )

    _, awaited = removal_order([first, second], NOW_NS)

    assert awaited == [second, first]


def test_removal_order_gives_up_on_what_was_fetched_ahead_and_forgotten():
    forgotten = FolderEntry(name_of("a"), 1, NOW_NS - KEEP_AHEAD_NS, True)

    assert removal_order([forgotten], NOW_NS) == ([forgotten], [])


@given(st.text("ab/@\udcff", max_size=6), st.text("ab/@\udcff", max_size=6))
def test_names_tell_keys_apart(one, other):
    assert (name_of(one) == name_of(other)) == (one == other)


def test_a_survey_counts_whole_files_and_reservations():
    survey = Survey(
        finished=[FolderEntry("a", 10, 0, False), FolderEntry("b", 20, 0, True)],
        fetching=[FolderEntry("c", 300, 0, True), FolderEntry("d", 4000, 0, False)],
    )

    assert survey.total_bytes == 4330


def test_a_full_disk_is_recognised_behind_other_errors():
    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = DownloadError("cannot write")
    wrapped.__cause__ = full
    met = RuntimeError("cannot tidy up")
    met.__context__ = wrapped

    assert is_disk_full(full)
    assert is_disk_full(met)
    assert is_disk_full(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert not is_disk_full(OSError(errno.EIO, "Input/output error"))
    assert not is_disk_full(DownloadError("no space left"))


@pytest.mark.parametrize(("arguments", "told"), [((0, 4), "max_bytes.*got 0"), ((1, 0), "prefetch_threads.*got 0")])
def test_a_cache_without_room_or_threads_is_refused(arguments, told, tmp_path):
    max_bytes, threads = arguments

    with pytest.raises(ConfigError, match=told):
        FileCache(tmp_path / "cache", max_bytes, prefetch_threads=threads)

    assert not (tmp_path / "cache").exists()
