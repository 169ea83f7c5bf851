"""Finds the frames that a step gave to a rank: from the plan alone, reading only ``meta/``.

Steps count from the run's start across epochs, or within an epoch. With an account, the ranks and legs are those that
the run really had; steps beyond the account are planned on its last ranks.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raypipe.account import (
    DATASET_BITS,
    Account,
    FrameAxis,
    Replay,
    RunAccount,
    Runs,
    add_runs,
    drop_later_epochs,
    empty_runs,
    link_parts,
    read_run_account,
)
from raypipe.errors import ConfigError, noting
from raypipe.pipeline import open_with_order
from raypipe.plan import (
    DEFAULT_LIVE_BYTES,
    BatchSpec,
    EpisodeIndex,
    Resumed,
    SelectionSpec,
    WorldPlan,
    plan_epoch,
    plan_world,
    resume,
    start,
)
from raypipe.text import counted, either, rows_table
from raypipe.views.account import open_frames, read_frames

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class StepQuery:
    """A step and a rank."""

    step: int
    """From the start of the run, or of `epoch`."""

    rank: int
    epoch: int | None = None
    """None: count across epochs."""

    def __post_init__(self) -> None:
        if self.step < 0 or self.rank < 0 or (self.epoch is not None and self.epoch < 0):
            raise ConfigError(
                f"step, rank and epoch must be at least 0, got step {self.step}, rank {self.rank}, epoch {self.epoch}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedFrame:
    """One frame of a batch."""

    dataset: str
    episode: int
    frame: int
    index: int
    """The frame's number in the whole dataset, from the lengths of the episodes."""

    is_repeat: bool
    is_skipped: bool = False
    """Left out of the batch as bad data; known only for steps in an account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedStep:
    """The frames of one step on one rank, in the order of the batch."""

    epoch: int
    step_in_epoch: int
    rank: int
    world_size: int
    live_spans: int
    span_frames: int | str
    clip_frames: int | tuple[int, ...] | str
    frames: tuple[LocatedFrame, ...]

    def describe(self) -> str:
        """Return the step and its order in words."""
        num_skipped = sum(frame.is_skipped for frame in self.frames)
        skipped = (
            f" planned, of which {num_skipped} {either(num_skipped, 'was', 'were')} skipped" if num_skipped else ""
        )
        return (
            f"epoch {self.epoch}, step {self.step_in_epoch} of it, rank {self.rank} of {self.world_size}: "
            f"{counted(len(self.frames), 'frame')}{skipped}; live_spans={self.live_spans}, "
            f"span_frames={self.span_frames!r}, clip_frames={self.clip_frames!r}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the step as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run that never changes its ranks."""

    root: str
    order: Mapping[str, Any]
    """Fields of an `OrderSpec`; a pipeline of the dataset chooses the others."""

    batch_size: int
    """Frames of a batch on each rank."""

    world_size: int
    live_bytes: int | str = DEFAULT_LIVE_BYTES

    def __post_init__(self) -> None:
        if not self.root:
            raise ConfigError(
                "which run? Give --account DIR of a run, or the order: --root, --batch-size, --world-size and --seed"
            )


def locate_planned(run: PlannedRun, query: StepQuery) -> LocatedStep:
    """Return the frames of a step of a run that never changes."""
    batch = BatchSpec(size=run.batch_size)
    _, spec, _ = open_with_order(run.root, batch, run.order, live_bytes=run.live_bytes)
    begin = _Standing(at=start(spec, world_size=run.world_size), batch=batch, world_size=run.world_size)
    index, axis = read_frames(run.root, SelectionSpec())
    return _locate([], begin, query, Replay(index, axis))


def locate_recorded(folder: str | os.PathLike[str], query: StepQuery, *, root: str = "", name: str = "") -> LocatedStep:
    """Return the frames of a step of a run with an account; see `read_run_account`."""
    run = read_run_account(folder, name)
    with noting(f"by the account {run.place!r}"):
        return _locate_by(run, query, root)


def step_table(located: LocatedStep) -> "Table":
    """Return a row per frame."""
    rows = []
    for frame in located.frames:
        mark = "skipped" if frame.is_skipped else "repeat" if frame.is_repeat else ""
        rows.append((frame.dataset, f"{frame.episode}", f"{frame.frame}", f"{frame.index}", mark))
    return rows_table(("dataset", "episode", "frame", "index", ""), rows, texts=("dataset", ""))


def _locate_by(run: RunAccount, query: StepQuery, root: str) -> LocatedStep:
    _, index, axis = open_frames(run, root)
    _check_epoch(index, query, run.place)
    if not run.account.parts:
        raise ConfigError(f"the account in {run.place!r} has no step yet; give the order by --root and the rest")
    replay = Replay(index, axis)
    stretches = _recorded(run.account, replay, query)
    standing = _standing(run.account, replay)
    if standing.at.legs[-1].frames_per_lane or len(standing.at.legs) > 1:
        # The rest of an unfinished epoch.
        before = sum(one.num_steps for one in stretches if one.world.plan.epoch == standing.at.epoch)
        world = standing.world(index, standing.at)
        stretches.append(_Stretch(world=world, before=before, num_steps=world.num_steps))
        standing = standing.next_epoch()
    return _locate(stretches, standing, query, replay)


