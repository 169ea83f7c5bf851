"""The feeder: one small actor per pipeline and attempt that opens Ray Datasets from explicit plans.

Ranks ask it for the blocks of an epoch. It plans, interleaves the ranks' queues so that Ray's split delivers each block
to its rank, and returns an iterator per rank. A request contains everything that decides the order, so the answer does
not depend on when or how often a rank asks.

::

    series  -> groups of ranks (`ranks_per_split`)    one Dataset and split each: an executor does 50 to 100 blocks/s
     epoch  -> chapters (`blocks_per_chapter`)        one after the other: Ray's cost of a start grows with the blocks

A split serves a whole series, epoch after epoch. A new split takes Ray a second or two, and leaves every rank with an
open socket to a process that has ended. When all its ranks have begun a chapter, the split asks the feeder for the
blocks. If a rank leaves a series, calls may remain in its split, so the next series gets a new one.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import pyarrow as pa
import ray

from raypipe.decode import ClipExecutor, TaskExecutor, ThreadExecutor
from raypipe.errors import ConfigError, RaypipeError, ResumeError
from raypipe.feed.agreement import Ask, Meeting, MeetingProxy, PassPlace, ask_for, begin_pass
from raypipe.feed.block_context import BlockContext
from raypipe.feed.local import LocalFeed, can_read_here
from raypipe.feed.metrics import LoaderStats, Meter, RankGauges
from raypipe.feed.order import BY_SIZE, BlockRequest, FeedGroup, FeedSpec
from raypipe.plan import EpisodeIndex, WorldPlan, plan_epoch, plan_world
from raypipe.storage import share_gate

_FIGURES: Final = "figures"

_FIRST_BLOCK: Final = "raypipe-first-block"
_RAY_THREADS: Final = ("raypipe-receive", "raypipe-assemble", "raypipe-next-epoch", _FIRST_BLOCK, "iter_threaded")
"""Threads of ours and of Ray Data that wait for blocks, or for clips that tasks decode."""

_LOSSES: Final = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError)
_LOST: Final = (
    "raypipe's feeder or its node is gone, and with it the rest of this epoch's blocks. Start the ranks again from the "
    "last checkpoint, as Ray Train does with FailureConfig(max_failures=...): the order goes on exactly there."
)


@dataclass(frozen=True, slots=True)
class Ticket:
    """The feeder's answer to a rank."""

    iterator: Any
    """A Ray `DataIterator` over the rank's blocks of one chapter."""
    num_chapters: int
    resident_spans: int


