"""One fetch into the cache: reserves bytes before they are written, and puts only a whole file in place."""

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from raypipe.errors import ConfigError, DownloadError
from raypipe.storage.node_cache.ledger import CacheClaim, CacheLedger, Shortage
from raypipe.storage.node_cache.locks import FileLock, open_own

Progress: TypeAlias = Callable[[int], None]
"""Called before each write with the total size that the file is about to have."""

Fetch: TypeAlias = Callable[[str, Progress], None]
"""Writes a file to the given path, from its start, and reports its progress."""

GROWTH_BYTES: Final = 4 << 20
"""Reserved beyond the bytes received when the size is unknown, so that not every piece opens the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A file to have in the cache."""

    key: str
    fetch: Fetch
    size_bytes: int | None
    """None if unknown."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """Stops a fetch ahead, and records what happened to a fetch."""

    stopping: threading.Event = field(default_factory=threading.Event)
    was_refused: bool = False
    """There was no room that the fetch may take."""
    num_waits: int = 0
    """Waits for room."""


def fetch_file(ledger: CacheLedger, claim: CacheClaim, wanted: Wanted, watch: Watch) -> FileLock:
    """Fetch a file, put it in place, and return a lock on it. After an error the caller must drop the claim.

    Raises:
        DownloadError: the file has another size, or there is no room for it.
        ConfigError: the file is larger than the cache, or the fetch breaks its contract.
    """
    if wanted.size_bytes is not None:
        _reserve(ledger, claim, wanted.size_bytes, watch)
    try:
        wanted.fetch(claim.partial, lambda num_bytes: _announce(ledger, claim, wanted, watch, num_bytes))
    except Exception as error:
        error.add_note(f"while fetching {wanted.key!r} into the cache at {ledger.folder!r}")
        raise
    _check_file(claim, wanted)
    _write_through(claim.partial)
    return ledger.place(claim)


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error or one of its causes says that the disk or its quota is full."""
    return any(isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT) for link in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _announce(ledger: CacheLedger, claim: CacheClaim, wanted: Wanted, watch: Watch, num_bytes: int) -> None:
    if watch.stopping.is_set():
        raise CancelledError
    if wanted.size_bytes is None:
        if num_bytes > claim.num_bytes:
            _reserve(ledger, claim, num_bytes, watch, more_bytes=min(GROWTH_BYTES, ledger.max_bytes // 64))
    elif num_bytes > wanted.size_bytes:
        raise DownloadError(
            f"{wanted.key!r} has {wanted.size_bytes} bytes, but its fetch brings {num_bytes} or more. The file has "
            f"changed: open the dataset again."
        )


def _reserve(ledger: CacheLedger, claim: CacheClaim, num_bytes: int, watch: Watch, more_bytes: int = 0) -> None:
    if num_bytes > ledger.max_bytes:
        raise ConfigError(
            f"{claim.key!r} has {num_bytes} bytes or more, but the cache at {ledger.folder!r} may hold "
            f"{ledger.max_bytes} in all. Give it a larger max_bytes."
        )
    while True:
        shortage = ledger.reserve(claim, num_bytes, more_bytes=more_bytes)
        if not shortage.missing_bytes:
            return
        if claim.is_ahead or not shortage.will_pass:
            watch.was_refused = True
            raise DownloadError(_no_room(ledger, claim, num_bytes, shortage))
        watch.num_waits += 1
        ledger.wait_for_fetch(shortage.ahead_name)


def _no_room(ledger: CacheLedger, claim: CacheClaim, num_bytes: int, shortage: Shortage) -> str:
    return (
        f"no room for {claim.key!r} of {num_bytes} bytes in the cache at {ledger.folder!r}: of the {ledger.max_bytes} "
        f"bytes that it may hold, {shortage.kept_bytes} are in use or fetched ahead and {shortage.fetching_bytes} are "
        f"being fetched for others, {shortage.ahead_bytes} ahead. Give it a larger max_bytes, or use fewer files at "
        f"once."
    )


def _check_file(claim: CacheClaim, wanted: Wanted) -> None:
    try:
        status = os.lstat(claim.partial)
    except FileNotFoundError:
        raise ConfigError(f"the fetch of {wanted.key!r} wrote no file to {claim.partial!r}; it must.") from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"the fetch of {wanted.key!r} made {claim.partial!r} a link or folder; it must write a file.")
    if wanted.size_bytes is not None and status.st_size != wanted.size_bytes:
        raise DownloadError(
            f"{wanted.key!r} has {wanted.size_bytes} bytes, but {status.st_size} were fetched. Fetch it again; if that "
            f"does not help, the file has changed: open the dataset again."
        )
    if status.st_size > claim.num_bytes:
        raise ConfigError(
            f"the fetch of {wanted.key!r} wrote {status.st_size} bytes but announced {claim.num_bytes}. Call "
            f"progress(num_bytes) before writing, or give the size."
        )


def _write_through(path: str) -> None:
    """Flush a file to the disk: a power cut could otherwise leave an empty file under the final name."""
    fd = open_own(path, os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
