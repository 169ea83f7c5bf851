"""Run one pass over the rest of an epoch on a rank: the threads that turn its blocks into batches.

::

    feed -> receiver -> rows at hand -+
                                      +-> assembler -> queue -> next(run)
    plan -> clips, decoded ahead -----+

The *receiver* pulls blocks of rows and checks that each is the next one of the plan. The *assembler* requests the clips
of the next batches, waits for the rows and clips of the very next batch, and builds it. ``next(run)`` raises an error
of either thread.
"""

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from raypipe.account import Handed
from raypipe.decode import ASSIGNED_CPUS, use_one_core
from raypipe.errors import DatasetError, RaypipeError
from raypipe.feed import (
    BadSpan,
    Interval,
    Live,
    Meter,
    PassPlace,
    SpanBlock,
    SpanRequest,
    open_block,
    span_request,
    split_wait,
)
from raypipe.loader.assembly import Assembler, Built, do_nothing
from raypipe.loader.at_hand import FileFetcher
from raypipe.loader.job import LoaderSpec, Stand
from raypipe.loader.transforms import wait_for
from raypipe.plan import Batch, RankPlan
from raypipe.text import counted

if TYPE_CHECKING:
    from raypipe.feed import FeederSource, LocalFeed, LocalSource, RayFeed


class _Closed(Exception):  # noqa: N818
    """Ends a thread of a run that was closed."""


_END: Any = object()

_QUEUED: Final = 1
"""Batches being assembled or waiting for the training loop. Later ones wait as clips, which batches can share."""

_LOOK_EVERY_S: Final = 0.2
"""How often a waiting thread checks whether the run was given up."""

_LEAST_AHEAD: Final = 8
"""Spans whose remote files we fetch before there is room for them."""


