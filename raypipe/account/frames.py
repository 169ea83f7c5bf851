"""Frames of accounts: one integer for every frame of every dataset of a run, and multisets of these integers as runs.

::

    dataset 0                                dataset 1
    episode 0   episode 1      episode 4     episode 0
    0 ... 9     10 ... 24      25 ... 31     2**40 ... 2**40 + 7         numbered by the lengths of the episodes

Within a dataset the number is LeRobot's `index`, if the dataset counts as LeRobot does, so a person can look it up.
Consecutive frames of an episode have consecutive numbers, so an episode is one run. An epoch of a mixture, or one with
weights, may go through several laps of a dataset. The numbers of each lap follow those of the lap before, so a frame
that comes twice has two numbers.

An account stores runs instead of a row per frame. Runs have one canonical form (ascending, disjoint, none that could be
joined), so equal multisets are equal values. All operations are vectorised and cost a sort of the runs.

::

    values     4 5 6 7 7 8 8 12
    start      4   7   12
    stop       7   9   13
    times      1   2    1
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError
from raypipe.plan import EpisodeIndex, Ints, OrderSpec, anchor_runs, first_laps, make_keys, ragged_arange, run_frames
from raypipe.text import frames_text

DATASET_BITS: Final = 40
"""Bits for the frames of one dataset; they leave 23 bits for datasets."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """A multiset that has every value of ``[start[i], stop[i])`` ``times[i]`` times.

    Create it with the functions of this module, which keep the canonical form. ``len`` counts runs.
    """

    start: Ints
    stop: Ints
    times: Ints

    def __len__(self) -> int:
        return len(self.start)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Runs):
            return NotImplemented
        pairs = ((self.start, other.start), (self.stop, other.stop), (self.times, other.times))
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_values(self) -> int:
        """Number of values, counting repetitions."""
        return int(((self.stop - self.start) * self.times).sum())

    def times_of(self, values: Ints) -> Ints:
        """Return how often each of `values` is in the multiset."""
        if not len(self):
            return np.zeros(len(values), dtype=np.int64)
        place = np.searchsorted(self.start, values, side="right") - 1
        is_inside = (place >= 0) & (values < self.stop[place])
        return np.where(is_inside, self.times[place], 0)

    def values(self) -> Ints:
        """Return all values, ascending and with repetitions; for small multisets."""
        length = self.stop - self.start
        return np.repeat(ragged_arange(self.start, length), np.repeat(self.times, length))

    def intersect(self, other: "Runs") -> "Runs":
        """Return the intersection: every value as often as in the one that has it less often."""
        return _combine(self, other, np.minimum)

    def unite(self, other: "Runs") -> "Runs":
        """Return the union: every value as often as in the one that has it more often."""
        return _combine(self, other, np.maximum)

    def within(self, other: "Runs") -> "Runs":
        """Return the values that `other` also has, as often as here."""
        return _combine(self, other, lambda x, y: np.where(y > 0, x, 0))

    def once(self) -> "Runs":
        """Return every value once."""
        return count_ranges(self.start, self.stop)


def empty_runs() -> Runs:
    """Return the multiset without values."""
    nothing = np.empty(0, dtype=np.int64)
    return Runs(nothing, nothing, nothing)


def count_values(values: Ints) -> Runs:
    """Return the multiset of values in any order, with repetitions."""
    ordered = np.sort(np.asarray(values, dtype=np.int64))
    if not len(ordered):
        return empty_runs()
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    value, times = ordered[first], np.diff(np.append(first, len(ordered)))
    begin = np.flatnonzero(np.append(True, (value[1:] != value[:-1] + 1) | (times[1:] != times[:-1])))
    last = np.append(begin[1:], len(value)) - 1
    return Runs(value[begin], value[last] + 1, times[begin])


def count_ranges(start: Ints, stop: Ints) -> Runs:
    """Return the multiset of ranges ``[start[i], stop[i])`` in any order; they may overlap and be empty."""
    return make_runs(start, stop, np.ones(len(start), dtype=np.int64))


def make_runs(start: Ints, stop: Ints, times: Ints) -> Runs:
    """Return the multiset of weighted ranges, which may overlap, in canonical form."""
    points, place = np.unique(np.concatenate([start, stop]), return_inverse=True)
    changes = np.zeros(len(points), dtype=np.int64)
    # Not a weighted `bincount`, which adds floats.
    np.add.at(changes, place[: len(start)], times)
    np.subtract.at(changes, place[len(start) :], times)
    return _from_levels(points, np.cumsum(changes))


def add_runs(*runs: Runs) -> Runs:
    """Return the sum of multisets: every value as often as in all of them together."""
    present = [one for one in runs if len(one)]
    if len(present) < 2:
        return present[0] if present else empty_runs()
    return make_runs(*(np.concatenate([getattr(one, name) for one in present]) for name in ("start", "stop", "times")))


def subtract_runs(a: Runs, b: Runs) -> Runs:
    """Return the values that `a` has more often than `b`, as often as the difference."""
    return _combine(a, b, lambda x, y: np.maximum(x - y, 0))


def _combine(a: Runs, b: Runs, times: Callable[[Ints, Ints], Ints]) -> Runs:
    points = np.unique(np.concatenate([a.start, a.stop, b.start, b.stop]))
    return _from_levels(points, times(a.times_of(points), b.times_of(points)))


def _from_levels(points: Ints, levels: Ints) -> Runs:
    """Return the multiset that has every value from ``points[i]`` up to the next point ``levels[i]`` times."""
    is_change: NDArray[np.bool_] = levels != np.append(0, levels[:-1])
    points, levels = points[is_change], levels[is_change]
    if not len(points):
        return empty_runs()
    assert levels[-1] == 0, f"runs do not end: level {levels[-1]} after {points[-1]}"
    is_run = levels[:-1] > 0
    return Runs(points[:-1][is_run], points[1:][is_run], levels[:-1][is_run])


def frame_numbers(dataset: NDArray[Any] | int, index: Ints) -> Ints:
    """Return the numbers of frames on the axis of accounts.

    Args:
        dataset: position of the dataset in the mixture; one for all frames, or one for each.
        index: dataset-wide frame numbers, counted by the lengths of the episodes in ascending order.
    """
    return np.asarray((np.asarray(dataset, dtype=np.int64) << DATASET_BITS) | index)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRange:
    """Consecutive frames, in the terms that a user knows."""

    dataset: str
    episode: int
    """LeRobot's `episode_index`; -1 for frames that no dataset of the run has."""

    start: int
    stop: int
    """Frame numbers within the episode; numbers on the axis if `episode` is -1."""

    times: int = 1
    lap: int = 0
    """The lap of the dataset in the epoch, counted from 0; in a mixture or with weights."""

    @property
    def num_frames(self) -> int:
        """Number of frames, each counted `times` times."""
        return (self.stop - self.start) * self.times

    def describe(self) -> str:
        """Return the frames in words."""
        often = f" ({self.times} times)" if self.times > 1 else ""
        often += f" in lap {self.lap + 1} of the epoch" if self.lap else ""
        frames = frames_text(self.start, self.stop)
        if self.episode < 0:
            return f"no dataset of the run has {frames} of the axis{often}"
        place = f"episode {self.episode}" + (f" of {self.dataset!r}" if self.dataset else "")
        return f"{place}: {frames}{often}"


