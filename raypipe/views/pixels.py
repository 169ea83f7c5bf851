"""Pixels for views: frames of an episode, small enough to be looked at, through the decoders of training."""

from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import Dataset
from raypipe.decode.spec import ORIGINAL_SIZE, DecodeSpec
from raypipe.metadata import Feature
from raypipe.rows import RowReader

_WIDEST: Final = 3
"""A camera wider than so many times the height that is asked for is made as wide as that."""


def fitted_size(feature: Feature, height: int) -> tuple[int, int]:
    """Return the (height, width) of a camera that is at most `height` high: even numbers, the sides' ratio kept."""
    scale = min(1.0, height / max(1, feature.height), _WIDEST * height / max(1, feature.width))
    rows, columns = (max(2, 2 * round(size * scale / 2)) for size in (feature.height, feature.width))
    return rows, columns


class FrameReader:
    """Reads frames of a dataset's cameras, none higher than `height`."""

    def __init__(self, dataset: Dataset, *, height: int) -> None:
        self._meta = dataset.meta
        self._height = height
        self._decoders: dict[str, Any] = {}

    def read(self, row: int, camera: str, frames: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return frames of the episode in row `row` of the episode table: ``(n, height, width, 3)``.

        Depth is grey: black is the nearest and white the farthest of these frames.

        Args:
            frames: ascending positions in the episode.

        Raises:
            DatasetError: they are missing or cannot be decoded.
        """
        decoder, feature = self._decoder(camera), self._meta.features[camera]
        if feature.kind == "image":
            table = RowReader(self._meta, [camera]).read_episode(row)
            stored = table.column(camera).take(frames).to_pylist()
            return visible(decoder.decode_images(row, camera, stored, frames).numpy())
        return visible(decoder.decode_video(row, camera, frames).numpy())

    def _decoder(self, camera: str) -> Any:
        from raypipe.decode import SpanDecoder

        if camera not in self._decoders:
            feature = self._meta.features[camera]
            size = fitted_size(feature, self._height)
            is_whole = size == (feature.height, feature.width)
            resize: tuple[int, int] | Literal["original"] = ORIGINAL_SIZE if is_whole else size
            self._decoders[camera] = SpanDecoder(self._meta, DecodeSpec(resize=resize))
        return self._decoders[camera]


def visible(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Return ``(..., channels)`` pixels of any number type as uint8 with three channels.

    Floats of [0, 1] are taken for that. Others, such as depth and normalised cameras, are spread from black to white.
    """
    if pixels.dtype != np.uint8:
        values = pixels.astype(np.float32)
        low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
        if low < 0 or high > 1:
            values = (values - low) / max(high - low, 1e-9)
        pixels = (values * 255).round().astype(np.uint8)
    if pixels.shape[-1] == 3:
        return pixels
    return np.repeat(pixels[..., :1], 3, axis=-1)
