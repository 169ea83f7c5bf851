"""The packets of an mp4 as columns, and an mp4 of packets of other files, byte for byte: only the index is new.

`read_track` reads only the ``moov`` box. If the box does not tell enough (a fragmented file, several edits), it raises
`NotImplementedError`, and the file is copied as it is.

::

    clips      | I P P | I P |    | I B P |         packets in decoding order, from any files of one description
    out   ftyp | moov | mdat: I P P I P I B P |      times shifted so that each clip starts where the one before ends

With B-frames, the plain times would show some frames before they are decoded. So every frame is shown later by the
largest such lead, and one edit at the start takes that off again: the first frame is shown at 0.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.format import (
    find_box,
    list_boxes,
    need_box,
    parse_times,
    read_moov,
    sample_durations,
    sample_keyframes,
    sample_places,
)
from raypipe.storage import Storage

_ENTRY_HEADER: Final = 86
"""Size of a visual sample entry before its inner boxes: size, type, and 78 bytes of fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The properties that packets of two files must share to be in one file."""

    samples: bytes
    """The sample description (``stsd``) without its bit rates, which decoders do not use."""
    timescale: int
    """Ticks per second."""
    display: bytes
    """Rotation, width and height for display."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Track:
    """The packets of a video in decoding order, as columns of equal length; times in ticks."""

    offset: NDArray[np.int64]
    """The byte of the file at which each packet starts."""
    size: NDArray[np.int64]
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
    with read_moov(storage, name) as moov:
        return _parse(moov)


