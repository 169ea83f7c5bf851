"""How well a plan mixes: distinct episodes per batch, how many of them later batches share, and near repeats.

Measures a plan on samples of its steps, and computes what a full shuffle of the same frames would give. Reads no data:
the caller says how many frames half a second has.

A frame has a *near repeat* if another frame of its episode, at most half a second away, comes in one of the next 16
batches of its rank. The two are nearly the same sample, so these batches tell less than as many independent ones:

::

    frame of an episode    40   41   42   43   44   45   46       half a second has 2 frames
    comes in batch         31    9   50    3   26   60   12

    of frame 43, in batch 3, one near frame comes in the batches 4 to 19: 41. Frame 46 is too far away.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError
from raypipe.plan.epoch import EpochPlan, Frames, WorldPlan
from raypipe.plan.keyhash import Ints
from raypipe.plan.lanes import Lane
from raypipe.plan.rates import ragged_arange
from raypipe.plan.spans import anchor_runs, run_frames
from raypipe.text import either

LAGS: Final = (1, 10, 100)

NEAR_BATCHES: Final = 16
"""Next batches in which near repeats count. A momentum of 0.9 averages over some 10 to 20 batches."""

_END_STEPS: Final = 20
"""Batches at either end of an epoch, where the live window fills and empties."""

_MIDDLE_RUNS: Final = 6
_MIDDLE_STEPS: Final = 10
_OVERLAP_PAIRS: Final = 10

_NEAR_SORTED: Final = 1 << 21
"""Frames of live spans to sort for near repeats, over all runs of steps: about half a second."""

_CHANCE_FRAMES: Final = 1 << 20
"""In a larger epoch, every n-th episode is enough for the chance of near repeats, which depends only on the lengths."""

_EPISODE_BITS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Distinct:
    """Distinct episodes, or datasets, per batch, over sampled full batches."""

    mean: float
    """Between the first and the last 20 batches, if an epoch has more than 100."""

    min: int
    first: float
    """Mean of the first 20 batches."""

    last: float
    """Mean of the last 20 full batches."""

    full_shuffle: float
    """Expected under a full shuffle of the same frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearRepeats:
    """Frames with a near one, of the same dataset and episode and of any lap, in one of the next batches."""

    share: float
    """Of the frames of a rank's batch, over sampled full batches."""

    full_shuffle: float
    num_batches: int
    """How many next batches count: 16, or as many as a shorter epoch has; 0 if there is no next batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """What the batches of a plan are made of."""

    local_batch: Distinct
    global_batch: Distinct
    overlap: dict[int, float]
    """By lag: mean number of episodes that a rank's batch shares with its batch that many steps later."""

    overlap_full_shuffle: float

    datasets: Distinct
    """Distinct datasets in a rank's batch."""

    near_repeats: NearRepeats | None = None
    """None if the caller did not say how many frames half a second has."""


def measure_mixing(world: WorldPlan, *, near_frames: Sequence[int] = ()) -> Mixing:
    """Return how well the steps of a plan mix; samples some 100 of them, in about 20 ms a lane.

    `near_frames` is how many frames half a second has, of every dataset; empty: near repeats are not measured.
    """
    num_steps = max(1, world.steps.num_full)
    lanes = [world.plan.lane(lane) for lane in range(world.plan.leg.lanes)]
    runs = [read_episodes(world, lanes, first, stop) for first, stop in _sample_steps(num_steps)]
    local_runs = [_local_batches(run, world.world_size) for run in runs]
    batch, chances = runs[0][0].size, _chances(world.plan)
    local_batch = batch // world.world_size
    robots, spans = [run >> _EPISODE_BITS for run in local_runs], world.plan.queues.spans
    robot_chances = _Chances(spans.dataset.astype(np.int64), spans.count)
    return Mixing(
        local_batch=_summarise(local_runs, chances.distinct(local_batch)),
        global_batch=_summarise([run.reshape(len(run), 1, -1) for run in runs], chances.distinct(batch)),
        overlap=_measure_overlap(world, [lanes[lane] for lane in world.lanes_of(0)], num_steps),
        overlap_full_shuffle=chances.shared(local_batch),
        datasets=_summarise(robots, robot_chances.distinct(local_batch)),
        near_repeats=_measure_near_repeats(world, near_frames) if near_frames else None,
    )


def read_episodes(world: WorldPlan, lanes: Sequence[Lane], first: int, stop: int) -> Ints:
    """Return (S, lanes, frames per lane) numbers, one per episode, of the steps [first, stop)."""
    begin, end = world.steps.position_after(first), world.steps.position_after(stop)
    columns = []
    for lane in lanes:
        span = lane.between(lane.counts(begin), lane.counts(end)).span
        columns.append(_episode_ids(lane.spans.dataset, lane.spans.episode)[span].reshape(stop - first, -1))
    return np.stack(columns, axis=1)


