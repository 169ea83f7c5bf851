"""What the account of a run says: ``raypipe account`` checks it, ``raypipe where`` finds the frames of a step.

Both read ``meta/`` of the datasets and the files of an account; no rows, no pixels. A step is found by the plan alone.
Steps count from the run's start across epochs, or within an epoch. With an account, the ranks and legs are those that
the run really had; steps beyond the account are planned on its last ranks.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from raypipe.account import (
    DATASET_BITS,
    Account,
    EpochVerdict,
    FrameAxis,
    Header,
    Replay,
    RunAccount,
    Runs,
    add_runs,
    check_account,
    drop_later_epochs,
    empty_runs,
    lay_out,
    link_parts,
    read_run_account,
)
from raypipe.dataset import index_dataset
from raypipe.errors import ConfigError, DatasetError, as_damage, noting
from raypipe.format import DatasetMeta, read_metadata
from raypipe.mixture import Mixture, is_mixture_file
from raypipe.plan import (
    SINGLE_DATASET,
    BatchSpec,
    EpisodeIndex,
    Resumed,
    SelectionSpec,
    WorldPlan,
    describe_changes,
    follow_state,
    mix_indexes,
    plan_epoch,
    plan_world,
    resume,
    start,
)
from raypipe.storage import is_plain_path, take_login
from raypipe.text import counted, either, rows_table

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS: Final = ("frames", "emitted", "skipped", "left_over", "to_come", "repeated", "rolled_back")
_NUM_THREADS: Final = 32
_SHOWN: Final = 3


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """The account of a run with its verdicts."""

    run: RunAccount
    root: str
    verdicts: tuple[EpochVerdict, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every epoch is exact."""
        return all(verdict.is_exact for verdict in self.verdicts) and not self.run.problem

    @property
    def exit_code(self) -> int:
        """0 if every epoch is exact, 1 if one is not or the account has a problem, 2 if some cannot be checked."""
        if self.is_exact:
            return 0
        return 1 if self.run.problem or any(one.is_wrong for one in self.verdicts) else 2

    def describe(self) -> tuple[str, ...]:
        """Return all verdicts as lines."""
        lines = [line for verdict in self.verdicts for line in verdict.describe()]
        problem = [f"incomplete: {self.run.problem}"] if self.run.problem else []
        return (*problem, *(lines or ["nothing was handed over yet"]))

    def to_json(self) -> dict[str, Any]:
        """Return the verdicts as a JSON object."""
        return {
            "is_exact": self.is_exact,
            "place": self.run.place,
            "root": self.root,
            "name": self.run.account.header.name,
            "state": self.run.account.header.state,
            "problem": self.run.problem,
            "epochs": [verdict.to_json() for verdict in self.verdicts],
        }


def check_run(folder: str | os.PathLike[str], *, root: str = "", name: str = "") -> CheckedRun:
    """Return the verdicts on the newest account in a checkpoint or a run's folder.

    Args:
        folder: see `read_run_account`.
        root: of the dataset, or the mixture file; empty: the place that the run used.
        name: of the loader; see `read_run_account`.

    Raises:
        RaypipeError: there is nothing that can be checked.
    """
    run = read_run_account(folder, name)
    place, index, axis = open_frames(run, root)
    verdicts = check_account(index, axis, run.account, run.attempts)
    return CheckedRun(run=run, root=place, verdicts=verdicts)


def verdict_table(checked: CheckedRun) -> "Table":
    """Return a row per epoch."""
    rows = []
    for verdict in checked.verdicts:
        counts = [f"{getattr(verdict, f'num_{name}'):,}" for name in _COLUMNS]
        word = "NOT exactly once" if verdict.is_wrong else "not checked" if verdict.unchecked else "exactly once"
        rows.append((str(verdict.epoch), *counts, word))
    titles = ("epoch", *(name.replace("_", " ") for name in _COLUMNS), "verdict")
    return rows_table(titles, rows, texts=("verdict",))


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


@dataclass(frozen=True, slots=True)
class LocatedFrame:
    """One frame of a batch."""

    dataset: str
    episode: int
    frame: int
    index: int
    """The frame's number in the whole dataset, from the lengths of the episodes."""

    is_repeat: bool
    is_skipped: bool
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


def locate_planned(
    root: str, query: StepQuery, order: Mapping[str, Any], *, batch_size: int, world_size: int, live_bytes: int | str
) -> LocatedStep:
    """Return the frames of a step of a run that never changes its ranks.

    Args:
        order: fields of an `OrderSpec`; a pipeline of the dataset chooses the others.
        batch_size: frames of a batch on each rank.
    """
    if not root:
        raise ConfigError(
            "which run? Give --account DIR of a run, or the order: --root, --batch-size, --world-size and --seed"
        )
    # Imported here: it loads torch, which the check of an account does not need.
    from raypipe.pipeline import open_with_order

    batch = BatchSpec(size=batch_size)
    _, spec, _ = open_with_order(root, batch, order, live_bytes=live_bytes)
    begin = _Standing(at=start(spec, world_size=world_size), batch=batch, world_size=world_size)
    return _locate([], begin, query, Replay(*read_frames(root, SelectionSpec())))