class Feeder(Meeting):
    """Opens epochs. Runs as an actor with one thread per call; see `start_feeder`."""

    def __init__(self, context: BlockContext, index: EpisodeIndex, spec: FeedSpec, world_size: int) -> None:
        super().__init__(context.bad_data, index, world_size)
        self._context = ray.put(context)
        self._index = index
        self._spec = spec
        self._passes: dict[PassPlace, list[FeedGroup]] = {}
        self._splits: dict[_SplitKey, _Split] = {}

    def open_chapter(self, rank: int, ask: Ask, place: PassPlace, chapter: int) -> Ticket:
        """Return the rank's part of one chapter of a pass. Every rank asks once, with the same place."""
        with self._lock:
            if place not in self._passes:
                self._passes[place] = _plan_groups(self._index, ask, self._spec)
                # Every rank is done with older passes: it has asked for two later ones, or begun another series.
                self._passes = {old: one for old, one in self._passes.items() if not old.is_over_at(place)}
                # A split's actor lives as long as an iterator exists; ranks hold theirs while they read.
                self._splits = {
                    key: one for key, one in self._splits.items() if key.series >= place.series or not one.is_begun
                }
            number, taken = divmod(rank, self._spec.ranks_per_split)
            group, key = self._passes[place][number], _SplitKey(place.series, number)
            split = self._splits.get(key)
            iterators = self._split(key, len(group.plans)) if split is None else split.iterators
            self._splits[key] = _Split(iterators, (group, chapter))
            return Ticket(iterators[taken], group.num_chapters, int(group.resident[taken]))

    def take_blocks(self, key: "_SplitKey") -> list[BlockRequest]:
        """Return the blocks of the chapter that the ranks of a split asked for last. By then all of them have asked."""
        with self._lock:
            split = self._splits[key]
            split.is_begun = True
            group, chapter = split.asked
            return group.chapter_blocks(chapter)

    # These two share a separate thread, which keeps their order: a later `figures` sees the latest `tell` of a rank.
    @ray.method(concurrency_group=_FIGURES)  # type: ignore[untyped-decorator]
    def tell(self, rank: int, stats: LoaderStats) -> None:
        """Store the figures of a rank."""
        super().tell(rank, stats)

    @ray.method(concurrency_group=_FIGURES)  # type: ignore[untyped-decorator]
    def figures(self) -> dict[int, LoaderStats]:
        """Return the latest figures of each rank."""
        return super().figures()

    def shared_context(self) -> "list[ray.ObjectRef[BlockContext]]":
        """Return the reference to this pipeline's context, for tasks; in a list, so that Ray does not resolve it."""
        return [self._context]

    def _split(self, key: "_SplitKey", num_ranks: int) -> list[Any]:
        # Import here, so that ranks can meet before Ray Data is imported.
        from raypipe.feed.ray_data import build_dataset, split_dataset

        # Ray does not count an actor's handle to itself, so passing it to the split's actor does not keep the feeder.
        feeder = ray.get_runtime_context().current_actor
        return split_dataset(build_dataset(self._context, lambda: ray.get(feeder.take_blocks.remote(key))), num_ranks)


class _SplitKey(NamedTuple):
    series: int
    group: int


@dataclass
class _Split:
    """The split from which a group of ranks reads in a series of passes."""

    iterators: list[Any]
    asked: tuple[FeedGroup, int]
    """The group in the pass, and the chapter, that the ranks asked for last."""

    is_begun: bool = False
    """Whether Ray has the blocks of that chapter."""


def _plan_groups(index: EpisodeIndex, ask: Ask, spec: FeedSpec) -> list[FeedGroup]:
    """Return the groups of ranks that share a split, for one pass over the rest of an epoch."""
    plan = plan_epoch(replace(index, shares=ask.shares), ask.order, epoch=ask.epoch, legs=ask.legs)
    if plan.fingerprint != ask.fingerprint:
        raise ResumeError(
            f"the plan of the ranks has the fingerprint {ask.fingerprint}, and the same computed here "
            f"{plan.fingerprint}; the ranks and the driver have different data or versions of raypipe"
        )
    world, size = plan_world(plan, world_size=ask.world_size, batch=ask.batch), spec.ranks_per_split
    firsts = range(0, ask.world_size, size)
    return [FeedGroup(world, range(first, min(first + size, ask.world_size)), spec) for first in firsts]


class _FeederMeeting(MeetingProxy):
    """The meeting in a feeder's actor, for its ranks."""

    def __init__(self, feeder: Any) -> None:
        self._feeder = feeder

    def call(self, name: str, *args: Any) -> Any:
        """Return the answer of the feeder to a call."""
        return _get(getattr(self._feeder, name).remote(*args))

    def tell(self, rank: int, stats: LoaderStats) -> None:
        """Store the figures of a rank; do not wait for the answer."""
        self._feeder.tell.remote(rank, stats)


