"""What travels to a rank, and the order in which Ray gets the blocks so that its split sends each to its planned rank.

Interleaves the ranks' queues. ``streaming_split(equal=False)`` with ``preserve_order`` gives every arriving block to
the output with the fewest rows so far, ties to the lowest index. Neither timing nor demand matters.

::

    queue of rank 0      [ 5   ][2][ 4  ]            rows
    queue of rank 1      [3 ][ 4  ][ 4  ]

    feed      rank       0    1    1    0    0    1
              rows       5    3    4    2    4    4
    rows so far  0 | 0   5|0  5|3  5|7  7|7  11|7

We feed a block when its rank has the fewest rows: that is, in the order of the rows before each block in its own queue,
ties to the lowest rank. This works for queues of any shape if their totals differ by at most one row and the extras are
on the lowest ranks. Proof: suppose the rank with the fewest rows had nothing left. A rank with something left is at or
above that count and ends at most one above it. So it is a lower rank at the same count, and comes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError
from raypipe.plan import Ints, RankPlan, Steps, WorldPlan

BY_SIZE: Final = "by_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSpec:
    """How blocks travel. Nothing here changes the order."""

    spans_per_block: int | Literal["by_size"] = BY_SIZE
    """Consecutive spans of a rank that share a block. A block costs Ray 20 to 40 ms of CPU, however small, so the
    default packs up to 8 MB into one. The local feed reads one span at a time unless you give a number."""

    ranks_per_split: int = 16
    """Ranks that share one Ray Dataset; one executor does 50 to 100 blocks/s."""

    blocks_per_chapter: int = 5000
    """Blocks per execution of a Ray Dataset."""

    prefetch_blocks: int = 4
    """Blocks that a rank fetches ahead of the one it opens."""

    def __post_init__(self) -> None:
        for name in ("spans_per_block", "ranks_per_split", "blocks_per_chapter", "prefetch_blocks"):
            if getattr(self, name) != BY_SIZE and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRequest:
    """One span of a plan: what to read, and the identity that its block carries."""

    epoch: int
    dataset: int
    lap: int
    """The pass over the dataset that the span belongs to. In a mixture an episode may come twice in an epoch."""
    episode: int
    start: int
    stop: int
    lane: int
    place: int
    """Position in the lane's queue."""
    clip_frames: int = 0
    """Frames of a clip; 0 if a clip is a whole span."""
    frames: tuple[int, ...] = ()
    """The frames to emit if an interrupted epoch left only some of [start, stop); empty for all."""

    @property
    def anchors(self) -> Ints:
        """The frames to emit, ascending: one per row of the block."""
        return np.array(self.frames, dtype=np.int64) if self.frames else np.arange(self.start, self.stop)

    @property
    def identity(self) -> tuple[int, ...]:
        """What tells the span from all others of a run: its place in the plan, and how many frames to emit."""
        place = self.epoch, self.dataset, self.lap, self.episode, self.start, self.stop, self.lane, self.place
        return (*place, len(self.anchors))


def span_request(plan: RankPlan, arrival: int) -> SpanRequest:
    """Return what to read for one block of a rank's queue."""
    queue = plan.queue
    is_whole = queue.num_rows[arrival] == queue.stop[arrival] - queue.start[arrival]
    return SpanRequest(
        epoch=plan.keys.epoch,
        dataset=int(queue.dataset[arrival]),
        lap=int(queue.lap[arrival]),
        episode=int(queue.episode[arrival]),
        start=int(queue.start[arrival]),
        stop=int(queue.stop[arrival]),
        lane=int(queue.lane[arrival]),
        place=int(queue.place[arrival]),
        clip_frames=plan.keys.clip_frames[int(queue.dataset[arrival])] if plan.keys.clip_frames else 0,
        frames=() if is_whole else tuple(plan.frames_of(arrival).tolist()),
    )


BlockRequest = tuple[SpanRequest, ...] | int
"""The spans of one block, or the number of rows of a filler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Blocks in feed order, as columns."""

    rank: NDArray[np.int32]
    first: Ints
    stop: Ints
    """A block packs the spans [first, stop) of its rank's queue."""

    num_rows: Ints

    def __len__(self) -> int:
        return len(self.rank)


