"""Pixels: frames of a video by number with torchcodec, and images stored inside the rows.

A frame is uint8 ``(channels, height, width)``. Frames are asked for by whole numbers, never by time.
"""

import io
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torchcodec.decoders import VideoDecoder

from raypipe.errors import ConfigError, DecodeError
from raypipe.metadata import Feature
from raypipe.storage import Storage
from raypipe.video import VideoIndex, read_video_index


@dataclass(frozen=True, slots=True)
class OpenVideo:
    """A video with its decoder and the index of its frames. Not for use by several threads at once."""

    decoder: VideoDecoder
    index: VideoIndex
    place: str

    def read_frames(self, frames: Sequence[int]) -> torch.Tensor:
        """Return the frames with these numbers, in this order: ``(n, 3, height, width)`` uint8."""
        try:
            decoded: torch.Tensor = self.decoder.get_frames_at(indices=list(frames)).data
        except (RuntimeError, IndexError, ValueError) as error:
            raise DecodeError(
                f"cannot decode frames {min(frames)} to {max(frames)} of {self.place!r}: {error}. Fetch the file "
                f"again, or leave its episodes out."
            ) from error
        return decoded


def open_video(storage: Storage, name: str) -> OpenVideo:
    """Open the video `name` for frames by number; scans it once, about 45 ms for 10,000 frames.

    Raises:
        DatasetError: the file is missing, cut off, or no video.
    """
    place = storage.locate(name)
    try:
        index = read_video_index(storage, name)
    except NotImplementedError:
        index = _scan_index(_open_decoder(storage, name))
    decoder = _open_decoder(storage, name)
    if len(decoder) != len(index):
        raise DecodeError(
            f"{place!r} lists {len(index)} frames in its index and holds {len(decoder)}; the file is cut off or was "
            f"joined wrongly. Fetch it again, or re-encode it."
        )
    return OpenVideo(decoder, index, place)


def _open_decoder(storage: Storage, name: str) -> VideoDecoder:
    source = storage.locate(name) if storage.is_local else storage.open_file(name)
    try:
        return VideoDecoder(source, seek_mode="exact")
    except (RuntimeError, ValueError) as error:
        raise DecodeError(f"cannot open the video {storage.locate(name)!r}: {error}. Fetch the file again.") from error


def _scan_index(decoder: VideoDecoder) -> VideoIndex:
    """Return the index of a video whose container has no plain one, by decoding all of it in pieces."""
    pieces = [
        decoder.get_frames_in_range(start, min(start + 64, len(decoder))).pts_seconds.numpy()
        for start in range(0, len(decoder), 64)
    ]
    # Where keyframes are is not known: calling every frame one makes no reader start at the wrong place,
    # since torchcodec seeks by its own index.
    pts_s = np.concatenate(pieces) if pieces else np.zeros(0)
    return VideoIndex(pts_s.astype(np.float64), np.ones(len(pts_s), dtype=np.bool_))


class VideoCache:
    """Open videos, the least recently used closed beyond `size`. Not for use by several threads at once."""

    def __init__(self, storage: Storage, size: int) -> None:
        self._storage = storage
        self._size = size
        self._videos: OrderedDict[str, OpenVideo] = OrderedDict()
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    def open(self, name: str) -> OpenVideo:
        """Return the video `name`, opened now or earlier."""
        if name in self._videos:
            self.hits += 1
            self._videos.move_to_end(name)
            return self._videos[name]
        self.misses += 1
        self._videos[name] = open_video(self._storage, name)
        if len(self._videos) > self._size:
            self._videos.popitem(last=False)
            self.evictions += 1
        return self._videos[name]


def check_decodable(feature: Feature, root: str) -> None:
    """Raise a `ConfigError` for a camera that cannot be decoded without loss of what it holds."""
    if feature.is_depth and feature.kind == "video":
        raise ConfigError(
            f"camera {feature.name!r} of {root!r} is a depth video of 12 bits, which torchcodec gives only as 8 bits. "
            f"Leave it out with cameras=[...]."
        )


def decode_image(content: bytes, feature: Feature, place: str) -> torch.Tensor:
    """Return an image stored in a row: uint8 ``(3, height, width)``, or depth as float32 ``(1, height, width)`` mm.

    Args:
        place: the dataset, episode and frame, for messages.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image if feature.is_depth else image.convert("RGB"))
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise DecodeError(
            f"cannot decode the image {feature.name!r} of {place} ({len(content)} bytes): {error}. Leave the episode "
            f"out."
        ) from error
    if not feature.is_depth:
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()
    # Floats are metres and integers millimetres, as LeRobot writes them.
    in_mm = pixels.astype(np.float32) * (1000.0 if pixels.dtype.kind == "f" else 1.0)
    return torch.from_numpy(in_mm)[None]
