"""`FileCache`: a local path for a remote file while it is in use."""

import hashlib
import os
import shutil
import stat
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from raypipe.errors import ConfigError, DownloadError
from raypipe.storage.node_cache.fetching import Fetch, Wanted, Watch, fetch_file, is_disk_full
from raypipe.storage.node_cache.ledger import CacheLedger
from raypipe.storage.node_cache.locks import NEVER_USED_NS, FileLock, check_own_folder, lock_file
from raypipe.storage.node_cache.prefetch import Prefetcher

PREFETCH_THREADS: Final = 4
"""Concurrent fetches ahead of one process: enough to hide the latency of an object store behind its bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What one `FileCache` has done since it was created; each process counts for itself."""

    hits: int = 0
    """Requested files that were there, or that another thread or process had fetched meanwhile."""
    misses: int = 0
    """Requested files that had to be fetched."""
    bytes_fetched: int = 0
    """Bytes of misses and of fetches ahead."""
    evictions: int = 0
    """Files removed to make room."""
    waits: int = 0
    """Waits for another fetch, of the same file or to make room."""
    prefetched: int = 0
    """Files fetched ahead."""
    prefetches_refused: int = 0
    """Fetches ahead for which there was no room without removing other files fetched ahead."""
    prefetches_failed: int = 0
    """Fetches ahead that raised an error, unless they were stopped."""


