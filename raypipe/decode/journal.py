"""Which videos a process was decoding on this machine when it died.

A decoder that crashes takes its process with it. So a process first writes down what it decodes, and a process that
wants to decode the same later finds the entries of dead ones. Decides what counts as a death, not what follows from it.

::

    raypipe-UID/decoding.1     a line per process, a slot per thread that decodes now
        line 0   | key |  0  |  0  | ...     locked: its process lives
        line 1   |  0  | key |  0  | ...     not locked: its process died while it decoded `key`
    raypipe-UID/deaths/KEY/    an empty file per death

The kernel drops the lock of a process that ends, however it ends. A process killed for another reason counts too, but
not while it waits for the network: waiting takes long and is not decoding. Without such locks (Windows), or if nothing
can be written, the journal is off; it is never an error.
"""

import hashlib
import os
import signal
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raypipe.storage import Storage

with suppress(ImportError):
    # Missing on Windows, where the journal has no folder and never uses it.
    import fcntl

NUM_SLOTS: Final = 64
"""Threads of one process that the journal records; any more decode unrecorded."""

FORGET_S: Final = 7 * 24 * 3600.0
"""A death is forgotten after a week: by then the file, the codec or the machine may be another."""

_SLOT_BYTES: Final = 8
_LINE_BYTES: Final = NUM_SLOTS * _SLOT_BYTES
_MAX_LINES: Final = 4096
_NO_SLOT: Final = -1
_LOOK_S: Final = 1.0

death_scope: ContextVar[str] = ContextVar("raypipe_journal_scope", default="")
"""The scope in which the journal counts deaths now."""


_mark: ContextVar["Mark | None"] = ContextVar("raypipe_mark", default=None)


@contextmanager
def marked(mark: "Mark") -> Iterator[None]:
    """Set the mark while the context lasts, except inside `unmarked`."""
    mark.set()
    token = _mark.set(mark)
    try:
        yield
    finally:
        _mark.reset(token)
        mark.lift()


@contextmanager
def unmarked() -> Iterator[None]:
    """Lift the mark of this thread, if it has one, while the context lasts: the thread waits for bytes."""
    mark = _mark.get()
    if mark is None:
        yield
        return
    mark.lift()
    # A nested `unmarked` must not lift it again.
    token = _mark.set(None)
    try:
        yield
    finally:
        _mark.reset(token)
        mark.set()


@contextmanager
def journal_scope(name: str) -> Iterator[None]:
    """Count only deaths within the scope `name` while the context lasts.

    In a Ray task `name` is the task's id, which stays the same when Ray retries the task after its process has died.
    Ray never retries tasks that it ends itself, for example with their job, and their videos are not to blame.
    """
    token = death_scope.set(name)
    try:
        yield
    finally:
        death_scope.reset(token)


def video_key(storage: Storage, name: str, episode: int, camera: str) -> int:
    """Return the number of an episode in its video, in this scope.

    A replaced local file gives another number. It numbers episodes, not spans: a resume cuts spans at other frames.
    """
    # If the file is missing, opening it raises the error.
    version = storage.version(name) if storage.is_local else ""
    parts = [death_scope.get(), storage.uri, name, str(episode), camera, version]
    digest = hashlib.blake2b(os.fsencode("\0".join(parts)), digest_size=_SLOT_BYTES).digest()
    # 0 is an empty slot.
    return int.from_bytes(digest, "little") or 1


class _Slot:
    """The mark of a thread in the line of its process."""

    def __init__(self, journal: "Journal", slot: int, key: int) -> None:
        self.key = key
        self._journal = journal
        self._slot = slot

    def set(self) -> None:
        self._journal.write_slot(self._slot, self.key)

    def lift(self) -> None:
        self._journal.write_slot(self._slot, 0)


class Alarm:
    """The mark of a subprocess: ends this process after it has decoded for `left_s`."""

    def __init__(self, left_s: float) -> None:
        self._left_s = left_s

    def set(self) -> None:
        """Let the time run."""
        # 0 would turn the timer off.
        signal.setitimer(signal.ITIMER_REAL, max(self._left_s, 1e-6))

    def lift(self) -> None:
        """Stop the time."""
        self._left_s = signal.setitimer(signal.ITIMER_REAL, 0.0)[0]


Mark = _Slot | Alarm
"""Shows that a thread decodes, from `set` to `lift`."""


