"""The journal of one process, and what dead processes have left in it."""

import os
import stat
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.decode import journal as journal_module
from raypipe.decode.journal import FORGET_S, NUM_SLOTS, Journal, journal_scope, unmarked, video_key
from raypipe.storage import Storage, open_storage

KEY, OTHER = 7, 8


def leave(folder, *processes) -> None:
    """Write the lines that processes left when they died: the keys that each was decoding."""
    folder.mkdir(mode=0o700, exist_ok=True)
    lines = np.zeros((len(processes), NUM_SLOTS), dtype="<u8")
    for line, keys in zip(lines, processes, strict=True):
        line[: len(keys)] = keys
    (folder / "decoding.1").write_bytes(lines.tobytes())


def marks(folder) -> list[int]:
    slots = np.frombuffer((folder / "decoding.1").read_bytes(), dtype="<u8")
    return slots[slots != 0].tolist()


def deaths(folder) -> list[Path]:
    return sorted((folder / "deaths").glob("*/*"))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "raypipe"


@given(st.lists(st.lists(st.integers(1, 6), max_size=4), max_size=8))
def test_count_is_that_of_the_dead_processes_that_decoded_it(tmp_path_factory, processes):
    folder = tmp_path_factory.mktemp("journal")
    leave(folder, *processes)
    journal = Journal(str(folder))

    counts = {key: journal.count_deaths(key) for key in range(1, 7)}

    assert counts == {key: sum(key in keys for keys in processes) for key in range(1, 7)}


def test_a_death_is_counted_once_however_often_it_is_asked_for(folder):
    journal = Journal(str(folder))
    journal.count_deaths(KEY)
    leave(folder, [], [KEY, OTHER, KEY])

    counts = [journal.count_deaths(key) for key in (KEY, KEY, OTHER, OTHER)]

    assert counts == [1, 1, 1, 1]
    assert marks(folder) == []


def test_what_is_being_decoded_is_marked_and_no_death(folder):
    journal = Journal(str(folder))

    with journal.marking(KEY), journal.marking(OTHER):
        marked, count = sorted(marks(folder)), journal.count_deaths(KEY)

    assert marked == [KEY, OTHER]
    assert count == 0
    assert marks(folder) == []


def test_an_exception_clears_the_mark(folder):
    journal = Journal(str(folder))

    with pytest.raises(RuntimeError), journal.marking(KEY):
        raise RuntimeError

    assert marks(folder) == []


def test_more_threads_than_slots_decode_unseen(folder):
    journal = Journal(str(folder))
    markings = [journal.marking(key) for key in range(1, NUM_SLOTS + 4)]
    for marking in markings:
        marking.__enter__()

    marked = marks(folder)
    for marking in markings:
        marking.__exit__(None, None, None)

    assert len(marked) == NUM_SLOTS
    assert marks(folder) == []
    with journal.marking(KEY):
        assert marks(folder) == [KEY]


def test_a_death_is_forgotten_after_a_week(folder):
    leave(folder, [KEY], [KEY])
    journal = Journal(str(folder))
    journal.count_deaths(KEY)
    old = time.time() - FORGET_S - 60
    os.utime(deaths(folder)[0], (old, old))

    assert journal.count_deaths(KEY) == 1
    Journal(str(folder)).count_deaths(OTHER)
    assert len(deaths(folder)) == 1


def test_the_folder_is_for_its_user_alone(folder):
    Journal(str(folder)).count_deaths(KEY)

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_not_used(folder, monkeypatch):
    leave(folder, [KEY])
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    journal = Journal(str(folder))

    with journal.marking(OTHER):
        assert marks(folder) == [KEY]
    assert journal.count_deaths(KEY) == 0


@pytest.mark.parametrize("place", ["", "file", "file/below"])
def test_where_nothing_can_be_written_the_journal_is_off(tmp_path, place):
    (tmp_path / "file").touch()
    journal = Journal(str(tmp_path / place) if place else "")

    with journal.marking(KEY):
        count = journal.count_deaths(KEY)

    assert count == 0


def test_a_damaged_journal_is_no_error(folder):
    folder.mkdir(mode=0o700)
    (folder / "decoding.1").write_bytes(b"\1" * 1003)
    journal = Journal(str(folder))

    with journal.marking(KEY):
        count = journal.count_deaths(KEY)

    assert count == 0


def test_without_folder_for_temporary_files_the_journal_is_off(monkeypatch):
    monkeypatch.delattr(os, "getuid")
    monkeypatch.setattr(journal_module, "_journals", {})
    journal = journal_module.process_journal()

    with journal.marking(KEY):
        assert journal.count_deaths(KEY) == 0


VIDEO = ("videos/a.mp4", 3, "top")


@pytest.fixture
def storage(tmp_path):
    (tmp_path / "videos").mkdir()
    for name in "ab":
        (tmp_path / f"videos/{name}.mp4").write_bytes(b"1234")
    return open_storage(tmp_path)


@pytest.mark.parametrize(
    "other", [("videos/b.mp4", 3, "top"), ("videos/a.mp4", 4, "top"), ("videos/a.mp4", 3, "wrist")]
)
def test_another_file_episode_or_camera_has_another_key(storage, other):
    assert video_key(storage, *VIDEO) == video_key(storage, *VIDEO)
    assert video_key(storage, *VIDEO) != video_key(storage, *other)


def test_a_replaced_file_has_another_key(storage, tmp_path):
    before = video_key(storage, *VIDEO)
    (tmp_path / "videos/a.mp4").write_bytes(b"12345")

    assert video_key(storage, *VIDEO) != before


def test_missing_and_remote_files_have_keys(storage):
    remote = Storage("memory://somewhere")

    assert video_key(storage, "videos/c.mp4", 3, "top") > 0
    assert video_key(remote, *VIDEO) == video_key(remote, *VIDEO) != video_key(storage, *VIDEO)


def test_a_scope_has_keys_of_its_own(storage):
    outside = video_key(storage, *VIDEO)
    with journal_scope("a task"):
        inside = video_key(storage, *VIDEO)
    with journal_scope("another"):
        elsewhere = video_key(storage, *VIDEO)

    assert len({outside, inside, elsewhere}) == 3
    assert video_key(storage, *VIDEO) == outside


def test_a_thread_that_waits_for_bytes_has_no_mark(folder):
    journal, seen = Journal(str(folder)), []

    with journal.marking(KEY):
        seen.append(marks(folder))
        with unmarked():
            with unmarked():
                pass
            seen.append(marks(folder))
        seen.append(marks(folder))
    seen.append(marks(folder))
    with unmarked():
        seen.append(marks(folder))

    assert seen == [[KEY], [], [KEY], [], []]


def test_an_error_while_a_thread_waits_leaves_no_mark(folder):
    journal = Journal(str(folder))

    with pytest.raises(TimeoutError), journal.marking(KEY), unmarked():
        raise TimeoutError

    assert marks(folder) == []


def test_a_job_has_one_mark_for_what_it_decodes_now(folder):
    journal, seen = Journal(str(folder)), []

    with journal.job():
        seen.append(marks(folder))
        with journal.marking(KEY):
            seen.append(marks(folder))
        with journal.marking(OTHER):
            seen.append(marks(folder))
        with unmarked():
            seen.append(marks(folder))
        with pytest.raises(RuntimeError), journal.marking(KEY), unmarked():
            raise RuntimeError
        seen.append(marks(folder))

    assert seen == [[], [KEY], [OTHER], [], []]
    assert marks(folder) == []