@dataclass(frozen=True, kw_only=True)
class FrameAxis:
    """The position on the axis of every episode of every dataset of a run, as columns; see `lay_out`."""

    names: tuple[str, ...]
    dataset: Ints
    episode: Ints
    first: Ints
    """Number of the episode's frame 0; ascending."""

    length: Ints

    has_laps: bool = False
    """Whether an epoch may go through more than one lap of a dataset."""

    @cached_property
    def sizes(self) -> Ints:
        """Number of frames of every dataset, selected or not."""
        sizes = np.zeros(len(self.names), dtype=np.int64)
        np.add.at(sizes, self.dataset, self.length)
        return sizes

    def starts_of(self, dataset: NDArray[Any], episode: Ints, lap: Ints | int = 0) -> Ints:
        """Return the number of frame 0 of each of these episodes, in laps counted from the first of the epoch.

        Raises:
            DatasetError: the datasets have no such episode.
        """
        begins = np.searchsorted(self.dataset, np.arange(len(self.names) + 1))
        starts = np.empty(len(episode), dtype=np.int64)
        for number in np.unique(dataset).tolist():
            begin, end = begins[number], begins[number + 1]
            mine = dataset == number
            row = begin + np.searchsorted(self.episode[begin:end], episode[mine])
            is_known = row < end
            is_known &= self.episode[np.minimum(row, len(self.episode) - 1)] == episode[mine]
            if not is_known.all():
                unknown = int(episode[mine][~is_known][0])
                raise DatasetError(f"dataset {self.names[number]!r} has no episode {unknown}; the plan has")
            starts[mine] = self.first[row]
        return np.asarray(starts + self.sizes[dataset] * lap)

    def expected(self, index: EpisodeIndex, spec: OrderSpec, epoch: int) -> Runs:
        """Return the frames that an epoch must emit: the anchors of an index by rate, or the shares of a mixture."""
        keys = make_keys(index, spec, epoch)
        runs = anchor_runs(index, keys)
        dataset = index.dataset[runs.row]
        start = self.starts_of(dataset, index.episode[runs.row], runs.lap - first_laps(index, epoch)[dataset])
        if index.rates is None:
            return count_ranges(start + runs.start, start + runs.stop)
        owner, frame = run_frames(runs, keys)
        return count_values(start[owner] + frame)

    def name_of(self, dataset: int) -> str:
        """Return the name of a dataset for messages; empty for a single dataset."""
        if not 0 <= dataset < len(self.names):
            return f"dataset {dataset}, which the run does not have"
        return self.names[dataset] if len(self.names) > 1 else ""

    def name_frames(self, runs: Runs) -> tuple[FrameRange, ...]:
        """Return runs as frames of episodes; a run over several episodes becomes several ranges."""
        ranges: list[FrameRange] = []
        for start, stop, times in zip(runs.start.tolist(), runs.stop.tolist(), runs.times.tolist(), strict=True):
            begin = start
            while begin < stop:
                ranges.append(self._name_first(begin, stop, times))
                begin += ranges[-1].stop - ranges[-1].start
        return tuple(ranges)

    def _name_first(self, start: int, stop: int, times: int) -> FrameRange:
        """Return the first frames of ``[start, stop)`` that lie in one episode, or in none."""
        dataset, place = start >> DATASET_BITS, start & ((1 << DATASET_BITS) - 1)
        size = int(self.sizes[dataset]) if self.has_laps and dataset < len(self.names) else 0
        lap = place // size if size else 0
        row = int(np.searchsorted(self.first, start - lap * size, side="right")) - 1
        first = int(self.first[row]) + lap * size if row >= 0 else 0
        end = first + int(self.length[row]) if row >= 0 else 0
        if row < 0 or start >= end:
            following = int(self.first[row + 1]) if row + 1 < len(self.first) else stop
            return FrameRange(dataset="", episode=-1, start=start, stop=min(stop, following), times=times)
        return FrameRange(
            dataset=self.name_of(int(self.dataset[row])),
            episode=int(self.episode[row]),
            start=start - first,
            stop=min(stop, end) - first,
            times=times,
            lap=lap,
        )


def lay_out(names: Sequence[str], episodes: Sequence[tuple[Ints, Ints]], *, has_laps: bool = False) -> FrameAxis:
    """Return the axis of datasets.

    Args:
        episodes: per dataset, the ascending numbers of all its episodes, selected or not, and their lengths.
        has_laps: whether an epoch may go through a dataset more than once, as in a mixture.
    """
    firsts = [frame_numbers(i, np.cumsum(length) - length) for i, (_, length) in enumerate(episodes)]
    return FrameAxis(
        names=tuple(names),
        dataset=np.repeat(np.arange(len(episodes)), [len(number) for number, _ in episodes]),
        episode=np.concatenate([np.asarray(number, dtype=np.int64) for number, _ in episodes]),
        first=np.concatenate(firsts),
        length=np.concatenate([np.asarray(length, dtype=np.int64) for _, length in episodes]),
        has_laps=has_laps,
    )
