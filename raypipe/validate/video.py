"""Checks the index of one video file against its episodes and against what ``info.json`` declares."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError
from raypipe.format import Feature, first_frames, one_line, same_codec
from raypipe.storage import is_transient, retry_transient
from raypipe.text import counted, either, frames_text
from raypipe.validate.container import Container, read_container
from raypipe.validate.findings import Finding, Place, make_finding
from raypipe.validate.promises import Promises
from raypipe.validate.structure import VideoUnit

LONG_GOP = 60
"""A larger distance between keyframes is worth a note: LeRobot's recorder writes 2 frames, encoders choose 250."""

_RATE_TOLERANCE = 0.01
"""29.97 passes for 30, but 24 does not pass for 25."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoResult:
    """The result of checking one video file."""

    unit: VideoUnit
    findings: tuple[Finding, ...]
    decoded_frames: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class VideoSpans:
    """The episodes of one video file, in file order."""

    rows: NDArray[np.int64]
    """Rows of the episode table."""
    first: NDArray[np.int64]
    length: NDArray[np.int64]
    drift_s: NDArray[np.float64]
    is_counted: bool
    is_there: NDArray[np.bool_]
    """Whether the file has all frames of the episode."""


def check_video_file(promises: Promises, unit: VideoUnit) -> VideoResult:
    """Return the findings on one video file; decodes it if the promises are deep."""
    try:
        container = retry_transient(lambda: read_container(promises.meta.storage.for_a_look(), unit.name))
    except (DatasetError, OSError) as error:
        if is_transient(error):
            raise
        finding = make_finding("video-unreadable", one_line(error), _place(promises, unit, unit.rows))
        return VideoResult(unit=unit, findings=(finding,))
    feature = promises.meta.features.get(unit.camera)
    findings = _check_declared(promises, unit, container, feature) if feature is not None else []
    if container.index is None:
        message = "a fragmented mp4, or one with several edits"
        findings.append(make_finding("video-unindexed", message, _place(promises, unit, ())))
    spans = find_spans(promises, unit, container)
    if container.index is not None:
        findings += _check_frames(promises, unit, container, spans)
    num_decoded = 0
    if promises.is_deep and feature is not None:
        from raypipe.validate.deep import decode_video

        found, num_decoded = decode_video(promises, unit, container, spans)
        findings += found
    return VideoResult(unit=unit, findings=tuple(findings), decoded_frames=num_decoded)


def find_spans(promises: Promises, unit: VideoUnit, container: Container) -> VideoSpans:
    """Return where the episodes of a file are, found as the pipeline finds them."""
    rows = np.array(unit.rows, np.int64)
    index, episodes = container.index, promises.meta.episodes
    if index is None or not len(rows) or not len(index):
        none = np.zeros(0, np.int64)
        return VideoSpans(none, none, none, np.zeros(0), False, np.zeros(0, np.bool_))
    length = episodes.length[rows]
    firsts = first_frames(episodes.videos[unit.camera].from_timestamp[rows], length, index.pts_s)
    is_near = firsts.is_counted | (firsts.drift_s <= 0.5 / promises.meta.fps) | np.isnan(promises.meta.fps)
    is_stored = _stored(container)
    # A frame in the index whose bytes are cut off counts as missing.
    cut = np.concatenate([[0], np.cumsum(~is_stored)])
    stop = np.minimum(firsts.frame + length, len(index))
    is_whole = (firsts.frame + length <= len(index)) & (cut[stop] == cut[firsts.frame])
    order = np.argsort(firsts.frame, kind="stable")
    return VideoSpans(
        rows=rows[order],
        first=firsts.frame[order],
        length=length[order],
        drift_s=firsts.drift_s[order],
        is_counted=firsts.is_counted,
        is_there=(is_near & is_whole)[order],
    )


def _stored(container: Container) -> NDArray[np.bool_]:
    return np.asarray(container.end_byte <= container.size_bytes)


def _place(promises: Promises, unit: VideoUnit, rows: tuple[int, ...], frames: tuple[int, ...] = ()) -> Place:
    return Place(file=unit.name, episodes=promises.numbers(rows), feature=unit.camera, frames=frames)


def _check_declared(promises: Promises, unit: VideoUnit, container: Container, feature: Feature) -> list[Finding]:
    """Return where codec, size or rate are not as declared, and whether keyframes are far apart."""
    place, findings = _place(promises, unit, ()), []
    found = container.format
    if feature.codec and not same_codec(feature.codec, found.codec):
        message = f"{found.codec}, and info.json declares {feature.codec}"
        findings.append(make_finding("video-codec", message, place))
    declared = (feature.width, feature.height)
    if all(declared) and declared != (found.width, found.height):
        message = f"{found.width}x{found.height} pixels, and info.json declares {declared[0]}x{declared[1]}"
        findings.append(make_finding("video-size", message, place))
    index = container.index
    if index is None or len(index) < 2:
        return findings
    rate = (len(index) - 1) / max(float(index.pts_s[-1] - index.pts_s[0]), 1e-9)
    if abs(rate / promises.meta.fps - 1) > _RATE_TOLERANCE:
        message = f"{rate:.4g} frames per second, and the dataset has {promises.meta.fps:g}"
        findings.append(make_finding("video-fps", message, place))
    keyframes = np.append(np.flatnonzero(index.is_keyframe), len(index))
    gap = int(np.diff(keyframes).max(initial=0))
    if gap > LONG_GOP:
        findings.append(make_finding("video-gop", f"up to {counted(gap, 'frame')} from a keyframe to the next", place))
    return findings


def _check_frames(promises: Promises, unit: VideoUnit, container: Container, spans: VideoSpans) -> list[Finding]:
    """Return findings on the frames that the episodes should have in the file."""
    assert container.index is not None
    count, pts_s = len(container.index), container.index.pts_s
    if not count:
        message = "the file holds no frame"
        return [make_finding("video-unreadable", message, _place(promises, unit, unit.rows))]
    findings = _check_bytes(promises, unit, container, spans)
    if not len(spans.rows):
        return findings
    is_late = spans.drift_s > 0.5 / promises.meta.fps
    for position, row in enumerate(spans.rows.tolist()):
        first, stop = int(spans.first[position]), int(spans.first[position] + spans.length[position])
        if is_late[position]:
            findings.append(_late(promises, unit, row, first, spans.is_counted, pts_s))
        if stop > count and (spans.is_counted or not is_late[position]):
            message = f"{counted(count, 'frame')}, and the episode needs {frames_text(first, stop)}"
            findings.append(make_finding("video-short", message, _place(promises, unit, (row,), (count - 1,))))
    return [*findings, *_check_neighbours(promises, unit, spans, count), *_check_ends(promises, unit, spans, is_late)]


def _late(
    promises: Promises, unit: VideoUnit, row: int, first: int, is_counted: bool, pts_s: NDArray[np.float64]
) -> Finding:
    """Return the finding on an episode whose ``from_timestamp`` is not the time of its first frame."""
    start = float(promises.meta.episodes.videos[unit.camera].from_timestamp[row])
    found = f"by the lengths it starts with frame {first}" if is_counted else f"the nearest frame is {first}"
    message = f"from_timestamp is {start:.4f} s; {found}, at {pts_s[first]:.4f} s of {counted(len(pts_s), 'frame')}"
    kind = "video-drift" if is_counted else "video-start"
    return make_finding(kind, message, _place(promises, unit, (row,), (first,)))


def _check_bytes(promises: Promises, unit: VideoUnit, container: Container, spans: VideoSpans) -> list[Finding]:
    """Return the episodes with frames past the end of the file: an index in front of them survives a cut."""
    is_cut = ~_stored(container)
    if not is_cut.any():
        return []
    ends = spans.first + spans.length
    rows = tuple(
        row
        for row, first, stop in zip(spans.rows.tolist(), spans.first.tolist(), ends.tolist(), strict=True)
        if is_cut[first:stop].any()
    )
    frames = np.flatnonzero(is_cut)
    message = (
        f"{counted(container.size_bytes, 'byte')}, and its frames need {int(container.end_byte.max()):,}; "
        f"{len(frames):,} of {counted(len(is_cut), 'frame')} {either(len(frames), 'is', 'are')} cut off, the first is "
        f"frame {frames[0]}"
    )
    seen = (int(frames[0]) - 1,) if frames[0] else ()
    return [make_finding("video-truncated", message, _place(promises, unit, rows, seen))]


def _check_neighbours(promises: Promises, unit: VideoUnit, spans: VideoSpans, count: int) -> list[Finding]:
    """Return episodes that share frames, and, where an episode has its own file, videos with frames to spare."""
    findings = []
    stops = spans.first + spans.length
    for position in np.flatnonzero(stops[:-1] > spans.first[1:]):
        rows = (int(spans.rows[position]), int(spans.rows[position + 1]))
        second = int(spans.first[position + 1])
        message = f"the first ends before frame {stops[position]} and the second starts with frame {second}"
        place = _place(promises, unit, rows, (second,))
        findings.append(make_finding("video-overlap", message, place))
    if not promises.meta.is_packed and len(stops) == 1 and count > stops[0]:
        message = f"{counted(count, 'frame')}, and the episode has {counted(int(spans.length[0]), 'row')}"
        place = _place(promises, unit, (int(spans.rows[0]),), (int(stops[0]) - 1, count - 1))
        findings.append(make_finding("video-long", message, place))
    return findings


def _check_ends(promises: Promises, unit: VideoUnit, spans: VideoSpans, is_late: NDArray[np.bool_]) -> list[Finding]:
    """Return episodes whose ``to_timestamp`` minus ``from_timestamp`` is not their length."""
    fps = promises.meta.fps
    rows = spans.rows
    start = promises.meta.episodes.videos[unit.camera].from_timestamp[rows]
    stop = (
        promises.to_timestamp[unit.camera][rows] if unit.camera in promises.to_timestamp else np.full(len(rows), np.nan)
    )
    off = stop - start - spans.length / fps
    findings = []
    # Another finding reports a wrong start.
    for position in np.flatnonzero((np.abs(off) > 0.5 / fps) & ~is_late):
        message = (
            f"to_timestamp is {stop[position]:.4f} s; {counted(int(spans.length[position]), 'frame')} from "
            f"{start[position]:.4f} s end at {start[position] + spans.length[position] / fps:.4f} s"
        )
        findings.append(make_finding("video-span", message, _place(promises, unit, (int(rows[position]),))))
    return findings
