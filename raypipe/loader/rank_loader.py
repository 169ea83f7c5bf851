"""`RankLoader`: the torch batches of one rank, and its position as a small state.

The state counts batches that the training loop has received, not prefetched ones, so it does not depend on what was
read ahead. Counting a batch and yielding it are atomic: Ctrl-C comes before both or after both.
"""

import os
import threading
import time
import warnings
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

import torch.utils.data

from raypipe.account import Account, AccountKeeper, Header, Ledger, Page, Part, seal_account
from raypipe.dataset import Dataset
from raypipe.errors import ConfigError
from raypipe.feed import BadSpan, Live, LoaderStats, Meter, PassPlace, WorldStats, describe_spans, sum_up
from raypipe.loader.assembly import do_nothing
from raypipe.loader.epoch_run import Ahead, EpochRun, start_run
from raypipe.loader.job import (
    LoaderSettings,
    LoaderSpec,
    RankJob,
    Stand,
    change_spec,
    warn_of_other_origin,
    with_source,
)
from raypipe.mixture import Mixture
from raypipe.plan import OrderState, check_whole, follow_state, resume, start
from raypipe.text import Bar, counted, progress_bar

if TYPE_CHECKING:
    import pyarrow.fs

    from raypipe.feed import FeederSource, LocalSource

_PUBLISH_EVERY_S: Final = 2.0
_MOST: Final = (1 << 63) - 1


@dataclass(eq=False)
class _Iteration:
    """One ``for`` over a loader."""

    run: EpochRun | None = None
    is_open: bool = True
    ended_by: str = ""
    """The loader's method that ended it from outside, such as ``close()``."""

    def describe(self) -> str:
        """Return how fast it is, or what its first batch waits for. Another thread may call this."""
        return self.run.describe() if self.run is not None else "opening the feed"


