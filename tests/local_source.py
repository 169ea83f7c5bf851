"""A `BlockSource` without Ray: reads, windows and decodes blocks one after the other, in the rank's own process."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from raypipe.block import BlockContext, add_pixels, add_windows, read_rows
from raypipe.loader import RankLoader
from raypipe.loader_spec import LoaderSpec
from raypipe.metrics import LoaderStats
from raypipe.packed import span_request
from raypipe.pipeline import Pipeline
from raypipe.plan import RankPlan, WorldPlan
from raypipe.rank_job import RankJob
from raypipe.rollcall import PassPlace
from raypipe.skips import BadSpan, SkipList
from raypipe.source import feed_order, resident_spans


@dataclass
class LocalSource:
    """What `FeederSource` is, with the stages of a task called in a row."""

    context: BlockContext
    spans_per_block: int = 1
    published: dict[int, list[tuple[str, LoaderStats]]] = field(default_factory=dict)
    attempt: str = "local"

    @cached_property
    def skips(self) -> SkipList:
        num_episodes = len(self.context.datasets[0].meta.episodes)
        return SkipList(self.context.bad_data, num_episodes)

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key != "skips"}

    def assigned_cpus(self) -> int:
        return 1

    def note_bad(self, episodes) -> None:
        self.skips.note(episodes)

    def go_on(self, rank: int, place: PassPlace) -> None:
        pass

    def publish(self, name: str, rank: int, stats: LoaderStats) -> None:
        self.published.setdefault(rank, []).append((name, stats))

    def collect(self) -> dict[int, LoaderStats]:
        return {rank: told[-1][1] for rank, told in self.published.items()}

    def open(self, world: WorldPlan, rank: int, place: PassPlace | None) -> "LocalFeed":
        plans = [world.rank(number) for number in range(world.world_size)]
        feed = feed_order([plan.queue.num_rows for plan in plans], spans_per_block=self.spans_per_block)
        resident = resident_spans(feed, [plan.lives() for plan in plans], world.steps)
        place = place or PassPlace(0, 0)
        return LocalFeed(self.context, plans[rank], int(resident[rank]), self.spans_per_block, place, self.skips)


@dataclass
class LocalFeed:
    context: BlockContext
    plan: RankPlan
    resident_spans: int
    spans_per_block: int
    place: PassPlace
    skips: SkipList

    def report_bad(self, span: BadSpan) -> None:
        self.skips.add(span)

    def blocks(self) -> Iterator[pa.Table]:
        for first in range(0, len(self.plan.queue), self.spans_per_block):
            arrivals = range(first, min(first + self.spans_per_block, len(self.plan.queue)))
            table = read_rows(self.context, [span_request(self.plan, arrival) for arrival in arrivals])
            table = add_windows(self.context, table)
            yield add_pixels(self.context, table) if self.context.decode.where == "cluster" else table


def local_loader(pipe: Pipeline, rank: int = 0, world_size: int = 1, *, spans_per_block: int = 1, **settings: object):
    """Return a rank's loader as `Pipeline.loaders` does, on a `LocalSource`."""
    config = pipe.config
    context = config.block_context()
    job = RankJob(
        context=context,
        index=config.index(),
        order=config.order,
        is_span_derived=config.live_bytes > 0,
        batch=config.batch,
        rank=rank,
        world_size=world_size,
        selection=config.selection,
        mixture=config.mixture,
        allow_mixture_change=config.allow_mixture_change,
    )
    return RankLoader(job, LocalSource(context, spans_per_block), LoaderSpec(**settings))
