"""The features of ``info.json`` as values, and the texts of frames that a dataset stores as numbers or records.

::

    task                     task_index, by ``meta/tasks.parquet`` or ``meta/tasks.jsonl``
    subtask                  subtask_index, the row of ``meta/subtasks.parquet``              LeRobot 0.4.4 to 0.5
    subtask                  language_persistent, its record of style "subtask" at the time   LeRobot 0.6
    annotation.NAME_text     annotation.NAME, a ``task_index``, by ``meta/modality.json``     GR00T

The texts are features of a sample like any other: they may have windows, be selected or be left out.
"""

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, Literal, get_args

import numpy as np
import pyarrow as pa

from raypipe.errors import LEAVE_OUT, DatasetError, as_damage
from raypipe.format.tables import CORRECT_INFO, check_not_refused, read_json, read_json_lines, read_parquet, reading
from raypipe.storage import Storage
from raypipe.text import MOST_NUMBERS, MOST_PIXELS, counted, span_text

INDEX_FEATURES: Mapping[str, str] = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""The columns that every sample has, with their dtypes. raypipe derives those that a dataset lacks."""

FeatureKind = Literal["video", "image", "vector", "string", "language", "opaque"]
"""``opaque``: of a dtype that raypipe does not know; kept in copies, and in no sample."""

_CHANNEL_COUNTS = (1, 3, 4)

_NAMED_BITS = re.compile(r"(?:gray|p)(\d+)(?:le|be)")

_MOST_GOP = 100_000

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthCodes:
    """The distance that each number of a depth video means. The defaults are LeRobot's."""

    min_m: float = 0.01
    """Metres for the number 0: at this distance, nearer, or not measured."""
    max_m: float = 10.0
    """Metres for the number 4095 and larger ones."""
    shift_m: float = 3.5
    """Added before the logarithm."""
    is_log: bool = True
    """Whether the numbers are logarithms; otherwise they are proportional to the distance."""
    is_declared: bool = False
    """Whether ``info.json`` gives any of this. If not, numbers of more than 12 bits are millimetres."""
    num_bits: int = 0
    """Bits of a number, by the pixel format in ``info.json``; 0 if it names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One named part of a frame."""

    name: str
    kind: FeatureKind
    dtype: str
    """numpy's name for a vector; ``uint8`` for a camera; the word of ``info.json`` for the others."""
    shape: tuple[int, ...]
    """Without the time axis. ``(1,)`` is a scalar. A camera has ``(channels, height, width)``, whatever the
    order in ``info.json``; a size is 0 if ``info.json`` does not give it."""
    is_depth: bool = False
    depth_codes: DepthCodes | None = None
    """For a depth video only."""
    has_metre_stats: bool = False
    """Whether stored statistics of depth are in metres; pixels are always in millimetres."""
    names: tuple[str, ...] = ()
    """The name of each number of a vector, if the dataset gives them."""
    codec: str = ""
    """A camera's declared codec; empty if unknown."""
    gop: int = 0
    """Declared number of frames from one keyframe of a camera to the next; 0 if unknown."""

    @property
    def is_camera(self) -> bool:
        """True for a feature with pixels, from a video or from images inside the rows."""
        return self.kind in ("video", "image")

    @property
    def height(self) -> int:
        """Rows of pixels of a camera."""
        return self.shape[1]

    @property
    def width(self) -> int:
        """Columns of pixels of a camera."""
        return self.shape[2]

    @property
    def sample_dtype(self) -> str:
        """The dtype that a vector has in a sample: float32, int64 or bool, as in LeRobot's samples."""
        kind = np.dtype(self.dtype).kind
        return "bool" if kind == "b" else "float32" if kind == "f" else "int64"

    @property
    def frame_bytes(self) -> int:
        """The size of one decoded frame of a camera, or of one row of a vector."""
        if self.is_camera:
            # Depth is decoded to one float32, everything else to three bytes.
            return self.height * self.width * (4 if self.is_depth else 3)
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize if self.kind == "vector" else 0