class EpochRun:
    """The batches of one rank for the rest of an epoch. Iterate it once."""

    def __init__(
        self,
        stand: Stand,
        source: "LocalSource | FeederSource",
        spec: LoaderSpec,
        meter: Meter,
        before: "EpochRun | None" = None,
    ) -> None:
        """Open what decodes; `start` starts the run.

        `before` is the run of the previous epoch, which has received all its blocks; the two share their room.
        """
        job, world = stand.job, stand.world
        self.num_steps = world.num_steps
        self.num_handed = 0
        self.epoch = world.plan.epoch
        self.place = PassPlace(0, 0)
        self._follow: Callable[[EpochRun], None] = do_nothing
        self._record: Callable[[Handed], None] = do_nothing
        self._context = job.context
        self._plan: RankPlan = world.rank(job.rank)
        self._spec = spec
        self._meter = meter
        num_threads = source.assigned_cpus() if spec.num_threads == ASSIGNED_CPUS else spec.num_threads
        self._executor = source.open_executor(job.context, num_threads, meter)
        self._fetcher = FileFetcher(job.context, self._plan)
        self._assembler = Assembler(job, world, replace(spec, num_threads=num_threads), self._executor)
        self._assembler.report_bad = source.meeting.report_bad
        if self._assembler.clips.is_decoding:
            self._executor.warm_up()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._arrived: dict[int, SpanBlock] = {}
        self._is_asked_out = threading.Event()
        """Set when the assembler has requested the clips of all batches. The next epoch may then request its own."""
        self._num_received = 0
        self._num_looked_at = 0
        """Spans whose remote files were requested."""
        self._is_received = False
        self._num_retired = 0
        self._is_closed = False
        self._is_given_up = False
        self._is_over = False
        # Not `queue.Queue`: Ctrl-C inside its Python code may leave it locked.
        self._batches: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One item per batch that the assembler may put into `_batches`. Empty until the previous epoch has ended,
        because its last two batches are still in memory."""
        self._threads: list[threading.Thread] = []
        self._before = before

    def start(self, feed: "LocalFeed | RayFeed") -> None:
        """Start the threads that turn the rank's blocks into batches."""
        self.place = feed.place
        self._fetcher.fetches_rows = not feed.is_remote
        jobs = (("receive", lambda: self._receive(feed)), ("assemble", self._assemble))
        for name, job in jobs:
            thread = threading.Thread(target=self._run_thread, args=(job,), name=f"raypipe-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def begin(self, record: Callable[[Handed], None], follow: "Callable[[EpochRun], None]") -> None:
        """Note that iteration of this run begins, and that the previous run has ended.

        Calls `record` with the contents of each batch before `__next__` returns it, and `follow` once, when the last
        block has arrived.
        """
        self._record = record
        for _ in range(_QUEUED):
            self._places.put(None)
        with self._lock:
            self._before = None
            self._changed.notify_all()
            self._follow = follow
            is_received = self._is_received
        if is_received:
            follow(self)

    def __iter__(self) -> "EpochRun":
        return self

    def __next__(self) -> dict[str, Any]:
        self._meter.ask()
        self._context.batch_buffers.is_asked = True
        item = self._batches.get()
        self._context.batch_buffers.is_asked = False
        self._places.put(None)
        if item is _END:
            self._batches.put(_END)
            raise StopIteration
        if isinstance(item, BaseException):
            self.close()
            raise item
        self.num_handed += 1
        self._meter.hand_over(len(item.handed.numbers))
        self._meter.add(emitted_frames=item.num_emitted, skipped_frames=item.handed.num_skipped)
        self._record(item.handed)
        wait_for(item.batch, item.ready)
        batch: dict[str, Any] = item.batch
        return batch

    def close(self) -> None:
        """End the threads. Safe to call twice, after the last batch, and in the middle of an epoch."""
        is_done = self.num_handed == self.num_steps
        if not is_done:
            # Take the lock itself: Ctrl-C inside the Python code of a condition may leave it locked.
            with self._lock:
                self._is_closed = True
                self._changed.notify_all()
            self._places.put(None)
        try:
            # Stop new work first: the threads may take as long as a fetch to end.
            self._fetcher.close()
            self._executor.close()
            self._join(is_done=is_done)
        finally:
            if not is_done:
                # End an iteration in another thread.
                self._drain()
                self._batches.put(_END)
            self._is_over = True
            self._is_asked_out.set()
            self._let_go()

    def _join(self, *, is_done: bool) -> None:
        for thread in self._threads:
            while thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=0.05)
                if not is_done and thread is self._threads[0]:
                    # Do not wait for the receiver: it may be in a call of Ray that returns only with the next block.
                    break

    def _let_go(self) -> None:
        # Again, for work that the assembler began after the first close.
        self._executor.close()
        self._fetcher.close()
        assembling = self._threads[-1] if self._threads else threading.current_thread()
        if assembling is threading.current_thread() or not assembling.is_alive():
            self._assembler.close()
        # A reference to a closed run must not keep much in memory.
        self._arrived = {}
        self._before = None
        self._follow = self._record = do_nothing

    def give_up(self) -> None:
        """Tell the threads to end, without waiting for them.

        Takes no lock: when the loader is collected, Python may call this between any two lines of any thread.
        """
        self._is_given_up = self._is_closed = True
        self._places.put(None)

    @property
    def bad_spans(self) -> list[BadSpan]:
        """The spans left out so far, under ``on_bad_episode="skip"``."""
        return list(self._assembler.bad_spans)

    def describe(self) -> str:
        """Return the speed, or until the first batch the progress towards it, in words."""
        if self.num_handed:
            recent = self._meter.read(Live()).recent
            return f"{recent.samples_per_s:,.0f} samples/s, waiting {recent.wait_share:.0%}"
        decoded = sum(decoder.counts().frames for decoder in self._context.made_decoders)
        return f"{counted(self._num_received, 'span')}, {counted(decoded, 'frame')} so far"

    def live(self) -> Live:
        """Return what the rank holds now, and what it has decoded so far."""
        counts, context = [decoder.counts() for decoder in self._context.made_decoders], self._context
        rows, clips = self._assembler.rows, self._assembler.clips.store
        held_bytes = clips.held_bytes
        return Live(
            live_spans=len(rows),
            waiting_spans=len(self._arrived),
            live_bytes=rows.num_bytes + held_bytes,
            held_bytes=held_bytes,
            in_flight_bytes=clips.in_flight_bytes,
            peak_clip_bytes=clips.peak_bytes,
            decode_s=sum(count.seconds for count in counts),
            decoded_frames=sum(count.frames for count in counts),
            kept_frames=sum(count.kept_frames for count in counts),
            # Who makes the decoders makes the pool, too.
            decoder_opens=context.videos.misses if counts else 0,
            decoder_reuses=context.videos.hits if counts else 0,
        )

    def _drain(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._batches.get_nowait()

    def _run_thread(self, job: Callable[[], None]) -> None:
        try:
            job()
        except _Closed:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            # If `close` did not wait for this thread, the thread itself releases the resources.
            if (self._is_given_up or self._is_over) and threading.current_thread() is self._threads[-1]:
                self._let_go()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._drain()
        self._batches.put(error)

    def _receive(self, feed: "LocalFeed | RayFeed") -> None:
        num_spans = 0
        for tables in feed.streams(is_waited_for=self._before is None):
            self._look_ahead(feed.resident_spans)
            num_spans = self._take_blocks(feed, tables)
        if num_spans != len(self._plan.queue):
            raise RaypipeError(
                f"rank {self._plan.rank} received {num_spans} of {counted(len(self._plan.queue), 'span')} and the feed "
                f"ended; this is a fault of raypipe or of Ray's split, not of the data"
            )
        with self._lock:
            if self._is_closed:
                raise _Closed
            self._is_received, follow = True, self._follow
        follow(self)

    def _take_blocks(self, feed: "LocalFeed | RayFeed", tables: Iterator[pa.Table]) -> int:
        """Take in blocks from the first on, skipping spans already received; return how many spans came."""
        arrival = 0
        for table in tables:
            if self._is_closed:
                raise _Closed
            self._meter.add(received_blocks=1, received_bytes=table.nbytes)
            for block in open_block(self._context, table):
                self._check_identity(block.request, arrival)
                self._meter.add(task_requests=block.num_requests if feed.is_remote else 0)
                if arrival == self._num_received:
                    self._wait_for_room(feed.resident_spans)
                    with self._changed:
                        self._arrived[arrival] = block
                        self._num_received += 1
                        self._changed.notify_all()
                arrival += 1
            self._look_ahead(feed.resident_spans)
        return arrival

    def _look_ahead(self, resident_spans: int) -> None:
        """Fetch the remote files of the next spans."""
        # Count the room, not the blocks received: at the start the first batch waits for these files, and Ray takes a
        # while to send the first block.
        room = max(self._num_received, self._num_retired + resident_spans)
        stop = min(len(self._plan.queue), room + max(_LEAST_AHEAD, resident_spans // 4))
        self._fetcher.look_ahead(range(self._num_looked_at, stop))
        self._num_looked_at = max(self._num_looked_at, stop)

    def _check_identity(self, request: SpanRequest, i: int) -> None:
        """Raise if Ray sent a block that the plan does not expect here: everything after it would be wrong."""
        planned = span_request(self._plan, i).identity if i < len(self._plan.queue) else ()
        if request.identity != planned:
            raise RaypipeError(
                f"rank {self._plan.rank} expected as block {i} the span (epoch, dataset, lap, episode, start, stop, "
                f"lane, place, rows) = {planned}, and {request.identity} came. Ray's split has routed blocks "
                f"differently from its rule; this version of Ray may have changed it."
            )

    def _wait_for_room(self, resident_spans: int) -> None:
        with self._changed:
            while self._num_resident() >= resident_spans and not self._is_closed:
                # The previous run does not notify this one when it releases a span, so poll more often.
                self._changed.wait(timeout=0.05 if self._before else _LOOK_EVERY_S)
            if self._is_closed:
                raise _Closed

    def _num_resident(self) -> int:
        """Return how many spans the rank holds, including those of the ending epoch."""
        before = self._before
        if before is not None and before._is_over:
            before = self._before = None
        return self._num_received - self._num_retired + (before._num_resident() if before else 0)

    def _assemble(self) -> None:
        use_one_core()
        assembler, num_admitted = self._assembler, 0
        before = self._before
        # The previous epoch has the room for clips until it has requested all of its own.
        while before is not None and not before._is_asked_out.wait(timeout=_LOOK_EVERY_S) and not self._is_closed:
            pass
        del before
        num_left = self.num_steps
        for batch in assembler.clips.ahead(self._plan.batches(), self._spec.prefetch_batches):
            num_left -= 1
            if num_left <= self._spec.prefetch_batches:
                self._is_asked_out.set()
            while num_admitted < batch.num_needed:
                self._admit(num_admitted)
                num_admitted += 1
            assembler.clips.ask(batch, is_next=True)
            self._wait_for_clips(batch)
            self._wait_for_place()
            self._batches.put(self._build(batch))
            with self._changed:
                self._num_retired += len(batch.done)
                self._changed.notify_all()
        self._is_asked_out.set()
        self._batches.put(_END)

    def _admit(self, arrival: int) -> None:
        started = time.perf_counter()
        with self._changed:
            while arrival not in self._arrived and not self._is_closed:
                self._changed.wait(timeout=_LOOK_EVERY_S)
            if self._is_closed:
                raise _Closed
            block = self._arrived.pop(arrival)
        self._meter.note(split_wait("read", started, time.perf_counter(), _as_counter(block.finished_at)))
        try:
            block.check()
        except DatasetError as error:
            self._assembler.leave_out(arrival, error)
            return
        self._assembler.rows.admit(arrival, block)

    def _wait_for_clips(self, batch: Batch) -> None:
        clips = self._assembler.clips
        keys, started = clips.wanted(batch), time.perf_counter()
        errors = clips.store.wait(keys)
        done = _as_counter(self._executor.finished_at)
        self._meter.note(split_wait("decode", started, time.perf_counter(), done))
        for key, error in errors.items():
            self._assembler.leave_out_clip(key, error)

    def _build(self, batch: Batch) -> Built:
        started = time.perf_counter()
        built = self._assembler.build(batch)
        self._assembler.retire(batch.done.tolist())
        self._meter.note([Interval("assembly", started, time.perf_counter())])
        return built

    def _wait_for_place(self) -> None:
        """Wait until the training loop has taken the previous batch."""
        has_place = False
        while not has_place and not self._is_closed:
            with suppress(queue.Empty):
                self._places.get(timeout=_LOOK_EVERY_S)
                has_place = True
        if self._is_closed:
            raise _Closed


def _as_counter(at: float) -> float:
    """Return seconds since 1970, by any machine's clock, as a value of `time.perf_counter`; infinity for 0."""
    return time.perf_counter() - (time.time() - at) if at else math.inf


def start_run(
    stand: Stand,
    source: "LocalSource | FeederSource",
    spec: LoaderSpec,
    meter: Meter,
    place: PassPlace | None,
    before: EpochRun | None = None,
) -> EpochRun:
    """Return the run of a pass that begins at `stand`. Waits for the other ranks."""
    run = EpochRun(stand, source, spec, meter, before)
    try:
        run.start(source.open(stand.world, stand.job.rank, place))
    except BaseException:
        run.close()
        raise
    return run


class Ahead:
    """The run of the next epoch, which a thread starts. When Python collects this object, the run is given up."""

    def __init__(self, stand: Stand, begin: Callable[[], EpochRun]) -> None:
        self.stand = stand
        """Where its pass begins."""
        self._start = _Start(begin)
        self._giving_up = weakref.finalize(self, self._start.give_up)
        self._giving_up.atexit = False

    def wait(self) -> EpochRun:
        """Return the run when it is ready. It still ends with this object, until you call `release`."""
        started = self._start.wait()
        if isinstance(started, BaseException):
            raise started
        return started

    def release(self) -> None:
        """Hand the run over to the caller of `wait`: it no longer ends with this object."""
        self._giving_up.detach()

    def discard(self) -> None:
        """Close the run when it is ready, and ignore an error in starting it."""
        started = self._start.wait()
        if isinstance(started, EpochRun):
            started.close()


class _Start:
    def __init__(self, begin: Callable[[], EpochRun]) -> None:
        self._result: EpochRun | BaseException | None = None
        self._is_given_up = False
        self._thread = threading.Thread(target=self._work, args=(begin,), name="raypipe-next-epoch", daemon=True)
        self._thread.start()

    def wait(self) -> EpochRun | BaseException:
        self._thread.join()
        assert self._result is not None
        return self._result

    def give_up(self) -> None:
        # Python may call this between any two lines of any thread, so it must not wait or take a lock.
        self._is_given_up = True
        if isinstance(self._result, EpochRun):
            self._result.give_up()

    def _work(self, begin: Callable[[], EpochRun]) -> None:
        try:
            self._result = begin()
        except BaseException as error:
            self._result = error
        if self._is_given_up and isinstance(self._result, EpochRun):
            self._result.close()
