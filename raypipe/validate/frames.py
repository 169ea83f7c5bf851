"""Checks the frames of the episodes in one data file: which exist, in which order, and when. Pure."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypipe.text import counted, either, span_text
from raypipe.validate.findings import Finding, Place, make_finding
from raypipe.validate.promises import Promises
from raypipe.validate.structure import DataUnit
from raypipe.validate.values import MAX_FRAMES, Segments


def find_segments(episode: NDArray[np.int64], frame: NDArray[np.int64] | None) -> Segments:
    """Return the episodes of a file as runs of its rows, ordered by episode and frame."""
    count = len(episode)
    order = np.arange(count)
    keys = (episode,) if frame is None else (frame, episode)
    is_sorted = bool(np.all(np.diff(episode) >= 0))
    if is_sorted and frame is not None:
        is_sorted = bool(np.all((np.diff(frame) > 0) | (np.diff(episode) > 0)))
    if not is_sorted:
        order = np.lexsort(keys)
    ordered = episode[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if count else np.zeros(0, np.int64)
    counts = np.diff(np.concatenate([starts, [count]])).astype(np.int64)
    return Segments(ordered[starts], starts.astype(np.int64), counts, order.astype(np.int64))


def count_frames(segments: Segments, frame: NDArray[np.int64] | None) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the number of distinct frames of every episode, and whether they count 0, 1, 2, ... each once."""
    num_frames = segments.counts.copy()
    is_sound = np.ones(len(num_frames), np.bool_)
    if frame is None or not len(frame):
        return num_frames, is_sound
    expected = np.arange(len(frame)) - np.repeat(segments.starts, segments.counts)
    is_sound = np.logical_and.reduceat(frame == expected, segments.starts)
    for position in np.flatnonzero(~is_sound):
        num_frames[position] = len(np.unique(_rows(frame, segments, int(position))))
    return num_frames, is_sound


def check_frames(
    unit: DataUnit, promises: Promises, segments: Segments, frame: NDArray[np.int64] | None
) -> list[Finding]:
    """Return findings on the rows of the episodes: too few, too many, doubled, out of order, or of no episode."""
    num_frames, is_sound = count_frames(segments, frame)
    findings = _check_order(unit, segments, is_sound)
    promised = _promised_lengths(unit, promises)
    for position, number in enumerate(segments.numbers.tolist()):
        count = int(segments.counts[position])
        if promises.has_episodes and number not in promised:
            findings.append(_stray(unit, promises, number, count))
            continue
        length = promised.get(number, int(num_frames[position]))
        if is_sound[position] and count == length:
            continue
        rows = np.zeros(0, np.int64) if frame is None else _rows(frame, segments, position)
        found = _check_episode(rows, int(num_frames[position]), count, length)
        if found:
            kind, message, frames = found
            findings.append(make_finding(kind, message, Place(file=unit.name, episodes=(number,), frames=frames)))
    there = set(segments.numbers.tolist())
    for number, length in promised.items():
        if number not in there:
            message = (
                f"{either(length, 'the row', f'none of the {length:,} rows')} that the episode table promises is "
                f"{either(length, 'not ', '')}there"
            )
            findings.append(make_finding("length-mismatch", message, Place(file=unit.name, episodes=(number,))))
    return findings


def _rows(values: NDArray[Any], segments: Segments, position: int) -> NDArray[Any]:
    start = segments.starts[position]
    return np.asarray(values[start : start + segments.counts[position]])


def _promised_lengths(unit: DataUnit, promises: Promises) -> dict[int, int]:
    rows = list(unit.rows)
    episodes = promises.meta.episodes
    return dict(zip(episodes.episode_index[rows].tolist(), episodes.length[rows].tolist(), strict=True))


