"""`RankLoader`: the torch batches of one rank, and where it stands, as a small state.

What the user holds is counted, not what is prefetched: the state after a batch is the same whatever was read ahead.
"""

import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raypipe.account import Account, Header, Ledger, Part
from raypipe.account.seal import seal_account
from raypipe.ahead import Ahead
from raypipe.dataset import Dataset
from raypipe.decode.spec import ASSIGNED_CPUS
from raypipe.errors import ConfigError
from raypipe.keeper import AccountKeeper
from raypipe.loader_spec import LoaderSpec, change_spec
from raypipe.meeting import PassPlace
from raypipe.metrics import Live, LoaderStats, Meter, WorldStats, sum_up
from raypipe.mixture import Mixture
from raypipe.plan import (
    OrderState,
    Resumed,
    WorldPlan,
    follow_state,
    plan_epoch,
    plan_world,
    resume,
    start,
    state_after,
)
from raypipe.progress import Bar, progress_bar
from raypipe.rank_job import BlockSource, RankJob, warn_of_other_source, with_source
from raypipe.run import EpochRun
from raypipe.skips import BadSpan, describe_spans
from raypipe.wording import counted

if TYPE_CHECKING:
    import pyarrow.fs

_PUBLISH_EVERY_S: Final = 2.0


class RankLoader:
    """The batches of one rank, and where it stands.

    ``iter(loader)`` gives the rest of the current epoch; then the loader stands at the next one. It is picklable as
    long as no iteration is under way. All ranks must do the same things in the same order: iterate, break, load.
    """

    name: str
    """What the run calls it: the file of its state in a checkpoint, and the tag of its metrics."""

    def __init__(self, job: RankJob, source: BlockSource, spec: LoaderSpec, name: str = "train") -> None:
        self.name = name
        self._job = job
        self._source = source
        self._spec = spec
        self._meter = Meter()
        self._last_live = Live()
        self._published_at = 0.0
        self._lock = threading.Lock()
        self._num_loads = 0
        self._has_begun = False
        """Whether it was loaded or iterated before."""
        self._ledger = Ledger(attempt=self._attempt)
        self._skipped: list[BadSpan] = []
        self._keeper: AccountKeeper | None = None
        self._place: PassPlace | None = None
        self._last_epoch = spec.num_epochs - 1
        self._ahead: Ahead | None = None
        self._run: EpochRun | None = None
        self._index = job.index
        self._stand_at(start(job.order, world_size=job.world_size))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches that are left of the current epoch."""
        self._meter.start_iteration()
        is_on = self._spec.progress and self._job.rank == 0
        with progress_bar(f"epoch {self._at.epoch}", len(self), self._first_waits_for, is_on=is_on) as bar:
            yield from self._iterate(bar)

    def _iterate(self, bar: Bar) -> Iterator[dict[str, Any]]:
        self._has_begun = True
        run = self._open_run()
        is_done = False
        try:
            for batch in run:
                self._step += 1
                is_done = self._step == run.num_steps
                if is_done:
                    self._stand_at_next_epoch()
                bar.advance(self._meter.read(Live()))
                if time.monotonic() > self._published_at + _PUBLISH_EVERY_S:
                    self._publish()
                    self._keep_account(is_due_only=True)
                yield batch
            if not run.num_steps:
                is_done = True
                self._stand_at_next_epoch()
        finally:
            # Another iteration may have begun, after a break from outside.
            if self._run is run:
                self._close_run(is_done=is_done)
                self._publish()
                self._keep_account()

    def _first_waits_for(self) -> str:
        """Return what the first batch of an iteration waits for; may be asked by another thread."""
        run = self._run
        return run.describe_start() if run is not None else "opening the feed"

    def __len__(self) -> int:
        """Batches left in the current epoch; the same on every rank."""
        return self._plan().num_steps - self._step

    @property
    def dataset(self) -> Dataset | Mixture:
        """What the batches are made of; its `features` and `stats` are what a policy is built from."""
        return self._job.dataset

    @property
    def rank(self) -> int:
        """Who it is among the ranks."""
        return self._job.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._job.world_size

    @property
    def epoch(self) -> int:
        """The epoch in which the next batch is."""
        return self._at.epoch

    def steps(self, num_steps: int) -> Iterator[dict[str, Any]]:
        """Yield the next `num_steps` batches, across the ends of epochs."""
        if num_steps < 0:
            raise ConfigError(f"num_steps must be at least 0, got {num_steps}")
        left = num_steps
        while left:
            self._last_epoch = max(self._last_epoch, self.epoch + (left > len(self)))
            for batch in self:
                left -= 1
                yield batch
                if not left:
                    return

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of another epoch; does nothing if the loader is in that epoch already."""
        if epoch == self._at.epoch:
            return
        if epoch < 0:
            raise ConfigError(f"epoch must be at least 0, got {epoch}")
        self._leave_order()
        self._stand_at(self._start_of(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, as a small JSON object: the same on every rank."""
        return with_source(state_after(self._plan(), self._step).to_dict(), self._job.dataset)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, also of another number of ranks or another batch size.

        Raises:
            ResumeError: the state belongs to another order; shows both sides.
        """
        saved, index = follow_state(
            OrderState.from_dict(state), self._job.index, allow_mixture_change=self._job.allow_mixture_change
        )
        at = resume(saved, index, self._job.order_of(saved), world_size=self._job.world_size, batch=self._job.batch)
        if self._job.rank == 0:
            warn_of_other_source(state, self._job.dataset)
        self._leave_order()
        self._index = index
        if self._has_begun:
            # What was handed over since then is rolled back: the account goes on under another name, the same on all
            # ranks, whichever of them carries parts.
            self._num_loads += 1
        self._has_begun = True
        self._ledger = Ledger(self._of_this_mixture(self._ledger.parts()), attempt=self._attempt)
        self._stand_at(at)

    def account(self) -> Account:
        """Return what this rank has handed over, by epoch and leg, with the parts that it carries of earlier ones."""
        job = self._job
        header = Header(
            root="" if job.mixture else str(job.context.datasets[0].meta.root),
            selection={} if job.mixture else asdict(job.selection),
            state=self.state_dict(),
            name=self.name,
            members=job.mixture.sources() if job.mixture else (),
        )
        return seal_account(header, self._ledger.parts())

    def load_account(self, parts: Iterable[Part]) -> None:
        """Carry the parts of an account on that led to the loaded state; on one rank, rank 0. Call it after loading.

        Episodes that were bad before count in `BadDataSpec.max_bad_episodes`. Where the mixture has changed, the
        account begins anew: the epochs before are in that of the checkpoint before.
        """
        carried = self._of_this_mixture(parts)
        self._ledger = Ledger(carried, attempt=self._attempt)
        known = {(skip.dataset, skip.episode): skip.why for part in carried for skip in part.skipped}
        if known:
            self._source.note_bad(known)

    def _of_this_mixture(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        since = self._index.shares.since if self._index.shares else 0
        return tuple(part for part in parts if part.epoch >= since)

    def keep_account(self, folder: str | Path, filesystem: "pyarrow.fs.FileSystem | None" = None) -> None:
        """Write the account to a folder from now on, every 2 s or so and after every epoch: for `raypipe account`.

        So it is known afterwards what was handed over after the last checkpoint, and again after a restart.

        Args:
            folder: of the run, for all ranks and attempts; a path or URI.
            filesystem: of the folder, where it is no plain path or URI.
        """
        self._keeper = AccountKeeper(str(folder), filesystem, self.name)

    @property
    def skipped(self) -> tuple[BadSpan, ...]:
        """What this rank has left out as bad data since it was made, where the policy says so."""
        return tuple(dict.fromkeys([*self._skipped, *(self._run.bad_spans if self._run else ())]))

    def stats(self) -> LoaderStats:
        """Return the figures of this loader so far."""
        return self._meter.read(self._run.live() if self._run else self._last_live)

    def world_stats(self) -> WorldStats:
        """Return the figures of all ranks together: which one waits most, and for what."""
        return sum_up(self.rank_stats())

    def rank_stats(self) -> dict[int, LoaderStats]:
        """Return the figures of every rank that has told them, by rank; asks where the ranks meet."""
        self._publish()
        return {**self._source.collect(), self._job.rank: self.stats()}

    def with_settings(self, **settings: Any) -> "RankLoader":
        """Return this rank's loader with other fields of `LoaderSpec`, standing where this one stands."""
        changed = RankLoader(self._job, self._source, change_spec(self._spec, settings), self.name)
        changed.load_state_dict(self.state_dict())
        changed._num_loads, changed._has_begun = self._num_loads, self._has_begun
        changed.load_account(self._ledger.parts())
        changed._keeper = self._keeper
        return changed

    def close(self) -> None:
        """End an iteration that is under way, and what was fetched ahead."""
        self._leave_order()

    def __enter__(self) -> "RankLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._run is not None or self._ahead is not None:
            raise ConfigError("this loader is being iterated and cannot be sent elsewhere; call close() first")
        # A place is of one process: the copy begins anew. Clocks are of one machine.
        return {**self.__dict__, "_world": None, "_lock": None, "_place": None, "_published_at": 0.0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def _publish(self) -> None:
        self._published_at = time.monotonic()
        self._source.publish(self.name, self._job.rank, self.stats())

    def _keep_account(self, *, is_due_only: bool = False) -> None:
        if self._keeper is not None and (self._keeper.is_due or not is_due_only):
            self._keeper.write(self._attempt, self.account, self._job.rank, self._job.world_size)

    def save_account(self) -> None:
        """Write the account beside the run's checkpoints, under the state that it leads to.

        For a rank that puts nothing into a checkpoint: whoever goes on from it finds the account there.
        """
        if self._keeper is not None:
            self._keeper.save(self.account(), self._job.rank, self._job.world_size)

    def mark_checkpoint(self) -> None:
        """Note beside the run's checkpoints that one has this state: what other ranks save for it stays.

        For rank 0, which alone knows.
        """
        if self._keeper is not None:
            self._keeper.mark(self.state_dict())

    @property
    def _attempt(self) -> str:
        return f"{self._source.attempt}-{self._num_loads:03d}" if self._num_loads else self._source.attempt

    def _stand_at(self, at: Resumed) -> None:
        self._at = at
        self._world: WorldPlan | None = None
        self._step = 0

    def _stand_at_next_epoch(self) -> None:
        self._stand_at(self._start_of(self._at.epoch + 1))

    def _start_of(self, epoch: int) -> Resumed:
        # At the first start lanes that the user gave are not replaced silently; see `first_leg`.
        batch = self._job.batch if self._has_begun else None
        return start(self._at.spec, world_size=self._job.world_size, batch=batch, epoch=epoch)

    def _plan(self) -> WorldPlan:
        if self._world is None:
            self._world = self._plan_of(self._at)
        return self._world

    def _plan_of(self, at: Resumed) -> WorldPlan:
        plan = plan_epoch(self._index, at.spec, epoch=at.epoch, legs=at.legs)
        return plan_world(plan, world_size=self._job.world_size, batch=self._job.batch)

    def _open_run(self) -> EpochRun:
        if self._run is not None:
            raise ConfigError("this loader is being iterated already; end that iteration first, or call close()")
        if self._step:
            world = self._plan().at(self._step)
            self._stand_at(replace(self._at, legs=world.plan.legs))
            self._world = world
        self._check_others_go_on()
        with self._lock:
            ahead, self._ahead = self._ahead, None
            place = self._place.following if self._place else None
        try:
            world, run = ahead.take() if ahead else (self._plan(), self._start_run(self._plan(), place, None))
        except BaseException:
            # Ranks differ, or the user has lost patience: the next try begins anew.
            self._place = None
            raise
        self._world = world
        run.follow = lambda: self._look_ahead(run)
        self._ledger.begin(world, self._job.rank)
        run.record = self._ledger.record
        with self._lock:
            self._run, self._place = run, run.place
        if run.is_received:
            self._look_ahead(run)
        return run

    def _check_others_go_on(self) -> None:
        if self._place is None:
            return
        try:
            self._source.go_on(self._job.rank, self._place.following)
        except BaseException:
            self._leave_order()
            raise

    def _start_run(self, world: WorldPlan, place: PassPlace | None, before: EpochRun | None) -> EpochRun:
        spec, job, threads = self._spec, self._job, self._spec.num_threads
        num_threads = self._source.assigned_cpus() if threads == ASSIGNED_CPUS else threads
        executor = self._source.open_executor(job.context, num_threads, self._meter)
        run = EpochRun(job.context, world, job.rank, spec, self._meter, executor, job.live_bytes)
        run.start(self._source.open(world, job.rank, place), before)
        return run

    def _look_ahead(self, run: EpochRun) -> None:
        """Start the next epoch, if it is known to follow; called when the last block of `run` has arrived.

        Only for the run that is being iterated: one that was fetched ahead may have all its blocks long before, and
        one that was left may get its last block after it.
        """
        with self._lock:
            if run is not self._run or self._ahead is not None or run.epoch >= self._last_epoch:
                return
            at = self._start_of(run.epoch + 1)
            place = run.place.following
            self._ahead = Ahead(lambda: self._start_ahead(at, place, run))

    def _start_ahead(self, at: Resumed, place: PassPlace, before: EpochRun) -> tuple[WorldPlan, EpochRun]:
        world = self._plan_of(at)
        return world, self._start_run(world, place, before)

    def _close_run(self, *, is_done: bool) -> None:
        with self._lock:
            run, self._run = self._run, None
        if run is None:
            return
        run.close()
        self._note_skips(run)
        self._last_live = replace(run.live(), spans=0, waiting_spans=0, row_bytes=0, held_bytes=0, in_flight_bytes=0)
        if not is_done:
            self._leave_order()

    def _note_skips(self, run: EpochRun) -> None:
        # In a mixture a span may come once in every lap of an epoch.
        bad = [span for span in dict.fromkeys(run.bad_spans) if span not in self._skipped]
        if bad:
            self._skipped.extend(bad)
            warnings.warn(
                f"rank {self._job.rank} left out {counted(len(bad), 'bad span')} in epoch "
                f"{run.epoch}:\n{describe_spans(bad)}",
                stacklevel=2,
            )

    def _leave_order(self) -> None:
        """Give up what is under way: the next blocks are asked for anew, together with the other ranks."""
        self._close_run(is_done=True)
        with self._lock:
            ahead, self._ahead = self._ahead, None
            self._place = None
        if ahead is not None:
            ahead.discard()
