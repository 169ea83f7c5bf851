"""Find which parts of an account count: each must begin where the one before it ended.

A run may go back: a loop that restarts an epoch or loads an earlier state hands frames over a second time. Frames after
the place to which it went back are *rolled back*; those before it count.

::

    recorded     |---- a ----|---- b ----|            then a state inside b is loaded
                                   |---- c ----|
    counts       |---- a ----|-- b-|---- c ----|      and the rest of b is rolled back
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raypipe.account.parts import Part
from raypipe.account.replay import Replay
from raypipe.errors import RaypipeError
from raypipe.plan import Leg, OrderSpec, OrderState
from raypipe.text import counted


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
