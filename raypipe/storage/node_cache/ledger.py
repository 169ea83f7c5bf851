"""The bytes of a cache: reserved before they are written, and freed by removing unused files.

The ledger is a number that is never below the bytes present or reserved. It goes up before files grow, and down after
files are gone, so a process killed in between leaves it too high, never too low. Counting the files makes it exact
again. Only the holder of the ledger's lock reserves, places or removes files.

A cache writes the bound that it was given into its folder when it opens and when it fetches. A default bound gives way
to a larger one found there: a caller without a bound must not empty the cache of another.
"""

import os
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from raypipe.storage.node_cache.locks import FileLock, lock_file, open_own
from raypipe.storage.node_cache.survey import (
    FolderEntry,
    Survey,
    name_of,
    pack_record,
    removal_order,
    remove_if_there,
    survey_folder,
)

SURVEY_S: Final = 60.0
"""How long to use the order of removal before surveying the folder again. The order stays valid for longer, but only a
survey finds bytes that killed processes had reserved."""

_ANY_STAMP: Final = -1
_RECORD: Final = re.compile(rb"\d{20}")


class CacheClaim:
    """The right of one thread on the node to fetch a file, and the bytes reserved for it."""

    def __init__(self, folder: str, key: str, lock: FileLock, *, is_ahead: bool) -> None:
        self.key = key
        self.path = os.path.join(folder, name_of(key))
        """Where the file will be."""
        self.partial = f"{self.path}.part"
        """Where the fetch writes it."""
        self.lock = lock
        self.is_ahead = is_ahead
        self.num_bytes = 0
        """Bytes reserved so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Why bytes cannot be reserved; `missing_bytes` is 0 if they can."""

    missing_bytes: int = 0
    kept_bytes: int = 0
    """Whole files that cannot be removed: in use, or fetched ahead and not used yet."""
    fetching_bytes: int = 0
    """Other files being fetched because a caller waits for them."""
    ahead_bytes: int = 0
    """Other files being fetched ahead."""
    ahead_name: str = ""
    """One of the files being fetched ahead."""

    @property
    def will_pass(self) -> bool:
        """Whether there will be room once the running fetches ahead have ended and their files can be removed."""
        return 0 < self.missing_bytes <= self.ahead_bytes


