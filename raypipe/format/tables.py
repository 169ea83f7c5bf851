"""One file of a dataset: JSON, JSON lines or parquet, read within limits, with errors that name the file.

A page of parquet may say "the same value, a billion times" and refer to a text that is stored once. So
`BoundedParquet` first takes the number of values from the footer. Texts that may repeat are read in pieces, or by
reference, and measured before they are expanded.
"""

import functools
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raypipe.errors import DatasetError, DownloadError, as_damage
from raypipe.storage import REFUSED, Storage, is_transient
from raypipe.text import (
    FREE_BYTES,
    MOST_COUNT,
    MOST_JSON_BYTES,
    MOST_RATIO,
    MOST_TEXT_BYTES,
    either,
    parse_json,
    read_lines,
)

_MOST_CELLS = 1 << 25
"""Lines times fields of JSON lines: a million episodes with 30 fields. A cell takes memory even if its line lacks the
field."""

CORRECT_INFO = "Correct meta/info.json, or fetch it again."
"""The end of a message about a value of ``info.json``."""

_WIDTHS: Final = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12, "BYTE_ARRAY": 8}
_SHORT_RATIO: Final = {"UNCOMPRESSED": 1, "SNAPPY": 22}
"""The most bytes that one byte may expand to, for codecs with such a bound."""

_DICTIONARIES: Final = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_PLAIN_ROWS: Final = 1024
"""Rows to read at once if their texts in lists cannot be read by reference."""

_SHARED: Final = "DELTA_BYTE_ARRAY"
"""An encoding that stores a text without the beginning that it shares with the text before it."""


def check_not_refused(storage: Storage, names: Sequence[str]) -> None:
    """Raise if a web server refuses one of these files, none of which could be read: the file may exist."""
    refused = [name for name in names if storage.is_refused(name)]
    if refused:
        raise DownloadError(
            f"{' and '.join(refused)} of {storage.uri!r} {either(len(refused), 'is', 'are')} answered with status "
            f"{REFUSED}: refused, or lacking where nobody may list. Check your permissions; fetch the file if the "
            f"server lacks it."
        )


