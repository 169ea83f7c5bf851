"""The episode table: one normalised set of columns for all three format versions.

v3.0 packs several episodes into a file, and ``meta/episodes/*.parquet`` says where each one is; v2.x has one file per
episode and a list of lengths. Here both are columns of numbers, and a path is formatted when needed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raypipe.errors import ConfigError, DatasetError, as_damage
from raypipe.format.tables import (
    CORRECT_INFO,
    check_not_refused,
    open_parquet,
    read_count,
    read_json_lines,
    read_parquet,
)
from raypipe.storage import Storage
from raypipe.text import counted, span_text

FOLDER = "meta/episodes"
EPISODES_TEMPLATE: Final = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
JSON_LINES = "meta/episodes.jsonl"

FILES_PER_CHUNK: Final = 1000
"""Files in one chunk folder, as LeRobot counts them."""

_MOST_TABLES = 10_000
"""Episode tables to read from a web server at most. LeRobot closes a file at 100 MB."""

_REQUIRED = ("episode_index", "length", "data/chunk_index", "data/file_index")


@dataclass(frozen=True, slots=True, eq=False)
class VideoColumns:
    """Where each episode is in the files of one camera."""

    chunk_index: NDArray[np.int64]
    file_index: NDArray[np.int64]
    from_timestamp: NDArray[np.float64]
    """Seconds into the file at which the episode starts; 0 if an episode has its own file."""

    def rows_of_file(self, row: int) -> NDArray[np.int64]:
        """Return the rows of all episodes, ascending, that are in the same file as the one in row `row`."""
        is_there = (self.chunk_index == self.chunk_index[row]) & (self.file_index == self.file_index[row])
        return np.flatnonzero(is_there)


@dataclass(frozen=True, eq=False)
class EpisodeTable:
    """All episodes of a dataset, ascending by ``episode_index``, as columns of equal length."""

    episode_index: NDArray[np.int64]
    length: NDArray[np.int64]
    from_index: NDArray[np.int64]
    """The dataset-wide ``index`` of the episode's first frame."""
    chunk_index: NDArray[np.int64]
    file_index: NDArray[np.int64]
    """Chunk and number of the data file; if an episode has its own file, the number is the episode's."""
    tasks: pa.ChunkedArray
    """The texts of the tasks in each episode: ``list<string>``."""
    videos: Mapping[str, VideoColumns]
    """By camera, without cameras whose places the dataset does not give."""

    def __len__(self) -> int:
        return len(self.episode_index)

    @cached_property
    def first_frames(self) -> NDArray[np.int64]:
        """The first frame of each episode, counted over the table; a dataset may count otherwise in `from_index`."""
        return _starts(self.length)

    def take(self, rows: Sequence[int]) -> "EpisodeTable":
        """Return the table with only these rows."""
        kept = np.asarray(rows, dtype=np.int64)
        numbers = ("episode_index", "length", "from_index", "chunk_index", "file_index")
        return EpisodeTable(
            **{name: getattr(self, name)[kept] for name in numbers},
            tasks=self.tasks.take(kept),
            videos={
                camera: VideoColumns(one.chunk_index[kept], one.file_index[kept], one.from_timestamp[kept])
                for camera, one in self.videos.items()
            },
        )

    def find_row(self, episode_index: int) -> int:
        """Return the row of an episode in this table."""
        row = int(np.searchsorted(self.episode_index, episode_index))
        if row == len(self) or self.episode_index[row] != episode_index:
            numbers = self.episode_index.tolist()
            span = f", numbered {span_text(numbers[0], numbers[-1])}" if numbers else ""
            those = f"the dataset has {counted(len(numbers), 'episode')}{span}"
            those = f"the only one is {numbers[0]}" if len(numbers) == 1 else those
            raise ConfigError(f"there is no episode {episode_index}; {those}")
        return row


