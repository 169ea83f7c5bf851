"""Kernel locks on files that other processes may remove at any moment.

A lock belongs to one opening of a file (``flock``), so threads exclude each other as processes do. It ends with its
process. Decides nothing about what is locked. Others may put things into a folder that is open to all: only plain files
of this user are opened.
"""

import errno
import fcntl
import os
import stat
import time
import warnings
import weakref
from typing import Final

from raypipe.errors import ConfigError, DownloadError

SAY_S: Final = 30.0
"""After which a wait is said."""

WAIT_S: Final = 600.0
"""How long a lock is waited for while nothing moves: what is locked for long grows meanwhile, as a fetch does."""

ROOT: Final = 0

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
            return os.path.samestat(opened, os.lstat(self.path))
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


def lock_file(path: str, *, shared: bool = False, wait: bool = True, create: bool = False, grows: str = "") -> FileLock:
    """Return a lock on the file that stands at `path`.

    Args:
        create: make the file, and its folder, where there is none.
        grows: the file that whoever has the lock writes; as long as it changes, the wait goes on.

    Raises:
        FileNotFoundError: there is no file, and it is not to be made.
        BlockingIOError: another has locked it, and `wait` is false.
        ConfigError: it is a link, or not a file of this user.
        DownloadError: another has had the lock for `WAIT_S`, and nothing has moved.
    """
    # An exclusive lock wants a file that is open for writing on NFS; here it costs nothing.
    flags = (os.O_RDONLY if shared and not create else os.O_RDWR) | (os.O_CREAT if create else 0)
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        try:
            lock = FileLock(path, open_own(path, flags))
        except FileNotFoundError:
            if not create:
                raise
            check_own_folder(os.path.dirname(path))
            continue
        try:
            if wait:
                _wait_for(lock, operation, grows or path)
            else:
                fcntl.flock(lock.fd, operation | fcntl.LOCK_NB)
            # It may have been removed between opening and locking it.
            if lock.is_in_place():
                return lock
        except BaseException:
            lock.release()
            raise
        lock.release()


def open_own(path: str, flags: int) -> int:
    """Open a plain file of this user, and nothing that another may have put in its place; return its number.

    Raises:
        ConfigError: it is something else.
    """
    try:
        # A pipe must not make anybody wait.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_own(path) from error
        raise
    found = os.fstat(fd)
    is_shared = found.st_nlink > 1 and bool(flags & os.O_RDWR)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or is_shared:
        os.close(fd)
        raise _not_own(path)
    return fd


def _not_own(path: str) -> ConfigError:
    return ConfigError(
        f"{path!r} is a link, or no file of this user, and is left alone. Look who has put it there; remove it, or "
        f"give the cache a folder of your own."
    )


def check_own_folder(folder: str) -> None:
    """Make the folder of a cache, unless it is there; raises where another user has made it, or a link in its place."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    # One that the system has mounted is root's.
    if any(found.st_uid not in (os.getuid(), ROOT) for found in (os.lstat(folder), os.stat(folder))):
        raise PermissionError(errno.EPERM, "it belongs to another user", folder)


def _wait_for(lock: FileLock, operation: int, grows: str) -> None:
    """Take a lock when it is free; raise where nothing has moved for too long."""
    since = begun = time.monotonic()
    is_said, seen, pause_s = False, _look(grows), 0.0005
    while True:
        try:
            fcntl.flock(lock.fd, operation | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(pause_s)
        pause_s, now, found = min(2 * pause_s, 0.02), time.monotonic(), _look(grows)
        if found != seen:
            since, seen = now, found
        if now - begun > SAY_S and not is_said:
            warnings.warn(f"waits for the lock of {lock.path!r}, which another process has", stacklevel=2)
            is_said = True
        if now - since > WAIT_S:
            raise DownloadError(
                f"another process has the lock of {lock.path!r} for {now - begun:.0f} s, and nothing has moved. End it "
                f"(`fuser {lock.path}` tells which), or give the cache another folder."
            )


def _look(path: str) -> tuple[int, int]:
    try:
        found = os.lstat(path)
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _let_go_in_child() -> None:
    """Close what a forked child has inherited: else a lock would outlive the process that took it."""
    for lock in list(_held):
        fd, lock.fd = lock.fd, _CLOSED
        if fd != _CLOSED:
            os.close(fd)


os.register_at_fork(after_in_child=_let_go_in_child)
