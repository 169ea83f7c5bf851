"""How well a plan mixes: distinct episodes per batch, and how many of them batches some steps apart share.

Measures a plan on samples of its steps, and says what a full shuffle of the same frames would give. Reads no data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.epoch import EpochPlan
from raypipe.plan.keyhash import Ints
from raypipe.plan.livewindow import Lane
from raypipe.plan.world import WorldPlan

LAGS: Final = (1, 10, 100)

_END_STEPS: Final = 20
"""Batches at either end of an epoch, where the live window fills and empties."""

_MIDDLE_RUNS: Final = 6
_MIDDLE_STEPS: Final = 10
_OVERLAP_PAIRS: Final = 10

_EPISODE_BITS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Distinct:
    """Distinct episodes, or datasets, per batch, over sampled full batches."""

    mean: float
    """Between the first and the last 20 batches, where an epoch has more than 100."""

    min: int
    first: float
    """Mean of the first 20 batches."""

    last: float
    """Mean of the last 20 full batches."""

    full_shuffle: float
    """Expected under a full shuffle of the same frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """What the batches of a plan are made of."""

    local_batch: Distinct
    global_batch: Distinct
    overlap: dict[int, float]
    """By lag: mean of the episodes that a rank's batch shares with its batch so many steps later."""

    overlap_full_shuffle: float

    datasets: Distinct
    """Distinct datasets in a rank's batch."""


def measure_mixing(world: WorldPlan) -> Mixing:
    """Return how well the steps of a plan mix; samples some 100 of them, in about 20 ms a lane."""
    num_steps = max(1, world.steps.num_full)
    lanes = [world.plan.lane(lane) for lane in range(world.plan.leg.lanes)]
    runs = [read_episodes(world, lanes, first, stop) for first, stop in _sample_steps(num_steps)]
    local_runs = [_local_batches(run, world.world_size) for run in runs]
    batch, chances = runs[0][0].size, _chances(world.plan)
    robots = [run >> _EPISODE_BITS for run in local_runs]
    return Mixing(
        local_batch=_summarise(local_runs, chances.distinct(batch // world.world_size)),
        global_batch=_summarise([run.reshape(len(run), 1, -1) for run in runs], chances.distinct(batch)),
        overlap=_measure_overlap(world, [lanes[lane] for lane in world.lanes_of(0)], num_steps),
        overlap_full_shuffle=chances.shared(batch // world.world_size),
        datasets=_summarise(robots, _dataset_chances(world.plan).distinct(batch // world.world_size)),
    )


def read_episodes(world: WorldPlan, lanes: Sequence[Lane], first: int, stop: int) -> Ints:
    """Return (S, lanes, frames per lane) numbers, one per episode, of the steps [first, stop)."""
    begin, end = world.steps.position_after(first), world.steps.position_after(stop)
    columns = []
    for lane in lanes:
        span = lane.between(lane.cursor(begin), lane.cursor(end)).span
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
    # Rank r has the lanes r, r + W, ...: the lane axis, cut into rows of W, has a column per rank.
    num_steps, num_lanes, per_lane = run.shape
    by_rank = run.reshape(num_steps, num_lanes // world_size, world_size, per_lane).transpose(0, 2, 1, 3)
    return by_rank.reshape(num_steps, world_size, -1)


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
    for lag in LAGS:
        if lag >= num_steps:
            continue
        firsts = np.unique(np.linspace(0, num_steps - 1 - lag, _OVERLAP_PAIRS).astype(int)).tolist()
        pairs = [[read_episodes(world, lanes, step, step + 1) for step in (first, first + lag)] for first in firsts]
        overlap[lag] = float(np.mean([len(np.intersect1d(one, other)) for one, other in pairs]))
    return overlap


def _chances(plan: EpochPlan) -> "_Chances":
    """Return the chances of the episodes: of a mixture those that the epoch takes."""
    if plan.index.shares is None:
        index = plan.index
        return _Chances(_episode_ids(index.dataset, index.episode), index.stop - index.start)
    spans = plan.queues.spans
    return _Chances(_episode_ids(spans.dataset, spans.episode), spans.count)


def _dataset_chances(plan: EpochPlan) -> "_Chances":
    return _Chances(plan.queues.spans.dataset.astype(np.int64), plan.queues.spans.count)


class _Chances:
    """What batches of a full shuffle hold: a group is missed by every one of B draws without replacement."""

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
