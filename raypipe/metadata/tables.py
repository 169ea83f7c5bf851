"""Reading one metadata file: JSON, JSON lines or parquet, with errors that name the file."""

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.json

from raypipe.errors import DatasetError, DownloadError
from raypipe.limits import MOST_COUNT, MOST_JSON_BYTES, MOST_TEXT_BYTES, parse_json, read_lines
from raypipe.metadata.parquet import BoundedParquet
from raypipe.storage import REFUSED, Storage, is_transient

_JSON_BLOCK_BYTES = 1 << 26
"""pyarrow refuses a line longer than its block; an episode with thousands of tasks makes long lines."""

_MOST_CELLS = 1 << 25
"""Lines times fields of JSON lines, each of which takes memory also where a line lacks the field: a million episodes
with 30."""

CORRECT_INFO = "Correct meta/info.json, or fetch it again."
"""The end of a message on a value of ``info.json``."""

_TEXTS = {"task": pa.string(), "tasks": pa.list_(pa.string())}
"""Told to the parser, which else takes a text that looks like a date for one."""

_KNOWN = {**_TEXTS, **dict.fromkeys(("episode_index", "length", "task_index"), pa.int64())}


def check_not_refused(storage: Storage, names: Sequence[str]) -> None:
    """Raise where a web server refuses one of these files, none of which could be read: it may be there."""
    refused = [name for name in names if storage.is_refused(name)]
    if refused:
        raise DownloadError(
            f"{' and '.join(refused)} of {storage.uri!r} {'are' if len(refused) > 1 else 'is'} answered with status "
            f"{REFUSED}: refused, or lacking where nobody may list. Check your permissions; fetch the file if the "
            f"server lacks it."
        )


def read_json(storage: Storage, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name`."""
    return storage.read_again(name, lambda: _parse_json(storage, name))


def _parse_json(storage: Storage, name: str) -> dict[str, Any]:
    content = _read_whole(storage, name, MOST_JSON_BYTES)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise _damaged(storage, name, f"not JSON ({len(content)} bytes): {error}") from error
    if not isinstance(value, dict):
        raise _damaged(storage, name, f"a JSON {type(value).__name__}, expected an object")
    return value


def read_json_lines(storage: Storage, name: str, columns: Sequence[str] = ()) -> pa.Table:
    """Return `columns` of a file of JSON lines, all of which must be there; without any, all fields."""
    return storage.read_again(name, lambda: _read_lines(storage, name, columns))


def _read_lines(storage: Storage, name: str, columns: Sequence[str]) -> pa.Table:
    content = _read_whole(storage, name, MOST_TEXT_BYTES)
    try:
        table = _parse_json_lines(content, columns)
    except (pa.ArrowInvalid, ValueError) as error:
        raise _damaged(storage, name, f"not JSON lines ({len(content)} bytes): {error}") from error
    missing = [column for column in columns if column not in table.column_names]
    if missing:
        raise _damaged(storage, name, f"without the fields {missing}; it has {table.column_names}")
    return table.select(list(columns)) if columns else table


def read_count(info: Mapping[str, Any], key: str, place: str, *, default: int) -> int:
    """Return a whole number of ``info.json``; `default` where it is missing or null."""
    value = info.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_COUNT:
        raise DatasetError(
            f"{key} is {value!r} in {place!r}; expected a whole number of at most {MOST_COUNT}. {CORRECT_INFO}"
        )
    return value


def _read_whole(storage: Storage, name: str, most: int) -> bytes:
    size_bytes = storage.size_bytes(name)
    if size_bytes > most:
        raise _damaged(storage, name, f"{size_bytes:,} bytes, and such a file may have {most:,}")
    return storage.read_bytes(name)


def _parse_json_lines(content: bytes, columns: Sequence[str]) -> pa.Table:
    if columns:
        with suppress(pa.ArrowInvalid):
            table = _parse_fields(content, {name: _KNOWN[name] for name in columns}, "ignore")
            if not any(column.null_count == len(table) for column in table.columns):
                return table
    _check_cells(content)
    try:
        return _parse_fields(content, _TEXTS, "infer")
    except pa.ArrowInvalid:
        # Tasks may be numbers.
        return _parse_fields(content, {}, "infer")


def _parse_fields(content: bytes, types: Mapping[str, pa.DataType], others: str) -> pa.Table:
    read = pyarrow.json.ReadOptions(block_size=max(_JSON_BLOCK_BYTES, len(content) // 8))
    schema = pa.schema(list(types.items()))
    parse = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others)
    return pyarrow.json.read_json(io.BytesIO(content), read_options=read, parse_options=parse)


def _check_cells(content: bytes) -> None:
    """Raise where JSON lines are no table: where each has fields of its own, or lists too deep for the parser."""
    fields: set[str] = set()
    for number, line in enumerate(read_lines(io.BytesIO(content)), start=1):
        fields.update(parse_json(line) if line.strip() else ())
        if number * len(fields) > _MOST_CELLS:
            raise ValueError(f"its first {number:,} lines have {len(fields):,} fields together")


def read_parquet(storage: Storage, name: str, columns: Sequence[str] = (), optional: Sequence[str] = ()) -> pa.Table:
    """Return `columns` of the file `name`, all of which must be there, and those of `optional` that are.

    Without either, all columns.
    """
    return storage.read_again(name, lambda: _read_columns(storage, name, columns, optional))


def _read_columns(storage: Storage, name: str, columns: Sequence[str], optional: Sequence[str]) -> pa.Table:
    with open_parquet(storage, name) as parquet:
        present = set(parquet.schema_arrow.names)
        missing = [column for column in columns if column not in present]
        if missing:
            raise _damaged(storage, name, f"without the columns {missing}; it has {parquet.schema_arrow.names}")
        wanted = [*columns, *(column for column in optional if column in present)] or list(present)
        try:
            return parquet.read(columns=wanted, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise _bad_file(storage, name, f"unreadable: {error}", error) from error


def open_parquet(storage: Storage, name: str) -> BoundedParquet:
    """Open the parquet file `name`; only its footer is read."""
    return storage.read_again(name, lambda: _open_parquet(storage, name))


def _open_parquet(storage: Storage, name: str) -> BoundedParquet:
    try:
        size_bytes = storage.size_bytes(name)
        if storage.is_local:
            # Never mapped into memory: a file cut under its reader, or a disk that fails, would end the process.
            return BoundedParquet(storage.locate(name), size_bytes)
        return BoundedParquet(storage.open_file(name), size_bytes, pre_buffer=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise _bad_file(storage, name, f"no readable parquet footer: {error}", error) from error


def _bad_file(storage: Storage, name: str, what: str, error: Exception) -> DatasetError | DownloadError:
    """Return the error for a file that could not be read: of the machine, where it has a number of the system."""
    if isinstance(error, OSError) and is_transient(error):
        return storage.unreadable(name, error)
    return _damaged(storage, name, what)


def _damaged(storage: Storage, name: str, what: str) -> DatasetError:
    storage.check_no_pointer(name)
    return DatasetError(
        f"damaged file {storage.locate(name)!r}: {' '.join(what.split())}. Fetch the file again, or restore it "
        f"from a backup."
    )
