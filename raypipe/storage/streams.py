"""Files of a remote root, open for reading."""

import io
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import IO, Any, Final

from raypipe.storage.node_cache import HeldFile

AHEAD_BYTES: Final = 5 << 20
"""Bytes that a small read from a web server asks for, as in fsspec: readers usually read on."""

AskPart = Callable[[int, int], bytes]
"""Returns all of the bytes ``[start, stop)``."""

Naming = Callable[[], AbstractContextManager[None]]
"""Gives the errors of its body the name of the file."""


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


def open_asked(size_bytes: int, ask: AskPart) -> IO[bytes]:
    """Return a file that asks for each part as it is read, with some bytes ahead."""
    return io.BufferedReader(_AskedFile(size_bytes, ask), min(AHEAD_BYTES, size_bytes))


def open_named(stream: IO[bytes], naming: Naming) -> IO[bytes]:
    """Return a file of fsspec of which errors in reading have the name."""
    return io.BufferedReader(_NamedFile(stream, naming))


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


class _AskedFile(SizedFile):
    """Sends a request for every read."""

    def __init__(self, size_bytes: int, ask: AskPart) -> None:
        super().__init__(size_bytes)
        self._ask = ask

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with one request; less only at the end."""
        view = memoryview(buffer).cast("B")
        stop = min(self._position + len(view), self._size)
        if self._position >= stop:
            return 0
        content = self._ask(self._position, stop)
        view[: len(content)] = content
        self._position += len(content)
        return len(content)

    def readall(self) -> bytes:
        """Return the rest with one request; the default implementation asks for pieces."""
        start, self._position = self._position, max(self._position, self._size)
        return self._ask(start, self._size) if start < self._size else b""


class _NamedFile(SizedFile):
    """Reads what the filesystem has opened, which may have the same object for all who open a file."""

    def __init__(self, stream: IO[bytes], naming: Naming) -> None:
        self._stream, self._naming = stream, naming
        stream.seek(0, os.SEEK_END)
        super().__init__(stream.tell())

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or less of it."""
        view = memoryview(buffer).cast("B")
        content = self._read(len(view))
        view[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        """Return the rest as one read, where the default makes many."""
        return self._read(max(0, self._size - self._position))

    def _read(self, size: int) -> bytes:
        with self._naming():
            self._stream.seek(self._position)
            content = self._stream.read(size)
        self._position += len(content)
        return content

    def close(self) -> None:
        """Close the file of the filesystem too."""
        if not self.closed:
            self._stream.close()
        super().close()
