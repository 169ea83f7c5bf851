"""Clips decoded by Ray tasks, on any node with CPUs: the executor of ``where="cluster"``.

A task decodes a group of clips, some 32 MB of pixels, into one object of the object store; the rank maps it without a
copy. Ray retries a task if its node or process is lost; a task is a pure function of its group.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.decode.buffers import FramePool, Pixels
from raypipe.decode.clips import ClipRequest, DecodedClip, take_clip, try_clip
from raypipe.decode.journal import journal_scope
from raypipe.storage import num_requests

GROUP_BYTES: Final = 32 << 20
"""A task costs Ray some 5 ms of CPU, and an object store likes objects of this size."""

_MAX_RETRIES: Final = 16
"""A video that ends its decoder's process costs two tries on every node that meets it."""

_LEAST_RUNNING: Final = 4
"""With this many tasks under way, a group waits until it is full."""

_ANYWHERE: Final = ""

Decoders = Callable[[Any], Sequence[Any]]
"""Returns the decoders of a pipeline to a task, from what the rank sent."""


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """What a task returns."""

    clips: list[DecodedClip]
    seconds: float
    num_decoded: int
    num_kept: int
    """Frames read from those kept on the task's node."""
    num_requests: int
    """Requests sent to remote storage."""
    finished_at: float
    """Seconds since 1970, by the clock of the task's node."""


class _ClipGroup:
    def __init__(self, executor: "TaskExecutor") -> None:
        self.requests: list[ClipRequest] = []
        self.num_bytes = 0
        self.task: Any = None
        self._executor = executor
        self._clips: list[DecodedClip | None] = []

    def take(self, number: int) -> list[Pixels]:
        """Wait for the task, return one clip and remove it from the group."""
        if self.task is not None:
            answer: GroupAnswer = ray.get(self.task)
            self.task, self._clips = None, list(answer.clips)
            self._executor.finished_at = answer.finished_at
            self._executor.note(answer)
        return take_clip(self._clips, number)


@dataclass(slots=True)
class _PendingClip:
    group: _ClipGroup
    number: int
    executor: "TaskExecutor"

    def result(self) -> list[Pixels]:
        if self.group.task is None and self.group.requests:
            self.executor.start(self.group)
        return self.group.take(self.number)

    def drop(self, pool: FramePool) -> None:
        """Do nothing: the frames lie in an object of the object store, which goes with its group."""


@dataclass
class TaskExecutor:
    """Decodes in Ray tasks of one CPU each."""

    shared: Any
    """The argument of `decoders`: an object reference that all ranks share, so that a worker process keeps its open
    videos from task to task."""
    decoders: Decoders
    home_file: Callable[[ClipRequest], str]
    """Returns the remote file of a request, which decides the node of its task; empty: anywhere."""
    note: Callable[[GroupAnswer], None]
    """Called with the answer of every task."""
    is_shared = True
    finished_at: float = 0.0
    _open: dict[str, _ClipGroup] = field(default_factory=dict)
    _nodes: dict[str, float] | None = None
    _running: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._task = ray.remote(num_cpus=1, max_retries=_MAX_RETRIES)(_decode_group)

    def warm_up(self) -> None:
        """Do nothing: a task imports what it needs when it runs."""

    def submit(self, request: ClipRequest) -> _PendingClip:
        """Queue a clip of one camera for decoding, grouped with others."""
        node = self._home(request)
        group = self._open.get(node)
        if group is None:
            group = self._open[node] = _ClipGroup(self)
        group.requests.append(request)
        group.num_bytes += request.num_bytes
        pending = _PendingClip(group, len(group.requests) - 1, self)
        if group.num_bytes >= GROUP_BYTES:
            self._start(node)
        return pending

    def flush(self) -> None:
        """Start groups that are not full if few tasks are under way; otherwise they wait for more clips."""
        if self._running:
            _, self._running = ray.wait(self._running, num_returns=len(self._running), timeout=0)
        for node in list(self._open):
            if len(self._running) < _LEAST_RUNNING:
                self._start(node)

    def start(self, group: _ClipGroup) -> None:
        """Start a group that a caller waits for."""
        self._start(next(node for node, one in self._open.items() if one is group))

    def close(self) -> None:
        """Start nothing more; the few tasks under way end by themselves.

        They are not cancelled: Ray 2.60 can end a process that cancels a task at the moment when the task finishes
        ("Tried to complete task that was not pending").
        """
        # Groups hold this executor.
        self._open, self._running = {}, []

    def _start(self, node: str) -> None:
        group = self._open.pop(node)
        # Set explicitly: else Ray Train's placement group would take the task, and it has no CPU to spare.
        task = self._task.options(scheduling_strategy=prefer_node(node) if node else "DEFAULT")
        # In a list: Ray would send the object behind a bare reference with every task.
        group.task = task.remote([self.shared], self.decoders, group.requests)
        group.requests = []
        self._running.append(group.task)

    def _home(self, request: ClipRequest) -> str:
        file = self.home_file(request)
        if not file:
            return _ANYWHERE
        if self._nodes is None:
            cpus = {node["NodeID"]: float(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]}
            self._nodes = {node: number for node, number in sorted(cpus.items()) if number >= 1}
        return home_node(file, self._nodes) if len(self._nodes) > 1 else _ANYWHERE


def home_node(file: str, nodes: Mapping[str, float]) -> str:
    """Return the node that decodes a remote file, the same in every epoch and job, so that one node fetches it.

    Weighted rendezvous hashing: a node with more CPUs is the home of more files, and a node that joins or leaves moves
    only its own files.
    """

    def rank(node: str) -> float:
        digest = hashlib.blake2b(f"{node} {file}".encode(), digest_size=8).digest()
        # As many bits as a float has, so that the quotient stays below 1.
        return -math.log1p(-(int.from_bytes(digest, "big") >> 11) / (1 << 53)) / nodes[node]

    return min(nodes, key=rank)


def prefer_node(node: str) -> NodeAffinitySchedulingStrategy | str:
    """Return the strategy that runs a task on a node if a CPU is free there, else wherever one is free."""
    try:
        # `soft` alone waits without end for a node with busy CPUs. The other argument is private to Ray: a tripwire
        # test pins what it does.
        return NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
    except TypeError:
        # This Ray lacks the argument: better to run anywhere than never.
        return "DEFAULT"


def _decode_group(shared: list[Any], decoders: Decoders, requests: Sequence[ClipRequest]) -> GroupAnswer:
    started, sent = time.perf_counter(), num_requests()
    before = _count_frames(decoders(shared[0]))
    # A task keeps its id when Ray retries it; the deaths of other tasks do not count.
    with journal_scope(ray.get_runtime_context().get_task_id()):
        clips = [try_clip(decoders(shared[0]), request) for request in requests]
    after = _count_frames(decoders(shared[0]))
    return GroupAnswer(
        clips,
        seconds=time.perf_counter() - started,
        num_decoded=after[0] - before[0],
        num_kept=after[1] - before[1],
        num_requests=num_requests() - sent,
        finished_at=time.time(),
    )


def _count_frames(decoders: Sequence[Any]) -> tuple[int, int]:
    """Return how many frames this process has decoded so far, and how many kept frames it has read."""
    counts = [decoder.counts() for decoder in decoders]
    return sum(count.frames for count in counts), sum(count.kept_frames for count in counts)
