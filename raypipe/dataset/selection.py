"""What an epoch takes of datasets: which frames (`SelectionSpec`), and which features, under which names (`Schema`).

The plan knows only episode numbers, lengths and weights. This module looks up tasks, columns and weights, and only
those that a selection names: in ``meta/``, or, for a column of the rows, in the data files of the episodes that the
other filters leave. A filter on a column of the rows becomes a weight of 0 or 1 for each frame.

A single dataset has a schema with its own names. In a mixture names differ, some robots lack a camera, and vectors have
different widths:

::

    name in a batch             aloha                           so101                       lacks it
    action (14,)                action (14,)                    action (6,), 8 zeros behind
    observation.images.wrist    observation.images.cam_left     observation.images.gripper
    observation.images.top      observation.images.cam_high                                 so101: black, marked
"""

import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe.dataset.dataset import Dataset, keeps_time_axis
from raypipe.errors import ConfigError, suggest
from raypipe.format import DatasetMeta, Feature, RowReader, column_values, read_episode_columns, read_parquet
from raypipe.plan import EQUAL, EpisodeIndex, SelectionSpec, index_episodes, passing_episodes
from raypipe.storage import open_storage
from raypipe.text import counted, cut_inside, make_spec

Weights = NDArray[np.float64]

_MOST_KNOWN: Final = 600
"""Characters of known values that a message shows: some datasets have thousands of tasks."""

_MOST_INT: Final = np.iinfo(np.int64).max

_NUM_THREADS: Final = 8
"""Files read at once for one column: reading a remote file is mostly waiting."""

DIM_IS_PAD = "_dim_is_pad"
"""Suffix to the name of a vector: the mask ``(B, width)`` of numbers that a narrower robot does not have."""

