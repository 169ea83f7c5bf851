"""Start the runs of a loader, and start the next epoch's run (`Ahead`) while the current one ends."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from raypipe.decode import ASSIGNED_CPUS
from raypipe.feed import Meter, PassPlace
from raypipe.loader.epoch_run import EpochRun
from raypipe.loader.job import BlockSource, RankJob
from raypipe.loader.position import Stand
from raypipe.loader.spec import LoaderSpec


@dataclass(frozen=True)
class RunStarter:
    """Starts the runs of one loader without a reference to it, so the starting thread does not keep it alive."""

    job: RankJob
    source: BlockSource
    spec: LoaderSpec
    meter: Meter

    def start(self, stand: Stand, place: PassPlace | None, before: EpochRun | None = None) -> EpochRun:
        """Return the run of a pass that begins at `stand`. Waits for the other ranks."""
        job, threads = self.job, self.spec.num_threads
        num_threads = self.source.assigned_cpus() if threads == ASSIGNED_CPUS else threads
        executor = self.source.open_executor(job.context, num_threads, self.meter)
        spec = replace(self.spec, num_threads=num_threads)
        run = EpochRun(job.context, stand.world, job.rank, spec, self.meter, executor, job.live_bytes)
        try:
            run.start(self.source.open(stand.world, job.rank, place), before)
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
