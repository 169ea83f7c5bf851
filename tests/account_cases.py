"""Runs carried out by hand with the pure plan: ranks that record, crash and go on, and the truth to compare with."""

import importlib.util
import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
from plan_cases import plan_resumed, plan_start

from raypipe.account import Account, FrameAxis, Handed, Header, Ledger, Skip, lay_out, merge_parts
from raypipe.account.checkpoint import RUN_FOLDER, account_name
from raypipe.account.file import write_account
from raypipe.account.folder import CHECKPOINT_FOLDER
from raypipe.account.parts import HEAD, seal_account
from raypipe.plan import EpisodeIndex, OrderSpec, OrderState, WorldPlan, state_after, state_of

CHECKER = Path(__file__).parents[1] / "examples/check_account.py"


def axis_of(index: EpisodeIndex) -> FrameAxis:
    """Return the axis of an index that has all episodes, each in one row."""
    numbers = [index.dataset == number for number in range(len(index.dataset_names))]
    episodes = [(index.episode[mine], index.length[mine]) for mine in numbers]
    return lay_out(index.dataset_names, episodes, has_laps=index.shares is not None)


@dataclass
class Log:
    """What was really handed over, as (epoch, frame number)."""

    emitted: list[tuple[int, int]] = field(default_factory=list)
    repeated: list[tuple[int, int]] = field(default_factory=list)
    skipped: list[tuple[int, int]] = field(default_factory=list)

    def copy(self):
        return Log(list(self.emitted), list(self.repeated), list(self.skipped))

    def count(self, kind: str) -> Counter:
        return Counter(epoch for epoch, _ in getattr(self, kind))