IS_MISSING = "_is_missing"
"""Suffix to the name of a feature: the mask ``(B,)`` of samples from robots that do not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberMap:
    """What one dataset gives: name in a batch -> its own name, without the features that it lacks."""

    rows: Mapping[str, str]
    cameras: Mapping[str, str]

    @property
    def own_names(self) -> Mapping[str, str]:
        """Rows, then cameras."""
        return {**self.rows, **self.cameras}


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The features of a batch, and each dataset's own names for them."""

    features: Mapping[str, Feature]
    """As batches have them: row features in the widest shape and a dtype that holds all, then cameras."""

    members: tuple[MemberMap, ...]
    """One per dataset, in the order of the mixture."""

    widths: Mapping[str, tuple[int, ...]]
    """For vectors that some dataset pads: how many numbers each dataset has, 0 if it lacks the feature."""

    windows: Mapping[str, int]
    """Frames in the window of each feature; a feature that is not listed has no window."""

    time_axes: tuple[str, ...]
    """Cameras that have a time axis: windows of several frames, and all windows of images stored in rows."""

    @cached_property
    def cameras(self) -> tuple[str, ...]:
        """The features that give pixels."""
        return tuple(name for name, feature in self.features.items() if feature.is_camera)

    @cached_property
    def rows(self) -> Mapping[str, Feature]:
        """The features read from rows."""
        return {name: feature for name, feature in self.features.items() if not feature.is_camera}

    @cached_property
    def dim_is_pad(self) -> Mapping[str, NDArray[np.bool_]]:
        """For each padded vector, which numbers are padding: ``(datasets, width)``."""
        return {
            name: np.arange(self.features[name].shape[0]) >= np.array(widths)[:, None]
            for name, widths in self.widths.items()
        }

    @cached_property
    def is_missing(self) -> Mapping[str, NDArray[np.bool_]]:
        """For each feature that some dataset lacks, which datasets lack it: ``(datasets,)``."""
        lacking = {
            name: np.array([name not in (one.cameras if feature.is_camera else one.rows) for one in self.members])
            for name, feature in self.features.items()
        }
        return {name: mask for name, mask in lacking.items() if mask.any()}

    def value_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a row feature in one sample, including its window; a scalar has no axis of its own."""
        feature = self.features[name]
        window = (self.windows[name],) if name in self.windows else ()
        return (*window, *(() if feature.shape == (1,) else feature.shape))

    def only(self, names: Collection[str]) -> "Schema":
        """Return the schema with only these features; raypipe neither reads nor decodes the others."""

        def kept(given: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in given.items() if name in names}

        return Schema(
            features=kept(self.features),
            members=tuple(MemberMap(rows=kept(one.rows), cameras=kept(one.cameras)) for one in self.members),
            widths=kept(self.widths),
            windows=kept(self.windows),
            time_axes=tuple(name for name in self.time_axes if name in names),
        )

    def masks(self, dataset: NDArray[Any]) -> dict[str, NDArray[np.bool_]]:
        """Return the masks for samples of these datasets: which numbers are padding, and which features are missing."""
        padding = {f"{name}{DIM_IS_PAD}": mask[dataset] for name, mask in self.dim_is_pad.items()}
        return {**padding, **{f"{name}{IS_MISSING}": mask[dataset] for name, mask in self.is_missing.items()}}


def schema_of(dataset: Dataset) -> Schema:
    """Return the schema of a single dataset."""
    rows = {name: feature for name, feature in dataset.row_features.items() if not feature.is_camera}
    cameras = {name: dataset.features[name] for name in dataset.spec.cameras}
    return Schema(
        features={**rows, **cameras},
        members=(MemberMap(rows={name: name for name in rows}, cameras={name: name for name in cameras}),),
        widths={},
        windows={name: len(offsets) for name, offsets in dataset.window.offsets.items()},
        time_axes=tuple(name for name in cameras if keeps_time_axis(dataset, name)),
    )


def index_dataset(name: str, meta: DatasetMeta, selection: SelectionSpec) -> EpisodeIndex:
    """Return the anchor frames of a dataset, and how often an epoch takes each.

    Args:
        name: of the dataset in the order.

    Raises:
        ConfigError: the selection asks for something that the dataset does not have, or leaves no frame.
    """
    kept = _with_tasks(name, meta, selection.tasks)
    kept &= passing_episodes(name, meta.episodes.episode_index, meta.episodes.length, selection)
    columns = _read_columns(meta, [column for column, _ in selection.where]) if selection.where else pa.table({})
    for column, values in selection.where:
        if column in columns.column_names:
            found = columns.column(column).to_pylist()
            for value in values:
                if value not in found:
                    known = sorted({str(one) for one in found if one is not None})
                    raise ConfigError(
                        f"where has {value!r} for {column!r}, which no episode of dataset {name!r} has"
                        f"{_suggest(str(value), known)}"
                    )
            kept &= [value in values for value in found]
    weights = _weights(name, meta, selection, kept)
    for column, values in selection.where:
        if column not in columns.column_names:
            flags = _matching(name, column, _row_values(name, meta, column, kept, "where"), values)
            if weights is not None:
                flags *= np.repeat(weights, meta.episodes.length) if len(weights) == len(meta.episodes) else weights
            weights = flags
    return index_episodes(
        name,
        meta.episodes.episode_index,
        meta.episodes.length,
        fingerprint=meta.order_fingerprint,
        selection=selection,
        kept=kept,
        weights=weights,
    )


def settle_selection(meta: DatasetMeta, given: Any, weights: Any = EQUAL) -> SelectionSpec:
    """Return the selection of a pipeline as plain values, so that an account can repeat it.

    Args:
        given: a `SelectionSpec`, or a dict of its fields.
        weights: those of the selection, if `given` has none; may be a function that takes the episode table, an Arrow
            table, and returns a number for each of its rows.
    """
    fields = dict(given) if isinstance(given, Mapping) else given
    inside = fields.pop("weights", EQUAL) if isinstance(fields, dict) else getattr(given, "weights", EQUAL)
    selection = make_spec(SelectionSpec, fields, "selection")
    if not any(isinstance(one, str) and one == EQUAL for one in (inside, weights)):
        told = [cut_inside(repr(one), _MOST_KNOWN // 2) for one in (weights, inside)]
        raise ConfigError(f"weights is {told[0]}, and selection has other weights, {told[1]}: say one of them")
    weights = inside if isinstance(weights, str) and weights == EQUAL else weights
    if callable(weights):
        table = _read_columns(meta)
        numbers = np.asarray(weights(table))
        if numbers.shape != (len(table),):
            raise ConfigError(
                f"the function of weights returned numbers of the shape {numbers.shape} for "
                f"{counted(len(table), 'episode')}; one for each row of its table is wanted"
            )
        weights = dict(zip(table.column("episode_index").to_pylist(), numbers.tolist(), strict=True))
    return selection if isinstance(weights, str) and weights == EQUAL else replace(selection, weights=weights)


def _with_tasks(name: str, meta: DatasetMeta, tasks: Sequence[str]) -> NDArray[np.bool_]:
    if not tasks:
        return np.ones(len(meta.episodes), dtype=np.bool_)
    listed = [meta.tasks.named(texts) for texts in meta.episodes.tasks.to_pylist()]
    known = {*meta.tasks.texts.values(), *(text for texts in listed for text in texts)}
    for task in tasks:
        if task not in known:
            raise ConfigError(f"dataset {name!r} has no task {task!r}{_suggest(task, sorted(known))}")
    return np.array([not texts.isdisjoint(tasks) for texts in listed], dtype=np.bool_)


def _weights(name: str, meta: DatasetMeta, selection: SelectionSpec, kept: NDArray[np.bool_]) -> Weights | None:
    """Return the weight of every episode, or of every frame of all episodes; None if all are equal."""
    given = selection.weights
    if given == EQUAL:
        return None
    if isinstance(given, str) and given.endswith(".parquet"):
        weights, place = _file_weights(name, meta, given), f"file {given!r}"
    elif isinstance(given, str):
        columns = _read_columns(meta, [given])
        is_of_episodes = given in columns.column_names
        values = (
            columns.column(given).to_pylist() if is_of_episodes else _row_values(name, meta, given, kept, "weights")
        )
        weights, place = _as_numbers(values, f"column {given!r}"), f"column {given!r}"
    else:
        by_episode, episodes = dict(given), meta.episodes.episode_index.tolist()
        unknown = sorted(by_episode.keys() - set(episodes))
        if unknown:
            raise ConfigError(
                f"weights name the episode {unknown[0]}, which dataset {name!r} does not have ({len(unknown)} unknown)"
            )
        weights, place = np.array([by_episode.get(episode, 1.0) for episode in episodes]), "weights"
    length = meta.episodes.length
    owner = np.arange(len(length)) if len(weights) == len(length) else np.repeat(np.arange(len(length)), length)
    wrong = np.flatnonzero(~(weights >= 0) | np.isinf(weights))
    wrong = wrong[kept[owner[wrong]]]
    if len(wrong):
        episode = int(meta.episodes.episode_index[owner[wrong[0]]])
        raise ConfigError(
            f"a weight of episode {episode} of dataset {name!r} is {weights[wrong[0]]} in the {place} "
            f"({len(wrong)} such in all); give finite numbers of at least 0"
        )
    return weights


def _file_weights(name: str, meta: DatasetMeta, path: str) -> Weights:
    """Return the weights in a parquet file: by episode, or by frame with LeRobot's ``index``."""
    folder, file = os.path.split(path)
    table = read_parquet(open_storage(folder or "."), file, ("weight",), optional=("index", "episode_index"))
    key = next((one for one in ("index", "episode_index") if one in table.column_names), "")
    if not key:
        raise ConfigError(f"{path!r} has no column 'index' (of frames) or 'episode_index', beside 'weight'")
    episodes = meta.episodes
    wanted = episodes.episode_index
    if key == "index":
        wanted = np.concatenate(
            [begin + np.arange(n) for begin, n in zip(episodes.from_index, episodes.length, strict=True)]
        )
    numbers = _as_numbers(table.column(key).to_pylist(), f"column {key!r} of {path!r}")
    order = np.argsort(numbers, kind="stable")
    place = np.searchsorted(numbers[order], wanted)
    is_there = np.isin(wanted, numbers)
    if len(np.unique(numbers)) < len(numbers) or not is_there.all() or len(numbers) != len(wanted):
        lacking = f", and not {key} {wanted[~is_there][0]}" if not is_there.all() else ""
        raise ConfigError(
            f"{path!r} has {counted(len(numbers), 'weight')} by {key!r}, {len(np.unique(numbers))} of them different"
            f"{lacking}; dataset {name!r} has {len(wanted)}: give each once, with 0 for what is to be left out"
        )
    return _as_numbers(table.column("weight").to_pylist(), f"column 'weight' of {path!r}")[order][place]


