"""``meta/`` of the copy: the episode table in one pass over the episodes, tasks, statistics, and the origin.

The driver writes it last, from the plan and from the records of the finished files.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raypipe.errors import DatasetError, as_damage
from raypipe.format import GLOBAL, DatasetMeta, find_stats_file, one_line, read_json
from raypipe.reshard.data import TaskNumbers
from raypipe.reshard.plan import EPISODES_PATH, DataCopy, Numbering, VideoCopy, format_path
from raypipe.reshard.source_meta import SourceEpisodes
from raypipe.reshard.spec import FILES_PER_CHUNK, ReshardSpec
from raypipe.reshard.stats import StatsPool, computed_kinds, stats_arrays
from raypipe.reshard.workspace import ORIGIN, Workspace, check_finished

MAPPING: Final = "meta/reshard_episodes.parquet"
"""Each episode's number in the copy and in the source."""

EPISODES_PER_ROW_GROUP: Final = 500
"""LeRobot's recorder writes 10. Readers read all rows of a few columns, which favours fewer and larger groups."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MetaJob:
    """All that goes into ``meta/`` of a copy."""

    meta: DatasetMeta
    spec: ReshardSpec
    workspace: Workspace
    numbering: Numbering
    tasks: TaskNumbers
    data_units: tuple[DataCopy, ...]
    video_units: tuple[VideoCopy, ...]
    source: SourceEpisodes
    described: tuple[str, ...]
    """Features whose statistics the tasks of the data files computed."""
    dropped: tuple[str, ...]
    """Features whose statistics are left out."""


def write_meta(job: MetaJob, info: dict[str, Any]) -> list[str]:
    """Write ``meta/`` and return notes on its statistics."""
    pool = StatsPool()
    _write_episodes(job, pool)
    stats, notes = _dataset_stats(job, pool)
    if stats:
        _write_json(job.workspace, GLOBAL, stats)
    if job.tasks.texts:
        _write_table(job.workspace, "meta/tasks.parquet", tasks_table(job.tasks.texts))
    _write_table(job.workspace, MAPPING, _mapping(job))
    _write_json(job.workspace, "meta/info.json", info)
    origin = {"fingerprint": job.workspace.fingerprint, "root": job.meta.root, "version": job.meta.version}
    _write_json(job.workspace, ORIGIN, origin | {"spec": job.spec.to_json()})
    return notes


def tasks_table(texts: tuple[str, ...]) -> pa.Table:
    """Return the table of tasks as pandas writes a frame with the text as index: LeRobot reads it with pandas."""
    columns = [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
        {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object"},
    ]
    note = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [column | {"metadata": None} for column in columns],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.2.0",
    }
    table = pa.table({"task_index": pa.array(range(len(texts)), pa.int64()), "task": pa.array(texts, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(note)})


def _mapping(job: MetaJob) -> pa.Table:
    episodes, rows = job.meta.episodes, job.numbering.rows
    return pa.table(
        {
            "episode_index": np.arange(len(rows)),
            "source_episode_index": episodes.episode_index[rows],
            "source_from_index": episodes.from_index[rows],
        }
    )


def _write_episodes(job: MetaJob, pool: StatsPool) -> None:
    blocks = _episode_tables(job, pool)
    table = next(blocks, None)
    number = 0
    while table is not None:
        target = job.workspace.dataset / format_path(EPISODES_PATH, number)
        rest = chain([table], blocks)
        job.workspace.write_file(target, partial(_write_episode_file, tables=rest, number=number, spec=job.spec))
        table = next(blocks, None)
        number += 1


def _write_episode_file(stream: IO[bytes], *, tables: Iterator[pa.Table], number: int, spec: ReshardSpec) -> None:
    """Write one row group per table until the file reaches its largest size; takes no table that it does not write."""
    chunk, file = divmod(number, FILES_PER_CHUNK)
    writer: pq.ParquetWriter | None = None
    for block in tables:
        table = block
        for name, value in {"meta/episodes/chunk_index": chunk, "meta/episodes/file_index": file}.items():
            table = table.append_column(name, pa.array(np.full(len(table), value, dtype=np.int64)))
        writer = writer or pq.ParquetWriter(stream, table.schema, compression="snappy")
        writer.write_table(table, row_group_size=len(table))
        if stream.tell() >= spec.data_mb << 20:
            break
    assert writer is not None, "a file of no episodes"
    writer.close()


def _episode_tables(job: MetaJob, pool: StatsPool) -> Iterator[pa.Table]:
    """Yield the episode table in blocks, and add the statistics of each block to `pool`."""
    places = _place_columns(job) | _video_columns(job)
    computed = _computed_stats(job)
    kinds = computed_kinds(job.meta.features, job.described)
    replaced = tuple(f"stats/{name}/" for name in job.described)
    for start in range(0, len(job.numbering), EPISODES_PER_ROW_GROUP):
        part = slice(start, min(start + EPISODES_PER_ROW_GROUP, len(job.numbering)))
        with as_damage(partial(_damaged_columns, job.meta.root)):
            carried = job.source.block(job.numbering.rows[part])
            if replaced:
                carried = {name: values for name, values in carried.items() if not name.startswith(replaced)}
                carried |= stats_arrays(list(islice(computed, part.stop - part.start)), kinds)
            pool.add(carried)
        tasks = job.meta.episodes.tasks.take(job.numbering.rows[part])
        yield pa.table(
            {"episode_index": np.arange(part.start, part.stop), "tasks": tasks}
            | {name: values[part] for name, values in places.items()}
            | carried
        )


def _damaged_columns(root: str, error: Exception) -> DatasetError:
    return DatasetError(
        f"the statistics or further columns of the episodes in meta/ of {root!r} cannot be copied: {one_line(error)}. "
        f"Fetch meta/ again, or take them out."
    )


def _place_columns(job: MetaJob) -> dict[str, NDArray[Any]]:
    length = job.meta.episodes.length[job.numbering.rows]
    files = np.zeros(len(job.numbering), dtype=np.int64)
    for unit in job.data_units:
        files[unit.start : unit.stop] = unit.number
    return {
        "length": length,
        "data/chunk_index": files // FILES_PER_CHUNK,
        "data/file_index": files % FILES_PER_CHUNK,
        "dataset_from_index": job.numbering.from_index,
        "dataset_to_index": job.numbering.from_index + length,
    }


def _video_columns(job: MetaJob) -> dict[str, NDArray[Any]]:
    columns: dict[str, NDArray[Any]] = {}
    for unit in job.video_units:
        record = check_finished(job.workspace, unit.path)
        numbers = job.numbering.new_number[np.array(record["rows"])]
        prefix = f"videos/{unit.camera}/"
        values = {
            "chunk_index": unit.number // FILES_PER_CHUNK,
            "file_index": unit.number % FILES_PER_CHUNK,
            "from_timestamp": np.array(record["from"]),
            "to_timestamp": np.array(record["to"]),
        }
        for name, value in values.items():
            kind = np.float64 if name.endswith("timestamp") else np.int64
            column = columns.setdefault(prefix + name, np.full(len(job.numbering), -1, dtype=kind))
            column[numbers] = value
    for name, column in columns.items():
        assert (column >= 0).all(), f"{name} of an episode was never written"
    return columns


def _computed_stats(job: MetaJob) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield the statistics that the tasks of the data files computed, one episode at a time."""
    for unit in job.data_units if job.described else ():
        yield from job.workspace.read_stats(unit.path)


def _dataset_stats(job: MetaJob, pool: StatsPool) -> tuple[dict[str, Any], list[str]]:
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


def _write_table(workspace: Workspace, path: str, table: pa.Table) -> None:
    workspace.write_file(workspace.dataset / path, lambda stream: pq.write_table(table, stream))


def _write_json(workspace: Workspace, path: str, value: dict[str, Any]) -> None:
    content = (json.dumps(value, indent=4) + "\n").encode()

    def write(stream: IO[bytes]) -> None:
        stream.write(content)

    workspace.write_file(workspace.dataset / path, write)