INDEX_COLUMNS: Mapping[str, Feature] = {
    name: Feature(name=name, kind="vector", dtype=dtype, shape=(1,)) for name, dtype in INDEX_FEATURES.items()
}
"""The columns that every sample has as features; a dataset need not declare them."""


def read_features(info: Mapping[str, Any], place: str) -> dict[str, Feature]:
    """Return the features that `info` declares, in its order.

    Args:
        place: the path of ``info.json``, for messages.
    """
    declared = info.get("features")
    if not isinstance(declared, dict) or not declared:
        raise DatasetError(
            f"{place!r} declares no features; a LeRobot dataset has a 'features' object there. {CORRECT_INFO}"
        )
    features = {}
    for name, spec in declared.items():
        with as_damage(partial(_no_feature, name, place)):
            features[name] = _read_feature(name, spec, place)
    return features


def _no_feature(name: str, place: str, error: Exception) -> DatasetError:
    return DatasetError(f"feature {name!r} in {place!r} cannot be read: {error!r}. {CORRECT_INFO}")


def why_unfit_name(name: str) -> str:
    """Return why a feature cannot have this name; empty if it can. Cameras give their names to files and folders."""
    if not name or name == "." or ".." in name or "/" in name or "\\" in name:
        return "is empty or may be a path: it must not be '.', nor have '/', '\\' or '..' in it"
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        return "has control characters, or half of a character, in it"
    return ""


def _read_feature(name: str, spec: Any, place: str) -> Feature:
    why = why_unfit_name(name)
    if why:
        raise DatasetError(f"the name of the feature {name!r} in {place!r} {why}. {CORRECT_INFO}")
    if not isinstance(spec, dict) or not isinstance(spec.get("dtype"), str):
        raise DatasetError(
            f"feature {name!r} in {place!r} is {spec!r}; expected an object with a 'dtype'. {CORRECT_INFO}"
        )
    shape = _shape(name, spec.get("shape") or (1,), place)
    names = _flat_names(spec.get("names"))
    kind = _kind(spec["dtype"])
    if kind not in ("video", "image"):
        _check_size(shape, MOST_NUMBERS, name, place)
        return Feature(name=name, kind=kind, dtype=spec["dtype"], shape=shape, names=names)
    video: dict[str, Any] = {}
    for key in ("video_info", "info"):
        value = spec.get(key) or {}
        if not isinstance(value, dict):
            raise DatasetError(
                f"{key!r} of camera {name!r} in {place!r} is {value!r}; expected an object. {CORRECT_INFO}"
            )
        video |= value
    pixels = _camera_shape(shape, names, video, f"of camera {name!r} in {place!r}")
    _check_size(pixels[1:], MOST_PIXELS, name, place)
    is_depth, gop = bool(video.get("is_depth_map") or video.get("video.is_depth_map")), video.get("video.g")
    return Feature(
        name=name,
        kind=kind,
        dtype="uint8",
        shape=pixels,
        is_depth=is_depth,
        depth_codes=_depth_codes(video, name, place) if is_depth and kind == "video" else None,
        has_metre_stats=is_depth and video.get("depth_unit") == "m",
        codec=str(video.get("video.codec") or ""),
        # From an encoder's record; an implausible value counts as unknown.
        gop=gop if isinstance(gop, int) and not isinstance(gop, bool) and 0 < gop < _MOST_GOP else 0,
    )


def _shape(name: str, given: Any, place: str) -> tuple[int, ...]:
    wrong = f"feature {name!r} in {place!r} has the shape {given!r}; expected numbers, none below 0. {CORRECT_INFO}"
    with as_damage(lambda _: DatasetError(wrong)):
        shape = tuple(int(size) for size in given)
        if min(shape, default=0) < 0:
            raise ValueError("below 0")
        return shape


def _check_size(shape: Sequence[int], most: int, name: str, place: str) -> None:
    if math.prod(shape) > most:
        raise DatasetError(
            f"feature {name!r} in {place!r} has the shape {list(shape)}, which is {math.prod(shape):,} numbers or "
            f"pixels; expected at most {most:,}. {CORRECT_INFO}"
        )


