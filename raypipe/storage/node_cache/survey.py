"""What is in the folder of a cache, and in which order it may be removed.

The order is a pure function of what was found. A survey also removes leftovers of dead processes, so only the holder of
the ledger may run it.
"""

import hashlib
import os
import re
import shutil
import stat
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from raypipe.storage.node_cache.locks import NEVER_USED_NS, lock_file, open_own

KEEP_AHEAD_NS: Final = 600 * 10**9
"""How long a file that was fetched ahead and not used yet is removed last. After ten minutes the process that wanted it
has died or no longer wants it; without a limit, files that a dead job fetched ahead would stay forever."""

_NAME: Final = re.compile(r"([0-9a-f]{32})(\.lock|\.part.*)?")
_RECORD: Final = re.compile(rb"(ahead|use  ) (\d{20})")


class FolderEntry(NamedTuple):
    """A whole file of the cache."""

    name: str
    size_bytes: int
    stamp_ns: int
    """The time of its last use or fetch."""
    is_unused: bool
    """Whether it was fetched ahead and not used since."""


class Fetching(NamedTuple):
    """A file that a living process is fetching."""

    name: str
    num_bytes: int
    """Bytes reserved for it, or on disk if that is more."""
    is_ahead: bool
    """No caller waits for it: it may be removed once it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Everything that counts in the folder at one moment."""

    finished: Sequence[FolderEntry]
    fetching: Sequence[Fetching]

    @property
    def total_bytes(self) -> int:
        """The bytes present or reserved."""
        return sum(entry.size_bytes for entry in self.finished) + sum(item.num_bytes for item in self.fetching)


def name_of(key: str) -> str:
    """Return the name of the file that `key` stands for."""
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def pack_record(num_bytes: int, *, is_ahead: bool) -> bytes:
    """Return the content of a running fetch's lock file: its kind, and the bytes reserved for it."""
    return f"{'ahead' if is_ahead else 'use  '} {num_bytes:020d}".encode()


def unpack_record(record: bytes) -> tuple[int, bool]:
    """Return the bytes reserved, and whether the fetch is ahead; nothing is reserved if no record is written yet."""
    match = _RECORD.fullmatch(record)
    return (int(match[2]), match[1] == b"ahead") if match else (0, False)


def removal_order(entries: Iterable[FolderEntry], now_ns: int) -> tuple[list[FolderEntry], list[FolderEntry]]:
    """Return the files in order of removal: the ordinary ones, and those to remove only if these are not enough.

    Ordinary files go least recently used first. The others were fetched ahead and not used yet: the last fetched goes
    first, because it is needed last.
    """
    ordinary: list[FolderEntry] = []
    awaited: list[FolderEntry] = []
    for entry in entries:
        # abs: a stamp may lie in the future if the clock was set back.
        is_awaited = entry.is_unused and abs(now_ns - entry.stamp_ns) < KEEP_AHEAD_NS
        (awaited if is_awaited else ordinary).append(entry)
    ordinary.sort(key=lambda entry: entry.stamp_ns)
    awaited.sort(key=lambda entry: entry.stamp_ns, reverse=True)
    return ordinary, awaited


def survey_folder(folder: str) -> Survey:
    """Return what is in `folder`, and remove leftovers of dead processes; only for the holder of the ledger.

    Files with other names are not the cache's: they are neither counted nor removed.
    """
    finished: list[FolderEntry] = []
    partial: dict[str, dict[str, int]] = defaultdict(dict)
    for found in os.listdir(folder):
        match = _NAME.fullmatch(found)
        if match is None:
            continue
        path = f"{folder}/{found}"
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            # A running fetch may finish, or move its own files.
            continue
        name, suffix = match.groups()
        if suffix is None and not stat.S_ISREG(status.st_mode):
            # Put there by another user; a process that wants the file gets an error.
            continue
        if suffix is None:
            finished.append(FolderEntry(name, status.st_size, status.st_mtime_ns, status.st_atime_ns == NEVER_USED_NS))
        else:
            partial[name][path] = 0 if suffix == ".lock" else status.st_size
    alive = [item for name, paths in partial.items() for item in _find_alive(folder, name, paths)]
    return Survey(finished=finished, fetching=alive)


def _find_alive(folder: str, name: str, paths: dict[str, int]) -> list[Fetching]:
    """Return the fetch of `name` if its process is alive; otherwise remove its files."""
    lock_path = os.path.join(folder, f"{name}.lock")
    try:
        # Created if missing, so that no process starts to fetch this file while its leftovers are removed.
        lock = lock_file(lock_path, shared=True, wait=False, create=True)
    except BlockingIOError:
        return [_read_fetching(lock_path, name, sum(paths.values()))]
    try:
        for path in paths:
            if path != lock_path:
                remove_if_there(path)
        # Last: from here on, another process may fetch.
        remove_if_there(lock_path)
    finally:
        lock.release()
    return []


def _read_fetching(lock_path: str, name: str, size_bytes: int) -> Fetching:
    try:
        with os.fdopen(open_own(lock_path, os.O_RDONLY), "rb") as stream:
            record = stream.read(4096)
    except FileNotFoundError:
        # The fetch gave up before it reserved anything.
        record = b""
    reserved, is_ahead = unpack_record(record)
    return Fetching(name, max(reserved, size_bytes), is_ahead)


def remove_if_there(path: str) -> None:
    """Remove the file at `path`, if there is one; also a folder, which a faulty fetch may have created there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        if not os.path.isdir(path):
            raise
        shutil.rmtree(path)
