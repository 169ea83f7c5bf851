"""In what range the numbers of a dataset lie: as its statistics say, or from the rows of some episodes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import Dataset
from raypipe.errors import DatasetError
from raypipe.metadata import INDEX_FEATURES, Feature
from raypipe.rows import RowReader, column_values
from raypipe.views.view import numbers_told, shortened

SHOWN_NUMBERS: Final = 48
"""Of a feature with more numbers the first ones are drawn."""

_EPISODES_READ: Final = 8
_LOW, _HIGH = "#9db7ee", "#3367d6"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Range:
    """The range of every number of a feature."""

    feature: str
    names: tuple[str, ...]
    """One for each number."""
    low: NDArray[np.float64]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    high: NDArray[np.float64]
    source: str
    """Where it comes from: the stored statistics, or the rows of so many episodes."""

    @property
    def constant(self) -> tuple[str, ...]:
        """Names of the numbers that never change."""
        return tuple(name for name, low, high in zip(self.names, self.low, self.high, strict=True) if low == high)


def number_names(feature: Feature) -> tuple[str, ...]:
    """Return a name for each number of a vector: the dataset's own, or its position."""
    size = int(np.prod(feature.shape))
    return feature.names if len(feature.names) == size else tuple(str(number) for number in range(size))


def vector_features(features: Iterable[Feature]) -> list[Feature]:
    """Return the features that are numbers of a robot: no index, text or camera; the action first."""
    found = [one for one in features if one.kind == "vector" and one.name not in INDEX_FEATURES]
    return sorted(found, key=lambda one: (one.name != "action", one.name != "observation.state"))


def measure_ranges(dataset: Dataset) -> tuple[Range, ...]:
    """Return the ranges of a dataset's vectors; reads rows of up to 8 episodes where statistics are not stored.

    Raises:
        DatasetError: statistics or rows are damaged.
    """
    wanted = [one for one in vector_features(dataset.row_features.values()) if np.dtype(one.dtype).kind == "f"]
    stored = {one.name: found for one in wanted if (found := _stored(dataset, one)) is not None}
    computed = _computed(dataset, [one for one in wanted if one.name not in stored])
    return tuple({**stored, **computed}[one.name] for one in wanted if one.name in stored or one.name in computed)


def _stored(dataset: Dataset, feature: Feature) -> Range | None:
    stats, size = dataset.stats.get(feature.name, {}), int(np.prod(feature.shape))
    values = {name: stats[name].ravel() for name in ("min", "mean", "std", "max") if name in stats}
    if len(values) < 4 or any(len(one) != size for one in values.values()):
        return None
    return Range(
        feature=feature.name,
        names=number_names(feature),
        low=values["min"],
        mean=values["mean"],
        std=values["std"],
        high=values["max"],
        source="stored statistics",
    )


def _computed(dataset: Dataset, features: Sequence[Feature]) -> dict[str, Range]:
    num_episodes = len(dataset.meta.episodes)
    if not features or not num_episodes:
        return {}
    rows = np.unique(np.linspace(0, num_episodes - 1, _EPISODES_READ).round().astype(int)).tolist()
    reader = RowReader(dataset.meta, [one.name for one in features])
    tables = [reader.read_episode(row) for row in rows]
    source = f"computed here from the rows of {len(rows)} of {num_episodes} episodes; none are stored"
    found = {}
    for one in features:
        parts = [column_values(table, one, f"{dataset.meta.root!r}") for table in tables]
        values = np.concatenate([np.asarray(part).reshape(len(part), -1) for part in parts]).astype(np.float64)
        found[one.name] = Range(
            feature=one.name,
            names=number_names(one),
            low=values.min(axis=0),
            mean=values.mean(axis=0),
            std=values.std(axis=0),
            high=values.max(axis=0),
            source=source,
        )
    return found


def try_ranges(dataset: Dataset) -> tuple[tuple[Range, ...], str]:
    """Return the ranges, or none and why they cannot be had: a card shows what it can of a damaged dataset."""
    try:
        return measure_ranges(dataset), ""
    except DatasetError as error:
        return (), str(error)


def range_height(one: Range) -> float:
    """Return the inches that the drawing of a range needs."""
    return 0.75 + 0.19 * min(len(one.names), SHOWN_NUMBERS)


def draw_range(axes: Any, one: Range) -> None:
    """Draw for every number a line from its least to its largest value, and a thick one for a deviation either side."""
    shown = min(len(one.names), SHOWN_NUMBERS)
    places = np.arange(shown)
    low, mean, std, high = (values[:shown] for values in (one.low, one.mean, one.std, one.high))
    axes.hlines(places, low, high, color=_LOW, linewidth=2)
    axes.hlines(places, np.maximum(low, mean - std), np.minimum(high, mean + std), color=_HIGH, linewidth=5)
    axes.plot(mean, places, "|", color="black", markersize=7)
    axes.set_yticks(places, [shortened(name, 26) for name in one.names[:shown]], fontsize=7)
    axes.set_ylim(shown - 0.4, -0.6)
    # At the right, since lines of one number may be short and those of the next long.
    ends = zip(low, high, strict=True)
    texts = [f"{one:.4g}" if one == other else f"{one:.4g} to {other:.4g}" for one, other in ends]
    right = axes.twinx()
    right.set_yticks(places, texts, fontsize=7)
    right.set_ylim(axes.get_ylim())
    right.tick_params(length=0)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", color="#eee")
    axes.set_axisbelow(True)
    axes.set_title(f"{one.feature} ({numbers_told(len(one.names), shown)}): {one.source}", fontsize=9, loc="left")
    axes.set_title("least to largest; thick: a standard deviation either side of the mean", fontsize=7, loc="right")
