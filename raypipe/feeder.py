"""The feeder: one small actor per pipeline and attempt that opens Ray Datasets from explicit plans.

Ranks ask it for the blocks of an epoch; it plans, interleaves the ranks' queues so that Ray's split delivers each block
to its rank, and hands out an iterator per rank. A request names everything that decides the order, so the answer does
not depend on how often or when it is asked.

::

    epoch   -> groups of ranks (`ranks_per_split`)    one Dataset and split each: an executor does 50 to 100 blocks/s
            -> chapters (`blocks_per_chapter`)        one after the other: Ray's cost of a start grows with the blocks
"""

import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import ray

from raypipe.block import BlockContext
from raypipe.cluster_gate import share_gate
from raypipe.errors import ConfigError, RaypipeError, ResumeError
from raypipe.gauges import RankGauges
from raypipe.metrics import LoaderStats
from raypipe.packed import span_request
from raypipe.plan import BatchSpec, EpisodeIndex, RankPlan, WorldPlan, plan_epoch, plan_world
from raypipe.plan.keyhash import Ints
from raypipe.rollcall import Ask, PassPlace, RollCall, describe_difference, name_ranks
from raypipe.skips import BadSpan, SkipList
from raypipe.source import Feed, feed_order, resident_spans, simulate_split
from raypipe.source.datasource import BlockRequest, build_dataset, split_dataset
from raypipe.source.free_cpu import check_free_cpu
from raypipe.source.placement import place_decoding

BY_SIZE: Final = "by_size"

_WAIT_FOR_RANKS_S: Final = 60.0