class FeederSource:
    """Gets the blocks of a rank from a feeder. It has the methods of `raypipe.feed.local.LocalSource`."""

    meeting: Meeting | MeetingProxy

    def __init__(
        self, context: BlockContext, spec: FeedSpec, attempt: str, *, feeder: Any = None, lone: Meeting | None = None
    ) -> None:
        """Prepare to ask the `feeder` of all ranks; a `lone` rank, with a meeting of its own, starts one if needed."""
        assert (feeder is None) != (lone is None), "either ranks share a feeder, or there is one rank"
        self._context = context
        self._started = feeder
        self._is_owner = feeder is not None
        """Whether this process started the feeder."""
        self._spec = spec
        self._lone = lone
        self._gauges: dict[tuple[str, int], RankGauges] = {}
        self.meeting = lone or _FeederMeeting(feeder)
        self.attempt = attempt

    def __getstate__(self) -> dict[str, Any]:
        # Counters are per process. The copy of a lone rank restarts its count of passes and needs a new feeder.
        started = None if self._lone is not None else self._started
        return {**self.__dict__, "_gauges": {}, "_is_owner": False, "_started": started}

    def feeder(self) -> Any:
        """Return the feeder; a lone rank starts it on the first call."""
        with _starting:
            if self._started is None:
                assert self._lone is not None
                self._started = start_feeder(self._context, self._lone.index, self._spec, world_size=1)
                self._is_owner = True
            return self._started

    def assigned_cpus(self) -> int:
        """Return the number of CPUs that Ray assigned to this process; in a driver, what the system lets it use."""
        runtime = ray.get_runtime_context()
        if runtime.worker.mode != ray.WORKER_MODE:
            return len(os.sched_getaffinity(0))
        return max(1, int(runtime.get_assigned_resources().get("CPU", 0)))

    def open(self, world: WorldPlan, rank: int, place: PassPlace | None) -> "RayFeed":
        """Return the blocks that the rest of a plan sends to one rank, once all ranks ask for the same."""
        share_gate()
        place = begin_pass(self.meeting, world, rank, place)
        own: LocalFeed | None = None
        if can_read_here(self._context):
            assert self._spec.spans_per_block != BY_SIZE, "a pipeline decides it before it opens a feed"
            # Copy the context to get separate readers: a reader is not thread-safe.
            own = LocalFeed(replace(self._context), world, rank, self._spec.spans_per_block, place)
        chapters = _Chapters(self.feeder, rank, ask_for(world), place, self._spec.prefetch_blocks)
        feed = RayFeed(chapters, own, is_lone=self._lone is not None)
        if self._is_owner or self._lone is not None:
            _own_feeds.add(feed)
        return feed

    def open_executor(self, context: BlockContext, num_threads: int, meter: Meter) -> ClipExecutor:
        """Return the executor that decodes the clips of a rank: its own threads, or tasks on the cluster."""
        if context.decode.where != "cluster":
            return ThreadExecutor(lambda: context.decoders, num_threads, context.frame_pool)
        (shared,) = _get(self.feeder().shared_context.remote())
        return TaskExecutor(shared=shared, decoders=_task_decoders, home_file=context.home_video, note=meter.add)

    def publish(self, name: str, rank: int, stats: LoaderStats) -> None:
        """Publish the figures of a rank on Ray's metrics port and to the meeting."""
        self._gauges.setdefault((name, rank), RankGauges(name, rank)).show(stats)
        self.meeting.tell(rank, stats)


class _Chapters:
    """The blocks that Ray sends to a rank in one pass, chapter after chapter."""

    def __init__(self, feeder: Callable[[], Any], rank: int, ask: Ask, place: PassPlace, prefetch_blocks: int) -> None:
        self.feeder = feeder
        self.place = place
        self._rank = rank
        self._ask = ask
        self._prefetch_blocks = prefetch_blocks
        self._lock = threading.Lock()
        self._ticket: Ticket | None = None

    @property
    def ticket(self) -> Ticket:
        """The rank's part of the first chapter. The first read asks the feeder, and waits for it to plan."""
        with self._lock:
            if self._ticket is None:
                self._ticket = _get(self._open(0))
            return self._ticket

    def blocks(self) -> Iterator[pa.Table]:
        """Yield the blocks in arrival order."""
        first = self.ticket
        for chapter in range(first.num_chapters):
            iterator = (_get(self._open(chapter)) if chapter else first).iterator
            tables = iterator.iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=self._prefetch_blocks
            )
            try:
                # A later chapter begins with a filler.
                yield from islice(tables, min(chapter, 1), None)
            except _LOSSES as error:
                error.add_note(_LOST)
                raise

    def _open(self, chapter: int) -> Any:
        return self.feeder().open_chapter.remote(self._rank, self._ask, self.place, chapter)


