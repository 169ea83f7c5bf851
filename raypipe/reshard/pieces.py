"""Finds the packets of a source video that the kept episodes need, as pieces that can be cut out without decoding.

A piece starts at a keyframe that no later frame refers back across, and ends where it has neither too few packets nor
too many. If an episode does not start at such a keyframe, the frames before it stay, and no episode shows them::

    frames   | 0 1 2 3 | 4 5 6 7 | 8 9 . . |        keyframes at 0, 4, 8; episodes 0-4, 5-6 (excluded), 7-9
    pieces   |=======================|              one piece: 5 and 6 stay as lead-in of 7, and are counted

A file without a plain index is kept whole.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError
from raypipe.format import DatasetMeta, VideoIndex, episode_first_frame, first_frames
from raypipe.reshard.mp4 import Description, Track, read_track
from raypipe.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A video of the source and the episodes in it."""

    storage: Storage
    name: str
    camera: str
    rows: tuple[int, ...]
    """All rows of the episode table that name this file, those of excluded episodes too."""
    is_clip: bool = False
    """True for a video that reshard made of exactly one episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Packets of one source file that are copied together, and the kept episodes in them."""

    storage: Storage
    name: str
    rows: tuple[int, ...]
    first_frame: tuple[int, ...]
    """Each episode's first frame, counted from the piece's own first frame."""
    start: int
    stop: int
    """Range of packets; all of them for a whole file."""
    num_frames: int
    size_bytes: int
    description: Description | None
    """None for a file that is copied as it is."""
    num_lead_in: int
    """Frames of excluded episodes that stay, since kept episodes cannot be decoded without them."""
    has_other_tracks: bool


def scan_file(meta: DatasetMeta, file: SourceFile, is_kept: NDArray[np.bool_]) -> list[Piece]:
    """Return the pieces of one source file that hold its kept episodes, in file order; reads only the index.

    Args:
        file: has at least one kept episode.
        is_kept: by row of the episode table.

    Raises:
        DecodeError: the file lacks frames that a kept episode needs; names the episode.
    """
    try:
        track = read_track(file.storage, file.name)
    except NotImplementedError:
        return [_whole_file(meta, file, is_kept)]
    order = np.argsort(track.pts, kind="stable")
    index = VideoIndex(track.pts[order] / track.description.timescale, track.is_keyframe[order])
    firsts = _first_frames(meta, file, index, is_kept)
    return _cut(file, track, order, _segments(meta, file, firsts, len(track)), is_kept)


def _first_frames(
    meta: DatasetMeta, file: SourceFile, index: VideoIndex, is_kept: NDArray[np.bool_]
) -> NDArray[np.int64]:
    rows = np.array(file.rows)
    length = meta.episodes.length[rows]
    if file.is_clip:
        assert len(index) == length.sum(), f"{file.name} has {len(index)} frames, not {length}"
        return np.zeros(1, dtype=np.int64)
    columns = meta.episodes.videos[file.camera]
    if not len(index):
        episode_first_frame(meta, int(rows[is_kept[rows]][0]), file.camera, index)
    found = first_frames(columns.from_timestamp[rows], length, index.pts_s)
    is_wrong = (~np.bool_(found.is_counted) & (found.drift_s > 0.5 / meta.fps)) | (found.frame + length > len(index))
    for row in rows[is_wrong & is_kept[rows]]:
        # Fails for the same reason on one episode, with an error that names it.
        episode_first_frame(meta, int(row), file.camera, index)
    return found.frame


@dataclass(frozen=True, slots=True)
class _Segment:
    """The frames ``[start, stop)`` from an episode's first to the next episode's first, with unused ones between."""

    row: int
    first: int
    start: int
    stop: int