def read_json(storage: Storage, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name`."""
    return storage.read_again(name, lambda: _parse_json(storage, name))


def _parse_json(storage: Storage, name: str) -> dict[str, Any]:
    content = _read_whole(storage, name, MOST_JSON_BYTES)
    with reading(storage, name, f"not JSON ({len(content)} bytes)"):
        value = parse_json(content)
    if not isinstance(value, dict):
        raise _damaged(storage, name, f"a JSON {type(value).__name__}, expected an object")
    return value


def read_json_lines(storage: Storage, name: str, columns: Sequence[str] = ()) -> pa.Table:
    """Return `columns` of a file of JSON lines, which must all exist; without `columns`, all fields."""
    return storage.read_again(name, lambda: _read_lines(storage, name, columns))


def _read_lines(storage: Storage, name: str, columns: Sequence[str]) -> pa.Table:
    content = _read_whole(storage, name, MOST_TEXT_BYTES)
    with reading(storage, name, f"not JSON lines ({len(content)} bytes)"):
        # Not pyarrow's parser: in pyarrow 25 it ends the process if the first line is `null`.
        table = _as_columns(content, columns)
    missing = [column for column in columns if column not in table.column_names]
    if missing:
        raise _damaged(storage, name, f"without the fields {missing}; it has {table.column_names}")
    return table.select(list(columns)) if columns else table


def _as_columns(content: bytes, columns: Sequence[str]) -> pa.Table:
    found: dict[str, list[Any]] = {}
    num_lines = 0
    for number, text in enumerate(read_lines(io.BytesIO(content)), start=1):
        if not text.strip():
            continue
        try:
            line = parse_json(text)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(line, dict):
            raise ValueError(f"line {number} is no object")
        for name in columns or line:
            if name in line:
                values = found.setdefault(name, [])
                values += [None] * (num_lines - len(values))
                values.append(line[name])
        num_lines += 1
        if num_lines * max(1, len(found)) > _MOST_CELLS:
            raise ValueError(f"its first {number:,} lines have {len(found):,} fields together")
    if not num_lines:
        raise ValueError("it has no line")
    return pa.table({name: pa.array(values + [None] * (num_lines - len(values))) for name, values in found.items()})


def read_count(info: Mapping[str, Any], key: str, place: str, *, default: int, least: int = 0) -> int:
    """Return a whole number of ``info.json``; `default` if it is missing or null."""
    value = info.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_COUNT:
        raise DatasetError(
            f"{key} is {value!r} in {place!r}; expected a whole number from {least} to {MOST_COUNT}. {CORRECT_INFO}"
        )
    return value


def _read_whole(storage: Storage, name: str, most: int) -> bytes:
    size_bytes = storage.size_bytes(name)
    if size_bytes > most:
        raise _damaged(storage, name, f"{size_bytes:,} bytes, and such a file may have {most:,}")
    return storage.read_bytes(name)


def read_parquet(storage: Storage, name: str, columns: Sequence[str] = (), optional: Sequence[str] = ()) -> pa.Table:
    """Return `columns` of the file `name`, which must all exist, and those of `optional` that do.

    With neither, return all columns.
    """
    return storage.read_again(name, lambda: _read_columns(storage, name, columns, optional))


def _read_columns(storage: Storage, name: str, columns: Sequence[str], optional: Sequence[str]) -> pa.Table:
    with open_parquet(storage, name) as parquet:
        names = parquet.schema_arrow.names
        missing = [column for column in columns if column not in names]
        if missing:
            raise _damaged(storage, name, f"without the columns {missing}; it has {names}")
        wanted = [*columns, *(column for column in optional if column in names)] or names
        doubled = sorted({column for column in wanted if names.count(column) > 1})
        if doubled:
            raise _damaged(storage, name, f"with the columns {doubled} twice")
        with reading(storage, name, "unreadable"):
            return parquet.read(columns=wanted, use_threads=False)


def open_parquet(storage: Storage, name: str) -> "BoundedParquet":
    """Open the parquet file `name`; reads only its footer."""
    return storage.read_again(name, lambda: _open_parquet(storage, name))


def _open_parquet(storage: Storage, name: str) -> "BoundedParquet":
    with reading(storage, name, "no readable parquet footer"):
        size_bytes = storage.size_bytes(name)
        if storage.is_local:
            # Not memory-mapped: a file truncated while it is read, or a failing disk, would kill the process.
            parquet = BoundedParquet(storage.locate(name), size_bytes)
        else:
            parquet = BoundedParquet(storage.open_file(name), size_bytes, pre_buffer=True)
        # pyarrow parses names and types on first use. Do it here, so that an error names this file.
        _ = parquet.schema_arrow.names
        return parquet


@contextmanager
def reading(storage: Storage, name: str, what: str) -> Iterator[None]:
    """Name the file in errors of the body: as damaged, or as unreadable on this machine if the system failed.

    Args:
        what: what is wrong with a damaged file; the error follows.
    """
    try:
        with as_damage(lambda error: _damaged(storage, name, f"{what}: {error}")):
            yield
    except OSError as error:
        if is_transient(error):
            raise storage.unreadable(name, error) from error
        raise _damaged(storage, name, f"{what}: {error}") from error


def _damaged(storage: Storage, name: str, what: str) -> DatasetError:
    storage.check_no_pointer(name)
    return DatasetError(
        f"damaged file {storage.locate(name)!r}: {' '.join(what.split())}. Fetch the file again, or restore it "
        f"from a backup."
    )


class BoundedParquet(pq.ParquetFile):  # type: ignore[misc]
    """A parquet file that raises `ArrowInvalid` if its values would take too much memory."""

    def __init__(self, source: Any, stored_bytes: int, **options: Any) -> None:
        super().__init__(source, **options)
        _check_chunks(self.metadata)
        self._again = (source, options)
        self.most_bytes = max(FREE_BYTES, MOST_RATIO * stored_bytes)
        """Memory that the values of one read may take."""

    def read(self, columns: Sequence[str] | None = None, use_threads: bool = False) -> pa.Table:
        """Return columns of all rows."""
        return self.read_row_groups(range(self.metadata.num_row_groups), columns, use_threads)

    def read_row_group(self, i: int, columns: Sequence[str] | None = None, use_threads: bool = False) -> pa.Table:
        """Return columns of the rows of a row group."""
        return self.read_row_groups([i], columns, use_threads)

    def read_row_groups(
        self, row_groups: Sequence[int], columns: Sequence[str] | None = None, use_threads: bool = False
    ) -> pa.Table:
        """Return columns of the rows of some row groups."""
        groups, names = list(row_groups), list(self.schema_arrow.names if columns is None else columns)
        risky = [leaf for leaf in self._claims(groups, names) if leaf.num_values * leaf.value_bytes > FREE_BYTES]
        if not risky:
            return super().read_row_groups(groups, columns=names, use_threads=use_threads)
        listed = [leaf.path for leaf in risky if leaf.is_listed]
        largest = max([1, *(leaf.value_bytes for leaf in risky if not leaf.is_listed)])
        return self._read_in_pieces(groups, names, listed, max(1, FREE_BYTES // largest))

    def iter_batches(self, batch_size: int = 1024, **options: Any) -> Iterator[pa.RecordBatch]:
        """Yield batches of rows; see `pyarrow.parquet.ParquetFile.iter_batches`."""
        names = options.get("columns") or self.schema_arrow.names
        for group in options.pop("row_groups", None) or range(self.metadata.num_row_groups):
            largest = max([1, *(leaf.value_bytes for leaf in self._claims([group], names))])
            yield from super().iter_batches(min(batch_size, max(1, FREE_BYTES // largest)), [group], **options)

    def _read_in_pieces(self, groups: list[int], names: list[str], listed: list[str], num_rows: int) -> pa.Table:
        """Return rows whose texts may be much larger than the file; raise if they are.

        Args:
            listed: columns of texts in lists. A row may have any number of them, so they are read by reference.
        """
        wanted = pa.schema([self.schema_arrow.field(name) for name in names], self.schema_arrow.metadata)
        parts, taken = [wanted.empty_table()], 0
        for batch in self._pieces(groups, names, listed, num_rows):
            taken += batch.nbytes + sum(map(_text_bytes, batch.columns))
            self._check(taken)
            parts.append(pa.Table.from_batches([batch]).select(names).cast(wanted))
        return pa.concat_tables(parts)

    def _pieces(
        self, groups: list[int], names: list[str], listed: list[str], num_rows: int
    ) -> Iterator[pa.RecordBatch]:
        source, options = self._again
        again = pq.ParquetFile(source, read_dictionary=listed, **options) if listed else None
        for group in groups:
            # One row group at a time: texts in lists cannot refer to several dictionaries.
            asked, done = {"row_groups": [group], "columns": names, "use_threads": False}, 0
            with suppress(pa.ArrowNotImplementedError):
                for batch in again.iter_batches(num_rows, **asked) if again is not None else ():
                    done += len(batch)
                    yield batch
            if done == self.metadata.row_group(group).num_rows:
                continue
            # A group may also have texts outside its dictionary; then measure them some rows at a time.
            for batch in super().iter_batches(min(num_rows, _PLAIN_ROWS), **asked):
                yield batch.slice(done)
                done = max(0, done - len(batch))

    def _claims(self, groups: list[int], names: Sequence[str]) -> list["_Claim"]:
        """Return what the footer claims about columns in some row groups together; raise if that is too much."""
        num_rows = [max(self.metadata.row_group(group).num_rows, 0) for group in groups]
        claims, numbers_bytes, wanted = [], 0, set(names)
        for known, number, leaf in self._leaves:
            if known.isdisjoint(wanted):
                continue
            is_text, is_listed = leaf.physical_type == "BYTE_ARRAY", leaf.max_repetition_level > 0
            # Of short numbers too: parquet has none, and Arrow reads all as 32 bits before it makes them short.
            width = _WIDTHS.get(leaf.physical_type, max(leaf.length, 1))
            if not is_text and not is_listed:
                # Without looking at each row group: a table may have thousands.
                numbers_bytes += sum(num_rows) * width
                continue
            chunks = [self.metadata.row_group(group).column(number) for group in groups]
            values = sum(max(rows, chunk.num_values) for rows, chunk in zip(num_rows, chunks, strict=True))
            # What is stored has these values, or the texts that they name: it is not taken beside them.
            stored = sum(max(chunk.total_uncompressed_size, 0) for chunk in chunks)
            numbers_bytes += max(values * width, stored)
            largest = max(map(_value_bytes, chunks), default=0) if is_text else 0
            claims.append(_Claim(leaf.path, values, largest, is_listed))
        self._check(numbers_bytes)
        return claims

    @functools.cached_property
    def episode_bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bounds of ``episode_index`` in each row group; the whole range of int64 without statistics in the footer."""
        metadata = self.metadata
        names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        bounds = np.full((2, metadata.num_row_groups), np.iinfo(np.int64).max, dtype=np.int64)
        bounds[0] = np.iinfo(np.int64).min
        if "episode_index" in names:
            column = names.index("episode_index")
            for group in range(metadata.num_row_groups):
                statistics = metadata.row_group(group).column(column).statistics
                if statistics is not None and statistics.has_min_max and isinstance(statistics.min, int):
                    bounds[:, group] = statistics.min, statistics.max
        return bounds[0], bounds[1]

    @functools.cached_property
    def _leaves(self) -> list[tuple[set[str], int, pq.ColumnSchema]]:
        """The columns that hold values, with the names that select each: ``a.b`` selects ``a.b.list.c``."""
        leaves = [(number, self.schema.column(number)) for number in range(self.metadata.num_columns)]
        return [(set(accumulate(leaf.path.split("."), "{}.{}".format)), number, leaf) for number, leaf in leaves]

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self.most_bytes:
            raise pa.ArrowInvalid(
                f"its values take {num_bytes:,} bytes or more, and those of a file of its size may take "
                f"{self.most_bytes:,}: write it again with values of its own, in smaller row groups or several files"
            )


def _check_chunks(metadata: pq.FileMetaData) -> None:
    """Raise what Arrow raises over the column chunks that a footer lists.

    To look at a chunk with which Arrow (26.0) finds fault ends the process: nothing catches the exception of C++. A
    read catches it, and one with `pre_buffer` looks at all chunks before it reads the first.
    """
    try:
        pq.ParquetFile(_NoBytes(), metadata=metadata, pre_buffer=True).read(use_threads=False)
    except OSError as error:
        if _NO_BYTES not in str(error):
            raise
        # Arrow keeps the error, and with its traceback the frames that led here, with open files.
        error.__traceback__ = None


class _NoBytes(io.RawIOBase):
    """A large file that gives no bytes."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return offset if whence == io.SEEK_SET else 1 << 50

    def tell(self) -> int:
        return 1 << 50

    def read(self, *_: Any) -> bytes:
        raise OSError(_NO_BYTES)


_NO_BYTES: Final = "no bytes are read here"


@dataclass(frozen=True, slots=True)
class _Claim:
    """What a footer claims about a column of texts or lists."""

    path: str
    num_values: int
    value_bytes: int
    """The largest text that the file may store once and refer to often."""
    is_listed: bool


def _value_bytes(chunk: pq.ColumnChunkMetaData) -> int:
    encodings = set(chunk.encodings)
    if not encodings & {*_DICTIONARIES, _SHARED}:
        return 0
    stored, ratio = int(max(chunk.total_uncompressed_size, 0)), _SHORT_RATIO.get(chunk.compression, 0)
    if _SHARED in encodings or not ratio or not chunk.dictionary_page_offset:
        return stored
    return min(stored, ratio * max(0, int(chunk.data_page_offset - chunk.dictionary_page_offset)))


def _text_bytes(column: pa.Array) -> int:
    """Return the expanded size of the texts that a column has by reference."""
    while isinstance(column, pa.ExtensionArray | pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        column = column.storage if isinstance(column, pa.ExtensionArray) else column.flatten()
    if isinstance(column, pa.StructArray):
        return sum(map(_text_bytes, column.flatten()))
    if not isinstance(column, pa.DictionaryArray):
        return 0
    lengths = pc.binary_length(column.dictionary).cast(pa.int64())
    return int(pc.sum(lengths.take(column.indices)).as_py() or 0)
