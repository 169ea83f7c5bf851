"""``meta/`` of the copy: ``info.json``, the episode table in one pass, tasks, statistics, the origin, and other files.

The driver writes it last, from the plan, the records of the finished files, and what the source's ``meta/`` says of
each episode besides its place.

Statistics by episode are taken over where the source has them; else they were computed with the rows. Each is a column
``stats/<feature>/<statistic>`` of ``meta/episodes``, with a list per episode. Those of the whole dataset are pooled
from them. With statistics an episode takes about 13 kB, so only a block of episodes is in memory.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raypipe.errors import DatasetError, as_damage
from raypipe.format import (
    DATA_TEMPLATES,
    EPISODES_TEMPLATE,
    FILES_PER_CHUNK,
    FOLDER,
    GLOBAL,
    JSON_LINES,
    MOMENTS,
    PARQUET,
    PER_EPISODE,
    TASK_LINES,
    VIDEO_TEMPLATES,
    DatasetMeta,
    Stats,
    find_stats_file,
    format_path,
    in_episodes_file,
    is_low,
    list_tables,
    one_line,
    open_parquet,
    pool_stats,
    read_json,
    read_json_lines,
    read_parquet,
    tasks_table,
)
from raypipe.reshard.data import computed_kinds
from raypipe.reshard.plan import CopyJob, FilePlan
from raypipe.reshard.videos import declare_camera, video_columns
from raypipe.reshard.workspace import ORIGIN
from raypipe.storage import Storage
from raypipe.text import counted, either, parse_json, read_lines

MAPPING: Final = "meta/reshard_episodes.parquet"
"""Each episode's number in the copy and in the source."""

EPISODES_PER_ROW_GROUP: Final = 500
"""LeRobot's recorder writes 10. Readers read all rows of a few columns, which favours fewer and larger groups."""


def write_meta(job: CopyJob, files: FilePlan, source: "SourceEpisodes", size_of: Mapping[str, int]) -> list[str]:
    """Write all that is not rows or videos, and return notes on it; `size_of` names all files of the source."""
    workspace = job.workspace
    pool = StatsPool()
    _write_episodes(job, _episode_tables(job, files, source, pool))
    stats, notes = _dataset_stats(job, pool)
    if stats:
        workspace.write_json(GLOBAL, stats)
    if job.tasks.texts:
        workspace.write_table("meta/tasks.parquet", tasks_table(job.tasks.texts))
    workspace.write_table(MAPPING, _mapping(job))
    workspace.write_json("meta/info.json", _make_info(job))
    origin = {"fingerprint": workspace.fingerprint, "root": job.meta.root, "version": job.meta.version}
    workspace.write_json(ORIGIN, origin | {"spec": workspace.choices})
    return notes + _copy_other_files(job, size_of)


_OF_OLDER_VERSIONS: Final = ("total_videos", "total_chunks")


def _make_info(job: CopyJob) -> dict[str, Any]:
    """Return ``info.json`` of the copy, in the form of v3.0; it keeps keys that raypipe does not know."""
    meta = job.meta
    source = read_json(meta.storage, "meta/info.json")
    features = _features(job, source["features"])
    has_videos = any(feature["dtype"] == "video" for feature in features.values())
    kept = {name: value for name, value in source.items() if name not in _OF_OLDER_VERSIONS}
    return kept | {
        "codebase_version": "v3.0",
        "total_episodes": len(job.numbering),
        "total_frames": int(job.lengths.sum()),
        "total_tasks": len(job.tasks.texts),
        "chunks_size": FILES_PER_CHUNK,
        "data_files_size_in_mb": job.spec.data_mb,
        "video_files_size_in_mb": job.spec.video_mb,
        # LeRobot stores a whole number.
        "fps": int(meta.fps) if meta.fps == int(meta.fps) else meta.fps,
        "splits": _splits(job),
        "data_path": DATA_TEMPLATES[True],
        "video_path": VIDEO_TEMPLATES[True] if has_videos else None,
        "features": features,
    }


