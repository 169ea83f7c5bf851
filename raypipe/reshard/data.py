"""The rows of the copy, one data file at a time, and the statistics of their values.

The copy keeps all columns of the source's rows. If the source's ``info.json`` and its rows disagree, the rows win:
LeRobot reads rows by the declarations. Values keep their types and their nulls; only ``episode_index``, ``index`` and
``task_index`` get new numbers.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raypipe.errors import DatasetError, as_damage
from raypipe.format import (
    INDEX_COLUMNS,
    INDEX_FEATURES,
    MOMENTS,
    QUANTILES,
    DatasetMeta,
    Feature,
    RowReader,
    column_values,
    describe_values,
    one_line,
    open_parquet,
    why_unfit_name,
)
from raypipe.reshard.plan import Columns, CopyJob, DataCopy, Numbering
from raypipe.text import counted


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
    frames, place = np.arange(len(table), dtype=np.int64), job.place(number)
    numbers = {
        "frame_index": frames,
        "episode_index": np.full(len(table), number, dtype=np.int64),
        "index": job.numbering.from_index[number] + frames,
        "task_index": _task_numbers(job, table, INDEX_COLUMNS["task_index"], place),
    }
    for name in _annotations(job, table):
        if not pa.types.is_integer(table.schema.field(name).type):
            raise DatasetError(
                f"{place}: {name!r} holds numbers of tasks as {table.schema.field(name).type}, and the "
                f"tasks are numbered anew. Store it as int64, or take the column out of modality.json."
            )
        numbers[name] = _task_numbers(job, table, job.meta.features[name], place)
    for name, values in numbers.items():
        table = table.set_column(table.column_names.index(name), pa.field(name, pa.int64()), pa.array(values))
    return table


def _task_numbers(job: CopyJob, table: pa.Table, feature: Feature, place: str) -> NDArray[np.int64]:
    """Return a column of numbers of tasks in the copy's numbers; raise if it has empty values."""
    return job.tasks.renumber(np.asarray(column_values(table, feature, place)), place)


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
        back = cast.cast(table.schema)
    except (pa.ArrowException, ValueError) as error:
        raise DatasetError(f"the rows of {place} cannot be joined to those before: {one_line(error)}") from error
    differing = [name for name in table.column_names if not _is_equal(back.column(name), table.column(name))]
    if differing:
        raise DatasetError(
            f"the columns {differing} of {place} have values that the types of the episodes before cannot hold. "
            f"Rewrite the file, or leave the episode out with --exclude."
        )
    return cast


def _is_equal(one: pa.ChunkedArray, other: pa.ChunkedArray) -> bool:
    # To Arrow, a value that is not a number differs from itself.
    return bool(one.equals(other)) or repr(one.to_pylist()) == repr(other.to_pylist())


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
