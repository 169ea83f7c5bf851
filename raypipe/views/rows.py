"""What the rows of a dataset say, for its card: the ranges of its numbers, and the episodes of each task.

Statistics may belong to other data than the rows, so this module first compares them with the rows of a few episodes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import Dataset
from raypipe.errors import DatasetError
from raypipe.format import (
    INDEX_FEATURES,
    DatasetMeta,
    Feature,
    RowReader,
    Stats,
    column_values,
    open_parquet,
    read_parquet,
    read_stats,
)
from raypipe.text import count_whole, counted
from raypipe.validate import bound_room
from raypipe.views.view import numbers_told, shortened, spread

SHOWN_NUMBERS: Final = 48
"""The most numbers drawn of a feature: the first ones."""

_EPISODES_READ: Final = 8
_MOST_ROWS: Final = 50_000
"""The most rows of those episodes; of longer ones it reads fewer episodes."""
_MOST_NUMBERS: Final = 1024
"""If a feature has more, such as points of a scene, its rows are read only if it has no stored statistics."""
STORED: Final = "stored statistics"
_LOW, _HIGH = "#9db7ee", "#3367d6"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Range:
    """The range of every number of a feature."""

    feature: str
    names: tuple[str, ...]
    low: NDArray[np.float64]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    high: NDArray[np.float64]
    source: str
    """Its source in words: `STORED`, or the rows of a number of episodes."""
    constant: tuple[str, ...] = ()
    """Names of the numbers that never change, both in the statistics and in the rows read."""


def number_names(feature: Feature) -> tuple[str, ...]:
    """Return a name for each number of a vector: the dataset's own, or its position."""
    size = int(np.prod(feature.shape))
    return feature.names if len(feature.names) == size else tuple(str(number) for number in range(size))