def _row_values(name: str, meta: DatasetMeta, column: str, kept: NDArray[np.bool_], asked_by: str) -> NDArray[Any]:
    """Return a column of the rows for every frame of all episodes; reads only the episodes in `kept`."""
    feature = meta.features.get(column)
    if feature is None:
        known = [*_read_columns(meta).column_names, *(one for one in meta.features if one not in meta.cameras)]
        raise ConfigError(
            f"{asked_by} names the column {column!r}, which neither the episode table nor the rows of dataset {name!r} "
            f"have{_suggest(column, known)}"
        )
    if feature.kind != "vector" or feature.shape != (1,):
        raise ConfigError(
            f"{asked_by} names the column {column!r} of dataset {name!r}, whose rows hold {feature.dtype} of the shape "
            f"{list(feature.shape)}; one number or flag for each frame is wanted"
        )
    return _read_row_values(meta, column, kept.tobytes())


@lru_cache(maxsize=8)
def _read_row_values(meta: DatasetMeta, column: str, kept: bytes) -> NDArray[Any]:
    # Cached for the process: a pipeline asks when it is made, and again when it plans.
    files: dict[str, list[int]] = defaultdict(list)
    for row in np.flatnonzero(np.frombuffer(kept, dtype=np.bool_)).tolist():
        files[meta.data_file(row)].append(row)
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="raypipe-column") as pool:
        found = pool.map(partial(_read_file_values, meta, column), files.values())
        values = {row: part for parts in found for row, part in parts.items()}
    # Episodes that are not kept get zeros, which are never used; bool zeros leave the dtype to the others.
    lengths = enumerate(meta.episodes.length.tolist())
    return np.concatenate([values[row] if row in values else np.zeros(length, np.bool_) for row, length in lengths])


