"""What is told of each episode besides its place: statistics, and columns of other writers.

Statistics by episode are taken over where the source's ``meta/`` has them, else the tasks of the data files compute
them. Each is a column ``stats/<feature>/<statistic>`` of ``meta/episodes``, with a list per episode. Those of the whole
dataset are pooled from them. With statistics an episode takes about 13 kB, so only a block of episodes is in memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe.errors import DatasetError, as_damage
from raypipe.format import (
    FOLDER,
    INDEX_FEATURES,
    JSON_LINES,
    MOMENTS,
    PER_EPISODE,
    QUANTILES,
    DatasetMeta,
    Feature,
    Stats,
    column_values,
    describe_values,
    list_tables,
    open_parquet,
    pool_stats,
    read_json_lines,
    read_parquet,
)
from raypipe.text import parse_json, read_lines

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
        self._open: tuple[int, pa.Table] = (-1, pa.table({}))

    @property
    def described(self) -> frozenset[str]:
        """The features with statistics by episode."""
        means = [name for name in self._types if name.startswith("stats/") and name.endswith("/mean")]
        return frozenset(name.split("/")[1] for name in means)

    def block(self, rows: NDArray[np.int64]) -> dict[str, pa.ChunkedArray]:
        """Return the columns of these rows of the episode table, in order."""
        positions = self._order[rows]
        files = np.searchsorted(self._first, positions, side="right") - 1
        cuts = np.flatnonzero(np.diff(files)) + 1
        parts = []
        for part in np.split(np.arange(len(rows)), cuts):
            if len(part):
                file = int(files[part[0]])
                parts.append(self._table(file).take(positions[part] - self._first[file]))
        return {name: self._joined(name, parts) for name in self._types} if parts else {}

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
            if name not in _PLACES and not name.startswith("videos/") and not (lost and name.startswith(lost))
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
        self._extra = self._read_extra()
        self._kinds: dict[str, int] = {}
        self._offsets = self._index_stats() if meta.storage.offers(PER_EPISODE) else {}

    @property
    def described(self) -> frozenset[str]:
        return frozenset(name.split("/")[1] for name in self._kinds if name.endswith("/mean"))

    def block(self, rows: NDArray[np.int64]) -> dict[str, pa.ChunkedArray]:
        columns = {name: self._extra.column(name).take(rows) for name in self._extra.column_names}
        if not self._kinds:
            return columns
        return columns | stats_arrays(self._read_stats(self._meta.episodes.episode_index[rows]), self._kinds)

    def _read_extra(self) -> pa.Table:
        if not self._meta.storage.exists(JSON_LINES):
            return pa.table({})
        table = read_json_lines(self._meta.storage, JSON_LINES)
        extra = [name for name in table.column_names if name not in _PLACES]
        order = np.argsort(table.column("episode_index").to_numpy(), kind="stable")
        return table.select(extra).take(order)

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
                if episode not in self._offsets:
                    found.append({})
                    continue
                stream.seek(self._offsets[episode])
                stats = parse_json(stream.readline()).get("stats") or {}
                found.append(stats)
        return found


SourceEpisodes = _Packed | _PerEpisode


_NUMBER: Final = {
    name: Feature(name=name, kind="vector", dtype=kind, shape=(1,)) for name, kind in INDEX_FEATURES.items()
}
"""Index columns that the source may not declare."""


def describe_rows(
    table: pa.Table, features: Mapping[str, Feature], names: Iterable[str], place: str
) -> dict[str, dict[str, Any]]:
    """Return the statistics of vector columns of one episode, as plain lists.

    A column with nulls, or with another shape than declared, gets none: validate judges whether that is right.
    """
    described = {}
    for name in names:
        feature = features.get(name) or _NUMBER.get(name)
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
        depth = max(1, len((features.get(name) or _NUMBER[name]).shape))
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
        whole = [feature for feature in features if feature not in self._incomplete]
        rows = [{name: values.to_pylist() for name, values in features[feature].items()} for feature in whole]
        episodes = [
            {
                feature: {name: np.asarray(values[number], dtype=np.float64) for name, values in found.items()}
                for feature, found in zip(whole, rows, strict=True)
            }
            for number in range(len(rows[0]["count"]) if rows else 0)
        ]
        self._pooled = pool_stats([self._pooled, *episodes])

    def result(self) -> dict[str, dict[str, Any]]:
        """Return the pooled statistics of every feature that all episodes have, as plain lists."""
        return {
            feature: {name: value.tolist() for name, value in found.items()}
            | {"count": found["count"].astype(np.int64).tolist()}
            for feature, found in self._pooled.items()
            if feature not in self._incomplete
        }
