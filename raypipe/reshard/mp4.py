"""The video track of an mp4 as columns: the place, the times and the description of every packet.

Reads only the ``moov`` box. If the box does not tell enough (a fragmented file, several edits), `read_track` raises
`NotImplementedError`, and the file is copied as it is.
"""

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError, as_damage
from raypipe.format import (
    box_timescale,
    find_box,
    list_boxes,
    need_box,
    read_box,
    read_edit,
    sample_durations,
    sample_keyframes,
    sample_offsets,
    sample_pts,
    sample_sizes,
)
from raypipe.storage import Storage

_ENTRY_HEADER: Final = 86
"""Size of a visual sample entry before its inner boxes: size, type, and 78 bytes of fields."""

CODEC_OF_ENTRY: Final = {
    b"avc1": "h264",
    b"avc3": "h264",
    b"hev1": "hevc",
    b"hvc1": "hevc",
    b"av01": "av1",
    b"vp09": "vp9",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The properties that packets of two files must share to be in one file."""

    samples: bytes
    """The sample description (``stsd``) without its bit rates, which decoders do not use."""
    timescale: int
    """Ticks per second."""
    display: bytes
    """Rotation, width and height for display."""

    @property
    def codec(self) -> str:
        """The codec's short name, or the four letters of an unknown entry."""
        entry = self.samples[12:16]
        return CODEC_OF_ENTRY.get(entry, entry.decode("latin-1"))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Track:
    """The packets of a video in decoding order, as columns of equal length; times in ticks."""

    offset: NDArray[np.int64]
    """The byte of the file at which each packet starts."""
    size: NDArray[np.int64]
    dts: NDArray[np.int64]
    duration: NDArray[np.int64]
    pts: NDArray[np.int64]
    """When the packet's frame is shown, after applying the edit list."""
    is_keyframe: NDArray[np.bool_]
    description: Description
    has_other_tracks: bool
    """Whether the file also holds sound or other tracks."""

    def __len__(self) -> int:
        return len(self.size)


def read_track(storage: Storage, name: str) -> Track:
    """Return the video track of the mp4 `name`.

    Raises:
        DatasetError: the file is missing, is not an mp4, or is cut off inside its index. Packets may lie past its end.
        NotImplementedError: the file is sound, but its index does not tell its packets apart.
    """
    with as_damage(
        lambda error: DatasetError(f"damaged video {storage.locate(name)!r}: {error}. Fetch the file again.")
    ):
        with storage.open_file(name) as stream:
            moov = read_box(stream, b"moov")
        if moov is None:
            raise ValueError("no index ('moov' box)")
        return _parse(moov)


def _parse(moov: bytes) -> Track:
    if find_box(moov, b"mvex") is not None:
        raise NotImplementedError("a fragmented mp4")
    tracks = [body for kind, body in list_boxes(moov) if kind == b"trak"]
    videos = [body for body in tracks if (find_box(body, b"mdia", b"hdlr") or b"")[8:12] == b"vide"]
    if len(videos) != 1:
        raise NotImplementedError(f"an mp4 with {len(videos)} video tracks")
    video = videos[0]
    table = need_box(video, b"mdia", b"minf", b"stbl")
    timescale = box_timescale(need_box(video, b"mdia", b"mdhd"))
    size = sample_sizes(table)
    shift, stop = read_edit(find_box(video, b"edts", b"elst"), timescale, box_timescale(need_box(moov, b"mvhd")))
    pts = sample_pts(table)
    duration = sample_durations(table)
    if len(pts) != len(size):
        raise ValueError(f"its index has {len(pts)} times and {len(size)} packets")
    if len(pts) and (pts.min() + shift < 0 or pts.max() + shift >= stop):
        raise NotImplementedError("an mp4 whose edit list cuts frames off")
    return Track(
        offset=sample_offsets(table, size),
        size=size,
        dts=np.cumsum(duration) - duration,
        duration=duration,
        pts=pts + shift,
        is_keyframe=sample_keyframes(table, len(size)),
        description=_description(video, table, timescale),
        has_other_tracks=len(tracks) > 1,
    )


def _description(video: bytes, table: bytes, timescale: int) -> Description:
    samples = need_box(table, b"stsd")
    if struct.unpack_from(">I", samples, 4)[0] != 1:
        raise NotImplementedError("an mp4 with several sample descriptions")
    header = need_box(video, b"tkhd")
    # Matrix, width and height are the last 44 bytes in both versions of the box.
    return Description(samples=_without_bit_rate(samples), timescale=timescale, display=header[-44:])


def _without_bit_rate(samples: bytes) -> bytes:
    entry = samples[8:]
    kept = [
        struct.pack(">I4s", 8 + len(body), kind) + body
        for kind, body in list_boxes(entry[_ENTRY_HEADER:])
        if kind != b"btrt"
    ]
    body = entry[4:_ENTRY_HEADER] + b"".join(kept)
    return samples[:8] + struct.pack(">I", 4 + len(body)) + body
