"""The rows of an episode, read with pyarrow, and their values as numpy arrays.

If row groups are episodes, an episode is read as its row groups. Otherwise the reader reads all row groups that may
hold the episode and filters by ``episode_index``. Rows are in the order of ``frame_index``; index columns that the
files lack are derived. Nothing is dropped: an episode without the promised rows is a `DatasetError`.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raypipe.errors import LEAVE_OUT, DatasetError, as_damage, note_episode, without_episode
from raypipe.format.dataset_meta import DatasetMeta
from raypipe.format.features import INDEX_COLUMNS, INDEX_FEATURES, Feature
from raypipe.format.tables import BoundedParquet, open_parquet
from raypipe.storage import Storage, is_transient
from raypipe.text import counted, span_text

_OPEN_FILES = 32
"""Footers that a reader keeps; a footer of a file with 1,000 row groups is about a megabyte."""


class OpenFiles:
    """Up to `size` open data files, and the last row groups read; closes the least recently used file beyond that.

    Readers of several datasets may share it. Not thread-safe.
    """

    def __init__(self, size: int = _OPEN_FILES) -> None:
        self._size = size
        self._files: OrderedDict[tuple[str, str], BoundedParquet] = OrderedDict()
        self._process = os.getpid()
        self._of_parent: list[Any] = []
        self.kept: tuple[tuple[str, str, tuple[int, ...]], pa.Table] = (("", "", ()), pa.table({}))
        """The row groups that were read last, and their rows."""

    def open(self, storage: Storage, name: str) -> BoundedParquet:
        """Return the open file `name` of a dataset; open it if necessary."""
        if self._process != os.getpid():
            # After a fork the parent reads the same open files, and a read of a cached file moves its place for both.
            # Kept, not closed: the parent goes on with them.
            self._of_parent.append(self._files)
            self._files, self._process = OrderedDict(), os.getpid()
        key = (storage.uri, name)
        if key not in self._files:
            parquet = open_parquet(storage, name)
            names = parquet.schema_arrow.names
            doubled = sorted({column for column in names if names.count(column) > 1})
            if doubled:
                raise DatasetError(
                    f"{storage.locate(name)!r} has the columns {doubled} twice; rewrite the file with each once."
                )
            self._files[key] = parquet
            if len(self._files) > self._size:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(key)
        return self._files[key]

    def forget(self, storage: Storage, name: str) -> None:
        """Close a file, if it is open, and drop the kept rows."""
        file = self._files.pop((storage.uri, name), None)
        if file is not None:
            file.close()
        self.kept = (("", "", ()), pa.table({}))


class RowReader:
    """Reads the rows of episodes of one dataset; keeps a few footers and the last row groups that it read.

    Not thread-safe.
    """

    def __init__(self, meta: DatasetMeta, columns: Sequence[str], files: OpenFiles | None = None) -> None:
        """Prepare to read `columns` (names of features) and the index columns; opens nothing yet.

        Args:
            files: open files to share with other readers.
        """
        self._meta = meta
        # Look at `meta.texts` only if no feature has the name: it reads files.
        self._texts = {name: meta.texts[name] for name in columns if name not in meta.features and name in meta.texts}
        sources = [text.source for text in self._texts.values()]
        stored = [name for name in columns if name not in self._texts]
        self._columns = tuple(dict.fromkeys((*stored, *sources, *INDEX_FEATURES)))
        self._files = files or OpenFiles()

    def read_episode(self, row: int) -> pa.Table:
        """Return all rows of the episode in row `row` of the episode table."""
        return self.read_frames(row, 0, int(self._meta.episodes.length[row]))

    def read_frames(self, row: int, start: int, stop: int) -> pa.Table:
        """Return the frames ``[start, stop)`` of the episode in row `row` of the episode table, in order.

        Raises:
            DatasetError: the file is missing or damaged, or does not have the rows that ``meta/`` promises.
        """
        name = self._meta.data_file(row)
        try:
            with as_damage(lambda error: self._damaged(name, row, f"cannot be read: {one_line(error)}")):
                return self._read_checked(name, row).slice(start, stop - start)
        except OSError as error:
            if is_transient(error):
                raise self._meta.storage.unreadable(name, error) from error
            raise self._damaged(name, row, f"cannot be read: {one_line(error)}") from error

    def _read_checked(self, name: str, row: int) -> pa.Table:
        """Return all rows of an episode, in order, with every requested column."""
        try:
            table = self._episode_table(name, row)
        except DatasetError as error:
            note_episode(error, "reading", int(self._meta.episodes.episode_index[row]), self._meta.root)
            raise
        length = int(self._meta.episodes.length[row])
        if len(table) != length:
            what = f"holds {counted(len(table), 'row')} of it, and the episode table promises {length}"
            if "episode_index" not in table.column_names:
                what = f"holds {len(table)} rows, and no column episode_index tells which {length} are its: write it"
            raise self._damaged(name, row, what)
        table = self._with_index_columns(self._in_frame_order(table, name, row), row)
        for column, text in self._texts.items():
            place = f"episode {self._meta.episodes.episode_index[row]} of {self._meta.root!r}"
            table = table.append_column(column, text.read(table, place))
        return table

    def forget(self, row: int) -> None:
        """Close the file of the episode in row `row`, which was replaced, and drop the kept rows."""
        self._files.forget(self._meta.storage, self._meta.data_file(row))

    def missing_columns(self, row: int) -> tuple[str, ...]:
        """Return which requested columns the file of the episode in row `row` lacks."""
        present = set(self._stored_columns(row))
        return tuple(column for column in self._columns if column not in present)

    def undeclared_columns(self, row: int) -> tuple[str, ...]:
        """Return which columns of the file of the episode in row `row` are not features of the dataset."""
        known = {*self._meta.features, *INDEX_FEATURES}
        return tuple(name for name in self._stored_columns(row) if name not in known)

    def _stored_columns(self, row: int) -> list[str]:
        file = self._files.open(self._meta.storage, self._meta.data_file(row))
        return list(file.schema_arrow.names)

    def _episode_table(self, name: str, row: int) -> pa.Table:
        file = self._files.open(self._meta.storage, name)
        episode_index = int(self._meta.episodes.episode_index[row])
        low, high = file.episode_bounds
        groups = np.flatnonzero((low <= episode_index) & (high >= episode_index)).tolist()
        # The next episode is often in the same row groups: if row groups are not episodes, reading one episode costs
        # its whole row group.
        key = (self._meta.storage.uri, name, tuple(groups))
        if self._files.kept[0] != key:
            present = [column for column in self._columns if column in file.schema_arrow.names]
            lost = [column for column in self._columns if column not in present and column not in INDEX_FEATURES]
            if lost:
                raise DatasetError(
                    f"{self._meta.storage.locate(name)!r} has no column for {lost}, which info.json declares. Rewrite "
                    f"the file, leave a camera that no file has out of cameras=[...], or {LEAVE_OUT}"
                )
            read = file.read_row_groups(groups, columns=present, use_threads=False)
            self._files.kept = (key, _plain_index_columns(read))
        table = self._files.kept[1]
        is_whole = bool(np.all(low[groups] == high[groups]))
        if is_whole or "episode_index" not in table.column_names:
            return table
        return table.filter(pc.equal(table.column("episode_index"), episode_index))

    def _in_frame_order(self, table: pa.Table, name: str, row: int) -> pa.Table:
        if "frame_index" not in table.column_names:
            return table
        frame_index = table.column("frame_index").to_numpy()
        expected = np.arange(len(table))
        if np.array_equal(frame_index, expected):
            return table
        order = np.argsort(frame_index, kind="stable")
        if not np.array_equal(frame_index[order], expected):
            found, wanted = span_text(frame_index.min(), frame_index.max()), span_text(0, len(table) - 1)
            raise self._damaged(name, row, f"has frame_index {found} with gaps or repeats, expected {wanted}")
        return table.take(order)

    def _with_index_columns(self, table: pa.Table, row: int) -> pa.Table:
        """Add the index columns that the file lacks, each by itself: only rows without a task need the episode's."""
        episodes, frames = self._meta.episodes, np.arange(len(table))
        derive: dict[str, Callable[[], NDArray[Any]]] = {
            "timestamp": lambda: frames / self._meta.fps,
            "frame_index": lambda: frames,
            "episode_index": lambda: np.full(len(frames), episodes.episode_index[row]),
            "index": lambda: episodes.from_index[row] + frames,
            "task_index": lambda: np.full(len(frames), self._task_index(row)),
        }
        for column, dtype in INDEX_FEATURES.items():
            if column not in table.column_names:
                table = table.append_column(column, pa.array(derive[column]().astype(dtype)))
        return table

    def _task_index(self, row: int) -> int:
        """Return the ``task_index`` of the episode's first task, for rows without one."""
        tasks = self._meta.tasks
        texts = self._meta.episodes.tasks[row].as_py() or []
        if len(tasks) <= 1:
            return min(tasks.texts, default=0)
        text = str(texts[0]) if texts else ""
        if text in tasks.indices:
            return tasks.indices[text]
        # Some datasets list the numbers of their tasks instead of the texts.
        if text.isdecimal() and int(text) in tasks.texts:
            return int(text)
        episode_index = int(self._meta.episodes.episode_index[row])
        raise DatasetError(
            f"episode {episode_index} of {self._meta.root!r} has rows without task_index, and its task {text!r} in the "
            f"episode table is none of the {len(tasks)} tasks in meta/tasks. Correct the episode table, or "
            f"{LEAVE_OUT}"
        )

    def _damaged(self, name: str, row: int, what: str) -> DatasetError:
        episode_index = int(self._meta.episodes.episode_index[row])
        return DatasetError(
            f"episode {episode_index} of {self._meta.root!r}: {self._meta.storage.locate(name)!r} {what}. Fetch the "
            f"file again. {without_episode(episode_index, self._meta.root)}"
        )


