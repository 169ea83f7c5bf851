"""Hold the rows of the spans at hand on a rank.

There is one pool per column, so a batch takes one indexed copy per column.

::

    admit(arrival 5)    rows -> free places of the pool
    take_rows(batch)    pool[places of (span, row), ...]
    retire(arrival 2)   its places are free again
"""

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.feed import SpanBlock, as_objects
from raypipe.plan import Batch, Ints

_FIRST_CAPACITY: Final = 1024

_SPARE_BYTES: Final = 1 << 29
"""Resident memory beyond what the C library has handed out; code and other libraries are some 300 MB of it."""


def trim_memory() -> bool:
    """Return free memory of the C library's pools to the system, if it is a lot; return whether this was done.

    Decoders and frames of many sizes come and go in several threads, and glibc's pools fragment. Without this a rank
    that opens thousands of videos grows by a gigabyte or more. If the pools are being reused there is little to return,
    and taking it back would cost page faults: a tenth of the decoding time.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return False
    if spare_bytes(library) > _SPARE_BYTES:
        library.malloc_trim(0)
        return True
    return False


def spare_bytes(library: ctypes.CDLL) -> int:
    """Return the resident bytes beyond what the C library has handed out; a large number if it cannot tell."""
    if not hasattr(library, "mallinfo2"):
        return sys.maxsize
    library.mallinfo2.restype = _Mallinfo2
    info = library.mallinfo2()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident - int(info.uordblks) - int(info.hblkhd)


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``, since 2.33."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class RowPool:
    """Rows of spans in one array per column; it reuses free places."""

    def __init__(self) -> None:
        self._columns: dict[str, NDArray[Any]] = {}
        self._free = np.arange(_FIRST_CAPACITY)[::-1]
        self._num_free = _FIRST_CAPACITY

    def add(self, columns: Mapping[str, Any], num_rows: int) -> Ints:
        """Return the place of each row, after copying the rows in."""
        if num_rows > self._num_free:
            self._grow(num_rows)
        self._num_free -= num_rows
        places = self._free[self._num_free : self._num_free + num_rows].copy()
        for name, values in columns.items():
            if name not in self._columns:
                self._columns[name] = self._empty(values)
            self._columns[name][places] = as_objects(values) if isinstance(values, list) else values
        return places

    def take(self, places: Ints) -> dict[str, NDArray[Any]]:
        """Return the rows at `places`: one indexed copy per column."""
        # For rows of several numbers `take` needs a quarter of the time of indexing.
        return {name: values.take(places, axis=0) for name, values in self._columns.items()}

    def free(self, places: Ints) -> None:
        """Allow later rows to overwrite those at `places`."""
        self._free[self._num_free : self._num_free + len(places)] = places
        self._num_free += len(places)

    @property
    def num_bytes(self) -> int:
        """Memory of the pool."""
        return sum(values.nbytes for values in self._columns.values())

    def _empty(self, values: Any) -> NDArray[Any]:
        shape, dtype = ((), object) if isinstance(values, list) else (values.shape[1:], values.dtype)
        return np.empty((len(self._free), *shape), dtype=dtype)

    def _grow(self, num_rows: int) -> None:
        old = len(self._free)
        new = max(2 * old, old + num_rows)
        free = np.empty(new, dtype=np.int64)
        free[: self._num_free] = self._free[: self._num_free]
        free[self._num_free : self._num_free + new - old] = np.arange(old, new)[::-1]
        self._free, self._num_free = free, self._num_free + new - old
        for name, values in self._columns.items():
            grown = np.empty((new, *values.shape[1:]), dtype=values.dtype)
            grown[:old] = values
            self._columns[name] = grown


class LiveRows:
    """The rows of the spans at hand on a rank. Not thread-safe."""

    def __init__(self) -> None:
        self._rows = RowPool()
        self._places: dict[int, Ints] = {}
        self._images: dict[int, Mapping[str, Mapping[int, Any]]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, arrival: int) -> bool:
        return arrival in self._places

    @property
    def num_bytes(self) -> int:
        """Memory of the rows in bytes, without stored images."""
        return self._rows.num_bytes

    def admit(self, arrival: int, block: SpanBlock) -> None:
        """Add a span."""
        self._places[arrival] = self._rows.add(block.columns, block.num_rows)
        if block.stored_images:
            self._images[arrival] = block.stored_images

    def retire(self, arrivals: Iterable[int]) -> None:
        """Release spans. Ignores those never admitted, because no batch needed them."""
        for arrival in arrivals:
            if arrival in self._places:
                self._rows.free(self._places.pop(arrival))
                self._images.pop(arrival, None)

    def clear(self) -> None:
        """Release all spans."""
        self._rows, self._places, self._images = RowPool(), {}, {}

    def take_rows(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Return the row columns of a batch."""
        pairs = zip(batch.span.tolist(), batch.row.tolist(), strict=True)
        places = np.fromiter((self._places[span][row] for span, row in pairs), dtype=np.int64, count=len(batch.row))
        return self._rows.take(places)

    def stored_images(self, arrival: int, camera: str) -> Mapping[int, Any]:
        """Return, by frame, a camera's images that the rows of a span store."""
        return self._images[arrival][camera]
