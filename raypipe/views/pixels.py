"""Pixels for views: frames of an episode at a small size, from the decoders of training, and as a small video."""

import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import Dataset
from raypipe.decode import ORIGINAL_SIZE, DecodeSpec
from raypipe.errors import ConfigError
from raypipe.format import Feature, RowReader
from raypipe.views.view import short_name, spread

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
        self._rows: dict[str, RowReader] = {}
        """By camera with images in rows: it keeps the rows of an episode while their frames are read piece by piece."""
        self._lock = threading.Lock()

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
        frames = spread(int(self._meta.episodes.length[row]), _FRAMES_MEASURED)
        return finite_ends(self._decode(row, camera, np.array(frames)))

    def _decode(self, row: int, camera: str, frames: NDArray[np.int64]) -> NDArray[Any]:
        decoder, feature = self._decoder(camera), self._meta.features[camera]
        if feature.kind == "image":
            # A RowReader is for one thread at a time.
            with self._lock:
                table = self._rows.setdefault(camera, RowReader(self._meta, [camera])).read_episode(row)
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


MAX_FRAMES: Final = 600
"""Of a clip: half a minute at 20 frames per second; a longer episode keeps every second frame, or every third, ..."""

MAX_BYTES: Final = 8 << 20
"""The limit of a clip in bytes; the text in a page is a third longer."""

_CLIP_HEIGHT: Final = 240
_CLIP_WIDTH: Final = 1440
_FRAMES_AT_ONCE: Final = 32
_QUALITIES: Final = (23, 30, 38)
"""Values of x264's crf, tried in order until the clip is small enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """An mp4 of an episode, and what was done to make it small."""

    mp4: bytes
    height: int
    width: int
    fps: float
    every: int
    """1 if it has all frames, 2 if it has every second, ..."""
    num_frames: int
    cameras: tuple[str, ...]
    scales: Mapping[str, Scale]
    """The distances shown as blue and red, by depth camera."""

    @property
    def told(self) -> str:
        """A description of the clip in words."""
        depth = "".join(f"; {short_name(name)}: {scale_told(scale)}" for name, scale in self.scales.items())
        kept = "all frames" if self.every == 1 else f"one frame of {self.every}"
        names = ", ".join(map(short_name, self.cameras))
        return (
            f"{names}: {kept}, {self.num_frames:,} at {self.fps:g} fps, {self.width}x{self.height} h264, "
            f"{len(self.mp4) / 1e6:.2f} MB{depth}"
        )


def encode_clip(dataset: Dataset, row: int) -> Clip:
    """Return the episode in row `row` of the episode table as a clip; decoding and encoding take some seconds.

    Raises:
        ConfigError: there is no camera, or FFmpeg here cannot write h264.
        DatasetError: a frame cannot be decoded.
    """
    cameras, meta = dataset.spec.cameras, dataset.meta
    episode = int(meta.episodes.episode_index[row])
    if not cameras:
        raise ConfigError(
            f"episode {episode} of {meta.root!r} cannot be a video: no camera of the dataset can be read. Save it as "
            f".png or .html"
        )
    length = int(meta.episodes.length[row])
    every = -(-length // MAX_FRAMES)
    frames = np.arange(0, length, every)
    reader = _reader(dataset)
    scales = {name: scale for name in cameras if (scale := reader.measure(row, name)) is not None}
    for quality in _QUALITIES:
        pieces = _tiled(reader, row, frames, {name: scales.get(name) for name in cameras})
        mp4, size = _encode(pieces, meta.fps / every, quality)
        if len(mp4) <= MAX_BYTES:
            break
    return Clip(
        mp4=mp4,
        height=size[0],
        width=size[1],
        fps=meta.fps / every,
        every=every,
        num_frames=len(frames),
        cameras=cameras,
        scales=scales,
    )


def _encode(pieces: Iterator[NDArray[np.uint8]], fps: float, quality: int) -> tuple[bytes, tuple[int, int]]:
    """Return the bytes of an mp4, and its height and width."""
    import torch

    from raypipe.decode import VideoCoding, open_writer

    first = next(pieces)
    height, width = first.shape[1:3]
    coding = VideoCoding(
        height=height,
        width=width,
        fps=fps,
        encoder="libx264",
        crf=quality,
        preset="veryfast",
        options={"threads": 1, "g": max(1, round(2 * fps))},
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        try:
            with open_writer(path, coding) as stream:
                for piece in (first, *pieces):
                    stream.add_frames(torch.from_numpy(piece).permute(0, 3, 1, 2).contiguous())
        except RuntimeError as error:
            raise ConfigError(f"FFmpeg here cannot write h264, which a clip needs: {error}") from error
        return path.read_bytes(), (height, width)


def _reader(dataset: Dataset) -> FrameReader:
    """Return a reader of frames small enough for all cameras side by side."""
    cameras, features = dataset.spec.cameras, dataset.meta.features
    height = _CLIP_HEIGHT
    while height > 48 and sum(fitted_size(features[name], height)[1] for name in cameras) > _CLIP_WIDTH:
        height -= 24
    return FrameReader(dataset, height=height)


def _tiled(
    reader: FrameReader, row: int, frames: NDArray[np.int64], scales: Mapping[str, Scale | None]
) -> Iterator[NDArray[np.uint8]]:
    """Yield pieces of the episode ``(n, height, width, 3)``: cameras side by side, with black below the lower ones."""
    for start in range(0, len(frames), _FRAMES_AT_ONCE):
        wanted = frames[start : start + _FRAMES_AT_ONCE]
        tiles = [reader.read(row, camera, wanted, scale) for camera, scale in scales.items()]
        highest = max(tile.shape[1] + tile.shape[1] % 2 for tile in tiles)
        yield np.concatenate([_padded(tile, highest) for tile in tiles], axis=2)


def _padded(tile: NDArray[np.uint8], height: int) -> NDArray[np.uint8]:
    """Return frames with black below and at the right: h264 needs an even size, and other cameras may be higher."""
    below, beside = height - tile.shape[1], tile.shape[2] % 2
    return np.pad(tile, ((0, 0), (0, below), (0, beside), (0, 0)))
