"""Represent multisets of integers as runs, which an account stores instead of a row per frame.

::

    values     4 5 6 7 7 8 8 12
    start      4   7   12
    stop       7   9   13
    times      1   2    1

Runs have one canonical form (ascending, disjoint, none that could be joined), so equal multisets are equal values. All
operations are vectorised and cost a sort of the runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raypipe.plan import Ints, ragged_arange


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
        return (
            np.array_equal(self.start, other.start)
            and np.array_equal(self.stop, other.stop)
            and np.array_equal(self.times, other.times)
        )

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
    return _from_changes(start, stop, np.ones(len(start), dtype=np.int64))


def make_runs(start: Ints, stop: Ints, times: Ints) -> Runs:
    """Return the multiset of weighted ranges, which may overlap, in canonical form."""
    return _from_changes(start, stop, times)


def add_runs(*runs: Runs) -> Runs:
    """Return the sum of multisets: every value as often as in all of them together."""
    present = [one for one in runs if len(one)]
    if len(present) < 2:
        return present[0] if present else empty_runs()
    return _from_changes(
        np.concatenate([one.start for one in present]),
        np.concatenate([one.stop for one in present]),
        np.concatenate([one.times for one in present]),
    )


def subtract_runs(a: Runs, b: Runs) -> Runs:
    """Return the values that `a` has more often than `b`, as often as the difference."""
    return _combine(a, b, lambda x, y: np.maximum(x - y, 0))


def intersect_runs(a: Runs, b: Runs) -> Runs:
    """Return the intersection: every value as often as in the one that has it less often."""
    return _combine(a, b, np.minimum)


def unite_runs(a: Runs, b: Runs) -> Runs:
    """Return the union: every value as often as in the one that has it more often."""
    return _combine(a, b, np.maximum)


def keep_values(a: Runs, b: Runs) -> Runs:
    """Return the values of `a` that `b` also has, as often as `a` has them."""
    return _combine(a, b, lambda x, y: np.where(y > 0, x, 0))


def runs_beyond_once(a: Runs) -> Runs:
    """Return the repetitions of values beyond the first."""
    return _combine(a, empty_runs(), lambda x, _: np.maximum(x - 1, 0))


def runs_once(a: Runs) -> Runs:
    """Return every value of `a` once."""
    return _combine(a, empty_runs(), lambda x, _: np.minimum(x, 1))


def _combine(a: Runs, b: Runs, times: Callable[[Ints, Ints], Ints]) -> Runs:
    points = np.unique(np.concatenate([a.start, a.stop, b.start, b.stop]))
    return _from_levels(points, times(a.times_of(points), b.times_of(points)))


def _from_changes(start: Ints, stop: Ints, times: Ints) -> Runs:
    points, place = np.unique(np.concatenate([start, stop]), return_inverse=True)
    changes = np.zeros(len(points), dtype=np.int64)
    # Not a weighted `bincount`, which adds floats.
    np.add.at(changes, place[: len(start)], times)
    np.subtract.at(changes, place[len(start) :], times)
    return _from_levels(points, np.cumsum(changes))


def _from_levels(points: Ints, levels: Ints) -> Runs:
    """Return the multiset that has every value from ``points[i]`` up to the next point ``levels[i]`` times."""
    is_change: NDArray[np.bool_] = levels != np.append(0, levels[:-1])
    points, levels = points[is_change], levels[is_change]
    if not len(points):
        return empty_runs()
    assert levels[-1] == 0, f"runs do not end: level {levels[-1]} after {points[-1]}"
    is_run = levels[:-1] > 0
    return Runs(points[:-1][is_run], points[1:][is_run], levels[:-1][is_run])
