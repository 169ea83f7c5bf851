"""The statistics of a dataset, read on demand: ``{feature: {statistic: array}}``.

v3.0 and v2.0 store them for the whole dataset. v2.1 stores them per episode, and this module pools them. Quantiles are
there only if the dataset stores them.
"""

import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError, as_damage
from raypipe.format.pooling import MOMENTS, Stats, pool_stats
from raypipe.format.tables import read_json
from raypipe.storage import REFUSED, Storage
from raypipe.text import parse_json, read_lines

GLOBAL = "meta/stats.json"
PER_EPISODE = "meta/episodes_stats.jsonl"

__all__ = ["GLOBAL", "PER_EPISODE", "Stats", "find_stats_file", "read_stats"]

_ANEW: Final = "Fetch the file again, or have LeRobot compute the statistics; samples do not need them."

_EPISODES_AT_ONCE: Final = 256
"""Episodes pooled together: some megabytes, and a fifth of the time of pooling one at a time."""


def read_stats(storage: Storage) -> Stats:
    """Return the statistics of the dataset at `storage`; empty if it stores none, see `find_stats_file`."""
    found = find_stats_file(storage)
    if found == GLOBAL:
        return _as_arrays(read_json(storage, GLOBAL), storage.locate(GLOBAL))
    if found == PER_EPISODE:
        pooled = _pool(_read_episode_stats(storage))
        if not pooled:
            raise DatasetError(f"damaged file {storage.locate(PER_EPISODE)!r}: it holds no statistics. {_ANEW}")
        return pooled
    return {}


def find_stats_file(storage: Storage) -> str | None:
    """Return the name of the file with the statistics; None if there is none.

    Warn if none can be read but a web server refuses one: that file may exist.
    """
    names = (GLOBAL, PER_EPISODE)
    found = next((name for name in names if storage.offers(name)), None)
    refused = [name for name in names if storage.is_refused(name)] if found is None else []
    if refused:
        warnings.warn(
            f"{storage.uri}: no statistics are read: {' and '.join(refused)} {'are' if len(refused) > 1 else 'is'} "
            f"answered with status {REFUSED}: refused, or lacking where nobody may list. Check your permissions if "
            f"the dataset has statistics.",
            stacklevel=3,
        )
    return found


def _read_episode_stats(storage: Storage) -> Iterator[Stats]:
    """Yield one episode's statistics at a time: the file is kilobytes per episode."""
    place = storage.locate(PER_EPISODE)
    with storage.open_file(PER_EPISODE) as stream:
        for number, line in enumerate(read_lines(stream), start=1):
            if not line.strip():
                continue
            with as_damage(partial(_no_stats, storage, number)):
                stats = parse_json(line)["stats"]
            yield _as_arrays(stats, f"{place}:{number}")


def _no_stats(storage: Storage, number: int, error: Exception) -> DatasetError:
    storage.check_no_pointer(PER_EPISODE)
    place = storage.locate(PER_EPISODE)
    return DatasetError(f"damaged file {place!r}: line {number} has no 'stats' object ({error}). {_ANEW}")


def _as_arrays(stats: Any, place: str) -> Stats:
    if not isinstance(stats, dict):
        raise DatasetError(f"the statistics in {place!r} are a {type(stats).__name__}; expected an object. {_ANEW}")
    arrays: dict[str, dict[str, NDArray[np.float64]]] = {}
    for feature, values in stats.items():
        if not isinstance(values, dict):
            raise DatasetError(
                f"the statistics of {feature!r} in {place!r} are {values!r}; expected an object. {_ANEW}"
            )
        with as_damage(partial(_no_numbers, feature, place)):
            arrays[feature] = {name: np.asarray(value, dtype=np.float64) for name, value in values.items()}
    return arrays


def _no_numbers(feature: str, place: str, error: Exception) -> DatasetError:
    return DatasetError(f"the statistics of {feature!r} in {place!r} are not numbers: {error}. {_ANEW}")


def _pool(episodes: Iterator[Stats]) -> Stats:
    """Return the statistics of all episodes; quantiles, which v2.1 does not store, are left out."""
    numbered = enumerate(episodes, start=1)
    pooled: Stats = {}
    while chunk := list(islice(numbered, _EPISODES_AT_ONCE)):
        parts = {f"entry {number} of {PER_EPISODE}": _countable(stats) for number, stats in chunk}
        pooled = pool_stats([pooled, *parts.values()], names=["the entries before", *parts])
    return pooled


def _countable(stats: Stats) -> Stats:
    """Return the statistics of one episode that can be pooled: features with all moments and a count above 0."""
    wanted = (*MOMENTS, "count")
    whole = {feature: values for feature, values in stats.items() if set(wanted) <= values.keys()}
    return {
        feature: {name: values[name] for name in wanted} for feature, values in whole.items() if values["count"].any()
    }
