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

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.account.frames import (
    FrameAxis,
    Runs,
    add_runs,
    count_ranges,
    count_values,
    empty_runs,
    keep_values,
    subtract_runs,
)
from raypipe.account.ledger import FrameDigest
from raypipe.account.parts import Part, RankRecord
from raypipe.errors import ConfigError, RaypipeError
from raypipe.plan import (
    BatchSpec,
    EpisodeIndex,
    EpochPlan,
    Ints,
    Lane,
    Leg,
    OrderSpec,
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
        before = lane.counts(lane.cursor(begin))
        taken = lane.counts(lane.cursor(end)) - before
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


def end_legs(link: Link, replay: Replay) -> tuple[Leg, ...]:
    """Return the legs of the state after the steps of a link, for an epoch that is not over."""
    position = replay.world(link.part).steps.position_after(link.num_steps)
    *before, last = link.part.legs
    return tuple(leg for leg in (*before, replace(last, frames_per_lane=position)) if leg.frames_per_lane)


def is_finished(link: Link, replay: Replay) -> bool:
    """Return whether the epoch is over after the steps of a link."""
    return link.num_steps == replay.world(link.part).num_steps


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
        return another_order(part)
    ends = end_legs(before, replay)
    if part.legs == ends or (part.legs[:-1] == ends and not part.legs[-1].frames_per_lane):
        return ""
    return f"{part.describe()} does not begin where the part before it ends: {before.part.describe()}"


def order_of(part: Part) -> tuple[object, ...]:
    """Return what may not change within an epoch."""
    return order_fields(part.spec), part.selection


def another_order(part: Part) -> str:
    """Return what is wrong with a part of another order than the part before it, in words."""
    return f"{part.describe()} has another order or selection than the part before it"


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


def order_fields(spec: OrderSpec) -> tuple[object, ...]:
    """Return the fields of an order that must not change within an epoch."""
    return spec.seed, spec.shuffle, spec.span_frames, spec.clip_frames, spec.tail, spec.lanes


def _is_before(link: Link, part: Part, replay: Replay) -> bool:
    """Return whether a part begins at or after the end of a link, with or without a gap."""
    legs, begin = link.part.legs, part.legs
    if len(begin) < len(legs) or begin[: len(legs) - 1] != legs[:-1]:
        return False
    here = begin[len(legs) - 1]
    end = replay.world(link.part).steps.position_after(link.num_steps)
    return _is_same(here, legs[-1]) and here.frames_per_lane >= end and not is_finished(link, replay)


def _steps_to(link: Link, part: Part, replay: Replay) -> int:
    """Return the step of a link where a part begins, or where the leg before it ends; 0 if not inside the link."""
    legs, begin = link.part.legs, part.legs
    if len(begin) < len(legs) or begin[: len(legs) - 1] != legs[:-1] or not _is_same(begin[len(legs) - 1], legs[-1]):
        return 0
    steps, position = replay.world(link.part).steps, begin[len(legs) - 1].frames_per_lane
    full, rest = divmod(position - steps.position, steps.per_lane)
    choices = [full] if not rest and 0 < full <= steps.num_full else range(steps.num_full + 1, steps.num_steps)
    found = [number for number in choices if steps.position_after(number) == position]
    return found[0] if found and found[0] < link.num_steps else 0


def _is_same(leg: Leg, other: Leg) -> bool:
    return (leg.lanes, leg.live_spans) == (other.lanes, other.live_spans)


def check_part(part: Part, replay: Replay, epoch_skipped: Runs) -> Iterator[str]:
    """Yield every difference from the plan.

    Args:
        part: a part that has a plan.
        replay: the replay of the datasets.
        epoch_skipped: all frames that any part of the epoch skipped.
    """
    skipped = add_runs(*(skip.frames for skip in part.skipped))
    yield from _check_frames(part, replay, skipped)
    yield from _check_listed(part, replay)
    yield from _check_skips(part, replay.axis)
    if wrong := [rank for rank in part.torn if not 0 <= rank < part.world_size]:
        yield f"{part.describe()}: rank {wrong[0]} is said to have died, and there is none"
    replays = []
    for record in part.ranks:
        if not 0 <= record.rank < part.world_size:
            yield f"{part.describe()}: there is a record of rank {record.rank}"
            continue
        replays.append(replay.rank(part, record.rank, skipped, epoch_skipped))
        yield from _check_rank(part, record, replays[-1])
    yield from _check_repeats(part, replay, replays, epoch_skipped)


def _check_frames(part: Part, replay: Replay, skipped: Runs) -> Iterator[str]:
    unplanned = subtract_runs(add_runs(part.emitted, skipped), replay.frames(part, 0, part.num_steps))
    if unplanned:
        first = replay.axis.name_frames(unplanned)[0]
        yield (
            f"{part.describe()}: {counted(unplanned.num_values, 'frame')} {either(unplanned.num_values, 'is', 'are')} "
            f"not of these steps, first {first.describe()}"
        )
    told = sum(record.num_frames for record in part.ranks)
    if told != part.emitted.num_values:
        yield (
            f"{part.describe()}: the ranks count {counted(told, 'frame')}, and {part.emitted.num_values} "
            f"{either(part.emitted.num_values, 'is', 'are')} listed"
        )


def _check_listed(part: Part, replay: Replay) -> Iterator[str]:
    """Yield frames in the file of a rank that another rank had."""
    for rank, frames in part.listed:
        wrong = subtract_runs(frames, replay.frames(part, 0, part.num_steps, (rank,)))
        if wrong:
            first = replay.axis.name_frames(wrong)[0]
            yield (
                f"{part.describe()}: the file of rank {rank} has {counted(wrong.num_values, 'frame')} that "
                f"{either(wrong.num_values, 'is', 'are')} not the rank's, first {first.describe()}"
            )


def _check_skips(part: Part, axis: FrameAxis) -> Iterator[str]:
    """Yield skips with frames outside the episode that they name."""
    for skip in part.skipped:
        found = {(frames.dataset, frames.episode) for frames in axis.name_frames(skip.frames)}
        if found != {(axis.name_of(skip.dataset), skip.episode)}:
            owners = ", ".join(f"episode {episode}" for _, episode in sorted(found)) or "none"
            yield f"{part.describe()}: a skip names episode {skip.episode}, and its frames are of {owners}"


def _check_rank(part: Part, record: RankRecord, replay: RankReplay) -> Iterator[str]:
    where = f"rank {record.rank} of {part.describe()}"
    if record.digest != replay.digest:
        yield f"{where}: its frames, or their order, are not those of the plan"
    if record.num_frames != replay.num_frames:
        yield f"{where}: it counts {counted(record.num_frames, 'frame')}, and the plan {replay.num_frames}"
    if record.lanes != replay.lanes:
        yield f"{where}: its lanes gave {dict(record.lanes)} frames, and by the plan {dict(replay.lanes)}"


def _check_repeats(part: Part, replay: Replay, replays: Sequence[RankReplay], epoch_skipped: Runs) -> Iterator[str]:
    planned = add_runs(*(one.repeated for one in replays))
    lost = subtract_runs(subtract_runs(planned, keep_values(planned, epoch_skipped)), part.repeated)
    if lost:
        first = replay.axis.name_frames(lost)[0]
        yield (
            f"{part.describe()}: {counted(lost.num_values, 'repeat')} of the tail "
            f"{either(lost.num_values, 'is', 'are')} missing, first {first.describe()}"
        )
    if foreign := [frames for frames in replay.axis.name_frames(part.repeated) if frames.episode < 0]:
        yield f"{part.describe()}: it repeats a frame that is none: {foreign[0].describe()}"
    num_more = subtract_runs(part.repeated, planned).num_values
    least, most = sum(one.least_stand_ins for one in replays), sum(one.most_stand_ins for one in replays)
    if not least <= num_more <= most:
        yield (
            f"{part.describe()}: {counted(num_more, 'repeat')} {either(num_more, 'is', 'are')} not the tail's, and "
            f"{counted(least, 'batch')} {either(least, 'has', 'have')} no frame"
        )