def locate_recorded(folder: str | os.PathLike[str], query: StepQuery, *, root: str = "", name: str = "") -> LocatedStep:
    """Return the frames of a step of a run with an account; see `read_run_account`."""
    run = read_run_account(folder, name)
    with noting(f"by the account {run.place!r}"):
        _, index, axis = open_frames(run, root)
        _check_epoch(index, query, run.place)
        if not run.account.parts:
            raise ConfigError(f"the account in {run.place!r} has no step yet; give the order by --root and the rest")
        replay = Replay(index, axis)
        stretches, standing = _recorded(run.account, replay, query), _standing(run.account, replay)
        if standing.at.legs[-1].frames_per_lane or len(standing.at.legs) > 1:
            # The rest of an unfinished epoch.
            before = sum(one.num_steps for one in stretches if one.world.plan.epoch == standing.at.epoch)
            world = standing.world(index)
            stretches.append(_Stretch(world=world, num_steps=world.num_steps, before=before))
            standing = standing.next_epoch()
        return _locate(stretches, standing, query, replay)


def step_table(located: LocatedStep) -> "Table":
    """Return a row per frame."""
    rows = []
    for frame in located.frames:
        mark = "skipped" if frame.is_skipped else "repeat" if frame.is_repeat else ""
        rows.append((frame.dataset, f"{frame.episode}", f"{frame.frame}", f"{frame.index}", mark))
    return rows_table(("dataset", "episode", "frame", "index", ""), rows, texts=("dataset", ""))


def _check_epoch(index: EpisodeIndex, query: StepQuery, place: str) -> None:
    """Raise if steps cannot be counted from the run's start: its mixture changed, and a new account began there."""
    since = index.shares.since if index.shares else 0
    if since and query.epoch is None:
        why = "its account begins there: steps of the whole run cannot be counted. Give the epoch by --epoch."
    elif query.epoch is not None and query.epoch < since:
        why = f"epoch {query.epoch} was of the one before: ask the account of a checkpoint from then"
    else:
        return
    raise ConfigError(f"the mixture of {place!r} changed at epoch {since}, and {why}")


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """Steps of one plan, done or still to come."""

    world: WorldPlan
    num_steps: int
    before: int = 0
    """The number of steps of the epoch before these."""

    skipped: Runs = field(default_factory=empty_runs)


@dataclass(frozen=True, kw_only=True)
class _Standing:
    """The position of a run, and how it continues if nothing changes."""

    at: Resumed
    batch: BatchSpec
    world_size: int

    def world(self, index: EpisodeIndex) -> WorldPlan:
        plan = plan_epoch(index, self.at.spec, epoch=self.at.epoch, legs=self.at.legs)
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
        epochs, left = divmod(left, then.world(replay.index).num_steps)
        then = then.next_epoch(epochs)
    elif not wanted and query.epoch >= then.at.epoch:
        then = then.next_epoch(query.epoch - then.at.epoch)
    else:
        raise ConfigError(
            f"there is no step {query.step} in epoch {query.epoch}: {query.step - left} "
            f"{either(query.step - left, 'is', 'are')} known of it"
        )
    world = then.world(replay.index)
    if left >= world.num_steps:
        raise ConfigError(
            f"there is no step {query.step} in epoch {query.epoch}: it has {counted(world.num_steps, 'step')}"
        )
    return _name_step(_Stretch(world=world, num_steps=world.num_steps), left, query.rank, replay.axis)