class RankLoader:
    """The batches of one rank, and its position.

    ``iter(loader)`` yields the rest of the current epoch and then moves the loader to the next. Without ``shuffle``
    (for evaluation) an iteration after a break yields the whole epoch again; the first one after `load_state_dict`
    resumes from that state. You can pickle a loader while nothing iterates it. All ranks must do the same things in the
    same order: iterate, break, load.
    """

    name: str
    """The loader's name in the run: names the file of its state in a checkpoint, and tags its metrics."""

    def __init__(
        self, job: RankJob, source: "LocalSource | FeederSource", spec: LoaderSpec, name: str = "train"
    ) -> None:
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
        """Whether the loader has loaded a state or been iterated."""
        self._skipped: dict[BadSpan, None] = {}
        """As a dict, so that a span is found at once."""
        self._keeper: AccountKeeper | None = None
        self._place: PassPlace | None = None
        """Place of the last pass, if that reached the end of its epoch, so that the next pass follows it; else None."""
        self._last_epoch = spec.num_epochs - 1
        self._ahead: Ahead | None = None
        self._iteration: _Iteration | None = None
        self._process_id = os.getpid()
        at, ledger = start(job.order, world_size=job.world_size), Ledger(attempt=self._attempt)
        self._stand = Stand(job=job, index=job.index, at=at, ledger=ledger)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the remaining batches of the current epoch; without ``shuffle`` all of it, see the class."""
        return self._iterate(goes_on=False)

    def _iterate(self, *, goes_on: bool) -> Generator[dict[str, Any], None, None]:
        self._check_process()
        iteration, is_on = _Iteration(), self._spec.progress and self._job.rank == 0
        num_left = self._stand.num_left if goes_on else self.steps_left
        with progress_bar(f"epoch {self.epoch}", num_left, iteration.describe, is_on=is_on) as bar:
            try:
                run, page = self._open_run(iteration, goes_on=goes_on)
                yield from self._hand_over(iteration, run, page, bar)
            finally:
                # Twice, because Ctrl-C may interrupt the first call. Nothing comes before: there it would skip both.
                try:
                    self._finish(iteration)
                finally:
                    self._finish(iteration)

    def _hand_over(self, iteration: _Iteration, run: EpochRun, page: Page, bar: Bar) -> Iterator[dict[str, Any]]:
        num_handed = 0
        for batch in run:
            bar()
            if time.monotonic() > self._published_at + _PUBLISH_EVERY_S:
                self._publish()
                self._keep_account(is_due_only=True)
            if self._iteration is not iteration:
                break
            num_handed += 1
            # Python checks for Ctrl-C only at calls and jumps, so it cannot come between these two lines.
            page.num_handed = num_handed
            yield batch
            # The loop may go on in a fork of this process, where no thread makes the next batch.
            self._check_process()
        if num_handed < run.num_steps:
            raise ConfigError(
                f"{iteration.ended_by} during the iteration has ended it after {num_handed} of {run.num_steps} "
                f"batches; leave the loop first, and begin another one after it"
            )

    def _check_process(self) -> None:
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            raise ConfigError(
                f"this loader is iterated in worker {worker.id} of the {worker.num_workers} of a torch DataLoader, and "
                f"each of them would get every batch. Iterate the loader itself: it reads and decodes ahead in threads "
                f"of its own. Where something wants a DataLoader, give it num_workers=0 and batch_size=None."
            )
        if self._process_id != os.getpid():
            raise ConfigError(
                f"this loader was made in process {self._process_id} and is iterated in {os.getpid()}, a fork of it, "
                f"where its threads and connections are not. Make the loader in the process that iterates it, or start "
                f"that process by 'spawn' or 'forkserver' and send the loader to it."
            )

    @property
    def _run(self) -> EpochRun | None:
        iteration = self._iteration
        return iteration.run if iteration is not None else None

    def __len__(self) -> int:
        """Batches in the whole epoch of the next batch, not only those left; the same on every rank."""
        return self._stand.num_steps

    def __repr__(self) -> str:
        """Show name, rank, position, batch size, device and dataset."""
        job, stand = self._job, self._stand
        who = f"{self.name!r}, rank {job.rank} of {job.world_size}"
        where = f"epoch {stand.epoch}, {stand.num_left} of {counted(len(self), 'batch')} left"
        size = f"{job.batch.size} a rank" if job.batch.scope == "rank" else f"{job.batch.size} on all ranks"
        return f"RankLoader({who}: {where}, {size}, on {self._spec.device!r}, of {job.dataset!r})"

    @property
    def steps_left(self) -> int:
        """Batches left in the current iteration, or else in the next one; the same on every rank."""
        stand = self._stand
        return stand.beginning.num_left if self._iteration is None and _starts_over(stand) else stand.num_left

    @property
    def dataset(self) -> Dataset | Mixture:
        """The dataset or mixture behind the batches; build a policy from its `features` and `stats`."""
        return self._job.dataset

    @property
    def settings(self) -> LoaderSpec:
        """The loader's spec; `with_settings` returns a loader with another."""
        return self._spec

    @property
    def rank(self) -> int:
        """The rank of this loader."""
        return self._job.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._job.world_size

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._stand.epoch

    def steps(self, num_steps: int) -> Iterator[dict[str, Any]]:
        """Yield the next `num_steps` batches, across epochs. After a break it continues, also without shuffle."""
        return self._steps(check_whole("num_steps", num_steps, 0, _MOST))

    def _steps(self, left: int) -> Iterator[dict[str, Any]]:
        while left:
            stand = self._stand
            self._last_epoch = max(self._last_epoch, stand.epoch + (left > stand.num_left))
            # Close explicitly: when Python collects an iterator it swallows Ctrl-C.
            with closing(self._iterate(goes_on=True)) as batches:
                for batch in batches:
                    left -= 1
                    yield batch
                    if not left:
                        return

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of another epoch; do nothing if the loader is in that epoch already."""
        epoch = check_whole("epoch", epoch, 0, _MOST)
        if epoch == self.epoch:
            return
        self._leave_order(f"set_epoch({epoch})")
        self._stand = self._stand.start_of(epoch, is_first=not self._has_begun)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as a small JSON object, the same on every rank."""
        return with_source(self._stand.state().to_dict(), self._job.dataset)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; its number of ranks and batch size may differ from this loader's.

        Raises:
            ResumeError: the state belongs to another order; the message shows both.
        """
        job, saved = self._job, OrderState.from_dict(state)
        saved, index = follow_state(saved, job.index, allow_mixture_change=job.allow_mixture_change)
        at = resume(saved, index, job.order_of(saved), world_size=job.world_size, batch=job.batch)
        if job.rank == 0:
            warn_of_other_origin(state, job.dataset)
        self._leave_order("load_state_dict()")
        self._go_back(Stand(job=job, index=index, at=at, ledger=self._stand.ledger, is_loaded=True))

    def _go_back(self, stand: Stand) -> None:
        if self._has_begun:
            # The account rolls back what the loader handed over since then, and continues under another attempt name.
            # The name is the same on all ranks, whichever of them carries parts.
            self._num_loads += 1
        self._has_begun = True
        stand.ledger = Ledger(_of_this_mixture(stand, stand.ledger.parts()), attempt=self._attempt)
        self._stand = stand

    def account(self) -> Account:
        """Return what this rank has handed over, by epoch and leg, plus the parts of earlier starts that it carries."""
        job = self._job
        state, parts = self._read_place()
        header = Header(
            root="" if job.mixture else str(job.context.datasets[0].meta.root),
            selection={} if job.mixture else job.selection.to_dict(),
            state=with_source(state.to_dict(), job.dataset),
            name=self.name,
            members=job.mixture.sources() if job.mixture else (),
        )
        return seal_account(header, parts)

    def _read_place(self) -> tuple[OrderState, tuple[Part, ...]]:
        """Return the state and the parts that lead to it, consistent even while another thread iterates."""
        while True:
            stand = self._stand
            num_handed, parts, state = stand.num_handed, stand.ledger.parts(), stand.state()
            if stand is self._stand and num_handed == stand.num_handed:
                return state, parts

    def load_account(self, parts: Iterable[Part]) -> None:
        """Carry on the parts of the account that led to the loaded state. Call it after loading.

        Only rank 0 carries the parts of a checkpoint; pass none on other ranks.
        Episodes that those parts list as bad count towards `BadDataSpec.max_bad_episodes`. If the mixture has changed,
        the account starts over: the earlier epochs are in the account of the earlier checkpoint.
        """
        stand = self._stand.onward()
        carried = _of_this_mixture(stand, parts)
        stand.ledger = Ledger(carried, attempt=self._attempt)
        self._stand = stand
        known = {(skip.dataset, skip.episode): skip.why for part in carried for skip in part.skipped}
        if known:
            self._source.meeting.note_bad(known)

    def keep_account(self, folder: str | Path, filesystem: "pyarrow.fs.FileSystem | None" = None) -> None:
        """Write the account to a folder from now on, about every 2 s and after every epoch, for `raypipe account`.

        It then shows which frames the run handed over after its last checkpoint, and again after a restart.

        Args:
            folder: the run's folder, for all ranks and attempts; a path or URI.
            filesystem: the file system of `folder`, if that is neither a plain path nor a URI.
        """
        self._keeper = AccountKeeper(str(folder), filesystem, self.name)

    @property
    def skipped(self) -> tuple[BadSpan, ...]:
        """The bad spans that this loader has left out since it was created, under ``on_bad_episode="skip"``."""
        run = self._run
        return tuple(dict.fromkeys([*self._skipped, *(run.bad_spans if run else ())]))

    def stats(self) -> LoaderStats:
        """Return the figures of this loader so far."""
        run = self._run
        return self._meter.read(run.live() if run else self._last_live)

    def world_stats(self, *, recent: bool = False) -> WorldStats:
        """Return the figures of all ranks together, such as the rank that waits most, and for what.

        If `recent`, speed and waiting are those of the last steps, not since the start; see `LoaderStats.recent`.
        """
        return sum_up(self.rank_stats(), recent=recent)

    def rank_stats(self) -> dict[int, LoaderStats]:
        """Return, by rank, the figures of every rank that has published them. Calls the ranks' meeting."""
        self._publish()
        return {**self._source.meeting.figures(), self._job.rank: self.stats()}

    def with_settings(self, **settings: Unpack[LoaderSettings]) -> "RankLoader":
        """Return this rank's loader with other fields of `LoaderSpec`, at the same position."""
        changed = RankLoader(self._job, self._source, change_spec(self._spec, settings), self.name)
        changed.load_state_dict(self.state_dict())
        changed._num_loads, changed._has_begun = self._num_loads, self._has_begun
        changed.load_account(self._stand.ledger.parts())
        changed._keeper = self._keeper
        return changed

    def close(self) -> None:
        """End the current iteration, and the next epoch's run if that was started ahead."""
        self._leave_order("close()")

    def __enter__(self) -> "RankLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._iteration is not None or self._ahead is not None:
            raise ConfigError("this loader is being iterated and cannot be sent elsewhere; call close() first")
        # A place is valid only in this process, so the copy begins a series of its own. A clock is valid only on this
        # machine.
        return {**self.__dict__, "_lock": None, "_place": None, "_published_at": 0.0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _process_id=os.getpid())

    def _publish(self) -> None:
        self._published_at = time.monotonic()
        self._source.publish(self.name, self._job.rank, self.stats())

    def _keep_account(self, *, is_due_only: bool = False) -> None:
        if self._keeper is not None and (self._keeper.is_due or not is_due_only):
            self._keeper.write(self._attempt, self.account, self._job.rank, self._job.world_size)

    def save_account(self) -> None:
        """Write the account beside the run's checkpoints, keyed by the state that it leads to.

        Call it on a rank that puts nothing into a checkpoint. A run that resumes from the checkpoint finds it there.
        """
        if self._keeper is not None:
            self._keeper.save(self.account(), self._job.rank, self._job.world_size)

    def mark_checkpoint(self) -> None:
        """Mark the current state as that of a checkpoint, so that the accounts of other ranks for it are kept.

        Call it on rank 0: only rank 0 knows.
        """
        if self._keeper is not None:
            self._keeper.mark(self.state_dict())

    @property
    def _attempt(self) -> str:
        return f"{self._source.attempt}-{self._num_loads:06d}" if self._num_loads else self._source.attempt

    def _open_run(self, iteration: _Iteration, *, goes_on: bool) -> tuple[EpochRun, Page]:
        with self._lock:
            if self._iteration is not None:
                raise ConfigError("this loader is being iterated already; end that iteration first, or call close()")
            self._iteration = iteration
        self._meter.start_iteration()
        if not goes_on and _starts_over(self._stand):
            self._leave_order("")
            self._go_back(self._stand.beginning)
        self._has_begun = True
        stand = self._stand = self._stand.onward()
        if self._place is not None:
            try:
                self._source.meeting.go_on(self._job.rank, self._place.following)
            except BaseException:
                self._leave_order()
                raise
        with self._lock:
            place, self._place = self._place.following if self._place else None, None
            ahead, self._ahead = self._ahead, None
        if ahead is not None and (ahead.stand is not stand or place is None):
            # Ctrl-C came before `_leave_order` could give it up.
            ahead.discard()
            ahead = place = None
        if ahead is not None:
            run = iteration.run = ahead.wait()
            ahead.release()
        else:
            run = iteration.run = start_run(stand, self._source, self._spec, self._meter, place)
        page = stand.page = stand.ledger.begin(stand.world, self._job.rank)
        # Weak, so that the loader may go although a run still refers to its method.
        look_ahead = weakref.WeakMethod(self._look_ahead)

        def follow(received: EpochRun) -> None:
            (look_ahead() or do_nothing)(received)

        run.begin(page.write, follow)
        return run, page

    def _look_ahead(self, run: EpochRun) -> None:
        """Start the next epoch if it is sure to follow. `run` calls this when its last block has arrived.

        Does so only for the run that is being iterated. A run fetched ahead may have all its blocks long before its
        turn, and an abandoned run may get its last block late.
        """
        with self._lock:
            iteration = self._iteration
            if iteration is None or not iteration.is_open or iteration.run is not run:
                return
            if self._ahead is not None or run.epoch >= self._last_epoch:
                return
            stand, parts = self._stand.following, (self._source, self._spec, self._meter)
            # Without a reference to this loader, so that the starting thread does not keep it alive.
            self._ahead = Ahead(stand, partial(start_run, stand, *parts, run.place.following, run))

    def _finish(self, iteration: _Iteration) -> None:
        # A fork has no threads to end, and may wait for ever for a lock that one of them held.
        if self._process_id == os.getpid() and self._end(iteration):
            self._publish()
            self._keep_account()

    def _end(self, iteration: _Iteration) -> bool:
        """End an iteration. Return False if it is not the current one: a call may have ended it, and another begun."""
        with self._lock:
            iteration.is_open = False
        run = iteration.run
        if run is not None:
            # Close it also if a call ended the iteration while it was opening the run.
            run.close()
        if self._iteration is not iteration:
            return False
        if run is not None:
            self._note_skips(run)
            self._last_live = run.live()
        if run is not None and self._stand.is_over:
            self._place = run.place
        else:
            self._leave_order()
        # Do this last: if Ctrl-C interrupts anything above, the second call of `_finish` repeats it.
        self._iteration = None
        return True

    def _note_skips(self, run: EpochRun) -> None:
        bad = [span for span in run.bad_spans if span not in self._skipped]
        if bad:
            self._skipped |= dict.fromkeys(bad)
            warnings.warn(
                f"rank {self._job.rank} left out {counted(len(bad), 'bad span')} in epoch "
                f"{run.epoch}:\n{describe_spans(bad)}",
                stacklevel=2,
            )

    def _leave_order(self, ended_by: str = "") -> None:
        """End the current iteration and the run ahead. The next iteration starts together with all other ranks."""
        iteration = self._iteration
        if iteration is not None and ended_by:
            iteration.ended_by = ended_by
            self._end(iteration)
        with self._lock:
            ahead, self._ahead = self._ahead, None
            self._place = None
        if ahead is not None:
            ahead.discard()


def _starts_over(stand: Stand) -> bool:
    """Return whether the next iteration begins at the start of the epoch, not where the last one left off."""
    is_rest = any(leg.frames_per_lane for leg in stand.at.legs) or stand.num_handed > 0
    goes_on = stand.at.spec.shuffle or stand.is_over or (stand.is_loaded and not stand.num_handed)
    return is_rest and not goes_on


def _of_this_mixture(stand: Stand, parts: Iterable[Part]) -> tuple[Part, ...]:
    since = stand.index.shares.since if stand.index.shares else 0
    return tuple(part for part in parts if part.epoch >= since)
