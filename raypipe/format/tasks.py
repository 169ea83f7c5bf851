"""The tasks of a dataset, and other texts of frames that it stores as numbers or records.

::

    task                     task_index, by ``meta/tasks.parquet`` or ``meta/tasks.jsonl``
    subtask                  subtask_index, the row of ``meta/subtasks.parquet``              LeRobot 0.4.4 to 0.5
    subtask                  language_persistent, its record of style "subtask" at the time   LeRobot 0.6
    annotation.NAME_text     annotation.NAME, a ``task_index``, by ``meta/modality.json``     GR00T

The texts are features of a sample like any other: they may have windows, be selected or be left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from raypipe.errors import LEAVE_OUT, DatasetError
from raypipe.format.features import Feature
from raypipe.format.tables import check_not_refused, read_json, read_json_lines, read_parquet, reading
from raypipe.storage import Storage
from raypipe.text import counted, span_text

PARQUET = "meta/tasks.parquet"
TASK_LINES = "meta/tasks.jsonl"

SUBTASK: Final = "subtask"
SUBTASKS: Final = "meta/subtasks.parquet"
MODALITY: Final = "meta/modality.json"
TEXT: Final = "_text"
"""The suffix of the feature with an annotation's text."""

_SUBTASK_INDEX: Final = "subtask_index"
_LANGUAGE: Final = "language_persistent"
_ANNOTATION: Final = "annotation."


@dataclass(frozen=True)
class Tasks:
    """The texts of a dataset's tasks."""

    texts: Mapping[int, str]
    """By ``task_index``."""

    def __len__(self) -> int:
        return len(self.texts)

    def text(self, task_index: int) -> str:
        """Return the text of one task."""
        if task_index not in self.texts:
            known = span_text(min(self.texts), max(self.texts)) if self.texts else "none"
            raise DatasetError(
                f"a row has task_index {task_index}, and the dataset's tasks are {known}; add the task to "
                f"meta/tasks, or {LEAVE_OUT}"
            )
        return self.texts[task_index]

    def named(self, listed: Iterable[object] | None) -> frozenset[str]:
        """Return the texts of the tasks that an episode lists; some datasets list numbers instead of texts."""
        texts = [str(one) for one in listed or ()]
        numbers = {text: int(text) for text in texts if text.isdecimal() and text not in self.indices}
        return frozenset(self.texts.get(numbers[text], text) if text in numbers else text for text in texts)

    @cached_property
    def indices(self) -> dict[str, int]:
        """The ``task_index`` of every text; the lowest if a text occurs twice."""
        return {text: index for index, text in sorted(self.texts.items(), reverse=True)}


def read_tasks(storage: Storage, total_tasks: int) -> Tasks:
    """Return the tasks of a dataset; none if `total_tasks` is 0, whatever files are there."""
    if total_tasks == 0:
        return Tasks({})
    if storage.offers(PARQUET):
        return read_positional(storage, PARQUET, "task_index")
    if storage.offers(TASK_LINES):
        table = read_json_lines(storage, TASK_LINES, ("task_index", "task"))
        numbers = table.column("task_index").to_pylist()
        if not all(isinstance(number, int) for number in numbers):
            raise DatasetError(
                f"{storage.locate(TASK_LINES)!r} has a task_index that is no number: {numbers[:10]}. Correct it."
            )
        return Tasks(dict(zip(numbers, map(str, table.column("task").to_pylist()), strict=True)))
    check_not_refused(storage, (PARQUET, TASK_LINES))
    raise DatasetError(
        f"no tasks at {storage.uri!r}: info.json counts {total_tasks}, and neither {PARQUET} nor {TASK_LINES} "
        f"exists. Fetch the missing file, or set total_tasks to 0."
    )


