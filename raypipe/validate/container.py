"""What an mp4 says of itself: frames, codec, size, and where its last byte should be. Reads its index only.

`raypipe.video` reads when frames are shown, which is all that the pipeline needs; this reads the rest of the same box.
"""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# One reading of the box serves both: a video of 10,000 frames has 200 kB of it, and a remote one costs a request.
from raypipe.boxes import box_numbers, find_box, need_box, read_box, sample_pts
from raypipe.errors import DatasetError, as_damage
from raypipe.storage import Storage
from raypipe.video import VideoIndex, find_video_track, parse_moov
from raypipe.video_format import VideoFormat, parse_video_format


@dataclass(frozen=True, slots=True, eq=False)
class Container:
    """The index of an mp4."""

    index: VideoIndex | None
    """None for a kind of mp4 whose frames only decoding tells."""
    format: VideoFormat
    end_byte: NDArray[np.int64]
    """Behind the last byte of every frame, in the order in which they are shown."""
    size_bytes: int
    is_reordered: bool
    """Whether frames are stored in another order than shown."""


def read_container(storage: Storage, name: str) -> Container:
    """Return the index of the mp4 `name`.

    Raises:
        DatasetError: the file is no mp4, or cut off.
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
    """Return the byte behind every sample, in the order in which they are stored."""
    sizes = _sample_sizes(samples)
    wide = find_box(samples, b"co64")
    if wide is not None:
        (count,) = struct.unpack_from(">I", wide, 4)
        chunks = np.frombuffer(wide, ">u8", count=count, offset=8).astype(np.int64)
    else:
        chunks = box_numbers(find_box(samples, b"stco"), 1)[:, 0]
    runs = box_numbers(find_box(samples, b"stsc"), 3)
    if not len(sizes) or not len(runs):
        return np.zeros(0, np.int64)
    # A run says from which chunk on (counted from 1) a chunk has so many samples.
    lengths = np.diff(np.append(runs[:, 0], len(chunks) + 1))
    per_chunk = np.repeat(runs[:, 1], lengths)
    chunk = np.repeat(np.arange(len(chunks)), per_chunk)[: len(sizes)]
    before = np.cumsum(sizes) - sizes
    first = np.searchsorted(chunk, np.arange(len(chunks)), side="left").clip(0, len(sizes) - 1)
    ends: NDArray[np.int64] = chunks[chunk] + before - before[first][chunk] + sizes
    return ends


def _sample_sizes(samples: bytes) -> NDArray[np.int64]:
    body = find_box(samples, b"stsz")
    if body is None:
        return np.zeros(0, np.int64)
    same, count = struct.unpack_from(">II", body, 4)
    if same:
        return np.full(count, same, np.int64)
    return np.frombuffer(body, ">u4", count=count, offset=12).astype(np.int64)
