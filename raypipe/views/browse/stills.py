"""Frames as JPEG files: small ones for batches, larger ones if the browser cannot play a camera's video."""

import threading
from collections import OrderedDict
from typing import Final

import numpy as np

from raypipe.dataset import Dataset
from raypipe.text import encode_pixels
from raypipe.views.pixels import FrameReader, Scale

HEIGHTS: Final = {"small": 120, "large": 360}
"""Heights in pixels, by the size that the page requests."""

_AT_ONCE: Final = 16
"""Frames decoded together: a page that plays a video asks for the next ones anyway."""

_KEPT_BYTES: Final = 64 << 20
_MOST_DECODING: Final = 2
"""Requests that decode at the same time; the others wait."""


class Stills:
    """Decodes frames of a dataset's cameras, and keeps the latest; threads may share it."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._readers = {size: FrameReader(dataset, height=height) for size, height in HEIGHTS.items()}
        self._lock = threading.Lock()
        self._decoding = threading.Semaphore(_MOST_DECODING)
        self._kept: OrderedDict[tuple[int, str, int, str], bytes] = OrderedDict()
        self._kept_bytes = 0
        self._scales: dict[tuple[int, str], Scale | None] = {}

    def read(self, row: int, camera: str, frame: int, size: str) -> bytes:
        """Return one frame as JPEG; for a large one, also decode and keep the frames beside it.

        Raises:
            DatasetError: the frame cannot be decoded.
        """
        key = (row, camera, frame, size)
        found = self._find(key)
        if found is not None:
            return found
        with self._decoding:
            # Another request may have decoded it while this one waited.
            found = self._find(key)
            return found if found is not None else self._decode(key)

    def _find(self, key: tuple[int, str, int, str]) -> bytes | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _decode(self, key: tuple[int, str, int, str]) -> bytes:
        row, camera, frame, size = key
        frames = np.array([frame])
        if size == "large":
            start, length = frame - frame % _AT_ONCE, int(self._dataset.meta.episodes.length[row])
            frames = np.arange(start, min(start + _AT_ONCE, length))
        pixels = self._readers[size].read(row, camera, frames, self._scale(row, camera))
        files = {
            number: encode_pixels(one, "jpeg", pil_kwargs={"quality": 85})
            for number, one in zip(frames.tolist(), pixels, strict=True)
        }
        with self._lock:
            for number, data in files.items():
                self._keep((row, camera, number, size), data)
        return files[frame]

    def _keep(self, key: tuple[int, str, int, str], data: bytes) -> None:
        self._kept_bytes += len(data) - len(self._kept.pop(key, b""))
        self._kept[key] = data
        while self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1])

    def _scale(self, row: int, camera: str) -> Scale | None:
        """Return the two ends of an episode's depth scale, the same for all its frames."""
        with self._lock:
            if (row, camera) in self._scales:
                return self._scales[row, camera]
        scale = self._readers["small"].measure(row, camera)
        with self._lock:
            self._scales[row, camera] = scale
        return scale
