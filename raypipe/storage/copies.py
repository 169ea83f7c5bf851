"""Copies of remote files on this node: where and how many bytes, which files are kept whole, and both kinds open.

::

    file    |----|----|----|----|----|----|      blocks of 1 MiB, fetched as they are read
                   [=======]                     a part that `need` asked for, fetched with one request

A small file is one file of the node's cache. Of a large one, the cache keeps the parts in use, each as a file.
"""

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Final, Literal

from raypipe.errors import ConfigError
from raypipe.storage.node_cache import FileCache, HeldFile
from raypipe.text import parse_bytes

DEFAULT_FOLDER: Final = "~/.cache/raypipe/files"

FOLDER_BOUND: Final = "folder"

DEFAULT_BYTES: Final = 64 << 30
"""The bound of a folder for which no job has given one."""

PART_BYTES: Final = 32 << 20
"""Files up to this size are fetched whole even if the dataset does not fit: an episode's video is no larger."""

LOOK_BYTES: Final = 8 << 20
"""Files up to this size are fetched whole even for a look at a footer or index: a request costs as much."""

BLOCK_BYTES: Final = 1 << 20
"""Fetched when a reader has not said what it will read: an index of a video, a footer, columns of a few episodes."""

_LINE_BYTES: Final = 8 << 10
"""Read at a time to find the end of a line; a divisor of `BLOCK_BYTES`."""

_KEPT: Final = 4
"""Parts that an open file holds: that of a span, and those that the reader passes on its way there. The cache cannot
remove held parts, and many files are open at once; a released part is still on the node."""

