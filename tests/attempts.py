"""Training that is interrupted: ranks as actors, a ledger that is their collective and their checkpoint, and its nodes.

::

    rank 0 -- batch, state --> commit -.
    rank 1 -- batch, state --> commit --> all have come: the step counts, its state is the checkpoint -> all go on

A step that a rank did not bring did not happen, as with a real collective. The next attempt goes on after the last step
that counts. What must come is computed from the plan alone.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path

import batches
import pytest
import ray
import ray._private.state
import waiting
from batches import digest_of, frames_of, planned_frames
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_session import end_ray
from waiting import PATIENCE_S, wait_until

from raypipe.dataset import Dataset
from raypipe.format import DatasetMeta
from raypipe.loader import with_source
from raypipe.pipeline import Pipeline
from raypipe.plan import OrderState, WorldPlan, plan_epoch, plan_world, resume, state_after

# The workers of Ray cannot import modules of the tests: what is defined there travels to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(batches)
cloudpickle.register_pickle_by_value(waiting)

NEVER = -1

FEED = {"spans_per_block": 1, "prefetch_blocks": 1}
"""Many blocks, and few of them ahead: a fault meets blocks that are still to come."""

LENGTHS = tuple(1 + 3 * i % 5 for i in range(40))
"""120 frames in many episodes, for the same reason."""


@dataclass(frozen=True)
class Step:
    """A step that counts."""

    attempt: int
    frames: list[list[tuple[int, int]]]
    """The (episode, frame) of every sample of every rank."""
    digests: list[str]
    """Of all values of every rank's batch."""
    state: dict
    pids: list[int]
    """The processes of the ranks."""

    @property
    def world_size(self) -> int:
        return len(self.frames)