def _segments(meta: DatasetMeta, file: SourceFile, firsts: NDArray[np.int64], num_frames: int) -> list[_Segment]:
    order = np.argsort(firsts, kind="stable")
    segments = []
    for position, place in enumerate(order.tolist()):
        row, first = file.rows[place], int(firsts[place])
        last = position + 1 == len(order)
        following = num_frames if last else int(firsts[order[position + 1]])
        stop = max(following, min(first + int(meta.episodes.length[row]), num_frames))
        segments.append(_Segment(row, first, first if position else 0, stop))
    return segments


def _cut(
    file: SourceFile, track: Track, order: NDArray[np.int64], segments: list[_Segment], is_kept: NDArray[np.bool_]
) -> list[Piece]:
    """Return the pieces of the kept segments; segments that share packets become one piece."""
    starts, stops = np.flatnonzero(clean_cuts(track, order)), np.flatnonzero(clean_ends(order))
    groups: list[tuple[int, int, list[_Segment]]] = []
    for segment in segments:
        if not is_kept[segment.row]:
            continue
        start = int(starts[np.searchsorted(starts, segment.start, side="right") - 1])
        stop = int(stops[np.searchsorted(stops, segment.stop)])
        if groups and start < groups[-1][1]:
            first, last, members = groups.pop()
            groups.append((first, max(last, stop), [*members, segment]))
        else:
            groups.append((start, stop, [segment]))
    return [_piece(file, track, group, segments, is_kept) for group in groups]


def clean_cuts(track: Track, order: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return before which frames a video can be cut; one entry more than frames, for the end.

    A cut before frame s needs three things: s is a keyframe, it is packet s, and the packets before it hold exactly the
    frames before it.
    """
    number = np.arange(len(order))
    is_clean = clean_ends(order)[:-1] & (order == number) & track.is_keyframe
    result = np.append(is_clean, True)
    # The first piece includes anything before the first keyframe.
    result[0] = True
    return result


def clean_ends(order: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return before which frames a piece may end: there the packets so far hold exactly the frames so far."""
    highest_before = np.concatenate([[-1], np.maximum.accumulate(order)])
    return np.asarray(highest_before == np.arange(len(order) + 1) - 1)


def _piece(
    file: SourceFile,
    track: Track,
    group: tuple[int, int, list[_Segment]],
    segments: list[_Segment],
    is_kept: NDArray[np.bool_],
) -> Piece:
    start, stop, members = group
    size_bytes = file.storage.size_bytes(file.name)
    if int((track.offset + track.size)[start:stop].max(initial=0)) > size_bytes:
        raise DatasetError(
            f"damaged video {file.storage.locate(file.name)!r}: its index points behind the end of its {size_bytes} "
            f"bytes. Fetch the file again."
        )
    excluded = [segment for segment in segments if not is_kept[segment.row]]
    lead_in = sum(max(0, min(stop, other.stop) - max(start, other.start)) for other in excluded)
    return Piece(
        storage=file.storage,
        name=file.name,
        rows=tuple(segment.row for segment in members),
        first_frame=tuple(segment.first - start for segment in members),
        start=start,
        stop=stop,
        num_frames=stop - start,
        size_bytes=int(track.size[start:stop].sum()),
        description=track.description,
        num_lead_in=lead_in,
        has_other_tracks=track.has_other_tracks,
    )


def _whole_file(meta: DatasetMeta, file: SourceFile, is_kept: NDArray[np.bool_]) -> Piece:
    from raypipe.decode import open_video

    index = open_video(file.storage, file.name).index
    firsts = _first_frames(meta, file, index, is_kept)
    rows = [(row, int(first)) for row, first in zip(file.rows, firsts, strict=True) if is_kept[row]]
    excluded = sum(int(meta.episodes.length[row]) for row in file.rows if not is_kept[row])
    return Piece(
        storage=file.storage,
        name=file.name,
        rows=tuple(row for row, _ in rows),
        first_frame=tuple(first for _, first in rows),
        start=0,
        stop=len(index),
        num_frames=len(index),
        size_bytes=file.storage.size_bytes(file.name),
        description=None,
        num_lead_in=excluded,
        has_other_tracks=False,
    )
