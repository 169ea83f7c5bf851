"""The live window on a rank: spans come in, frames go out in the order of the plan.

Holds the rows of the spans at hand in one pool per column, so that a batch is one indexed copy per column, and their
pixels as they arrived, so that a frame is copied once, into its batch.

::

    admit(arrival 5)    rows -> free places of the pool          pixels: kept as they came
    assemble(batch)     pool[places of (span, row), ...]         one copy per frame and camera
    retire(arrival 2)   its places are free again                pixels are let go
"""

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.block import CameraPart, SpanBlock
from raypipe.packed import as_objects
from raypipe.plan import Batch
from raypipe.plan.keyhash import Ints

_FIRST_CAPACITY: Final = 1024

_TRIM_BYTES: Final = 256 << 20
_SPARE_BYTES: Final = 1 << 30
"""Resident memory beside what the C library has handed out, of which code and other libraries are some hundred MB."""


def trim_memory() -> bool:
    """Give memory that is free inside the C library's pools back to the system, if it is much and the library can.

    Decoders and frames of many sizes come and go in several threads, and glibc's pools fragment: without this a rank
    that opens thousands of videos grows by a gigabyte and more. Where the pools are used again there is little to give,
    and giving it would cost the page faults of taking it back: a tenth of the decoding time.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return False
    if spare_bytes(library) > _SPARE_BYTES:
        library.malloc_trim(0)
        return True
    return False


def spare_bytes(library: ctypes.CDLL) -> int:
    """Return how much more memory is resident than the C library has handed out; a large number if it cannot tell."""
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
    """Rows of spans, one array per column, with places that are used again."""

    def __init__(self) -> None:
        self._columns: dict[str, NDArray[Any]] = {}
        self._free = np.arange(_FIRST_CAPACITY)[::-1]
        self._num_free = _FIRST_CAPACITY

    def add(self, columns: Mapping[str, Any], num_rows: int) -> Ints:
        """Copy rows in; return the place of each."""
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
        # For rows of several numbers `take` needs a quarter of the time of an index.
        return {name: values.take(places, axis=0) for name, values in self._columns.items()}

    def free(self, places: Ints) -> None:
        """Let the rows at `places` be written over."""
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


class FrameBuffers:
    """Arrays for the pixels of batches, used again once nobody holds them.

    numpy's reference count tells it: a tensor made from an array, and every view of that tensor, holds the array.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, ...], list[NDArray[Any]]] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return an array that nobody else holds."""
        # Batches are of many lengths where bad data is left out: a shorter one is a view of a longer buffer.
        buffers = self._buffers.setdefault((*shape[1:], np.dtype(dtype).num), [])
        for i in range(len(buffers)):
            # Held by the list, and by the argument of the call: anything more is a user's.
            if len(buffers[i]) >= shape[0] and sys.getrefcount(buffers[i]) == 2:
                return buffers[i][: shape[0]]
        longest = max([shape[0], *map(len, buffers)])
        buffers[:] = [buffer for buffer in buffers if len(buffer) == longest]
        buffers.append(np.empty((longest, *shape[1:]), dtype=dtype))
        return buffers[-1][: shape[0]]


@dataclass(frozen=True, slots=True)
class LiveSpan:
    """A span at hand."""

    places: Ints
    """Where its rows are in the pool."""
    pixels: Mapping[str, "SpanPixels"]
    """By camera; empty where frames are decoded when they leave."""


@dataclass(frozen=True, slots=True)
class SpanPixels:
    """The decoded frames of one camera of a span."""

    parts: tuple[CameraPart, ...]
    part: NDArray[np.int64]
    """``(rows, T)``: which part holds the frame of every window slot."""
    index: NDArray[np.int64]
    """``(rows, T)``: which frame of that part it is."""

    @property
    def num_bytes(self) -> int:
        """Memory of the pixels."""
        return sum(int(np.prod(part.pixels.shape)) * part.pixels.itemsize for part in self.parts)


def find_pixels(parts: Sequence[CameraPart], frames: Ints) -> SpanPixels:
    """Return where the frames of windows, ``(rows, T)``, are in the decoded parts of a span."""
    part, index = np.zeros_like(frames), np.zeros_like(frames)
    for number, candidate in enumerate(parts):
        if len(candidate.frames):
            found = np.searchsorted(candidate.frames, frames).clip(0, len(candidate.frames) - 1)
            is_here = candidate.frames[found] == frames
            part[is_here], index[is_here] = number, found[is_here]
    return SpanPixels(tuple(parts), part, index)


class LiveWindow:
    """The spans at hand on a rank. Not for use by several threads at once."""

    def __init__(self) -> None:
        self._rows = RowPool()
        self._spans: dict[int, LiveSpan] = {}
        self._buffers = FrameBuffers()
        self._pixel_bytes = 0
        self._peak_pixel_bytes = 0
        self._retired_bytes = 0
        self.peak_bytes = 0

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def num_bytes(self) -> int:
        """Memory of rows and pixels at hand."""
        return self._rows.num_bytes + self._pixel_bytes

    def admit(self, arrival: int, block: SpanBlock, pixels: Mapping[str, SpanPixels]) -> None:
        """Take a span in."""
        places = self._rows.add(block.columns, block.num_rows)
        self._spans[arrival] = LiveSpan(places, pixels)
        self._pixel_bytes += sum(camera.num_bytes for camera in pixels.values())
        self._peak_pixel_bytes = max(self._peak_pixel_bytes, self._pixel_bytes)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def retire(self, arrivals: Ints) -> None:
        """Let spans go; those that were never admitted, since no batch asks for them, too."""
        for arrival in arrivals.tolist():
            if arrival not in self._spans:
                continue
            span = self._spans.pop(arrival)
            self._rows.free(span.places)
            size = sum(camera.num_bytes for camera in span.pixels.values())
            self._pixel_bytes -= size
            self._retired_bytes += size
        # Rare enough that what is let go is mostly used again, often enough that memory stays flat.
        if self._retired_bytes > max(_TRIM_BYTES, self._peak_pixel_bytes):
            self._retired_bytes = 0
            trim_memory()

    def take_rows(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Return the row columns of a batch."""
        spans = self._spans
        pairs = zip(batch.span.tolist(), batch.row.tolist(), strict=True)
        places = np.fromiter((spans[span].places[row] for span, row in pairs), dtype=np.int64, count=len(batch.row))
        return self._rows.take(places)

    def take_pixels(self, batch: Batch, camera: str, blank: NDArray[Any]) -> NDArray[Any]:
        """Return the frames of a camera: ``(B, T, height, width, channels)``.

        Args:
            blank: what samples show whose span has no such camera, ``(T, height, width, channels)``.
        """
        frames = self.empty_pixels((len(batch.span), *blank.shape), blank.dtype)
        self.copy_pixels(batch, camera, blank, frames, range(len(frames)))
        return frames

    def copy_pixels(
        self, batch: Batch, camera: str, blank: NDArray[Any], frames: NDArray[Any], samples: Sequence[int]
    ) -> None:
        """Write the frames of some samples of a batch to their places in `frames`; see `take_pixels`."""
        spans, rows = batch.span.tolist(), batch.row.tolist()
        for i in samples:
            pixels, row = self._spans[spans[i]].pixels.get(camera), rows[i]
            if pixels is None:
                frames[i] = blank
                continue
            for t in range(frames.shape[1]):
                frames[i, t] = pixels.parts[pixels.part[row, t]].pixels[pixels.index[row, t]]

    def empty_pixels(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return a buffer for the frames of a batch, in which anything may stand."""
        return self._buffers.take(shape, dtype)
