"""Texts of frames that a dataset stores as numbers or records, read as columns of text.

::

    subtask                  subtask_index, the row of ``meta/subtasks.parquet``              LeRobot 0.4.4 to 0.5
    subtask                  language_persistent, its record of style "subtask" at the time   LeRobot 0.6
    annotation.NAME_text     annotation.NAME, a ``task_index``, by ``meta/modality.json``     GR00T

They are features of a sample like any other: they may have windows, be selected or be left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from raypipe.errors import LEAVE_OUT, DatasetError
from raypipe.format.features import Feature
from raypipe.format.tables import read_json
from raypipe.format.tasks import Tasks, read_positional
from raypipe.storage import Storage
from raypipe.text import counted

SUBTASK: Final = "subtask"
SUBTASKS: Final = "meta/subtasks.parquet"
MODALITY: Final = "meta/modality.json"
TEXT: Final = "_text"
"""The suffix of the feature with an annotation's text."""

_SUBTASK_INDEX: Final = "subtask_index"
_LANGUAGE: Final = "language_persistent"
_ANNOTATION: Final = "annotation."


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


def text_feature(name: str) -> Feature:
    """Return the feature of rows for a text."""
    return Feature(name=name, kind="string", dtype="string", shape=(1,))


def _is_number(features: Mapping[str, Feature], name: str) -> bool:
    feature = features.get(name)
    return feature is not None and feature.kind == "vector" and feature.shape == (1,) and "int" in feature.dtype


def _annotations(modality: Any) -> dict[str, str]:
    """Return the annotations in GR00T's file, with the column of each."""
    listed = modality.get("annotation") if isinstance(modality, dict) else None
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
