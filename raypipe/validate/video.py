"""Checks the index of one video file against its episodes and against what ``info.json`` declares."""

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError, as_damage
from raypipe.format import (
    Feature,
    VideoFormat,
    VideoIndex,
    find_video_track,
    first_frames,
    need_box,
    one_line,
    parse_moov,
    parse_video_format,
    read_box,
    same_codec,
    sample_places,
    sample_pts,
)
from raypipe.storage import Storage, is_transient, retry_transient
from raypipe.text import counted, either, frames_text
from raypipe.validate.data import FileResult
from raypipe.validate.findings import Finding
from raypipe.validate.outline import Outline, VideoUnit

LONG_GOP = 60
"""A larger distance between keyframes is worth a note: LeRobot's recorder writes 2 frames, encoders choose 250."""

_RATE_TOLERANCE = 0.01
"""29.97 passes for 30, but 24 does not pass for 25."""


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


@dataclass(frozen=True, slots=True, eq=False)
class VideoSpans:
    """The episodes of one video file, in file order."""

    rows: NDArray[np.int64]
    """Rows of the episode table."""
    episodes: NDArray[np.int64]
    """The numbers of the episodes."""
    first: NDArray[np.int64]
    length: NDArray[np.int64]
    drift_s: NDArray[np.float64]
    is_counted: bool
    is_there: NDArray[np.bool_]
    """Whether the file has all frames of the episode."""


def check_video_file(outline: Outline, unit: VideoUnit) -> FileResult:
    """Return the findings on one video file; decodes it if that is asked."""
    try:
        container = retry_transient(lambda: read_container(outline.meta.storage.for_a_look(), unit.name))
    except (DatasetError, OSError) as error:
        if is_transient(error):
            raise
        finding = unit.finding("video-unreadable", one_line(error), unit.episodes)
        return FileResult(unit=unit, findings=(finding,))
    feature = outline.meta.features.get(unit.camera)
    findings = _check_declared(outline, unit, container, feature) if feature is not None else []
    if container.index is None:
        findings.append(unit.finding("video-unindexed", "a fragmented mp4, or one with several edits"))
    spans = find_spans(outline, unit, container)
    if container.index is not None:
        findings += _check_frames(outline, unit, container, spans)
    num_decoded = 0
    if outline.is_deep and feature is not None:
        from raypipe.validate.deep import decode_video

        found, num_decoded = decode_video(outline, unit, container, spans)
        findings += found
    return FileResult(unit=unit, findings=tuple(findings), decoded_frames=num_decoded)


def find_spans(outline: Outline, unit: VideoUnit, container: Container) -> VideoSpans:
    """Return where the episodes of a file are, found as the pipeline finds them."""
    rows = np.array(unit.rows, np.int64)
    index, episodes = container.index, outline.meta.episodes
    if index is None or not len(rows) or not len(index):
        none = np.zeros(0, np.int64)
        return VideoSpans(none, none, none, none, np.zeros(0), False, np.zeros(0, np.bool_))
    length = episodes.length[rows]
    firsts = first_frames(episodes.videos[unit.camera].from_timestamp[rows], length, index.pts_s)
    is_near = firsts.is_counted | (firsts.drift_s <= 0.5 / outline.meta.fps) | np.isnan(outline.meta.fps)
    is_stored = _stored(container)
    # A frame in the index whose bytes are cut off counts as missing.
    cut = np.concatenate([[0], np.cumsum(~is_stored)])
    stop = np.minimum(firsts.frame + length, len(index))
    is_whole = (firsts.frame + length <= len(index)) & (cut[stop] == cut[firsts.frame])
    order = np.argsort(firsts.frame, kind="stable")
    return VideoSpans(
        rows=rows[order],
        episodes=episodes.episode_index[rows[order]],
        first=firsts.frame[order],
        length=length[order],
        drift_s=firsts.drift_s[order],
        is_counted=firsts.is_counted,
        is_there=(is_near & is_whole)[order],
    )


def _stored(container: Container) -> NDArray[np.bool_]:
    return np.asarray(container.end_byte <= container.size_bytes)


def read_container(storage: Storage, name: str) -> Container:
    """Return the index of the mp4 `name`.

    Raises:
        DatasetError: the file is not an mp4, or is cut off.
    """
    size_bytes = storage.size_bytes(name)

    def damaged(error: Exception) -> DatasetError:
        storage.check_no_pointer(name)
        return DatasetError(f"damaged video of {size_bytes} bytes: {error}")

    with storage.open_file(name) as stream, as_damage(damaged):
        moov = read_box(stream, b"moov")
    if moov is None:
        raise DatasetError(f"no index ('moov' box) in {size_bytes} bytes: the file is cut off, or no mp4")
    with as_damage(lambda error: DatasetError(f"its index cannot be read: {error}")):
        return _parse(moov, size_bytes)


def _parse(moov: bytes, size_bytes: int) -> Container:
    try:
        index: VideoIndex | None = parse_moov(moov)
    except NotImplementedError:
        index = None
    samples = need_box(find_video_track(moov), b"mdia", b"minf", b"stbl")
    pts, ends = sample_pts(samples), np.zeros(0, np.int64)
    if index is not None:
        ends = np.zeros(len(pts), np.int64)
        # The index of some files gives no plain sizes, or no plain offsets.
        with suppress(NotImplementedError):
            ends = np.add(*sample_places(samples, len(pts)))
        ends = ends[np.argsort(pts, kind="stable")]
    return Container(index, parse_video_format(moov), ends, size_bytes, bool(np.any(np.diff(pts) < 0)))


