"""The folder of a node cache: its kernel locks, and the bytes in it.

::

    FOLDER/ledger        at least the bytes in the folder; locked while files come and go
    FOLDER/bound         how many bytes may be in the folder, as last given by a cache with a bound of its own
    FOLDER/HASH          a whole file; a shared lock on it means that it is in use
    FOLDER/HASH.lock     a process is fetching this file; as large as the bytes reserved for it, but empty on the disk
    FOLDER/HASH.part     the part of the file that has been fetched

The ledger is a number that is never below the bytes present or reserved. It goes up before files grow, and down after
files are gone, so a process killed in between leaves it too high, never too low. Counting the files makes it exact
again, and removes what dead processes have left half-fetched: their locks are free. Only the holder of the ledger's
lock reserves, places or removes files.
"""

import hashlib
import os
import re
import shutil
import stat
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from raypipe.errors import ConfigError, DownloadError
from raypipe.storage.local_files import NEVER_USED_NS, FileLock, check_own_folder, lock_file

SURVEY_S: Final = 60.0
"""How long to use the order of removal before surveying the folder again. The order stays valid for longer, but only a
survey finds bytes that killed processes had reserved."""

KEEP_AHEAD_NS: Final = 600 * 10**9
"""How long a file that was fetched ahead and not used yet is removed last. After ten minutes the process that wanted it
has died or no longer wants it; without a limit, files that a dead job fetched ahead would stay forever."""

_ANY_STAMP: Final = -1
_NAME: Final = re.compile(r"([0-9a-f]{32})(\.lock|\.part.*)?")
_RECORD: Final = re.compile(rb"\d{20}")


class FolderEntry(NamedTuple):
    """A whole file of the cache, or the bytes reserved for one that a living process is fetching."""

    name: str
    size_bytes: int
    stamp_ns: int
    """The time of its last use or fetch."""
    is_unused: bool
    """Whether it is fetched ahead, and not used since: no caller waits for it."""


class Survey(NamedTuple):
    """Everything that counts in the folder at one moment."""

    finished: list[FolderEntry]
    fetching: list[FolderEntry]

    @property
    def total_bytes(self) -> int:
        """The bytes present or reserved."""
        return sum(entry.size_bytes for entry in (*self.finished, *self.fetching))


def name_of(key: str) -> str:
    """Return the name of the file that `key` stands for."""
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def removal_order(entries: Iterable[FolderEntry], now_ns: int) -> tuple[list[FolderEntry], list[FolderEntry]]:
    """Return the files in order of removal: the ordinary ones, and those to remove only if these are not enough.

    Ordinary files go least recently used first. The others were fetched ahead and not used yet: the last fetched goes
    first, because it is needed last.
    """
    ordinary: list[FolderEntry] = []
    awaited: list[FolderEntry] = []
    for entry in sorted(entries, key=lambda entry: entry.stamp_ns):
        # abs: a stamp may lie in the future if the clock was set back.
        is_awaited = entry.is_unused and abs(now_ns - entry.stamp_ns) < KEEP_AHEAD_NS
        (awaited if is_awaited else ordinary).append(entry)
    return ordinary, awaited[::-1]


def survey_folder(folder: str) -> Survey:
    """Return what is in `folder`, and remove leftovers of dead processes; only for the holder of the ledger.

    Files with other names are not the cache's: they are neither counted nor removed.
    """
    finished: list[FolderEntry] = []
    partial: dict[str, list[FolderEntry]] = {}
    for found in os.listdir(folder):
        match = _NAME.fullmatch(found)
        if match is None:
            continue
        try:
            status = os.lstat(f"{folder}/{found}")
        except FileNotFoundError:
            # A running fetch may finish, or move its own files.
            continue
        entry = FolderEntry(found, status.st_size, status.st_mtime_ns, status.st_atime_ns == NEVER_USED_NS)
        if match[2] is not None:
            partial.setdefault(match[1], []).append(entry)
        elif stat.S_ISREG(status.st_mode):
            finished.append(entry)
        # Else put there by another user; a process that wants the file gets an error.
    fetching = [_find_alive(folder, name, files) for name, files in partial.items()]
    return Survey(finished, [entry for entry in fetching if entry is not None])


