"""What an mp4 says about itself: frames, codec, size, and where its last byte should be. Reads only its index.

`raypipe.format.mp4` reads when frames are shown, which is all that the pipeline needs. This module reads the
rest of the same box.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError, as_damage

# Read the box once for both: it takes 200 kB for a video of 10,000 frames, and one request if the video is remote.
from raypipe.format import (
    VideoFormat,
    VideoIndex,
    find_video_track,
    need_box,
    parse_moov,
    parse_video_format,
    read_box,
    sample_offsets,
    sample_pts,
    sample_sizes,
)
from raypipe.storage import Storage


@dataclass(frozen=True, slots=True, eq=False)
class Container:
    """The index of an mp4."""

    index: VideoIndex | None
    """None if only decoding shows which frames the mp4 has."""
    format: VideoFormat
    end_byte: NDArray[np.int64]
    """The byte after the end of every frame, in the order in which frames are shown."""
    size_bytes: int
    is_reordered: bool
    """Whether the file stores frames in another order than it shows them."""


def read_container(storage: Storage, name: str) -> Container:
    """Return the index of the mp4 `name`.

    Raises:
        DatasetError: the file is not an mp4, or is cut off.
    """
    size_bytes = storage.size_bytes(name)
    with storage.open_file(name) as stream, as_damage(lambda error: _damaged(storage, name, size_bytes, error)):
        moov = read_box(stream, b"moov")
    if moov is None:
        raise DatasetError(f"no index ('moov' box) in {size_bytes} bytes: the file is cut off, or no mp4")
    with as_damage(lambda error: DatasetError(f"its index cannot be read: {error}")):
        return _parse(moov, size_bytes)


def _damaged(storage: Storage, name: str, size_bytes: int, error: Exception) -> DatasetError:
    storage.check_no_pointer(name)
    return DatasetError(f"damaged video of {size_bytes} bytes: {error}")


def _parse(moov: bytes, size_bytes: int) -> Container:
    try:
        index: VideoIndex | None = parse_moov(moov)
    except NotImplementedError:
        index = None
    found = parse_video_format(moov)
    samples = need_box(find_video_track(moov), b"mdia", b"minf", b"stbl")
    pts = sample_pts(samples)
    ends = _sample_ends(samples) if index is not None else np.zeros(0, np.int64)
    if index is not None and len(ends) != len(pts):
        raise ValueError(f"{len(pts)} times for {len(ends)} frames")
    is_reordered = bool(np.any(np.diff(pts) < 0))
    shown = ends[np.argsort(pts, kind="stable")] if len(ends) else ends
    return Container(index, found, shown, size_bytes, is_reordered)


def _sample_ends(samples: bytes) -> NDArray[np.int64]:
    """Return the byte after the end of every sample, in stored order; all 0 if the index gives no plain offsets."""
    sizes = sample_sizes(samples)
    try:
        return sample_offsets(samples, sizes) + sizes
    except NotImplementedError:
        return np.zeros(len(sizes), np.int64)