def _name_step(stretch: _Stretch, step: int, rank: int, axis: FrameAxis) -> LocatedStep:
    world = stretch.world
    found = world.frames_at(step, rank)
    places = axis.starts_of(found.dataset, found.episode, found.lap - world.first_laps[found.dataset]) + found.frame
    is_skipped = stretch.skipped.times_of(places) > 0
    # The number in its dataset, LeRobot's `index`, whichever lap the frame belongs to.
    numbers = (axis.starts_of(found.dataset, found.episode) + found.frame) & ((1 << DATASET_BITS) - 1)
    columns = (found.dataset, found.episode, found.frame, numbers, found.is_repeat, is_skipped)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return LocatedStep(
        epoch=world.plan.epoch,
        step_in_epoch=stretch.before + step,
        rank=rank,
        world_size=world.world_size,
        live_spans=world.plan.leg.live_spans,
        span_frames=world.plan.spec.span_frames,
        clip_frames=world.plan.spec.clip_frames,
        frames=tuple(LocatedFrame(axis.names[dataset], *values) for dataset, *values in rows),
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
            found.append(_Stretch(world=world, num_steps=link.num_steps, before=before, skipped=skipped))
            before += link.num_steps
    return found


def _standing(account: Account, replay: Replay) -> _Standing:
    state, last = account.header.order_state, account.parts[-1]
    batch = BatchSpec(size=last.per_lane * (last.legs[-1].lanes // last.world_size))
    at = resume(state, replay.index, state.spec, world_size=last.world_size, batch=batch)
    return _Standing(at=at, batch=batch, world_size=last.world_size)


def open_frames(run: RunAccount, root: str) -> tuple[str, EpisodeIndex, FrameAxis]:
    """Return what an account covers: its root, or its members in words; the frames of an epoch; and the axis."""
    header = run.account.header
    if not (root or header.root or header.members):
        raise ConfigError(f"the account {run.place!r} names no dataset: give it, or the mixture file, by --root")
    root = take_login(root)
    _check_named(run, root)
    members = counted(len(header.members), "dataset")
    place = root or header.root or members
    try:
        if header.members and not root:
            index, axis = _read_members(header)
        elif bool(header.members) != is_mixture_file(root or header.root):
            kind = "a mixture: give a mixture file" if header.members else "a single dataset"
            raise ConfigError(f"the account {run.place!r} is of {kind}, and {place!r} is none")
        else:
            index, axis = read_frames(place, parse_selection(header.selection))
    except DatasetError as error:
        what = f"a mixture of {members}" if header.members else f"the dataset {header.root!r}"
        error.add_note(f"the account {run.place!r} is of {what}; give its place now by --root")
        raise
    return place, _at_state(index, header, place), axis


def _check_named(run: RunAccount, root: str) -> None:
    """Raise for a place that only the account names, unless it is a path on this machine.

    An account may come from a stranger: it must not send this machine to servers that the user has not named.
    """
    header = run.account.header
    places = [] if root else [str(one["root"]) for one in header.members] or [header.root]
    unknown = [place for place in places if not is_plain_path(place)]
    if unknown:
        remedy = "a mixture file that lists its datasets, by --root" if header.members else f"--root {unknown[0]}"
        raise ConfigError(
            f"the account {run.place!r} is of {', '.join(map(repr, unknown[:_SHOWN]))}, and of what an account names "
            f"only paths of this machine are opened. If you trust it, name the dataset too: give {remedy}"
        )
    selections = [header.selection] if not header.members else [] if root else [o["selection"] for o in header.members]
    for weights in (str(selection.get("weights", "")) for selection in selections):
        if "://" in weights and not _is_below(weights, root):
            raise ConfigError(
                f"the account {run.place!r} takes weights from {weights!r}, which you have not named: only weights on "
                f"this machine, or below the folder of --root, are read"
            )


def _is_below(place: str, root: str) -> bool:
    return bool(root) and place.startswith(f"{root.rstrip('/')}/") and ".." not in place.split("/")


def read_frames(root: str, selection: SelectionSpec) -> tuple[EpisodeIndex, FrameAxis]:
    """Return the frames of an epoch of the dataset or mixture at `root`, and the axis of all its episodes."""
    if is_mixture_file(root):
        mixture = Mixture(root)
        return mixture.index(), _lay_out(mixture.names, [dataset.meta for dataset in mixture.datasets])
    meta = read_metadata(root)
    index = index_dataset(SINGLE_DATASET, meta, selection)
    return index, _lay_out((SINGLE_DATASET,), [meta], has_laps=index.rates is not None)


def parse_selection(saved: Mapping[str, Any]) -> SelectionSpec:
    """Return the selection with these saved fields.

    Raises:
        ConfigError: they are not the fields of a selection.
    """
    with as_damage(
        lambda error: ConfigError(f"the account has no selection that this raypipe knows ({error}): {dict(saved)!r}")
    ):
        return SelectionSpec(**saved)


def _read_members(header: Header) -> tuple[EpisodeIndex, FrameAxis]:
    shares = header.order_state.shares
    names = [str(member["name"]) for member in header.members]
    if shares is None or list(shares.names) != names:
        raise ConfigError(f"the account lists the members {', '.join(names)}, and its state is of another mixture")
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        metas = list(pool.map(read_metadata, [str(member["root"]) for member in header.members]))
    indexes = [
        index_dataset(name, meta, parse_selection(member["selection"]))
        for name, meta, member in zip(names, metas, header.members, strict=True)
    ]
    revisions = [one.revision for one in shares.members]
    return mix_indexes(indexes, shares.frames, revisions=revisions), _lay_out(names, metas)


def _at_state(index: EpisodeIndex, header: Header, place: str) -> EpisodeIndex:
    """Return the index with each dataset of a mixture at its position in the account's saved state."""
    state = header.order_state
    if (state.shares is None) != (index.shares is None):
        kinds = ("a single dataset", "a mixture")
        raise ConfigError(
            f"the state of the account is of {kinds[state.shares is not None]}, and the account of "
            f"{kinds[index.shares is not None]}: one of the two was changed"
        )
    changes = describe_changes(state.shares, index.shares) if state.shares and index.shares else ()
    if changes:
        listed = "\n".join(f"  {line}" for line in changes)
        raise ConfigError(
            f"the account is of another mixture than {place!r} is:\n{listed}\nGive the mixture file as it was then, or "
            f"none: the account knows where its datasets were."
        )
    return follow_state(state, index)[1]


def _lay_out(names: Sequence[str], metas: Sequence[DatasetMeta], *, has_laps: bool = True) -> FrameAxis:
    return lay_out(names, [(meta.episodes.episode_index, meta.episodes.length) for meta in metas], has_laps=has_laps)