def feed_order(queues: Sequence[Ints], *, spans_per_block: int = 1) -> Feed:
    """Return the interleaving of the ranks' queues that Ray's split separates again.

    Args:
        queues: for every rank the number of rows of its spans in arrival order.
        spans_per_block: consecutive spans of a queue that travel in one block.
    """
    starts = [np.arange(0, len(queue), spans_per_block) for queue in queues]
    packed = [np.add.reduceat(queue, at) if len(queue) else queue for queue, at in zip(queues, starts, strict=True)]
    rank = np.repeat(np.arange(len(queues), dtype=np.int32), [len(rows) for rows in packed])
    rows = np.concatenate([np.empty(0, dtype=np.int64), *packed])
    before = np.concatenate([np.empty(0, dtype=np.int64), *(np.cumsum(rows) - rows for rows in packed)])
    first = np.concatenate([np.empty(0, dtype=np.int64), *starts])
    _check_feasible(rank, before, queues)
    order = np.lexsort((rank, before))
    limits = np.array([len(queue) for queue in queues], dtype=np.int64)
    stop = np.minimum(first + spans_per_block, limits[rank])
    return Feed(rank=rank[order], first=first[order], stop=stop[order], num_rows=rows[order])


def resident_spans(feed: Feed, lives: Sequence[tuple[Ints, Ints]], steps: Steps) -> Ints:
    """Return for every rank how many spans it must be able to hold; `lives` are those of the rank's plan.

    Ray balances rows, not demand: a block that one rank needs now may queue behind blocks that others need later. Ranks
    never block each other if each keeps pulling until it holds this many spans.

    ::

        feed       a0   b0   b1   a1        rank a needs a1 in step 3, rank b needs b1 in step 9:
                                  ^         b must take b1 in step 3, or a never gets a1
    """
    admitted = np.zeros(len(feed), dtype=np.int64)
    for rank, (need, _) in enumerate(lives):
        mine = feed.rank == rank
        # The merge of several lanes is approximate, so a block is needed when any one of its spans is.
        admitted[mine] = np.minimum.reduceat(need, feed.first[mine]) if len(need) else 0
    pulled_by = np.minimum.accumulate(admitted[::-1])[::-1]
    starts = steps.starts()
    peaks = []
    for rank, (_, retired) in enumerate(lives):
        mine = feed.rank == rank
        step = np.searchsorted(starts, pulled_by[mine], side="right") - 1
        gone = np.searchsorted(np.sort(retired), starts[step], side="right")
        peaks.append(int((feed.stop[mine] - gone).max(initial=0)))
    return np.array(peaks, dtype=np.int64)


def simulate_split(num_rows: Ints, world_size: int) -> NDArray[np.int32]:
    """Return the rank to which Ray's split sends each block: fewest rows so far, ties to the lowest."""
    heap = list(range(world_size))
    tops = [heapreplace(heap, heap[0] + rows) for rows in (num_rows * world_size).tolist()]
    return (np.array(tops, dtype=np.int64) % world_size).astype(np.int32)


def _check_feasible(rank: NDArray[np.int32], before: Ints, queues: Sequence[Ints]) -> None:
    # While a block is still to come, a rank that already has everything must not have the fewest rows.
    if not len(rank):
        return
    latest = before == before.max()
    last = (int(before.max()), int(rank[latest].max()))
    full = min((int(queue.sum()), number) for number, queue in enumerate(queues))
    empty = [number for number, queue in enumerate(queues) if (queue < 1).any()]
    assert not empty, f"ranks {empty} have blocks without rows, which upset Ray's split"
    assert last < full, (
        f"Ray's split cannot deliver these queues: the last block goes to rank {last[1]} when it has {last[0]} rows, "
        f"but rank {full[1]} is full with {full[0]} rows; rows per rank: {[int(queue.sum()) for queue in queues]}"
    )


class FeedGroup:
    """Ranks that share a split, and their blocks in feed order."""

    def __init__(self, world: WorldPlan, ranks: Sequence[int], spec: FeedSpec) -> None:
        self.plans: list[RankPlan] = [world.rank(rank) for rank in ranks]
        self._spec = spec
        assert spec.spans_per_block != BY_SIZE, "a pipeline decides it before it starts a feeder"
        queues = [plan.queue.num_rows for plan in self.plans]
        self._feed: Feed = feed_order(queues, spans_per_block=spec.spans_per_block)
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
        """Return the rows of a filler per rank, which bring a later chapter's split to where the last one ended.

        Ray counts rows from 0 in every chapter, while the feed order keeps counting. Each filler has one row more than
        needed, because Ray could send a block without rows to any rank.
        """
        if not first:
            return []
        ranks, rows = self._feed.rank[:first], self._feed.num_rows[:first]
        sent = np.bincount(ranks, weights=rows, minlength=len(self.plans)).astype(np.int64)
        return [int(missing) for missing in sent - sent.min() + 1]

    def _requests(self, i: int) -> BlockRequest:
        plan = self.plans[int(self._feed.rank[i])]
        arrivals = range(int(self._feed.first[i]), int(self._feed.stop[i]))
        return tuple(span_request(plan, arrival) for arrival in arrivals)