class CacheLedger:
    """The account of the bytes in one folder."""

    def __init__(self, folder: str, max_bytes: int, *, is_default: bool = False) -> None:
        self.folder = folder
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
        return os.path.join(self.folder, name_of(key))

    def tidy(self) -> None:
        """Count the files, remove leftovers of dead processes, and remove unused files down to the bound."""
        with self._open() as book:
            self._settle_bound()
            survey = self._survey(book)
            self._free(book, survey, survey.total_bytes - self.max_bytes, spares_awaited=False)

    def claim(self, key: str, *, is_ahead: bool, wait: bool) -> CacheClaim:
        """Return the right to fetch `key`; others wait for it until `place` or `drop` ends it.

        Raises:
            BlockingIOError: another thread or process has it, and `wait` is false.
        """
        path = self.path_of(key)
        lock = lock_file(f"{path}.lock", wait=wait, create=True, grows=f"{path}.part")
        claim = CacheClaim(self.folder, key, lock, is_ahead=is_ahead)
        try:
            # Left by a process that was killed.
            os.ftruncate(lock.fd, 0)
            remove_if_there(claim.partial)
        except BaseException:
            lock.release()
            raise
        return claim

    def reserve(self, claim: CacheClaim, num_bytes: int, *, more_bytes: int = 0) -> Shortage:
        """Reserve `num_bytes` in all for `claim`, and `more_bytes` if they are free without removing files.

        Return the shortage; with missing bytes, nothing is reserved.
        """
        with self._open() as book:
            self._settle_bound()
            needed = num_bytes - claim.num_bytes
            shortage = self._make_room(book, claim, needed)
            if shortage.missing_bytes:
                return shortage
            total = self._read_total(book)
            if total + needed + more_bytes <= self.max_bytes:
                num_bytes, needed = num_bytes + more_bytes, needed + more_bytes
            self._write_total(book, total + needed)
            claim.num_bytes = num_bytes
            claim.lock.write(pack_record(num_bytes, is_ahead=claim.is_ahead))
        return shortage

    def wait_for_fetch(self, name: str) -> None:
        """Wait until the running fetch of the file `name` has ended, successfully or not."""
        path = os.path.join(self.folder, name)
        try:
            lock_file(f"{path}.lock", shared=True, grows=f"{path}.part").release()
        except FileNotFoundError:
            return

    def place(self, claim: CacheClaim) -> FileLock:
        """Put the fetched file in place, end the claim, and return the file's lock.

        It replaces an older copy; readers that have that one open go on reading it. A file that a caller waits for is
        in use from the start. A file fetched ahead is not: its lock is released here, so that no other process finds it
        in use.
        """
        held = lock_file(claim.partial, shared=True)
        try:
            held.touch(is_used=not claim.is_ahead)
            with self._open() as book:
                total = self._read_total(book)
                replaced = _size_of(claim.path)
                # Before the rename: after it, no error may make the claim give these bytes back.
                claim.num_bytes -= held.size_bytes
                os.rename(claim.partial, claim.path)
                held.path = claim.path
                self._write_total(book, max(0, total - claim.num_bytes - replaced))
                claim.num_bytes = 0
                remove_if_there(claim.lock.path)
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
                remove_if_there(claim.partial)
                with self._open() as book:
                    self._write_total(book, max(0, self._read_total(book) - claim.num_bytes))
                    remove_if_there(claim.lock.path)
        finally:
            claim.lock.release()

    def discard(self, key: str, size_bytes: int) -> bool:
        """Remove the file of `key` unless it has `size_bytes`; return false if the file is in use."""
        with self._open() as book:
            try:
                lock = lock_file(self.path_of(key), wait=False)
            except FileNotFoundError:
                return True
            except BlockingIOError:
                return False
            try:
                if lock.size_bytes != size_bytes:
                    os.unlink(lock.path)
                    self._write_total(book, max(0, self._read_total(book) - lock.size_bytes))
            finally:
                lock.release()
        return True

    def free(self, num_bytes: int) -> int:
        """Remove unused files until `num_bytes` are freed, and return how many were."""
        with self._open() as book:
            return self._free(book, self._survey(book), num_bytes, spares_awaited=False)

    def _make_room(self, book: FileLock, claim: CacheClaim, needed: int) -> Shortage:
        missing = self._read_total(book) + needed - self.max_bytes
        if missing <= 0:
            return Shortage()
        if time.monotonic() - self._surveyed_s < SURVEY_S:
            # Files used since the survey have another stamp, and files that came since are more recent than all of
            # these. So these are still the least recently used, in this order.
            missing -= self._remove_from(book, self._oldest, missing)
        if missing <= 0:
            return Shortage()
        survey = self._survey(book)
        missing = survey.total_bytes + needed - self.max_bytes
        freed = self._free(book, survey, missing, spares_awaited=claim.is_ahead)
        others = [item for item in survey.fetching if item.name != os.path.basename(claim.path)]
        ahead = [item for item in others if item.is_ahead]
        ahead_bytes = sum(item.num_bytes for item in ahead)
        return Shortage(
            missing_bytes=max(0, missing - freed),
            kept_bytes=sum(entry.size_bytes for entry in survey.finished) - freed,
            fetching_bytes=sum(item.num_bytes for item in others) - ahead_bytes,
            ahead_bytes=ahead_bytes,
            ahead_name=ahead[0].name if ahead else "",
        )

    def _free(self, book: FileLock, survey: Survey, num_bytes: int, *, spares_awaited: bool) -> int:
        """Remove files in order until `num_bytes` are freed, and keep the rest of the order for the next time."""
        ordinary, awaited = removal_order(survey.finished, time.time_ns())
        self._oldest = deque(ordinary)
        freed = self._remove_from(book, self._oldest, num_bytes)
        if not spares_awaited:
            freed += self._remove_from(book, deque(awaited), num_bytes - freed)
            if freed < num_bytes:
                # Files used between the survey and now may be unused again.
                again = deque(entry._replace(stamp_ns=_ANY_STAMP) for entry in (*ordinary, *awaited))
                freed += self._remove_from(book, again, num_bytes - freed)
        return freed

    def _remove_from(self, book: FileLock, entries: deque[FolderEntry], num_bytes: int) -> int:
        freed = 0
        while entries and freed < num_bytes:
            freed += self._remove(entries.popleft())
        if freed:
            self._write_total(book, max(0, self._read_total(book) - freed))
        return freed

    def _remove(self, entry: FolderEntry) -> int:
        """Remove an unused file and return its bytes; 0 if it is in use, or was used since the survey."""
        try:
            lock = lock_file(os.path.join(self.folder, entry.name), wait=False)
        except (FileNotFoundError, BlockingIOError):
            return 0
        try:
            if entry.stamp_ns not in (lock.stamp_ns, _ANY_STAMP):
                return 0
            os.unlink(lock.path)
        finally:
            lock.release()
        self.num_removed += 1
        return lock.size_bytes

    def _survey(self, book: FileLock) -> Survey:
        survey = survey_folder(self.folder)
        self._surveyed_s = time.monotonic()
        self._write_total(book, survey.total_bytes)
        return survey

    def _settle_bound(self) -> None:
        """Write the bound into the folder if it was given, otherwise read it; only for the holder of the ledger."""
        fd = open_own(os.path.join(self.folder, "bound"), os.O_RDWR | os.O_CREAT)
        try:
            record = os.pread(fd, 4096, 0)
            given = int(record) if _RECORD.fullmatch(record) else 0
            if self._is_default:
                self.max_bytes = max(self._own_bytes, given)
            elif given != self._own_bytes:
                record = f"{self._own_bytes:020d}".encode()
                # In this order: a process killed in between leaves a bound.
                os.pwrite(fd, record, 0)
                os.ftruncate(fd, len(record))
        finally:
            os.close(fd)

    @contextmanager
    def _open(self) -> Iterator[FileLock]:
        book = lock_file(os.path.join(self.folder, "ledger"), create=True)
        try:
            yield book
        finally:
            book.release()

    def _read_total(self, book: FileLock) -> int:
        record = book.read()
        # The ledger is empty if a user has emptied the folder.
        return int(record) if _RECORD.fullmatch(record) else self._survey(book).total_bytes

    def _write_total(self, book: FileLock, total: int) -> None:
        book.write(f"{total:020d}".encode())


def _size_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0