def _splits(job: CopyJob) -> dict[str, str]:
    """Return the source's splits in the new numbers; one split of all episodes if it has none."""
    old = job.meta.episodes.episode_index[job.numbering.rows]
    bounds = {name: np.searchsorted(old, span) for name, span in job.meta.splits.items()}
    return {name: f"{start}:{stop}" for name, (start, stop) in bounds.items()} or {"train": f"0:{len(old)}"}


def _features(job: CopyJob, declared: Mapping[str, Any]) -> dict[str, Any]:
    features = {}
    for name in (name for name in declared if name not in job.dropped):
        feature = {"names": None, **deepcopy(declared[name])}
        if feature["dtype"] == "video":
            feature = declare_camera(feature, job.meta.features[name].shape, job.encodings.get(name), job.meta.fps)
        features[name] = feature
    return features | job.columns.added


def _mapping(job: CopyJob) -> pa.Table:
    episodes, rows = job.meta.episodes, job.numbering.rows
    return pa.table(
        {
            "episode_index": np.arange(len(rows)),
            "source_episode_index": episodes.episode_index[rows],
            "source_from_index": episodes.from_index[rows],
        }
    )


def _write_episodes(job: CopyJob, tables: Iterator[pa.Table]) -> None:
    """Write the episode table with one row group per table, in files that close when they reach their largest size."""
    for number, first in enumerate(tables):

        def write(stream: IO[bytes], number: int = number, first: pa.Table = first) -> None:
            schema = in_episodes_file(first, number).schema
            with pq.ParquetWriter(stream, schema, compression="snappy") as writer:
                for table in chain([first], tables):
                    writer.write_table(in_episodes_file(table, number), row_group_size=len(table))
                    if stream.tell() >= job.spec.data_mb << 20:
                        break

        job.workspace.write_file(job.workspace.dataset / format_path(EPISODES_TEMPLATE, number), write)


def _episode_tables(job: CopyJob, files: FilePlan, source: "SourceEpisodes", pool: "StatsPool") -> Iterator[pa.Table]:
    """Yield the episode table in blocks, and add the statistics of each block to `pool`."""
    places = _place_columns(job, files) | video_columns(job, files.videos)
    read = job.workspace.read_stats
    computed = (stats for unit in files.data if job.described for stats in read(unit.path))
    kinds = computed_kinds(job.meta.features, job.described)
    replaced = tuple(f"stats/{name}/" for name in job.described)
    for start in range(0, len(job.numbering), EPISODES_PER_ROW_GROUP):
        part = slice(start, min(start + EPISODES_PER_ROW_GROUP, len(job.numbering)))
        rows = job.numbering.rows[part]
        with as_damage(partial(_damaged_columns, job.meta.root)):
            carried = source.block(rows)
            if replaced:
                carried = {name: values for name, values in carried.items() if not name.startswith(replaced)}
                carried |= stats_arrays(list(islice(computed, len(rows))), kinds)
            pool.add(carried)
        yield pa.table(
            {"episode_index": np.arange(part.start, part.stop), "tasks": _task_texts(job, rows)}
            | {name: values[part] for name, values in places.items()}
            | carried
        )


def _task_texts(job: CopyJob, rows: NDArray[np.int64]) -> pa.ChunkedArray:
    """Return the tasks of some episodes; as texts if the source lists numbers, and the copy has others."""
    listed = job.meta.episodes.tasks.take(rows)
    if job.tasks.is_same:
        return listed
    known = pc.unique(pc.list_flatten(listed)).drop_null().to_pylist()
    text_of = {task: next(iter(job.meta.tasks.named([task]))) for task in known}
    texts = [tasks and [text_of.get(task) for task in tasks] for tasks in listed.to_pylist()]
    return pa.chunked_array([pa.array(texts, listed.type)])


def _damaged_columns(root: str, error: Exception) -> DatasetError:
    return DatasetError(
        f"the statistics or further columns of the episodes in meta/ of {root!r} cannot be copied: {one_line(error)}. "
        f"Fetch meta/ again, or take them out."
    )