def read_row_group_layout(meta: DatasetMeta, num_files: int = 8) -> Literal["per-episode", "other"]:
    """Return whether row groups are episodes, from the footers of up to `num_files` files of the dataset.

    If they are, an episode is read by itself; if not, reading it costs all row groups that it touches.
    """
    if not len(meta.episodes):
        return "per-episode"
    rows = np.unique(np.linspace(0, len(meta.episodes) - 1, num_files).round().astype(int))
    for name in dict.fromkeys(meta.data_file(int(row)) for row in rows):
        with open_parquet(meta.storage.for_a_look(), name) as parquet:
            low, high = parquet.episode_bounds
        is_other = np.any(low != high) or len(np.unique(low)) < len(low) if meta.is_packed else len(low) > 1
        if is_other:
            return "other"
    return "per-episode"


def row_features_of(meta: DatasetMeta, cameras: Sequence[str], absent: Sequence[str]) -> dict[str, Feature]:
    """Return the features to read from rows: declared ones without the `absent` ones, their texts, the index columns.

    Images stored in rows are included only for `cameras`.
    """
    rows = {
        name: feature
        for name, feature in meta.features.items()
        if feature.kind not in ("video", "opaque") and name not in absent and (not feature.is_camera or name in cameras)
    }
    for name, text in meta.texts.items():
        if text.source in rows:
            rows[name] = Feature(name=name, kind="string", dtype="string", shape=(1,))
    return {**rows, **INDEX_COLUMNS}


