"""The rows of the copy, one data file at a time, and what is told of each episode besides its place.

The copy keeps all columns of the source's rows. If the source's ``info.json`` and its rows disagree, the rows win:
LeRobot reads rows by the declarations. Values keep their types and their nulls; only ``episode_index``, ``index`` and
``task_index`` get new numbers.

Statistics by episode are taken over where the source's ``meta/`` has them, else computed with the rows. Each is a
column ``stats/<feature>/<statistic>`` of ``meta/episodes``, with a list per episode. Those of the whole dataset are
pooled from them. With statistics an episode takes about 13 kB, so only a block of episodes is in memory.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raypipe.errors import DatasetError, as_damage
from raypipe.format import (
    FOLDER,
    INDEX_COLUMNS,
    INDEX_FEATURES,
    JSON_LINES,
    MOMENTS,
    PER_EPISODE,
    QUANTILES,
    DatasetMeta,
    Feature,
    RowReader,
    Stats,
    column_values,
    describe_values,
    is_low,
    list_tables,
    one_line,
    open_parquet,
    pool_stats,
    read_json_lines,
    read_parquet,
    why_unfit_name,
)
from raypipe.reshard.plan import Columns, CopyJob, DataCopy, Numbering
from raypipe.text import counted, parse_json, read_lines


def read_columns(meta: DatasetMeta, numbering: Numbering, drop_cameras: Sequence[str]) -> Columns:
    """Return the columns of the copy, from the file of its first episode."""
    with open_parquet(meta.storage, meta.data_file(int(numbering.rows[0]))) as parquet:
        present = [name for name in parquet.schema_arrow.names if name not in drop_cameras]
        undeclared = tuple(name for name in present if name not in meta.features and name not in INDEX_FEATURES)
        kinds = {name: _with_length(parquet, name) for name in undeclared}
    derived = tuple(name for name in INDEX_FEATURES if name not in present)
    rows = [name for name, feature in meta.features.items() if feature.kind != "video" and name not in drop_cameras]
    absent = tuple(name for name in rows if name not in present and name not in INDEX_FEATURES)
    declared = {name: _declare(kind) for name, kind in kinds.items()}
    declared |= {
        name: {"dtype": dtype, "shape": [1], "names": None}
        for name, dtype in INDEX_FEATURES.items()
        if name not in meta.features
    }
    return Columns(
        names=(*present, *derived),
        derived=derived,
        absent=absent,
        undeclared=undeclared,
        added={name: feature for name, feature in declared.items() if feature and not why_unfit_name(name)},
    )


def _with_length(parquet: pq.ParquetFile, name: str) -> pa.DataType:
    """Return the type of a column; for lists that all have the same length above 1, with that length."""
    kind = parquet.schema_arrow.field(name).type
    if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
        return kind
    column = parquet.read(columns=[name]).column(0)
    lengths = pc.min_max(pc.list_value_length(column)).as_py()
    is_even = not column.null_count and lengths["min"] == lengths["max"] and (lengths["min"] or 0) > 1
    return pa.list_(kind.value_type, lengths["min"]) if is_even else kind


def _declare(kind: pa.DataType) -> dict[str, Any]:
    """Return the declaration of a column by its type; empty if the format has none."""
    shape = [1]
    if pa.types.is_fixed_size_list(kind):
        shape, kind = [kind.list_size], kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return {"dtype": "string", "shape": shape, "names": None} if shape == [1] else {}
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return {"dtype": str(kind.to_pandas_dtype()().dtype), "shape": shape, "names": None}
    return {}


def write_data_file(job: CopyJob, unit: DataCopy) -> None:
    """Write one data file and its record: its rows, and the statistics computed from them."""
    stats: list[dict[str, Any]] = []
    workspace = job.workspace
    size_bytes = workspace.write_file(workspace.dataset / unit.path, lambda stream: _write(stream, job, unit, stats))
    footer = pq.read_metadata(workspace.dataset / unit.path)
    lengths = job.lengths[unit.start : unit.stop]
    expected = int(lengths.sum())
    if (footer.num_rows, footer.num_row_groups) != (expected, len(lengths)):
        raise DatasetError(
            f"{unit.path!r} was written with {counted(footer.num_rows, 'row')} in "
            f"{counted(footer.num_row_groups, 'row group')}, expected {counted(expected, 'row')} in {len(lengths)}. "
            f"Run the same command again."
        )
    if job.described:
        workspace.write_stats(unit.path, stats)
    workspace.write_record(unit.path, {"size_bytes": size_bytes, "num_rows": footer.num_rows})


def _write(stream: IO[bytes], job: CopyJob, unit: DataCopy, stats: list[dict[str, Any]]) -> None:
    reader = RowReader(job.meta, job.columns.names)
    writer: pq.ParquetWriter | None = None
    checked = ""
    try:
        for number in range(unit.start, unit.stop):
            row = int(job.numbering.rows[number])
            if job.meta.data_file(row) != checked:
                checked = job.meta.data_file(row)
                _check_columns(job, reader, row)
            with as_damage(partial(_cannot_copy, job.place(number))):
                table = _renumbered(job, reader.read_episode(row), number).select(list(job.columns.names))
                if writer is None:
                    schema = table.schema.with_metadata(_metadata(table.schema))
                    writer = pq.ParquetWriter(stream, schema, compression="snappy")
                table = _as_schema(table, writer.schema, job.place(number))
                # Set the size of the whole episode: by default pyarrow cuts at 1,048,576 rows.
                writer.write_table(table, row_group_size=len(table))
                if job.described:
                    stats.append(describe_rows(table, job.meta.features, job.described, job.place(number)))
    finally:
        if writer is not None:
            writer.close()


def _cannot_copy(place: str, error: Exception) -> DatasetError:
    return DatasetError(
        f"the rows of {place} cannot be copied: {one_line(error)}. Rewrite its file, or leave the episode out with "
        f"--exclude."
    )


def _check_columns(job: CopyJob, reader: RowReader, row: int) -> None:
    """Raise if a file has a column that the first file of the dataset lacks: the copy would lose it."""
    name = job.meta.data_file(row)
    lost = [column for column in reader.undeclared_columns(row) if column not in job.columns.names]
    if job.columns.absent:
        with open_parquet(job.meta.storage, name) as parquet:
            lost += [column for column in job.columns.absent if column in parquet.schema_arrow.names]
    if lost:
        raise DatasetError(
            f"{job.meta.storage.locate(name)!r} has the columns {lost}, which other files of the dataset lack. Rewrite "
            f"the file, or leave its episodes out with --exclude."
        )


def _renumbered(job: CopyJob, table: pa.Table, number: int) -> pa.Table:
    frames = np.arange(len(table), dtype=np.int64)
    task_index = table.column("task_index").to_numpy().astype(np.int64)
    numbers = {
        "frame_index": frames,
        "episode_index": np.full(len(table), number, dtype=np.int64),
        "index": job.numbering.from_index[number] + frames,
        "task_index": job.tasks.renumber(task_index, job.place(number)),
    }
    for name in _annotations(job, table):
        if not pa.types.is_integer(table.schema.field(name).type):
            raise DatasetError(
                f"{job.place(number)}: {name!r} holds numbers of tasks as {table.schema.field(name).type}, and the "
                f"tasks are numbered anew. Store it as int64, or take the column out of modality.json."
            )
        values = table.column(name).to_numpy().astype(np.int64)
        numbers[name] = job.tasks.renumber(values, job.place(number))
    for name, values in numbers.items():
        table = table.set_column(table.column_names.index(name), pa.field(name, pa.int64()), pa.array(values))
    return table


def _annotations(job: CopyJob, table: pa.Table) -> list[str]:
    """Return the columns besides ``task_index`` that hold task numbers, if those numbers change."""
    if job.tasks.is_same:
        return []
    sources = {text.source for text in job.meta.texts.values() if text.texts is job.meta.tasks}
    return [name for name in table.column_names if name in sources]


def _metadata(schema: pa.Schema) -> dict[bytes, bytes] | None:
    """Return the note of Hugging Face's datasets in a schema, if it describes exactly these columns."""
    note = (schema.metadata or {}).get(b"huggingface", b"")
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        if set(json.loads(note)["info"]["features"]) == set(schema.names):
            return {b"huggingface": note}
    return None


