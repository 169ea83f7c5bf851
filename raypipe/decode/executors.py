"""Where clips are decoded: threads of the rank, or Ray tasks on any node with CPUs (``where="cluster"``).

A task decodes a group of clips, some 32 MB of pixels, into one object of the object store; the rank maps it without a
copy. Ray retries a task if its node or process is lost; a task is a pure function of its group. Only the executor of
tasks imports Ray.
"""

import hashlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from raypipe.decode.clips import ClipRequest, FramePool, Pixels
from raypipe.decode.journal import journal_scope, process_journal
from raypipe.errors import RaypipeError
from raypipe.storage import num_requests

if TYPE_CHECKING:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from raypipe.decode.frames import FrameDecoder

GROUP_BYTES: Final = 32 << 20
"""A task costs Ray some 5 ms of CPU, and an object store likes objects of this size."""

_MOST_IN_JOB: Final = 8
"""Clips that a thread decodes before it hands them over."""

_MAX_RETRIES: Final = 16
"""A video that ends its decoder's process costs two tries on every node that meets it."""

_LEAST_RUNNING: Final = 4
"""With this many tasks under way, a group waits until it is full."""

_ANYWHERE: Final = ""

_SETTING_CORES: Final = threading.Lock()

DecodedClip = list[Pixels] | Exception
"""Frames of a clip, or why there are none."""

Decoders = Callable[[Any], Sequence[Any]]
"""Returns the decoders of a pipeline to a task, from what the rank sent."""


def decode_clip(
    decoders: "Sequence[FrameDecoder]", request: ClipRequest, pool: FramePool | None = None
) -> list[Pixels]:
    """Return the frames of a request, in memory of `pool` if there is one; raise a `DatasetError` for bad data."""
    return decoders[request.dataset].read_clip(
        request.row, request.camera, request.frames, pool, span=request.span, stored=request.stored
    )


def try_clip(decoders: "Sequence[FrameDecoder]", request: ClipRequest, pool: FramePool | None = None) -> DecodedClip:
    """Return the frames of a request or the error, so that a bad clip does not stop the others of its group."""
    try:
        return decode_clip(decoders, request, pool)
    except (RaypipeError, OSError) as error:
        return error


def take_clip(clips: list[DecodedClip | None], number: int) -> list[Pixels]:
    """Return one clip of a group and remove it from the group; raise what decoding raised."""
    clip, clips[number] = clips[number], None
    assert clip is not None, "a clip is taken once"
    if isinstance(clip, Exception):
        raise clip
    return clip


def use_one_core() -> None:
    """Let torch use one core in the calling thread, as torch's DataLoader does in its workers.

    OpenMP gives every thread that splits its work over the cores its own helper threads. If a process then has more of
    them than cores, OpenMP puts all helpers to sleep after every operation, including those of the training thread,
    and training steps take a fifth longer. raypipe's threads already share the work among themselves.
    """
    import torch

    # torch also uses the last number for threads that start later, so a short-lived thread puts the old one back.
    # One thread at a time: the next would take the 1 for the old number.
    with _SETTING_CORES, ThreadPoolExecutor(1) as other:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            other.submit(torch.set_num_threads, before).result()
        except RuntimeError as error:
            # A thread may start while the interpreter ends, and no other one can then.
            if "shutdown" not in str(error):
                raise


@dataclass(slots=True)
class _ThreadClip:
    request: ClipRequest
    job: "Future[list[DecodedClip | None]] | None" = None
    number: int = 0
    """In its job."""

    def result(self) -> list[Pixels]:
        assert self.job is not None, "what was submitted is flushed before it is waited for"
        return take_clip(self.job.result(), self.number)

    def drop(self, pool: FramePool) -> None:
        # A loop that is left closes the store in its own thread, maybe between `submit` and `flush` of another: then
        # the executor is closed, and decodes it no more.
        if self.job is not None:
            self.job.add_done_callback(lambda _: self._give_back(pool))

    def _give_back(self, pool: FramePool) -> None:
        # A bad clip has no frames, nor has one that was not begun when the executor was closed.
        with suppress(RaypipeError, OSError, CancelledError, IndexError):
            pool.give_back(self.result())