def _place_columns(job: CopyJob, files: FilePlan) -> dict[str, NDArray[Any]]:
    number = np.repeat([unit.number for unit in files.data], [unit.stop - unit.start for unit in files.data])
    return {
        "length": job.lengths,
        "data/chunk_index": number // FILES_PER_CHUNK,
        "data/file_index": number % FILES_PER_CHUNK,
        "dataset_from_index": job.numbering.from_index,
        "dataset_to_index": job.numbering.from_index + job.lengths,
    }


def _dataset_stats(job: CopyJob, pool: "StatsPool") -> tuple[dict[str, Any], list[str]]:
    """Return the statistics of the whole copy, and notes on what is less exact than it could be."""
    stored = read_json(job.meta.storage, GLOBAL) if find_stats_file(job.meta.storage) == GLOBAL else {}
    stored = {name: values for name, values in stored.items() if name not in job.dropped}
    pooled = pool.result()
    if job.numbering.is_same(job.meta) and job.tasks.is_same:
        return pooled | stored, []
    carried = sorted(stored.keys() - pooled.keys())
    notes = []
    if carried and len(job.numbering) < len(job.meta.episodes):
        notes.append(
            f"meta/stats.json of {', '.join(carried)} still counts the excluded episodes: the source has no statistics "
            f"by episode for them"
        )
    return stored | pooled, notes


_WRITTEN: Final = frozenset({"meta/info.json", GLOBAL, PER_EPISODE, PARQUET, TASK_LINES, JSON_LINES, MAPPING, ORIGIN})
"""The files of meta/, in any version, that reshard writes itself, besides those in `FOLDER`."""


def _copy_other_files(job: CopyJob, size_of: Mapping[str, int]) -> list[str]:
    """Copy the dataset's other files, further files of meta/ and the README; return notes on what was left out."""
    meta, workspace = job.meta, job.workspace
    used = {name for camera in ("", *meta.episodes.videos) for name in meta.rows_by_file(camera)}
    left, outside = [], []
    for name in sorted(size_of.keys() - used):
        if name in _WRITTEN or name.startswith(f"{FOLDER}/"):
            continue
        if not name.startswith(("meta/", "README", "LICENSE")):
            left.append(name)
        elif _leads_out(meta.storage, name):
            outside.append(name)
        else:
            workspace.write_bytes(workspace.dataset / name, meta.storage.read_bytes(name))
    return [
        f"{counted(len(names), 'file')} {which} {either(len(names), 'was', 'were')} {done}: {', '.join(names[:5])}"
        + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        for names, which, done in (
            (left, "that no episode uses", "left out"),
            (outside, "to which links lead out of the dataset", "not copied"),
        )
        if names
    ]


def _leads_out(storage: Storage, name: str) -> bool:
    """Return whether a file is a link to a place outside the dataset, perhaps to somebody else's file."""
    if not storage.is_local:
        return False
    place, root = Path(os.path.realpath(storage.locate(name))), Path(os.path.realpath(storage.path))
    # The Hub's cache stores files as links to its own blobs.
    own = [root, *(folder.parent / "blobs" for folder in root.parents if folder.name == "snapshots")]
    return not any(place.is_relative_to(folder) for folder in own)


_PLACES: Final = (
    "episode_index",
    "tasks",
    "length",
    "data/chunk_index",
    "data/file_index",
    "dataset_from_index",
    "dataset_to_index",
    "meta/episodes/chunk_index",
    "meta/episodes/file_index",
)
"""Columns that the copy writes itself, besides ``videos/...``."""


def open_source_episodes(meta: DatasetMeta, dropped: Sequence[str]) -> "SourceEpisodes":
    """Return a reader of the columns to take over, without the statistics of the features in `dropped`."""
    return _Packed(meta, dropped) if meta.is_packed else _PerEpisode(meta, dropped)


def _described(columns: Iterable[str]) -> frozenset[str]:
    means = [name for name in columns if name.startswith("stats/") and name.endswith("/mean")]
    return frozenset(name.split("/")[1] for name in means)