def read_positional(storage: Storage, name: str, index: str) -> Tasks:
    """Return the texts of a v3.0 file, of tasks or subtasks: LeRobot looks them up by row position, not by `index`."""
    table = read_parquet(storage, name)
    # The text is a pandas index: named "task" by newer writers, unnamed by older ones.
    word, texts = index.removesuffix("_index"), [one for one in table.column_names if one != index]
    column = next((one for one in (word, "__index_level_0__", *texts) if one in texts), "")
    if not column:
        raise DatasetError(
            f"{storage.locate(name)!r} has the columns {table.column_names} and none with the {word}'s text; "
            f"expected {word!r} or '__index_level_0__'. Fetch the file again, or add the column."
        )
    with reading(storage, name, "unreadable"):
        return Tasks({i: str(text) for i, text in enumerate(table.column(column).to_pylist())})


@dataclass(frozen=True, kw_only=True)
class TextColumn:
    """Where the texts of a feature come from."""

    source: str
    """The column of the rows that identifies the text."""
    texts: Tasks | None
    """Texts by number; None if the column holds LeRobot's language records."""
    where: str = ""
    """The file of `texts`, for messages."""

    def read(self, table: pa.Table, place: str) -> pa.Array:
        """Return the text of every row; `table` has the source and the index columns."""
        values = table.column(self.source).to_pylist()
        if self.texts is None:
            times = table.column("timestamp").to_pylist()
            return pa.array([_subtask_at(*pair) for pair in zip(values, times, strict=True)], pa.string())
        numbers = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]
        unknown = sorted({str(number) for number in numbers if number not in self.texts.texts})
        if unknown:
            raise DatasetError(
                f"column {self.source!r} of {place} has {', '.join(unknown[:5])}, and {self.where} has "
                f"{counted(len(self.texts), 'text')}, none of that number. Add it there, leave the text out with "
                f"drop_features([...]), or {LEAVE_OUT}"
            )
        return pa.array([self.texts.texts[number] for number in numbers], pa.string())


def find_texts(storage: Storage, features: Mapping[str, Feature], tasks: Tasks) -> dict[str, TextColumn]:
    """Return the text features that derive from other columns, by name, without those that the dataset declares itself.

    Looks for a file only if a column needs it.
    """
    found: dict[str, TextColumn] = {}
    if _is_number(features, _SUBTASK_INDEX) and storage.offers(SUBTASKS):
        texts = read_positional(storage, SUBTASKS, _SUBTASK_INDEX)
        found[SUBTASK] = TextColumn(source=_SUBTASK_INDEX, texts=texts, where=SUBTASKS)
    elif _LANGUAGE in features and features[_LANGUAGE].kind == "language":
        found[SUBTASK] = TextColumn(source=_LANGUAGE, texts=None)
    annotated = [name for name in features if name.startswith(_ANNOTATION) and _is_number(features, name)]
    if annotated and len(tasks) and storage.offers(MODALITY):
        for name, column in _annotations(read_json(storage, MODALITY)).items():
            if column in annotated:
                found[f"{name}{TEXT}"] = TextColumn(source=column, texts=tasks, where="meta/tasks")
    return {name: text for name, text in found.items() if name not in features}


def _is_number(features: Mapping[str, Feature], name: str) -> bool:
    feature = features.get(name)
    return feature is not None and feature.kind == "vector" and feature.shape == (1,) and "int" in feature.dtype


def _annotations(modality: Mapping[str, Any]) -> dict[str, str]:
    """Return the annotations in GR00T's file, with the column of each."""
    listed = modality.get("annotation")
    if not isinstance(listed, dict):
        return {}
    named = {f"{_ANNOTATION}{name}": about for name, about in listed.items()}
    return {
        name: str(about.get("original_key") or name) if isinstance(about, dict) else name
        for name, about in named.items()
    }


def _subtask_at(records: Any, time_s: float) -> str:
    """Return the text of the latest subtask record that begins by `time_s`; empty if there is none."""
    begun = [one for one in records or () if one.get("style") == SUBTASK and (one.get("timestamp") or 0.0) <= time_s]
    latest = max(begun, key=lambda one: one.get("timestamp") or 0.0, default=None)
    return str((latest or {}).get("content") or "")
