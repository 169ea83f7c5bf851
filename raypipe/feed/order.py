"""Compute the order in which to feed blocks to Ray, so that Ray's split delivers each to its planned rank.

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

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError
from raypipe.plan import Ints, Steps


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

    Raises:
        AssertionError: no such order exists; a plan never has such queues.
    """
    if spans_per_block < 1:
        raise ConfigError(f"spans_per_block must be at least 1, got {spans_per_block}")
    packed = [_pack(queue, spans_per_block) for queue in queues]
    rank = np.repeat(np.arange(len(queues), dtype=np.int32), [len(rows) for rows in packed])
    rows = np.concatenate([np.empty(0, dtype=np.int64), *packed])
    before = np.concatenate([np.empty(0, dtype=np.int64), *(np.cumsum(rows) - rows for rows in packed)])
    first = np.concatenate([np.empty(0, dtype=np.int64), *(np.arange(len(r)) * spans_per_block for r in packed)])
    _check_feasible(rank, before, queues)
    order = np.lexsort((rank, before))
    limits = np.array([len(queue) for queue in queues], dtype=np.int64)
    stop = np.minimum(first + spans_per_block, limits[rank])
    return Feed(rank=rank[order], first=first[order], stop=stop[order], num_rows=rows[order])


def resident_spans(feed: Feed, lives: Sequence[tuple[Ints, Ints]], steps: Steps) -> Ints:
    """Return for every rank how many spans it must be able to hold.

    Ray balances rows, not demand: a block that one rank needs now may queue behind blocks that others need later. Ranks
    never block each other if each keeps pulling until it holds this many spans.

    ::

        feed       a0   b0   b1   a1        rank a needs a1 in step 3, rank b needs b1 in step 9:
                                  ^         b must take b1 in step 3, or a never gets a1

    Args:
        feed: the feed order of the queues of all ranks.
        lives: `RankPlan.lives` of every rank.
        steps: the steps that the ranks do together.
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


def _pack(queue: Ints, spans_per_block: int) -> Ints:
    if spans_per_block == 1 or not len(queue):
        return queue
    return np.add.reduceat(queue, np.arange(0, len(queue), spans_per_block))


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
        f"but rank {full[1]} is full with {full[0]} rows; "
        f"rows per rank: {[int(queue.sum()) for queue in queues]}"
    )
