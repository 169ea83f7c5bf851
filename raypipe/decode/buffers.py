"""Memory for pixels that is used again: of batches, and of frames that wait."""

import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[Any]
"""``(height, width, channels)`` of one frame."""


class BatchBuffers:
    """Arrays for the pixels of batches, used again once nobody holds them.

    numpy's reference count tells it: a tensor made from an array, and every view of that tensor, holds the array.
    Threads may share it: two epochs put batches together where one follows the other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[tuple[int, ...], list[NDArray[Any]]] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return an array that nobody else holds."""
        with self._lock:
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


class KeptFrames:
    """Memory for frames that stay for a while.

    What a decoder or a task gives is let go soon, so that its memory is used again at once. Were it held for as long as
    frames wait, the C library's pools would fragment, and an object of the object store would stay for its last frame.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[Pixels]] = {}

    def keep(self, pixels: Pixels) -> Pixels:
        """Return a copy."""
        free = self._free.get((pixels.shape, pixels.dtype))
        kept = free.pop() if free else np.empty(pixels.shape, pixels.dtype)
        kept[...] = pixels
        return kept

    def give_back(self, pixels: Pixels) -> None:
        """Let the memory of a copy be used again."""
        self._free.setdefault((pixels.shape, pixels.dtype), []).append(pixels)
