"""What an mp4 says of itself: frames, codec, size, and where its last byte should be. Reads its index only.

`raypipe.video` reads when frames are shown, which is all that the pipeline needs; this reads the rest of the same box.
"""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# One reading of the box serves both: a video of 10,000 frames has 200 kB of it, and a remote one costs a request.
from raypipe.boxes import box_numbers, find_box, list_boxes, read_box, sample_pts
from raypipe.errors import DatasetError
from raypipe.storage import Storage
from raypipe.video import VideoIndex, parse_moov

_CODECS = {
    b"avc1": "h264",
    b"avc3": "h264",
    b"hvc1": "hevc",
    b"hev1": "hevc",
    b"av01": "av1",
    b"vp09": "vp9",
    b"vp08": "vp8",
    b"mp4v": "mpeg4",
    b"mjpg": "mjpeg",
    b"jpeg": "mjpeg",
}

_SAME_CODEC = {
    "avc": "h264",
    "avc1": "h264",
    "x264": "h264",
    "libx264": "h264",
    "h.264": "h264",
    "h265": "hevc",
    "h.265": "hevc",
    "hvc1": "hevc",
    "hev1": "hevc",
    "libx265": "hevc",
    "av01": "av1",
    "libsvtav1": "av1",
    "libaom-av1": "av1",
    "libdav1d": "av1",
    "vp09": "vp9",
    "libvpx-vp9": "vp9",
    "mp4v": "mpeg4",
}
"""Names under which datasets declare a codec, beside FFmpeg's own."""


@dataclass(frozen=True, slots=True, eq=False)
class Container:
    """The index of an mp4."""

    index: VideoIndex | None
    """None for a kind of mp4 whose frames only decoding tells."""
    codec: str
    """FFmpeg's name, or the four letters of the file where it has none here."""
    height: int
    width: int
    """Of a frame as it is shown: turned where the file says so."""
    end_byte: NDArray[np.int64]
    """Behind the last byte of every frame, in the order in which they are shown."""
    size_bytes: int
    is_reordered: bool
    """Whether frames are stored in another order than shown."""


def same_codec(declared: str, found: str) -> bool:
    """Return whether a declared name means the codec of a file."""
    name = declared.lower()
    return _SAME_CODEC.get(name, name) == found


def read_container(storage: Storage, name: str) -> Container:
    """Return the index of the mp4 `name`.

    Raises:
        DatasetError: the file is no mp4, or cut off.
    """
    size_bytes = storage.size_bytes(name)
    with storage.open_file(name) as stream:
        try:
            moov = read_box(stream, b"moov")
        except (struct.error, EOFError) as error:
            storage.check_no_pointer(name)
            raise DatasetError(f"damaged video of {size_bytes} bytes: {error}") from error
    if moov is None:
        raise DatasetError(f"no index ('moov' box) in {size_bytes} bytes: the file is cut off, or no mp4")
    try:
        return _parse(moov, size_bytes)
    except (struct.error, IndexError, ValueError, KeyError, OverflowError) as error:
        raise DatasetError(f"its index cannot be read: {error}") from error


def _parse(moov: bytes, size_bytes: int) -> Container:
    try:
        index: VideoIndex | None = parse_moov(moov)
    except NotImplementedError:
        index = None
    tracks = [body for kind, body in list_boxes(moov) if kind == b"trak"]
    track = next((body for body in tracks if (find_box(body, b"mdia", b"hdlr") or b"")[8:12] == b"vide"), None)
    samples = find_box(track, b"mdia", b"minf", b"stbl") if track is not None else None
    if track is None or samples is None:
        raise ValueError("no video track")
    codec, width, height = _sample_entry(samples)
    if _is_turned(find_box(track, b"tkhd")):
        width, height = height, width
    pts = sample_pts(samples)
    ends = _sample_ends(samples) if index is not None else np.zeros(0, np.int64)
    if index is not None and len(ends) != len(pts):
        raise ValueError(f"{len(pts)} times for {len(ends)} frames")
    is_reordered = bool(np.any(np.diff(pts) < 0))
    shown = ends[np.argsort(pts, kind="stable")] if len(ends) else ends
    return Container(index, codec, height, width, shown, size_bytes, is_reordered)


def _sample_entry(samples: bytes) -> tuple[str, int, int]:
    """Return codec, width and height of the first sample description."""
    body = find_box(samples, b"stsd")
    if body is None:
        raise ValueError("no sample description")
    # A full box with a count, then the entry: size, four letters, 24 bytes, width, height.
    (letters,) = struct.unpack_from(">4s", body, 12)
    width, height = struct.unpack_from(">HH", body, 8 + 32)
    return _CODECS.get(letters, letters.decode("latin-1")), int(width), int(height)


def _is_turned(header: bytes | None) -> bool:
    """Return whether a track's matrix turns its frames by a quarter."""
    if header is None:
        return False
    # The matrix stands before the two 32-bit sizes at the end of the box.
    a, b, _, c, d = struct.unpack_from(">5i", header, len(header) - 8 - 36)
    return bool(a == 0 and d == 0 and b != 0 and c != 0)


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
