"""Kernel locks on files that other processes may remove at any moment.

A lock belongs to one opening of a file (``flock``), so threads exclude each other as processes do. It ends with its
process. Decides nothing about what is locked.
"""

import fcntl
import os
import time
import weakref
from typing import Final

NEVER_USED_NS: Final = 0
"""The access time of a file that was fetched ahead and not used since. Any use sets another."""

_CLOSED: Final = -1


class FileLock:
    """A lock on the file that stood at `path` when it was taken."""

    __slots__ = ("__weakref__", "fd", "path", "size_bytes", "stamp_ns")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.size_bytes = 0
        """Of the file, when it was locked."""
        self.stamp_ns = 0
        """When the file was last used, as of when it was locked."""
        _held.add(self)

    def touch(self, *, is_used: bool = True) -> None:
        """Note that the file is used now; or, for one that was fetched ahead, that it is not yet."""
        now = time.time_ns()
        os.utime(self.fd, ns=(now if is_used else NEVER_USED_NS, now))

    def read(self) -> bytes:
        """Return the file, which is one small record."""
        return os.pread(self.fd, 4096, 0)

    def write(self, record: bytes) -> None:
        """Put `record`, which is always of the same length, in place of the old one."""
        os.pwrite(self.fd, record, 0)

    def is_in_place(self) -> bool:
        """Return whether the file that is locked still stands at its path: it may be gone, or another may be there."""
        opened = os.fstat(self.fd)
        self.size_bytes = opened.st_size
        self.stamp_ns = opened.st_mtime_ns
        try:
            return os.path.samestat(opened, os.stat(self.path))
        except FileNotFoundError:
            return False

    @property
    def is_released(self) -> bool:
        """Whether the lock was given up."""
        return self.fd == _CLOSED

    def release(self) -> None:
        """Give the lock up; no effect the second time."""
        fd, self.fd = self.fd, _CLOSED
        if fd != _CLOSED:
            try:
                # A child between fork and exec has a copy of the file: closing ours would leave the lock to it.
                fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                os.close(fd)


_held: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


def lock_file(path: str, *, shared: bool = False, wait: bool = True, create: bool = False) -> FileLock:
    """Return a lock on the file that stands at `path`.

    Args:
        create: make the file, and its folder, where there is none.

    Raises:
        FileNotFoundError: there is no file, and it is not to be made.
        BlockingIOError: another has locked it, and `wait` is false.
    """
    # An exclusive lock wants a file that is open for writing on NFS; here it costs nothing.
    flags = (os.O_RDONLY if shared and not create else os.O_RDWR) | (os.O_CREAT if create else 0)
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        try:
            lock = FileLock(path, os.open(path, flags, 0o600))
        except FileNotFoundError:
            if not create:
                raise
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            continue
        try:
            fcntl.flock(lock.fd, operation)
            # It may have been removed between opening and locking it.
            if lock.is_in_place():
                return lock
        except BaseException:
            lock.release()
            raise
        lock.release()


def _let_go_in_child() -> None:
    """Close what a forked child has inherited: else a lock would outlive the process that took it."""
    for lock in list(_held):
        fd, lock.fd = lock.fd, _CLOSED
        if fd != _CLOSED:
            os.close(fd)


os.register_at_fork(after_in_child=_let_go_in_child)
