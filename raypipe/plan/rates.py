"""How often an epoch has each frame: every n-th frame, and weights, as exact counts.

On average, a frame of weight w comes w / (sum of all weights) * N times in an epoch. N is the number of frames of the
epoch: those of a weight above 0, or every n-th of them. An epoch cannot have two thirds of a frame. So the frames lie
one after the other on an axis, each as long as its rate, with N marks on it, one apart. An epoch takes a frame as often
as a mark falls on it. The first mark is the *phase* of the epoch, between 0 and 1:

::

    rate         1/2  1/2  1/2  1/2    3/2        3/2         N = 5
    axis         |----|----|----|----|--------------|--------------|
    epoch 0      ^         ^         ^         ^         ^           0 2 4 4 5
    epoch 1           ^         ^         ^         ^         ^      1 3 4 5 5

So an epoch always has N frames. Every frame, every episode, and all episodes of one weight together (they lie side by
side) get their part of N, give or take one frame; a frame of weight 0 never comes. The phase starts at a hash of the
seed and moves on by the golden ratio each epoch, so every phase is equally likely. Over epochs a frame comes as often
as its rate says, give or take a few, and gets there sooner than with random phases. All of it is a closed form of
(weights, seed, epoch): nothing is drawn, and a state needs only the epoch. Every n-th frame is the same with equal
weights and a smaller N.

**Laps tell the times of a frame apart.** A frame that comes three times comes in the *parts* 0, 1 and 2 of the epoch.
Each part is a lap of its own: lap = epoch * parts + part. A part has spans like any lap, without the frames that come
less often. So hashes, lanes, live windows, legs and resume work as they do without weights. Each time of a frame has
its own place in the order and its own ``augment_seed``, and is decoded separately. A dataset of a mixture has N frames
in each lap of its endless sequence, and shares are cut from it as usual.

**Exactly once** then means: each frame exactly as often as the plan says. The axis of accounts has a number for each
time of a frame, as it has for the laps of a mixture, so an account names each missing or surplus frame.

**The state** needs nothing more: the digest of the selection covers the rates. In the middle of an epoch a resume
refuses other weights, as it refuses another selection. Between epochs weights may change; those of a mixture may change
as its shares may.

Everything is an integer, in units of 2**-24 of a time: floats add up differently on different machines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nextafter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError
from raypipe.plan.keyhash import Ints, OrderKeys
from raypipe.text import counted

_UNIT_BITS: Final = 24
_WHOLE: Final = 1 << _UNIT_BITS
"""Units of a frame that comes once in every epoch."""

_WEIGHT_BITS: Final = 30
"""Weights become whole numbers, the largest of them 2**30."""

_MOST_FRAMES: Final = 1 << 31
"""Keeps the arithmetic within 64 bits; at 30 fps it is two years."""

_FRAMES_AT_ONCE: Final = 1 << 20
"""Bounds the memory of counting unlike frames to some 100 MB."""

_FRAME_BITS: Final = 24
"""Bits of a frame's number in its episode."""

_COLUMNS: Final = ("dataset", "start", "units", "before", "place", "spare", "num_frames", "most", "parts")


