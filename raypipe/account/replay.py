"""What the parts of an account must have according to the plan, which of them count, and how they differ from it.

Only this module joins accounts with the plan. `Replay` plans legs again and goes through many batches of a rank at
once: four to eight million frames a second, in the memory of a plan and a chunk of batches.

A run may go back: a loop that restarts an epoch or loads an earlier state hands frames over a second time. Frames after
the place to which it went back are *rolled back*; those before it count. So parts are chained: each that counts begins
where the one before it ends.

::

    recorded     |---- a ----|---- b ----|            then a state inside b is loaded
                                   |---- c ----|
    counts       |---- a ----|-- b-|---- c ----|      and the rest of b is rolled back
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raypipe.account.frames import FrameAxis, Runs, add_runs, count_ranges, count_values, subtract_runs
from raypipe.account.ledger import add_batch, add_equal_batches, begin_digest
from raypipe.account.parts import Part, RankRecord
from raypipe.errors import ConfigError, RaypipeError
from raypipe.plan import (
    BatchSpec,
    EpisodeIndex,
    EpochPlan,
    Ints,
    Lane,
    Leg,
    OrderState,
    WorldPlan,
    describe_selection,
    first_laps,
    order_frames,
    plan_epoch,
    plan_world,
    ragged_arange,
)
from raypipe.text import counted, either

_PLANS_KEPT: Final = 3
"""Plans to keep, because the check alternates between a part and the one before. For a million episodes a plan takes
some 60 MB."""


@dataclass(frozen=True, kw_only=True)
class RankReplay:
    """What a rank must have recorded if it handed over the plan minus the skipped frames."""

    record: RankRecord
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
        self._plan = lru_cache(_PLANS_KEPT)(partial(plan_epoch, index))

    def world(self, part: Part) -> WorldPlan:
        """Return the plan of a part, from where the part begins.

        Raises:
            RaypipeError: these frames have no such plan.
        """
        if part.selection != self.selection:
            raise ConfigError(self.chosen_otherwise(part))
        leg = part.legs[-1]
        legs = (*part.legs[:-1], replace(leg, frames_per_lane=0))
        plan = self._plan(part.spec, epoch=part.epoch, legs=legs).at(leg.frames_per_lane)
        batch = BatchSpec(size=part.per_lane * leg.lanes, scope="global")
        return plan_world(plan, world_size=part.world_size, batch=batch)

    def chosen_otherwise(self, part: Part) -> str:
        """Return the selection of a part and that of the index, in words."""
        return f"its frames were chosen otherwise: {part.selection} there, and {self.selection} of the dataset here"

    def frames(self, part: Part, first: int, stop: int, ranks: Collection[int] = ()) -> Runs:
        """Return the frames of steps [first, stop) of a part on `ranks`, or on all if empty, without repeats."""
        world = self.world(part)
        return self._frames_between(
            world,
            lambda lane: world.steps.after(lane, first),
            lambda lane: world.steps.after(lane, first if ranks and lane % world.world_size not in ranks else stop),
        )

    def frames_after(self, part: Part, num_steps: int) -> Runs:
        """Return the frames of the epoch that remain after `num_steps` steps of a part."""
        world = self.world(part)
        ends = world.plan.frames_per_lane.tolist()
        return self._frames_between(world, lambda lane: world.steps.after(lane, num_steps), ends.__getitem__)

    def rank(self, part: Part, rank: int, skipped: Runs, epoch_skipped: Runs) -> RankReplay:
        """Return what a rank must have recorded in a part that left out the frames `skipped`.

        The tail may try to repeat a frame that any part of the epoch skipped.
        """
        world, digest = self.world(part), begin_digest()
        plan = world.rank(rank)
        queue = plan.queue
        base = self.axis.starts_of(queue.dataset, queue.episode, queue.lap - world.first_laps[queue.dataset])
        num_frames, least, most = 0, 0, 0
        repeats = [np.empty(0, dtype=np.int64)]
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
        given = [
            (lane, world.steps.after(lane, part.num_steps) - world.steps.position) for lane in world.lanes_of(rank)
        ]
        lanes = tuple((lane, frames) for lane, frames in given if frames)
        return RankReplay(
            record=RankRecord(rank=rank, num_frames=num_frames, lanes=lanes, digest=digest.hexdigest()),
            repeated=count_values(np.concatenate(repeats)),
            least_stand_ins=least,
            most_stand_ins=most,
        )

    def check(self, part: Part, epoch_skipped: Runs) -> Iterator[str]:
        """Yield every difference of a part that has a plan from that plan, given what its whole epoch skipped."""
        place, skipped = part.describe(), add_runs(*(skip.frames for skip in part.skipped))
        problems = [*_check_frames(part, self, skipped), *_check_skips(part, self.axis)]
        yield from (f"{place}: {problem}" for problem in problems)
        if wrong := [rank for rank in part.torn if not 0 <= rank < part.world_size]:
            yield f"{place}: rank {wrong[0]} is said to have died, and there is none"
        replays = []
        for record in part.ranks:
            if not 0 <= record.rank < part.world_size:
                yield f"{place}: there is a record of rank {record.rank}"
                continue
            replays.append(self.rank(part, record.rank, skipped, epoch_skipped))
            differences = _check_rank(record, replays[-1].record)
            yield from (f"rank {record.rank} of {place}: {problem}" for problem in differences)
        yield from (f"{place}: {problem}" for problem in _check_repeats(part, self.axis, replays, epoch_skipped))

    def _frames_between(self, world: WorldPlan, begin: Callable[[int], int], end: Callable[[int], int]) -> Runs:
        """Return the frames of all lanes between two positions of each."""
        lanes = [lane for lane in range(world.plan.leg.lanes) if end(lane) > begin(lane)]
        return add_runs(
            *(self._lane_frames(world.plan, world.plan.lane(lane), begin(lane), end(lane)) for lane in lanes)
        )

    def _lane_frames(self, plan: EpochPlan, lane: Lane, begin: int, end: int) -> Runs:
        spans = lane.spans
        before = lane.counts(begin)
        taken = lane.counts(end) - before
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


def _add_batches(digest: hashlib.blake2b, numbers: Ints, is_out: NDArray[np.bool_]) -> None:
    if not is_out.any():
        add_equal_batches(digest, numbers)
        return
    for row, out in zip(numbers.astype("<i8", copy=False), is_out, strict=True):
        add_batch(digest, row[~out].tobytes())


@dataclass(frozen=True, kw_only=True)
class Link:
    """A part in its chain."""

    part: Part
    num_steps: int
    """Steps that count: all, unless the run went back into the part."""

    gap: str = ""
    """The problem between the previous part and this one; empty if there is none."""

    error: str = ""
    """Why this part has no plan; empty if it has one."""

    def end_legs(self, replay: Replay) -> tuple[Leg, ...]:
        """Return the legs of the state after these steps, for an epoch that is not over."""
        position = replay.world(self.part).steps.position_after(self.num_steps)
        *before, last = self.part.legs
        return tuple(leg for leg in (*before, replace(last, frames_per_lane=position)) if leg.frames_per_lane)

    def is_finished(self, replay: Replay) -> bool:
        """Return whether the epoch is over after these steps."""
        return self.num_steps == replay.world(self.part).num_steps


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The parts of one epoch that count, in order, and those that were rolled back entirely."""

    links: tuple[Link, ...]
    rolled_back: tuple[Part, ...]