_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Where every node keeps remote files, and how many bytes of them."""

    folder: str = DEFAULT_FOLDER
    """On a local disk of the node. All processes and jobs of a user may share it."""

    max_bytes: int | Literal["folder"] = FOLDER_BOUND
    """For whole and half-fetched files together: a number, or text such as ``"200GB"``. The cache removes the least
    recently used of the files not in use. ``"folder"`` is 64 GiB, or the larger bound last given for the folder: a
    caller without a bound, such as `open_dataset`, does not remove what a job with a larger cache has kept."""

    whole_bytes: int = 1 << 30
    """Files up to this size are fetched whole: one request, and every later epoch reads them from disk. For larger
    files only the parts in use are fetched. LeRobot closes a file of videos at 200 or 500 MB."""

    prefetch: bool = True
    """Whether a rank fetches what it needs next ahead of time."""

    def __post_init__(self) -> None:
        if not self.folder or "://" in self.folder:
            raise ConfigError(f"the folder of a cache is {self.folder!r}; give a folder on a local disk")
        if self.max_bytes != FOLDER_BOUND:
            most = parse_bytes(self.max_bytes, "max_bytes of a cache", named_value=FOLDER_BOUND)
            object.__setattr__(self, "max_bytes", most)
        object.__setattr__(self, "whole_bytes", parse_bytes(self.whole_bytes, "whole_bytes of a cache", least=0))

    @property
    def sure_bytes(self) -> int:
        """The bytes that the cache may hold on any node, whatever other jobs gave for its folder there."""
        return DEFAULT_BYTES if self.max_bytes == FOLDER_BOUND else self.max_bytes

    def for_a_look(self) -> "CacheSpec":
        """Return this cache for readers of a few bytes of many files: it does not fetch large files whole."""
        return replace(self, whole_bytes=min(self.whole_bytes, LOOK_BYTES))

    def is_fetched_whole(self, size_bytes: int, run_bytes: int) -> bool:
        """Return whether a file is fetched whole, given its size and that of all files that the run reads.

        If those do not fit in the cache, only small files are fetched whole: a whole file for each span would fetch the
        dataset many times over.
        """
        if size_bytes > min(self.whole_bytes, self.sure_bytes):
            return False
        return run_bytes <= self.sure_bytes or size_bytes <= PART_BYTES


def open_cache(spec: CacheSpec) -> FileCache:
    """Return the cache of this process; its files are shared with all processes of the node."""
    with _lock:
        return _open_cache(os.path.expanduser(spec.folder), spec.sure_bytes, spec.max_bytes == FOLDER_BOUND)


@cache
def _open_cache(folder: str, max_bytes: int, is_default: bool) -> FileCache:
    return FileCache(folder, max_bytes, is_default=is_default)


class HeldStream(io.BufferedReader):
    """An open file of the cache; the cache keeps it until it is closed."""

    def __init__(self, held: HeldFile) -> None:
        super().__init__(io.FileIO(held.path))
        self._held = held

    def close(self) -> None:
        """Close the file; the cache may then remove it."""
        super().close()
        self._held.close()

    def __del__(self) -> None:
        # Parquet readers keep files open as long as they live, and do not close them.
        self.close()


class SizedFile(io.RawIOBase):
    """A file of known size for reading and seeking; subclasses read the bytes. Not thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self._size = size_bytes
        self._position = 0

    def _read_at(self, start: int, stop: int) -> bytes:
        raise NotImplementedError

    def read(self, size: int | None = -1) -> bytes:
        """Return `size` bytes with one call of `_read_at`; fewer only at the end, or if that returns fewer."""
        stop = self._size if size is None or size < 0 else min(self._position + size, self._size)
        content = self._read_at(self._position, stop) if self._position < stop else b""
        self._position += len(content)
        return content

    def readline(self, size: int | None = -1) -> bytes:
        """Return the bytes up to the end of the line; the default implementation reads them one by one."""
        line = bytearray()
        stop = self._size if size is None or size < 0 else min(self._position + size, self._size)
        while self._position < stop and not line.endswith(b"\n"):
            # To a multiple, so that no block is fetched for bytes behind the line.
            ahead = self._position - self._position % _LINE_BYTES + _LINE_BYTES
            piece, end, _ = self._read_at(self._position, min(ahead, stop)).partition(b"\n")
            if not piece + end:
                break
            line += piece + end
            self._position += len(piece + end)
        return bytes(line)

    def readall(self) -> bytes:
        """Return the rest with one call; the default implementation asks for pieces."""
        return self.read()

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as `read` does."""
        view = memoryview(buffer).cast("B")
        content = self.read(len(view))
        view[: len(content)] = content
        return len(content)

    def readable(self) -> bool:
        """Return True."""
        return True

    seekable = readable

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position


class RangedFile(SizedFile):
    """A file whose parts are files of the cache; `hold` returns the bytes ``[start, stop)`` as such a file."""

    def __init__(self, size_bytes: int, hold: Callable[[int, int], HeldFile]) -> None:
        super().__init__(size_bytes)
        self._hold = hold
        self._parts: OrderedDict[tuple[int, int], tuple[HeldFile, int]] = OrderedDict()

    def need(self, start: int, stop: int) -> None:
        """Hold the bytes ``[start, stop)``; fetch them with one request if they are not on the node."""
        stop = min(stop, self._size)
        if start < stop and self._find(start, stop) is None:
            self._add(start, stop)

    def _read_at(self, start: int, stop: int) -> bytes:
        content = bytearray()
        while start < stop:
            (first, last), fd = self._part_at(start)
            piece = os.pread(fd, min(stop, last) - start, start - first)
            if not piece:
                break
            content += piece
            start += len(piece)
        return bytes(content)

    def paths(self) -> list[str]:
        """Return the paths of the parts that are held."""
        return [held.path for held, _ in self._parts.values()]

    def close(self) -> None:
        """Release all parts."""
        while self._parts:
            self._drop()
        super().close()

    def _part_at(self, position: int) -> tuple[tuple[int, int], int]:
        found = self._find(position, position + 1)
        if found is None:
            first = position - position % BLOCK_BYTES
            found = self._add(first, min(first + BLOCK_BYTES, self._size))
        self._parts.move_to_end(found)
        return found, self._parts[found][1]

    def _find(self, start: int, stop: int) -> tuple[int, int] | None:
        return next((part for part in reversed(self._parts) if part[0] <= start and stop <= part[1]), None)

    def _add(self, start: int, stop: int) -> tuple[int, int]:
        while len(self._parts) >= _KEPT:
            # Drop first, so that the cache can use its room.
            self._drop()
        held = self._hold(start, stop)
        self._parts[start, stop] = (held, os.open(held.path, os.O_RDONLY))
        return start, stop

    def _drop(self) -> None:
        _, (held, fd) = self._parts.popitem(last=False)
        os.close(fd)
        held.close()


def used_parts(uri: str, name: str) -> set[tuple[int, int]]:
    """Return the parts of a file that this process has used; the caller adds to them."""
    with _lock:
        return _used_parts(uri, name)


# Of more files than are open at once.
@lru_cache(maxsize=256)
def _used_parts(_uri: str, _name: str) -> set[tuple[int, int]]:
    return set()
