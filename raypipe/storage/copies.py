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

_KEPT: Final = 4
"""Parts that an open file holds: that of a span, and those that the reader passes on its way there. The cache cannot
remove held parts, and many files are open at once; a released part is still on the node."""

_MOST_NOTED: Final = 256
"""Files whose parts this process remembers: more than are open at once."""

_lock = threading.Lock()
_caches: dict[tuple[str, int, bool], FileCache] = {}


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
    folder, max_bytes, is_default = os.path.expanduser(spec.folder), spec.sure_bytes, spec.max_bytes == FOLDER_BOUND
    key = (folder, max_bytes, is_default)
    with _lock:
        if key not in _caches:
            _caches[key] = FileCache(folder, max_bytes, is_default=is_default)
        return _caches[key]


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
    """A file of known size that keeps its position; subclasses read the bytes."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self._size = size_bytes
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position


HoldPart = Callable[[int, int], HeldFile]
"""Returns the bytes ``[start, stop)`` as a file of the cache."""


class RangedFile(SizedFile):
    """A file for reading and seeking; not thread-safe."""

    def __init__(self, size_bytes: int, hold: HoldPart) -> None:
        super().__init__(size_bytes)
        self._hold = hold
        self._parts: OrderedDict[tuple[int, int], tuple[HeldFile, int]] = OrderedDict()

    def need(self, start: int, stop: int) -> None:
        """Hold the bytes ``[start, stop)``; fetch them with one request if they are not on the node."""
        stop = min(stop, self._size)
        if start < stop and self._find(start, stop) is None:
            self._add(start, stop)

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as one part goes; 0 at the end."""
        view = memoryview(buffer).cast("B")
        if self._position >= self._size or not len(view):
            return 0
        (start, stop), fd = self._part_at(self._position)
        wanted = min(len(view), stop - self._position)
        content = os.pread(fd, wanted, self._position - start)
        view[: len(content)] = content
        self._position += len(content)
        return len(content)

    def read(self, size: int | None = -1) -> bytes:
        """Return `size` bytes from any number of parts; fewer only at the end."""
        left = self._size - self._position if size is None or size < 0 else min(size, self._size - self._position)
        pieces = bytearray()
        while left > 0:
            piece = super().read(left)
            if not piece:
                break
            pieces += piece
            left -= len(piece)
        return bytes(pieces)

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


_parts: "OrderedDict[tuple[str, str], set[tuple[int, int]]]" = OrderedDict()
"""The parts that this process has used of its last `_MOST_NOTED` files, by root and name."""


def note_part(uri: str, name: str, part: tuple[int, int]) -> None:
    """Remember that this process uses a part of a file."""
    with _lock:
        _parts.setdefault((uri, name), set()).add(part)
        _parts.move_to_end((uri, name))
        if len(_parts) > _MOST_NOTED:
            _parts.popitem(last=False)


def list_parts(uri: str, name: str) -> list[tuple[int, int]]:
    """Return the parts of a file that this process has used."""
    with _lock:
        return sorted(_parts.get((uri, name), ()))
