"""The order of an epoch: `plan_epoch` gives the queues of every lane, `plan_world` the steps of a number of ranks.

Rank r of W serves lanes r, r + W, r + 2W, ... A world moves no frame: on every W that divides the lanes a step takes
the same frames from the same lanes.

::

    lane           0     1     2     3     4     5     6     7
    a step        ....  ....  ....  ....  ....  ....  ....  ....       4 frames from every lane
    W = 8: rank    0     1     2     3     4     5     6     7         batches of 4
    W = 2: rank    0     1     0     1     0     1     0     1         batches of 16
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError
from raypipe.plan.index import EpisodeIndex, describe_selection
from raypipe.plan.keyhash import ORDER_VERSION, ColumnTable, Ints, OrderKeys
from raypipe.plan.lanes import Lane, LaneQueues, fill_lanes
from raypipe.plan.rank import RankLane, RankPlan, Steps, plan_steps
from raypipe.plan.spans import Spans, cut_spans, first_laps, make_keys, order_frames
from raypipe.plan.spec import (
    WHOLE_EPISODE,
    WORLD_SIZE,
    BatchSpec,
    Leg,
    OrderSpec,
    Tail,
    check_whole,
    check_world_size,
    first_leg,
)
from raypipe.text import counted


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The order of one leg of an epoch: spans shared out over lanes, and every lane's frames in a sequence.

    Every process computes the same plan. Positions count the frames that a lane has emitted in this leg.
    """

    index: EpisodeIndex
    spec: OrderSpec
    epoch: int
    legs: tuple[Leg, ...]
    keys: OrderKeys
    queues: LaneQueues

    @property
    def leg(self) -> Leg:
        """The leg of this plan."""
        return self.legs[-1]

    @property
    def frames_per_lane(self) -> Ints:
        """Frames of every lane in this leg, emitted ones included."""
        return self.queues.frames

    @property
    def spans_per_lane(self) -> Ints:
        """Spans of every lane in this leg; each piece of a cut span counts."""
        return np.diff(self.queues.offsets)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that decides this leg's order. Equal before and after a resume within the leg."""
        legs = [asdict(leg) for leg in (*self.legs[:-1], replace(self.leg, frames_per_lane=0))]
        told = [ORDER_VERSION, self.index.fingerprint, self.selection, self.spec.to_dict(), self.epoch, legs]
        digest = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16)
        spans = self.queues.spans
        for column in (
            self.queues.rows,
            self.queues.offsets,
            spans.episode,
            spans.start,
            spans.stop,
            spans.floor,
            spans.key,
            *((spans.dataset, spans.lap) if self.index.shares or self.index.rates else ()),
        ):
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()

    @cached_property
    def selection(self) -> str:
        """A line that is equal for equal sets of anchor frames."""
        return describe_selection(self.index)

    def at(self, position: int) -> "EpochPlan":
        """Return this plan at another position of its leg; costs nothing."""
        if not 0 <= position <= self.frames_per_lane[-1]:
            raise ConfigError(f"position must be between 0 and {self.frames_per_lane[-1]}, got {position}")
        return replace(self, legs=(*self.legs[:-1], replace(self.leg, frames_per_lane=position)))

    def lane(self, lane: int) -> Lane:
        """Return the queue of one lane with the lives of its spans."""
        return self.queues.lane(lane)


def plan_epoch(index: EpisodeIndex, spec: OrderSpec, *, epoch: int, legs: Sequence[Leg] = ()) -> EpochPlan:
    """Return the plan of the last of `legs`, or of a whole epoch on ``spec.lanes`` lanes.

    It goes through every leg before the last to find the frames that the leg left. That costs about half a second per
    leg at a million episodes. A position inside the last leg costs nothing.

    Raises:
        ConfigError: an epoch starts with fewer frames than lanes. (Near the end of an epoch this is not an error: the
            frames that cannot be shared out are left over.)
        ResumeError: a leg has consumed more frames than it had.
    """
    epoch = check_whole("epoch", epoch, 0, (1 << 63) - 1)
    if not legs and spec.lanes == WORLD_SIZE:
        raise ConfigError("lanes='world_size' needs the legs of a world size: legs=(first_leg(spec, world_size=...),)")
    all_legs = tuple(legs) or (first_leg(spec, world_size=1),)
    keys = make_keys(index, spec, epoch)
    check_lanes(index, all_legs[0].lanes)
    spans = cut_spans(index, spec, keys)
    for leg in all_legs[:-1]:
        spans = _spans_left(fill_lanes(spans, leg, keys), leg, keys)
    queues = fill_lanes(spans, all_legs[-1], keys)
    return EpochPlan(index=index, spec=spec, epoch=epoch, legs=all_legs, keys=keys, queues=queues)


def check_lanes(index: EpisodeIndex, lanes: int) -> None:
    """Raise if an epoch has fewer frames than lanes."""
    if index.num_frames < lanes:
        raise ConfigError(
            f"{counted(index.num_frames, 'frame')} cannot be shared out over {counted(lanes, 'lane')}; use at most "
            f"{counted(index.num_frames, 'lane')} (ranks), or select more episodes"
        )