def read_episodes(
    storage: Storage, info: Mapping[str, Any], cameras: Sequence[str], *, is_packed: bool
) -> EpisodeTable:
    """Return the episode table of a dataset.

    Args:
        is_packed: whether data files hold several episodes each (v3.0) or one (v2.x).
    """
    place = storage.locate("meta/info.json")
    with as_damage(partial(_damaged_table, storage)):
        if not is_packed and storage.offers(JSON_LINES):
            table = read_json_lines(storage, JSON_LINES, ("episode_index", "length", "tasks"))
            table = table.set_column(2, "tasks", _as_task_lists(table.column("tasks")))
            chunks_size = read_count(info, "chunks_size", place, default=FILES_PER_CHUNK, least=1)
            return _make_table(storage, {JSON_LINES: table}, cameras, chunks_size)
        # Also for templates with a file per episode: some datasets have them, and the table says where each episode is.
        tables = _read_tables(storage, info, cameras)
        promised = info.get("total_episodes")
        if isinstance(promised, int) and sum(map(len, tables.values())) < promised:
            check_not_refused(storage, _names_after(tables) if is_packed else (JSON_LINES,))
        if tables:
            return _make_table(storage, tables, cameras)
    if read_count(info, "total_episodes", place, default=0) == 0:
        empty = pa.schema({"episode_index": pa.int64(), "length": pa.int64(), "tasks": _TASKS}).empty_table()
        return _make_table(storage, {JSON_LINES: empty}, (), FILES_PER_CHUNK)
    expected = f"{FOLDER}/*/*.parquet" if is_packed else JSON_LINES
    raise DatasetError(
        f"no episode table at {storage.uri!r}: info.json counts {counted(info['total_episodes'], 'episode')} and "
        f"there is no {expected}. Fetch the whole meta/ folder."
    )


def _damaged_table(storage: Storage, error: Exception) -> DatasetError:
    return DatasetError(
        f"the episode table of {storage.uri!r} ({FOLDER} or {JSON_LINES}) cannot be read: {error}. Fetch meta/ again."
    )


def _read_tables(storage: Storage, info: Mapping[str, Any], cameras: Sequence[str]) -> dict[str, pa.Table]:
    """Return the files of a packed episode table by name."""
    tables: dict[str, pa.Table] = {}
    optional = ["tasks", "dataset_from_index", *(column for one in cameras for column in _video_column_names(one))]
    promised, num_rows = info.get("total_episodes"), 0
    for name in list_tables(storage):
        # LeRobot writes no empty tables, so each counts as at least one episode.
        num_found = max(num_rows, len(tables))
        if not storage.is_listable and isinstance(promised, int) and tables and num_found >= promised:
            raise DatasetError(
                f"the web server has {storage.locate(name)!r}, and info.json promises {counted(promised, 'episode')}, "
                f"as many as the files before it hold. Let the server answer with 404 for what it lacks, or "
                f"{CORRECT_INFO[0].lower()}{CORRECT_INFO[1:]}"
            )
        # Only the columns that say where things are: the ``stats/`` columns are most of the file.
        read, place = read_parquet(storage, name, _REQUIRED, optional=optional), storage.locate(name)
        tables[name] = pa.table({column: _as_common_type(read, column, place) for column in read.column_names})
        num_rows += len(read)
    return tables


def read_episode_columns(storage: Storage, names: Sequence[str] | None = None, *, is_packed: bool) -> pa.Table:
    """Return columns of the episode table under their own names, with ``episode_index`` and ascending by it.

    Names that no file has are left out; if only some files lack a column, its values there are null. Without `names`,
    return all columns except statistics and the places of data and videos.
    """
    with as_damage(partial(_damaged_table, storage)):
        if not is_packed and storage.offers(JSON_LINES):
            table = read_json_lines(storage, JSON_LINES)
            wanted = names if names is not None else _told_names(table.column_names)
            table = table.select([name for name in table.column_names if name in {"episode_index", *wanted}])
        else:
            files = list(list_tables(storage))
            with open_parquet(storage, files[0]) as parquet:
                wanted = names if names is not None else _told_names(parquet.schema_arrow.names)
            tables = [read_parquet(storage, file, ("episode_index",), optional=wanted) for file in files]
            table = pa.concat_tables(tables, promote_options="permissive")
        return table.take(np.argsort(table.column("episode_index").to_numpy(), kind="stable"))