def find_absent_columns(meta: DatasetMeta) -> tuple[str, ...]:
    """Return the declared features that the first, middle and last data files all lack.

    A column missing from only some files is damage to those files, as is a file that cannot be opened; their readers
    raise the error. If none of the three opens, try the others in turn.
    """
    # Cameras do not count: reading a selected camera without images is an error.
    names = [name for name, feature in meta.features.items() if not feature.is_camera]
    reader, looked_at = RowReader(replace(meta, storage=meta.storage.for_a_look()), names), looked_at_rows(meta)
    missing: list[tuple[str, ...]] = []
    errors: dict[str, DatasetError] = {}
    for tried, row in enumerate((*looked_at, *range(len(meta.episodes)))):
        if tried >= len(looked_at) and missing:
            break
        try:
            if meta.data_file(row) not in errors:
                missing.append(reader.missing_columns(row))
        except DatasetError as error:
            errors[meta.data_file(row)] = error
    if errors and not missing:
        raise next(iter(errors.values()))
    return tuple(name for name in names if missing and all(name in one for one in missing))


def looked_at_rows(meta: DatasetMeta) -> tuple[int, ...]:
    """Return the rows of the first, a middle and the last episode, whose files show what a dataset lacks."""
    count = len(meta.episodes)
    return (0, count // 2, count - 1) if count else ()


def column_values(table: pa.Table, feature: Feature, place: str) -> NDArray[Any] | list[Any]:
    """Return a column as in LeRobot's samples: ``(rows, *shape)``, or a list for text, images and language.

    Declared floats become float32 and integers int64, whatever the file stores; a scalar (shape ``(1,)``) has no inner
    axis.

    Args:
        place: the dataset and episode, for messages.
    """
    column = table.column(feature.name)
    what = f"column {feature.name!r} of {place} is stored as {column.type}, and info.json declares {feature.dtype}"
    with as_damage(lambda error: DatasetError(f"{what}: {one_line(error)}. {_ways_on(feature)}")):
        return list(column.to_pylist()) if feature.kind != "vector" else _numbers(column, feature, place)


def _numbers(column: pa.ChunkedArray | pa.Array, feature: Feature, place: str) -> NDArray[Any]:
    flat = _flatten(column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column)
    shape = () if feature.shape == (1,) else feature.shape
    if flat is None or flat.null_count or len(flat) != len(column) * int(np.prod(shape)):
        raise DatasetError(
            f"column {feature.name!r} of {place} has empty values or lists of other lengths in "
            f"{counted(len(column), 'row')} of type {column.type}; info.json declares the shape {list(feature.shape)}. "
            f"{_ways_on(feature)}"
        )
    values: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    cast = values.astype(feature.sample_dtype, copy=False)
    if values.dtype.kind != cast.dtype.kind and not np.array_equal(cast, values):
        raise DatasetError(
            f"column {feature.name!r} of {place} is stored as {column.type} and holds values that are no "
            f"{feature.dtype}, which info.json declares. {_ways_on(feature)}"
        )
    return cast.reshape(len(column), *shape)


def _ways_on(feature: Feature) -> str:
    # The index columns cannot be left out.
    drop = "" if feature.name in INDEX_FEATURES else f", leave the feature out with drop_features([{feature.name!r}])"
    return f"Correct info.json{drop}, or {LEAVE_OUT}"


def one_line(error: BaseException) -> str:
    """Return the text of an error without its line breaks."""
    return " ".join(str(error).split())


def _plain_index_columns(table: pa.Table) -> pa.Table:
    """Return the table with its index columns as plain numbers; some writers store lists of one number."""
    for name in (one for one in INDEX_FEATURES if one in table.column_names):
        found = table.schema.field(name).type
        flat = _flatten(table.column(name).combine_chunks()) if pa.types.is_nested(found) else None
        if flat is not None and len(flat) == len(table):
            table, found = table.set_column(table.column_names.index(name), name, flat), flat.type
        if not (pa.types.is_integer(found) or pa.types.is_floating(found) or pa.types.is_boolean(found)):
            raise pa.ArrowInvalid(f"column {name!r} is of type {found}, expected one number")
    return table


def _flatten(array: pa.Array) -> pa.Array | None:
    """Return the numbers inside lists of any depth and kind; None if lists of one depth differ in length."""
    while isinstance(array, pa.ExtensionArray | pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        if isinstance(array, pa.ListArray | pa.LargeListArray) and len(array):
            lengths = pc.min_max(pc.list_value_length(array)).as_py()
            if array.null_count or lengths["min"] != lengths["max"]:
                return None
        array = array.storage if isinstance(array, pa.ExtensionArray) else array.flatten()
    return array