class HandRun:
    """A run: start it on ranks, do steps, save, crash, start again.

    `tamper` may change what a rank records: it gets the epoch's pass as ``handed[rank][step]``.
    """

    root = "made"
    name = "train"
    members = ()
    selection: ClassVar[dict] = {}

    def __init__(self, index: EpisodeIndex, spec: OrderSpec, *, bad=(), tamper=None, axis=None):
        self.index, self.spec, self.bad = index, spec, set(bad)
        self.axis = axis or axis_of(index)
        self.tamper = tamper
        self.log, self.rolled_back = Log(), Counter()
        self.heartbeats = []
        self.num_starts = 0
        self.state: OrderState | None = None
        self._saved: tuple[OrderState | None, tuple, Log] = (None, (), Log())

    def start(self, world_size: int, per_lane: int = 3) -> None:
        """Start on so many ranks from what was saved last."""
        self.state, prior, log = self._saved
        self.log = log.copy()
        self.world_size, self.per_lane = world_size, per_lane
        self.attempt = f"attempt-{self.num_starts:03d}"
        self.num_starts += 1
        self.ledgers = [Ledger(prior if rank == 0 else (), attempt=self.attempt) for rank in range(world_size)]
        self._begin()

    def steps(self, num_steps: int) -> None:
        """Do so many steps, across the ends of epochs."""
        while num_steps:
            count = min(num_steps, self.world.num_steps - self._step)
            self._hand_over(count)
            self._step += count
            num_steps -= count
            self._settle()

    def interrupt(self) -> None:
        """Leave the iteration and take it up again, as a `break` in a training loop does."""
        self._begin()

    def go_back(self, state: OrderState) -> None:
        """Load an earlier state in the same processes."""
        self.state = state
        self._begin()

    def save(self) -> Account:
        """Save a checkpoint."""
        account = self.account()
        self._saved = (self.state, account.parts, self.log.copy())
        return account

    def crash(self) -> None:
        """Lose everything after the last checkpoint but what ranks wrote down while running."""
        self.heartbeats += [part for ledger in self.ledgers for part in ledger.parts()]
        self.rolled_back += self.log.count("emitted") - self._saved[2].count("emitted")

    def account(self, *, without_rank=-1) -> Account:
        parts = [ledger.parts() for rank, ledger in enumerate(self.ledgers) if rank != without_rank]
        return Account(header=self.header(), parts=merge_parts(part for rank in parts for part in rank))

    def header(self) -> Header:
        state = self.state.to_dict()
        return Header(root=self.root, selection=self.selection, state=state, name=self.name, members=self.members)

    def write(self, folder: Path) -> None:
        """Write the account of every rank to a folder, as ranks do."""
        for rank, ledger in enumerate(self.ledgers):
            account = seal_account(self.header(), ledger.parts())
            write_account(folder / account_name(rank, self.world_size), account)
            if rank == 0:
                self.head = account.header.head

    def write_checkpoint(self, folder: Path) -> None:
        """Save, and write the accounts of a checkpoint."""
        self.save()
        self.write(folder / CHECKPOINT_FOLDER / self.name)
        saved = {**self.header().state, HEAD: self.head}
        (folder / "raypipe" / f"{self.name}.json").write_text(json.dumps(saved))

    def write_heartbeat(self, folder: Path) -> None:
        """Write what this attempt has done so far to the run's folder."""
        self.write(folder / RUN_FOLDER / self.name / self.attempt)

    def _begin(self) -> None:
        options = {"world_size": self.world_size, "per_lane": self.per_lane}
        if self.state is None:
            self.world: WorldPlan = plan_start(self.index, self.spec, **options)
            self.state = state_of(self.world.plan)
        else:
            self.world = plan_resumed(self.state, self.index, self.spec, **options)
        self._step = 0
        for rank, ledger in enumerate(self.ledgers):
            ledger.begin(self.world, rank)
        self._plans = [self.world.rank(rank) for rank in range(self.world_size)]
        self._batches = [plan.batches() for plan in self._plans]
        self._settle()

    def _settle(self) -> None:
        if self._step == self.world.num_steps:
            epoch_over = state_of(self.world.plan).next_epoch()
            self.state = epoch_over
            self._begin()
        else:
            self.state = state_after(self.world, self._step)

    def _hand_over(self, num_steps: int) -> None:
        handed = [
            [self._handed(rank, batch) for batch in islice(batches, num_steps)]
            for rank, batches in enumerate(self._batches)
        ]
        if self.tamper is not None:
            self.tamper(handed)
        epoch = self.world.plan.epoch
        for ledger, batches in zip(self.ledgers, handed, strict=True):
            for one in batches:
                ledger.record(one)
                self.log.emitted += [(epoch, int(number)) for number in one.numbers[~one.is_repeat]]
                self.log.repeated += [(epoch, int(number)) for number in one.numbers[one.is_repeat]]
                self.log.skipped += [(epoch, int(number)) for skip in one.skipped for number in skip.frames.values()]

    def _handed(self, rank, batch) -> Handed:
        """Return what a rank records of a planned batch: frames of bad episodes are skipped, as in the loader."""
        queue = self._plans[rank].queue
        dataset, episode = queue.dataset[batch.span], queue.episode[batch.span]
        lap = queue.lap[batch.span] - self.world.first_laps[dataset]
        numbers = self.axis.starts_of(dataset, episode, lap) + batch.frame
        is_hole = np.isin(episode, list(self.bad))
        lanes = queue.lane[batch.span[~batch.is_repeat]]
        skipped = tuple(
            Skip.of(robot, number, numbers[mine], f"episode {number} is bad\nsecond line")
            for robot in np.unique(dataset).tolist()
            for number in sorted(set(episode[is_hole & ~batch.is_repeat & (dataset == robot)].tolist()))
            for mine in [is_hole & ~batch.is_repeat & (episode == number) & (dataset == robot)]
        )
        if is_hole.all():
            good = int(self.index.episode[~np.isin(self.index.episode, list(self.bad))][0])
            row = int(np.flatnonzero(self.index.episode == good)[0])
            stand_in = self.axis.starts_of(self.index.dataset[[row]], self.index.episode[[row]])
            return Handed(numbers=stand_in, is_repeat=np.array([True]), lanes=lanes, skipped=skipped)
        return Handed(numbers=numbers[~is_hole], is_repeat=batch.is_repeat[~is_hole], lanes=lanes, skipped=skipped)


def load_checker():
    """Return `examples/check_account.py` as a module."""
    spec = importlib.util.spec_from_file_location("check_account", CHECKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
