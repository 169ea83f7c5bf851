"""Read the first rows of a rank in its own process while Ray starts.

Yields the blocks that Ray will send, in the same order and packed the same way, so that the rank can switch to Ray's
stream at any block.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import pyarrow as pa

from raypipe.feed.block_context import BlockContext
from raypipe.feed.order import feed_order, resident_spans
from raypipe.feed.packing import has_error, span_request
from raypipe.feed.read_blocks import add_windows, read_rows
from raypipe.feed.spec import BY_SIZE, FeedSpec
from raypipe.plan import RankPlan, WorldPlan


def can_read_here(context: BlockContext) -> bool:
    """Return whether a rank can read rows itself: it decodes the videos, and all datasets are local."""
    return context.decode.where != "cluster" and all(dataset.meta.storage.is_local for dataset in context.datasets)


def read_block(context: BlockContext, plan: RankPlan, first: int, stop: int) -> pa.Table:
    """Return the block of the spans [first, stop) of a rank's queue, read and windowed in this process."""
    requests = [span_request(plan, arrival) for arrival in range(first, stop)]
    return add_windows(context, read_rows(context, requests))


def room_for(world: WorldPlan, plan: RankPlan, spans_per_block: int) -> int:
    """Return how many spans a rank holds at once for its own batches, regardless of other ranks."""
    feed = feed_order([plan.queue.num_rows], spans_per_block=spans_per_block)
    return int(resident_spans(feed, [plan.lives()], world.steps)[0])


class OwnRows:
    """The first blocks of a rank. For one thread."""

    def __init__(self, context: BlockContext, world: WorldPlan, rank: int, spec: FeedSpec) -> None:
        assert spec.spans_per_block != BY_SIZE, "a pipeline decides it before it opens a feed"
        # Copy the context to get separate readers: a reader is not thread-safe.
        self._context = replace(context)
        self._world = world
        self._plan = world.rank(rank)
        self._spans_per_block: int = spec.spans_per_block
        self.is_all_read = False
        """Whether `blocks` has yielded all blocks of the pass."""

    @cached_property
    def room(self) -> int:
        """How many spans the rank holds at once for its own batches."""
        return room_for(self._world, self._plan, self._spans_per_block)

    @property
    def fits(self) -> bool:
        """Whether there is room for all spans of the pass."""
        return self.room >= len(self._plan.queue)

    def blocks(self) -> Iterator[pa.Table]:
        """Yield blocks while there is room; stop before one with an error.

        The error may be bad data, or a file that only other nodes have: the task that reads the block finds out.
        """
        num_spans, size = len(self._plan.queue), self._spans_per_block
        for first in range(0, num_spans, size):
            stop = min(first + size, num_spans)
            if stop > self.room:
                return
            table = read_block(self._context, self._plan, first, stop)
            if has_error(table):
                return
            yield table
        self.is_all_read = True