def _as_schema(table: pa.Table, schema: pa.Schema, place: str) -> pa.Table:
    """Return the table with the column types of its new file; the source's files may differ in types."""
    if table.schema.equals(schema):
        return table.replace_schema_metadata(schema.metadata)
    try:
        cast = table.cast(schema)
        is_same = cast.cast(table.schema).equals(table)
    except (pa.ArrowException, ValueError) as error:
        raise DatasetError(f"the rows of {place} cannot be joined to those before: {one_line(error)}") from error
    if not is_same:
        differing = [name for name in table.column_names if table.schema.field(name).type != schema.field(name).type]
        raise DatasetError(
            f"the columns {differing} of {place} have values that the types of the episodes before cannot hold. "
            f"Rewrite the file, or leave the episode out with --exclude."
        )
    return cast


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


def describe_rows(
    table: pa.Table, features: Mapping[str, Feature], names: Iterable[str], place: str
) -> dict[str, dict[str, Any]]:
    """Return the statistics of vector columns of one episode, as plain lists.

    A column with nulls, or with another shape than declared, gets none: validate judges whether that is right.
    """
    described = {}
    for name in names:
        feature = features.get(name) or INDEX_COLUMNS.get(name)
        if feature is None or feature.kind != "vector" or name not in table.column_names:
            continue
        try:
            values = column_values(table, feature, place)
        except DatasetError:
            continue
        found = describe_values(np.asarray(values, dtype=np.float64))
        described[name] = {statistic: value.tolist() for statistic, value in found.items()}
    return described


def computed_kinds(features: Mapping[str, Feature], names: Iterable[str]) -> dict[str, int]:
    """Return the columns that `describe_rows` may fill, with the depth of their lists."""
    kinds = {}
    for name in names:
        depth = max(1, len((features.get(name) or INDEX_COLUMNS[name]).shape))
        for statistic in (*MOMENTS, "count", *QUANTILES):
            kinds[f"stats/{name}/{statistic}"] = 1 if statistic == "count" else depth
    return kinds


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