def link_parts(parts: tuple[Part, ...], replay: Replay) -> Chain:
    """Return the parts of one epoch as a chain; `parts` are in the order of recording."""
    links: list[Link] = []
    rolled_back: list[Part] = []
    for part in parts:
        while links and not links[-1].error and not _is_before(links[-1], part, replay):
            last = links.pop()
            steps = _steps_to(last, part, replay)
            if steps:
                links.append(replace(last, num_steps=steps))
                break
            rolled_back.append(last.part)
        links.append(_link(links[-1] if links else None, part, replay))
    return Chain(links=tuple(links), rolled_back=tuple(rolled_back))


def drop_later_epochs(parts: tuple[Part, ...], state: OrderState) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Return the parts that count, and those of epochs that the run later went back before.

    If the state is at the start of an epoch, the run has gone back before everything recorded of that epoch.
    """
    kept: list[Part] = []
    dropped: list[Part] = []
    for part in parts:
        while kept and kept[-1].epoch > part.epoch:
            dropped.append(kept.pop())
        kept.append(part)
    while kept and kept[-1].epoch >= state.epoch and not state.legs:
        dropped.append(kept.pop())
    return tuple(kept), tuple(dropped)


def keep_parts(parts: Sequence[Part]) -> list[Part]:
    """Return the parts of one epoch before whose beginning the run did not go back later: for that no plan is needed.

    A part that the chain counts is among them.
    """
    kept: list[Part] = []
    for part in parts:
        while kept and _begin(kept[-1]) >= _begin(part):
            kept.pop()
        kept.append(part)
    return kept


def _begin(part: Part) -> int:
    return sum(leg.lanes * leg.frames_per_lane for leg in part.legs)


def order_of(place: Part | OrderState) -> tuple[object, ...]:
    """Return what may not change within an epoch."""
    spec = place.spec
    return spec.seed, spec.shuffle, spec.span_frames, spec.clip_frames, spec.tail, spec.lanes, place.selection


def other_order(part: Part) -> str:
    """Return what is wrong with a part of another order than the part before it, in words."""
    return f"{part.describe()} has another order or selection than the part before it"


def _link(before: Link | None, part: Part, replay: Replay) -> Link:
    try:
        world = replay.world(part)
    except RaypipeError as error:
        return Link(part=part, num_steps=part.num_steps, error=f"{part.describe()}: {error}")
    if part.num_steps > world.num_steps:
        told = f"{part.describe()}: the plan has only {counted(world.num_steps, 'step')} from there"
        return Link(part=part, num_steps=part.num_steps, error=told)
    return Link(part=part, num_steps=part.num_steps, gap=_find_gap(before, part, replay))


def _find_gap(before: Link | None, part: Part, replay: Replay) -> str:
    if before is None:
        is_start = len(part.legs) == 1 and not part.legs[0].frames_per_lane
        return "" if is_start else f"nothing leads up to {part.describe()}: what came before it is not in the account"
    if before.error:
        return ""
    if order_of(part) != order_of(before.part):
        return other_order(part)
    ends = before.end_legs(replay)
    if part.legs == ends or (part.legs[:-1] == ends and not part.legs[-1].frames_per_lane):
        return ""
    return f"{part.describe()} does not begin where the part before it ends: {before.part.describe()}"


def _is_before(link: Link, part: Part, replay: Replay) -> bool:
    """Return whether a part begins at or after the end of a link, with or without a gap."""
    position = _position_in(link, part)
    return position >= replay.world(link.part).steps.position_after(link.num_steps) and not link.is_finished(replay)


def _steps_to(link: Link, part: Part, replay: Replay) -> int:
    """Return the step of a link where a part begins, or where the leg before it ends; 0 if not inside the link."""
    steps, position = replay.world(link.part).steps, _position_in(link, part)
    full, rest = divmod(position - steps.position, steps.per_lane)
    choices = [full] if not rest and 0 < full <= steps.num_full else range(steps.num_full + 1, steps.num_steps)
    found = [number for number in choices if steps.position_after(number) == position]
    return found[0] if found and found[0] < link.num_steps else 0


def _position_in(link: Link, part: Part) -> int:
    """Return the frames per lane in the leg of a link before a part begins; -1 if the part has not gone through it."""
    *before, leg = link.part.legs
    depth = len(before)
    if len(part.legs) <= depth or part.legs[:depth] != tuple(before):
        return -1
    here = part.legs[depth]
    return here.frames_per_lane if (here.lanes, here.live_spans) == (leg.lanes, leg.live_spans) else -1


def _check_frames(part: Part, replay: Replay, skipped: Runs) -> Iterator[str]:
    unplanned = subtract_runs(add_runs(part.emitted, skipped), replay.frames(part, 0, part.num_steps))
    if unplanned:
        yield f"{_are(unplanned, 'frame')} not of these steps, {_first(replay.axis, unplanned)}"
    told, listed = sum(record.num_frames for record in part.ranks), part.emitted.num_values
    if told != listed:
        yield f"the ranks count {counted(told, 'frame')}, and {listed} {either(listed, 'is', 'are')} listed"
    for rank, frames in part.listed:
        wrong = subtract_runs(frames, replay.frames(part, 0, part.num_steps, (rank,)))
        if wrong:
            which = f"{counted(wrong.num_values, 'frame')} that {either(wrong.num_values, 'is', 'are')}"
            yield f"the file of rank {rank} has {which} not the rank's, {_first(replay.axis, wrong)}"


def _check_skips(part: Part, axis: FrameAxis) -> Iterator[str]:
    """Yield skips with frames outside the episode that they name."""
    for skip in part.skipped:
        found = {(frames.dataset, frames.episode) for frames in axis.name_frames(skip.frames)}
        if found != {(axis.name_of(skip.dataset), skip.episode)}:
            owners = ", ".join(f"episode {episode}" for _, episode in sorted(found)) or "none"
            yield f"a skip names episode {skip.episode}, and its frames are of {owners}"


def _check_rank(record: RankRecord, planned: RankRecord) -> Iterator[str]:
    if record.digest != planned.digest:
        yield "its frames, or their order, are not those of the plan"
    if record.num_frames != planned.num_frames:
        yield f"it counts {counted(record.num_frames, 'frame')}, and the plan {planned.num_frames}"
    if record.lanes != planned.lanes:
        yield f"its lanes gave {dict(record.lanes)} frames, and by the plan {dict(planned.lanes)}"


def _check_repeats(part: Part, axis: FrameAxis, replays: Sequence[RankReplay], epoch_skipped: Runs) -> Iterator[str]:
    planned = add_runs(*(one.repeated for one in replays))
    lost = subtract_runs(subtract_runs(planned, planned.within(epoch_skipped)), part.repeated)
    if lost:
        noun = f"{counted(lost.num_values, 'repeat')} of the tail {either(lost.num_values, 'is', 'are')}"
        yield f"{noun} missing, {_first(axis, lost)}"
    if foreign := [frames for frames in axis.name_frames(part.repeated) if frames.episode < 0]:
        yield f"it repeats a frame that is none: {foreign[0].describe()}"
    more = subtract_runs(part.repeated, planned)
    least, most = sum(one.least_stand_ins for one in replays), sum(one.most_stand_ins for one in replays)
    if not least <= more.num_values <= most:
        batches = f"{counted(least, 'batch')} {either(least, 'has', 'have')}"
        yield f"{_are(more, 'repeat')} not the tail's, and {batches} no frame"


def _are(frames: Runs, noun: str) -> str:
    return f"{counted(frames.num_values, noun)} {either(frames.num_values, 'is', 'are')}"


def _first(axis: FrameAxis, frames: Runs) -> str:
    return f"first {axis.name_frames(frames)[0].describe()}"
