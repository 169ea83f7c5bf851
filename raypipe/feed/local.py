"""The feed without Ray: a rank's own process reads and windows the rows of its spans.

The plan decides which spans a rank reads and in what order, so the batches equal those of the Ray feed bit for bit. As
there, the ranks share one `Meeting`. The processes that ``torchrun`` or Accelerate started reach it by a
`RemoteMeeting`: rank 0 serves it on its own port. A caller first proves that it knows the run's key, which travels
through torch's process group; only then does rank 0 unpickle anything. Every call opens a connection: a rank makes few
calls an epoch.
"""

import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, Final

import pyarrow as pa

from raypipe.decode import ClipExecutor, ThreadExecutor
from raypipe.errors import RaypipeError
from raypipe.feed.agreement import MEETING_CALLS, Meeting, MeetingProxy, PassPlace, begin_pass
from raypipe.feed.block_context import BlockContext
from raypipe.feed.blocks import has_error, read_block
from raypipe.feed.metrics import LoaderStats, Meter
from raypipe.feed.order import BY_SIZE, FeedSpec, feed_order, resident_spans, span_request
from raypipe.plan import RankPlan, WorldPlan

LOOPBACK: Final = "127.0.0.1"


class LocalSource:
    """The blocks of one rank, read in its own process. It has the methods of `raypipe.feed.feeder.FeederSource`."""

    meeting: Meeting | MeetingProxy
    """Where the ranks compare their places, count bad data and share their figures."""
    attempt: str
    """The name of this start of the ranks. Names sort by time of the start."""

    def __init__(self, context: BlockContext, meeting: Meeting | MeetingProxy, spec: FeedSpec, attempt: str) -> None:
        self._context = context
        self._spans_per_block = 1 if spec.spans_per_block == BY_SIZE else spec.spans_per_block
        self.meeting = meeting
        self.attempt = attempt

    def assigned_cpus(self) -> int:
        """Return the number of CPUs that the system lets this process use."""
        return len(os.sched_getaffinity(0))

    def open(self, world: WorldPlan, rank: int, place: PassPlace | None) -> "LocalFeed":
        """Return the blocks that the rest of a plan sends to one rank, once all ranks ask for the same."""
        place = begin_pass(self.meeting, world, rank, place)
        return LocalFeed(self._context, world, rank, self._spans_per_block, place)

    def open_executor(self, context: BlockContext, num_threads: int, meter: Meter) -> ClipExecutor:  # noqa: ARG002
        """Return an executor that decodes in threads of this process."""
        return ThreadExecutor(lambda: context.decoders, num_threads, context.frame_pool)

    def publish(self, name: str, rank: int, stats: LoaderStats) -> None:  # noqa: ARG002
        """Send the figures of a rank to the meeting."""
        self.meeting.tell(rank, stats)


def can_read_here(context: BlockContext) -> bool:
    """Return whether a rank can read rows itself: it decodes the videos, and all datasets are local."""
    return context.decode.where != "cluster" and all(dataset.meta.storage.is_local for dataset in context.datasets)


class LocalFeed:
    """The blocks that a rank reads in its own process: those that Ray would send, in the same order and packed alike.

    It has the methods of `raypipe.feed.feeder.RayFeed`, which reads the first rows by it while Ray starts, and switches
    to Ray's stream at any block.
    """

    is_remote = False
    """Whether other processes make the blocks. Those count their own requests to remote storage."""

    def __init__(
        self, context: BlockContext, world: WorldPlan, rank: int, spans_per_block: int, place: PassPlace
    ) -> None:
        self.place = place
        self.is_complete = False
        """Whether `blocks_with_room` has yielded all blocks of the pass."""
        self._context = context
        self._world = world
        self._plan = world.rank(rank)
        self._spans_per_block = spans_per_block
        # Made here, by the one thread that opens passes.
        self._lock = context.reading

    @cached_property
    def resident_spans(self) -> int:
        """How many spans the rank holds at once for its own batches, regardless of other ranks."""
        return room_for(self._world, self._plan, self._spans_per_block)

    @property
    def fits(self) -> bool:
        """Whether there is room for all spans of the pass."""
        return self.resident_spans >= len(self._plan.queue)

    def streams(self, *, is_waited_for: bool) -> Iterator[Iterator[pa.Table]]:  # noqa: ARG002
        """Yield the one stream of all blocks."""
        yield self.blocks()

    def blocks(self, most_spans: int | None = None) -> Iterator[pa.Table]:
        """Yield the blocks in arrival order, of the first `most_spans` spans."""
        num_spans, size = len(self._plan.queue), self._spans_per_block
        for first in range(0, num_spans, size):
            stop = min(first + size, num_spans)
            if most_spans is not None and stop > most_spans:
                return
            requests = [span_request(self._plan, arrival) for arrival in range(first, stop)]
            with self._lock:
                table = read_block(self._context, requests)
            yield table

    def blocks_with_room(self) -> Iterator[pa.Table]:
        """Yield blocks while there is room; stop before one with an error.

        The error may be bad data, or a file that only other nodes have: the task that reads the block finds out.
        """
        for table in self.blocks(self.resident_spans):
            if has_error(table):
                return
            yield table
        self.is_complete = self.fits