class ThreadExecutor:
    """Decodes in threads of this process."""

    finished_at = 0.0
    is_shared = False
    """The frames lie in the pool of the store."""

    def __init__(self, decoders: "Callable[[], Sequence[FrameDecoder]]", num_threads: int, pool: FramePool) -> None:
        self._decoders = decoders
        self._pixels = pool
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "raypipe-decode", initializer=use_one_core)
        self._asked: list[_ThreadClip] = []
        self._is_closed = False

    def warm_up(self) -> None:
        """Import the codec in a thread."""
        self._pool.submit(self._decoders)

    def submit(self, request: ClipRequest) -> _ThreadClip:
        """Queue a clip of one camera; decoding starts at the next `flush`."""
        self._asked.append(_ThreadClip(request))
        return self._asked[-1]

    def flush(self) -> None:
        """Start the submitted clips, several to a job, since every job that ends wakes the thread that waits for it."""
        asked, self._asked = self._asked, []
        size = max(1, min(_MOST_IN_JOB, len(asked) // (2 * self._num_threads)))
        for first in range(0, len(asked), size):
            clips = asked[first : first + size]
            job = self._pool.submit(self._decode, [clip.request for clip in clips])
            for number, clip in enumerate(clips):
                clip.job, clip.number = job, number

    def close(self) -> None:
        """Decode nothing more; the clip that has begun finishes."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _decode(self, requests: Sequence[ClipRequest]) -> list[DecodedClip | None]:
        decoders = self._decoders()
        # A decoder that looks for kept frames may wait for a disk or a network between two clips.
        is_waiting = any(decoder.keeps_frames for decoder in decoders)
        with nullcontext() if is_waiting else process_journal().job():
            return [try_clip(decoders, request, self._pixels) for request in requests if not self._is_closed]


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """What a task returns."""

    clips: list[DecodedClip]
    work: Mapping[str, float]
    """What it took, under the names of a `Meter`: seconds, frames decoded, kept frames read, requests to storage."""
    finished_at: float
    """Seconds since 1970, by the clock of the task's node."""


class _ClipGroup:
    def __init__(self, executor: "TaskExecutor", node: str) -> None:
        self.node = node
        self.requests: list[ClipRequest] = []
        self.num_bytes = 0
        self.task: Any = None
        self._executor = executor
        self._clips: list[DecodedClip | None] = []

    def take(self, number: int) -> list[Pixels]:
        """Wait for the task, return one clip and remove it from the group."""
        if self.task is None and self.requests:
            self._executor.start(self)
        if self.task is not None:
            import ray

            answer: GroupAnswer = ray.get(self.task)
            self.task, self._clips = None, list(answer.clips)
            self._executor.finished_at = answer.finished_at
            self._executor.note(**answer.work)
        return take_clip(self._clips, number)


@dataclass(slots=True)
class _TaskClip:
    group: _ClipGroup
    number: int

    def result(self) -> list[Pixels]:
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
    note: Callable[..., None]
    """Called with the work of every task."""
    is_shared = True
    """Clips share memory, which stays as long as any frame in it is held."""
    finished_at: float = 0.0
    """When the clip taken last was decoded, in seconds since 1970; 0 if this process decodes."""
    _open: dict[str, _ClipGroup] = field(default_factory=dict)
    _nodes: dict[str, float] | None = None
    _running: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        import ray

        self._task = ray.remote(num_cpus=1, max_retries=_MAX_RETRIES)(_decode_group)

    def warm_up(self) -> None:
        """Do nothing: a task imports what it needs when it runs."""

    def submit(self, request: ClipRequest) -> _TaskClip:
        """Queue a clip of one camera for decoding, grouped with others."""
        node = self._home(request)
        group = self._open.get(node)
        if group is None:
            group = self._open[node] = _ClipGroup(self, node)
        group.requests.append(request)
        group.num_bytes += request.num_bytes
        pending = _TaskClip(group, len(group.requests) - 1)
        if group.num_bytes >= GROUP_BYTES:
            self.start(group)
        return pending

    def flush(self) -> None:
        """Start groups that are not full if few tasks are under way; otherwise they wait for more clips."""
        if self._running:
            import ray

            _, self._running = ray.wait(self._running, num_returns=len(self._running), timeout=0)
        for group in list(self._open.values()):
            if len(self._running) < _LEAST_RUNNING:
                self.start(group)

    def start(self, group: _ClipGroup) -> None:
        """Start a group: it is full, or a caller waits for it."""
        del self._open[group.node]
        # Set explicitly: else Ray Train's placement group would take the task, and it has no CPU to spare.
        task = self._task.options(scheduling_strategy=prefer_node(group.node) if group.node else "DEFAULT")
        # In a list: Ray would send the object behind a bare reference with every task.
        group.task = task.remote([self.shared], self.decoders, group.requests)
        group.requests = []
        self._running.append(group.task)

    def close(self) -> None:
        """Start nothing more; the few tasks under way end by themselves.

        They are not cancelled: Ray 2.60 can end a process that cancels a task at the moment when the task finishes
        ("Tried to complete task that was not pending").
        """
        # Groups hold this executor.
        self._open, self._running = {}, []

    def _home(self, request: ClipRequest) -> str:
        file = self.home_file(request)
        if not file:
            return _ANYWHERE
        if self._nodes is None:
            import ray

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


def prefer_node(node: str) -> "NodeAffinitySchedulingStrategy | str":
    """Return the strategy that runs a task on a node if a CPU is free there, else wherever one is free."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        # `soft` alone waits without end for a node with busy CPUs. The other argument is private to Ray: a tripwire
        # test pins what it does.
        return NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
    except TypeError:
        # This Ray lacks the argument: better to run anywhere than never.
        return "DEFAULT"


def _decode_group(shared: list[Any], decoders: Decoders, requests: Sequence[ClipRequest]) -> GroupAnswer:
    import ray

    started, sent = time.perf_counter(), num_requests()
    before = _count_frames(decoders(shared[0]))
    # A task keeps its id when Ray retries it; the deaths of other tasks do not count.
    with journal_scope(ray.get_runtime_context().get_task_id()):
        clips = [try_clip(decoders(shared[0]), request) for request in requests]
    after = _count_frames(decoders(shared[0]))
    work = {
        "task_decode_s": time.perf_counter() - started,
        "task_decoded_frames": after[0] - before[0],
        "task_kept_frames": after[1] - before[1],
        "task_requests": num_requests() - sent,
    }
    return GroupAnswer(clips, work, finished_at=time.time())


def _count_frames(decoders: Sequence[Any]) -> tuple[int, int]:
    """Return how many frames this process has decoded so far, and how many kept frames it has read."""
    counts = [decoder.counts() for decoder in decoders]
    return sum(count.frames for count in counts), sum(count.kept_frames for count in counts)


ClipExecutor = ThreadExecutor | TaskExecutor
"""Where clips are decoded. It starts the requests in their order."""

PendingClip = _ThreadClip | _TaskClip
"""A clip on its way: `result` waits for its frames, or raises what decoding raised; `drop` asks for them no more, and
those in memory of the pool go back to it once they are there."""
