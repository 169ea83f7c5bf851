"""Statistics, ``{feature: {statistic: array}}``: of a dataset, of an episode, and of a whole from those of its parts.

v3.0 and v2.0 store them for the whole dataset. v2.1 stores them per episode, and this module pools them. The same pools
the datasets of a robot and the robots of a mixture. Minimum, maximum, mean, standard deviation (of the population) and
count are those of all values together. Quantiles of a whole cannot be computed from quantiles of its parts. The pooled
ones are an *envelope*: the least of the lower quantiles and the greatest of the upper ones, as in LeRobot since 2026.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError, DatasetError, as_damage
from raypipe.format.tables import read_json
from raypipe.storage import REFUSED, Storage
from raypipe.text import either, parse_json, read_lines

GLOBAL = "meta/stats.json"
PER_EPISODE = "meta/episodes_stats.jsonl"

_ANEW: Final = "Fetch the file again, or have LeRobot compute the statistics; samples do not need them."

_EPISODES_AT_ONCE: Final = 256
"""Episodes pooled together: some megabytes, and a fifth of the time of pooling one at a time."""

FeatureStats = Mapping[str, NDArray[np.float64]]
"""By statistic: an array of the feature's shape, ``(channels, 1, 1)`` for a camera; ``count`` has one number."""

Stats = Mapping[str, FeatureStats]
"""By feature."""

MOMENTS: Final[tuple[str, ...]] = ("min", "max", "mean", "std")
QUANTILES: Final = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}

_QUANTILE: Final = re.compile(r"q(\d{1,2})")


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
            f"{storage.uri}: no statistics are read: {' and '.join(refused)} {either(len(refused), 'is', 'are')} "
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
    return {name: _as_numbers(values, f"the statistics of {name!r} in {place!r} are") for name, values in stats.items()}


def _as_numbers(values: Any, wrong: str) -> FeatureStats:
    if not isinstance(values, dict):
        raise DatasetError(f"{wrong} {values!r}; expected an object. {_ANEW}")
    with as_damage(lambda error: DatasetError(f"{wrong} not numbers: {error}. {_ANEW}")):
        return {name: np.asarray(value, dtype=np.float64) for name, value in values.items()}


def _pool(episodes: Iterator[Stats]) -> Stats:
    """Return the statistics of all episodes: of features with all moments and a count above 0, without quantiles."""
    numbered, wanted = enumerate(episodes, start=1), (*MOMENTS, "count")
    pooled: Stats = {}
    while chunk := list(islice(numbered, _EPISODES_AT_ONCE)):
        parts = {
            f"entry {number} of {PER_EPISODE}": {
                feature: {name: values[name] for name in wanted}
                for feature, values in stats.items()
                if values.keys() >= set(wanted) and values["count"].any()
            }
            for number, stats in chunk
        }
        pooled = pool_stats([pooled, *parts.values()], names=["the entries before", *parts])
    return pooled


def pool_stats(parts: Sequence[Stats], names: Sequence[str] = ()) -> Stats:
    """Return the statistics of all parts together, in float64.

    A feature is pooled over the parts that have it, and a statistic only if all of those have it. Statistics other than
    `MOMENTS`, ``count`` and quantiles are left out. The order of the parts and their grouping change only the last
    digits. A ``count`` may hold one number for each number of the feature. A part whose count is 0 for a number does
    not contribute to it; if the count is 0 in all parts, the number is that of the first part.

    Args:
        names: names of the parts for messages.
    """
    labels = tuple(names) or tuple(f"part {number}" for number in range(len(parts)))
    if len(labels) != len(parts) or len(set(labels)) != len(labels):
        raise ConfigError(f"the names of {len(parts)} parts must be as many and differ, got {labels!r}")
    return {
        feature: _pool_feature(
            feature, {label: part[feature] for label, part in zip(labels, parts, strict=True) if feature in part}
        )
        for feature in dict.fromkeys(feature for part in parts for feature in part)
    }


def is_quantile(statistic: str) -> bool:
    """Return whether a statistic is a quantile, such as ``q01``."""
    return _QUANTILE.fullmatch(statistic) is not None


def is_low(statistic: str) -> bool:
    """Return whether the pooled value is the least of the parts': ``min``, and quantiles up to ``q50``."""
    found = _QUANTILE.fullmatch(statistic)
    return statistic == "min" if found is None else int(found[1]) <= 50