def _told_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(("stats/", "videos/", "data/", "meta/"))]


def list_tables(storage: Storage) -> Iterator[str]:
    """Yield the files of a packed episode table; on a web server, which lists nothing, try LeRobot's numbering.

    Read each file before asking for the next: some servers have a page for every name.
    """
    if storage.is_listable:
        yield from split_tables(storage.list_files(FOLDER))[0]
        return
    chunk = file = num_found = 0
    while num_found < _MOST_TABLES:
        name = EPISODES_TEMPLATE.format(chunk_index=chunk, file_index=file)
        # A refused file may or may not exist; the count of episodes shows whether one is missing.
        if storage.offers(name):
            yield name
            file, num_found = file + 1, num_found + 1
        elif file:
            chunk, file = chunk + 1, 0
        else:
            return
    raise DatasetError(
        f"the web server has {num_found} episode tables below {storage.locate(FOLDER)!r} and more: let it answer with "
        f"404 for what it lacks, or copy the dataset."
    )


def split_tables(files: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files of a packed episode table, and the strays next to them.

    Like LeRobot, read only the files in the chunk folders: a copy above those folders is not part of the table. If the
    chunk folders have none, all files are the table.
    """
    names = [name for name in files if name.startswith(f"{FOLDER}/") and name.endswith(".parquet")]
    read = tuple(name for name in names if name.count("/") == FOLDER.count("/") + 2) or tuple(names)
    return read, tuple(name for name in names if name not in read)


def _names_after(tables: Iterable[str]) -> tuple[str, ...]:
    """Return the names at which `list_tables` stopped after these tables."""
    chunks = Counter(name.split("/")[-2] for name in tables)
    ends = (*chunks.items(), (f"chunk-{len(chunks):03d}", 0))
    return tuple(f"{FOLDER}/{chunk}/file-{file:03d}.parquet" for chunk, file in ends)


_TASKS = pa.list_(pa.string())


def _make_table(
    storage: Storage, tables: Mapping[str, pa.Table], cameras: Sequence[str], chunks_size: int = 0
) -> EpisodeTable:
    """Return the files of an episode table as one.

    Args:
        chunks_size: files in a chunk, if each episode has its own; 0 if the table says where each is.
    """
    # Files may differ in columns (a camera added later): missing values are null.
    table = pa.concat_tables(tables.values(), promote_options="default")
    episode_index = _integers(table, "episode_index", storage)
    order = np.argsort(episode_index, kind="stable")
    if np.any(order != np.arange(len(order))):
        table, episode_index = table.take(order), episode_index[order]
    length = _integers(table, "length", storage)
    _check_rows(episode_index, length, storage, tables)
    if chunks_size:
        chunk_index, file_index = episode_index // chunks_size, episode_index
        videos = dict.fromkeys(cameras, VideoColumns(chunk_index, file_index, np.zeros(len(length))))
    else:
        chunk_index, file_index = (_integers(table, f"data/{one}_index", storage) for one in ("chunk", "file"))
        videos = _video_columns(table, cameras)
    has_from = "dataset_from_index" in table.column_names
    no_tasks = pa.chunked_array([pa.nulls(len(table), _TASKS)])
    return EpisodeTable(
        episode_index=episode_index,
        length=length,
        from_index=_integers(table, "dataset_from_index", storage) if has_from else _starts(length),
        chunk_index=chunk_index,
        file_index=file_index,
        tasks=table.column("tasks") if "tasks" in table.column_names else no_tasks,
        videos=videos,
    )


def in_episodes_file(table: pa.Table, number: int, chunks_size: int = FILES_PER_CHUNK) -> pa.Table:
    """Return rows of the episode table with the columns that say in which file they are."""
    for name, value in zip(("chunk_index", "file_index"), divmod(number, chunks_size), strict=True):
        table = table.append_column(f"meta/episodes/{name}", pa.array(np.full(len(table), value, dtype=np.int64)))
    return table


def _as_common_type(table: pa.Table, name: str, place: str) -> pa.ChunkedArray:
    """Return a column in the type that it has in all files: pandas writes whole numbers as floats if one is empty."""
    column = table.column(name)
    wrong = f"column {name!r} of {place!r} is of type {column.type}, which cannot be read as its meaning asks"
    with as_damage(lambda error: DatasetError(f"{wrong}: {error}. Rewrite the file.")):
        if name == "tasks":
            return _as_task_lists(column)
        return column.cast(pa.float64() if name.endswith("/from_timestamp") else pa.int64())


def _video_column_names(camera: str) -> tuple[str, str, str]:
    return tuple(f"videos/{camera}/{part}" for part in ("chunk_index", "file_index", "from_timestamp"))  # type: ignore[return-value]


def _video_columns(table: pa.Table, cameras: Sequence[str]) -> dict[str, VideoColumns]:
    found = {}
    for camera in cameras:
        names = _video_column_names(camera)
        if all(name in table.column_names and table.column(name).null_count == 0 for name in names):
            chunk, file, start = (table.column(name).to_numpy() for name in names)
            found[camera] = VideoColumns(chunk.astype(np.int64), file.astype(np.int64), start.astype(np.float64))
    return found


def _starts(length: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])[: len(length)]


def _as_task_lists(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return tasks as lists of text: real datasets also hold single texts, and numbers."""
    if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
        if pa.types.is_nested(column.type):
            raise pa.ArrowInvalid(f"tasks are {column.type}, expected lists of text")
        lists = [pa.ListArray.from_arrays(np.arange(len(chunk) + 1, dtype=np.int32), chunk) for chunk in column.chunks]
        column = pa.chunked_array(lists, pa.list_(column.type))
    return column.cast(_TASKS)


def _integers(table: pa.Table, name: str, storage: Storage) -> NDArray[np.int64]:
    column = table.column(name)
    if column.null_count:
        raise DatasetError(
            f"the episode table of {storage.uri!r} has {counted(column.null_count, 'empty value')} in {name!r}; the "
            f"recording was not finalised. Finalise it, or fetch meta/ again."
        )

    what = f"the column {name!r} of the episode table of {storage.uri!r}"
    with as_damage(lambda error: DatasetError(f"{what}: {error}. Correct it, or fetch meta/ again.")):
        return np.asarray(pc.cast(column, pa.int64()).to_numpy())


def _check_rows(
    episode_index: NDArray[np.int64], length: NDArray[np.int64], storage: Storage, tables: Mapping[str, pa.Table]
) -> None:
    """Raise if an episode is twice in the `tables`, which are by file, or has no frame."""
    doubled = episode_index[1:][np.diff(episode_index) == 0]
    if len(doubled):
        names = [name for name, one in tables.items() if doubled[0] in _integers(one, "episode_index", storage)]
        raise DatasetError(
            f"the episode table of {storage.uri!r} lists episode {doubled[0]} more than once ({len(doubled)} rows "
            f"too many), in {' and '.join(names)}; rewrite meta/ so that each episode has one row"
        )
    wrong = np.flatnonzero(length < 1)
    if len(wrong):
        raise DatasetError(
            f"episode {episode_index[wrong[0]]} of {storage.uri!r} has length {length[wrong[0]]} "
            f"({counted(len(wrong), 'episode')} in all with less than one frame); take their rows out of {FOLDER} or "
            f"{JSON_LINES}, and lower total_episodes in info.json"
        )
