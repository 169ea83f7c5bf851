"""What every dataset of a mixture gives to an epoch, and how evenly: part of what ``raypipe plan`` says."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.keyhash import Ints
from raypipe.plan.shares import lap_sizes
from raypipe.plan.world import WorldPlan

_STEPS_LOOKED_AT: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """One dataset of a mixture in an epoch."""

    name: str
    frames: int
    """Anchor frames of the dataset."""

    epoch_frames: int
    """Frames that the epoch takes of it."""

    share: float
    """Of the epoch, between 0 and 1."""

    laps: float
    """Passes over the dataset in an epoch."""

    spans: int
    deviation: float
    """The most that its part of what was emitted differs from `share`, in frames, at the steps looked at."""


def report_members(world: WorldPlan) -> tuple[MemberReport, ...]:
    """Return a report for every dataset of a mixture; nothing for a dataset that stands alone."""
    index = world.plan.index
    if index.shares is None:
        return ()
    taken, spans = np.array(index.shares.frames), world.plan.queues.spans
    num_spans = np.bincount(spans.dataset, minlength=len(taken))
    sizes, deviation = lap_sizes(index), _find_deviation(world, taken / taken.sum())
    return tuple(
        MemberReport(
            name=name,
            frames=int(sizes[i]),
            epoch_frames=int(taken[i]),
            share=float(taken[i] / taken.sum()),
            laps=float(taken[i] / sizes[i]),
            spans=int(num_spans[i]),
            deviation=float(deviation[i]),
        )
        for i, name in enumerate(index.dataset_names)
    )


def emitted_frames(world: WorldPlan, steps: Ints) -> Ints:
    """Return ``(steps, datasets)``: how many frames all ranks have emitted of every dataset before each of `steps`."""
    num_datasets = len(world.plan.index.dataset_names)
    emitted = np.zeros((len(steps), num_datasets), dtype=np.int64)
    for number in range(world.plan.leg.lanes):
        lane = world.plan.lane(number)
        for i, step in enumerate(steps.tolist()):
            counts = lane.cursor(world.steps.position_after(step)).spread(0, len(lane), lane.spans.count)
            # Whole numbers below 2**53 are exact as floats.
            emitted[i] += np.bincount(lane.spans.dataset, weights=counts, minlength=num_datasets).astype(np.int64)
    return emitted


def _find_deviation(world: WorldPlan, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    steps = np.unique(np.linspace(0, world.num_steps, _STEPS_LOOKED_AT).astype(np.int64))
    emitted = emitted_frames(world, steps)
    return np.asarray(np.abs(emitted - emitted.sum(axis=1, keepdims=True) * shares).max(axis=0))
