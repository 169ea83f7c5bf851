"""Sharing the spans of a leg out over lanes, so that lanes differ by at most one frame.

Decides which lane reads which span, and cuts the spans that do not fit. Does not decide when a frame is emitted.
"""

from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

import numpy as np

from raypipe.plan.keyhash import Ints, OrderKeys
from raypipe.plan.spans import Spans, frames_left


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneQueues:
    """The spans of a leg, each with its lane.

    ::

        spans, in order     a    b    c    d    e    f    g1   g2
        lane                0    1    2    1    0    2    0    1      g was cut
        rows                0 4 6 | 1 3 7 | 2 5                       the queue of every lane, one after the other
    """

    spans: Spans
    rows: Ints
    offsets: Ints
    """Lane l owns ``rows[offsets[l] : offsets[l + 1]]``."""

    frames: Ints
    """Frames per lane; lanes with one more come first."""

    def lane(self, lane: int) -> Spans:
        """Return the queue of one lane."""
        return self.spans.take(self.rows[self.offsets[lane] : self.offsets[lane + 1]])


def fill_lanes(spans: Spans, num_lanes: int, keys: OrderKeys) -> LaneQueues:
    """Return `spans` shared out, with `shuffle` each to the emptiest lane, else in contiguous runs of file order.

    Totals differ by at most one frame, the lowest lanes have the extra ones, and fewer spans than lanes are cut. A lane
    is empty only if there are fewer frames than lanes.
    """
    share, extras = divmod(int(spans.count.sum()), num_lanes)
    frames = np.full(num_lanes, share) + (np.arange(num_lanes) < extras)
    parent, lane, count = (_fill_emptiest if keys.shuffle else _fill_runs)(spans.count, frames)
    pieces = _cut_pieces(spans, parent, count, keys)
    rows = np.argsort(lane, kind="stable")
    offsets = np.searchsorted(lane[rows], np.arange(num_lanes + 1))
    return LaneQueues(spans=pieces, rows=rows, offsets=offsets, frames=frames)


def _fill_emptiest(counts: Ints, frames: Ints) -> tuple[Ints, Ints, Ints]:
    # One integer per lane, ``lane - room * num_lanes``: the smallest is the lowest of the lanes with most room.
    num_lanes = len(frames)
    heap = [lane - int(room) * num_lanes for lane, room in enumerate(frames)]
    heapify(heap)
    # The emptiest lane has at least the mean room, so a span of at most the mean fits without a check.
    room_before = counts.sum() - (np.cumsum(counts) - counts)
    fits = counts * num_lanes <= room_before
    num_fit = len(counts) if fits.all() else int(np.argmin(fits))
    tops = [heapreplace(heap, heap[0] + scaled) for scaled in (counts[:num_fit] * num_lanes).tolist()]
    parent, lane, piece = _fill_and_cut(heap, counts[num_fit:])
    return (
        np.concatenate([np.arange(num_fit), parent + num_fit]),
        np.concatenate([np.array(tops, dtype=np.int64) % num_lanes, lane]),
        np.concatenate([counts[:num_fit], piece]),
    )


def _fill_and_cut(heap: list[int], counts: Ints) -> Ints:
    # A span that does not fit the emptiest lane fits nowhere: it fills that lane, and the rest goes on to the next.
    num_lanes = len(heap)
    pieces: list[tuple[int, int, int]] = []
    for parent, count in enumerate(counts.tolist()):
        rest = count
        while rest:
            top = heap[0]
            lane = top % num_lanes
            taken = min(rest, (lane - top) // num_lanes)
            assert taken, f"{rest} frames of span {parent} are left and every lane is full"
            heapreplace(heap, top + taken * num_lanes)
            pieces.append((parent, lane, taken))
            rest -= taken
    return np.array(pieces, dtype=np.int64).reshape(-1, 3).T


def _fill_runs(counts: Ints, frames: Ints) -> tuple[Ints, Ints, Ints]:
    span_ends, lane_ends = np.cumsum(counts), np.cumsum(frames)
    ends = np.union1d(span_ends, lane_ends[frames > 0])
    begins = np.append(0, ends[:-1])
    parent = np.searchsorted(span_ends, begins, side="right")
    lane = np.searchsorted(lane_ends, begins, side="right")
    return parent, lane, ends - begins


def _cut_pieces(spans: Spans, parent: Ints, count: Ints, keys: OrderKeys) -> Spans:
    if len(parent) == len(spans):
        return spans
    pieces = spans.take(parent)
    start, stop = pieces.start.copy(), pieces.stop.copy()
    follows = parent[1:] == parent[:-1]
    for cut in np.unique(parent[1:][follows]).tolist():
        rows = np.flatnonzero(parent == cut)
        left = frames_left(spans, cut, keys)
        borders = left[np.cumsum(count[rows])[:-1]]
        start[rows[1:]], stop[rows[:-1]] = borders, borders
    return replace(pieces, start=start, stop=stop, count=count)