@dataclass(frozen=True, kw_only=True, eq=False)
class Rates:
    """How often a lap has the frames of an index, as columns with an entry for every run of it."""

    dataset: NDArray[np.int32]
    start: Ints

    units: Ints
    """Units of each frame of a run with one rate; `spare` more are spread over the frames of the dataset."""

    before: Ints
    """Units of the dataset's axis before the run, without what is spread."""

    place: Ints
    """Frames of the dataset's axis before the run."""

    spare: Ints
    num_frames: Ints
    """Units to spread in the run's dataset, and the number of frames to spread them over."""

    most: Ints
    """The most times that a lap has a frame of the run."""

    parts: Ints
    """The most times that a lap has a frame of the run's dataset."""

    offset: Ints
    """Where the frames of the run begin in `ends`; -1 if they all have one rate."""

    ends: Ints
    """Units of the axis before every frame of a run of unlike frames, and up to the end of its last one."""

    sizes: tuple[int, ...]
    """Frames of a lap of every dataset."""

    def position(self, row: Ints, frame: Ints) -> Ints:
        """Return how many units of the axis lie before each frame; the frame after a run's last gives the run's end."""
        at = frame - self.start[row]
        spread = (self.place[row] + at) * self.spare[row] // self.num_frames[row]
        position = self.before[row] + at * self.units[row] + spread
        unlike = np.flatnonzero(self.offset[row] >= 0)
        position[unlike] = self.ends[self.offset[row[unlike]] + at[unlike]]
        return np.asarray(position)

    @cached_property
    def often(self) -> tuple[Ints, Ints]:
        """Frames of unlike runs that may come more than once, by run, the most frequent first; and their sort keys."""
        most = -(-np.diff(self.ends, append=0) // _WHOLE)
        unlike, place = np.flatnonzero(self.offset >= 0), np.flatnonzero(most > 1)
        row = unlike[np.searchsorted(self.offset[unlike], place, side="right") - 1]
        frame, key = self.start[row] + place - self.offset[row], self._often_key(row, most[place])
        order = np.argsort(key, kind="stable")
        return frame[order], key[order]

    def often_between(self, row: Ints, part: Ints) -> tuple[Ints, Ints]:
        """Return which of `often` the parts of unlike runs may have, for parts above 0: ``[first, stop)`` of each."""
        keys = self.often[1]
        first = np.searchsorted(keys, self._often_key(row, self.most.max()))
        return first, np.searchsorted(keys, self._often_key(row, part))

    def _often_key(self, row: Ints, times: Ints) -> Ints:
        most = self.most.max()
        return np.asarray(row * (most + 1) + most - times)

    @property
    def laps(self) -> Ints:
        """How many laps of the order an epoch, or a lap of a mixture, has of every dataset: one for each part."""
        laps = np.ones(len(self.sizes), dtype=np.int64)
        laps[self.dataset] = self.parts
        return laps

    def digest_columns(self) -> tuple[NDArray[Any], ...]:
        """Return what decides the rates, for a digest."""
        return self.units, self.before, self.spare, self.offset, self.ends, np.array(self.sizes, dtype=np.int64)


def make_rates(name: str, start: Ints, stop: Ints, weights: NDArray[np.float64], every: int) -> Rates | None:
    """Return the rates of one dataset; None if a lap has every frame of the runs once.

    Args:
        weights: one for every run, above 0, or one for every frame of the runs, some of each above 0.
        every: a lap has one frame in this many.

    Raises:
        ConfigError: no frame is left, or there are too many.
    """
    if every == 1 and weights.min() == weights.max():
        return None
    total = int((stop - start).sum() if len(weights) == len(start) else (weights > 0).sum())
    if total < every:
        raise ConfigError(
            f"every={every} leaves no frame of dataset {name!r}: the selection has {counted(total, 'frame')}"
        )
    if total >= _MOST_FRAMES:
        raise ConfigError(f"weights and every are for less than {_MOST_FRAMES:,} frames, and {name!r} has {total:,}")
    return _lay_out(start, stop - start, weights, total // every)


def _lay_out(start: Ints, length: Ints, weights: NDArray[np.float64], size: int) -> Rates:
    """Return the rates of runs of which a lap has `size` frames."""
    is_by_run = len(weights) == len(length)
    each = length if is_by_run else (weights > 0).astype(np.int64)
    total = int(each.sum())
    units, spare = _as_units(weights, each, size)
    zeros = np.zeros(len(length), dtype=np.int64)
    columns = {"units": units, "before": zeros, "place": zeros, "offset": zeros - 1, "ends": zeros[:0]}
    if is_by_run:
        # Runs of one rate lie side by side on the axis, so together they also get their exact part.
        order = np.argsort(units, kind="stable")
        columns["before"], columns["place"] = _before(units * length, order), _before(length, order)
        most = (units >> _UNIT_BITS) + ((units % _WHOLE > 0) | (spare > 0))
    else:
        ends = np.append(0, np.cumsum(units)) + np.append(0, np.cumsum(each)) * spare // total
        # One more entry per run, for the end of its last frame.
        first = np.cumsum(length) - length
        offset, ends = first + np.arange(len(length)), ends[ragged_arange(first, length + 1)]
        columns |= {"units": zeros, "offset": offset, "ends": ends}
        # The gap between the end of a run and the start of the next is not a frame.
        between = np.diff(ends, append=0)
        between[offset + length] = 0
        most = -(-np.maximum.reduceat(between, offset) // _WHOLE)
    return Rates(
        dataset=zeros.astype(np.int32),
        start=start,
        spare=zeros + spare,
        num_frames=zeros + total,
        most=most,
        parts=zeros + most.max(),
        sizes=(size,),
        **columns,
    )


def concat_rates(rates: Sequence[Rates | None], runs: Sequence[tuple[Ints, Ints]]) -> Rates | None:
    """Return the rates of datasets with these first frames and ends of runs as one; None if no dataset has rates."""
    if all(one is None for one in rates):
        return None
    every = [
        one or _lay_out(start, stop - start, np.ones(len(start)), int((stop - start).sum()))
        for one, (start, stop) in zip(rates, runs, strict=True)
    ]
    columns = {name: np.concatenate([getattr(one, name) for one in every]) for name in _COLUMNS if name != "dataset"}
    number = np.repeat(np.arange(len(every), dtype=np.int32), [len(one.start) for one in every])
    begins = np.cumsum([0, *(len(one.ends) for one in every)])
    offsets = [np.where(one.offset < 0, -1, one.offset + begin) for one, begin in zip(every, begins, strict=False)]
    return Rates(
        dataset=number,
        offset=np.concatenate(offsets),
        ends=np.concatenate([one.ends for one in every]),
        sizes=tuple(size for one in every for size in one.sizes),
        **columns,
    )


def mean_times(rates: Rates, length: Ints) -> tuple[NDArray[np.float64], Ints]:
    """Return the mean times of frames in a lap, and how many frames have them: per run, or per frame of unlike runs."""
    alike, unlike = np.flatnonzero(rates.offset < 0), np.flatnonzero(rates.offset >= 0)
    row = np.repeat(unlike, length[unlike])
    frame = ragged_arange(rates.start[unlike], length[unlike])
    units = rates.position(row, frame + 1) - rates.position(row, frame)
    spread = rates.spare[alike] / rates.num_frames[alike]
    times = np.concatenate([rates.units[alike] + spread, units[units > 0]]) / _WHOLE
    return times, np.concatenate([length[alike], np.ones(int((units > 0).sum()), dtype=np.int64)])


def times_taken(rates: Rates, keys: OrderKeys, row: Ints, lap: Ints, frame: Ints) -> Ints:
    """Return how often each frame comes in the epoch, or lap of a mixture, to which a lap of the order belongs."""
    return _marks_between(rates, keys, row, lap, frame, frame + 1)


def count_taken(rates: Rates, keys: OrderKeys, row: Ints, lap: Ints, start: Ints, stop: Ints) -> Ints:
    """Return how many frames of each ``[start, stop)`` of a run are in the lap; a closed form if they have one rate."""
    is_unlike, counts = rates.offset[row] >= 0, np.zeros(len(row), dtype=np.int64)
    counts[~is_unlike] = _count_alike(rates, keys, *(one[~is_unlike] for one in (row, lap, start, stop)))
    unlike, length = np.flatnonzero(is_unlike), stop - start
    for some in np.array_split(unlike, 1 + int(length[unlike].sum()) // _FRAMES_AT_ONCE):
        owner, _ = list_taken(rates, keys, row[some], lap[some], start[some], stop[some])
        counts[some] = np.bincount(owner, minlength=len(some))
    return counts


def _count_alike(rates: Rates, keys: OrderKeys, row: Ints, lap: Ints, start: Ints, stop: Ints) -> Ints:
    part, whole, length = lap % rates.parts[row], rates.units[row] >> _UNIT_BITS, stop - start
    marks = _marks_between(rates, keys, row, lap, start, stop)
    return np.where(part < whole, length, np.where(part == whole, marks - whole * length, 0))


def list_taken(rates: Rates, keys: OrderKeys, row: Ints, lap: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Return the frames of each ``[start, stop)`` that are in the lap, ascending, after the range each belongs to."""
    owner, frame = _possible_frames(rates, row, lap, start, stop)
    part = (lap % rates.parts[row])[owner]
    taken = times_taken(rates, keys, row[owner], lap[owner], frame) > part
    return owner[taken], frame[taken]


def _possible_frames(rates: Rates, row: Ints, lap: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Return the frames of each ``[start, stop)`` that the lap may have, ascending, after the range each belongs to.

    A frame of a large weight makes a lap for each of its times. Such a lap has few other frames, so this looks only at
    frames that can come often enough.
    """
    part, begin, length = lap % rates.parts[row], start.copy(), stop - start
    some = np.flatnonzero((rates.offset[row] >= 0) & (part > 0))
    first, last = rates.often_between(row[some], part[some])
    is_shorter = last - first < length[some]
    some, first, last = some[is_shorter], first[is_shorter], last[is_shorter]
    begin[some], length[some] = first, last - first
    owner, frame = np.repeat(np.arange(len(row)), length), ragged_arange(begin, length)
    if not len(some):
        return owner, frame
    is_listed = np.zeros(len(row), dtype=np.bool_)
    is_listed[some] = True
    listed = np.flatnonzero(is_listed[owner])
    frame[listed] = rates.often[0][frame[listed]]
    inside = (frame >= start[owner]) & (frame < stop[owner])
    both = np.sort((owner[inside] << _FRAME_BITS) | frame[inside])
    return both >> _FRAME_BITS, both & ((1 << _FRAME_BITS) - 1)


def ragged_arange(start: Ints, length: Ints) -> Ints:
    """Return ``arange(start[i], start[i] + length[i])`` for every i, concatenated."""
    before = np.cumsum(length) - length
    return np.asarray(np.arange(length.sum()) + np.repeat(start - before, length))


def _marks_between(rates: Rates, keys: OrderKeys, row: Ints, lap: Ints, start: Ints, stop: Ints) -> Ints:
    phase = keys.phases(rates.dataset[row], lap // rates.parts[row]) >> np.uint64(64 - _UNIT_BITS)
    begin, end = (rates.position(row, frame) + phase.view(np.int64) for frame in (start, stop))
    return np.asarray((end >> _UNIT_BITS) - (begin >> _UNIT_BITS))


def _as_units(weights: NDArray[np.float64], each: Ints, size: int) -> tuple[Ints, int]:
    """Return the units of a frame of each weight, rounded down, and how many units of a lap are left to spread.

    `each` says how many frames have the weight, and `size` how many a lap has.
    """
    whole = np.rint(weights / weights.max() * (1 << _WEIGHT_BITS)).astype(np.int64)
    whole[weights > 0] = np.maximum(whole[weights > 0], 1)
    ratio = (size << _UNIT_BITS) / int((whole * each).sum())
    units = np.floor(whole * ratio).astype(np.int64)
    while (spare := (size << _UNIT_BITS) - int((units * each).sum())) < 0:
        # The product of floats may have rounded up to a whole number.
        ratio = nextafter(ratio, 0.0)
        units = np.floor(whole * ratio).astype(np.int64)
    return units, spare


def _before(values: Ints, order: Ints) -> Ints:
    before = np.empty(len(values), dtype=np.int64)
    before[order] = np.cumsum(values[order]) - values[order]
    return before
