"""Ranks that do every step together, on a feed that hands out one block at a time, never wait for each other for ever.

It is Ray's split at its strictest: nothing is buffered, and a block can be had only after all that were fed before it.
"""

import threading
from dataclasses import dataclass, field

import pytest
from batches import frames_of, frames_of_dataset, local_loader, rows_spec
from ray_session import run_ranks

from raypipe.dataset import open_dataset
from raypipe.feed import (
    FeedSpec,
    LocalSource,
    Meeting,
    PassPlace,
    feed_order,
    read_block,
    resident_spans,
    span_request,
)
from raypipe.loader import LoaderSpec, RankLoader
from raypipe.pipeline import Pipeline
from raypipe.testing import write_dataset

pytestmark = pytest.mark.timeout(240)

LENGTHS = (31, 1, 2, 25, 1, 1, 18, 3, 40, 1, 6, 2, 2, 29, 1, 11, 4, 1, 37, 5)


@dataclass
class OneFeed:
    """The feed of all ranks; block `fed` is the next that can be had."""

    spans_per_block: int
    fed: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, number):
        with self.changed:
            assert self.changed.wait_for(lambda: self.fed == number, timeout=60), f"block {self.fed} is not taken"
            self.fed += 1
            self.changed.notify_all()


class StrictSource(LocalSource):
    def __init__(self, job, feed):
        super().__init__(job.context, Meeting(job.context.bad_data, job.index, job.world_size), FeedSpec(), "one")
        self.context, self.feed = job.context, feed

    def open(self, world, rank, place):
        plans = [world.rank(number) for number in range(world.world_size)]
        order = feed_order([plan.queue.num_rows for plan in plans], spans_per_block=self.feed.spans_per_block)
        resident = resident_spans(order, [plan.lives() for plan in plans], world.steps)
        place = place or PassPlace(0, 0)
        return StrictFeed(self.context, plans[rank], rank, order, self.feed, int(resident[rank]), place)


@dataclass
class StrictFeed:
    context: object
    plan: object
    rank: int
    order: object
    feed: OneFeed
    resident_spans: int
    place: PassPlace
    is_remote: bool = False

    def streams(self, *, is_waited_for):
        yield self.blocks()

    def blocks(self):
        for number in (self.order.rank == self.rank).nonzero()[0].tolist():
            self.feed.take(number)
            arrivals = range(int(self.order.first[number]), int(self.order.stop[number]))
            requests = [span_request(self.plan, arrival) for arrival in arrivals]
            yield read_block(self.context, requests)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return open_dataset(str(write_dataset(tmp_path_factory.mktemp("lockstep") / "dataset", rows_spec(LENGTHS))))


@pytest.mark.parametrize("spans_per_block", [1, 3])
@pytest.mark.parametrize(("world_size", "lanes"), [(2, 2), (3, 3), (2, 4), (4, 4)])
@pytest.mark.parametrize(("live_spans", "span_frames"), [(1, "episode"), (3, "episode"), (2, 8)])
def test_ranks_in_lockstep_end_the_epoch(dataset, world_size, lanes, live_spans, span_frames, spans_per_block):
    order = {"live_spans": live_spans, "span_frames": span_frames, "lanes": lanes}
    pipe = Pipeline(dataset, batch_size={"size": 12, "scope": "global"}, seed=live_spans, order=order)
    feed, step = OneFeed(spans_per_block), threading.Barrier(world_size)

    def train(loader):
        emitted = []
        for batch in loader:
            step.wait(timeout=60)
            emitted += frames_of(batch)
        return emitted

    ranks = run_ranks([strict_loader(pipe, rank, world_size, feed) for rank in range(world_size)], train, timeout_s=150)

    assert sorted(frame for emitted in ranks for frame in emitted) == frames_of_dataset(dataset)


def strict_loader(pipe, rank, world_size, feed):
    job = local_loader(pipe, rank, world_size)._job
    return RankLoader(job, StrictSource(job, feed), LoaderSpec(prefetch_batches=1, progress=False))
