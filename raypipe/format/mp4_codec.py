"""Codec and size of an mp4 by its own index, whatever ``info.json`` declares."""

import struct
from dataclasses import dataclass
from typing import Final

from raypipe.format.mp4_boxes import find_box
from raypipe.format.mp4_index import find_video_track, read_moov
from raypipe.storage import Storage

_CODECS: Final = {
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
    b"FFV1": "ffv1",
}

_SAME_CODEC: Final = {
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
"""Names that datasets use for a codec, in addition to FFmpeg's."""


@dataclass(frozen=True, slots=True)
class VideoFormat:
    """Codec and size of a video."""

    codec: str
    """FFmpeg's name, or the four letters in the file if `_CODECS` lacks them."""
    height: int
    width: int
    """Size of a frame as shown, rotated if the file says so."""


def same_codec(declared: str, found: str) -> bool:
    """Return whether a declared name means the codec of a file."""
    name = declared.lower()
    return _SAME_CODEC.get(name, name) == found


def read_video_format(storage: Storage, name: str) -> VideoFormat:
    """Return the format of the mp4 `name`; also works for files without a plain index, such as fragmented ones.

    Raises:
        DatasetError: the file is missing, is not an mp4, or is cut off.
    """
    with read_moov(storage, name) as moov:
        return parse_video_format(moov)


def parse_video_format(moov: bytes) -> VideoFormat:
    """Return the format that a ``moov`` box gives.

    Raises:
        ValueError, struct.error: it gives none.
    """
    track = find_video_track(moov)
    body = find_box(track, b"mdia", b"minf", b"stbl", b"stsd")
    if body is None:
        raise ValueError("no sample description")
    # A full box with a count, then the entry: size, four letters, 24 bytes, width, height.
    (letters,) = struct.unpack_from(">4s", body, 12)
    width, height = struct.unpack_from(">HH", body, 8 + 32)
    if _is_turned(find_box(track, b"tkhd")):
        width, height = height, width
    return VideoFormat(_CODECS.get(letters, letters.decode("latin-1")), int(height), int(width))


def _is_turned(header: bytes | None) -> bool:
    """Return whether a track's matrix rotates its frames by a quarter turn."""
    if header is None:
        return False
    # The matrix comes before the two 32-bit sizes at the end of the box.
    a, b, _, c, d = struct.unpack_from(">5i", header, len(header) - 8 - 36)
    return bool(a == 0 and d == 0 and b != 0 and c != 0)
