"""An episode as a small video for a page: all cameras side by side, with limits on frames, size and bytes."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import Dataset
from raypipe.decode import VideoCoding, open_writer
from raypipe.errors import ConfigError
from raypipe.views.pixels import FrameReader, Scale, fitted_size, scale_told
from raypipe.views.view import short_name

MAX_FRAMES: Final = 600
"""Half a minute at 20 frames per second; a longer episode keeps every second frame, or every third, ..."""

MAX_BYTES: Final = 8 << 20
"""The limit in bytes; the text in a page is a third longer."""

_HEIGHT: Final = 240
_MAX_WIDTH: Final = 1440
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
    height = _HEIGHT
    while height > 48 and sum(fitted_size(features[name], height)[1] for name in cameras) > _MAX_WIDTH:
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
