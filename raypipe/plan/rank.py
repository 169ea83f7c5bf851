"""The steps of a leg, and one rank's part of them: its spans in arrival order, and its batches as index arrays.

**Steps.** Every lane gives the same number of frames to every step but the last, so one integer is the position of all
lanes. In the last step, lanes with an extra frame may give one more.

::

    4 lanes with 11 11 10 10 frames left, 4 a step

    tail="short"    4 4 4 4 | 4 4 4 4 | 3 3 2 2
    tail="drop"     4 4 4 4 | 4 4 4 4 |               the rest is left over
    tail="wrap"     4 4 4 4 | 4 4 4 4 | 4 4 4 4       of which 1 1 2 2 repeat the lane's last frames

    4 lanes with 9 9 8 8 left: after full batches only the extras would remain, so tail="short" splits the last one

    tail="short"    4 4 4 4 | 2 2 2 2 | 3 3 2 2

**Batches.** A block holds the frames of one span that are still to be emitted, in file order. Blocks arrive in the
order of the rank's queue, which merges its lanes. A batch gives the block and the row of every frame:

::

    batch     span   0   2   1   0   2   ...           which block, by arrival number
              row   17   3  40   5  11   ...           which row of it
              done  1                                  blocks that no later batch asks for
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.keyhash import ColumnTable, Ints, OrderKeys
from raypipe.plan.lanes import Lane, Run
from raypipe.plan.spans import AnchorRuns, order_frames
from raypipe.plan.spec import Tail

_FIRST_CHUNK_FRAMES: Final = 1 << 12
"""Small, so that the first batch does not wait for many others; every chunk is twice as large as the one before."""

_CHUNK_FRAMES: Final = 1 << 17
"""Large enough for the cost of a chunk to vanish, small enough for its columns to stay in the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The remaining steps of a leg; step 0 is the next one."""

    position: int
    """Frames that every lane has emitted before step 0."""

    per_lane: int
    num_full: int

    short: tuple[int, ...] = ()
    """Frames per lane of the steps after the full ones."""

    extras: int = 0
    """Lanes, from lane 0 on, that give one more frame to the last step."""

    num_repeats: int = 0
    """Repeats with which a lane without an extra frame fills up the last step."""

    @property
    def num_steps(self) -> int:
        """Steps left."""
        return self.num_full + len(self.short)

    def position_after(self, num_steps: int) -> int:
        """Return how many frames every lane without an extra has emitted after the next `num_steps` steps."""
        full = min(num_steps, self.num_full)
        return self.position + full * self.per_lane + sum(self.short[: num_steps - full])

    def starts(self) -> Ints:
        """Return the position at which every step starts."""
        return self.position + np.cumsum([0, *[self.per_lane] * self.num_full, *self.short])[: self.num_steps]

    def extra(self, lane: int, step: int) -> int:
        """Return how many extra frames (0 or 1) the lane gives to `step`."""
        return int(lane < self.extras and step == self.num_steps - 1)

    def repeats(self, lane: int, step: int) -> int:
        """Return how many repeats the lane gives to `step`."""
        return self.num_repeats - self.extra(lane, step) if self.num_repeats and step == self.num_steps - 1 else 0

    def after(self, lane: int, num_steps: int) -> int:
        """Return how many frames the lane has emitted after the next `num_steps` steps."""
        return self.position_after(num_steps) + (self.extra(lane, num_steps - 1) if num_steps else 0)

    def end(self, lane: int) -> int:
        """Return how many frames the lane has emitted after the last step."""
        return self.after(lane, self.num_steps)

    def send_start(self, share: int) -> int:
        """Return the position from which a rank needs frames: before `position` only if the last step repeats some.

        It is the same for every lane: lanes that sent different numbers of frames would upset Ray's split.
        """
        return min(self.position, max(0, share - self.num_repeats)) if self.num_repeats else self.position


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch of a rank as positions in blocks."""

    step: int
    span: Ints
    """(B,) arrival number of the block of every frame."""

    row: Ints
    """(B,) row of that block."""

    frame: Ints
    """(B,) frame number within the episode."""

    is_repeat: NDArray[np.bool_]
    """(B,) True for frames that ``tail="wrap"`` emits a second time."""

    num_needed: int
    """Blocks that must have arrived: all with a smaller arrival number."""

    done: Ints
    """Arrival numbers of blocks that no later batch asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChunk:
    """Consecutive batches of equal size, one per row of the (S, B) columns; see `Batch`."""

    step: int
    span: Ints
    row: Ints
    frame: Ints
    is_repeat: NDArray[np.bool_]
    num_needed: Ints
    done: Ints
    done_ends: Ints
    """Batch i is followed by ``done[done_ends[i] : done_ends[i + 1]]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLane:
    """A lane as its rank serves it: where sending starts, where emission starts, and where both end."""

    number: int
    lane: Lane
    sent: Ints
    """Frames of every span that are not sent, because they are already emitted."""

    emitted: Ints
    """Frames of every span that are emitted before step 0."""

    end: Ints
    """Frames of every span that are emitted by the end of the lane."""

    end_position: int

    def repeated(self, num_repeats: int) -> Run:
        """Return the last frames of the lane, as many of `num_repeats` as it has."""
        return self.lane.between(self.lane.counts(max(0, self.end_position - num_repeats)), self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanQueue(AnchorRuns):
    """The spans that a rank receives, in arrival order."""

    lane: NDArray[np.int32]
    place: Ints
    """Position in the lane's queue."""

    num_rows: Ints
    """Rows of the block: the frames of [start, stop) still to be emitted, and those kept for repeats. Never 0."""


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What one rank receives and emits."""

    rank: int
    lanes: tuple[RankLane, ...]
    steps: Steps
    keys: OrderKeys

    @cached_property
    def queue(self) -> SpanQueue:
        """The rank's spans in arrival order: its lanes merged by when a span is first needed."""
        queues = [_queue_lane(part) for part in self.lanes]
        need = np.concatenate([_first_need(part, queue.place) for part, queue in zip(self.lanes, queues, strict=True)])
        queue = SpanQueue.concat(queues)
        return queue.take(np.lexsort((queue.lane, queue.place, need)))

    def frames_of(self, arrival: int) -> Ints:
        """Return the frame numbers that the block of this arrival number holds, in file order: one per row."""
        return self.list_blocks(arrival, arrival + 1)[0]

    def list_blocks(self, first: int, stop: int) -> list[Ints]:
        """Return what `frames_of` does for the arrival numbers [first, stop), which costs less than one by one."""
        lane, place = self.queue.lane[first:stop], self.queue.place[first:stop]
        blocks = [np.empty(0, dtype=np.int64)] * len(lane)
        for part in self.lanes:
            mine = np.flatnonzero(lane == part.number)
            frames, offsets = order_frames(part.lane.spans.take(place[mine]), self.keys)
            begins, ends = (offsets[:-1] + counts[place[mine]] for counts in (part.sent, part.end))
            for at, begin, end in zip(mine.tolist(), begins.tolist(), ends.tolist(), strict=True):
                blocks[at] = np.sort(frames[begin:end])
        return blocks

    def lives(self) -> tuple[Ints, Ints]:
        """Return the positions at which every queued span is admitted and retired, in frames emitted per lane.

        Both ascend in a lane. A lane emits the span's frames at positions in [admitted, retired); with ``tail="wrap"``
        the span stays for the repeats. Costs some 100 ms per 10,000 spans.
        """
        admitted, retired = np.zeros(len(self.queue), dtype=np.int64), np.zeros(len(self.queue), dtype=np.int64)
        for part in self.lanes:
            mine = self.queue.lane == part.number
            lo, hi = part.lane.lives(self.queue.place[mine])
            positions = part.lane.tick_positions()
            leave = np.minimum(positions[hi], part.end_position)
            num_repeats = self.steps.repeats(part.number, self.steps.num_steps - 1)
            # Repeats come after the end, so the spans they use stay, and so do spans sent only to balance the lanes.
            stays = (leave > part.end_position - num_repeats) | (leave <= self.steps.position)
            leave[stays] = part.end_position + num_repeats
            admitted[mine], retired[mine] = np.maximum(positions[lo], self.steps.position), leave
        return admitted, retired

    def batches(self) -> Iterator[Batch]:
        """Return the rank's batches one by one."""
        for chunk in self.chunks():
            needed, ends = chunk.num_needed.tolist(), chunk.done_ends.tolist()
            for i in range(len(chunk.span)):
                yield Batch(
                    step=chunk.step + i,
                    span=chunk.span[i],
                    row=chunk.row[i],
                    frame=chunk.frame[i],
                    is_repeat=chunk.is_repeat[i],
                    num_needed=needed[i],
                    done=chunk.done[ends[i] : ends[i + 1]],
                )

    def chunks(self) -> Iterator[BatchChunk]:
        """Return the rank's batches, many at once, which costs less than one by one.

        Memory holds one chunk and the order of the live frames.
        """
        emitters = [_LaneEmitter(part, self._arrivals(part), self.keys) for part in self.lanes]
        left = _count_uses(emitters, self.steps, len(self.queue))
        num_needed = 0
        for first, stop in _chunk_steps(self.steps, len(self.lanes)):
            columns = _LaneColumns.concat([emitter.emit(self.steps, first, stop) for emitter in emitters], axis=1)
            needed = np.maximum.accumulate(columns.span.max(axis=1, initial=num_needed - 1)) + 1
            num_needed = int(needed[-1])
            done, done_ends = _find_done(columns.span, left, is_last=stop == self.steps.num_steps)
            yield BatchChunk(
                step=first,
                span=columns.span,
                row=columns.row,
                frame=columns.frame,
                is_repeat=columns.is_repeat,
                num_needed=needed,
                done=done,
                done_ends=done_ends,
            )

    def _arrivals(self, part: RankLane) -> Ints:
        """Return the arrival number of the span at each place of a lane's queue; -1 if it is not sent."""
        numbers = np.full(len(part.lane), -1)
        mine = np.flatnonzero(self.queue.lane == part.number)
        numbers[self.queue.place[mine]] = mine
        return numbers


def _queue_lane(part: RankLane) -> SpanQueue:
    num_rows = part.end - part.sent
    place = np.flatnonzero(num_rows)
    lane = np.full(len(place), part.number, dtype=np.int32)
    columns = {name: column[place] for name, column in AnchorRuns.columns_of(part.lane.spans).items()}
    return SpanQueue(lane=lane, place=place, num_rows=num_rows[place], **columns)


def _first_need(part: RankLane, place: Ints) -> Ints:
    # Ordered by the next frame, not by admission: all spans of the first window are admitted at once, and the first
    # batch should wait only for its own. A span sent only for repeats has no next frame; its last frame counts instead.
    return part.lane.estimate_positions(place, np.minimum(part.emitted, part.lane.spans.count - 1)[place])


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaneColumns(ColumnTable):
    """The frames of a lane in consecutive steps, (S, frames per step)."""

    span: Ints
    row: Ints
    frame: Ints
    is_repeat: NDArray[np.bool_]


class _LaneEmitter:
    """Walks a lane forward and computes the frame order of a span once, at its first frame."""

    def __init__(self, part: RankLane, arrivals: Ints, keys: OrderKeys) -> None:
        self.part = part
        self.arrivals = arrivals
        self._keys = keys
        self._emitted = part.emitted
        self._orders: dict[int, Ints] = {}
        spans = part.lane.spans
        self._is_partial = part.end - part.sent < spans.stop - spans.start

    def emit(self, steps: Steps, first: int, stop: int) -> _LaneColumns:
        """Return the frames of the steps [first, stop); pass a step with extras alone."""
        number, lane = self.part.number, self.part.lane
        end = lane.counts(steps.after(number, stop))
        emitted = self._gather(lane.between(self._emitted, end), stop - first)
        self._emitted = end
        self._orders = {at: order for at, order in self._orders.items() if end[at] < len(order)}
        num_repeats = steps.repeats(number, stop - 1)
        if not num_repeats:
            return emitted
        again = self._gather(self.part.repeated(num_repeats), 1)
        again = again.take((slice(None), np.arange(num_repeats) % again.span.shape[1]))
        again = replace(again, is_repeat=np.ones((1, num_repeats), dtype=np.bool_))
        return _LaneColumns.concat([emitted, again], axis=1)

    def _gather(self, run: Run, num_steps: int) -> _LaneColumns:
        frame, row = self._frames_and_rows(run)
        span = self.arrivals[run.span].reshape(num_steps, -1)
        return _LaneColumns(
            span=span,
            row=row[run.order].reshape(span.shape),
            frame=frame[run.order].reshape(span.shape),
            is_repeat=np.zeros(span.shape, dtype=np.bool_),
        )

    def _frames_and_rows(self, run: Run) -> tuple[Ints, Ints]:
        spans, places, ends = self.part.lane.spans, run.places.tolist(), np.cumsum(run.taken)
        new = np.array([place for place in places if place not in self._orders], dtype=np.int64)
        frames, offsets = order_frames(spans.take(new), self._keys)
        self._orders.update(zip(new.tolist(), np.split(frames, offsets[1:-1]), strict=False))
        pieces = [
            self._orders[place][begin:end]
            for place, begin, end in zip(places, run.begin.tolist(), (run.begin + run.taken).tolist(), strict=True)
        ]
        frame = np.concatenate([np.empty(0, dtype=np.int64), *pieces])
        row = frame - np.repeat(spans.start[run.places], run.taken)
        for i in np.flatnonzero(self._is_partial[run.places]).tolist():
            mine, sent = slice(ends[i] - run.taken[i], ends[i]), self.part.sent[places[i]]
            row[mine] = np.searchsorted(np.sort(self._orders[places[i]][sent : self.part.end[places[i]]]), frame[mine])
        return frame, row


def _chunk_steps(steps: Steps, num_lanes: int) -> Iterator[tuple[int, int]]:
    step, frames = 0, _FIRST_CHUNK_FRAMES
    while step < steps.num_full:
        stop = min(steps.num_full, step + max(1, frames // (steps.per_lane * num_lanes)))
        yield step, stop
        step, frames = stop, min(2 * frames, _CHUNK_FRAMES)
    for short in range(steps.num_full, steps.num_steps):
        yield short, short + 1


def _count_uses(emitters: Sequence[_LaneEmitter], steps: Steps, num_spans: int) -> Ints:
    """Return how many times frames of every span will be emitted, by arrival number."""
    uses = np.zeros(num_spans, dtype=np.int64)
    for emitter in emitters:
        part = emitter.part
        coming = part.end - part.emitted
        places = np.flatnonzero(coming)
        uses[emitter.arrivals[places]] = coming[places]
        num_repeats = steps.repeats(part.number, steps.num_steps - 1)
        if num_repeats:
            span = emitter.arrivals[part.repeated(num_repeats).span]
            np.add.at(uses, span[np.arange(num_repeats) % len(span)], 1)
    return uses


def _find_done(span: Ints, left: Ints, *, is_last: bool) -> tuple[Ints, Ints]:
    """Subtract a chunk's uses from `left`; return the blocks that are done, by step, and where each step's begin."""
    num_steps = len(span)
    low, high = int(span.min(initial=len(left))), int(span.max(initial=-1)) + 1
    used = np.bincount(span.ravel() - low, minlength=max(0, high - low))
    # Of several values assigned to one place, NumPy keeps the last: the last step that uses the span.
    last_step = np.full(max(0, high - low), -1)
    last_step[span.ravel() - low] = np.repeat(np.arange(num_steps), span.shape[1])
    left[low:high] -= used
    done = low + np.flatnonzero((left[low:high] == 0) & (used > 0))
    order = np.argsort(last_step[done - low], kind="stable")
    ends = np.searchsorted(last_step[done - low][order], np.arange(num_steps + 1))
    left[done] = -1
    done = done[order]
    if is_last:
        # Blocks that were sent only to balance the lanes leave with the last batch.
        done = np.concatenate([done, np.flatnonzero(left >= 0)])
        ends[-1] = len(done)
    return done, ends


def plan_steps(share: int, extras: int, *, position: int, per_lane: int, tail: Tail) -> Steps:
    """Return the steps from `position` on of lanes of `share` frames, the first `extras` of them with one more.

    A share of 0 (fewer frames than lanes, on a new leg near the end of an epoch) gives no step: the lanes cannot share
    those frames, so they are left over.
    """
    rest = share - position
    if tail == "drop" or not share or (not rest and (tail == "short" or not extras)):
        return Steps(position=position, per_lane=per_lane, num_full=rest // per_lane)
    if tail == "wrap":
        num_steps = -(-(rest + bool(extras)) // per_lane)
        last = rest - (num_steps - 1) * per_lane
        return Steps(
            position=position,
            per_lane=per_lane,
            num_full=num_steps - 1,
            short=(last,),
            extras=extras,
            num_repeats=per_lane - last,
        )
    num_full, last = divmod(rest - 1, per_lane)
    last += 1
    is_split = bool(extras) and last == per_lane > 1
    return Steps(
        position=position,
        per_lane=per_lane,
        num_full=num_full,
        short=(per_lane // 2, per_lane - per_lane // 2) if is_split else (last,),
        # A step of one frame has no room for an extra one.
        extras=extras if per_lane > 1 else 0,
    )
