"""Reading one metadata file: JSON, JSON lines or parquet, with errors that name the file."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from raypipe.errors import DatasetError, DownloadError, RaypipeError, as_damage
from raypipe.format.parquet import BoundedParquet
from raypipe.storage import REFUSED, Storage, is_transient
from raypipe.text import MOST_COUNT, MOST_JSON_BYTES, MOST_TEXT_BYTES, parse_json, read_lines

_MOST_CELLS = 1 << 25
"""Lines times fields of JSON lines: a million episodes with 30 fields. A cell takes memory even if its line lacks the
field."""

CORRECT_INFO = "Correct meta/info.json, or fetch it again."
"""The end of a message about a value of ``info.json``."""


def check_not_refused(storage: Storage, names: Sequence[str]) -> None:
    """Raise if a web server refuses one of these files, none of which could be read: the file may exist."""
    refused = [name for name in names if storage.is_refused(name)]
    if refused:
        raise DownloadError(
            f"{' and '.join(refused)} of {storage.uri!r} {'are' if len(refused) > 1 else 'is'} answered with status "
            f"{REFUSED}: refused, or lacking where nobody may list. Check your permissions; fetch the file if the "
            f"server lacks it."
        )


@contextmanager
def parsing(storage: Storage, name: str, kind: str = "") -> Iterator[None]:
    """Turn any error that the file's content causes in the body into a `DatasetError` that names the file.

    Args:
        kind: what the file should hold, such as ``JSON``.
    """

    def describe(error: Exception) -> RaypipeError:
        return _damaged(storage, name, f"{f'not {kind}: ' if kind else 'unreadable: '}{error}")

    with as_damage(describe):
        yield


def read_json(storage: Storage, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name`."""
    return storage.read_again(name, lambda: _parse_json(storage, name))


def _parse_json(storage: Storage, name: str) -> dict[str, Any]:
    content = _read_whole(storage, name, MOST_JSON_BYTES)
    with parsing(storage, name, f"JSON ({len(content)} bytes)"):
        value = parse_json(content)
    if not isinstance(value, dict):
        raise _damaged(storage, name, f"a JSON {type(value).__name__}, expected an object")
    return value


def read_json_lines(storage: Storage, name: str, columns: Sequence[str] = ()) -> pa.Table:
    """Return `columns` of a file of JSON lines, which must all exist; without `columns`, all fields."""
    return storage.read_again(name, lambda: _read_lines(storage, name, columns))


def _read_lines(storage: Storage, name: str, columns: Sequence[str]) -> pa.Table:
    content = _read_whole(storage, name, MOST_TEXT_BYTES)
    with parsing(storage, name, f"JSON lines ({len(content)} bytes)"):
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
        with _reading(storage, name, "unreadable"):
            return parquet.read(columns=wanted, use_threads=False)


def open_parquet(storage: Storage, name: str) -> BoundedParquet:
    """Open the parquet file `name`; reads only its footer."""
    return storage.read_again(name, lambda: _open_parquet(storage, name))


def _open_parquet(storage: Storage, name: str) -> BoundedParquet:
    with _reading(storage, name, "no readable parquet footer"):
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
def _reading(storage: Storage, name: str, what: str) -> Iterator[None]:
    """Name the file in errors of the body: as damaged, or as unreadable on this machine if the system failed."""
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
