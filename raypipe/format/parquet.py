"""Parquet files, read with a bound on memory that depends on the size of the file.

A page may say "the same value, a billion times" and refer to a text that is stored once. So the reader first takes the
number of values from the footer. Texts that may repeat are read in pieces, or by reference, and measured before they
are expanded.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypipe.text import FREE_BYTES, MOST_RATIO

_WIDTHS: Final = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12, "BYTE_ARRAY": 8}
_SHORT_RATIO: Final = {"UNCOMPRESSED": 1, "SNAPPY": 22}
"""The most bytes that one byte may expand to, for codecs with such a bound."""

_DICTIONARIES: Final = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_PLAIN_ROWS: Final = 1024
"""Rows to read at once if their texts in lists cannot be read by reference."""

_SHARED: Final = "DELTA_BYTE_ARRAY"
"""An encoding that stores a text without the beginning that it shares with the text before it."""


class BoundedParquet(pq.ParquetFile):  # type: ignore[misc]
    """A parquet file that raises `ArrowInvalid` if its values would take too much memory."""

    def __init__(self, source: Any, stored_bytes: int, **options: Any) -> None:
        super().__init__(source, **options)
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
        claims, numbers_bytes = [], 0
        for number, leaf in self._leaves(names):
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
    def _all_leaves(self) -> list[tuple[set[str], int, pq.ColumnSchema]]:
        """The columns that hold values, with the names that select each: ``a.b`` selects ``a.b.list.c``."""
        leaves = [(number, self.schema.column(number)) for number in range(self.metadata.num_columns)]
        parts = [leaf.path.split(".") for _, leaf in leaves]
        names = [{".".join(one[:end]) for end in range(1, len(one) + 1)} for one in parts]
        return [(known, number, leaf) for known, (number, leaf) in zip(names, leaves, strict=True)]

    def _leaves(self, names: Sequence[str]) -> list[tuple[int, pq.ColumnSchema]]:
        wanted = set(names)
        return [(number, leaf) for known, number, leaf in self._all_leaves if not known.isdisjoint(wanted)]

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self.most_bytes:
            raise pa.ArrowInvalid(
                f"its values take {num_bytes:,} bytes or more, and those of a file of its size may take "
                f"{self.most_bytes:,}: write it again with values of its own, in smaller row groups or several files"
            )


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
