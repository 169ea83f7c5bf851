"""Files on this machine: locked, listed, checked for errors of the disk, and written whole or not at all.

A kernel lock belongs to one opening of a file (``flock``), so threads exclude each other as processes do. It ends with
its process, however that ends. Other processes may remove a locked file at any moment. Other users may put things into
a folder that is open to all, so only plain files of this user are locked.
"""

import errno
import fcntl
import io
import os
import stat
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from raypipe.errors import ConfigError, DatasetError, DownloadError

SAY_S: Final = 30.0
"""Warn of a wait for a lock after this time."""

WAIT_S: Final = 600.0
"""How long to wait for a lock while what its holder writes does not change: a fetch makes files grow."""

NEVER_USED_NS: Final = 0
"""The access time of a file that is fetched ahead and not used since. Any use changes it."""

LOOK_AT_DISK: Final = "look at the disk (dmesg), the mount, and how many files may be open (ulimit -n)"

ROOT: Final = 0
_PIECE_BYTES: Final = 1 << 20
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

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


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
        grows: the file that the holder of the lock writes; the wait goes on as long as this file changes.

    Raises:
        FileNotFoundError: there is no file, and `create` is false: it makes the folder too.
        BlockingIOError: another thread or process has locked it, and `wait` is false.
        ConfigError: it is a link, or not a file of this user.
        DownloadError: nothing has changed for `WAIT_S` while another thread or process had the lock.
    """
    # On NFS an exclusive lock needs a file that is open for writing; elsewhere this costs nothing.
    flags = (os.O_RDONLY if shared and not create else os.O_RDWR) | (os.O_CREAT if create else 0)
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    while True:
        try:
            lock = FileLock(path, _open_own(path, flags))
        except FileNotFoundError:
            if not create:
                raise
            check_own_folder(os.path.dirname(path))
            continue
        try:
            if wait:
                wait_for_lock(path, partial(_try_lock, lock.fd, operation), grows or path)
            else:
                fcntl.flock(lock.fd, operation)
            # The file may have been removed between opening and locking it.
            if lock.is_in_place():
                return lock
        except BaseException:
            lock.release()
            raise
        lock.release()


def _open_own(path: str, flags: int) -> int:
    """Return the descriptor of a plain file of this user; refuse anything that another user may have put there."""
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


def _try_lock(fd: int, operation: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(fd, operation)
        return True
    return False


def wait_for_lock(path: str, try_lock: Callable[[], bool], moves: str, owner: str = "the cache") -> None:
    """Call `try_lock` until it returns True; raise if nothing in `moves`, where its holder writes, changes."""
    since = begun = time.monotonic()
    is_said, seen, pause_s = False, _look(moves), 0.0005
    while not try_lock():
        time.sleep(pause_s)
        pause_s, now, found = min(2 * pause_s, 0.02), time.monotonic(), _look(moves)
        if found != seen:
            since, seen = now, found
        if now - begun > SAY_S and not is_said:
            warnings.warn(f"waits for the lock of {path!r}, which another process has", stacklevel=2)
            is_said = True
        if now - since > WAIT_S:
            raise DownloadError(
                f"another process has the lock of {path!r} for {now - begun:.0f} s, and nothing has moved. End it "
                f"(`fuser {path}` tells which), or give {owner} another folder."
            )


def _look(path: str) -> tuple[int, int]:
    """Return what changes as a file, or those of a folder, are written."""
    try:
        found = os.stat(path)
        is_folder = stat.S_ISDIR(found.st_mode)
        num_bytes = sum(one.stat().st_size for one in os.scandir(path)) if is_folder else found.st_size
        return num_bytes, found.st_mtime_ns
    except OSError:
        return 0, 0


def walk_files(top: str, below: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of all files in a local folder and its folders, with ``/``.

    Follows links, as reading does, except those that lead back to a folder above them: `above` has their real paths.
    """
    place = os.path.realpath(os.path.join(top, below))
    try:
        entries = list(os.scandir(place)) if place not in above else []
    except OSError:
        # The reader of a file in it raises a better error.
        return
    for entry in entries:
        name = f"{below}/{entry.name}".lstrip("/")
        if entry.is_dir():
            yield from walk_files(top, name, (*above, place))
        elif entry.is_file():
            yield name


def check_file(path: str, start: int = 0, stop: int | None = None) -> None:
    """Raise if this machine cannot read the bytes of a local file, whatever their content.

    For a file that a library failed to read without saying why: the disk fails, or too many files are open.
    """
    if not os.path.isfile(path):
        return
    try:
        with open(path, "rb", buffering=0) as stream:
            stream.seek(start)
            while (stop is None or stream.tell() < stop) and stream.read(_PIECE_BYTES):
                pass
    except OSError as error:
        raise unreadable_file(path, error) from error


def unreadable_file(path: str, error: OSError, remedy: str = LOOK_AT_DISK) -> DownloadError:
    """Return the error for a file that this machine could not read, whatever its content."""
    return DownloadError(
        f"this machine cannot read {path!r}: {error.strerror or error}. That says nothing of what the file holds: "
        f"{remedy}."
    )


def inside(folder: str | os.PathLike[str], name: str | os.PathLike[str]) -> Path:
    """Return the path of the file `name` in `folder`; use it for every file whose name comes from data.

    Raise if it leads out of the folder, by ``..``, as an absolute path or through a link.
    """
    top, target = Path(folder), Path(folder) / name
    parts = target.relative_to(top).parts if target.is_relative_to(top) else ()
    is_path = parts and ".." not in parts and "\0" not in str(target)
    if not is_path or not Path(os.path.realpath(target.parent)).is_relative_to(os.path.realpath(top)):
        raise DatasetError(
            f"{os.fspath(name)!r} lies outside the folder {str(top)!r}, and nothing is written there. A name in the "
            f"dataset leads out of it; correct the name."
        )
    return target


def check_writable(path: Path) -> None:
    """Raise a `ConfigError` if the file `path` cannot be written."""
    if path.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: it is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {str(path)!r}: no permission; choose another place")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file next to its place and rename it, so that a full disk leaves the old file."""
    # A text may have the name of a file, and that may have bytes that are not UTF-8.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    # Write the target of a link, never the link itself.
    target = Path(os.path.realpath(path))
    try:
        if (target.is_file() or not target.exists()) and os.access(target.parent, os.W_OK):
            replace_file(target, data)
        else:
            target.write_bytes(data)
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", str(path)) from error


def replace_file(target: Path, content: bytes, *, is_synced: bool = False) -> None:
    """Put a file in place of an older one, or of a link; a reader sees the old content or the new, never a part.

    Makes the folder if it is missing. With `is_synced`, the content is on the disk before the file has its name.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with open(half, "wb") as stream:
            stream.write(content)
            if is_synced:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(half, target)
    finally:
        half.unlink(missing_ok=True)


def save_figure(figure: Any, path: Path, dpi: int) -> None:
    """Write a matplotlib figure in the format of the file's suffix; see `write_whole`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.removeprefix("."), dpi=dpi)
    write_whole(path, buffer.getvalue())