def _depth_codes(video: Mapping[str, Any], name: str, place: str) -> DepthCodes:
    keys = {"video.depth_min": "min_m", "video.depth_max": "max_m", "video.shift": "shift_m"}
    declared = {field: video[key] for key, field in keys.items() if video.get(key) is not None}
    is_log, pix_fmt = video.get("video.use_log"), str(video.get("video.pix_fmt") or "")
    bits = _NAMED_BITS.search(pix_fmt)
    codes = DepthCodes(
        **{field: value for field, value in declared.items() if _is_number(value)},
        is_log=is_log is not False,
        is_declared=bool(declared) or is_log is not None,
        num_bits=int(bits[1]) if bits else 8 if pix_fmt else 0,
    )
    is_possible = codes.min_m < codes.max_m and (not codes.is_log or codes.min_m + codes.shift_m > 0)
    if not all(map(_is_number, declared.values())) or not is_possible:
        raise DatasetError(
            f"the depth range of camera {name!r} in {place!r} is {declared}; expected numbers of metres with depth_min "
            f"below depth_max, and depth_min + shift above 0 where use_log is true. {CORRECT_INFO}"
        )
    return codes


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _kind(dtype: str) -> FeatureKind:
    if dtype in get_args(FeatureKind):
        return dtype  # type: ignore[return-value]
    with suppress(TypeError):
        if np.dtype(dtype).kind in "biuf":
            return "vector"
    return "opaque"


def _flat_names(names: Any) -> tuple[str, ...]:
    """Return names given as a list, as ``{"motors": [...]}`` or as ``{"x": 0, "y": 1}``, in order."""
    if isinstance(names, dict):
        lists = [value for value in names.values() if isinstance(value, list)]
        names = [name for group in lists for name in group] if lists else list(names)
    if not isinstance(names, list):
        return ()
    return tuple(str(name) for name in names)


def _camera_shape(shape: Sequence[int], names: Sequence[str], video: Mapping[str, Any], place: str) -> tuple[int, ...]:
    """Return ``(channels, height, width)`` from the video's own record, else the axis names, else the sizes."""
    axes = {name.rstrip("s")[:1]: size for name, size in zip(names, shape, strict=False)}
    if len(shape) == 3 and set(axes) == {"c", "h", "w"}:
        channels, height, width = axes["c"], axes["h"], axes["w"]
    elif len(shape) == 3 and shape[0] in _CHANNEL_COUNTS and shape[2] not in _CHANNEL_COUNTS:
        channels, height, width = shape
    elif len(shape) == 3:
        height, width, channels = shape
    else:
        height, width, channels = (*(*shape, 0, 0)[:2], 3)
    sizes = {"video.channels": channels, "video.height": height, "video.width": width}
    for key in sizes:
        value = video.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise DatasetError(f"{key!r} {place} is {value!r}; expected a whole number. {CORRECT_INFO}")
            sizes[key] = value
    return tuple(sizes.values())


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


def tasks_table(texts: Sequence[str]) -> pa.Table:
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
    if _is_index(features, _SUBTASK_INDEX) and storage.offers(SUBTASKS):
        texts = read_positional(storage, SUBTASKS, _SUBTASK_INDEX)
        found[SUBTASK] = TextColumn(source=_SUBTASK_INDEX, texts=texts, where=SUBTASKS)
    elif _LANGUAGE in features and features[_LANGUAGE].kind == "language":
        found[SUBTASK] = TextColumn(source=_LANGUAGE, texts=None)
    annotated = [name for name in features if name.startswith(_ANNOTATION) and _is_index(features, name)]
    if annotated and len(tasks) and storage.offers(MODALITY):
        for name, column in _annotations(read_json(storage, MODALITY)).items():
            if column in annotated:
                found[f"{name}{TEXT}"] = TextColumn(source=column, texts=tasks, where="meta/tasks")
    return {name: text for name, text in found.items() if name not in features}


def _is_index(features: Mapping[str, Feature], name: str) -> bool:
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