def _check_epoch(index: EpisodeIndex, query: StepQuery, place: str) -> None:
    """Raise if steps cannot be counted from the run's start: its mixture changed, and a new account began there."""
    since = index.shares.since if index.shares else 0
    if since and query.epoch is None:
        raise ConfigError(
            f"the mixture of {place!r} changed at epoch {since}, and its account begins there: steps of the whole run "
            f"cannot be counted. Give the epoch by --epoch."
        )
    if query.epoch is not None and query.epoch < since:
        raise ConfigError(
            f"the mixture of {place!r} changed at epoch {since}, and epoch {query.epoch} was of the one before: ask "
            f"the account of a checkpoint from then"
        )


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """Steps of one plan, done or still to come."""

    world: WorldPlan
    before: int
    """The number of steps of the epoch before these."""

    num_steps: int
    skipped: Runs = field(default_factory=empty_runs)
    """The frames left out of them."""


@dataclass(frozen=True, kw_only=True)
class _Standing:
    """The position of a run, and how it continues if nothing changes."""

    at: Resumed
    batch: BatchSpec
    world_size: int

    def world(self, index: EpisodeIndex, at: Resumed) -> WorldPlan:
        plan = plan_epoch(index, at.spec, epoch=at.epoch, legs=at.legs)
        return plan_world(plan, world_size=self.world_size, batch=self.batch)

    def next_epoch(self, num_epochs: int = 1) -> "_Standing":
        at = start(self.at.spec, world_size=self.world_size, batch=self.batch, epoch=self.at.epoch + num_epochs)
        return replace(self, at=at)


def _locate(stretches: list[_Stretch], then: _Standing, query: StepQuery, replay: Replay) -> LocatedStep:
    """Return a step of the stretches, or of the epochs after them, which all have the same number of steps."""
    left = query.step
    wanted = [one for one in stretches if query.epoch in (None, one.world.plan.epoch)]
    for one in wanted:
        if left < one.num_steps:
            return _name_step(one, left, query.rank, replay.axis)
        left -= one.num_steps
    if query.epoch is None:
        epochs, left = divmod(left, then.world(replay.index, then.at).num_steps)
        then = then.next_epoch(epochs)
    elif not wanted and query.epoch >= then.at.epoch:
        then = then.next_epoch(query.epoch - then.at.epoch)
    else:
        raise ConfigError(
            f"there is no step {query.step} in epoch {query.epoch}: {query.step - left} "
            f"{either(query.step - left, 'is', 'are')} known of it"
        )
    world = then.world(replay.index, then.at)
    if left >= world.num_steps:
        raise ConfigError(
            f"there is no step {query.step} in epoch {query.epoch}: it has {counted(world.num_steps, 'step')}"
        )
    return _name_step(_Stretch(world=world, before=0, num_steps=world.num_steps), left, query.rank, replay.axis)


def _name_step(stretch: _Stretch, step: int, rank: int, axis: FrameAxis) -> LocatedStep:
    world = stretch.world
    found = world.frames_at(step, rank)
    places = axis.starts_of(found.dataset, found.episode, found.lap - world.first_laps[found.dataset]) + found.frame
    is_skipped = stretch.skipped.times_of(places) > 0
    # The number in its dataset, LeRobot's `index`, whichever lap the frame belongs to.
    numbers = (axis.starts_of(found.dataset, found.episode) + found.frame) & ((1 << DATASET_BITS) - 1)
    columns = (found.dataset, found.episode, found.frame, numbers, found.is_repeat, is_skipped)
    frames = tuple(
        LocatedFrame(
            dataset=axis.names[dataset], episode=episode, frame=frame, index=index, is_repeat=repeat, is_skipped=skip
        )
        for dataset, episode, frame, index, repeat, skip in zip(*(column.tolist() for column in columns), strict=True)
    )
    return LocatedStep(
        epoch=world.plan.epoch,
        step_in_epoch=stretch.before + step,
        rank=rank,
        world_size=world.world_size,
        live_spans=world.plan.leg.live_spans,
        span_frames=world.plan.spec.span_frames,
        clip_frames=world.plan.spec.clip_frames,
        frames=frames,
    )


def _recorded(account: Account, replay: Replay, query: StepQuery) -> list[_Stretch]:
    """Return the stretches that the run did, without epochs that it went back before."""
    kept, _ = drop_later_epochs(account.parts, account.header.order_state)
    found: list[_Stretch] = []
    for epoch in sorted({part.epoch for part in kept}):
        before = 0
        for link in link_parts(tuple(part for part in kept if part.epoch == epoch), replay).links:
            if link.error or (link.gap and query.epoch in (None, epoch)):
                raise ConfigError(f"steps cannot be counted: {link.error or link.gap}")
            skipped = add_runs(*(skip.frames for skip in link.part.skipped))
            world = replay.world(link.part)
            found.append(_Stretch(world=world, before=before, num_steps=link.num_steps, skipped=skipped))
            before += link.num_steps
    return found


def _standing(account: Account, replay: Replay) -> _Standing:
    state, last = account.header.order_state, account.parts[-1]
    batch = BatchSpec(size=last.per_lane * (last.legs[-1].lanes // last.world_size))
    at = resume(state, replay.index, state.spec, world_size=last.world_size, batch=batch)
    return _Standing(at=at, batch=batch, world_size=last.world_size)
