"""What a selection leaves for an epoch, and how much and how evenly each dataset of a mixture gives to it.

Part of what ``raypipe plan`` prints.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.index import EpisodeIndex
from raypipe.plan.keyhash import Ints
from raypipe.plan.rates import mean_times
from raypipe.plan.shares import lap_sizes
from raypipe.plan.world import WorldPlan
from raypipe.text import counted

_STEPS_LOOKED_AT: Final = 32

_MOST_RATES: Final = 8
_QUARTERS: Final = 4
"""The report groups more than `_MOST_RATES` different rates by quarters of the frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateReport:
    """Frames that come equally often, or nearly so."""

    least_times: float
    most_times: float
    """How often one of them comes in an epoch, or in a lap of a mixture, on average."""

    frames: int
    share: float
    """Their part of the epoch, between 0 and 1."""

    def describe(self) -> str:
        """Return it in words."""
        return (
            f"{counted(self.frames, 'frame')} {_often(self.least_times, self.most_times)} each, {self.share:.2%} of "
            f"the epoch"
        )


def report_rates(index: EpisodeIndex) -> tuple[RateReport, ...]:
    """Return how often frames come, rarest first; empty if each comes once, or for a mixture."""
    if index.rates is None or index.shares is not None:
        return ()
    times, frames = mean_times(index.rates, index.stop - index.start)
    # Units are spread over frames one by one: times that differ by less than that are the same.
    times, number = np.unique(np.round(times, 6), return_inverse=True)
    frames = np.bincount(number, weights=frames)
    group = np.arange(len(times))
    if len(times) > _MOST_RATES:
        group = np.minimum((np.cumsum(frames) - frames) * _QUARTERS // frames.sum(), _QUARTERS - 1).astype(np.int64)
    return tuple(
        RateReport(
            least_times=float(times[group == one].min()),
            most_times=float(times[group == one].max()),
            frames=int(frames[group == one].sum()),
            share=float((times * frames)[group == one].sum() / (times * frames).sum()),
        )
        for one in np.unique(group).tolist()
    )


def describe_frames(index: EpisodeIndex) -> tuple[str, ...]:
    """Return in words what no epoch has, and how often an epoch has the other frames; usually empty."""
    episodes, frames = index.left_out
    texts = []
    if frames:
        whole = f", {counted(episodes, 'whole episode')} among them" if episodes else ""
        texts.append(f"{counted(frames, 'frame')} left out{whole}")
    rates = report_rates(index)
    if rates and (rates[0].least_times, rates[-1].most_times) != (1, 1):
        kept, often = sum(one.frames for one in rates), _often(rates[0].least_times, rates[-1].most_times)
        texts.append(f"{counted(index.num_frames, 'frame')} an epoch of {kept:,}, each {often}")
    return tuple(texts)


def _often(least: float, most: float) -> str:
    if f"{least:.3g}" == f"{most:.3g}":
        return "once" if least == 1 else f"{least:.3g} times"
    return f"{least:.3g} to {most:.3g} times"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """One dataset of a mixture in an epoch."""

    name: str
    frames: int
    """Anchor frames of the dataset."""

    epoch_frames: int
    """Frames that the epoch takes of the dataset."""

    share: float
    """Its part of the epoch, between 0 and 1."""

    laps: float
    """Passes over the dataset in an epoch."""

    spans: int
    deviation: float
    """The largest difference between the dataset's emitted frames and `share`, in frames, at the sampled steps."""


def report_members(world: WorldPlan) -> tuple[MemberReport, ...]:
    """Return a report for every dataset of a mixture; empty for a single dataset."""
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
    """Return ``(steps, datasets)``: the frames of every dataset that all ranks have emitted before each of `steps`."""
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