def vector_features(features: Iterable[Feature]) -> list[Feature]:
    """Return the features with numbers of a robot, without index, text or camera; the action comes first."""
    found = [one for one in features if one.kind == "vector" and one.name not in INDEX_FEATURES]
    return sorted(found, key=lambda one: (one.name != "action", one.name != "observation.state"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """The ranges of a dataset's vectors, and what is wrong with their sources."""

    ranges: tuple[Range, ...]
    errors: tuple[str, ...] = ()
    """Why rows or statistics could not be read."""
    contradicted: tuple[str, ...] = ()
    """Features with stored statistics that contradict the rows read, each with one difference."""


def measure_ranges(dataset: Dataset) -> Measured:
    """Return the ranges of a dataset's vectors: from the stored statistics if the rows agree, else from the rows.

    It reads rows of up to 8 episodes; for remote data only features without statistics. Damage does not raise: a card
    shows what it can of a damaged dataset.
    """
    meta, errors = dataset.meta, []
    stats: Stats = {}
    found: dict[str, NDArray[np.float64]] = {}
    rows = spread(len(meta.episodes), _EPISODES_READ)
    rows = rows[: max(1, int(np.searchsorted(np.cumsum(meta.episodes.length[rows]), _MOST_ROWS, side="right")))]
    try:
        # Read the statistics of actions as stored, because the view compares them with the stored rows.
        stats = read_stats(meta.storage)
    except DatasetError as damage:
        errors.append(str(damage))
    wanted = _floats(dataset.features)
    try:
        wanted = _floats(dataset.row_features)
        small = [one for one in wanted if meta.storage.is_local and np.prod(one.shape) <= _MOST_NUMBERS]
        found = _read_rows(meta, rows, [one for one in wanted if one in small or _stored(stats, one) is None])
    except DatasetError as damage:
        errors.append(str(damage))
    ranges, contradicted = [], []
    for one in wanted:
        known, values, why = _stored(stats, one), found.get(one.name), ""
        if known is not None and values is not None:
            why = _contradiction(known, values, is_all=len(rows) == len(meta.episodes))
        if why:
            contradicted.append(f"{one.name}: {why}")
        if values is not None and (known is None or why):
            reason = "the stored statistics are wrong" if why else "none are stored"
            told = f"the rows of {len(rows)} of {counted(len(meta.episodes), 'episode')}"
            known = _computed(one, values, f"computed here from {told}; {reason}")
        if known is not None:
            ranges.append(known if values is None else replace(known, constant=_constant(known, values)))
    return Measured(ranges=tuple(ranges), errors=tuple(errors), contradicted=tuple(contradicted))


def _floats(features: Mapping[str, Feature]) -> list[Feature]:
    return [one for one in vector_features(features.values()) if np.dtype(one.dtype).kind == "f"]


def _stored(stats: Stats, feature: Feature) -> Range | None:
    found, size = stats.get(feature.name, {}), int(np.prod(feature.shape))
    values = [found[name].ravel() for name in ("min", "mean", "std", "max") if name in found]
    if len(values) < 4 or any(len(one) != size for one in values):
        return None
    low, mean, std, high = values
    names = number_names(feature)
    return Range(feature=feature.name, names=names, low=low, mean=mean, std=std, high=high, source=STORED)


def _read_rows(meta: DatasetMeta, rows: Sequence[int], features: Sequence[Feature]) -> dict[str, NDArray[np.float64]]:
    """Return the numbers of these episodes by feature, ``(rows, numbers)``."""
    if not features or not rows:
        return {}
    reader = RowReader(meta, [one.name for one in features])
    tables, found = [reader.read_episode(row) for row in rows], {}
    for one in features:
        parts = [np.asarray(column_values(table, one, f"{meta.root!r}")) for table in tables]
        found[one.name] = np.concatenate([part.reshape(len(part), -1) for part in parts]).astype(np.float64)
    return found


def _contradiction(stored: Range, values: NDArray[np.float64], *, is_all: bool) -> str:
    """Return how the stored ends contradict the values: they differ, or, unless `is_all`, some values lie beyond."""
    if not stored.names:
        return ""
    room = bound_room(stored.low, stored.high)
    for word, ends, found in (("min", stored.low, values.min(axis=0)), ("max", stored.high, values.max(axis=0))):
        with np.errstate(invalid="ignore"):
            beyond = ends - found if word == "min" else found - ends
        off = (np.abs(beyond) if is_all else beyond) - room
        # Values that are not finite are bad data, which says nothing about the statistics.
        worst = int(np.argmax(np.where(np.isfinite(off), off, -np.inf)))
        if np.isfinite(off[worst]) and off[worst] > 0:
            return f"{word} of {_named(stored.names, worst)} is {ends[worst]:.6g}, that of the rows {found[worst]:.6g}"
    return ""


def _constant(found: Range, values: NDArray[np.float64]) -> tuple[str, ...]:
    is_constant = (found.low == found.high) & (values == values[0]).all(axis=0) & (len(values) > 1)
    return tuple(_named(found.names, number) for number in np.flatnonzero(is_constant).tolist())


def _computed(feature: Feature, values: NDArray[np.float64], source: str) -> Range:
    with np.errstate(invalid="ignore"):
        low, mean, std, high = values.min(axis=0), values.mean(axis=0), values.std(axis=0), values.max(axis=0)
    names = number_names(feature)
    return Range(feature=feature.name, names=names, low=low, mean=mean, std=std, high=high, source=source)


def _named(names: Sequence[str], number: int) -> str:
    # A bare position would read as a count: "never change: 0".
    return f"number {number}" if names[number].isdecimal() else names[number]


def range_height(one: Range) -> float:
    """Return the inches that the drawing of a range needs."""
    return 0.75 + 0.19 * min(len(one.names), SHOWN_NUMBERS)


def draw_range(axes: Any, one: Range) -> None:
    """Draw for every number a line from its least to its largest value, and a thick one for the mean +- one std."""
    shown = min(len(one.names), SHOWN_NUMBERS)
    places = np.arange(shown)
    low, mean, std, high = (values[:shown] for values in (one.low, one.mean, one.std, one.high))
    axes.hlines(places, low, high, color=_LOW, linewidth=2)
    axes.hlines(places, np.maximum(low, mean - std), np.minimum(high, mean + std), color=_HIGH, linewidth=5)
    axes.plot(mean, places, "|", color="black", markersize=7)
    axes.set_yticks(places, [shortened(name, 26) for name in one.names[:shown]], fontsize=7)
    axes.set_ylim(shown - 0.4, -0.6)
    # Write the ends at the right: lines of one number may be short and those of the next long.
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
    axes.set_xlabel("least to largest; thick: a standard deviation either side of the mean", fontsize=7, loc="right")


_MOST_FILES: Final = 1000
"""The most data files to count rows of: about two seconds. With more, or with remote ones, the episode table counts."""

TASKS_SHOWN: Final = 12
_TASK_LETTERS: Final = 44


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCounts:
    """The number of episodes of each task."""

    counts: tuple[tuple[str, int], ...]
    """Texts and numbers of episodes, the most frequent first."""
    is_of_rows: bool = True
    """False if the counts come from the episode table instead of the rows."""
    contradicted: tuple[int, ...] = ()
    """Episodes with a task in their rows that the episode table does not list for them."""
    errors: tuple[str, ...] = ()
    """The errors of unreadable data files; the counts of their episodes come from the table."""


def count_tasks(meta: DatasetMeta) -> TaskCounts:
    """Return every task with the number of episodes that have rows of it; reads one column of the data files.

    If the files are remote or very many, it reads none and takes the tasks from the episode table.
    """
    found = [meta.tasks.named(texts) for texts in meta.episodes.tasks.to_pylist()]
    files: dict[str, list[int]] = defaultdict(list)
    for row in range(len(meta.episodes)):
        files[meta.data_file(row)].append(row)
    is_of_rows = meta.storage.is_local and len(files) <= _MOST_FILES and len(meta.tasks) > 0
    contradicted, errors, known = [], [], set(meta.tasks.texts.values())
    for name, rows in files.items() if is_of_rows else ():
        try:
            # The check of the file list reports missing files.
            tasks = _read_tasks(meta, name, rows) if meta.storage.exists(name) else {}
        except DatasetError as error:
            errors.append(str(error))
            continue
        for row, texts in tasks.items():
            if found[row] and found[row] <= known and not texts <= found[row]:
                contradicted.append(int(meta.episodes.episode_index[row]))
            found[row] = texts
    counts = Counter(dict.fromkeys(meta.tasks.texts.values(), 0))
    counts.update(text for texts in found for text in texts)
    return TaskCounts(
        counts=tuple(counts.most_common()),
        is_of_rows=is_of_rows,
        contradicted=tuple(contradicted),
        errors=tuple(errors),
    )


def _read_tasks(meta: DatasetMeta, name: str, rows: Sequence[int]) -> dict[int, frozenset[str]]:
    """Return the tasks of a data file's episodes, by row of the episode table; none if it lacks the column.

    Raises:
        DatasetError: the file is missing or damaged.
    """
    with open_parquet(meta.storage, name) as parquet:
        columns = [one for one in ("episode_index", "task_index") if parquet.schema_arrow.names.count(one) == 1]
    if "task_index" not in columns or ("episode_index" not in columns and len(rows) > 1):
        return {}
    table = read_parquet(meta.storage, name, columns)
    features = [Feature(name=one, kind="vector", dtype=INDEX_FEATURES[one], shape=(1,)) for one in columns]
    index = {one.name: np.asarray(column_values(table, one, repr(name))) for one in features}
    numbers = meta.episodes.episode_index[list(rows)]
    episode = index.get("episode_index", np.full(len(table), numbers[0]))
    pairs = np.stack([episode, index["task_index"]])
    # Keep only rows where a value changes: of millions, few are left to sort.
    is_new = np.append(True, (np.diff(pairs, axis=1) != 0).any(axis=0))[: pairs.shape[1]]
    pairs = np.unique(pairs[:, is_new], axis=1)
    texts: dict[int, set[str]] = defaultdict(set)
    for number, task in pairs.T.tolist():
        texts[number].add(meta.tasks.texts.get(task, f"task {task}"))
    return {row: frozenset(texts[number]) for row, number in zip(rows, numbers.tolist(), strict=True) if texts[number]}


def is_drawn_whole(task: str) -> bool:
    """Return whether a picture can show the whole text of a task: it is short, and the font has its letters."""
    from raypipe.text import has_letters

    return len(task) <= _TASK_LETTERS and has_letters(task)


def draw_tasks(axes: Any, tasks: Sequence[tuple[str, int]], source: str) -> None:
    """Draw the number of episodes of the most frequent tasks; `source` follows the count of tasks in the title."""
    from raypipe.text import boxes_told

    shown = tasks[:TASKS_SHOWN]
    more = f", the {len(shown)} most frequent" if len(tasks) > len(shown) else ""
    title = f"{counted(len(tasks), 'task')}{source}{more}"
    axes.set_title("; ".join([title, *boxes_told(text for text, _ in shown)]), fontsize=9, loc="left")
    if not shown:
        axes.set_axis_off()
        return
    places = np.arange(len(shown))
    bars = axes.barh(places, [count for _, count in shown], color="#9db7ee")
    axes.bar_label(bars, padding=2, fontsize=7)
    axes.set_yticks(places, [shortened(text or "(no text)", _TASK_LETTERS) for text, _ in shown], fontsize=7)
    axes.set_ylim(max(len(shown), 6) - 0.5, -0.5)
    axes.set_xlabel("episodes")
    axes.margins(x=0.12)
    count_whole(axes.xaxis)
    axes.tick_params(axis="x", labelsize=7)