class RayFeed:
    """The blocks of one rank for the rest of an epoch.

    Ray takes seconds to send the first block: it starts a process for the split and one for the task. Until then the
    rank reads its own rows, if it can. The plan says which rows they are, so it does not matter who reads them. A lone
    rank with room for the whole pass, for example over a validation set, does not ask Ray at all. With other ranks it
    must ask, because Ray's split begins only when all ranks have asked.
    """

    is_remote = True

    def __init__(self, chapters: _Chapters, own: LocalFeed | None, *, is_lone: bool) -> None:
        self.place = chapters.place
        self._chapters = chapters
        self._own = own
        self._is_own_enough = is_lone and own is not None and own.fits
        self._is_reading = False
        self._is_asked = False
        self._first: Future[tuple[list[pa.Table], Iterator[pa.Table]]] = Future()
        if not self._is_own_enough:
            self._ask()

    def _ask(self) -> None:
        check_free_cpu()
        self._is_asked = True
        threading.Thread(target=self._fetch_first, name=_FIRST_BLOCK, daemon=True).start()

    @property
    def resident_spans(self) -> int:
        """How many spans the rank must be ready to hold: with less room the ranks could deadlock.

        While it reads itself, what its own batches need.
        """
        if self._own is not None and self._is_reading:
            return self._own.resident_spans
        return self._chapters.ticket.resident_spans

    def end(self) -> None:
        """End the feeder, and with it the splits of all ranks. Call it when no rank reads any more."""
        if self._is_asked:
            ray.kill(self._chapters.feeder())

    def streams(self, *, is_waited_for: bool) -> Iterator[Iterator[pa.Table]]:
        """Yield streams of blocks, each from the first block on, until one has them all.

        The first stream has the blocks that the rank reads itself until Ray sends its first. There is none if the rank
        cannot read, or if the loop does not wait for the rows (`is_waited_for`) because it is in the epoch before.
        """
        if self._own is not None and (is_waited_for or self._is_own_enough):
            self._is_reading = True
            yield self._own_blocks(self._own)
            self._is_reading = False
            if self._own.is_complete and not self._is_asked:
                return
        yield self.blocks()

    def _own_blocks(self, own: LocalFeed) -> Iterator[pa.Table]:
        for table in own.blocks_with_room():
            yield table
            if self._first.done():
                return

    def blocks(self) -> Iterator[pa.Table]:
        """Yield all of Ray's blocks in arrival order."""
        if not self._is_asked:
            self._ask()
        tables = chain(*self._first.result())
        # Drop both: they hold a block and open files, which are not needed any more.
        self._first, self._own = Future(), None
        yield from tables

    def _fetch_first(self) -> None:
        try:
            blocks = self._chapters.blocks()
            self._first.set_result((list(islice(blocks, 1)), blocks))
        except BaseException as error:
            self._first.set_exception(error)


_starting = threading.Lock()

_own_feeds: "weakref.WeakSet[RayFeed]" = weakref.WeakSet()
"""Feeds whose feeder this process started, while they are being read."""


@atexit.register
def end_feeders(wait_s: float = 5.0) -> None:
    """End the feeders that this process started, and wait for the threads that read from them.

    Python calls it when the interpreter ends. Call it yourself before ``ray.shutdown()`` if loaders are still being
    iterated. In Ray 2.60 a thread that is in a call when Ray ends uses freed memory: the process ends with SIGSEGV, or
    Ray ends it. Ending the feeder ends its splits, and so every call that waits for one.
    """
    feeds = list(_own_feeds)
    threads = [thread for thread in threading.enumerate() if thread.name in _RAY_THREADS]
    if not feeds or not threads or not ray.is_initialized():
        return
    for feed in feeds:
        feed.end()
    deadline = time.monotonic() + wait_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _task_decoders(context: "ray.ObjectRef[BlockContext]") -> Sequence[Any]:
    from raypipe.feed.ray_data import fetch_context

    return fetch_context(context).decoders


