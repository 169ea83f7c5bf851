"""Spans as columns: cutting episodes into spans, ordering them, and the frames of a span in emission order.

Decides the global order of spans and, inside a span, of its frames. A span that an earlier leg consumed in part is the
same span with a *floor*: the frames with an order key below it are gone.

::

    span of 8 frames        0   1   2   3   4   5   6   7
    order keys             61  12  94  35  80  07  52  23      emission: 5 1 7 3 6 0 4 2
    3 consumed, floor 35    x       x   x   x       x           left, in file order: 0 2 3 4 6
    cut at frame 4          x       x   x | x       x           the floor holds in both pieces
"""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from raypipe.plan.index import EpisodeIndex
from raypipe.plan.keyhash import Hashes, Ints, OrderKeys
from raypipe.plan.rates import count_taken, list_taken, ragged_arange
from raypipe.plan.shares import AnchorRuns, anchor_runs, interleave
from raypipe.plan.spec import WHOLE_EPISODE, OrderSpec

_HASH_BITS: Final = 32

_JITTER_BITS: Final = 24
"""The jitter takes the low bits of a span's key: the high bits order a lap and would jitter all datasets alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Spans in an order, as columns of equal length."""

    row: Ints
    """The run of the index that the span belongs to."""

    dataset: np.typing.NDArray[np.int32]

    lap: Ints
    """The pass over its dataset that the span belongs to: the epoch, except in a mixture or with rates."""

    episode: Ints
    start: Ints
    stop: Ints

    key: Hashes
    """The span's hash. A piece of a cut span inherits its hash, and so its place in the order."""

    floor: Hashes
    """Frames with an order key below this were consumed in an earlier leg; 0 for a whole span."""

    count: Ints
    """Frames left: those of [start, stop) that the lap has, at or above the floor. Never 0."""

    def __len__(self) -> int:
        return len(self.episode)

    def take(self, rows: Ints | slice) -> "Spans":
        """Return the given rows, in that order."""
        return Spans(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def cut_spans(index: EpisodeIndex, spec: OrderSpec, keys: OrderKeys) -> Spans:
    """Return the spans of a whole epoch, in the order in which they are read.

    Within a dataset, and within a lap of one, a span's place depends only on its own hash: leaving an episode out does
    not change the order of the others. The datasets of a mixture are interleaved evenly.
    """
    runs = _cut_runs(anchor_runs(index, keys), spec)
    dataset, episode = index.dataset[runs.row], index.episode[runs.row]
    count = runs.stop - runs.start
    if keys.rates is not None:
        count = count_taken(keys.rates, keys, runs.row, runs.lap, runs.start, runs.stop)
    spans = Spans(
        row=runs.row,
        dataset=dataset,
        lap=runs.lap,
        episode=episode,
        start=runs.start,
        stop=runs.stop,
        key=keys.span_keys(dataset, runs.lap, episode, runs.start),
        floor=np.zeros(len(dataset), dtype=np.uint64),
        count=count,
    )
    if keys.rates is not None:
        spans = spans.take(np.flatnonzero(count))
    if not spec.shuffle:
        return spans
    if index.shares is None:
        return spans.take(np.argsort(spans.key, kind="stable"))
    spans = spans.take(np.lexsort((spans.key, spans.lap, spans.dataset)))
    return spans.take(_interleave(spans, np.array(index.shares.frames)))


def order_frames(spans: Spans, keys: OrderKeys) -> tuple[Ints, Ints]:
    """Return the frames left of each span in emission order, one span after the other, and where each span begins.

    Span i owns ``frames[offsets[i] : offsets[i + 1]]``. Costs one sort of all frames of the spans, also consumed ones.
    """
    if keys.rates is None:
        length = spans.stop - spans.start
        owner, frame = np.repeat(np.arange(len(spans)), length), ragged_arange(spans.start, length)
    else:
        owner, frame = list_taken(keys.rates, keys, spans.row, spans.lap, spans.start, spans.stop)
    clip_frames = keys.clip_sizes(spans.dataset)
    order_key = keys.frame_keys(
        keys.frame_bases(spans.dataset, spans.lap, spans.episode)[owner],
        frame,
        None if clip_frames is None else clip_frames[owner],
    )
    if spans.floor.any():
        left = order_key >= spans.floor[owner]
        owner, frame, order_key = owner[left], frame[left], order_key[left]
    assert len(frame) == spans.count.sum(), f"{len(frame)} frames lie above the floors, not {spans.count.sum()}"
    if keys.clip_frames:
        frame = frame[np.lexsort((order_key, owner))]
    elif keys.shuffle:
        frame = _sort_within(owner, frame - spans.start[owner], order_key) + spans.start[owner]
    return frame, np.append(0, np.cumsum(spans.count))


def frames_left(spans: Spans, row: int, keys: OrderKeys) -> Ints:
    """Return the frames left of one span in file order."""
    return np.sort(order_frames(spans.take(slice(row, row + 1)), keys)[0])


def _cut_runs(runs: AnchorRuns, spec: OrderSpec) -> AnchorRuns:
    if spec.span_frames == WHOLE_EPISODE:
        return runs
    size = int(spec.span_frames)
    first, last = runs.start // size, (runs.stop - 1) // size
    run = np.repeat(np.arange(len(runs.row)), last - first + 1)
    cell = ragged_arange(first, last - first + 1)
    return AnchorRuns(
        row=runs.row[run],
        lap=runs.lap[run],
        start=np.maximum(runs.start[run], cell * size),
        stop=np.minimum(runs.stop[run], (cell + 1) * size),
    )


def _interleave(spans: Spans, share: Ints) -> Ints:
    """Return the interleaved order of spans that are listed dataset by dataset."""
    before = np.cumsum(spans.count) - spans.count
    place = before - (np.cumsum(share) - share)[spans.dataset]
    jitter = (spans.key & np.uint64((1 << _JITTER_BITS) - 1)).view(np.int64) * spans.count >> _JITTER_BITS
    return interleave(place, share[spans.dataset], jitter)


def _sort_within(owner: Ints, offset: Ints, order_key: Hashes) -> Ints:
    # One sort of packed integers (owner | hash | offset) is several times faster than a lexsort. Order keys tie only in
    # their hash half, and then the lower offset comes first in both branches.
    offset_bits = int(offset.max(initial=0)).bit_length()
    if int(owner.max(initial=0)).bit_length() + _HASH_BITS + offset_bits > 64:
        return offset[np.lexsort((order_key, owner))]
    packed = owner.astype(np.uint64) << np.uint64(_HASH_BITS)
    packed |= order_key >> np.uint64(_HASH_BITS)
    packed <<= np.uint64(offset_bits)
    packed |= offset.view(np.uint64)
    packed.sort()
    packed &= np.uint64((1 << offset_bits) - 1)
    return packed.view(np.int64)