_LOSSES: Final = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError)
_LOST: Final = (
    "raypipe's feeder or its node is gone, and with it the rest of this epoch's blocks. Start the ranks again from the "
    "last checkpoint, as Ray Train does with FailureConfig(max_failures=...): the order goes on exactly there."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSpec:
    """How blocks travel. Nothing here changes the order."""

    spans_per_block: int | Literal["by_size"] = BY_SIZE
    """Consecutive spans of a rank that share a block. A block costs Ray 20 to 40 ms of CPU however small it is, so by
    default blocks of rows alone are packed up to 8 MB, and those with pixels up to 64 MB."""

    ranks_per_split: int = 16
    """Ranks that share one Ray Dataset: one executor does 50 to 100 blocks/s."""

    blocks_per_chapter: int = 5000
    """Blocks of one Ray Dataset."""

    prefetch_blocks: int = 4
    """Blocks that a rank fetches ahead of the one that it opens."""

    def __post_init__(self) -> None:
        for name in ("spans_per_block", "ranks_per_split", "blocks_per_chapter", "prefetch_blocks"):
            if getattr(self, name) != BY_SIZE and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a rank gets."""

    iterator: Any
    """A Ray `DataIterator` over the rank's blocks of one chapter."""
    num_chapters: int
    resident_spans: int


class Feeder:
    """Opens epochs. Runs as an actor, whose calls come in a thread each; see `start_feeder`."""

    def __init__(self, context: BlockContext, index: EpisodeIndex, spec: FeedSpec, *, is_decoding: bool) -> None:
        self._context = ray.put(context)
        # Only where a block is best decoded on one node rather than another.
        self._placed = context if is_decoding and context.has_cached_videos else None
        self._index = index
        self._spec = spec
        self._is_decoding = is_decoding
        self._lock = threading.RLock()
        self._roll_call = RollCall()
        self._passes: dict[PassPlace, _Pass] = {}
        self._places: dict[int, PassPlace] = {}
        self._stats: dict[int, LoaderStats] = {}
        num_episodes = len(np.unique(np.stack([index.dataset, index.episode]), axis=1).T)
        self._skips = SkipList(context.bad_data, num_episodes)

    def open(self, rank: int, ask: Ask, place: PassPlace | None) -> tuple[PassPlace, Ticket]:
        """Return the place of this pass, and the rank's part of its first chapter.

        Without a place the rank begins a series of passes: that waits until all ranks do, and compares.

        Raises:
            ResumeError: ranks ask for different things; every rank gets it.
        """
        if place is None:
            place = PassPlace(self._roll_call.answer(rank, ask, self._places.get(rank)), 0)
        self._places[rank] = place
        if place not in self._passes:
            # Not under the lock: it may take a minute, and all ranks shall hear of it at once.
            check_free_cpu()
        with self._lock:
            if place not in self._passes:
                self._passes[place] = _Pass(self._index, rank, ask, self._spec)
                self._forget_old(place)
            self._check_same(place, rank, ask)
            return place, self._open_chapter(rank, place, 0)

    def open_chapter(self, rank: int, place: PassPlace, chapter: int) -> Ticket:
        """Return the rank's part of one chapter of a pass that it has opened; once each."""
        with self._lock:
            return self._open_chapter(rank, place, chapter)

    def go_on(self, rank: int, place: PassPlace) -> None:
        """Note that a rank begins a pass; see `RollCall.go_on`."""
        self._roll_call.go_on(rank, place)

    def missing_ranks(self, world_size: int) -> list[int]:
        """Return the ranks that have not asked while others wait for them."""
        return self._roll_call.missing(world_size)

    def report_bad(self, span: BadSpan) -> None:
        """Note a span that a rank leaves out.

        Raises:
            DatasetError: more episodes are bad than may be.
        """
        self._skips.add(span)

    def note_bad(self, episodes: Mapping[tuple[int, int], str]) -> None:
        """Count episodes as bad that were left out before this start."""
        self._skips.note(episodes)

    def tell(self, rank: int, stats: LoaderStats) -> None:
        """Note the figures of a rank."""
        self._stats[rank] = stats

    def figures(self) -> dict[int, LoaderStats]:
        """Return the figures that each rank has told last."""
        return dict(self._stats)

    def _open_chapter(self, rank: int, place: PassPlace, chapter: int) -> Ticket:
        current = self._passes[place]
        group = current.groups[rank // self._spec.ranks_per_split]
        if chapter not in group.splits:
            blocks = group.chapter_blocks(chapter)
            nodes = place_decoding(self._placed, blocks) if self._placed is not None else ()
            dataset = build_dataset(self._context, blocks, is_decoding=self._is_decoding, nodes=nodes)
            group.splits[chapter] = list(split_dataset(dataset, len(group.plans)))
        taken = rank % self._spec.ranks_per_split
        iterator = group.splits[chapter][taken]
        # Kept by the rank from now on: the split's actor lives as long as someone holds an iterator.
        group.splits[chapter][taken] = None
        return Ticket(iterator, group.num_chapters, int(group.resident[taken]))

    def _forget_old(self, place: PassPlace) -> None:
        """Let go of passes that every rank is done with: it has asked for two later ones, or begun anew."""
        for old in list(self._passes):
            if old.is_over_at(place):
                del self._passes[old]

    def _check_same(self, place: PassPlace, rank: int, ask: Ask) -> None:
        current = self._passes[place]
        difference = describe_difference({current.rank: current.ask, rank: ask})
        if difference:
            raise ResumeError(difference)


@dataclass
class _Pass:
    """One pass over the rest of an epoch."""

    index: EpisodeIndex
    rank: int
    """Who asked first."""
    ask: Ask
    spec: FeedSpec

    @cached_property
    def groups(self) -> list["_Group"]:
        """The groups of ranks that share a split."""
        ask, size = self.ask, self.spec.ranks_per_split
        index = replace(self.index, shares=ask.shares)
        plan = plan_epoch(index, ask.order, epoch=ask.epoch, legs=ask.legs)
        if plan.fingerprint != ask.fingerprint:
            raise ResumeError(
                f"the plan of the ranks has the fingerprint {ask.fingerprint}, and the same computed here "
                f"{plan.fingerprint}; the ranks and the driver have different data or versions of raypipe"
            )
        world = plan_world(plan, world_size=ask.world_size, batch=ask.batch)
        return [
            _Group(world, range(first, min(first + size, ask.world_size)), self.spec)
            for first in range(0, ask.world_size, size)
        ]


class _Group:
    """Ranks that share a split, and their blocks in feed order."""

    def __init__(self, world: WorldPlan, ranks: Sequence[int], spec: FeedSpec) -> None:
        self.plans: list[RankPlan] = [world.rank(rank) for rank in ranks]
        self.splits: dict[int, list[Any]] = {}
        self._spec = spec
        assert spec.spans_per_block != BY_SIZE, "a pipeline decides it before it starts a feeder"
        self._feed: Feed = feed_order(
            [plan.queue.num_rows for plan in self.plans], spans_per_block=spec.spans_per_block
        )
        self.resident: Ints = resident_spans(self._feed, [plan.lives() for plan in self.plans], world.steps)
        self.num_chapters = max(1, -(-len(self._feed) // spec.blocks_per_chapter))

    def chapter_blocks(self, chapter: int) -> list[BlockRequest]:
        """Return the blocks of one chapter in feed order."""
        first = chapter * self._spec.blocks_per_chapter
        stop = min(first + self._spec.blocks_per_chapter, len(self._feed))
        fillers = self._fillers(first)
        rows = np.concatenate([np.array(fillers, dtype=np.int64), self._feed.num_rows[first:stop]])
        ranks = np.concatenate([np.arange(len(fillers)), self._feed.rank[first:stop]])
        assert np.array_equal(simulate_split(rows, len(self.plans)), ranks), "the split would route blocks wrongly"
        return [*fillers, *(self._requests(i) for i in range(first, stop))]

    def _fillers(self, first: int) -> list[int]:
        """Return the rows of a filler per rank that put a later chapter's split where the one before left off.

        Ray counts rows from 0 in every split; the feed order goes on counting. One row more than needed for each, since
        a block of no rows would go anywhere.
        """
        if not first:
            return []
        sent = np.bincount(
            self._feed.rank[:first], weights=self._feed.num_rows[:first], minlength=len(self.plans)
        ).astype(np.int64)
        return [int(rows) for rows in sent - sent.min() + 1]

    def _requests(self, i: int) -> BlockRequest:
        plan = self.plans[int(self._feed.rank[i])]
        return tuple(
            span_request(plan, arrival) for arrival in range(int(self._feed.first[i]), int(self._feed.stop[i]))
        )


class FeederSource:
    """The blocks of a rank, from a feeder; a `BlockSource`."""

    def __init__(self, feeder: Any, spec: FeedSpec) -> None:
        self._feeder = feeder
        self._spec = spec
        self._gauges: dict[tuple[str, int], RankGauges] = {}
        self.attempt = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
        """The name of this start of the ranks, by which accounts are sorted; no order depends on it."""

    def __getstate__(self) -> dict[str, Any]:
        # Counters count what one process has seen.
        return {**self.__dict__, "_gauges": {}}

    def assigned_cpus(self) -> int:
        """Return the CPUs that Ray gave to this process; in a driver, those that the system lets it use."""
        runtime = ray.get_runtime_context()
        if runtime.worker.mode != ray.WORKER_MODE:
            return len(os.sched_getaffinity(0))
        return max(1, int(runtime.get_assigned_resources().get("CPU", 0)))

    def open(self, world: WorldPlan, rank: int, place: PassPlace | None) -> "RayFeed":
        """Return the blocks that the rest of a plan sends to one rank; waits for the feeder to plan."""
        share_gate()
        plan = world.plan
        per_lane = world.steps.per_lane
        ask = Ask(
            order=plan.spec,
            epoch=plan.epoch,
            legs=plan.legs,
            world_size=world.world_size,
            batch=BatchSpec(size=per_lane * plan.leg.lanes, scope="global"),
            fingerprint=plan.fingerprint,
            shares=plan.index.shares,
        )
        asked = self._feeder.open.remote(rank, ask, place)
        self._warn_of_waiting(asked, rank, world.world_size)
        opened, ticket = _get(asked)
        return RayFeed(self._feeder, rank, opened, ticket, self._spec.prefetch_blocks)

    def go_on(self, rank: int, place: PassPlace) -> None:
        """Tell the feeder that a rank begins the pass that follows; raises where others have left the order."""
        _get(self._feeder.go_on.remote(rank, place))

    def publish(self, name: str, rank: int, stats: LoaderStats) -> None:
        """Show the figures of a rank on Ray's metrics port, and tell them to the other ranks."""
        gauges = self._gauges.setdefault((name, rank), RankGauges(name, rank))
        gauges.show(stats)
        self._feeder.tell.remote(rank, stats)

    def collect(self) -> dict[int, LoaderStats]:
        """Return the figures of all ranks, as they told them last."""
        figures: dict[int, LoaderStats] = _get(self._feeder.figures.remote())
        return figures

    def note_bad(self, episodes: Mapping[tuple[int, int], str]) -> None:
        """Count episodes as bad that were left out before this start."""
        _get(self._feeder.note_bad.remote(dict(episodes)))

    def _warn_of_waiting(self, asked: Any, rank: int, world_size: int) -> None:
        if ray.wait([asked], timeout=_WAIT_FOR_RANKS_S)[0]:
            return
        missing = ray.get(self._feeder.missing_ranks.remote(world_size))
        if missing:
            warnings.warn(
                f"rank {rank} of {world_size} has waited {_WAIT_FOR_RANKS_S:g} s for {name_ranks(missing)} to start "
                f"the epoch. Every rank must iterate its loader, all at once.",
                stacklevel=2,
            )


class RayFeed:
    """The blocks of one rank for the rest of an epoch; a `BlockFeed`."""

    def __init__(self, feeder: Any, rank: int, place: PassPlace, ticket: Ticket, prefetch_blocks: int) -> None:
        self.resident_spans = ticket.resident_spans
        self.place = place
        self._feeder = feeder
        self._rank = rank
        self._ticket = ticket
        self._prefetch_blocks = prefetch_blocks

    def report_bad(self, span: BadSpan) -> None:
        """Tell the feeder of a span that is left out; raises where more episodes are bad than may be."""
        _get(self._feeder.report_bad.remote(span))

    def blocks(self) -> Iterator[pa.Table]:
        """Yield the blocks in arrival order, chapter after chapter."""
        iterator = self._ticket.iterator
        for chapter in range(self._ticket.num_chapters):
            if chapter:
                iterator = _get(self._feeder.open_chapter.remote(self._rank, self.place, chapter)).iterator
            try:
                yield from iterator.iter_batches(
                    batch_size=None, batch_format="pyarrow", prefetch_batches=self._prefetch_blocks
                )
            except _LOSSES as error:
                error.add_note(_LOST)
                raise


def _get(answer: Any) -> Any:
    """Return an answer of the feeder; an error of raypipe is raised as it is, without Ray's words around it."""
    try:
        return ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RaypipeError):
            raise error.cause from None
        raise
    except _LOSSES as error:
        error.add_note(_LOST)
        raise


def start_feeder(
    context: BlockContext, index: EpisodeIndex, spec: FeedSpec, *, world_size: int, is_decoding: bool
) -> Any:
    """Start a feeder as an actor without a CPU of its own, on this node; it lives as long as its handle."""
    # What this process has asked of the Hub, to open the dataset, counts for the cluster.
    share_gate()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    # All ranks may wait in a call at once, each for this epoch and the one that it fetches ahead.
    num_threads = 2 * world_size + 2
    actor = ray.remote(num_cpus=0, max_concurrency=num_threads, scheduling_strategy=strategy)(Feeder)
    return actor.remote(context, index, spec, is_decoding=is_decoding)