def _check_declared(outline: Outline, unit: VideoUnit, container: Container, feature: Feature) -> list[Finding]:
    """Return where codec, size or rate are not as declared, and whether keyframes are far apart."""
    findings, found = [], container.format
    if feature.codec and not same_codec(feature.codec, found.codec):
        message = f"{found.codec}, and info.json declares {feature.codec}"
        findings.append(unit.finding("video-codec", message))
    declared = (feature.width, feature.height)
    if all(declared) and declared != (found.width, found.height):
        message = f"{found.width}x{found.height} pixels, and info.json declares {declared[0]}x{declared[1]}"
        findings.append(unit.finding("video-size", message))
    index = container.index
    if index is None or len(index) < 2:
        return findings
    rate = (len(index) - 1) / max(float(index.pts_s[-1] - index.pts_s[0]), 1e-9)
    if abs(rate / outline.meta.fps - 1) > _RATE_TOLERANCE:
        message = f"{rate:.4g} frames per second, and the dataset has {outline.meta.fps:g}"
        findings.append(unit.finding("video-fps", message))
    keyframes = np.append(np.flatnonzero(index.is_keyframe), len(index))
    gap = int(np.diff(keyframes).max(initial=0))
    if gap > LONG_GOP:
        findings.append(unit.finding("video-gop", f"up to {counted(gap, 'frame')} from a keyframe to the next"))
    return findings


def _check_frames(outline: Outline, unit: VideoUnit, container: Container, spans: VideoSpans) -> list[Finding]:
    """Return findings on the frames that the episodes should have in the file."""
    assert container.index is not None
    count, pts_s = len(container.index), container.index.pts_s
    if not count:
        return [unit.finding("video-unreadable", "the file holds no frame", unit.episodes)]
    findings = _check_bytes(unit, container, spans)
    if not len(spans.rows):
        return findings
    is_late = spans.drift_s > 0.5 / outline.meta.fps
    from_timestamp = outline.meta.episodes.videos[unit.camera].from_timestamp[spans.rows]
    for position, number in enumerate(spans.episodes.tolist()):
        first, stop = int(spans.first[position]), int(spans.first[position] + spans.length[position])
        if is_late[position]:
            found = (
                f"by the lengths it starts with frame {first}" if spans.is_counted else f"the nearest frame is {first}"
            )
            message = (
                f"from_timestamp is {from_timestamp[position]:.4f} s; {found}, at {pts_s[first]:.4f} s of "
                f"{counted(count, 'frame')}"
            )
            findings.append(
                unit.finding("video-drift" if spans.is_counted else "video-start", message, (number,), (first,))
            )
        if stop > count and (spans.is_counted or not is_late[position]):
            message = f"{counted(count, 'frame')}, and the episode needs {frames_text(first, stop)}"
            findings.append(unit.finding("video-short", message, (number,), (count - 1,)))
    return [*findings, *_check_neighbours(outline, unit, spans, count), *_check_ends(outline, unit, spans, is_late)]


def _check_bytes(unit: VideoUnit, container: Container, spans: VideoSpans) -> list[Finding]:
    """Return the episodes with frames past the end of the file: an index in front of them survives a cut."""
    is_cut = ~_stored(container)
    if not is_cut.any():
        return []
    columns = (column.tolist() for column in (spans.episodes, spans.first, spans.first + spans.length))
    episodes = [number for number, first, stop in zip(*columns, strict=True) if is_cut[first:stop].any()]
    frames = np.flatnonzero(is_cut)
    message = (
        f"{counted(container.size_bytes, 'byte')}, and its frames need {int(container.end_byte.max()):,}; "
        f"{len(frames):,} of {counted(len(is_cut), 'frame')} {either(len(frames), 'is', 'are')} cut off, the first is "
        f"frame {frames[0]}"
    )
    seen = (int(frames[0]) - 1,) if frames[0] else ()
    return [unit.finding("video-truncated", message, episodes, seen)]


def _check_neighbours(outline: Outline, unit: VideoUnit, spans: VideoSpans, count: int) -> list[Finding]:
    """Return episodes that share frames, and, where an episode has its own file, videos with frames to spare."""
    findings = []
    stops = spans.first + spans.length
    for position in np.flatnonzero(stops[:-1] > spans.first[1:]):
        second = int(spans.first[position + 1])
        message = f"the first ends before frame {stops[position]} and the second starts with frame {second}"
        both = spans.episodes[position : position + 2].tolist()
        findings.append(unit.finding("video-overlap", message, both, (second,)))
    if not outline.meta.is_packed and len(stops) == 1 and count > stops[0]:
        message = f"{counted(count, 'frame')}, and the episode has {counted(int(spans.length[0]), 'row')}"
        findings.append(unit.finding("video-long", message, unit.episodes, (int(stops[0]) - 1, count - 1)))
    return findings


def _check_ends(outline: Outline, unit: VideoUnit, spans: VideoSpans, is_late: NDArray[np.bool_]) -> list[Finding]:
    """Return episodes whose ``to_timestamp`` minus ``from_timestamp`` is not their length."""
    fps = outline.meta.fps
    start = outline.meta.episodes.videos[unit.camera].from_timestamp[spans.rows]
    stop = outline.column(f"videos/{unit.camera}/to_timestamp")[spans.rows]
    off = stop - start - spans.length / fps
    findings = []
    # Another finding reports a wrong start.
    for position in np.flatnonzero((np.abs(off) > 0.5 / fps) & ~is_late):
        message = (
            f"to_timestamp is {stop[position]:.4f} s; {counted(int(spans.length[position]), 'frame')} from "
            f"{start[position]:.4f} s end at {start[position] + spans.length[position] / fps:.4f} s"
        )
        findings.append(unit.finding("video-span", message, (int(spans.episodes[position]),)))
    return findings