class _Packed:
    """v3.0: columns of ``meta/episodes/*.parquet``."""

    def __init__(self, meta: DatasetMeta, dropped: Sequence[str]) -> None:
        self._meta = meta
        names = list(list_tables(meta.storage))
        numbers = [read_parquet(meta.storage, name, ("episode_index",)).column(0).to_numpy() for name in names]
        self._names = names
        self._first = np.cumsum([0, *map(len, numbers)])
        # Sort the rows as the episode table does.
        self._order = np.argsort(np.concatenate([*numbers, np.zeros(0, np.int64)]), kind="stable")
        self._types = self._carried(dropped)
        self.described = _described(self._types)
        """The features with statistics by episode."""
        self._open: tuple[int, pa.Table] = (-1, pa.table({}))

    def block(self, rows: NDArray[np.int64]) -> dict[str, pa.ChunkedArray]:
        """Return the columns of these rows of the episode table, in order."""
        positions = self._order[rows]
        files = np.searchsorted(self._first, positions, side="right") - 1
        starts = np.flatnonzero(np.diff(files, prepend=-1))
        runs = zip(files[starts].tolist(), np.split(positions, starts[1:]), strict=True)
        parts = [self._table(file).take(run - self._first[file]) for file, run in runs]
        return {name: self._joined(name, parts) for name in self._types}

    def _joined(self, name: str, parts: Sequence[pa.Table]) -> pa.ChunkedArray:
        """Return one column of several tables, with its type in the first file that has it."""
        kind = self._types[name]
        try:
            columns = [
                part.column(name).combine_chunks().cast(kind)
                if name in part.schema.names
                else pa.nulls(len(part), kind)
                for part in parts
            ]
        except pa.ArrowException as error:
            raise DatasetError(
                f"the column {name!r} has types in the files of {FOLDER} of {self._meta.root!r} that cannot be joined: "
                f"{error}. Rewrite them."
            ) from error
        return pa.chunked_array(columns, kind)

    def _carried(self, dropped: Sequence[str]) -> dict[str, pa.DataType]:
        carried: dict[str, pa.DataType] = {}
        for name in self._names:
            with open_parquet(self._meta.storage, name) as parquet:
                carried = {field.name: field.type for field in parquet.schema_arrow} | carried
        lost = tuple(f"stats/{feature}/" for feature in dropped)
        return {
            name: kind
            for name, kind in carried.items()
            if name not in _PLACES and not name.startswith(("videos/", *lost))
        }

    def _table(self, file: int) -> pa.Table:
        if self._open[0] != file:
            # Ask for the number too: an empty list of columns would mean all columns.
            table = read_parquet(self._meta.storage, self._names[file], ("episode_index",), optional=list(self._types))
            self._open = (file, table)
        return self._open[1]


class _PerEpisode:
    """v2.x: further fields of ``episodes.jsonl``, and statistics from ``episodes_stats.jsonl``."""

    def __init__(self, meta: DatasetMeta, dropped: Sequence[str]) -> None:
        self._meta = meta
        self._dropped = frozenset(dropped)
        self._extra = pa.table({})
        if meta.storage.exists(JSON_LINES):
            table = read_json_lines(meta.storage, JSON_LINES)
            order = np.argsort(table.column("episode_index").to_numpy(), kind="stable")
            self._extra = table.select([name for name in table.column_names if name not in _PLACES]).take(order)
        self._kinds: dict[str, int] = {}
        self._offsets = self._index_stats() if meta.storage.offers(PER_EPISODE) else {}
        self.described = _described(self._kinds)

    def block(self, rows: NDArray[np.int64]) -> dict[str, pa.ChunkedArray]:
        columns = {name: self._extra.column(name).take(rows) for name in self._extra.column_names}
        if not self._kinds:
            return columns
        return columns | stats_arrays(self._read_stats(self._meta.episodes.episode_index[rows]), self._kinds)

    def _index_stats(self) -> dict[int, int]:
        """Return where each episode's line starts: lines take kilobytes, so they are not kept."""
        offsets: dict[int, int] = {}
        position = 0
        with self._meta.storage.open_file(PER_EPISODE) as stream:
            for number, line in enumerate(read_lines(stream), start=1):
                if line.strip():
                    offsets[self._note_kinds(line, number)] = position
                position += len(line)
        return offsets

    def _note_kinds(self, line: bytes, number: int) -> int:
        """Return the episode of a line, and record which statistics the line has."""

        def describe(error: Exception) -> DatasetError:
            place = self._meta.storage.locate(PER_EPISODE)
            return DatasetError(
                f"damaged file {place!r}: line {number} has not the statistics of an episode ({error}). Fetch it again."
            )

        with as_damage(describe):
            entry = parse_json(line)
            for feature, found in entry["stats"].items():
                for statistic, value in found.items() if feature not in self._dropped else ():
                    self._kinds.setdefault(f"stats/{feature}/{statistic}", max(1, np.ndim(value)))
            return int(entry["episode_index"])

    def _read_stats(self, episodes: NDArray[np.int64]) -> list[dict[str, dict[str, object]]]:
        found: list[dict[str, dict[str, object]]] = []
        with self._meta.storage.open_file(PER_EPISODE) as stream:
            for episode in episodes.tolist():
                line = b"{}"
                if episode in self._offsets:
                    stream.seek(self._offsets[episode])
                    line = stream.readline()
                found.append(parse_json(line).get("stats") or {})
        return found