def _find_alive(folder: str, name: str, files: list[FolderEntry]) -> FolderEntry | None:
    """Return the fetch of `name` if its process is alive; otherwise remove its files."""
    path = os.path.join(folder, f"{name}.lock")
    parts = [entry for entry in files if entry.name != f"{name}.lock"]
    try:
        # Created if missing, so that no process starts to fetch this file while its leftovers are removed.
        lock = lock_file(path, shared=True, wait=False, create=True)
    except BlockingIOError:
        # A fetch that has begun since the folder was listed has reserved nothing.
        reserved = next((entry for entry in files if entry not in parts), FolderEntry(name, 0, 0, False))
        num_bytes = max(reserved.size_bytes, sum(entry.size_bytes for entry in parts))
        return reserved._replace(name=name, size_bytes=num_bytes)
    with lock:
        for entry in parts:
            _remove_if_there(os.path.join(folder, entry.name))
        # Last: from here on, another process may fetch.
        _remove_if_there(path)
    return None


def _remove_if_there(path: str) -> None:
    """Remove the file at `path`, if there is one; also a folder, which a faulty fetch may have created there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        if not os.path.isdir(path):
            raise
        shutil.rmtree(path)


@dataclass(slots=True, kw_only=True)
class CacheClaim:
    """The right of one thread on the node to fetch a file, and the bytes reserved for it."""

    key: str
    path: str
    """Where the file will be."""
    lock: FileLock
    is_ahead: bool
    num_bytes: int = 0
    """Bytes reserved so far."""
    was_refused: bool = False
    """There was no room that the fetch may take."""

    @property
    def partial(self) -> str:
        """Where the fetch writes the file."""
        return f"{self.path}.part"


class CacheFolder:
    """The bytes in one folder: reserved before they are written, and freed by removing unused files.

    It writes the bound that it was given into the folder when it opens and when a file is fetched. A default bound
    gives way to a larger one found there: a caller without a bound must not empty the cache of another.
    """

    def __init__(self, path: str, max_bytes: int, *, is_default: bool = False) -> None:
        self.path = path
        self.max_bytes = max_bytes
        """The bound in force: for a default bound, the larger one given for the folder, if any."""
        self._own_bytes = max_bytes
        self._is_default = is_default
        self.num_removed = 0
        """Files that this object has removed to make room."""
        # Protected by the ledger's lock, which also excludes other threads.
        self._oldest: deque[FolderEntry] = deque()
        self._surveyed_s = -SURVEY_S

    def path_of(self, key: str) -> str:
        """Return the path of the file of `key`, whether or not it is there."""
        return os.path.join(self.path, name_of(key))

    def tidy(self) -> None:
        """Count the files, remove leftovers of dead processes, and remove unused files down to the bound."""
        check_own_folder(self.path)
        with self._open() as book:
            self._settle_bound()
            survey = self._survey(book)
            self._free(book, survey, survey.total_bytes - self.max_bytes)

    def claim(self, key: str, *, is_ahead: bool, wait: bool) -> CacheClaim:
        """Return the right to fetch `key`; others wait for it until `place` or `drop` ends it.

        Raises:
            BlockingIOError: another thread or process has it, and `wait` is false.
        """
        path = self.path_of(key)
        lock = lock_file(f"{path}.lock", wait=wait, create=True, grows=f"{path}.part")
        claim = CacheClaim(key=key, path=path, lock=lock, is_ahead=is_ahead)
        try:
            # Left by a process that was killed.
            os.ftruncate(lock.fd, 0)
            lock.touch(is_used=not is_ahead)
            _remove_if_there(claim.partial)
        except BaseException:
            lock.release()
            raise
        return claim

    def reserve(self, claim: CacheClaim, num_bytes: int, *, more_bytes: int = 0) -> str:
        """Reserve `num_bytes` in all for `claim`, and `more_bytes` if they are free without removing files.

        Return an empty string; or, with nothing reserved, the name of a file to wait for: there will be room once the
        running fetches ahead have ended and their files can be removed. Raise if there will be no room.
        """
        with self._open() as book:
            self._settle_bound()
            if num_bytes > self.max_bytes:
                raise ConfigError(
                    f"{claim.key!r} has {num_bytes} bytes or more, but the cache at {self.path!r} may hold "
                    f"{self.max_bytes} in all. Give it a larger max_bytes."
                )
            needed = num_bytes - claim.num_bytes
            missing = self._read_total(book) + needed - self.max_bytes
            if missing > 0 and time.monotonic() - self._surveyed_s < SURVEY_S:
                # Files used since the survey have another stamp, and files that came since are more recent than all
                # of these. So these are still the least recently used, in this order.
                missing -= self._remove_from(book, self._oldest, missing)
            ahead = self._make_room(book, claim, num_bytes) if missing > 0 else ""
            if not ahead:
                total = self._read_total(book) + needed
                more_bytes = more_bytes if total + more_bytes <= self.max_bytes else 0
                self._write_total(book, total + more_bytes)
                claim.num_bytes = num_bytes + more_bytes
                os.ftruncate(claim.lock.fd, claim.num_bytes)
            return ahead

    def _make_room(self, book: FileLock, claim: CacheClaim, num_bytes: int) -> str:
        """Survey the folder and remove files; return and raise as `reserve` does."""
        survey = self._survey(book)
        missing = survey.total_bytes + num_bytes - claim.num_bytes - self.max_bytes
        freed = self._free(book, survey, missing, spares_awaited=claim.is_ahead)
        if freed >= missing:
            return ""
        others = [entry for entry in survey.fetching if entry.name != os.path.basename(claim.path)]
        ahead = [entry for entry in others if entry.is_unused]
        ahead_bytes = sum(entry.size_bytes for entry in ahead)
        if not claim.is_ahead and missing - freed <= ahead_bytes:
            return ahead[0].name
        claim.was_refused = True
        kept_bytes = sum(entry.size_bytes for entry in survey.finished) - freed
        fetching_bytes = sum(entry.size_bytes for entry in others) - ahead_bytes
        raise DownloadError(
            f"no room for {claim.key!r} of {num_bytes} bytes in the cache at {self.path!r}: of the {self.max_bytes} "
            f"bytes that it may hold, {kept_bytes} are in use or fetched ahead and {fetching_bytes} are being fetched "
            f"for others, {ahead_bytes} ahead. Give it a larger max_bytes, or use fewer files at once."
        )

    def wait_for_fetch(self, name: str) -> None:
        """Wait until the running fetch of the file `name` has ended, successfully or not."""
        path = os.path.join(self.path, name)
        with suppress(FileNotFoundError):
            lock_file(f"{path}.lock", shared=True, grows=f"{path}.part").release()

    def place(self, claim: CacheClaim) -> FileLock:
        """Put the fetched file in place, end the claim, and return the file's lock.

        It replaces an older copy; readers that have that one open go on reading it. A file that a caller waits for is
        in use from the start. A file fetched ahead is not: its lock is released here, so that no other process finds it
        in use.
        """
        held = lock_file(claim.partial, shared=True)
        try:
            # A power cut could otherwise leave an empty file under the final name.
            os.fsync(held.fd)
            held.touch(is_used=not claim.is_ahead)
            with self._open() as book:
                total, replaced = self._read_total(book), 0
                with suppress(FileNotFoundError):
                    replaced = os.lstat(claim.path).st_size
                # Before the rename: after it, no error may make the claim give these bytes back.
                claim.num_bytes -= held.size_bytes
                os.rename(claim.partial, claim.path)
                held.path = claim.path
                self._write_total(book, total - claim.num_bytes - replaced)
                claim.num_bytes = 0
                _remove_if_there(claim.lock.path)
                if claim.is_ahead:
                    held.release()
        except BaseException:
            held.release()
            raise
        claim.lock.release()
        return held

    def drop(self, claim: CacheClaim) -> None:
        """End a claim without a file; no effect on one that has ended."""
        if claim.lock.is_released:
            return
        try:
            # Otherwise the file is in place already, and the next fetch of it may be running.
            if claim.lock.is_in_place():
                _remove_if_there(claim.partial)
                with self._open() as book:
                    self._write_total(book, self._read_total(book) - claim.num_bytes)
                    _remove_if_there(claim.lock.path)
        finally:
            claim.lock.release()

    def free(self, num_bytes: int) -> int:
        """Remove unused files until `num_bytes` are freed, and return how many were."""
        with self._open() as book:
            return self._free(book, self._survey(book), num_bytes)

    def _free(self, book: FileLock, survey: Survey, num_bytes: int, *, spares_awaited: bool = False) -> int:
        """Remove files in order until `num_bytes` are freed, and keep the rest of the order for the next time."""
        ordinary, awaited = removal_order(survey.finished, time.time_ns())
        self._oldest = deque(ordinary)
        freed = self._remove_from(book, self._oldest, num_bytes)
        if not spares_awaited:
            # Last all of them again: files used between the survey and now may be unused again.
            again = [entry._replace(stamp_ns=_ANY_STAMP) for entry in (*ordinary, *awaited)]
            freed += self._remove_from(book, deque([*awaited, *again]), num_bytes - freed)
        return freed

    def _remove_from(self, book: FileLock, entries: deque[FolderEntry], num_bytes: int) -> int:
        freed = 0
        while entries and freed < num_bytes:
            freed += self._remove(entries.popleft())
        if freed:
            self._write_total(book, self._read_total(book) - freed)
        return freed

    def _remove(self, entry: FolderEntry) -> int:
        """Remove an unused file and return its bytes; 0 if it is in use, or was used since the survey."""
        try:
            lock = lock_file(os.path.join(self.path, entry.name), wait=False)
        except (FileNotFoundError, BlockingIOError):
            return 0
        with lock:
            if entry.stamp_ns not in (lock.stamp_ns, _ANY_STAMP):
                return 0
            os.unlink(lock.path)
        self.num_removed += 1
        return lock.size_bytes

    def _survey(self, book: FileLock) -> Survey:
        survey = survey_folder(self.path)
        self._surveyed_s = time.monotonic()
        self._write_total(book, survey.total_bytes)
        return survey

    def _settle_bound(self) -> None:
        """Write the bound into the folder if it was given, otherwise read it; only for the holder of the ledger."""
        with self._open("bound") as book:
            given = _read_number(book.fd)
            if self._is_default:
                self.max_bytes = max(self._own_bytes, given or 0)
            elif given != self._own_bytes:
                _write_number(book.fd, self._own_bytes)

    def _open(self, name: str = "ledger") -> FileLock:
        return lock_file(os.path.join(self.path, name), create=True)

    def _read_total(self, book: FileLock) -> int:
        total = _read_number(book.fd)
        # The ledger is empty if a user has emptied the folder.
        return self._survey(book).total_bytes if total is None else total

    def _write_total(self, book: FileLock, total: int) -> None:
        _write_number(book.fd, max(0, total))


def _read_number(fd: int) -> int | None:
    record = os.pread(fd, 4096, 0)
    return int(record) if _RECORD.fullmatch(record) else None


def _write_number(fd: int, number: int) -> None:
    record = f"{number:020d}".encode()
    # In this order: a process killed in between leaves a number.
    os.pwrite(fd, record, 0)
    os.ftruncate(fd, len(record))