def _get(answer: Any) -> Any:
    """Return an answer of the feeder; raise an error of raypipe without Ray's wrapper."""
    try:
        return ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RaypipeError):
            raise error.cause from None
        raise
    except _LOSSES as error:
        error.add_note(_LOST)
        raise


def start_feeder(context: BlockContext, index: EpisodeIndex, spec: FeedSpec, *, world_size: int) -> Any:
    """Return the handle of a new feeder, an actor on this node that reserves no CPU. It lives as long as the handle."""
    # Count this process's requests to the Hub, from opening the dataset, for the whole cluster.
    share_gate()
    node = ray.get_runtime_context().get_node_id()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    # All ranks may wait in calls at once, each for the current epoch and the one that it fetches ahead.
    num_threads = 2 * world_size + 2
    actor = ray.remote(
        num_cpus=0, max_concurrency=num_threads, concurrency_groups={_FIGURES: 1}, scheduling_strategy=strategy
    )(Feeder)
    return actor.remote(context, index, spec, world_size)


def check_free_cpu(wait_s: float = 60.0) -> None:
    """Raise if no CPU is left for tasks: Ray would silently wait without end.

    CPUs held by tasks come free; those held by actors do not. A probe task finds out which.
    """
    if ray.available_resources().get("CPU", 0) >= 1:
        return
    # Set the strategy, or the task would run in the placement group of the calling trainer.
    probe = ray.remote(num_cpus=1, scheduling_strategy="DEFAULT")(lambda: None).remote()
    ready, _ = ray.wait([probe], timeout=wait_s)
    if ready:
        return
    ray.cancel(probe)
    total = ray.cluster_resources().get("CPU", 0)
    raise ConfigError(
        f"no CPU is free for reading: all {total:g} CPUs of the Ray cluster were taken for {wait_s:g} s, by training "
        f"workers or others. Leave at least one: take fewer workers, fewer CPUs for each, more nodes, or let Ray count "
        f"more CPUs on this one by ray.init(num_cpus=...) or `ray start --num-cpus`."
    )


def start_ray() -> None:
    """Use the Ray that this process is connected to; else call `ray.init` and print the number of CPUs."""
    if ray.is_initialized():
        return
    # Ray logs "authentication is enabled" as a warning: hide it. Show the one that it is off.
    told = logging.getLogger("ray._private.authentication.authentication_token_setup")
    told.addFilter(_is_no_good_news)
    try:
        ray.init(logging_level="warning")
    finally:
        told.removeFilter(_is_no_good_news)
    print(f"raypipe: using Ray with {ray.cluster_resources().get('CPU', 0):g} CPUs", flush=True)


def _is_no_good_news(record: logging.LogRecord) -> bool:
    return "authentication is enabled" not in record.getMessage()


def check_object_store(live_bytes: int) -> None:
    """Raise if the frames in transit to all ranks would fill more than half of the cluster's object store."""
    size = sum(node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"])
    if live_bytes > size / 2:
        raise ConfigError(
            f"decoding on the cluster puts up to {live_bytes / 1e9:.2f} GB of decoded frames into Ray's object store, "
            f"which has {size / 1e9:.2f} GB, and half of it must stay free. Use decode={{'where': 'rank'}}, a smaller "
            f"live_bytes, decode={{'resize': ...}}, or a larger object store."
        )


def has_spare_cpu_nodes() -> bool:
    """Return whether the cluster has CPU-only nodes besides nodes with GPUs."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has_gpu = any(resources.get("GPU", 0) for resources in nodes)
    return has_gpu and any(resources.get("CPU", 0) >= 1 and not resources.get("GPU", 0) for resources in nodes)
