"""The local feed: a rank's own process reads and windows the rows of its spans, without importing or starting Ray.

The plan decides which spans a rank reads and in what order, so the batches equal those of the Ray feed bit for bit. As
there, the ranks share one `Meeting`, in this process or in that of rank 0.
"""

import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from raypipe.decode import ClipExecutor, ThreadExecutor
from raypipe.feed.agreement import Meeting, PassPlace, ask_for, describe_waiting
from raypipe.feed.bad_data import BadSpan
from raypipe.feed.block_context import BlockContext
from raypipe.feed.metrics import LoaderStats, Meter
from raypipe.feed.own_rows import read_block, room_for
from raypipe.feed.remote_agreement import RemoteMeeting
from raypipe.feed.spec import BY_SIZE, FeedSpec
from raypipe.plan import RankPlan, WorldPlan

_WAIT_FOR_RANKS_S: Final = 60.0


class LocalSource:
    """The blocks of one rank, read in its own process; a `BlockSource`."""

    def __init__(self, context: BlockContext, meeting: Meeting | RemoteMeeting, spec: FeedSpec, attempt: str) -> None:
        # Copy the context to get separate readers: a reader is not thread-safe, and another thread may use the rank's.
        self._reading = replace(context)
        self._lock = threading.Lock()
        self._meeting = meeting
        self._spans_per_block = 1 if spec.spans_per_block == BY_SIZE else spec.spans_per_block
        self.attempt = attempt

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def assigned_cpus(self) -> int:
        """Return the number of CPUs that the system lets this process use."""
        return len(os.sched_getaffinity(0))

    def open(self, world: WorldPlan, rank: int, place: PassPlace | None) -> "LocalFeed":
        """Return the blocks that the rest of a plan sends to one rank, once all ranks ask for the same."""
        with self._warning_of_waiting(rank, world.world_size):
            place = self._meeting.begin(rank, ask_for(world), place)
        return LocalFeed(self, world, rank, place)

    def open_executor(self, context: BlockContext, num_threads: int, meter: Meter) -> ClipExecutor:  # noqa: ARG002
        """Return an executor that decodes in threads of this process."""
        return ThreadExecutor(lambda: context.decoders, num_threads, context.frame_pool)

    def go_on(self, rank: int, place: PassPlace) -> None:
        """Note that a rank begins the pass after its last one; raise if other ranks have left the order."""
        self._meeting.go_on(rank, place)

    def publish(self, name: str, rank: int, stats: LoaderStats) -> None:  # noqa: ARG002
        """Send the figures of a rank to the meeting."""
        self._meeting.tell(rank, stats)

    def collect(self) -> dict[int, LoaderStats]:
        """Return the latest published figures of all ranks."""
        return self._meeting.figures()

    def note_bad(self, episodes: Mapping[tuple[int, int], str]) -> None:
        """Count episodes that an earlier start left out as bad."""
        self._meeting.note_bad(episodes)

    def report_bad(self, span: BadSpan) -> None:
        """Note for all ranks that a span is left out; raise if more episodes are bad than the policy allows."""
        self._meeting.report_bad(span)

    def read_blocks(self, plan: RankPlan) -> Iterator[pa.Table]:
        """Yield the blocks of a plan in arrival order, reading each one on demand."""
        num_spans, size = len(plan.queue), self._spans_per_block
        for first in range(0, num_spans, size):
            stop = min(first + size, num_spans)
            # Lock, because another thread may read the next epoch while this one ends.
            with self._lock:
                table = read_block(self._reading, plan, first, stop)
            yield table

    def plan_room(self, world: WorldPlan, plan: RankPlan) -> int:
        """Return how many spans the rank holds at once, which does not depend on other ranks here."""
        return room_for(world, plan, self._spans_per_block)

    @contextmanager
    def _warning_of_waiting(self, rank: int, world_size: int) -> Iterator[None]:
        def warn() -> None:
            missing = self._meeting.missing_ranks()
            if missing:
                warnings.warn(describe_waiting(rank, world_size, missing, _WAIT_FOR_RANKS_S), stacklevel=2)

        timer = threading.Timer(_WAIT_FOR_RANKS_S, warn)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class LocalFeed:
    """The blocks of one rank for the rest of an epoch; a `BlockFeed`."""

    is_remote = False
    is_complete = False

    def __init__(self, source: LocalSource, world: WorldPlan, rank: int, place: PassPlace) -> None:
        self._source = source
        self._plan = world.rank(rank)
        self.resident_spans = source.plan_room(world, self._plan)
        self.place = place

    def report_bad(self, span: BadSpan) -> None:
        """Note for all ranks that a span is left out; raise if more episodes are bad than the policy allows."""
        self._source.report_bad(span)

    def first_blocks(self, *, is_waited_for: bool) -> Iterator[pa.Table]:  # noqa: ARG002
        """Yield nothing: `blocks` yields them all."""
        return iter(())

    def blocks(self) -> Iterator[pa.Table]:
        """Yield the blocks in arrival order."""
        return self._source.read_blocks(self._plan)
