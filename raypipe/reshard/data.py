"""Writes one data file of the copy: the rows of its episodes, with new numbers and one row group each.

Values keep their types and their nulls. Only ``episode_index``, ``index`` and ``task_index`` get new numbers.
"""

import json
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raypipe.errors import DatasetError, as_damage
from raypipe.format import DatasetMeta, RowReader, Tasks, one_line, open_parquet
from raypipe.reshard.columns import Columns
from raypipe.reshard.plan import DataCopy, Numbering
from raypipe.reshard.stats import describe_rows
from raypipe.reshard.workspace import Workspace
from raypipe.text import counted


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DataJob:
    """What all data files of a copy have in common."""

    meta: DatasetMeta
    numbering: Numbering
    columns: Columns
    tasks: "TaskNumbers"
    described: tuple[str, ...]
    """Features whose statistics are computed here, since the source's do not exist or no longer apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNumbers:
    """The tasks of the copy: each text once, numbered by position."""

    texts: tuple[str, ...]
    old: tuple[int, ...]
    new: tuple[int, ...]
    """For each of the source's numbers in `old`, which ascend, the number in the copy."""

    @property
    def is_same(self) -> bool:
        """Whether every task keeps its number."""
        return self.old == self.new

    def renumber(self, task_index: NDArray[np.int64], place: str) -> NDArray[np.int64]:
        """Return the new numbers; unchanged if the dataset has no tasks."""
        if not self.old:
            return task_index
        old = np.array(self.old)
        position = np.searchsorted(old, task_index).clip(0, len(old) - 1)
        unknown = task_index[old[position] != task_index]
        if len(unknown):
            raise DatasetError(
                f"a row of {place} has task_index {unknown[0]}, which is none of the dataset's "
                f"{counted(len(old), 'task')}. Add the task to meta/tasks, or leave the episode out with --exclude."
            )
        return np.asarray(np.array(self.new)[position])


def number_tasks(tasks: Tasks) -> TaskNumbers:
    """Return the tasks numbered from 0 without gaps; equal texts share a number."""
    texts: dict[str, int] = {}
    old, new = [], []
    for number, text in sorted(tasks.texts.items()):
        old.append(number)
        new.append(texts.setdefault(text, len(texts)))
    return TaskNumbers(texts=tuple(texts), old=tuple(old), new=tuple(new))


def write_data_file(job: DataJob, workspace: Workspace, unit: DataCopy) -> None:
    """Write one data file and its record: its rows, and the statistics computed from them."""
    stats: list[dict[str, Any]] = []
    size_bytes = workspace.write_file(workspace.dataset / unit.path, lambda stream: _write(stream, job, unit, stats))
    footer = pq.read_metadata(workspace.dataset / unit.path)
    rows = job.numbering.rows[unit.start : unit.stop]
    expected = int(job.meta.episodes.length[rows].sum())
    if (footer.num_rows, footer.num_row_groups) != (expected, len(rows)):
        raise DatasetError(
            f"{unit.path!r} was written with {counted(footer.num_rows, 'row')} in "
            f"{counted(footer.num_row_groups, 'row group')}, expected {counted(expected, 'row')} in {len(rows)}. Run "
            f"the same command again."
        )
    if job.described:
        workspace.write_stats(unit.path, stats)
    workspace.write_record(unit.path, {"size_bytes": size_bytes, "num_rows": footer.num_rows})


def _write(stream: IO[bytes], job: DataJob, unit: DataCopy, stats: list[dict[str, Any]]) -> None:
    reader = RowReader(job.meta, job.columns.names)
    writer: pq.ParquetWriter | None = None
    checked = ""
    try:
        for number in range(unit.start, unit.stop):
            row = int(job.numbering.rows[number])
            if job.meta.data_file(row) != checked:
                checked = job.meta.data_file(row)
                _check_columns(job, reader, row)
            with as_damage(partial(_cannot_copy, _place(job, number))):
                table = _renumbered(job, reader.read_episode(row), number).select(list(job.columns.names))
            if writer is None:
                schema = table.schema.with_metadata(_metadata(table.schema))
                writer = pq.ParquetWriter(stream, schema, compression="snappy")
            with as_damage(partial(_cannot_copy, _place(job, number))):
                table = _as_schema(table, writer.schema, _place(job, number))
                # Set the size of the whole episode: by default pyarrow cuts at 1,048,576 rows.
                writer.write_table(table, row_group_size=len(table))
                if job.described:
                    stats.append(describe_rows(table, job.meta.features, job.described, _place(job, number)))
    finally:
        if writer is not None:
            writer.close()


def _cannot_copy(place: str, error: Exception) -> DatasetError:
    return DatasetError(
        f"the rows of {place} cannot be copied: {one_line(error)}. Rewrite its file, or leave the episode out with "
        f"--exclude."
    )


def _place(job: DataJob, number: int) -> str:
    episode = job.meta.episodes.episode_index[job.numbering.rows[number]]
    return f"episode {episode} of {job.meta.root!r}"


def _check_columns(job: DataJob, reader: RowReader, row: int) -> None:
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


def _renumbered(job: DataJob, table: pa.Table, number: int) -> pa.Table:
    frames = np.arange(len(table), dtype=np.int64)
    task_index = table.column("task_index").to_numpy().astype(np.int64)
    numbers = {
        "frame_index": frames,
        "episode_index": np.full(len(table), number, dtype=np.int64),
        "index": job.numbering.from_index[number] + frames,
        "task_index": job.tasks.renumber(task_index, _place(job, number)),
    }
    for name in _annotations(job, table):
        if not pa.types.is_integer(table.schema.field(name).type):
            raise DatasetError(
                f"{_place(job, number)}: {name!r} holds numbers of tasks as {table.schema.field(name).type}, and the "
                f"tasks are numbered anew. Store it as int64, or take the column out of modality.json."
            )
        values = table.column(name).to_numpy().astype(np.int64)
        numbers[name] = job.tasks.renumber(values, _place(job, number))
    for name, values in numbers.items():
        table = table.set_column(table.column_names.index(name), pa.field(name, pa.int64()), pa.array(values))
    return table


def _annotations(job: DataJob, table: pa.Table) -> list[str]:
    """Return the columns besides ``task_index`` that hold task numbers, if those numbers change."""
    if job.tasks.is_same:
        return []
    sources = {text.source for text in job.meta.texts.values() if text.texts is job.meta.tasks}
    return [name for name in table.column_names if name in sources]


def _metadata(schema: pa.Schema) -> dict[bytes, bytes] | None:
    """Return the note of Hugging Face's datasets in a schema, if it describes exactly these columns."""
    note = (schema.metadata or {}).get(b"huggingface")
    if note is None:
        return None
    try:
        is_of_these = set(json.loads(note)["info"]["features"]) == set(schema.names)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return {b"huggingface": note} if is_of_these else None


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
