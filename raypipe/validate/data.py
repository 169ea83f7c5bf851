"""Reads one data file once and checks its rows against the promises of ``meta/``."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raypipe.errors import DatasetError
from raypipe.format import INDEX_FEATURES, Feature, one_line, open_parquet, row_group_bounds
from raypipe.storage import is_transient, retry_transient
from raypipe.text import counted
from raypipe.validate.findings import Finding, Place, make_finding
from raypipe.validate.frames import (
    check_frames,
    check_index,
    check_tasks,
    check_timestamp_order,
    count_frames,
    find_segments,
    measure_timestamps,
)
from raypipe.validate.promises import Promises
from raypipe.validate.structure import DataUnit
from raypipe.validate.summary import EpisodeSummary, join_summaries
from raypipe.validate.values import Segments, blame, check_stored_kind, digest_episodes, measure_feature, read_column


@dataclass(frozen=True, kw_only=True, eq=False)
class DataResult:
    """The result of checking one data file."""

    unit: DataUnit
    findings: tuple[Finding, ...]
    columns: tuple[str, ...]
    """All columns of the file; empty if it cannot be read."""
    num_rows: int
    summary: EpisodeSummary
    decoded_frames: int = 0


@dataclass(frozen=True, eq=False)
class _File:
    """The rows of a data file, without pixels."""

    table: pa.Table
    columns: tuple[str, ...]
    group_rows: NDArray[np.int64]
    """The number of rows of each row group that could be read."""
    lost: frozenset[int] = frozenset()
    """Episodes of the row groups that cannot be read."""
    failure: str = ""


def check_data_file(promises: Promises, unit: DataUnit) -> DataResult:
    """Return the findings on one data file, and the summary of its episodes."""
    try:
        file = retry_transient(lambda: _read_file(promises, unit.name))
    except (DatasetError, pa.ArrowException, OSError) as error:
        if is_transient(error):
            raise
        place = Place(file=unit.name, episodes=promises.numbers(unit.rows))
        finding = make_finding("data-unreadable", one_line(error), place)
        return DataResult(unit=unit, findings=(finding,), columns=(), num_rows=0, summary=join_summaries([]))
    findings = _check_lost(promises, unit, file)
    here = _without_lost(promises, unit, file)
    doubled = sorted({name for name in file.columns if file.columns.count(name) > 1})
    if doubled:
        place = Place(file=unit.name, episodes=promises.numbers(unit.rows))
        findings.append(make_finding("column-doubled", f"the columns {doubled} stand there twice", place))
    episode = _episode_numbers(promises, here, file.table, findings)
    if episode is None:
        summary = join_summaries([])
    elif not len(episode):
        findings += check_frames(here, promises, find_segments(episode, None), None)
        summary = join_summaries([])
    else:
        summary = _check_rows(promises, here, file, episode, findings)
    return DataResult(
        unit=unit, findings=tuple(findings), columns=file.columns, num_rows=len(file.table), summary=summary
    )


def _read_file(promises: Promises, name: str) -> _File:
    """Return the columns of numbers of a data file, without reading texts and images."""
    meta = promises.meta
    wanted = {feature.name for feature in meta.features.values() if feature.kind == "vector"} | set(INDEX_FEATURES)
    with open_parquet(meta.storage, name) as parquet:
        # All files have the same column names: interning keeps one copy.
        columns = tuple(map(sys.intern, parquet.schema_arrow.names))
        chosen = [column for column in columns if column in wanted and columns.count(column) == 1]
        groups = list(range(parquet.metadata.num_row_groups))
        try:
            table = parquet.read_row_groups(groups, columns=chosen, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            if is_transient(error):
                raise
            return _read_readable(promises, parquet, chosen, one_line(error))
        return _File(table, columns, _group_rows(parquet.metadata, groups))


def _read_readable(promises: Promises, parquet: pq.ParquetFile, chosen: list[str], failure: str) -> _File:
    """Return the readable row groups of a damaged file, and the episodes in the other ones."""
    parts, groups, lost = [parquet.schema_arrow.empty_table().select(chosen)], [], set()
    numbers = promises.meta.episodes.episode_index
    _, low, high = row_group_bounds(parquet.metadata)
    for group in range(parquet.metadata.num_row_groups):
        try:
            parts.append(parquet.read_row_group(group, columns=chosen, use_threads=False))
            groups.append(group)
        except (pa.ArrowException, OSError):
            lost |= set(numbers[(numbers >= low[group]) & (numbers <= high[group])].tolist())
    columns = tuple(parquet.schema_arrow.names)
    return _File(pa.concat_tables(parts), columns, _group_rows(parquet.metadata, groups), frozenset(lost), failure)


def _group_rows(metadata: pq.FileMetaData, groups: list[int]) -> NDArray[np.int64]:
    return np.array([metadata.row_group(group).num_rows for group in groups], dtype=np.int64)


def _check_lost(promises: Promises, unit: DataUnit, file: _File) -> list[Finding]:
    if not file.failure:
        return []
    numbers = tuple(number for number in promises.numbers(unit.rows) if number in file.lost)
    return [make_finding("data-unreadable", file.failure, Place(file=unit.name, episodes=numbers))]


def _without_lost(promises: Promises, unit: DataUnit, file: _File) -> DataUnit:
    """Return the unit without the episodes that a finding already reports as unreadable."""
    numbers = promises.numbers(unit.rows)
    rows = tuple(row for row, number in zip(unit.rows, numbers, strict=True) if number not in file.lost)
    return DataUnit(name=unit.name, rows=rows)


def _index_feature(name: str) -> Feature:
    return Feature(name=name, kind="vector", dtype=INDEX_FEATURES[name], shape=(1,))


def _episode_numbers(
    promises: Promises, unit: DataUnit, table: pa.Table, findings: list[Finding]
) -> NDArray[np.int64] | None:
    """Return the episode of every row; None if the file does not tell."""
    if "episode_index" in table.column_names:
        values = read_column(table, _index_feature("episode_index"), unit.name)
        if not isinstance(values, Finding):
            return values.astype(np.int64)
        place = Place(file=unit.name, episodes=promises.numbers(unit.rows), feature="episode_index")
        findings.append(make_finding(values.kind, values.message, place))
        return None
    if len(unit.rows) == 1:
        return np.full(len(table), promises.numbers(unit.rows)[0], np.int64)
    place = Place(file=unit.name, episodes=promises.numbers(unit.rows), feature="episode_index")
    findings.append(make_finding("episode-column", f"{len(table)} rows of {len(unit.rows)} episodes", place))
    return None


def _check_rows(
    promises: Promises, unit: DataUnit, file: _File, episode: NDArray[np.int64], findings: list[Finding]
) -> EpisodeSummary:
    values = _read_values(promises, unit, file.table, episode, findings)
    segments = find_segments(episode, values.get("frame_index"))
    if not segments.is_in_order:
        values = {name: column[segments.order] for name, column in values.items()}
    if promises.meta.is_packed:
        findings += _check_row_groups(unit, file.group_rows, episode)
    findings += check_frames(unit, promises, segments, values.get("frame_index"))
    num_frames, is_sound = count_frames(segments, values.get("frame_index"))
    if "index" in values:
        findings += check_index(unit, segments, values["index"], is_sound)
    if "task_index" in values:
        findings += check_tasks(unit, promises, segments, values["task_index"])
    if "timestamp" in values:
        findings += check_timestamp_order(unit, segments, values["timestamp"], is_sound)
    return _summarise(promises, unit, values, segments, (num_frames, is_sound), findings)


def _read_values(
    promises: Promises, unit: DataUnit, table: pa.Table, episode: NDArray[np.int64], findings: list[Finding]
) -> dict[str, NDArray[Any]]:
    """Return the columns that the pipeline can read, in the order of the file."""
    values: dict[str, NDArray[Any]] = {}
    for name in table.column_names:
        feature = _index_feature(name) if name in INDEX_FEATURES else promises.meta.features[name]
        column = read_column(table, feature, unit.name)
        if isinstance(column, Finding):
            findings.append(blame(column, table, feature, episode))
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
    return [make_finding("row-groups", message, Place(file=unit.name))]


def _summarise(
    promises: Promises,
    unit: DataUnit,
    values: Mapping[str, NDArray[Any]],
    segments: Segments,
    frames: tuple[NDArray[np.int64], NDArray[np.bool_]],
    findings: list[Finding],
) -> EpisodeSummary:
    moments = {}
    for name in values:
        if name not in INDEX_FEATURES:
            moments[name], found = measure_feature(values[name], promises.meta.features[name], segments, unit.name)
            findings += found
    nothing = np.full(len(segments.numbers), np.nan)
    offset, drift, step = nothing, nothing, nothing
    if "timestamp" in values:
        _, found = measure_feature(values["timestamp"], _index_feature("timestamp"), segments, unit.name)
        findings += found
        offset, drift, step = measure_timestamps(segments, values["timestamp"], promises.meta.fps)
    first = values["index"][segments.starts] if "index" in values else np.full(len(segments.numbers), -1)
    summary = EpisodeSummary(
        episode_index=segments.numbers,
        num_frames=frames[0],
        first_index=first.astype(np.int64),
        is_sound=frames[1],
        offset_s=offset,
        drift_s=drift,
        step_s=step,
        digest=digest_episodes(values, moments, segments),
        moments=moments,
    )
    return _only(summary, _belongs(promises, unit, segments))


def _belongs(promises: Promises, unit: DataUnit, segments: Segments) -> NDArray[np.bool_]:
    """Return which episodes are where the episode table places them; all if there is no table."""
    if not promises.has_episodes:
        return np.ones(len(segments.numbers), np.bool_)
    return np.isin(segments.numbers, np.array(promises.numbers(unit.rows), np.int64))


def _only(summary: EpisodeSummary, chosen: NDArray[np.bool_]) -> EpisodeSummary:
    if chosen.all():
        return summary
    columns = {name: getattr(summary, name)[chosen] for name in vars(summary) if name != "moments"}
    moments = {
        name: type(part)(part.minimum[chosen], part.maximum[chosen], part.mean[chosen])
        for name, part in summary.moments.items()
    }
    return EpisodeSummary(**columns, moments=moments)
