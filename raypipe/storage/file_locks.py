"""Kernel locks on files that other processes may remove at any moment.

A lock belongs to one opening of a file (``flock``), so threads exclude each other as processes do. It ends with its
process, however that ends. Other users may put things into a folder that is open to all, so only plain files of this
user are opened.
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
"""Warn of a wait after this time."""

WAIT_S: Final = 600.0
"""How long to wait for a lock while its file does not change: a file that is locked for long grows, as a fetch does."""

NEVER_USED_NS: Final = 0
"""The access time of a file that is fetched ahead and not used since. Any use changes it."""

ROOT: Final = 0
_CLOSED: Final = -1


class FileLock:
    """A lock on the file that was at `path` when the lock was taken."""

    __slots__ = ("__weakref__", "fd", "path", "size_bytes", "stamp_ns")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.size_bytes = 0
        """The size of the file when it was locked."""
        self.stamp_ns = 0
        """The time of the file's last use before it was locked."""
        _held.add(self)

    def touch(self, *, is_used: bool = True) -> None:
        """Mark the file as used now; or, with `is_used` false, as fetched ahead and not used yet."""
        now = time.time_ns()
        os.utime(self.fd, ns=(now if is_used else NEVER_USED_NS, now))

    def is_in_place(self) -> bool:
        """Return whether the locked file is still at its path; it may have been removed or replaced."""
        opened = os.fstat(self.fd)
        self.size_bytes = opened.st_size
        self.stamp_ns = opened.st_mtime_ns
        try:
            return os.path.samestat(opened, os.lstat(self.path))
        except FileNotFoundError:
            return False

    @property
    def is_released(self) -> bool:
        """Whether the lock was released."""
        return self.fd == _CLOSED

    def release(self) -> None:
        """Release the lock; no effect the second time."""
        fd, self.fd = self.fd, _CLOSED
        if fd != _CLOSED:
            try:
                # A child between fork and exec has a copy of the descriptor; closing ours alone would keep the lock.
                fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                os.close(fd)


_held: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close inherited files in a forked child: otherwise a lock would outlive the process that took it."""
    for lock in list(_held):
        fd, lock.fd = lock.fd, _CLOSED
        if fd != _CLOSED:
            os.close(fd)


os.register_at_fork(after_in_child=_let_go_in_child)


def lock_file(path: str, *, shared: bool = False, wait: bool = True, create: bool = False, grows: str = "") -> FileLock:
    """Return a lock on the file at `path`.

    Args:
        create: create the file and its folder if missing.
        grows: the file that the holder of the lock writes; the wait goes on as long as this file changes.

    Raises:
        FileNotFoundError: there is no file, and `create` is false.
        BlockingIOError: another thread or process has locked it, and `wait` is false.
        ConfigError: it is a link, or not a file of this user.
        DownloadError: nothing has changed for `WAIT_S` while another thread or process had the lock.
    """
    # On NFS an exclusive lock needs a file that is open for writing; elsewhere this costs nothing.
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
            # The file may have been removed between opening and locking it.
            if lock.is_in_place():
                return lock
        except BaseException:
            lock.release()
            raise
        lock.release()


def open_own(path: str, flags: int) -> int:
    """Return the descriptor of a plain file of this user; refuse anything that another user may have put there.

    Raises:
        ConfigError: it is something else.
    """
    refusal = ConfigError(
        f"{path!r} is a link, or no file of this user, and is left alone. Look who has put it there; remove it, or "
        f"give the cache a folder of your own."
    )
    try:
        # O_NONBLOCK: opening a pipe must not block.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise refusal from error
        raise
    found = os.fstat(fd)
    is_linked = found.st_nlink > 1 and bool(flags & os.O_RDWR)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or is_linked:
        os.close(fd)
        raise refusal
    return fd


def check_own_folder(folder: str) -> None:
    """Create the folder of a cache if missing; raise if the folder, or a link in its place, is another user's."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    # A folder that the system has mounted belongs to root.
    if any(found.st_uid not in (os.getuid(), ROOT) for found in (os.lstat(folder), os.stat(folder))):
        raise PermissionError(errno.EPERM, "it belongs to another user", folder)


def _wait_for(lock: FileLock, operation: int, grows: str) -> None:
    """Take a lock when it is free; raise if nothing has changed for too long."""
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
