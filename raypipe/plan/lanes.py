"""Lanes: which lane reads which span, and in which order a lane emits its frames.

The emission order of a lane is a closed form: a binary search finds any position, and nothing is replayed.
Time is a *key axis* with span k of K at k. P spans are live at once:

::

    span                                               P = 4, K = 9
    0    [-----------)
    1    [--------------)
    2    [-----------------)
    3    [--------------------)
    4             [-----------)                        lo = k + 1 - ceil(P / 2), but 0 for the first P
    5                [------------------)              hi = k + 1 + P // 2,      but K for the last P
    6                   [---------------)
    7                      [------------)
    8                         [---------)
         0  1  2  3  4  5  6  7  8  9                  lo and hi never fall: first in, first out

The n frames of a span lie evenly over its life, each jittered inside its own n-th part, so their keys ascend strictly:

::

    lo  |--x----|------x|-x-----|---x---|  hi          key(j) = lo + j * step + jitter(j) < lo + (j + 1) * step

A lane emits in the order of keys; equal keys of two spans go by k. Everything is an integer: a float could reach `hi`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heapreplace
from typing import Final

import numpy as np

from raypipe.errors import ResumeError
from raypipe.plan.keyhash import GOLDEN, Hashes, Ints, OrderKeys, mix
from raypipe.plan.rates import ragged_arange
from raypipe.plan.spans import Spans, order_frames
from raypipe.plan.spec import Leg
from raypipe.text import counted

FRACTION_BITS: Final = 24
"""Bits of the key axis between two spans: a span of up to 2**24 frames has a key for each even if it lives for 1."""

_FRAMES_TO_SORT: Final = 1 << 12
"""For at most this many frames, one sort is faster than the rest of the binary search."""

_TICKS_AT_ONCE: Final = 8
"""Parts in which a search for a tick cuts what is left: NumPy counts for 8 ticks in hardly more time than for one."""

_COUNTS_AT_ONCE: Final = 1 << 20
"""Bounds the memory of `tick_positions` to some 100 MB."""

_JITTER_SHIFT: Final = np.uint64(64 - FRACTION_BITS + 1)


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

    live_spans: int

    def rows_of(self, lane: int) -> Ints:
        """Return the rows of `spans` that one lane owns, in the order of its queue."""
        return self.rows[self.offsets[lane] : self.offsets[lane + 1]]

    def lane(self, lane: int) -> "Lane":
        """Return the queue of one lane with the lives of its spans."""
        return Lane(spans=self.spans.take(self.rows_of(lane)), live_spans=self.live_spans)


def fill_lanes(spans: Spans, leg: Leg, keys: OrderKeys) -> LaneQueues:
    """Return `spans` shared out, with `shuffle` each to the emptiest lane, else in contiguous runs of file order.

    Totals differ by at most one frame, the lowest lanes have the extra ones, and fewer spans than lanes are cut. A lane
    is empty only if there are fewer frames than lanes.

    Raises:
        ResumeError: the leg has consumed more frames than it has.
    """
    num_lanes = leg.lanes
    share, extras = divmod(int(spans.count.sum()), num_lanes)
    if leg.frames_per_lane > share:
        raise ResumeError(
            f"the saved leg {leg} has emitted {counted(leg.frames_per_lane, 'frame')} per lane, but this plan has "
            f"{share} for it: the state belongs to another set of frames"
        )
    frames = np.full(num_lanes, share) + (np.arange(num_lanes) < extras)
    parent, lane, count = (_fill_emptiest if keys.shuffle else _fill_runs)(spans.count, frames)
    pieces = _cut_pieces(spans, parent, count, keys)
    rows = np.argsort(lane, kind="stable")
    offsets = np.searchsorted(lane[rows], np.arange(num_lanes + 1))
    live_spans = leg.live_spans if keys.shuffle else 1
    return LaneQueues(spans=pieces, rows=rows, offsets=offsets, frames=frames, live_spans=live_spans)


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
    cuts = np.unique(parent[1:][follows])
    frames, offsets = order_frames(spans.take(cuts), keys)
    for cut, left in zip(cuts.tolist(), np.split(frames, offsets[1:-1]), strict=True):
        rows = np.flatnonzero(parent == cut)
        borders = np.sort(left)[np.cumsum(count[rows])[:-1]]
        start[rows[1:]], stop[rows[:-1]] = borders, borders
    return replace(pieces, start=start, stop=stop, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The frames between two positions of a lane, in emission order."""

    places: Ints
    """The queue positions of the spans that the frames are of, ascending."""

    begin: Ints
    """How many frames of each of these spans come before the run."""

    taken: Ints
    """How many frames of each are in the run; never 0."""

    order: Ints
    """Emission order as positions in the run's frames listed span by span."""

    @property
    def owner(self) -> Ints:
        """The position in `places` of the span of every emitted frame."""
        return np.repeat(np.arange(len(self.places)), self.taken)[self.order]

    @property
    def span(self) -> Ints:
        """The queue position of the span of every emitted frame."""
        return self.places[self.owner]

    @property
    def nth(self) -> Ints:
        """The position of every emitted frame in its span's emission order."""
        return ragged_arange(self.begin, self.taken)[self.order]


