"""Group ranks that share a split of Ray, and list their blocks of one pass, chapter by chapter."""

from collections.abc import Sequence

import numpy as np

from raypipe.feed.order import Feed, feed_order, resident_spans, simulate_split
from raypipe.feed.packing import SpanRequest, span_request
from raypipe.feed.spec import BY_SIZE, FeedSpec
from raypipe.plan import Ints, RankPlan, WorldPlan

BlockRequest = tuple[SpanRequest, ...] | int
"""The spans of one block, or the number of rows of a filler."""


class FeedGroup:
    """Ranks that share a split, and their blocks in feed order."""

    def __init__(self, world: WorldPlan, ranks: Sequence[int], spec: FeedSpec) -> None:
        self.plans: list[RankPlan] = [world.rank(rank) for rank in ranks]
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
        """Return the rows of a filler per rank, which bring a later chapter's split to where the last one ended.

        Ray counts rows from 0 in every chapter, while the feed order keeps counting. Each filler has one row more than
        needed, because Ray could send a block without rows to any rank.
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