def count_distinct(ids: Ints) -> Ints:
    """Return how many different numbers the last axis holds."""
    ordered = np.sort(ids, axis=-1)
    return np.asarray(1 + (ordered[..., 1:] != ordered[..., :-1]).sum(axis=-1))


def expected_distinct(lengths: Ints, batch: int) -> float:
    """Return how many of the episodes of these lengths a batch of a full shuffle holds, on average."""
    return _Chances(np.arange(len(lengths)), lengths).distinct(batch)


def _sample_steps(num_steps: int) -> list[tuple[int, int]]:
    if num_steps <= 2 * _END_STEPS + _MIDDLE_RUNS * _MIDDLE_STEPS:
        return [(0, num_steps)]
    middle = np.linspace(_END_STEPS, num_steps - _END_STEPS - _MIDDLE_STEPS, _MIDDLE_RUNS).astype(int).tolist()
    runs = [(first, first + _MIDDLE_STEPS) for first in middle]
    return [(0, _END_STEPS), *runs, (num_steps - _END_STEPS, num_steps)]


def _local_batches(run: Ints, world_size: int) -> Ints:
    # Rank r has the lanes r, r + W, ...
    return np.stack([run[:, rank::world_size].reshape(len(run), -1) for rank in range(world_size)], axis=1)


def _summarise(runs: Sequence[Ints], full_shuffle: float) -> Distinct:
    counts = [count_distinct(run) for run in runs]
    middle = counts[1:-1] or counts
    return Distinct(
        mean=float(np.concatenate(middle).mean()),
        min=int(np.concatenate(counts).min()),
        first=float(counts[0][:_END_STEPS].mean()),
        last=float(counts[-1][-_END_STEPS:].mean()),
        full_shuffle=full_shuffle,
    )


def _measure_overlap(world: WorldPlan, lanes: Sequence[Lane], num_steps: int) -> dict[int, float]:
    overlap = {}
    for lag in (lag for lag in LAGS if lag < num_steps):
        firsts = np.unique(np.linspace(0, num_steps - 1 - lag, _OVERLAP_PAIRS).astype(int)).tolist()
        pairs = [[read_episodes(world, lanes, step, step + 1) for step in (first, first + lag)] for first in firsts]
        overlap[lag] = float(np.mean([len(np.intersect1d(one, other)) for one, other in pairs]))
    return overlap


def _measure_near_repeats(world: WorldPlan, near_frames: Sequence[int]) -> NearRepeats:
    """Return the near repeats of rank 0."""
    names, num_steps = world.plan.index.dataset_names, world.steps.num_full
    if len(near_frames) != len(names):
        raise ConfigError(
            f"near_frames={tuple(near_frames)} must have a number for "
            f"{either(len(names), 'the dataset', f'each of {len(names)} datasets')}"
        )
    near, num_batches = np.array(near_frames, dtype=np.int64), max(0, min(NEAR_BATCHES, num_steps - 1))
    drawn = num_batches * world.batch_size
    found = [_find_near_repeats(world, near, steps, num_batches) for steps in _sample_followed(world, num_batches)]
    return NearRepeats(
        share=float(np.concatenate(found).mean()) if found else 0.0,
        full_shuffle=_expected_near_repeats(world.plan, near, drawn),
        num_batches=num_batches,
    )


