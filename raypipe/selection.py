"""The frames of an epoch of one dataset: a `SelectionSpec` against the tables of the dataset.

The plan decides by episode numbers and lengths alone. What a selection says of tasks and of columns is looked up here,
in ``meta/``, and only where it is said.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe.errors import ConfigError, suggest
from raypipe.metadata import DatasetMeta, read_episode_columns
from raypipe.plan import EpisodeIndex, SelectionSpec, index_episodes
from raypipe.wording import cut_inside

_MOST_KNOWN = 600
"""Characters of what is known that a message shows: some datasets have thousands of tasks."""


def index_dataset(name: str, meta: DatasetMeta, selection: SelectionSpec) -> EpisodeIndex:
    """Return the anchor frames of a dataset; reads columns of the episode table where the selection names some.

    Args:
        name: of the dataset in the order.

    Raises:
        ConfigError: the selection asks for what the dataset does not have, or leaves no frame.
    """
    kept = _with_tasks(name, meta, selection.tasks)
    if selection.where:
        kept &= _with_values(name, meta, selection)
    return index_episodes(
        name,
        meta.episodes.episode_index,
        meta.episodes.length,
        fingerprint=meta.order_fingerprint,
        selection=selection,
        kept=kept,
    )


def _with_tasks(name: str, meta: DatasetMeta, tasks: Sequence[str]) -> NDArray[np.bool_]:
    if not tasks:
        return np.ones(len(meta.episodes), dtype=np.bool_)
    listed = [meta.tasks.named(texts) for texts in meta.episodes.tasks.to_pylist()]
    known = {*meta.tasks.texts.values(), *(text for texts in listed for text in texts)}
    for task in tasks:
        if task not in known:
            raise ConfigError(f"dataset {name!r} has no task {task!r}{_suggest(task, sorted(known))}")
    return np.array([not texts.isdisjoint(tasks) for texts in listed], dtype=np.bool_)


def _with_values(name: str, meta: DatasetMeta, selection: SelectionSpec) -> NDArray[np.bool_]:
    columns = _read_columns(meta, [column for column, _ in selection.where])
    kept = np.ones(len(meta.episodes), dtype=np.bool_)
    for column, values in selection.where:
        if column not in columns.column_names:
            known = _read_columns(meta).column_names
            raise ConfigError(
                f"where names the column {column!r}, which the episode table of dataset {name!r} does not have"
                f"{_suggest(column, known)}"
            )
        kept &= _is_one_of(columns.column(column), values)
    return kept


def _read_columns(meta: DatasetMeta, names: Sequence[str] | None = None) -> pa.Table:
    return read_episode_columns(meta.storage, names, is_packed=meta.is_packed)


def _is_one_of(column: pa.ChunkedArray, values: Sequence[object]) -> NDArray[np.bool_]:
    # By Python's own equality: True is 1 is 1.0 there, as in the files of different writers.
    return np.array([value in values for value in column.to_pylist()], dtype=np.bool_)


def _suggest(wanted: str, known: Sequence[str]) -> str:
    return cut_inside(suggest(wanted, known), _MOST_KNOWN)