class Journal:
    """What this process decodes now, and what others decoded when they died; for all threads.

    A process may have at most one per folder: a process does not lock itself out, and closing a file drops all locks
    that the process has on it. So the file stays open until the process ends.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = os.path.join(folder, "decoding.1")
        self.deaths = os.path.join(folder, "deaths")
        """The folder with the recorded deaths; users may remove it."""
        self._lock = threading.Lock()
        self._is_tried = False
        self._file = -1
        self._line = -1
        self._suspects: frozenset[str] = frozenset()
        self._known_until = 0.0
        # Stays empty if the journal is off.
        self._free: list[int] = []
        self._job = threading.local()

    def count_deaths(self, key: int) -> int:
        """Return how many processes died while they decoded `key`; 0 if the journal is off."""
        self._open_once()
        try:
            self._bury_dead(key)
            since = time.time() - FORGET_S
            with os.scandir(self._grave(key)) as deaths:
                return sum(death.stat().st_mtime > since for death in deaths)
        except OSError:
            # Nearly always because there is no such folder.
            return 0

    def is_suspect(self, key: int) -> bool:
        """Return whether to look for deaths over `key`; looks at most once a second, for all keys at once."""
        now = time.monotonic()
        if now >= self._known_until:
            self._open_once()
            # In this order: another thread must not take the old list for a new one.
            self._suspects = self._find_suspects()
            self._known_until = now + _LOOK_S
        return f"{key:016x}" in self._suspects

    def _find_suspects(self) -> frozenset[str]:
        """Return the keys that processes decode now or decoded when they died, and those with recorded deaths."""
        found: list[str] = []
        with suppress(OSError):
            slots = self._read_slots()
            found += [f"{key:016x}" for key in slots[slots != 0].tolist()]
            found += os.listdir(self.deaths)
        return frozenset(found)

    def _read_slots(self) -> NDArray[np.uint64]:
        size = os.fstat(self._file).st_size // _SLOT_BYTES * _SLOT_BYTES
        return np.frombuffer(os.pread(self._file, size, 0), dtype="<u8")

    def note_deaths(self, key: int, times: int = 2) -> None:
        """Record deaths over `key` that a subprocess died in place of others; does nothing if the journal is off."""
        self._open_once()
        with suppress(OSError):
            for _ in range(times):
                self._write_death(key)

    @contextmanager
    def marking(self, key: int) -> Iterator[None]:
        """Record that this thread decodes `key` while the context lasts."""
        mark: _Slot | None = getattr(self._job, "mark", None)
        if mark is None:
            with self._slot() as slot, marked(_Slot(self, slot, key)):
                yield
            return
        mark.key = key
        mark.set()
        try:
            yield
        except BaseException:
            mark.key = 0
            mark.lift()
            raise

    @contextmanager
    def job(self) -> Iterator[None]:
        """Keep one slot for everything that this thread decodes within the context.

        The mark stays set from one clip to the next, except inside `unmarked`: setting and lifting it takes 7% of the
        time to decode a clip of small frames.
        """
        with self._slot() as slot:
            mark = self._job.mark = _Slot(self, slot, 0)
            try:
                with marked(mark):
                    yield
            finally:
                del self._job.mark

    @contextmanager
    def _slot(self) -> Iterator[int]:
        self._open_once()
        with self._lock:
            slot = self._free.pop() if self._free else _NO_SLOT
        try:
            yield slot
        finally:
            if slot != _NO_SLOT:
                self._free.append(slot)

    def _open_once(self) -> None:
        if self._is_tried:
            return
        with self._lock:
            if not self._is_tried:
                with suppress(OSError):
                    self._open()
                self._is_tried = True

    def _open(self) -> None:
        make_private_folder(self._folder)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        self._forget_old()
        for line in range(_MAX_LINES):
            if self._try_lock(line):
                self._bury(line)
                self._line = line
                self._free.extend(range(NUM_SLOTS))
                return

    def _bury_dead(self, key: int) -> None:
        """Count the deaths of processes that left `key` behind."""
        for line in set((np.flatnonzero(self._read_slots() == np.uint64(key)) // NUM_SLOTS).tolist()) - {self._line}:
            # Two threads of one process would both get the lock of a line.
            with self._lock:
                if self._try_lock(line):
                    try:
                        self._bury(line)
                    finally:
                        fcntl.lockf(self._file, fcntl.LOCK_UN, _LINE_BYTES, line * _LINE_BYTES)

    def _bury(self, line: int) -> None:
        """Record a death for every key in a dead process's line, and clear the line; the caller holds its lock."""
        left = os.pread(self._file, _LINE_BYTES, line * _LINE_BYTES).ljust(_LINE_BYTES, b"\0")
        for key in set(np.frombuffer(left, dtype="<u8").tolist()) - {0}:
            self._write_death(key)
        os.pwrite(self._file, bytes(_LINE_BYTES), line * _LINE_BYTES)

    def _write_death(self, key: int) -> None:
        # One file per death: two processes that count at once lose none.
        os.makedirs(self._grave(key), mode=0o700, exist_ok=True)
        open(os.path.join(self._grave(key), uuid.uuid4().hex), "xb").close()

    def _try_lock(self, line: int) -> bool:
        with suppress(BlockingIOError, PermissionError):
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, _LINE_BYTES, line * _LINE_BYTES)
            return True
        return False

    def write_slot(self, slot: int, key: int) -> None:
        """Record what the thread of a slot decodes; 0 for nothing."""
        if slot == _NO_SLOT:
            return
        # Not mapped into memory: on a full disk a write raises an error, but a store would end the process.
        with suppress(OSError):
            os.pwrite(self._file, key.to_bytes(_SLOT_BYTES, "little"), self._line * _LINE_BYTES + slot * _SLOT_BYTES)

    def _grave(self, key: int) -> str:
        return os.path.join(self.deaths, f"{key:016x}")

    def _forget_old(self) -> None:
        since = time.time() - FORGET_S
        for folder, _, deaths in os.walk(self.deaths, topdown=False):
            for death in deaths:
                path = os.path.join(folder, death)
                # Another process may remove it at the same moment.
                with suppress(OSError):
                    if os.stat(path).st_mtime <= since:
                        os.remove(path)
            with suppress(OSError):
                os.rmdir(folder)


_journals: dict[int, Journal] = {}
"""By process id: after a fork, the child finds its parent's entry here and must not use it."""


def process_journal() -> Journal:
    """Return the journal of this process."""
    process = os.getpid()
    if process not in _journals:
        _journals.setdefault(process, Journal(_default_folder()))
    return _journals[process]


def _default_folder() -> str:
    try:
        return os.path.join(tempfile.gettempdir(), f"raypipe-{os.getuid()}")
    except (OSError, AttributeError):
        # No folder for temporary files, or Windows: this folder cannot be made, so the journal is off.
        return ""


def make_private_folder(folder: str) -> None:
    """Make a folder that only this user may open, unless it exists; raise if it belongs to another user."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        # Folders for temporary files are open to all: someone else may have put it there.
        raise PermissionError(f"{folder!r} belongs to another user")
