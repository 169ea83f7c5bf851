"""Reads one data file once and checks its rows against what ``meta/`` promises.

First the reading, then the checks of frames: which exist, in which order, and when.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe.errors import DatasetError
from raypipe.format import INDEX_COLUMNS, INDEX_FEATURES, BoundedParquet, one_line, open_parquet
from raypipe.storage import is_transient, retry_transient
from raypipe.text import counted, either, span_text
from raypipe.validate.findings import Finding
from raypipe.validate.outline import DataUnit, Outline, Unit
from raypipe.validate.values import (
    MAX_FRAMES,
    EpisodeSummary,
    Segments,
    blame,
    check_stored_kind,
    digest_episodes,
    measure_feature,
    read_column,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class FileResult:
    """The result of checking one file."""

    unit: Unit
    findings: tuple[Finding, ...]
    decoded_frames: int = 0
    columns: tuple[str, ...] = ()
    """All columns of a data file; empty if it cannot be read."""
    summary: EpisodeSummary | None = None
    """Of a data file whose rows can be read."""


@dataclass(frozen=True, eq=False)
class _File:
    """The rows of a data file, without pixels."""

    table: pa.Table
    columns: tuple[str, ...]
    group_rows: NDArray[np.int64]
    """The number of rows of each row group that could be read."""
    lost: frozenset[int]
    """Episodes of the row groups that cannot be read."""
    failure: str


def check_data_file(outline: Outline, unit: DataUnit) -> FileResult:
    """Return the findings on one data file, and the summary of its episodes; decodes its images if that is asked."""
    try:
        file = retry_transient(lambda: _read_file(outline, unit.name))
    except (DatasetError, pa.ArrowException, OSError) as error:
        if is_transient(error):
            raise
        finding = unit.finding("data-unreadable", one_line(error), unit.episodes)
        return FileResult(unit=unit, findings=(finding,))
    findings = []
    here = unit
    if file.failure:
        numbers = [number for number in unit.episodes if number in file.lost]
        findings.append(unit.finding("data-unreadable", file.failure, numbers))
        kept = [pair for pair in zip(unit.rows, unit.episodes, strict=True) if pair[1] not in file.lost]
        here = replace(unit, rows=tuple(row for row, _ in kept), episodes=tuple(number for _, number in kept))
    doubled = sorted({name for name in file.columns if file.columns.count(name) > 1})
    if doubled:
        findings.append(unit.finding("column-doubled", f"the columns {doubled} stand there twice", unit.episodes))
    summary, num_decoded = None, 0
    episode = _episode_numbers(here, file.table, findings)
    if episode is not None and not len(episode):
        findings += _check_frames(here, outline, find_segments(episode, None), None)
    elif episode is not None:
        summary = _check_rows(outline, here, file, episode, findings)
    if outline.is_deep and file.columns:
        from raypipe.validate.deep import decode_images

        found, num_decoded = decode_images(outline, unit)
        findings += found
    return FileResult(
        unit=unit, findings=tuple(findings), decoded_frames=num_decoded, columns=file.columns, summary=summary
    )


def _read_file(outline: Outline, name: str) -> _File:
    """Return the columns of numbers of a data file, without reading texts and images; as far as they can be read."""
    meta = outline.meta
    wanted = {feature.name for feature in meta.features.values() if feature.kind == "vector"} | set(INDEX_FEATURES)
    with open_parquet(meta.storage, name) as parquet:
        # All files have the same column names: interning keeps one copy.
        columns = tuple(map(sys.intern, parquet.schema_arrow.names))
        chosen = [column for column in columns if column in wanted and columns.count(column) == 1]
        groups, lost, failure = list(range(parquet.metadata.num_row_groups)), frozenset[int](), ""
        try:
            table = parquet.read_row_groups(groups, columns=chosen, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            if is_transient(error):
                raise
            table, groups, lost = _read_readable(outline, parquet, chosen)
            failure = one_line(error)
        counts = [parquet.metadata.row_group(group).num_rows for group in groups]
        return _File(table, columns, np.array(counts, np.int64), lost, failure)


def _read_readable(
    outline: Outline, parquet: BoundedParquet, chosen: list[str]
) -> tuple[pa.Table, list[int], frozenset[int]]:
    """Return the readable rows of a damaged file, their row groups, and the episodes in the other row groups."""
    parts, groups, lost = [parquet.schema_arrow.empty_table().select(chosen)], [], set()
    numbers = outline.meta.episodes.episode_index
    low, high = parquet.episode_bounds
    for group in range(parquet.metadata.num_row_groups):
        try:
            parts.append(parquet.read_row_group(group, columns=chosen, use_threads=False))
            groups.append(group)
        except (pa.ArrowException, OSError):
            lost |= set(numbers[(numbers >= low[group]) & (numbers <= high[group])].tolist())
    return pa.concat_tables(parts), groups, frozenset(lost)


def _episode_numbers(unit: DataUnit, table: pa.Table, findings: list[Finding]) -> NDArray[np.int64] | None:
    """Return the episode of every row; None if the file does not tell."""
    kind, message = "episode-column", f"{len(table)} rows of {len(unit.rows)} episodes"
    if "episode_index" in table.column_names:
        values = read_column(table, INDEX_COLUMNS["episode_index"], unit)
        if not isinstance(values, Finding):
            return values.astype(np.int64)
        kind, message = values.kind, values.message
    elif len(unit.rows) == 1:
        return np.full(len(table), unit.episodes[0], np.int64)
    findings.append(unit.finding(kind, message, unit.episodes, feature="episode_index"))
    return None


def _check_rows(
    outline: Outline, unit: DataUnit, file: _File, episode: NDArray[np.int64], findings: list[Finding]
) -> EpisodeSummary:
    values = _read_values(outline, unit, file.table, episode, findings)
    segments = find_segments(episode, values.get("frame_index"))
    if not segments.is_in_order:
        values = {name: column[segments.order] for name, column in values.items()}
    if outline.meta.is_packed:
        findings += _check_row_groups(unit, file.group_rows, episode)
    findings += _check_frames(unit, outline, segments, values.get("frame_index"))
    findings += _check_steps(unit, segments, values)
    if "task_index" in values:
        findings += _check_tasks(unit, outline, segments, values["task_index"])
    return _summarise(outline, unit, values, segments, findings)


def _read_values(
    outline: Outline, unit: DataUnit, table: pa.Table, episode: NDArray[np.int64], findings: list[Finding]
) -> dict[str, NDArray[Any]]:
    """Return the columns that the pipeline can read, in the order of the file."""
    values: dict[str, NDArray[Any]] = {}
    for name in table.column_names:
        feature = INDEX_COLUMNS.get(name) or outline.meta.features[name]
        column = read_column(table, feature, unit)
        if isinstance(column, Finding):
            findings.append(blame(column, table, feature, unit, episode))
        else:
            values[name] = column
            findings += check_stored_kind(table, feature, unit.name)
    return values


def _check_row_groups(unit: DataUnit, group_rows: NDArray[np.int64], episode: NDArray[np.int64]) -> list[Finding]:
    changes = np.concatenate([[0], np.cumsum(episode[1:] != episode[:-1])])
    stops = np.cumsum(group_rows[group_rows > 0])
    starts = stops - group_rows[group_rows > 0]
    held = changes[stops - 1] - changes[starts] + 1
    if held.max(initial=1) < 2:
        return []
    message = (
        f"{counted(len(held), 'row group')} for {counted(int(changes[-1]) + 1, 'episode')}; the largest has "
        f"{counted(int(group_rows.max()), 'row')}, and one holds rows of {int(held.max())} episodes"
    )
    return [unit.finding("row-groups", message)]


def _summarise(
    outline: Outline, unit: DataUnit, values: Mapping[str, NDArray[Any]], segments: Segments, findings: list[Finding]
) -> EpisodeSummary:
    moments = {}
    for name in values:
        if name not in INDEX_FEATURES or name == "timestamp":
            feature = INDEX_COLUMNS.get(name) or outline.meta.features[name]
            moments[name], found = measure_feature(values[name], feature, segments, unit)
            findings += found
    offset, drift, step = (np.full(len(segments.numbers), np.nan) for _ in range(3))
    if moments.pop("timestamp", None) is not None:
        offset, drift, step = _measure_timestamps(segments, values["timestamp"], outline.meta.fps)
    first = values["index"][segments.starts] if "index" in values else np.full(len(segments.numbers), -1)
    summary = EpisodeSummary(
        episode_index=segments.numbers,
        num_frames=segments.num_frames,
        first_index=first.astype(np.int64),
        is_sound=segments.is_sound,
        offset_s=offset,
        drift_s=drift,
        step_s=step,
        digest=digest_episodes(values, moments, segments),
        moments=moments,
    )
    if not outline.has_episodes:
        return summary
    # The episode table may place an episode elsewhere.
    return summary.take(np.isin(segments.numbers, np.array(unit.episodes, np.int64)))


def find_segments(episode: NDArray[np.int64], frame: NDArray[np.int64] | None) -> Segments:
    """Return the episodes of a file as runs of its rows, ordered by episode and frame; None: no ``frame_index``."""
    order = np.lexsort((episode,) if frame is None else (frame, episode)).astype(np.int64)
    ordered = episode[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1)).astype(np.int64)
    counts = np.diff(starts, append=len(ordered))
    num_frames, is_sound = counts.copy(), np.ones(len(counts), np.bool_)
    segments = Segments(ordered[starts], starts, counts, order, num_frames, is_sound)
    if frame is not None and len(frame):
        frame = frame[order]
        is_sound &= np.logical_and.reduceat(frame == np.arange(len(frame)) - np.repeat(starts, counts), starts)
        for position in np.flatnonzero(~is_sound):
            num_frames[position] = len(np.unique(segments.of(frame, position)))
    return segments


def _check_frames(
    unit: DataUnit, outline: Outline, segments: Segments, frame: NDArray[np.int64] | None
) -> list[Finding]:
    """Return findings on the rows of the episodes: too few, too many, doubled, out of order, or of no episode."""
    findings = _check_order(unit, segments)
    promised = dict(zip(unit.episodes, outline.meta.episodes.length[list(unit.rows)].tolist(), strict=True))
    for position, number in enumerate(segments.numbers.tolist()):
        count = int(segments.counts[position])
        if outline.has_episodes and number not in promised:
            findings.append(_stray(unit, outline, number, count))
            continue
        num_frames = int(segments.num_frames[position])
        length = promised.get(number, num_frames)
        if segments.is_sound[position] and count == length:
            continue
        rows = np.zeros(0, np.int64) if frame is None else segments.of(frame, position)
        found = _check_episode(rows, num_frames, count, length)
        if found:
            kind, message, frames = found
            findings.append(unit.finding(kind, message, (number,), frames))
    for number in promised.keys() - set(segments.numbers.tolist()):
        length = promised[number]
        rows_text = either(length, "the row", f"none of the {length:,} rows")
        message = f"{rows_text} that the episode table promises is {either(length, 'not ', '')}there"
        findings.append(unit.finding("length-mismatch", message, (number,)))
    return findings


def _check_episode(
    frame: NDArray[np.int64], num_frames: int, count: int, length: int
) -> tuple[str, str, tuple[int, ...]] | None:
    """Return kind, message and frames of the problem with an episode; `frame` ascends; empty: no column."""
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


def _stray(unit: DataUnit, outline: Outline, number: int, count: int) -> Finding:
    episodes, rows = outline.meta.episodes, counted(count, "row")
    row = int(np.searchsorted(episodes.episode_index, number))
    if row < len(episodes) and episodes.episode_index[row] == number:
        elsewhere = outline.meta.data_file(row)
        return unit.finding("rows-misplaced", f"{rows}; the episode table places it in {elsewhere!r}", (number,))
    return unit.finding("rows-orphaned", f"{rows} of episode {number}, which the episode table lacks", (number,))


def _check_order(unit: DataUnit, segments: Segments) -> list[Finding]:
    if segments.is_in_order:
        return []
    findings = []
    for position in np.flatnonzero(segments.is_sound):
        rows = segments.of(segments.order, position)
        if np.any(np.diff(rows) != 1):
            message = f"its rows are rows {rows.min()} to {rows.max()} of the file, not in the order of the frames"
            findings.append(unit.finding("rows-unordered", message, (int(segments.numbers[position]),)))
    return findings


def _check_steps(unit: DataUnit, segments: Segments, values: Mapping[str, NDArray[Any]]) -> list[Finding]:
    """Return the episodes whose ``index`` does not go up by one, or whose timestamps do not go up, with every frame."""
    findings = []
    for name in [name for name in ("index", "timestamp") if name in values]:
        step = np.diff(values[name])
        wrong = np.append(step != 1 if name == "index" else step <= 0, False)
        # `raypipe.validate.whole` judges the step into the next episode.
        wrong[segments.starts[1:] - 1] = False
        for position in np.flatnonzero(np.logical_or.reduceat(wrong, segments.starts) & segments.is_sound):
            frame = int(np.flatnonzero(segments.of(wrong, position))[0]) + 1
            before, after = segments.of(values[name], position)[frame - 1 : frame + 1]
            if name == "index":
                kind = "index-mismatch"
                message = f"index goes from {before} to {after} at frame {frame}; expected {before + 1}"
            else:
                kind, message = "timestamp-order", f"from {before:.4f} s to {after:.4f} s at frame {frame}"
            findings.append(unit.finding(kind, message, (int(segments.numbers[position]),), (frame,), name))
    return findings


def _check_tasks(unit: DataUnit, outline: Outline, segments: Segments, task_index: NDArray[np.int64]) -> list[Finding]:
    """Return findings on episodes whose ``task_index`` is not a task, or not one that the episode table lists for them.

    Empty if the dataset has no tasks.
    """
    tasks = outline.meta.tasks
    if not outline.has_tasks or not len(tasks):
        return []
    in_table = outline.meta.episodes.tasks.take(list(unit.rows)).to_pylist() if unit.rows else []
    listed = dict(zip(unit.episodes, map(tasks.named, in_table), strict=True))
    is_unknown = ~np.isin(task_index, np.fromiter(tasks.texts, np.int64))
    findings = []
    for position, number in enumerate(segments.numbers.tolist()):
        rows, unknown = (segments.of(values, position) for values in (task_index, is_unknown))
        found = _check_episode_tasks(tasks.texts, rows, np.flatnonzero(unknown), listed.get(number, frozenset()))
        if found:
            kind, message, frames = found
            shown = frames[:MAX_FRAMES].tolist()
            findings.append(unit.finding(kind, message, (number,), shown, "task_index"))
    return findings


def _check_episode_tasks(
    known: Mapping[int, str], rows: NDArray[np.int64], unknown: NDArray[np.int64], listed: frozenset[str]
) -> tuple[str, str, NDArray[np.int64]] | None:
    """Return kind, message and frames of the problem with one episode's tasks; `unknown` are frames without a task."""
    if len(unknown):
        message = (
            f"frame {unknown[0]} has task_index {rows[unknown[0]]}, and meta/tasks lists "
            f"{span_text(min(known), max(known))}; {counted(len(unknown), 'such frame')}"
        )
        return "task-unresolved", message, unknown
    others = [task for task in np.unique(rows).tolist() if known[task] not in listed]
    # A table that lists nothing contradicts nothing. Texts that are no task get a finding in `outline`.
    if not others or not listed or not listed <= set(known.values()):
        return None
    frames = np.flatnonzero(rows == others[0])
    message = (
        f"{counted(len(frames), 'row')} with the task {known[others[0]]!r}, the first is frame {frames[0]}; the "
        f"episode table lists {', '.join(map(repr, sorted(listed)))}"
    )
    return "task-mismatch", message, frames


def _measure_timestamps(
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
        step[position] = np.median(np.diff(segments.of(stamps, position)))
    return offset, drift, step