def room_for(world: WorldPlan, plan: RankPlan, spans_per_block: int) -> int:
    """Return how many spans a rank holds at once for its own batches, regardless of other ranks."""
    feed = feed_order([plan.queue.num_rows], spans_per_block=spans_per_block)
    return int(resident_spans(feed, [plan.lives()], world.steps)[0])


@dataclass(frozen=True)
class RemoteMeeting(MeetingProxy):
    """The `Meeting` of rank 0, for the other processes of a run."""

    address: tuple[str, int]
    key: bytes

    def tell(self, rank: int, stats: LoaderStats) -> None:
        """Store the figures of a rank; do nothing if rank 0 has ended first: they are only for people to read."""
        with suppress(RaypipeError):
            self.call("tell", rank, stats)

    def figures(self) -> dict[int, LoaderStats]:
        """Return the latest figures of each rank; none if rank 0 has ended."""
        with suppress(RaypipeError):
            answer: dict[int, LoaderStats] = self.call("figures")
            return answer
        return {}

    def call(self, name: str, *args: Any) -> Any:
        """Return the answer of the meeting to a call."""
        try:
            with Client(self.address) as connection:
                # At once; otherwise TCP waits for the previous answer, 40 ms a call.
                with socket.socket(fileno=os.dup(connection.fileno())) as end:
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                answer_challenge(connection, self.key)
                deliver_challenge(connection, self.key)
                connection.send((name, args))
                answer = connection.recv()
        except (OSError, EOFError, AuthenticationError) as error:
            raise RaypipeError(
                f"rank 0, where the ranks of this run meet ({self.address[0]}:{self.address[1]}), does not answer: "
                f"{type(error).__name__} {error}. If its process has ended, start the ranks again from the last state; "
                f"else this machine must be able to reach that port."
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def serve_meeting(meeting: Meeting, host: str) -> RemoteMeeting:
    """Return a proxy for a meeting that this process serves as long as the proxy lives; send copies to other ranks.

    They reach this machine by the name `host`.
    """
    key = os.urandom(32)
    # A machine may resolve its own name to an address that others cannot reach, so with others listen on all addresses.
    listener = Listener((LOOPBACK if host == LOOPBACK else "0.0.0.0", 0), backlog=512)
    port = listener.address[1]
    remote, is_over = RemoteMeeting((host, port), key), threading.Event()
    threading.Thread(target=_serve, args=(listener, meeting, key, is_over), name="raypipe-meeting", daemon=True).start()
    weakref.finalize(remote, _stop, is_over, port).atexit = False
    return remote


def _stop(is_over: threading.Event, port: int) -> None:
    is_over.set()
    # Connect once, to wake the thread that waits in `accept`.
    with suppress(OSError):
        socket.create_connection((LOOPBACK, port), timeout=1.0).close()


def _serve(listener: Listener, meeting: Meeting, key: bytes, is_over: threading.Event) -> None:
    with listener:
        while not is_over.is_set():
            try:
                caller = listener.accept()
            except OSError:
                # Perhaps no file descriptor is free.
                is_over.wait(0.1)
                continue
            # A thread per caller, so that a silent one does not block the others.
            threading.Thread(target=_answer, args=(caller, meeting, key), daemon=True).start()


def _answer(caller: "Connection[Any, Any]", meeting: Meeting, key: bytes) -> None:
    # Ignore callers that disconnect or do not know the key.
    with caller, suppress(OSError, EOFError, AuthenticationError):
        deliver_challenge(caller, key)
        answer_challenge(caller, key)
        name, args = caller.recv()
        try:
            answer = getattr(meeting, name)(*args) if name in MEETING_CALLS else RaypipeError(f"no call {name!r}")
        except RaypipeError as error:
            answer = error
        except Exception as error:
            answer = RaypipeError(f"where the ranks meet: {type(error).__name__}: {error}")
        caller.send(answer)
