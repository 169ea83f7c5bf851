"""Reusable memory for pixels: of batches, and of frames that wait."""

import math
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[Any]
"""``(height, width, channels)`` of one frame."""

_BATCHES: Final = 2
"""Batches in memory at once: one in training, and one that is ready or being assembled."""

_SLAB_BYTES: Final = 64 << 20
"""glibc maps each allocation above 32 MB separately, so frames that stay do not lie between those that come and go.
Pages that nothing has written to take no memory."""

_MOST_IN_SLAB: Final = 1024
"""Most frames of a slab: each is a Python object from the start."""

_WAIT_S: Final = 1.0
_LOOK_S: Final = 0.001


class BatchBuffers:
    """Arrays for the pixels of batches, reused once no one holds them.

    The reference count of an array shows this: a tensor made from an array, and every view of that tensor, holds it.
    Threads may share the buffers: while one epoch follows another, both assemble batches.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[tuple[Any, ...], list[NDArray[Any]]] = {}
        self.is_asked = False
        """Whether the training loop waits for a batch: it releases what it holds only after it has that batch."""

    def take(self, camera: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return an array for a camera of a batch that no one else holds.

        A loop releases a batch when it has the next one; this waits for that before it makes a third array.
        """
        with self._lock:
            # Batches differ in length if bad data is left out: a shorter one is a view of a longer buffer.
            buffers = self._buffers.setdefault((camera, *shape[1:], np.dtype(dtype).num), [])
            free = self._wait_for_free(buffers, shape[0])
            if free is not None:
                _drop_surplus(buffers, free)
            else:
                longest = max([shape[0], *map(len, buffers)])
                buffers[:] = [buffer for buffer in buffers if len(buffer) == longest]
                free = np.empty((longest, *shape[1:]), dtype=dtype)
                buffers.append(free)
            return free[: shape[0]]

    def _wait_for_free(self, buffers: list[NDArray[Any]], length: int) -> NDArray[Any] | None:
        until = time.monotonic() + _WAIT_S
        while True:
            # In this order: a loop that asks has released its batch before.
            num_fitting = sum(len(buffer) >= length for buffer in buffers)
            is_last = self.is_asked or num_fitting < _BATCHES or time.monotonic() > until
            free = _find_free(buffers, length)
            if free is not None or is_last:
                return free
            time.sleep(_LOOK_S)


def _find_free(buffers: list[NDArray[Any]], length: int) -> NDArray[Any] | None:
    for i in range(len(buffers)):
        # The list and the argument of the call hold it; any further reference is a user's.
        if len(buffers[i]) >= length and sys.getrefcount(buffers[i]) <= 2:
            return buffers[i]
    return None


def _drop_surplus(buffers: list[NDArray[Any]], taken: NDArray[Any]) -> None:
    """Drop extra buffers, made while a user held several at once, that no one holds any more."""
    for i in reversed(range(len(buffers))):
        if len(buffers) > _BATCHES and buffers[i] is not taken and sys.getrefcount(buffers[i]) <= 2:
            del buffers[i]


class FramePool:
    """Memory for frames that wait until they leave; the threads and epochs of a rank share it.

    The pool copies what a decoder or a task gives, and the original is released at once. Held for as long as frames
    wait, it would fragment the C library's pools (2.3 GB instead of 1.3 while 0.7 GB of frames wait), and an object of
    the object store would stay for its last frame. The copy costs 2% of decoding.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[tuple[int, ...], Any], list[Pixels]] = {}
        self.num_stores = 0
        """Stores that use the pool; without any, it keeps nothing."""

    def take(self, shape: tuple[int, ...], dtype: Any) -> Pixels:
        """Return memory for a frame that no one else has."""
        with self._lock:
            free = self._free.setdefault((shape, np.dtype(dtype)), [])
            if not free:
                frame_bytes = math.prod(shape) * np.dtype(dtype).itemsize
                num_in_slab = min(_MOST_IN_SLAB, max(1, _SLAB_BYTES // max(1, frame_bytes)))
                # Without a store nothing uses the rest of a slab.
                num_frames = num_in_slab if self.num_stores > 0 else 1
                free.extend(np.empty((num_frames, *shape), dtype))
            return free.pop()

    def keep(self, pixels: Pixels) -> Pixels:
        """Return a copy of `pixels` in memory of the pool."""
        kept = self.take(pixels.shape, pixels.dtype)
        kept[...] = pixels
        return kept

    def enter(self) -> None:
        """Note that a store uses the pool."""
        with self._lock:
            self.num_stores += 1

    def leave(self) -> None:
        """Note that a store is done; after the last one the pool releases its memory."""
        with self._lock:
            self.num_stores -= 1
            if self.num_stores <= 0:
                self._free = {}

    def give_back(self, frames: Iterable[Pixels]) -> None:
        """Take back the memory of frames for reuse; the caller must not read them any more."""
        with self._lock:
            # Frames of clips that were in flight come after the last store has left.
            for pixels in frames if self.num_stores > 0 else ():
                self._free.setdefault((pixels.shape, pixels.dtype), []).append(pixels)
