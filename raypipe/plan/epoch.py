"""`plan_epoch`: from episodes, a spec, an epoch and its legs to the queues and the frame order of every lane.

Composes the modules below it and decides nothing new. Batch size and world size are arguments of `plan_world`.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np

from raypipe.errors import ConfigError, ResumeError
from raypipe.plan.index import EpisodeIndex, describe_selection
from raypipe.plan.keyhash import ORDER_VERSION, Ints, OrderKeys
from raypipe.plan.lanes import LaneQueues, fill_lanes
from raypipe.plan.livewindow import Lane, open_lane
from raypipe.plan.shares import make_keys
from raypipe.plan.spans import Spans, cut_spans, order_frames
from raypipe.plan.spec import WORLD_SIZE, Leg, OrderSpec, check_whole, first_leg
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
    def position(self) -> int:
        """Frames that every lane has emitted already."""
        return self.leg.frames_per_lane

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
        return _open(self.queues, lane, self.leg, self.keys)


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
        spans = _spans_left(_share_out(spans, leg, keys), leg, keys)
    queues = _share_out(spans, all_legs[-1], keys)
    return EpochPlan(index=index, spec=spec, epoch=epoch, legs=all_legs, keys=keys, queues=queues)


def check_lanes(index: EpisodeIndex, lanes: int) -> None:
    """Raise if an epoch has fewer frames than lanes."""
    if index.num_frames < lanes:
        raise ConfigError(
            f"{counted(index.num_frames, 'frame')} cannot be shared out over {counted(lanes, 'lane')}; use at most "
            f"{counted(index.num_frames, 'lane')} (ranks), or select more episodes"
        )


def _share_out(spans: Spans, leg: Leg, keys: OrderKeys) -> LaneQueues:
    queues = fill_lanes(spans, leg.lanes, keys)
    if leg.frames_per_lane > queues.frames[-1]:
        raise ResumeError(
            f"the saved leg {leg} has emitted {counted(leg.frames_per_lane, 'frame')} per lane, but this plan has "
            f"{queues.frames[-1]} for it: the state belongs to another set of frames"
        )
    return queues


def _open(queues: LaneQueues, lane: int, leg: Leg, keys: OrderKeys) -> Lane:
    return open_lane(queues.lane(lane), leg.live_spans if keys.shuffle else 1)


def _spans_left(queues: LaneQueues, leg: Leg, keys: OrderKeys) -> Spans:
    """Return what the leg has not emitted: spans it never reached, and begun ones with a floor, in the old order."""
    spans = queues.spans
    gone = np.zeros(len(spans), dtype=np.int64)
    for number in range(leg.lanes):
        lane = _open(queues, number, leg, keys)
        rows = queues.rows[queues.offsets[number] : queues.offsets[number + 1]]
        gone[rows] = lane.cursor(leg.frames_per_lane).spread(0, len(lane), lane.spans.count)
    begun = np.flatnonzero((gone > 0) & (gone < spans.count))
    frames, offsets = order_frames(spans.take(begun), keys)
    owners = spans.take(begun)
    floor = spans.floor.copy()
    floor[begun] = keys.frame_keys(
        keys.frame_bases(owners.dataset, owners.lap, owners.episode),
        frames[offsets[:-1] + gone[begun]],
        keys.clip_sizes(owners.dataset),
    )
    left = replace(spans, floor=floor, count=spans.count - gone)
    return left.take(np.flatnonzero(left.count))