def _check_episode(
    frame: NDArray[np.int64], num_frames: int, count: int, length: int
) -> tuple[str, str, tuple[int, ...]] | None:
    """Return kind, message and frames of the problem with one episode's frame numbers.

    Args:
        frame: the ``frame_index`` of its rows, ascending; empty if there is no such column.
    """
    doubled = np.unique(frame[1:][np.diff(frame) == 0])
    if len(doubled):
        message = (
            f"{counted(count, 'row')} for {counted(num_frames, 'frame')}; frame {doubled[0]} stands there more than "
            f"once"
        )
        return "rows-duplicated", message, tuple(doubled[:MAX_FRAMES].tolist())
    # A promised length may be any number: naming a few frames past the last one is enough.
    promised = np.arange(min(length, len(frame) + MAX_FRAMES)) if len(frame) else np.zeros(0, np.int64)
    missing = np.setdiff1d(promised, frame)[:MAX_FRAMES]
    if count != length:
        lost = f"; frame {missing[0]} is the first that is missing" if len(missing) else ""
        return "length-mismatch", f"{counted(count, 'row')}, and the episode table promises {length}{lost}", ()
    if len(missing):
        message = (
            f"its {counted(count, 'frame')} {either(count, 'is', 'are')} numbered {span_text(frame[0], frame[-1])}; "
            f"frame {missing[0]} is not there"
        )
        return "frame-gap", message, tuple(missing.tolist())
    return None


def _stray(unit: DataUnit, promises: Promises, number: int, count: int) -> Finding:
    episodes = promises.meta.episodes
    place = Place(file=unit.name, episodes=(number,))
    row = int(np.searchsorted(episodes.episode_index, number))
    if row < len(episodes) and episodes.episode_index[row] == number:
        elsewhere = promises.meta.data_file(row)
        return make_finding(
            "rows-misplaced", f"{counted(count, 'row')}; the episode table places it in {elsewhere!r}", place
        )
    return make_finding(
        "rows-orphaned", f"{counted(count, 'row')} of episode {number}, which the episode table lacks", place
    )


def _check_order(unit: DataUnit, segments: Segments, is_sound: NDArray[np.bool_]) -> list[Finding]:
    if segments.is_in_order:
        return []
    findings = []
    for position in np.flatnonzero(is_sound):
        rows = _rows(segments.order, segments, int(position))
        if np.any(np.diff(rows) != 1):
            message = f"its rows are rows {rows.min()} to {rows.max()} of the file, not in the order of the frames"
            place = Place(file=unit.name, episodes=(int(segments.numbers[position]),))
            findings.append(make_finding("rows-unordered", message, place))
    return findings


def check_index(
    unit: DataUnit, segments: Segments, index: NDArray[np.int64], is_sound: NDArray[np.bool_]
) -> list[Finding]:
    """Return the episodes whose ``index`` does not go up by one with every frame."""
    findings = []
    jumps = np.diff(index) != 1
    # `raypipe.validate.whole` judges the step into the next episode.
    jumps[segments.starts[1:] - 1] = False
    for position in np.flatnonzero(np.logical_or.reduceat(np.append(jumps, False), segments.starts) & is_sound):
        rows = _rows(index, segments, int(position))
        frame = int(np.flatnonzero(np.diff(rows) != 1)[0]) + 1
        message = f"index goes from {rows[frame - 1]} to {rows[frame]} at frame {frame}; expected {rows[frame - 1] + 1}"
        place = Place(file=unit.name, episodes=(int(segments.numbers[position]),), feature="index", frames=(frame,))
        findings.append(make_finding("index-mismatch", message, place))
    return findings


def check_tasks(unit: DataUnit, promises: Promises, segments: Segments, task_index: NDArray[np.int64]) -> list[Finding]:
    """Return findings on episodes whose ``task_index`` is not a task, or not one that the episode table lists for them.

    Empty if the dataset has no tasks.
    """
    known = promises.meta.tasks.texts
    if not promises.has_tasks or not known:
        return []
    is_unknown = ~np.isin(task_index, np.fromiter(known, np.int64))
    unresolved = np.logical_or.reduceat(is_unknown, segments.starts)
    findings = [
        _unresolved(unit, promises, segments, task_index, int(position)) for position in np.flatnonzero(unresolved)
    ]
    listed = _listed_tasks(unit, promises)
    for position in np.flatnonzero(~unresolved):
        number = int(segments.numbers[position])
        rows = _rows(task_index, segments, int(position))
        texts = listed.get(number, frozenset())
        others = [task for task in np.unique(rows).tolist() if known[task] not in texts]
        # A table that lists nothing contradicts nothing. Texts that are no task get a finding in `structure`.
        if others and texts and texts <= set(known.values()):
            findings.append(_contradiction(unit, number, np.flatnonzero(rows == others[0]), known[others[0]], texts))
    return findings