SourceEpisodes = _Packed | _PerEpisode


def stats_arrays(episodes: list[dict[str, dict[str, Any]]], kinds: Mapping[str, int]) -> dict[str, pa.ChunkedArray]:
    """Return the statistics of some episodes as columns of the given depths; null if an episode has none."""
    columns = {}
    for column, depth in kinds.items():
        _, feature, statistic = column.split("/")
        values = [stats.get(feature, {}).get(statistic) for stats in episodes]
        plain = [value if value is None or isinstance(value, list) else [value] for value in values]
        kind = pa.int64() if statistic == "count" else pa.float64()
        for _ in range(depth):
            kind = pa.list_(kind)
        columns[column] = pa.chunked_array([pa.array(plain, kind)])
    return columns


class StatsPool:
    """Pools the statistics of a dataset from those of its episodes, block by block."""

    def __init__(self) -> None:
        self._pooled: Stats = {}
        self._incomplete: set[str] = set()
        self._num_blocks = 0

    def add(self, columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> None:
        """Add the ``stats/`` columns of some episodes."""
        features: dict[str, dict[str, Any]] = {}
        for column, values in columns.items():
            if column.startswith("stats/"):
                # In this format, a feature's name has no slash.
                _, feature, name = column.split("/", 2)
                features.setdefault(feature, {})[name] = values
        if self._num_blocks:
            self._incomplete |= self._pooled.keys() ^ features.keys()
        self._num_blocks += 1
        for feature, found in features.items():
            if not {*MOMENTS, "count"} <= found.keys() or any(values.null_count for values in found.values()):
                self._incomplete.add(feature)
        whole = {feature: found for feature, found in features.items() if feature not in self._incomplete}
        self._pooled = pool_stats([self._pooled, {feature: _pool_block(found) for feature, found in whole.items()}])

    def result(self) -> dict[str, dict[str, Any]]:
        """Return the pooled statistics of every feature that all episodes have, as plain lists."""
        return {
            feature: {name: value.tolist() for name, value in found.items()}
            | {"count": found["count"].astype(np.int64).tolist()}
            for feature, found in self._pooled.items()
            if feature not in self._incomplete
        }


def _pool_block(columns: Mapping[str, pa.ChunkedArray]) -> dict[str, NDArray[np.float64]]:
    """Return what `pool_stats` gives for the episodes of a block, in a sixth of its time."""
    stacked = {name: np.asarray(values.to_pylist(), dtype=np.float64) for name, values in columns.items()}
    count = stacked.pop("count").reshape(-1)
    weight = (count / count.sum()).reshape(-1, *[1] * (stacked["mean"].ndim - 1))
    means, spread = stacked.pop("mean"), stacked.pop("std") ** 2
    mean = (means * weight).sum(axis=0)
    std = np.sqrt(((spread + (means - mean) ** 2) * weight).sum(axis=0))
    extremes = {name: value.min(axis=0) if is_low(name) else value.max(axis=0) for name, value in stacked.items()}
    return {**extremes, "mean": mean, "std": std, "count": count.sum(keepdims=True)}
