"""Remote files on a node's disk, shared by all of its processes and bounded in bytes.

`FileCache` gives a local path for a remote file while it is in use. The caller says how to fetch a file; the cache
knows neither datasets nor protocols. It reserves the bytes of a file before it writes them, and renames a file into
place when it is whole; `raypipe.storage.cache_folder` keeps the account.

Use a folder on a local disk or in memory (ext4, xfs, tmpfs, overlayfs). On NFS, Linux sends ``flock`` to the server,
so the nodes would share one cache and one bound. With the mount options ``local_lock=flock`` or ``nolock`` it does not,
and the nodes would remove files under each other.
"""

import errno
import hashlib
import os
import shutil
import stat
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from raypipe.errors import ConfigError, DownloadError, causes
from raypipe.storage.cache_folder import CacheClaim, CacheFolder
from raypipe.storage.local_files import NEVER_USED_NS, FileLock, lock_file

Progress: TypeAlias = Callable[[int], None]
"""Called before each write with the total size that the file is about to have."""

Fetch: TypeAlias = Callable[[str, Progress], None]
"""Writes a file to the given path, from its start, and reports its progress."""

Result = TypeVar("Result")

PREFETCH_THREADS: Final = 4
"""Concurrent fetches ahead of one process: enough to hide the latency of an object store behind its bandwidth."""

_GROWTH_BYTES: Final = 4 << 20
"""Reserved beyond the bytes received when the size is unknown, so that not every piece opens the ledger."""


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
    waits: int = 0
    """Waits for another fetch, of the same file or to make room."""
    prefetched: int = 0
    prefetches_refused: int = 0
    """Fetches ahead for which there was no room without removing other files fetched ahead."""
    prefetches_failed: int = 0
    """Fetches ahead that raised an error, unless they were stopped."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file to have in the cache."""

    key: str
    fetch: Fetch
    size_bytes: int | None
    """None if unknown."""

    def __post_init__(self) -> None:
        if not self.key:
            raise ConfigError("the key of a cached file is empty; give its address and revision")
        if self.size_bytes is not None and self.size_bytes < 0:
            raise ConfigError(f"the size of {self.key!r} must not be negative, got {self.size_bytes}")


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

    def __exit__(self, *_: object) -> None:
        self.close()


