"""A remote file with only its parts in use on the node, each part a file of the node's cache.

::

    file    |----|----|----|----|----|----|      blocks of 1 MiB, fetched as they are read
                   [=======]                     a part that `need` asked for, fetched with one request
"""

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from raypipe.storage.node_cache import HeldFile
from raypipe.storage.streams import SizedFile

BLOCK_BYTES: Final = 1 << 20
"""Fetched when a reader has not said what it will read: an index of a video, a footer, columns of a few episodes."""

_KEPT: Final = 4
"""Parts that an open file holds: that of a span, and those that the reader passes on its way there. The cache cannot
remove held parts, and many files are open at once; a released part is still on the node."""

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