def _parse(moov: bytes) -> Track:
    table, timescale, pts = parse_times(moov)
    tracks = [body for kind, body in list_boxes(moov) if kind == b"trak"]
    videos = [body for body in tracks if (find_box(body, b"mdia", b"hdlr") or b"")[8:12] == b"vide"]
    if len(videos) > 1:
        raise NotImplementedError(f"an mp4 with {len(videos)} video tracks")
    offset, size = sample_places(table, len(pts))
    return Track(
        offset=offset,
        size=size,
        duration=sample_durations(table),
        pts=pts,
        is_keyframe=sample_keyframes(table, len(pts)),
        description=_description(videos[0], table, timescale),
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


_COPY_BYTES: Final = 8 << 20
_UINT32: Final = 2**32


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrackClip:
    """The packets ``[start, stop)`` of a track, and the file that holds them."""

    storage: Storage
    name: str
    track: Track
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Samples:
    """The packets of the new file in order: times in ticks, and the number of packets of each clip."""

    size: NDArray[np.int64]
    duration: NDArray[np.int64]
    delay: NDArray[np.int64]
    """From decoding to display, before the edit."""
    is_keyframe: NDArray[np.bool_]
    counts: NDArray[np.int64]
    edit_start: int
    """What the edit list removes: the longest time by which a frame would be shown before its decoding."""


def write_mp4(stream: IO[bytes], clips: Sequence[TrackClip], frame_ticks: int) -> None:
    """Write the clips one after the other as one mp4, with the index in front.

    All clips have the same description. The content depends only on the clips.

    Args:
        frame_ticks: how long the last frame of a clip is shown if its file does not say.
    """
    description = clips[0].track.description
    assert all(clip.track.description == description for clip in clips), "clips that one file cannot hold"
    samples = _join(clips, frame_ticks)
    stream.write(_header(description, samples))
    for clip in clips:
        _copy_packets(clip, stream)


def _join(clips: Sequence[TrackClip], frame_ticks: int) -> _Samples:
    parts = []
    for clip in clips:
        track, part = clip.track, slice(clip.start, clip.stop)
        steps, shown = track.duration[part].copy(), track.pts[part] - track.pts[part].min()
        # Long enough to show every frame before the first one of the next clip.
        steps[-1] = max(int(steps[-1]) or frame_ticks, int(shown.max()) + 1 - int(steps[:-1].sum()))
        parts.append((track.size[part], steps, shown - (np.cumsum(steps) - steps), track.is_keyframe[part]))
    size, duration, early, is_keyframe = map(np.concatenate, zip(*parts, strict=True))
    edit_start = max(0, -int(early.min()))
    return _Samples(
        size=size,
        duration=duration,
        delay=early + edit_start,
        is_keyframe=is_keyframe,
        counts=np.array([clip.stop - clip.start for clip in clips], dtype=np.int64),
        edit_start=edit_start,
    )


def _header(description: Description, samples: _Samples) -> bytes:
    """Return everything in front of the packets: file type, index, and the head of the packets' box."""
    content = int(samples.size.sum())
    file_type = _box(b"ftyp", b"isom", struct.pack(">I", 512), b"isomiso2mp41")
    is_wide = content + 16 + len(samples.size) * 64 >= _UINT32
    head = struct.pack(">I4sQ", 1, b"mdat", content + 16) if is_wide else struct.pack(">I4s", content + 8, b"mdat")
    # The index holds packet positions, which depend on its own length: so measure its length first.
    length = len(_moov(description, samples, first_byte=0, is_wide=is_wide))
    first_byte = len(file_type) + length + len(head)
    return file_type + _moov(description, samples, first_byte=first_byte, is_wide=is_wide) + head


def _moov(description: Description, samples: _Samples, *, first_byte: int, is_wide: bool) -> bytes:
    ticks = int(samples.duration.sum())
    # The movie uses the video's own time scale, so that the edit is exact.
    movie = _times(0, struct.pack(">I", description.timescale), ticks) + _MOVIE_TAIL
    identity = struct.pack(">II", 1, 0)
    track = _times(3, identity, ticks) + struct.pack(">QHHHH", 0, 0, 0, 0, 0) + description.display
    media = _times(0, struct.pack(">I", description.timescale), ticks) + struct.pack(">HH", _UNDETERMINED, 0)
    edit = struct.pack(">IIQqI", 1 << 24, 1, ticks, samples.edit_start, 1 << 16)
    table = _box(
        b"stbl",
        _box(b"stsd", description.samples),
        _box(b"stts", _runs(samples.duration)),
        *([] if samples.is_keyframe.all() else [_box(b"stss", _table(np.flatnonzero(samples.is_keyframe) + 1))]),
        *([_box(b"ctts", _runs(samples.delay))] if samples.delay.any() else []),
        _box(b"stsc", _chunk_runs(samples.counts)),
        _box(b"stsz", struct.pack(">III", 0, 0, len(samples.size)), samples.size.astype(">u4").tobytes()),
        _chunk_offsets(samples, first_byte, is_wide=is_wide),
    )
    information = _box(b"minf", _box(b"vmhd", struct.pack(">IQ", 1, 0)), _box(b"dinf", _DATA_REFERENCE), table)
    return _box(
        b"moov",
        _box(b"mvhd", movie),
        _box(
            b"trak",
            _box(b"tkhd", track),
            _box(b"edts", _box(b"elst", edit)),
            _box(b"mdia", _box(b"mdhd", media), _box(b"hdlr", _HANDLER), information),
        ),
    )


_UNDETERMINED: Final = 0x55C4
"""The code for no language, in three packed letters."""

_MOVIE_TAIL: Final = (
    struct.pack(">IHHQ", 1 << 16, 1 << 8, 0, 0)
    + struct.pack(">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    + bytes(24)
    + struct.pack(">I", 2)
)
"""Rate, volume, the identity matrix, and the number for a next track."""

_HANDLER: Final = struct.pack(">II4s", 0, 0, b"vide") + bytes(12) + b"VideoHandler\0"


def _box(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I4s", 8 + len(body), kind) + body


_DATA_REFERENCE: Final = _box(b"dref", struct.pack(">II", 0, 1), _box(b"url ", struct.pack(">I", 1)))


def _times(flags: int, clock: bytes, ticks: int) -> bytes:
    """Return the start of a box with times; no creation time, so that the same clips give the same bytes."""
    if ticks < _UINT32:
        return struct.pack(">III", flags, 0, 0) + clock + struct.pack(">I", ticks)
    return struct.pack(">IQQ", flags | 1 << 24, 0, 0) + clock + struct.pack(">Q", ticks)


def _table(rows: NDArray[np.int64], kind: str = ">u4") -> bytes:
    return struct.pack(">II", 0, len(rows)) + rows.astype(kind).tobytes()


def _run_starts(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))


def _runs(values: NDArray[np.int64]) -> bytes:
    """Return a table of (count, value) with one entry for each run of equal values."""
    starts = _run_starts(values)
    counts = np.diff(np.append(starts, len(values)))
    return _table(np.stack([counts, values[starts]], axis=1))


def _chunk_runs(counts: NDArray[np.int64]) -> bytes:
    """Return how many packets each chunk has; one chunk per clip."""
    starts = _run_starts(counts)
    return _table(np.stack([starts + 1, counts[starts], np.ones(len(starts), dtype=np.int64)], axis=1))


def _chunk_offsets(samples: _Samples, first_byte: int, *, is_wide: bool) -> bytes:
    firsts = np.cumsum(samples.counts) - samples.counts
    before = np.cumsum(samples.size) - samples.size
    offsets = first_byte + before[firsts]
    return _box(b"co64", _table(offsets, ">u8")) if is_wide else _box(b"stco", _table(offsets))


def _copy_packets(clip: TrackClip, stream: IO[bytes]) -> None:
    with clip.storage.open_file(clip.name) as source:
        for start, stop in packet_ranges(clip.track, clip.start, clip.stop):
            position = source.seek(start)
            while position < stop:
                data = source.read(min(_COPY_BYTES, stop - position))
                if not data:
                    raise EOFError(f"{clip.storage.locate(clip.name)!r} ends at byte {position}, expected {stop}")
                stream.write(data)
                position += len(data)


def packet_ranges(track: Track, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of the packets ``[start, stop)`` in order; adjacent packets share a range."""
    offset, end = track.offset[start:stop], (track.offset + track.size)[start:stop]
    breaks = np.flatnonzero(offset[1:] != end[:-1]) + 1
    bounds = [0, *breaks.tolist(), len(offset)]
    for first, after in pairwise(bounds):
        yield int(offset[first]), int(end[after - 1])