def _pool_feature(feature: str, parts: Mapping[str, FeatureStats]) -> FeatureStats:
    first, *_ = parts.values()
    common = [name for name in first if _is_known(name) and all(name in part for part in parts.values())]
    values = {name: _stack(feature, name, parts) for name in common}
    width = next((value.shape[1:] for value in values.values()), ())
    counts = _counts(feature, parts, width)
    # A number that no part has is taken from the first part.
    is_first = np.arange(len(counts)).reshape(-1, *[1] * len(width)) == 0
    weight = np.where(counts.any(axis=0), counts, is_first)
    share = weight / weight.sum(axis=0)
    pooled: dict[str, NDArray[np.float64]] = {}
    for name in (name for name in common if name not in ("mean", "std")):
        known = np.where(share > 0, values[name], np.inf if is_low(name) else -np.inf)
        pooled[name] = np.asarray(known.min(axis=0) if is_low(name) else known.max(axis=0))
    if "mean" in values:
        pooled["mean"] = _weighted_sum(values["mean"], share)
        if "std" in values:
            spread = values["std"] ** 2 + (values["mean"] - pooled["mean"]) ** 2
            pooled["std"] = np.sqrt(_weighted_sum(spread, share))
    if all(part["count"].size == 1 for part in parts.values()):
        pooled["count"] = np.array([sum(part["count"].item() for part in parts.values())], dtype=np.float64)
    else:
        pooled["count"] = np.asarray(counts.sum(axis=0))
    return pooled


def _is_known(name: str) -> bool:
    return name in MOMENTS or is_quantile(name)


def _stack(feature: str, name: str, parts: Mapping[str, FeatureStats]) -> NDArray[np.float64]:
    first, *_ = parts
    # Compare with one statistic of the first part, so that the statistics of one part must have the same shape too.
    expected = next(np.shape(values) for key, values in parts[first].items() if _is_known(key))
    for label, part in parts.items():
        if np.shape(part[name]) != expected:
            raise DatasetError(
                f"the statistics of {feature!r} differ in shape: {name!r} is {np.shape(part[name])} in {label}, and "
                f"{first} has {expected}. Make the statistics again."
            )
    return np.stack([np.asarray(part[name], dtype=np.float64) for part in parts.values()])


def _counts(feature: str, parts: Mapping[str, FeatureStats], width: tuple[int, ...]) -> NDArray[np.float64]:
    for label, part in parts.items():
        if "count" not in part:
            raise DatasetError(
                f"the statistics of {feature!r} in {label} have no 'count', and pooling weighs by it. Make the "
                f"statistics again."
            )
        if part["count"].size != 1 and part["count"].shape != width:
            raise DatasetError(
                f"the 'count' of {feature!r} in {label} has the shape {part['count'].shape}; expected one number, or "
                f"{width}. Make the statistics again."
            )
    counts = np.empty((len(parts), *width))
    for number, part in enumerate(parts.values()):
        counts[number] = part["count"].item() if part["count"].size == 1 else part["count"]
    axes = tuple(range(1, counts.ndim))
    is_bad = ~(np.isfinite(counts) & (counts >= 0)).all(axis=axes) | ~counts.any(axis=axes)
    # A feature may have no numbers at all.
    if counts.size and is_bad.any():
        worst = int(np.argmax(is_bad))
        raise DatasetError(
            f"the 'count' of {feature!r} in {list(parts)[worst]} is {np.unique(counts[worst]).tolist()}; expected how "
            f"many values were counted, above 0. Make the statistics again, or leave them out."
        )
    return counts


def _weighted_sum(values: NDArray[np.float64], share: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray((share * np.where(share > 0, values, 0.0)).sum(axis=0))


def describe_values(values: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the statistics of an episode's values over their first axis; the extremes keep the type of the values."""
    if values.ndim == 1:
        values = values[:, None]
    numbers = values.astype(np.float64)
    # The quantiles are `np.quantile` of each column by its default rule, in a tenth of its time for a short episode.
    ordered = np.sort(numbers, axis=0)
    position = np.array(list(QUANTILES.values())) * (len(ordered) - 1)
    below = position.astype(np.int64)
    above = np.minimum(below + 1, len(ordered) - 1)
    part = (position - below).reshape(-1, *[1] * (numbers.ndim - 1))
    found = {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": numbers.mean(axis=0),
        "std": numbers.std(axis=0),
        "count": np.array([len(values)]),
    }
    return found | dict(zip(QUANTILES, ordered[below] + (ordered[above] - ordered[below]) * part, strict=True))