@dataclass(frozen=True, kw_only=True)
class Lane:
    """The queue of one lane with the lives of its spans."""

    spans: Spans
    live_spans: int

    @cached_property
    def ends(self) -> Ints:
        """``ends[k]``: frames of the first k spans."""
        return np.append(0, np.cumsum(self.spans.count))

    def __len__(self) -> int:
        return len(self.spans.count)

    @property
    def num_frames(self) -> int:
        """Frames that the lane emits."""
        return int(self.ends[-1])

    def lives(self, number: Ints) -> tuple[Ints, Ints]:
        """Return where on the key axis the spans at these queue positions are admitted and retired."""
        length, window = len(self), self._window
        lo = np.where(number < window, 0, number + 1 - (window + 1) // 2)
        hi = np.where(number >= length - window, length, number + 1 + window // 2)
        return lo, hi

    def live_at(self, tick: Ints) -> tuple[Ints, Ints]:
        """Return the spans [first, stop) that are live over ``[tick, tick + 1)`` of the key axis, for ticks below K."""
        length, window = len(self), self._window
        first = np.minimum(np.maximum(tick - window // 2, 0), length - window)
        return first, np.minimum(np.maximum(tick + (window + 1) // 2, window), length)

    def counts(self, position: int) -> Ints:
        """Return how many frames of every span come before `position`, by binary search on the key axis."""
        if position >= self.num_frames:
            return self.spans.count
        counts = np.zeros(len(self), dtype=np.int64)
        if position <= 0:
            return counts
        first, stop, low, high = 0, len(self), 0, len(self) << FRACTION_BITS
        if self.num_frames > _FRAMES_TO_SORT:
            tick = self._find_tick(position)
            first, stop = (int(one[0]) for one in self.live_at(np.array([tick])))
            low, high = tick << FRACTION_BITS, (tick + 1) << FRACTION_BITS
        live, wanted = self._live(np.arange(first, stop)), position - int(self.ends[first])
        below, above = live.count_before(low), live.count_before(high)
        while high - low > 1 and (above - below).sum() > _FRAMES_TO_SORT:
            middle = (low + high) // 2
            found = live.count_before(middle)
            if found.sum() <= wanted:
                low, below = middle, found
            else:
                high, above = middle, found
        counts[:first], counts[first:stop] = self.spans.count[:first], live.count_to(wanted, below, above)
        return counts

    def between(self, begin: Ints, end: Ints) -> Run:
        """Return the frames between two counts of all spans, in emission order; costs one sort of them."""
        places = np.flatnonzero(end > begin)
        before, taken = begin[places], end[places] - begin[places]
        return Run(places=places, begin=before, taken=taken, order=self._live(places).order(before, taken))

    def estimate_positions(self, number: Ints, nth: Ints) -> Ints:
        """Return about how many frames come before the `nth` frame of the spans at these queue positions.

        They ascend in the order of emission. Exact positions would cost `live_spans` counts per span. The key axis has
        one unit per span, so about as many frames come before a tick as the first `tick` spans of the queue have.
        """
        live = self._live(number)
        key = _frame_keys(live.key, live.lo, live.step, nth)
        tick, fraction = key >> FRACTION_BITS, key & ((1 << FRACTION_BITS) - 1)
        return np.asarray((self.ends[tick] << FRACTION_BITS) + fraction * np.diff(self.ends)[tick])

    def tick_positions(self) -> Ints:
        """Return how many frames come before each of the ticks 0..K of the key axis; costs K * live_spans counts."""
        chunk = max(1, _COUNTS_AT_ONCE // self._window) if len(self) else 1
        parts = [
            self._count_before_ticks(np.arange(tick, min(len(self), tick + chunk)))
            for tick in range(0, len(self), chunk)
        ]
        return np.concatenate([*parts, self.ends[-1:]])

    def peak_live_frames(self) -> int:
        """Return the most frames that live spans hold together, counting every live span in full."""
        first, stop = self.live_at(np.arange(len(self)))
        return int((self.ends[stop] - self.ends[first]).max(initial=0))

    def _find_tick(self, position: int) -> int:
        # The number of frames before a tick lies between the frames of the spans done and those of the spans begun
        # there. This brackets the search to a few windows around the span that holds `position` in queue order.
        near = int(np.searchsorted(self.ends, position, side="right")) - 1
        low, high = max(0, near - self.live_spans), min(len(self), near + 2 * self.live_spans + 2)
        while high - low > 1:
            step = -(-(high - low) // _TICKS_AT_ONCE)
            ticks = np.arange(low, high, step)
            place = int(np.searchsorted(self._count_before_ticks(ticks[1:]), position, side="right"))
            low, high = int(ticks[place]), min(high, int(ticks[place]) + step)
        return low

    def _count_before_ticks(self, ticks: Ints) -> Ints:
        first, stop = self.live_at(ticks)
        live = self._live(ragged_arange(first, stop - first))
        counts = live.count_before(np.repeat(ticks, stop - first) << FRACTION_BITS)
        begins = np.cumsum(stop - first) - (stop - first)
        return np.asarray(self.ends[first] + np.add.reduceat(counts, begins))

    @property
    def _window(self) -> int:
        return min(self.live_spans, len(self))

    def _live(self, number: Ints) -> "_LiveSpans":
        lo, hi = self.lives(number)
        count = self.spans.count[number]
        return _LiveSpans(
            count=count, lo=lo << FRACTION_BITS, step=((hi - lo) << FRACTION_BITS) // count, key=self.spans.key[number]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LiveSpans:
    count: Ints
    lo: Ints
    step: Ints
    key: Hashes

    def order(self, begin: Ints, taken: Ints) -> Ints:
        """Return the emission order of `taken` frames of every span from the `begin`-th on, listed span by span."""
        owner = np.repeat(np.arange(len(taken)), taken)
        nth = ragged_arange(begin, taken)
        return _sorted_order(_frame_keys(self.key[owner], self.lo[owner], self.step[owner], nth))

    def count_before(self, key: int | Ints) -> Ints:
        """Return how many frames of every span have a smaller key: the parts of its life gone by, give or take one."""
        parts = np.minimum(np.maximum((key - self.lo) // self.step, 0), self.count)
        is_before = _frame_keys(self.key, self.lo, self.step, parts) < key
        return np.asarray(parts + (is_before & (parts < self.count)))

    def count_to(self, total: int, below: Ints, above: Ints) -> Ints:
        """Return the counts that make `total`, between the counts before a key and those before a later one."""
        first = self.order(below, above - below)[: total - int(below.sum())]
        owner = np.repeat(np.arange(len(below)), above - below)
        return below + np.bincount(owner[first], minlength=len(below))


def _frame_keys(span_key: Hashes, lo: Ints, step: Ints, nth: Ints) -> Ints:
    hashed = mix(span_key + nth.view(np.uint64) * np.uint64(GOLDEN)) >> _JITTER_SHIFT
    # Half of the jitter comes from the frame, half is a phase of the span: together below 2**FRACTION_BITS.
    hashed += span_key >> _JITTER_SHIFT
    jitter = hashed.view(np.int64)
    # (jitter * step) >> FRACTION_BITS in two parts: in one, it overflows beyond 2**14 live spans of one frame.
    whole, fraction = step >> FRACTION_BITS, step & ((1 << FRACTION_BITS) - 1)
    return np.asarray(lo + nth * step + jitter * whole + ((jitter * fraction) >> FRACTION_BITS))


def _sorted_order(keys: Ints) -> Ints:
    # One sort of ``key | position`` is several times faster than an argsort, and also breaks ties by position.
    if not len(keys):
        return np.empty(0, dtype=np.int64)
    low = int(keys.min())
    bits = (len(keys) - 1).bit_length()
    if (int(keys.max()) - low).bit_length() + bits > 63:
        return np.argsort(keys, kind="stable")
    packed = (keys - low) << bits
    packed |= np.arange(len(keys))
    packed.sort()
    packed &= (1 << bits) - 1
    return packed
