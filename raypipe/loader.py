"""`RankLoader`: the torch batches of one rank, and where it stands, as a small state.

What the user holds is counted, not what is prefetched: the state after a batch is the same whatever was read ahead.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from raypipe.block import BlockContext
from raypipe.decode.spec import ASSIGNED_CPUS
from raypipe.errors import ConfigError
from raypipe.metrics import Live, LoaderStats, Meter
from raypipe.plan import (
    BatchSpec,
    EpisodeIndex,
    OrderSpec,
    OrderState,
    WorldPlan,
    plan_epoch,
    plan_world,
    resume,
    start,
    state_after,
)
from raypipe.run import BlockFeed, EpochRun, LoaderSpec


class BlockSource(Protocol):
    """Where ranks get their blocks."""

    def assigned_cpus(self) -> int:
        """Return how many CPUs this process may use."""
        ...

    def open(self, world: WorldPlan, rank: int) -> BlockFeed:
        """Return the blocks that the rest of a plan sends to one rank."""
        ...


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What a rank loads: the frames, their order, and who it is among how many."""

    context: BlockContext
    index: EpisodeIndex
    order: OrderSpec
    batch: BatchSpec
    rank: int
    world_size: int


class RankLoader:
    """The batches of one rank, and where it stands.

    ``iter(loader)`` gives the rest of the current epoch; then the loader stands at the next one. It is picklable as
    long as no iteration is under way.
    """

    def __init__(self, job: RankJob, source: BlockSource, spec: LoaderSpec) -> None:
        self._job = job
        self._source = source
        self._spec = spec
        self._at = start(job.order, world_size=job.world_size)
        self._world: WorldPlan | None = None
        self._step = 0
        self._run: EpochRun | None = None
        self._meter = Meter()
        self._last_live = Live()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches that are left of the current epoch."""
        run = self._open_run()
        try:
            for batch in run:
                self._step += 1
                if self._step == self._plan().num_steps:
                    self._stand_at_next_epoch()
                yield batch
            if not run.num_steps:
                self._stand_at_next_epoch()
        finally:
            self._close_run()

    def __len__(self) -> int:
        """Batches left in the current epoch; the same on every rank."""
        return self._plan().num_steps - self._step

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
        self._close_run()
        self._at = start(self._at.spec, world_size=self._job.world_size, epoch=epoch)
        self._world, self._step = None, 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, as a small JSON object: the same on every rank."""
        return self._state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, also of another number of ranks or another batch size.

        Raises:
            ResumeError: the state belongs to another order; shows both sides.
        """
        self._close_run()
        saved = OrderState.from_dict(state)
        self._at = resume(saved, self._job.index, self._job.order, world_size=self._job.world_size)
        self._world, self._step = None, 0

    def stats(self) -> LoaderStats:
        """Return the figures of this loader so far."""
        return self._meter.read(self._run.live() if self._run else self._last_live)

    def close(self) -> None:
        """End an iteration that is under way, and its threads."""
        self._close_run()

    def __enter__(self) -> "RankLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        assert self._run is None, "a loader cannot be sent elsewhere while it is iterated"
        return {**self.__dict__, "_world": None, "_meter": Meter()}

    def _plan(self) -> WorldPlan:
        if self._world is None:
            job = self._job
            plan = plan_epoch(job.index, self._at.spec, epoch=self._at.epoch, legs=self._at.legs)
            self._world = plan_world(plan, world_size=job.world_size, batch=job.batch)
        return self._world

    def _state(self) -> OrderState:
        return state_after(self._plan(), self._step)

    def _stand_at_next_epoch(self) -> None:
        spec = self._at.spec
        self._at = start(spec, world_size=self._job.world_size, epoch=self._at.epoch + 1)
        self._world, self._step = None, 0

    def _open_run(self) -> EpochRun:
        if self._run is not None:
            raise ConfigError("this loader is being iterated already; end that iteration first, or call close()")
        world = self._plan()
        if self._step:
            world = world.at(self._step)
            self._at, self._world, self._step = replace(self._at, legs=world.plan.legs), world, 0
        job = self._job
        spec = self._spec
        if spec.num_threads == ASSIGNED_CPUS:
            spec = replace(spec, num_threads=self._source.assigned_cpus())
        self._run = EpochRun(job.context, world, job.rank, spec, self._meter)
        self._run.start(self._source.open(world, job.rank))
        return self._run

    def _close_run(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            self._last_live = run.live()
            run.close()