def _listed_tasks(unit: DataUnit, promises: Promises) -> dict[int, frozenset[str]]:
    """Return the task texts that the episode table lists for each episode of a file, by episode number."""
    listed = promises.meta.episodes.tasks.take(list(unit.rows)).to_pylist() if unit.rows else []
    return {
        number: promises.meta.tasks.named(texts)
        for number, texts in zip(promises.numbers(unit.rows), listed, strict=True)
    }


def _contradiction(
    unit: DataUnit, number: int, frames: NDArray[np.int64], found: str, listed: frozenset[str]
) -> Finding:
    message = (
        f"{counted(len(frames), 'row')} with the task {found!r}, the first is frame {frames[0]}; the episode table "
        f"lists {', '.join(map(repr, sorted(listed)))}"
    )
    shown = tuple(frames[:MAX_FRAMES].tolist())
    return make_finding(
        "task-mismatch", message, Place(file=unit.name, episodes=(number,), feature="task_index", frames=shown)
    )


def _unresolved(
    unit: DataUnit, promises: Promises, segments: Segments, task_index: NDArray[np.int64], position: int
) -> Finding:
    known = promises.meta.tasks.texts
    rows = _rows(task_index, segments, position)
    frames = np.flatnonzero(~np.isin(rows, np.fromiter(known, np.int64)))
    message = (
        f"frame {frames[0]} has task_index {rows[frames[0]]}, and meta/tasks lists "
        f"{span_text(min(known), max(known))}; {counted(len(frames), 'such frame')}"
    )
    place = Place(
        file=unit.name,
        episodes=(int(segments.numbers[position]),),
        feature="task_index",
        frames=tuple(frames[:MAX_FRAMES].tolist()),
    )
    return make_finding("task-unresolved", message, place)


def measure_timestamps(
    segments: Segments, timestamp: NDArray[Any], fps: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return each episode's first timestamp, its largest drift from there (signed), and its median step."""
    stamps = timestamp.astype(np.float64)
    offset = stamps[segments.starts]
    frame = np.arange(len(stamps)) - np.repeat(segments.starts, segments.counts)
    off = stamps - np.repeat(offset, segments.counts) - frame / fps
    high, low = np.maximum.reduceat(off, segments.starts), np.minimum.reduceat(off, segments.starts)
    drift = np.where(np.abs(low) > np.abs(high), low, high)
    step = np.full(len(offset), np.nan)
    for position in np.flatnonzero(segments.counts > 1):
        step[position] = np.median(np.diff(_rows(stamps, segments, int(position))))
    return offset, drift, step


def check_timestamp_order(
    unit: DataUnit, segments: Segments, timestamp: NDArray[Any], is_sound: NDArray[np.bool_]
) -> list[Finding]:
    """Return the episodes whose timestamps do not go up with every frame."""
    falls = np.diff(timestamp) <= 0
    falls[segments.starts[1:] - 1] = False
    findings = []
    for position in np.flatnonzero(np.logical_or.reduceat(np.append(falls, False), segments.starts) & is_sound):
        rows = _rows(timestamp, segments, int(position))
        frame = int(np.flatnonzero(np.diff(rows) <= 0)[0]) + 1
        message = f"from {rows[frame - 1]:.4f} s to {rows[frame]:.4f} s at frame {frame}"
        place = Place(file=unit.name, episodes=(int(segments.numbers[position]),), feature="timestamp", frames=(frame,))
        findings.append(make_finding("timestamp-order", message, place))
    return findings