def _read_file_values(meta: DatasetMeta, column: str, rows: Sequence[int]) -> dict[int, NDArray[Any]]:
    """Return a column of the rows for episodes that one file holds; opens it once."""
    reader, feature, found = RowReader(meta, [column]), meta.features[column], {}
    for row in rows:
        place = f"episode {meta.episodes.episode_index[row]} of {meta.root!r}"
        # A copy: a view would keep all columns of its row group in memory until the last file is read.
        found[row] = np.array(column_values(reader.read_episode(row), feature, place))
    reader.forget(rows[-1])
    return found


def _matching(name: str, column: str, found: NDArray[Any], values: Sequence[Any]) -> Weights:
    """Return 1 for every frame with a number in `values`, else 0; `values` are rounded to the dtype of the rows."""
    is_float = found.dtype.kind == "f"
    for value in values:
        is_number = isinstance(value, bool | int | float)
        if not is_number or not (is_float or (value % 1 == 0 and abs(value) <= _MOST_INT)):
            raise ConfigError(
                f"where has {value!r} for {column!r} of dataset {name!r}, whose rows hold {found.dtype}; give such "
                f"numbers"
            )
    flags = np.isin(found, np.asarray(values).astype(found.dtype))
    if not flags.any():
        raise ConfigError(
            f"where has {cut_inside(repr(list(values)), _MOST_KNOWN)} for {column!r}, and no frame that is selected of "
            f"dataset {name!r} has such a number"
        )
    return flags.astype(np.float64)


def _as_numbers(values: Any, place: str) -> Weights:
    """Return one number for each value; some writers store lists of one number."""
    try:
        return np.asarray(values, dtype=np.float64).reshape(len(values))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the {place} holds no numbers, and weights are some: {error}") from error


def _read_columns(meta: DatasetMeta, names: Sequence[str] | None = None) -> pa.Table:
    return read_episode_columns(meta.storage, names, is_packed=meta.is_packed)


def _suggest(wanted: str, known: Sequence[str]) -> str:
    return cut_inside(suggest(wanted, known), _MOST_KNOWN)