def _release(lock: FileLock) -> None:
    # Recency is a hint: do not fail if the file was removed by hand, or the disk is read-only by now.
    with suppress(OSError):
        lock.touch()
    lock.release()


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
        self._files = CacheFolder(self.folder, max_bytes, is_default=is_default)
        self._counts: Counter[str] = Counter()
        self._start()
        _caches.add(self)
        try:
            self._files.tidy()
        except OSError as error:
            raise ConfigError(
                f"cannot keep files in {self.folder!r}: {error.strerror or error}. Give the cache a folder on a local "
                f"disk that you may write to."
            ) from error

    def _start(self) -> None:
        """Create what a forked child must recreate: locks that a thread may have held, and the threads."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._pool = DaemonPool(self._prefetch_threads, "raypipe-prefetch")
        self._pending: weakref.WeakValueDictionary[str, Future[bool]] = weakref.WeakValueDictionary()
        """Waiting and running fetches ahead, by key."""

    def __reduce__(self) -> tuple[object, ...]:
        opened = partial(FileCache, is_default=self._is_default, prefetch_threads=self._prefetch_threads)
        return opened, (self.folder, self.max_bytes)

    def hold(self, key: str, fetch: Fetch, size: int | None = None) -> HeldFile:
        """Return the file that `key` stands for, fetched if missing; it stays until closed.

        One thread of the node fetches the file while the others wait; if it fails or dies, the next one tries.

        Args:
            key: identifies the content for good: an address with a revision or an ETag.
            size: the bytes of the file, or None if unknown. A file of another size is an error.
        """
        wanted = Wanted(key, fetch, size)
        try:
            return HeldFile(self._find(wanted) or self._obtain(wanted))
        except Exception as error:
            if not is_disk_full(error):
                raise
        # The disk may have less room than the bound allows.
        freed = self._files.free(self.max_bytes if size is None else size)
        try:
            return HeldFile(self._obtain(wanted))
        except Exception as error:
            if not is_disk_full(error):
                raise
            raise self._disk_full(wanted, freed) from error

    def path_of(self, key: str) -> str:
        """Return where the file that `key` stands for is, if it is there."""
        return self._files.path_of(key)

    def renew(self, key: str, fetch: Fetch, size: int | None = None) -> bool | None:
        """Fetch a file again to replace its copy; return whether the old copy had another content.

        For a file whose content makes no sense: the disk may have garbled it. Those who hold the copy keep it. False
        where there is no copy: whoever uses the file next fetches it. None where there is no room for another one
        beside the copy.
        """
        wanted = Wanted(key, fetch, size)
        old = _digest(self.path_of(key))
        if old is None:
            return False
        claim = self._files.claim(key, is_ahead=False, wait=True)
        try:
            if _digest(claim.path) != old:
                # Another process has replaced it meanwhile.
                return True
            with HeldFile(self._fetch(claim, wanted)) as held:
                return _digest(held.path) != old
        except Exception as error:
            if claim.was_refused or is_disk_full(error):
                return None
            raise
        finally:
            self._files.drop(claim)

    def prefetch(self, key: str, fetch: Fetch, size: int | None = None) -> "Future[bool]":
        """Start to fetch a file in the background, unless it is there; takes the arguments of `hold`.

        The future's result is true if the file is there or another process is fetching it. It is false if the only
        room is that of other files fetched ahead and not used yet: ask again when some were used. The future raises an
        error of the fetch; a later `hold` tries again.
        """
        wanted = Wanted(key, fetch, size)
        if self._is_awaited(wanted):
            there: Future[bool] = Future()
            there.set_result(True)
            return there
        with self._lock:
            if self._stopping.is_set():
                raise ConfigError(f"cannot fetch {key!r} ahead: the cache is closed. Open another FileCache.")
            pending = self._pending.get(key)
            if pending is None or pending.done():
                pending = self._pending[key] = self._pool.submit(partial(self._fetch_ahead, wanted))
            return pending

    def stats(self) -> CacheStats:
        """Return the counters of this object."""
        with self._lock:
            return CacheStats(**self._counts, evictions=self._files.num_removed)

    def close(self) -> None:
        """Stop fetching ahead: cancel fetches that have not begun; running ones end at their next call of `progress`.

        Held files stay held, and `hold` still works.
        """
        with self._lock:
            self._stopping.set()
        self._pool.close()

    def _find(self, wanted: Wanted) -> FileLock | None:
        """Return a lock on the file if it is there and has the wanted size."""
        try:
            lock = lock_file(self.path_of(wanted.key), shared=True)
        except FileNotFoundError:
            return None
        if wanted.size_bytes in (None, lock.size_bytes):
            lock.touch()
            self._count("hits")
            return lock
        lock.release()
        return None

    def _obtain(self, wanted: Wanted) -> FileLock:
        """Return a lock on the file after this thread, or another, has fetched it."""
        try:
            claim = self._files.claim(wanted.key, is_ahead=False, wait=False)
        except BlockingIOError:
            self._count("waits")
            claim = self._files.claim(wanted.key, is_ahead=False, wait=True)
        try:
            return self._find(wanted) or self._replace(claim, wanted)
        finally:
            self._files.drop(claim)

    def _replace(self, claim: CacheClaim, wanted: Wanted) -> FileLock:
        """Fetch a file, instead of one of another size if there is one; see `_fetch`."""
        try:
            old = lock_file(claim.path, wait=False)
        except FileNotFoundError:
            pass
        except BlockingIOError:
            raise DownloadError(
                f"the cached file of {wanted.key!r} at {claim.path!r} has not the {wanted.size_bytes} bytes that it "
                f"should, and is in use. Stop what uses it; if the file has changed, its key must too."
            ) from None
        else:
            # It no longer counts as fetched ahead and not used, so that its successor may take its room.
            old.touch()
            old.release()
        return self._fetch(claim, wanted)

    def _disk_full(self, wanted: Wanted, freed: int) -> DownloadError:
        size = "of unknown size" if wanted.size_bytes is None else f"of {wanted.size_bytes} bytes"
        return DownloadError(
            f"the disk of {self.folder!r} is full: {wanted.key!r} {size} does not fit, with "
            f"{shutil.disk_usage(self.folder).free} bytes free after removing {freed} bytes of the cache that nobody "
            f"used. Free space on that disk, or put the cache on a larger one."
        )

    def _is_awaited(self, wanted: Wanted) -> bool:
        """Return whether the file is there, and mark it as fetched ahead."""
        path = self.path_of(wanted.key)
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
        try:
            claim = self._files.claim(wanted.key, is_ahead=True, wait=False)
        except BlockingIOError:
            return True
        try:
            if not self._is_awaited(wanted):
                self._replace(claim, wanted)
            return True
        except Exception as error:
            if claim.was_refused:
                self._count("prefetches_refused")
                return False
            self._count("prefetches_failed", int(not self._stopping.is_set()))
            if is_disk_full(error):
                raise self._disk_full(wanted, 0) from error
            raise
        finally:
            self._files.drop(claim)

    def _fetch(self, claim: CacheClaim, wanted: Wanted) -> FileLock:
        """Fetch a file, put it in place, and return a lock on it. The caller drops the claim."""
        if wanted.size_bytes is not None:
            self._reserve(claim, wanted.size_bytes)
        try:
            wanted.fetch(claim.partial, partial(self._announce, claim, wanted))
        except Exception as error:
            error.add_note(f"while fetching {wanted.key!r} into the cache at {self.folder!r}")
            raise
        _check_fetched(claim, wanted)
        lock = self._files.place(claim)
        self._count("prefetched" if claim.is_ahead else "misses")
        self._count("bytes_fetched", lock.size_bytes)
        return lock

    def _announce(self, claim: CacheClaim, wanted: Wanted, num_bytes: int) -> None:
        if claim.is_ahead and self._stopping.is_set():
            raise CancelledError
        if wanted.size_bytes is None:
            if num_bytes > claim.num_bytes:
                self._reserve(claim, num_bytes, min(_GROWTH_BYTES, self.max_bytes // 64))
        elif num_bytes > wanted.size_bytes:
            raise DownloadError(
                f"{wanted.key!r} has {wanted.size_bytes} bytes, but its fetch brings {num_bytes} or more. The file has "
                f"changed: open the dataset again."
            )

    def _reserve(self, claim: CacheClaim, num_bytes: int, more_bytes: int = 0) -> None:
        while ahead := self._files.reserve(claim, num_bytes, more_bytes=more_bytes):
            self._count("waits")
            self._files.wait_for_fetch(ahead)

    def _count(self, what: str, num: int = 1) -> None:
        with self._lock:
            self._counts[what] += num


_caches: "weakref.WeakSet[FileCache]" = weakref.WeakSet()


def _start_in_child() -> None:
    for cache in list(_caches):
        cache._start()


os.register_at_fork(after_in_child=_start_in_child)


def _check_fetched(claim: CacheClaim, wanted: Wanted) -> None:
    try:
        status = os.lstat(claim.partial)
    except FileNotFoundError:
        raise ConfigError(f"the fetch of {wanted.key!r} wrote no file to {claim.partial!r}; it must.") from None
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
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


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error or one of its causes says that the disk or its quota is full."""
    links = (link for link in causes(error, also_context=True) if isinstance(link, OSError))
    return any(link.errno in (errno.ENOSPC, errno.EDQUOT) for link in links)


def _digest(path: str) -> bytes | None:
    """Return a hash of the content of a copy; None if there is no copy."""
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "blake2b").digest()
    except FileNotFoundError:
        return None


class DaemonPool:
    """Runs jobs in order on at most `num_threads` threads.

    A thread ends when no job waits. Threads do not keep the process alive: a fetch cut off by its end leaves the same
    state as a kill.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._lock = threading.Lock()
        self._queue: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._threads: set[threading.Thread] = set()

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        """Queue a job and return its future."""
        done: Future[Result] = Future()
        with self._lock:
            self._queue.append((job, done))
            if len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                thread.start()
                self._threads.add(thread)
        return done

    def close(self, most_s: float = threading.TIMEOUT_MAX) -> None:
        """Cancel jobs that have not begun, and wait for the others to end, for at most `most_s` seconds."""
        with self._lock:
            for _, done in self._queue:
                done.cancel()
            self._queue.clear()
            threads = list(self._threads)
        until_s = time.monotonic() + most_s
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._threads.discard(threading.current_thread())
                    return
                job, done = self._queue.popleft()
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(job())
                except BaseException as error:
                    # Not lost: the future raises it.
                    done.set_exception(error)
