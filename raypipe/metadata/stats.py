"""The statistics of a dataset, read on demand: ``{feature: {statistic: array}}``.

v3.0 and v2.0 store them for the whole dataset. v2.1 stores them per episode, and they are pooled here: exact
minimum and maximum, count-weighted mean, and the standard deviation by the law of total variance. Quantiles
are there only where the dataset stores them.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError
from raypipe.metadata.tables import read_json
from raypipe.storage import Storage

GLOBAL = "meta/stats.json"
PER_EPISODE = "meta/episodes_stats.jsonl"

Stats = Mapping[str, Mapping[str, NDArray[np.float64]]]


def read_stats(storage: Storage) -> Stats:
    """Return the statistics of the dataset at `storage`; empty where it stores none."""
    if storage.exists(GLOBAL):
        return _as_arrays(read_json(storage, GLOBAL), storage.locate(GLOBAL))
    if storage.exists(PER_EPISODE):
        pooled = _pool(_read_episode_stats(storage))
        if not pooled:
            raise DatasetError(
                f"damaged file {storage.locate(PER_EPISODE)!r}: it holds no statistics. Fetch or remove it."
            )
        return pooled
    return {}


def _read_episode_stats(storage: Storage) -> Iterator[Stats]:
    """Yield one episode's statistics at a time: the file is kilobytes per episode."""
    place = storage.locate(PER_EPISODE)
    with storage.open_file(PER_EPISODE) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                stats = json.loads(line)["stats"]
            except (ValueError, KeyError, TypeError) as error:
                raise DatasetError(
                    f"damaged file {place!r}: line {number} has no 'stats' object ({error}). Fetch the file again."
                ) from error
            yield _as_arrays(stats, f"{place}:{number}")


def _as_arrays(stats: Any, place: str) -> Stats:
    if not isinstance(stats, dict):
        raise DatasetError(f"the statistics in {place!r} are a {type(stats).__name__}; expected an object")
    arrays: dict[str, dict[str, NDArray[np.float64]]] = {}
    for feature, values in stats.items():
        if not isinstance(values, dict):
            raise DatasetError(f"the statistics of {feature!r} in {place!r} are {values!r}; expected an object")
        try:
            arrays[feature] = {name: np.asarray(value, dtype=np.float64) for name, value in values.items()}
        except (TypeError, ValueError) as error:
            raise DatasetError(f"the statistics of {feature!r} in {place!r} are not numbers: {error}") from error
    return arrays


def _pool(episodes: Iterator[Stats]) -> Stats:
    pooled: dict[str, _Pool] = {}
    for stats in episodes:
        for feature, values in stats.items():
            if {"min", "max", "mean", "std", "count"} <= values.keys():
                try:
                    pooled.setdefault(feature, _Pool()).add(values)
                except (ValueError, IndexError) as error:
                    raise DatasetError(
                        f"the statistics of {feature!r} in {PER_EPISODE} differ in shape between episodes: {error}. "
                        f"Make the file again, or remove it."
                    ) from error
    return {feature: pool.result() for feature, pool in pooled.items()}


class _Pool:
    """Running count, minimum, maximum, sum and sum of squares of one feature, in float64.

    Squares are taken around the first episode's mean, so that a large offset costs no digits.
    """

    def __init__(self) -> None:
        self.count = 0.0

    def add(self, values: Mapping[str, NDArray[np.float64]]) -> None:
        count = float(values["count"].reshape(-1)[0])
        if self.count == 0:
            self.minimum, self.maximum, self.origin = values["min"], values["max"], values["mean"]
            self.total = np.zeros_like(self.origin)
            self.squares = np.zeros_like(self.origin)
        shifted = values["mean"] - self.origin
        self.minimum = np.minimum(self.minimum, values["min"])
        self.maximum = np.maximum(self.maximum, values["max"])
        self.total = self.total + count * shifted
        self.squares = self.squares + count * (values["std"] ** 2 + shifted**2)
        self.count += count

    def result(self) -> dict[str, NDArray[np.float64]]:
        shift = self.total / self.count
        variance = np.maximum(self.squares / self.count - shift**2, 0.0)
        return {
            "min": self.minimum,
            "max": self.maximum,
            "mean": self.origin + shift,
            "std": np.sqrt(variance),
            "count": np.asarray([self.count]),
        }