class HeldFile:
    """A file of the cache that stays there until `close`, or until this object is garbage-collected.

    It belongs to its process: a forked child does not hold it.
    """

    __slots__ = ("__weakref__", "_release", "path")

    def __init__(self, lock: FileLock) -> None:
        self.path = lock.path
        self._release = weakref.finalize(self, _release, lock)
        # At exit the kernel releases the lock.
        self._release.atexit = False

    def close(self) -> None:
        """Release the file; no effect the second time."""
        self._release()

    def __enter__(self) -> "HeldFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FileCache:
    """Remote files in a local folder, at most `max_bytes` together, shared by the processes of a node.

    Whole and half-fetched files together keep to the bound at every moment. To make room, the cache removes the least
    recently used of the files not in use. Any number of threads and processes of one user may share a folder, each with
    its own `FileCache`; any of them may be killed at any moment. Each fetch uses the bound of its own `FileCache`; a
    default bound gives way to a larger one last given for the folder.

    A `FileCache` pickles as its arguments.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int,
        *,
        is_default: bool = False,
        prefetch_threads: int = PREFETCH_THREADS,
    ) -> None:
        if max_bytes < 1:
            raise ConfigError(f"max_bytes of a cache must be at least 1, got {max_bytes}")
        if prefetch_threads < 1:
            raise ConfigError(f"prefetch_threads must be at least 1, got {prefetch_threads}")
        self.folder = os.path.abspath(os.path.expanduser(os.fspath(folder)))
        self.max_bytes = max_bytes
        self._is_default = is_default
        self._prefetch_threads = prefetch_threads
        self._ledger = CacheLedger(self.folder, max_bytes, is_default=is_default)
        self._counts: Counter[str] = Counter()
        self._start()
        _caches.add(self)
        try:
            check_own_folder(self.folder)
            self._ledger.tidy()
        except OSError as error:
            raise ConfigError(
                f"cannot keep files in {self.folder!r}: {error.strerror or error}. Give the cache a folder on a local "
                f"disk that you may write to."
            ) from error

    def _start(self) -> None:
        """Create what a forked child must recreate: locks that a thread may have held, and the threads."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._prefetcher = Prefetcher(self._fetch_ahead, self._prefetch_threads)

    def __reduce__(self) -> tuple[object, ...]:
        return _open_cache, (self.folder, self.max_bytes, self._is_default, self._prefetch_threads)

    @contextmanager
    def use(self, key: str, fetch: Fetch, size: int | None = None) -> Iterator[str]:
        """Yield the path of the file that `key` stands for; it stays there inside the ``with``. See `hold`."""
        with self.hold(key, fetch, size) as held:
            yield held.path

    def hold(self, key: str, fetch: Fetch, size: int | None = None) -> HeldFile:
        """Return the file that `key` stands for, fetched if missing; it stays until closed.

        One thread of the node fetches the file while the others wait; if it fails or dies, the next one tries.

        Args:
            key: identifies the content for good: an address with a revision or an ETag.
            fetch: writes the file to the given path. Before it writes, it calls ``progress(num_bytes)`` with the size
                that the file is about to have.
            size: the bytes of the file, or None if unknown. A file of another size is an error.

        Raises:
            ConfigError: the file is larger than the cache.
            DownloadError: the file has another size, or there is no room: all is in use, or the disk is full.
        """
        wanted = _check_wanted(key, fetch, size)
        try:
            lock = self._find(wanted) or self._obtain(wanted)
        except Exception as error:
            if not is_disk_full(error):
                raise
            lock = self._obtain_on_full_disk(wanted)
        return HeldFile(lock)

    def path_of(self, key: str) -> str:
        """Return where the file that `key` stands for is, if it is there."""
        return self._ledger.path_of(key)

    def renew(self, key: str, fetch: Fetch, size: int | None = None) -> bool | None:
        """Fetch a file again to replace its copy; return whether the old copy had another content.

        For a file whose content makes no sense: the disk may have garbled it. Those who hold the copy keep it. False
        where there is no copy: whoever uses the file next fetches it. None where there is no room for another one
        beside the copy.
        """
        wanted, watch = _check_wanted(key, fetch, size), Watch()
        old = _digest(self._ledger.path_of(key))
        if old is None:
            return False
        claim = self._ledger.claim(key, is_ahead=False, wait=True)
        try:
            if _digest(claim.path) != old:
                # Another process has replaced it meanwhile.
                return True
            with HeldFile(fetch_file(self._ledger, claim, wanted, watch)) as held:
                self._count("misses")
                self._count("bytes_fetched", os.path.getsize(held.path))
                return _digest(held.path) != old
        except Exception as error:
            if watch.was_refused or is_disk_full(error):
                return None
            raise
        finally:
            self._ledger.drop(claim)

    def prefetch(self, key: str, fetch: Fetch, size: int | None = None) -> "Future[bool]":
        """Start to fetch a file in the background, unless it is there; takes the arguments of `hold`.

        The future's result is true if the file is there or another process is fetching it. It is false if the only
        room is that of other files fetched ahead and not used yet: ask again when some were used. The future raises an
        error of the fetch; a later `hold` tries again.
        """
        wanted = _check_wanted(key, fetch, size)
        if self._is_awaited(wanted):
            there: Future[bool] = Future()
            there.set_result(True)
            return there
        return self._prefetcher.submit(wanted)

    def stats(self) -> CacheStats:
        """Return the counters of this object."""
        with self._lock:
            return CacheStats(**self._counts, evictions=self._ledger.num_removed)

    def close(self) -> None:
        """Stop fetching ahead: cancel fetches that have not begun; running ones end at their next call of `progress`.

        Held files stay held, and `hold` still works.
        """
        self._stopping.set()
        self._prefetcher.close()

    def __enter__(self) -> "FileCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(self, wanted: Wanted) -> FileLock | None:
        """Return a lock on the file if it is there; remove a file of another size."""
        try:
            lock = lock_file(self._ledger.path_of(wanted.key), shared=True)
        except FileNotFoundError:
            return None
        if wanted.size_bytes in (None, lock.size_bytes):
            lock.touch()
            self._count("hits")
            return lock
        lock.release()
        self._discard(wanted)
        return None

    def _discard(self, wanted: Wanted) -> None:
        """Remove the file if it does not have the wanted size."""
        if wanted.size_bytes is not None and not self._ledger.discard(wanted.key, wanted.size_bytes):
            path = self._ledger.path_of(wanted.key)
            raise DownloadError(
                f"the cached file of {wanted.key!r} at {path!r} has not the {wanted.size_bytes} bytes that it should, "
                f"and is in use. Stop what uses it; if the file has changed, its key must too."
            )

    def _obtain(self, wanted: Wanted) -> FileLock:
        """Return a lock on the file after this thread, or another, has fetched it."""
        try:
            claim = self._ledger.claim(wanted.key, is_ahead=False, wait=False)
        except BlockingIOError:
            self._count("waits")
            claim = self._ledger.claim(wanted.key, is_ahead=False, wait=True)
        watch = Watch()
        try:
            lock = self._find(wanted)
            if lock is None:
                lock = fetch_file(self._ledger, claim, wanted, watch)
                self._count("misses")
                self._count("bytes_fetched", lock.size_bytes)
        finally:
            self._ledger.drop(claim)
            self._count("waits", watch.num_waits)
        return lock

    def _obtain_on_full_disk(self, wanted: Wanted) -> FileLock:
        """Try again after removing unused files: the disk may have less room than the bound allows."""
        freed = self._ledger.free(self.max_bytes if wanted.size_bytes is None else wanted.size_bytes)
        try:
            return self._obtain(wanted)
        except Exception as error:
            if not is_disk_full(error):
                raise
            raise self._disk_full(wanted, freed) from error

    def _disk_full(self, wanted: Wanted, freed: int) -> DownloadError:
        size = "of unknown size" if wanted.size_bytes is None else f"of {wanted.size_bytes} bytes"
        return DownloadError(
            f"the disk of {self.folder!r} is full: {wanted.key!r} {size} does not fit, with "
            f"{shutil.disk_usage(self.folder).free} bytes free after removing {freed} bytes of the cache that nobody "
            f"used. Free space on that disk, or put the cache on a larger one."
        )

    def _is_awaited(self, wanted: Wanted) -> bool:
        """Return whether the file is there, and mark it as fetched ahead."""
        path = self._ledger.path_of(wanted.key)
        try:
            found = os.lstat(path)
            if wanted.size_bytes not in (None, found.st_size) or not stat.S_ISREG(found.st_mode):
                return False
            # Without a lock: another process that needs room would take it for a use.
            os.utime(path, ns=(NEVER_USED_NS, time.time_ns()), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _fetch_ahead(self, wanted: Wanted) -> bool:
        """Fetch a file ahead; return false if it would take the room of other files fetched ahead."""
        watch = Watch(stopping=self._stopping)
        try:
            claim = self._ledger.claim(wanted.key, is_ahead=True, wait=False)
        except BlockingIOError:
            return True
        try:
            if self._is_awaited(wanted):
                return True
            self._discard(wanted)
            lock = fetch_file(self._ledger, claim, wanted, watch)
        except Exception as error:
            if watch.was_refused:
                self._count("prefetches_refused")
                return False
            self._count("prefetches_failed", int(not self._stopping.is_set()))
            if is_disk_full(error):
                raise self._disk_full(wanted, 0) from error
            raise
        finally:
            self._ledger.drop(claim)
        self._count("prefetched")
        self._count("bytes_fetched", lock.size_bytes)
        return True

    def _count(self, what: str, num: int = 1) -> None:
        with self._lock:
            self._counts[what] += num


def _open_cache(folder: str, max_bytes: int, is_default: bool, prefetch_threads: int) -> FileCache:
    return FileCache(folder, max_bytes, is_default=is_default, prefetch_threads=prefetch_threads)


def _digest(path: str) -> bytes | None:
    """Return a hash of the content of a copy; None if there is no copy."""
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "blake2b").digest()
    except FileNotFoundError:
        return None


def _check_wanted(key: str, fetch: Fetch, size: int | None) -> Wanted:
    if not key:
        raise ConfigError("the key of a cached file is empty; give its address and revision")
    if size is not None and size < 0:
        raise ConfigError(f"the size of {key!r} must not be negative, got {size}")
    return Wanted(key=key, fetch=fetch, size_bytes=size)


def _release(lock: FileLock) -> None:
    # Recency is a hint: do not fail if the file was removed by hand, or the disk is read-only by now.
    with suppress(OSError):
        lock.touch()
    lock.release()


_caches: "weakref.WeakSet[FileCache]" = weakref.WeakSet()


def _start_in_child() -> None:
    for cache in list(_caches):
        cache._start()


os.register_at_fork(after_in_child=_start_in_child)