def _sample_followed(world: WorldPlan, num_batches: int) -> list[tuple[int, int]]:
    """Return runs of steps, evenly spread over those that `num_batches` full batches follow."""
    if not num_batches:
        return []
    num_steps, plan = world.steps.num_full - num_batches, world.plan
    live = min(1.0, plan.leg.live_spans / int(plan.spans_per_lane[0])) * int(plan.frames_per_lane[0])
    num_runs = int(min(_MIDDLE_RUNS, max(1, _NEAR_SORTED // (live * len(world.lanes_of(0))))))
    if num_steps <= num_runs * _MIDDLE_STEPS:
        return [(0, num_steps)]
    firsts = ((np.arange(num_runs) + 0.5) / num_runs * (num_steps - _MIDDLE_STEPS)).astype(int).tolist()
    return [(first, first + _MIDDLE_STEPS) for first in firsts]


def _find_near_repeats(world: WorldPlan, near: Ints, steps: tuple[int, int], num_batches: int) -> NDArray[np.bool_]:
    """Return, for every frame of rank 0 in these steps, whether a near one comes in the next `num_batches` batches."""
    first, stop = steps
    begin, end = world.steps.position_after(first), world.steps.position_after(stop + num_batches)
    lanes = [world.plan.lane(number) for number in world.lanes_of(0)]
    frames = Frames.concat([world.lane_frames(lane, begin, end) for lane in lanes])
    batch = np.tile(np.arange(end - begin) // world.steps.per_lane, len(lanes))
    # All frames lie on one axis, with a gap after each episode that is too wide for near frames.
    _, number = np.unique(_episode_ids(frames.dataset, frames.episode), return_inverse=True)
    place = number * (int(frames.frame.max()) + int(near.max()) + 1) + frames.frame
    order = np.argsort(place, kind="stable")
    place, batch, reach = place[order], batch[order], near[frames.dataset[order]]
    is_found = np.zeros(len(place), dtype=np.bool_)
    for apart in range(1, len(place)):
        is_near = place[apart:] - place[:-apart] <= reach[:-apart]
        if not is_near.any():
            break
        later = batch[apart:] - batch[:-apart]
        is_close = is_near & (np.abs(later) <= num_batches)
        is_found[:-apart] |= is_close & (later > 0)
        is_found[apart:] |= is_close & (later < 0)
    return is_found[batch < stop - first]


def _expected_near_repeats(plan: EpochPlan, near: Ints, num_drawn: int) -> float:
    """Return the chance that one of the frames near a frame is among `num_drawn` of the others of an epoch.

    All n of them are missed with a chance of (1 - D / (N - 1)) (1 - D / (N - 2)) ... (1 - D / (N - n)).
    """
    num_frames = _count_near_frames(plan, near)
    others = plan.index.num_frames - 1 - np.arange(len(num_frames) - 1)
    missed = np.append(1.0, np.cumprod(np.maximum(0.0, 1 - num_drawn / others)))
    return float(((1 - missed) * num_frames).sum() / num_frames.sum())


def _count_near_frames(plan: EpochPlan, near: Ints) -> NDArray[np.float64]:
    """Return how many frames of an epoch have n others near them, for n = 0, 1, ..."""
    runs = anchor_runs(plan.index, plan.keys)
    _, number = np.unique(_episode_ids(runs.dataset, runs.episode), return_inverse=True)
    kept = number % (1 + plan.index.num_frames // _CHANCE_FRAMES) == 0
    runs = runs.take(kept)
    _, first, number = np.unique(number[kept], return_index=True, return_inverse=True)
    # Every episode has its own part of one axis, with a margin on either side into which near frames may reach.
    margin, length = int(near.max()), np.zeros(len(first), dtype=np.int64)
    np.maximum.at(length, number, runs.stop)
    begin = np.cumsum(length + 2 * margin) - (length + margin)
    # How often the epoch has each frame: more than once if it takes several laps.
    owner, frame = run_frames(runs, plan.keys)
    times = np.bincount(begin[number[owner]] + frame, minlength=int((length + 2 * margin).sum()) + 1)
    before = np.append(0, np.cumsum(times))
    place, reach = ragged_arange(begin, length), np.repeat(near[runs.dataset[first]], length)
    place, reach = place[times[place] > 0], reach[times[place] > 0]
    others = before[place + reach + 1] - before[place - reach] - 1
    return np.bincount(others, weights=times[place].astype(np.float64)).astype(np.float64)


def _chances(plan: EpochPlan) -> "_Chances":
    """Return the chances of the episodes; for a mixture or with rates, of those that the epoch takes."""
    if plan.index.shares is None and plan.index.rates is None:
        index = plan.index
        return _Chances(_episode_ids(index.dataset, index.episode), index.stop - index.start)
    spans = plan.queues.spans
    return _Chances(_episode_ids(spans.dataset, spans.episode), spans.count)


class _Chances:
    """What batches of a full shuffle hold: a group is absent if each of B draws without replacement misses it."""

    def __init__(self, group: Ints, num_frames: Ints) -> None:
        _, number = np.unique(group, return_inverse=True)
        frames = np.bincount(number, weights=num_frames).astype(np.int64)
        self._lengths, self._num_groups = np.unique(frames, return_counts=True)
        self._num_frames = int(num_frames.sum())

    def distinct(self, batch: int) -> float:
        """Return the expected number of different groups in a batch."""
        return float((self._num_groups * self._present(batch)).sum())

    def shared(self, batch: int) -> float:
        """Return about how many groups two batches have in common."""
        return float((self._num_groups * self._present(batch) ** 2).sum())

    def _present(self, batch: int) -> NDArray[np.float64]:
        missed = np.ones(len(self._lengths))
        for drawn in range(min(batch, self._num_frames)):
            missed *= np.maximum(0.0, 1 - self._lengths / (self._num_frames - drawn))
        return 1 - missed


def _episode_ids(dataset: NDArray[np.int32], episode: Ints) -> Ints:
    return (dataset.astype(np.int64) << _EPISODE_BITS) | episode
