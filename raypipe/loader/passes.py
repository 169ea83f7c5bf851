"""A pass over the rest of an epoch: where it begins (`Stand`), and the start of its run, also ahead (`Ahead`).

A loader moves by replacing its stand. So any thread that reads the stand gets a plan, a step and a ledger that belong
together.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from raypipe.account import Ledger, Page
from raypipe.decode import ASSIGNED_CPUS
from raypipe.feed import Meter, PassPlace
from raypipe.loader.epoch_run import EpochRun
from raypipe.loader.job import LoaderSpec, RankJob
from raypipe.plan import (
    EpisodeIndex,
    OrderState,
    Resumed,
    WorldPlan,
    plan_epoch,
    plan_world,
    start,
    state_after,
    state_of,
)

if TYPE_CHECKING:
    from raypipe.feed import FeederSource, LocalSource


@dataclass(eq=False, kw_only=True)
class Stand:
    """A place in the order where a pass begins, and what the loader has handed over since."""

    job: RankJob
    index: EpisodeIndex
    at: Resumed
    """Where the pass begins."""
    ledger: Ledger
    is_loaded: bool = False
    """Whether the pass begins here because of a loaded state."""
    page: Page | None = None
    """The ledger's page of the pass; None until it begins. `Page.num_handed` is the step."""

    @cached_property
    def world(self) -> WorldPlan:
        """The plan of the rest of the epoch, from where the pass begins."""
        plan = plan_epoch(self.index, self.at.spec, epoch=self.at.epoch, legs=self.at.legs)
        return plan_world(plan, world_size=self.job.world_size, batch=self.job.batch)

    @property
    def num_handed(self) -> int:
        """Batches of the pass that the training loop has received."""
        return self.page.num_handed if self.page is not None else 0

    @property
    def is_over(self) -> bool:
        """Whether the pass has reached the end of its epoch."""
        return self.page is not None and self.page.num_handed == self.world.num_steps

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.at.epoch + self.is_over

    @property
    def num_left(self) -> int:
        """Batches left in that epoch."""
        return self.following.world.num_steps if self.is_over else self.world.num_steps - self.num_handed

    @property
    def num_steps(self) -> int:
        """Batches of that whole epoch, if these ranks did it from its start."""
        here = self.following if self.is_over else self
        is_rest = any(leg.frames_per_lane for leg in here.at.legs)
        return (here.beginning if is_rest else here).world.num_steps

    def state(self) -> OrderState:
        """Return the state after the last batch handed over."""
        num_handed = self.num_handed
        if self.page is not None and num_handed == self.world.num_steps:
            return state_of(self.world.plan).next_epoch()
        return state_after(self.world, num_handed)

    @cached_property
    def following(self) -> "Stand":
        """The stand at the start of the next epoch; the same object each time."""
        return self.start_of(self.at.epoch + 1)

    @cached_property
    def beginning(self) -> "Stand":
        """The stand at the start of this epoch; the same object each time."""
        return self.start_of(self.at.epoch)

    def start_of(self, epoch: int, *, is_first: bool = False) -> "Stand":
        """Return the stand at the start of an epoch.

        Args:
            is_first: whether the run has not begun yet; it then keeps the lanes that the user gave; see `first_leg`.
        """
        batch = None if is_first else self.job.batch
        at = start(self.at.spec, world_size=self.job.world_size, batch=batch, epoch=epoch)
        return replace(self, at=at, is_loaded=False, page=None)

    def onward(self) -> "Stand":
        """Return a stand at the same place where another pass can begin; itself if no pass has begun."""
        if self.page is None:
            return self
        if self.is_over:
            return self.following
        if not self.num_handed:
            return replace(self, page=None)
        world = self.world.at(self.num_handed)
        moved = replace(self, at=replace(self.at, legs=world.plan.legs), is_loaded=False, page=None)
        # Avoid planning again.
        moved.world = world
        return moved

    def __getstate__(self) -> dict[str, Any]:
        # Leave out the page, which is valid only in this process, and the plan, which is cheap to make again.
        here = self.onward()
        kept = {name: getattr(here, name) for name in ("job", "index", "at", "ledger", "is_loaded")}
        return {**kept, "page": None}


@dataclass(frozen=True)
class RunStarter:
    """Starts the runs of one loader without a reference to it, so the starting thread does not keep it alive."""

    job: RankJob
    source: "LocalSource | FeederSource"
    spec: LoaderSpec
    meter: Meter

    def start(self, stand: Stand, place: PassPlace | None, before: EpochRun | None = None) -> EpochRun:
        """Return the run of a pass that begins at `stand`. Waits for the other ranks."""
        job, threads = self.job, self.spec.num_threads
        num_threads = self.source.assigned_cpus() if threads == ASSIGNED_CPUS else threads
        executor = self.source.open_executor(job.context, num_threads, self.meter)
        spec = replace(self.spec, num_threads=num_threads)
        run = EpochRun(job, stand.world, spec, self.meter, executor)
        try:
            feed = self.source.open(stand.world, job.rank, place)
            run.start(feed, self.source.meeting.report_bad, before)
        except BaseException:
            run.close()
            raise
        return run


class Ahead:
    """The run of the next epoch, which a thread starts. When Python collects this object, the run is given up."""

    def __init__(self, stand: Stand, begin: Callable[[], EpochRun]) -> None:
        self.stand = stand
        """Where its pass begins."""
        self._start = _Start(begin)
        self._giving_up = weakref.finalize(self, self._start.give_up)
        self._giving_up.atexit = False

    def wait(self) -> EpochRun:
        """Return the run when it is ready. It still ends with this object, until you call `release`."""
        started = self._start.wait()
        if isinstance(started, BaseException):
            raise started
        return started

    def release(self) -> None:
        """Hand the run over to the caller of `wait`: it no longer ends with this object."""
        self._giving_up.detach()

    def discard(self) -> None:
        """Close the run when it is ready, and ignore an error in starting it."""
        started = self._start.wait()
        if isinstance(started, EpochRun):
            started.close()


class _Start:
    def __init__(self, begin: Callable[[], EpochRun]) -> None:
        self._result: EpochRun | BaseException | None = None
        self._is_given_up = False
        self._thread = threading.Thread(target=self._work, args=(begin,), name="raypipe-next-epoch", daemon=True)
        self._thread.start()

    def wait(self) -> EpochRun | BaseException:
        self._thread.join()
        assert self._result is not None
        return self._result

    def give_up(self) -> None:
        # Python may call this between any two lines of any thread, so it must not wait or take a lock.
        self._is_given_up = True
        if isinstance(self._result, EpochRun):
            self._result.give_up()

    def _work(self, begin: Callable[[], EpochRun]) -> None:
        try:
            self._result = begin()
        except BaseException as error:
            self._result = error
        if self._is_given_up and isinstance(self._result, EpochRun):
            self._result.close()
