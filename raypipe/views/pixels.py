"""Pixels for views: frames of an episode at a small size, from the decoders of training."""

from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import Dataset
from raypipe.decode import ORIGINAL_SIZE, DecodeSpec
from raypipe.format import Feature, RowReader

_WIDEST: Final = 3
"""The widest picture, in multiples of the requested height; a wider camera is shrunk to it."""
_COLOURS: Final = "turbo"
"""matplotlib's name for the colours that commonly show depth."""
_FIRST_COLOUR: Final = 0.08
"""Earlier colours are nearly black."""
_FRAMES_MEASURED: Final = 16
"""Frames of an episode that give the range of its depth."""

Scale = tuple[float, float]
"""The values at the two ends of the colours: black and white, or for depth blue and red."""


def fitted_size(feature: Feature, height: int) -> tuple[int, int]:
    """Return the (height, width) for a camera, at most `height` high: even numbers that keep the ratio of the sides."""
    scale = min(1.0, height / max(1, feature.height), _WIDEST * height / max(1, feature.width))
    rows, columns = (max(2, 2 * round(size * scale / 2)) for size in (feature.height, feature.width))
    return rows, columns


class FrameReader:
    """Reads frames of a dataset's cameras, none higher than `height`."""

    def __init__(self, dataset: Dataset, *, height: int) -> None:
        self._meta = dataset.meta
        self._height = height
        self._decoders: dict[str, Any] = {}

    def read(self, row: int, camera: str, frames: NDArray[np.int64], scale: Scale | None = None) -> NDArray[np.uint8]:
        """Return frames of the episode in row `row` of the episode table: ``(n, height, width, 3)``.

        Depth goes from blue, the nearest in these frames, to red, the farthest; black means that nothing was measured.

        Args:
            frames: ascending positions in the episode.
            scale: for depth, the distances to show as blue and red instead; take `measure` to read it in pieces.

        Raises:
            DatasetError: frames are missing or cannot be decoded.
        """
        return visible(self._decode(row, camera, frames), scale)

    def read_measured(self, row: int, camera: str, frames: NDArray[np.int64]) -> tuple[NDArray[np.uint8], Scale | None]:
        """Return the frames of `read`, and for depth the values shown as blue and red."""
        pixels = self._decode(row, camera, frames)
        scale = finite_ends(pixels) if self._meta.features[camera].is_depth else None
        return visible(pixels, scale), scale

    def measure(self, row: int, camera: str) -> Scale | None:
        """Return the nearest and farthest depth in frames spread over an episode; None for a camera without depth."""
        if not self._meta.features[camera].is_depth:
            return None
        length = int(self._meta.episodes.length[row])
        frames = np.unique(np.linspace(0, length - 1, _FRAMES_MEASURED).round().astype(np.int64))
        return finite_ends(self._decode(row, camera, frames))

    def _decode(self, row: int, camera: str, frames: NDArray[np.int64]) -> NDArray[Any]:
        decoder, feature = self._decoder(camera), self._meta.features[camera]
        if feature.kind == "image":
            table = RowReader(self._meta, [camera]).read_episode(row)
            stored = table.column(camera).take(frames).to_pylist()
            pixels = decoder.decode_images(row, camera, stored, frames)
        else:
            pixels = decoder.decode_video(row, camera, frames)
        array: NDArray[Any] = pixels.numpy()
        if feature.is_depth:
            codes = feature.depth_codes
            # LeRobot's recorder stores the nearest distance for pixels that the sensor has not measured.
            least = round(1000 * codes.min_m) if codes is not None else 0
            array = np.where(array <= least, np.nan, array)
        return array

    def _decoder(self, camera: str) -> Any:
        from raypipe.decode import FrameDecoder

        if camera not in self._decoders:
            feature = self._meta.features[camera]
            size = fitted_size(feature, self._height)
            is_whole = size == (feature.height, feature.width)
            resize: tuple[int, int] | Literal["original"] = ORIGINAL_SIZE if is_whole else size
            self._decoders[camera] = FrameDecoder(self._meta, DecodeSpec(resize=resize))
        return self._decoders[camera]


def visible(pixels: NDArray[Any], scale: Scale | None = None) -> NDArray[np.uint8]:
    """Return ``(..., channels)`` pixels of any number type as uint8 with three channels.

    Floats in [0, 1] keep that range. Other values, such as normalised cameras, are spread from black to white; those of
    one channel, depth, from blue to red. NaN is black, and so is a depth of 0: nothing was measured.

    Args:
        scale: the range to spread; by default the least and the largest value of these pixels.
    """
    if pixels.dtype != np.uint8:
        values = pixels.astype(np.float32)
        low, high = scale or finite_ends(values)
        if low < 0 or high > 1:
            spread = (values - low) / max(high - low, 1e-9)
            if values.shape[-1] == 1:
                return coloured(spread[..., 0], is_measured=~np.isnan(values[..., 0]) & (values[..., 0] != 0))
            values = spread
        values = np.nan_to_num(values, nan=0.0).clip(0, 1)
        pixels = (values * 255).round().astype(np.uint8)
    if pixels.shape[-1] == 3:
        return pixels
    return np.repeat(pixels[..., :1], 3, axis=-1)


def coloured(shares: NDArray[np.float32], is_measured: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return values in [0, 1] as colours ``(..., 3)`` from blue to red; black where nothing was measured."""
    colours = depth_colours()(np.nan_to_num(shares).clip(0, 1), bytes=True)[..., :3]
    black: NDArray[np.uint8] = np.where(is_measured[..., None], colours, 0).astype(np.uint8)
    return black


def depth_colours() -> Any:
    """Return matplotlib's colours for depth, from blue to red."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps[_COLOURS](np.linspace(_FIRST_COLOUR, 1.0, 256)))


def scale_bar(height: int, width: int) -> NDArray[np.uint8]:
    """Return the colours of depth side by side, the nearest at the left: ``(height, width, 3)``."""
    shares = np.linspace(0, 1, width, dtype=np.float32)[None].repeat(height, axis=0)
    return coloured(shares, np.ones(shares.shape, dtype=np.bool_))


def scale_told(scale: Scale) -> str:
    """Return the meaning of the depth colours in words."""
    return f"{scale[0] / 1000:.2f} m (blue) to {scale[1] / 1000:.2f} m (red), black: not measured"


def finite_ends(values: NDArray[Any]) -> Scale:
    """Return the least and the largest finite value."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