def _spans_left(queues: LaneQueues, leg: Leg, keys: OrderKeys) -> Spans:
    """Return what the leg has not emitted: spans it never reached, and begun ones with a floor, in the old order."""
    spans = queues.spans
    gone = np.zeros(len(spans), dtype=np.int64)
    for number in range(leg.lanes):
        lane = queues.lane(number)
        gone[queues.rows_of(number)] = lane.counts(leg.frames_per_lane)
    begun = np.flatnonzero((gone > 0) & (gone < spans.count))
    owners, floor = spans.take(begun), spans.floor.copy()
    frames, offsets = order_frames(owners, keys)
    firsts = frames[offsets[:-1] + gone[begun]]
    floor[begun] = keys.frame_keys(owners.dataset, owners.lap, owners.episode, np.arange(len(begun)), firsts)
    left = replace(spans, floor=floor, count=spans.count - gone)
    return left.take(np.flatnonzero(left.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames(ColumnTable):
    """Frames that lanes emit, in the order of emission."""

    dataset: NDArray[np.int32]
    lap: Ints
    episode: Ints
    frame: Ints
    is_repeat: NDArray[np.bool_]


def plan_world(plan: EpochPlan, *, world_size: int, batch: BatchSpec) -> "WorldPlan":
    """Return the remaining steps of a plan on `world_size` ranks.

    Raises:
        ConfigError: the ranks do not divide the lanes, the batch does not share out over the lanes, or the epoch starts
            here and has no full batch with ``tail="drop"``.
    """
    lanes = plan.leg.lanes
    if world_size < 1 or lanes % world_size:
        fitting = [str(size) for size in range(1, lanes + 1) if lanes % size == 0]
        raise ConfigError(
            f"{counted(world_size, 'rank')} cannot serve {counted(lanes, 'lane')}; {', '.join(fitting)} can. On "
            f"another world size the rest of the epoch is a new leg: plan it with the legs that `resume` returns"
        )
    share, extras = int(plan.frames_per_lane[-1]), int((plan.frames_per_lane > plan.frames_per_lane[-1]).sum())
    per_lane = batch.per_lane(lanes, world_size)
    steps = plan_steps(share, extras, position=plan.leg.frames_per_lane, per_lane=per_lane, tail=plan.spec.tail)
    if len(plan.legs) == 1 and not plan.leg.frames_per_lane:
        check_start(plan.index, lanes, plan.spec.tail, per_lane)
    return WorldPlan(plan=plan, world_size=world_size, steps=steps)


def check_start(index: EpisodeIndex, lanes: int, tail: Tail, per_lane: int) -> None:
    """Raise unless an epoch that starts on `lanes` lanes has a step; plans nothing."""
    check_lanes(index, lanes)
    share = index.num_frames // lanes
    if tail == "drop" and share < per_lane:
        raise ConfigError(
            f"tail='drop' leaves no batch: a lane has {counted(share, 'frame')} and a batch takes {per_lane} of it; "
            f"use a smaller batch or tail='short'"
        )


def check_rank(rank: int, world_size: int) -> None:
    """Raise unless a world has this rank."""
    check_world_size(world_size)
    # 1.0 is in a range too.
    if not isinstance(rank, Integral) or rank not in range(world_size):
        raise ConfigError(f"there is no rank {rank!r}: the world has {counted(world_size, 'rank')}, counted from 0")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WorldPlan:
    """A plan with its steps and ranks. Step 0 is the first step after the plan's position."""

    plan: EpochPlan
    world_size: int
    steps: Steps

    def __repr__(self) -> str:
        """Return the plan in a few lines; `report_plan` and ``raypipe plan`` show what it costs."""
        spec, lanes = self.plan.spec, self.plan.leg.lanes
        sizes = sorted(set(spec.clip_sizes(len(self.plan.index.dataset_names))))
        clips = f"of {' or '.join(map(str, sizes))} frames" if sizes else "none: a span is one clip"
        span = "whole episodes" if spec.span_frames == WHOLE_EPISODE else f"at most {spec.span_frames} frames each"
        live = self.plan.leg.live_spans if spec.shuffle else 1
        return "\n".join(
            [
                f"epoch {self.plan.epoch}, {'shuffled' if spec.shuffle else 'in file order'}, seed {spec.seed}",
                f"  steps       {self.num_steps:,} of {self.batch_size:,} frames on each rank, the end {spec.tail!r}",
                f"  ranks       {self.world_size}, with {counted(lanes // self.world_size, 'lane')} each",
                f"  frames      {int(self.frames_per_rank.sum()):,} to emit",
                f"  spans       {int(self.spans_per_rank.sum()):,}, {span}",
                f"  live spans  {live} in each lane",
                f"  clips       {clips}",
                f"  left over   {counted(self.num_left_over, 'frame')}",
            ]
        )

    @property
    def batch_size(self) -> int:
        """Frames of a full batch of a rank."""
        return self.steps.per_lane * self.plan.leg.lanes // self.world_size

    @property
    def num_steps(self) -> int:
        """Steps left in this epoch, the same on every rank."""
        return self.steps.num_steps

    @property
    def frames_per_rank(self) -> Ints:
        """Frames that every rank has still to emit, repeats not counted."""
        lanes = range(self.plan.leg.lanes)
        coming = np.array([self.steps.end(lane) - self.steps.position for lane in lanes])
        return np.asarray(coming.reshape(-1, self.world_size).sum(axis=0))

    @property
    def spans_per_rank(self) -> Ints:
        """Spans of every rank in this leg, emitted ones included."""
        return np.asarray(self.plan.spans_per_lane.reshape(-1, self.world_size).sum(axis=0))

    @property
    def first_laps(self) -> Ints:
        """The lap in which the epoch begins, for every dataset: the epoch itself without shares and rates."""
        return first_laps(self.plan.index, self.plan.epoch)

    def lanes_of(self, rank: int) -> range:
        """Return the lanes that a rank serves."""
        return range(rank, self.plan.leg.lanes, self.world_size)

    def at(self, num_steps: int) -> "WorldPlan":
        """Return what is left after the next `num_steps` steps; costs nothing."""
        if not 0 <= num_steps < max(1, self.num_steps):
            raise ConfigError(f"num_steps must be between 0 and {self.num_steps - 1}, got {num_steps}")
        position, rest = self.steps.position_after(num_steps), self.num_steps - num_steps
        plan, batch = self.plan.at(position), self.steps.per_lane * self.plan.leg.lanes
        moved = plan_world(plan, world_size=self.world_size, batch=BatchSpec(size=batch, scope="global"))
        assert moved.num_steps == rest, f"{moved.num_steps} steps are left at position {position}, not {rest}"
        return moved

    def rank(self, rank: int) -> RankPlan:
        """Return what one rank receives and emits."""
        check_rank(rank, self.world_size)
        parts = tuple(self._serve_lane(lane) for lane in self.lanes_of(rank))
        return RankPlan(rank=rank, lanes=parts, steps=self.steps, keys=self.plan.keys)

    def frames_at(self, step: int, rank: int) -> Frames:
        """Return the frames of a step on a rank, in the order of the batch, by binary search and without a replay."""
        if not 0 <= step < self.num_steps:
            raise ConfigError(f"step must be between 0 and {self.num_steps - 1}, got {step}")
        check_rank(rank, self.world_size)
        parts = []
        for number in self.lanes_of(rank):
            lane, stop = self.plan.lane(number), self.steps.after(number, step + 1)
            parts.append(self.lane_frames(lane, self.steps.position_after(step), stop))
            num_repeats = self.steps.repeats(number, step)
            if num_repeats:
                again = self.lane_frames(lane, max(0, stop - num_repeats), stop)
                again = again.take(np.arange(num_repeats) % len(again))
                parts.append(replace(again, is_repeat=np.ones(num_repeats, dtype=np.bool_)))
        return Frames.concat(parts)

    def lane_frames(self, lane: Lane, begin: int, end: int) -> Frames:
        """Return the frames that a lane emits from position `begin` to `end`; costs a sort of the live spans."""
        run = lane.between(lane.counts(begin), lane.counts(end))
        spans, owner = lane.spans.take(run.places), run.owner
        frames, offsets = order_frames(spans, self.plan.keys)
        return Frames(
            dataset=spans.dataset[owner],
            lap=spans.lap[owner],
            episode=spans.episode[owner],
            frame=frames[offsets[owner] + run.nth],
            is_repeat=np.zeros(len(owner), dtype=np.bool_),
        )

    @property
    def num_left_over(self) -> int:
        """Frames that no step emits; `left_over` lists them."""
        return int(self.plan.frames_per_lane.sum()) - sum(map(self.steps.end, range(self.plan.leg.lanes)))

    def left_over(self) -> Frames:
        """Return the frames that no step emits: lanes cannot share them equally, or ``tail="drop"`` drops them."""
        ends = map(self.steps.end, range(self.plan.leg.lanes))
        rest = [(number, end) for number, end in enumerate(ends) if end < self.plan.frames_per_lane[number]]
        lanes = [(self.plan.lane(number), end) for number, end in rest or [(0, self.steps.end(0))]]
        return Frames.concat([self.lane_frames(lane, end, lane.num_frames) for lane, end in lanes])

    def peak_live_frames(self) -> int:
        """Return the most frames that the live spans of a rank hold, over all ranks.

        Counts every span in full from admission to retirement, and the lanes of a rank as if they peaked together.
        """
        peaks = np.array([self.plan.lane(lane).peak_live_frames() for lane in range(self.plan.leg.lanes)])
        return int(peaks.reshape(-1, self.world_size).sum(axis=0).max())

    def _serve_lane(self, number: int) -> RankLane:
        lane, end = self.plan.lane(number), self.steps.end(number)
        return RankLane(
            number=number,
            lane=lane,
            sent=lane.counts(self.steps.send_start(int(self.plan.frames_per_lane[-1]))),
            emitted=lane.counts(self.steps.position),
            end=lane.counts(end),
            end_position=end,
        )