@ray.remote(num_cpus=0)
class Ledger:
    """Steps of all attempts; kept in a file too where a path is given, from which another ledger goes on."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._steps = read_steps(path) if path else []
        self._attempt = max((step.attempt for step in self._steps), default=-1)
        self._changed = asyncio.Condition()

    async def begin(self, world_size: int, hold_after: int) -> tuple[int, dict | None]:
        """Start an attempt; return its number and the state of the last step that counts."""
        self._attempt += 1
        self._world_size = world_size
        self._brought: dict[int, tuple] = {}
        self._held_at = len(self._steps) + hold_after if hold_after != NEVER else NEVER
        self._is_alone = False
        return self._attempt, self._steps[-1].state if self._steps else None

    async def commit(self, attempt: int, rank: int, *brought) -> None:
        """Return when every rank has brought its batch of this step, unless the ranks are held here."""
        async with self._changed:
            number = len(self._steps)
            if attempt != self._attempt or self._is_alone:
                return
            self._brought[rank] = brought
            if len(self._brought) == self._world_size:
                self._count_step()
                self._changed.notify_all()
            await self._changed.wait_for(
                lambda: self._is_alone or (len(self._steps) > number and number + 1 != self._held_at)
            )

    async def wait_until_held(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._steps) == self._held_at)

    async def release(self) -> None:
        async with self._changed:
            self._held_at = NEVER
            self._changed.notify_all()

    async def let_alone(self) -> None:
        """Let ranks go on without each other; nothing counts any more in this attempt."""
        async with self._changed:
            self._is_alone = True
            self._changed.notify_all()

    async def steps(self) -> list[Step]:
        return self._steps

    def _count_step(self) -> None:
        frames, digests, states, pids = zip(*(self._brought[rank] for rank in range(self._world_size)), strict=True)
        assert all(state == states[0] for state in states), f"ranks have different states: {states}"
        step = Step(self._attempt, list(frames), list(digests), states[0], list(pids))
        self._brought = {}
        self._steps.append(step)
        if self._path:
            with open(self._path, "ab", buffering=0) as file:
                file.write(json.dumps(asdict(step)).encode() + b"\n")


def read_steps(path: str | Path) -> list[Step]:
    """Return the steps that a ledger has written to a file; none if there is no file."""
    if not Path(path).exists():
        return []
    steps = [Step(**json.loads(line)) for line in Path(path).read_text().splitlines()]
    return [replace(step, frames=[[tuple(frame) for frame in rank] for rank in step.frames]) for step in steps]


@ray.remote(num_cpus=0, max_restarts=0)
class Rank:
    """A training process: takes batches and brings them to the ledger."""

    def __init__(self, loader) -> None:
        self._loader = loader

    def pid(self) -> int:
        return os.getpid()

    def train(self, ledger, attempt, rank, state, *, num_epochs, raise_after) -> None:
        loader = self._loader
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        num_steps = 0
        while loader.epoch < num_epochs:
            for batch in loader:
                if num_steps == raise_after:
                    raise RuntimeError(f"rank {rank} fails after {num_steps} steps")
                brought = (frames_of(batch), digest_of(batch), loader.state_dict(), os.getpid())
                ray.get(ledger.commit.remote(attempt, rank, *brought))
                num_steps += 1


class Training:
    """Attempts that share a ledger, which stands on the node of this process."""

    def __init__(self, path: str | None = None) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._ledger = Ledger.options(scheduling_strategy=here).remote(path)

    def steps(self) -> list[Step]:
        return wait_for(self._ledger.steps.remote())

    @contextmanager
    def attempt(
        self, pipe, world_size, *, loaders=None, hold_after=NEVER, num_epochs=1, raise_after=NEVER
    ) -> Iterator["Attempt"]:
        """Start ranks that train from the last step that counts; at the end they are gone, and their feeder.

        Args:
            pipe: where loaders come from.
            world_size: how many ranks.
            loaders: those of the ranks where this process does not make them.
            hold_after: steps of this attempt after which all ranks wait to be released.
            num_epochs: at whose end the training ends.
            raise_after: steps of this attempt after which the last rank raises.
        """
        made = loaders or pipe.loaders(world_size, num_epochs=num_epochs, progress=False)
        ranks = [Rank.options(num_gpus=1).remote(loader) for loader in made]
        # The feeder lives as long as someone has a loader.
        del made, loaders
        try:
            pids = wait_for([rank.pid.remote() for rank in ranks])
            number, state = wait_for(self._ledger.begin.remote(world_size, hold_after))
            faults = [raise_after if rank == world_size - 1 else NEVER for rank in range(world_size)]
            running = [
                ranks[rank].train.remote(
                    self._ledger, number, rank, state, num_epochs=num_epochs, raise_after=faults[rank]
                )
                for rank in range(world_size)
            ]
            yield Attempt(self._ledger, running, pids)
        finally:
            for rank in ranks:
                ray.kill(rank)
            wait_until(lambda: not actors_of_attempts(), "the ranks, their feeder and its splits are gone")


@dataclass(frozen=True)
class Attempt:
    """Ranks that are training."""

    ledger: ray.actor.ActorHandle
    running: list[ray.ObjectRef]
    pids: list[int]

    def wait_until_held(self) -> None:
        """Return when the ranks stand at the step at which they are held.

        Raises:
            the error of a rank that failed before.
        """
        held = self.ledger.wait_until_held.remote()
        ready, _ = ray.wait([held, *self.running], timeout=PATIENCE_S)
        assert ready, f"the ranks did not come to the step in {PATIENCE_S:g} s"
        ray.get(ready)

    def release(self) -> None:
        wait_for(self.ledger.release.remote())

    def join(self) -> None:
        """Return when every rank has ended.

        Raises:
            the error of the first rank that failed; others may wait for it for ever.
        """
        left = self.running
        while left:
            ready, left = ray.wait(left, timeout=PATIENCE_S)
            assert ready, f"no rank ended in {PATIENCE_S:g} s"
            ray.get(ready)

    def errors(self) -> list[Exception]:
        """Let every rank go on alone until it fails, and return what each raised."""
        wait_for(self.ledger.let_alone.remote())
        errors = []
        for rank, running in enumerate(self.running):
            with pytest.raises(ray.exceptions.RayError) as caught:
                wait_for(running)
            assert not isinstance(caught.value, ray.exceptions.GetTimeoutError), f"rank {rank} hangs"
            errors.append(caught.value)
        return errors


def plan_from(pipe: Pipeline, world_size: int, state: dict | None) -> WorldPlan:
    """Return the plan of the rest of an epoch; the pure one, without a loader."""
    if state is None:
        return pipe.plan(world_size=world_size)
    index = pipe.config.index()
    at = resume(OrderState.from_dict(state), index, pipe.config.order, world_size=world_size, batch=pipe.config.batch)
    plan = plan_epoch(index, at.spec, epoch=at.epoch, legs=at.legs)
    return plan_world(plan, world_size=world_size, batch=pipe.config.batch)


def assert_follows_plan(steps: Sequence[Step], pipe: Pipeline | Sequence[Pipeline]) -> None:
    """Require every step to be what the plan says, through all attempts: on every rank, in order, and its state.

    Args:
        steps: of a training.
        pipe: that of all attempts, or one for each.
    """
    state = None
    for attempt, group in groupby(steps, key=lambda step: step.attempt):
        current = pipe if isinstance(pipe, Pipeline) else pipe[attempt]
        world, num_done = None, 0
        for step in group:
            if world is None or num_done == world.num_steps:
                world, num_done = plan_from(current, step.world_size, state), 0
            wanted = [planned_frames(world, num_done, rank) for rank in range(step.world_size)]
            assert step.frames == wanted, f"attempt {attempt}, {num_done} steps after {state}"
            num_done += 1
            state = with_source(state_after(world, num_done).to_dict(), current.config.dataset)
            assert step.state == state


def frames_of_steps(steps: Sequence[Step]) -> list[tuple[int, int]]:
    return [frame for step in steps for frames in step.frames for frame in frames]


def frames_by_rank(steps: Sequence[Step]) -> list[list[list[tuple[int, int]]]]:
    """The batches of each rank, of steps on one number of ranks."""
    return [list(batches_of_rank) for batches_of_rank in zip(*(step.frames for step in steps), strict=True)]


@dataclass(frozen=True, kw_only=True)
class WatchedMeta(DatasetMeta):
    """Metadata that notes reads of episodes by tasks in a folder, and lets some wait until a gate opens.

    A read task asks it for the file of every span.
    """

    folder: str
    held: frozenset[int]
    """The rows of the episode table that wait."""

    def data_file(self, row):
        # Drivers and actors that open the dataset ask for some files too, to see their columns.
        context = ray.get_runtime_context()
        if context.worker.mode == ray.WORKER_MODE and context.get_actor_id() is None:
            folder = Path(self.folder)
            node = ray.get_runtime_context().get_node_id()
            (folder / f"{time.time_ns()}-{row}-{os.getpid()}-{node}.read").touch()
            while row in self.held and not (folder / "open").exists():
                time.sleep(0.05)
        return super().data_file(row)


@dataclass(frozen=True)
class Read:
    episode: int
    pid: int
    node: str


@dataclass(frozen=True)
class Watch:
    """The reads of a watched dataset, and its gate."""

    folder: Path

    def reads(self) -> list[Read]:
        """Return what was read so far, or is waiting at the gate, in order."""
        parts = [path.stem.split("-") for path in sorted(self.folder.glob("*.read"))]
        return [Read(int(row), int(pid), node) for _, row, pid, node in parts]

    def wait_for_read_of(self, episodes) -> Read:
        wait_until(lambda: self._first(episodes), "a held read has begun")
        return self._first(episodes)

    def open_gate(self) -> None:
        (self.folder / "open").touch()

    def _first(self, episodes) -> Read | None:
        return next((read for read in self.reads() if read.episode in episodes), None)


def watched(dataset: Dataset, folder: Path, held=()) -> tuple[Dataset, Watch]:
    """Return the dataset with its reads noted, those of the episodes `held` waiting for `Watch.open_gate`."""
    meta = {field.name: getattr(dataset.meta, field.name) for field in fields(dataset.meta)}
    folder.mkdir()
    return replace(dataset, meta=WatchedMeta(**meta, folder=str(folder), held=frozenset(held))), Watch(folder)


@contextmanager
def local_nodes(*nodes: dict) -> Iterator[Cluster]:
    """Give a cluster of one node without CPUs, to which this process belongs, and some others."""
    end_ray()
    # In a folder of its own: other clusters of this machine are not found by it, and do not find it. Sockets are in it,
    # whose paths must be short.
    folder = tempfile.mkdtemp(prefix="rp", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        # Ray asks its nodes every second instead of every third: one that is gone is noticed sooner.
        fast = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000}
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": fast}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for node in nodes:
                cluster.add_node(**node)
            ray.init(address=cluster.address, logging_level="warning", log_to_driver=False)
            yield cluster
        finally:
            end_ray()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def kill_node(cluster: Cluster, node) -> None:
    """Kill all processes of a node at once, as the loss of a machine does. Ray learns of it seconds later."""
    (raylet,) = (info.process.pid for info in node.all_processes["raylet"])
    # They would live on for a while without it.
    workers = [int(pid) for path in Path(f"/proc/{raylet}/task").glob("*/children") for pid in path.read_text().split()]
    cluster.remove_node(node, allow_graceful=False)
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, [raylet, *workers])), "all processes of the node are gone")


def alive_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def actors_of_attempts() -> dict[str, set[str]]:
    """The nodes on which ranks, feeders and splits of any driver are alive, by their class."""
    nodes: dict[str, set[str]] = {}
    for actor in ray._private.state.actors(actor_state_name="ALIVE").values():
        if actor["ActorClassName"] in {"Rank", "Feeder", "SplitCoordinator"}:
            nodes.setdefault(actor["ActorClassName"], set()).add(actor["Address"]["NodeID"])
    return nodes


def is_feeding() -> bool:
    """Return whether blocks are still to come: a rank lets go of its split with the last one."""
    return "SplitCoordinator" in actors_of_attempts()


def is_gone(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        # The state comes after the name, which may have spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(refs):
    return ray.get(refs, timeout=PATIENCE_S)
