"""What the source's ``meta/`` says of each episode besides its place: statistics, and columns of other writers.

Reads a block of episodes at a time: with statistics, an episode takes about 13 kB.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe.errors import DatasetError, as_damage
from raypipe.format import (
    FOLDER,
    JSON_LINES,
    PER_EPISODE,
    DatasetMeta,
    list_tables,
    open_parquet,
    read_json_lines,
    read_parquet,
)
from raypipe.reshard.stats import stats_arrays, stats_kind
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


class SourceEpisodes(Protocol):
    """The columns of the source's episodes that the copy takes over."""

    @property
    def described(self) -> frozenset[str]:
        """The features with statistics by episode."""
        ...

    def block(self, rows: NDArray[np.int64]) -> dict[str, pa.ChunkedArray]:
        """Return the columns of these rows of the episode table, in order."""
        ...


def open_source_episodes(meta: DatasetMeta, dropped: Sequence[str]) -> SourceEpisodes:
    """Return a reader of the columns to take over, without the statistics of the features in `dropped`."""
    if meta.is_packed:
        return _Packed(meta, dropped)
    return _PerEpisode(meta, dropped)


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
        means = [name for name in self._types if name.startswith("stats/") and name.endswith("/mean")]
        return frozenset(name.split("/")[1] for name in means)

    def block(self, rows: NDArray[np.int64]) -> dict[str, pa.ChunkedArray]:
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


def _typed(table: pa.Table, name: str, kind: pa.DataType) -> pa.Array:
    if name not in table.column_names:
        return pa.nulls(len(table), kind)
    return table.column(name).combine_chunks().cast(kind)


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
                    column, depth = stats_kind(feature, statistic, value)
                    self._kinds.setdefault(column, depth)
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
