"""What an mp4 says of its pixels: codec and size, whatever ``info.json`` declares. Reads its index only."""

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
"""Names under which datasets declare a codec, beside FFmpeg's own."""


@dataclass(frozen=True, slots=True)
class VideoFormat:
    """Codec and size of a video."""

    codec: str
    """FFmpeg's name, or the four letters of the file where it has none here."""
    height: int
    width: int
    """Of a frame as it is shown: turned where the file says so."""


def same_codec(declared: str, found: str) -> bool:
    """Return whether a declared name means the codec of a file."""
    name = declared.lower()
    return _SAME_CODEC.get(name, name) == found


def read_video_format(storage: Storage, name: str) -> VideoFormat:
    """Return the format of the mp4 `name`; also of one whose frames only decoding tells.

    Raises:
        DatasetError: the file is missing, is no mp4, or is cut off.
    """
    with read_moov(storage, name) as moov:
        return parse_video_format(moov)


def parse_video_format(moov: bytes) -> VideoFormat:
    """Return the format that a ``moov`` box tells.

    Raises:
        ValueError, struct.error: it tells none.
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
    """Return whether a track's matrix turns its frames by a quarter."""
    if header is None:
        return False
    # The matrix stands before the two 32-bit sizes at the end of the box.
    a, b, _, c, d = struct.unpack_from(">5i", header, len(header) - 8 - 36)
    return bool(a == 0 and d == 0 and b != 0 and c != 0)
