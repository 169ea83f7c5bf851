"""Compute what a part must have according to the plan: which frames, in which order, and how many of every lane.

Only this module joins accounts with the plan. It plans legs again and goes through many batches of a rank at once: four
to eight million frames a second, in the memory of a plan and a chunk of batches.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.account.axis import FrameAxis
from raypipe.account.ledger import FrameDigest
from raypipe.account.parts import Part
from raypipe.account.runs import Runs, add_runs, count_ranges, count_values, empty_runs
from raypipe.errors import ConfigError
from raypipe.plan import (
    BatchSpec,
    EpisodeIndex,
    EpochPlan,
    Ints,
    Lane,
    WorldPlan,
    describe_selection,
    first_laps,
    order_frames,
    plan_epoch,
    plan_world,
    ragged_arange,
)

_PLANS_KEPT: Final = 3
"""Plans to keep, because the check alternates between a part and the one before. For a million episodes a plan takes
some 60 MB."""


@dataclass(frozen=True, kw_only=True)
class RankReplay:
    """What a rank must have recorded if it handed over the plan minus the skipped frames."""

    num_frames: int
    lanes: tuple[tuple[int, int], ...]
    digest: str

    repeated: Runs
    """Repeats of the tail, including those of skipped frames."""

    least_stand_ins: int
    """Batches in which every frame was skipped: each must have a repeat in its place."""

    most_stand_ins: int
    """The same, plus batches whose repeats may also have been left out because the epoch skipped their frames."""


class Replay:
    """The plans of a run's parts, made on demand."""

    def __init__(self, index: EpisodeIndex, axis: FrameAxis) -> None:
        self.index = index
        self.axis = axis
        self.selection = describe_selection(index)
        self._plans: dict[tuple[Any, ...], EpochPlan] = {}

    def world(self, part: Part) -> WorldPlan:
        """Return the plan of a part, from where the part begins.

        Raises:
            RaypipeError: these frames have no such plan.
        """
        if part.selection != self.selection:
            raise ConfigError(self.chosen_otherwise(part))
        leg = part.legs[-1]
        plan = self._plan(part, (*part.legs[:-1], replace(leg, frames_per_lane=0))).at(leg.frames_per_lane)
        batch = BatchSpec(size=part.per_lane * leg.lanes, scope="global")
        return plan_world(plan, world_size=part.world_size, batch=batch)

    def chosen_otherwise(self, part: Part) -> str:
        """Return the selection of a part and that of the index, in words."""
        return f"its frames were chosen otherwise: {part.selection} there, and {self.selection} of the dataset here"

    def frames(self, part: Part, first: int, stop: int, ranks: Collection[int] = ()) -> Runs:
        """Return the frames of steps [first, stop) of a part on `ranks`, or on all if empty, without repeats."""
        world = self.world(part)
        lanes = range(world.plan.leg.lanes)
        begins = [_position(world, lane, first) for lane in lanes]
        wanted = [not ranks or lane % world.world_size in ranks for lane in lanes]
        ends = [_position(world, lane, stop) if wanted[lane] else begins[lane] for lane in lanes]
        return self._frames_between(world, begins, ends)

    def frames_after(self, part: Part, num_steps: int) -> Runs:
        """Return the frames of the epoch that remain after `num_steps` steps of a part."""
        world = self.world(part)
        lanes = range(world.plan.leg.lanes)
        begins = [_position(world, lane, num_steps) for lane in lanes]
        return self._frames_between(world, begins, world.plan.frames_per_lane.tolist())

    def rank(self, part: Part, rank: int, skipped: Runs, epoch_skipped: Runs) -> RankReplay:
        """Return what a rank must have recorded in a part that left out the frames `skipped`.

        Args:
            part: a part that has a plan.
            rank: below the part's world size.
            skipped: the frames that the part skipped.
            epoch_skipped: the frames that any part of the epoch skipped. The tail may try to repeat such a frame.
        """
        world, digest = self.world(part), FrameDigest()
        plan = world.rank(rank)
        queue = plan.queue
        base = self.axis.starts_of(queue.dataset, queue.episode, queue.lap - world.first_laps[queue.dataset])
        num_frames, least, most = 0, 0, 0
        repeats: list[Ints] = []
        for chunk in plan.chunks():
            count = min(len(chunk.span), part.num_steps - chunk.step)
            if count <= 0:
                break
            numbers, is_repeat = base[chunk.span[:count]] + chunk.frame[:count], chunk.is_repeat[:count]
            is_hole, may_be_hole = _is_in(skipped, numbers), _is_in(epoch_skipped, numbers)
            repeats.append(numbers[is_repeat])
            is_out = is_repeat | is_hole
            num_frames += int(is_out.size - is_out.sum())
            least += int(is_hole.all(axis=1).sum())
            most += int((is_hole | (is_repeat & may_be_hole)).all(axis=1).sum())
            _add_batches(digest, numbers, is_out)
        return RankReplay(
            num_frames=num_frames,
            lanes=_frames_given(world, rank, part.num_steps),
            digest=digest.hexdigest(),
            repeated=count_values(np.concatenate(repeats)) if repeats else empty_runs(),
            least_stand_ins=least,
            most_stand_ins=most,
        )

    def _plan(self, part: Part, legs: tuple[Any, ...]) -> EpochPlan:
        key = (part.epoch, part.spec, legs)
        plan = self._plans.pop(key, None) or plan_epoch(self.index, part.spec, epoch=part.epoch, legs=legs)
        self._plans[key] = plan
        if len(self._plans) > _PLANS_KEPT:
            del self._plans[next(iter(self._plans))]
        return plan

    def _frames_between(self, world: WorldPlan, begins: list[int], ends: list[int]) -> Runs:
        found = []
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if end > begin:
                found.append(self._lane_frames(world.plan, world.plan.lane(number), begin, end))
        return add_runs(*found)

    def _lane_frames(self, plan: EpochPlan, lane: Lane, begin: int, end: int) -> Runs:
        spans = lane.spans
        before = lane.cursor(begin).spread(0, len(lane), spans.count)
        taken = lane.cursor(end).spread(0, len(lane), spans.count) - before
        is_whole = taken == spans.stop - spans.start
        whole, cut = np.flatnonzero(is_whole), np.flatnonzero((taken > 0) & ~is_whole)
        first = first_laps(plan.index, plan.epoch)
        base = self.axis.starts_of(spans.dataset, spans.episode, spans.lap - first[spans.dataset])
        ranges = count_ranges(base[whole] + spans.start[whole], base[whole] + spans.stop[whole])
        frames, offsets = order_frames(spans.take(cut), plan.keys)
        chosen = frames[ragged_arange(offsets[:-1] + before[cut], taken[cut])]
        return add_runs(ranges, count_values(np.repeat(base[cut], taken[cut]) + chosen))


def _is_in(runs: Runs, numbers: Ints) -> NDArray[np.bool_]:
    return runs.times_of(numbers) > 0 if len(runs) else np.zeros(numbers.shape, dtype=np.bool_)


def _position(world: WorldPlan, lane: int, num_steps: int) -> int:
    return world.steps.position_after(num_steps) + (world.steps.extra(lane, num_steps - 1) if num_steps else 0)


def _frames_given(world: WorldPlan, rank: int, num_steps: int) -> tuple[tuple[int, int], ...]:
    given = [(lane, _position(world, lane, num_steps) - world.steps.position) for lane in world.lanes_of(rank)]
    return tuple((lane, frames) for lane, frames in given if frames)


def _add_batches(digest: FrameDigest, numbers: Ints, is_out: NDArray[np.bool_]) -> None:
    if not is_out.any():
        digest.add_equal(numbers)
        return
    for row, out in zip(numbers.astype("<i8", copy=False), is_out, strict=True):
        digest.add(row[~out].tobytes())
