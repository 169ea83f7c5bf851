"""The spans of an epoch: which frames it takes of every dataset, cut into spans, and their order.

**Laps.** A dataset of a mixture is an endless sequence of *laps*, each a permutation of all its anchor runs. An epoch
takes the next `frames` of it and cuts by frame number if the border falls inside a run. So shares are exact, and over
epochs every frame of a dataset is emitted equally often, give or take one. If an epoch takes more than a lap, a frame
comes twice in it; the lap tells the two apart.

::

    dataset of 10 frames, 7 an epoch

    lap          0                     1                     2
    sequence     [c   ][a ][b     ]    [b     ][c   ][a ]    [a ][b     ]...
    epoch        |-----0------|-------1------|------2-----|----3...

**Floors.** A span that an earlier leg consumed in part is the same span with a *floor*: the frames with an order key
below it are gone.

::

    span of 8 frames        0   1   2   3   4   5   6   7
    order keys             61  12  94  35  80  07  52  23      emission: 5 1 7 3 6 0 4 2
    3 consumed, floor 35    x       x   x   x       x           left, in file order: 0 2 3 4 6
    cut at frame 4          x       x   x | x       x           the floor holds in both pieces
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError
from raypipe.plan.index import DatasetShare, EpisodeIndex, Shares, concat_indexes, describe_selection
from raypipe.plan.keyhash import ColumnTable, Hashes, Ints, OrderKeys
from raypipe.plan.rates import count_taken, list_taken, ragged_arange
from raypipe.plan.spec import WHOLE_EPISODE, OrderSpec

UNVERSIONED: Final = "unversioned"
"""The revision of a dataset that has none."""

_HASH_BITS: Final = 32

_JITTER_BITS: Final = 24
"""The jitter takes the low bits of a span's key: the high bits order a lap and would jitter all datasets alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorRuns(ColumnTable):
    """Which frames of which episodes an epoch has, as columns."""

    row: Ints
    """The row of the index that the run belongs to."""

    dataset: NDArray[np.int32]

    lap: Ints
    """The pass over its dataset that the run belongs to: the epoch, except in a mixture or with rates."""

    episode: Ints
    start: Ints
    stop: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans(AnchorRuns):
    """Spans in an order."""

    key: Hashes
    """The span's hash. A piece of a cut span inherits its hash, and so its place in the order."""

    floor: Hashes
    """Frames with an order key below this were consumed in an earlier leg; 0 for a whole span."""

    count: Ints
    """Frames left: those of [start, stop) that the lap has, at or above the floor. Never 0."""


def split_frames(weights: Sequence[float], num_frames: int) -> tuple[int, ...]:
    """Return how many of `num_frames` each weight gets: its part, rounded so that the sum is exact.

    The largest remainders round up, the first of equal ones first, so every number is within one of its part.
    """
    if not weights or any(not weight >= 0 or weight == float("inf") for weight in weights) or not sum(weights):
        raise ConfigError(f"weights must be at least 0, finite, and not all 0, got {list(weights)}")
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    parts = [weight * num_frames / total for weight in exact]
    frames = [int(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: (frames[i] - parts[i], i))
    for i in by_remainder[: num_frames - sum(frames)]:
        frames[i] += 1
    return tuple(frames)


def mix_indexes(
    indexes: Sequence[EpisodeIndex], frames: Sequence[int], *, revisions: Sequence[str] = ()
) -> EpisodeIndex:
    """Return the index of a mixture; every epoch takes `frames` of each dataset.

    Without `revisions`, such as commits of the Hub, the datasets have none.

    Raises:
        ConfigError: names are equal, or a dataset would give nothing.
    """
    index = concat_indexes(indexes)
    for name, number in zip(index.dataset_names, frames, strict=True):
        if number < 1:
            raise ConfigError(
                f"dataset {name!r} would give {number} frames to an epoch of {sum(frames)}: raise its weight, take "
                f"more frames per epoch, or leave it out by a weight of 0"
            )
    fingerprints = tuple(one.fingerprint for one in indexes)
    digest = hashlib.sha256(repr(list(zip(index.dataset_names, fingerprints, strict=True))).encode())
    columns = zip(indexes, frames, revisions or (UNVERSIONED,) * len(indexes), strict=True)
    members = tuple(
        DatasetShare(
            name=one.dataset_names[0],
            fingerprint=one.fingerprint,
            selection=describe_selection(one).rsplit(" ", 1)[-1],
            size=one.num_frames,
            frames=int(number),
            position=0,
            revision=revision,
        )
        for one, number, revision in columns
    )
    return replace(index, fingerprint=digest.hexdigest()[:32], shares=Shares(since=0, members=members))


def make_keys(index: EpisodeIndex, spec: OrderSpec, epoch: int) -> OrderKeys:
    """Return the hashes of an epoch of the index."""
    return OrderKeys(
        seed=spec.seed,
        epoch=epoch,
        shuffle=spec.shuffle,
        dataset_names=index.dataset_names,
        clip_frames=spec.clip_sizes(len(index.dataset_names)),
        rates=index.rates,
    )


def anchor_runs(index: EpisodeIndex, keys: OrderKeys) -> AnchorRuns:
    """Return the runs of an epoch: for a mixture its part of every dataset's laps, else all runs of the index once.

    With rates, a run comes once for each part that may have frames of it.
    """
    if index.shares is None:
        return _list_runs(index, np.arange(len(index)), np.array([keys.epoch]))
    parts = []
    order = np.argsort(index.dataset, kind="stable")
    borders = np.searchsorted(index.dataset[order], np.arange(len(index.dataset_names) + 1))
    for number, begin in enumerate(index.shares.begins(keys.epoch)):
        rows = order[borders[number] : borders[number + 1]]
        parts.append(_take_laps(index, rows, begin, begin + index.shares.frames[number], keys))
    return AnchorRuns.concat(parts)


def run_frames(runs: AnchorRuns, keys: OrderKeys) -> tuple[Ints, Ints]:
    """Return the run of every frame and the frame itself, without the frames that the laps do not have."""
    if keys.rates is not None:
        return list_taken(keys.rates, keys, runs.row, runs.lap, runs.start, runs.stop)
    length = runs.stop - runs.start
    return np.repeat(np.arange(len(length)), length), ragged_arange(runs.start, length)


def _count_frames(runs: AnchorRuns, keys: OrderKeys) -> Ints:
    if keys.rates is None:
        return runs.stop - runs.start
    return count_taken(keys.rates, keys, runs.row, runs.lap, runs.start, runs.stop)


def _take_laps(index: EpisodeIndex, rows: Ints, begin: int, end: int, keys: OrderKeys) -> AnchorRuns:
    """Return the runs in ``[begin, end)`` of the endless sequence of a dataset, in its order."""
    size = int(lap_sizes(index)[index.dataset[rows[0]]])
    laps = np.arange(begin // size, -(-end // size))
    runs = _list_runs(index, rows, laps)
    if keys.shuffle:
        key = keys.span_keys(runs.dataset, runs.lap, runs.episode, runs.start, purpose="run")
        whole_lap = runs.lap if index.rates is None else runs.lap // index.rates.parts[runs.row]
        runs = runs.take(np.lexsort((key, whole_lap)))
    length = _count_frames(runs, keys)
    last = int(laps[0]) * size + np.cumsum(length)
    first = last - length
    skipped, cut = np.maximum(begin - first, 0), np.maximum(last - end, 0)
    kept = skipped + cut < length
    return _cut_ends(runs.take(kept), skipped[kept], cut[kept], keys)


def _list_runs(index: EpisodeIndex, rows: Ints, laps: Ints) -> AnchorRuns:
    """Return the runs of these laps over `rows`, lap by lap; with rates, each part of a lap is a lap of its own."""
    row, lap = np.tile(rows, len(laps)), np.repeat(laps, len(rows))
    if index.rates is not None:
        most = index.rates.most[row]
        part = ragged_arange(np.zeros(len(row), dtype=np.int64), most)
        row, lap = np.repeat(row, most), np.repeat(lap * index.rates.parts[row], most) + part
        order = np.argsort(lap, kind="stable")
        row, lap = row[order], lap[order]
    return AnchorRuns(
        row=row,
        dataset=index.dataset[row],
        lap=lap,
        episode=index.episode[row],
        start=index.start[row],
        stop=index.stop[row],
    )


def _cut_ends(runs: AnchorRuns, skipped: Ints, cut: Ints, keys: OrderKeys) -> AnchorRuns:
    """Return the runs without their first `skipped` and last `cut` frames: at the borders of an epoch."""
    if keys.rates is None:
        return replace(runs, start=runs.start + skipped, stop=runs.stop - cut)
    start, stop = runs.start.copy(), runs.stop.copy()
    for i in np.flatnonzero(skipped + cut).tolist():
        _, frames = run_frames(runs.take(slice(i, i + 1)), keys)
        start[i], stop[i] = frames[skipped[i]], frames[len(frames) - cut[i] - 1] + 1
    return replace(runs, start=start, stop=stop)


def lap_sizes(index: EpisodeIndex) -> NDArray[np.int64]:
    """Return the anchor frames of every dataset, by their rates: the length of its laps."""
    if index.rates is not None:
        return np.array(index.rates.sizes, dtype=np.int64)
    # Whole numbers below 2**53 are exact as floats.
    return np.bincount(index.dataset, index.stop - index.start, len(index.dataset_names)).astype(np.int64)


def first_laps(index: EpisodeIndex, epoch: int) -> NDArray[np.int64]:
    """Return for every dataset the lap in which the epoch begins; without shares and rates an epoch is a lap."""
    first = np.full(len(index.dataset_names), epoch)
    if index.shares is not None:
        first = np.array(index.shares.begins(epoch)) // lap_sizes(index)
    return first if index.rates is None else first * index.rates.laps


def cut_spans(index: EpisodeIndex, spec: OrderSpec, keys: OrderKeys) -> Spans:
    """Return the spans of a whole epoch, in the order in which they are read.

    Within a dataset, and within a lap of one, a span's place depends only on its own hash: leaving an episode out does
    not change the order of the others. The datasets of a mixture are interleaved evenly.
    """
    runs = _cut_runs(anchor_runs(index, keys), spec)
    count = _count_frames(runs, keys)
    spans = Spans(
        **AnchorRuns.columns_of(runs),
        key=keys.span_keys(runs.dataset, runs.lap, runs.episode, runs.start),
        floor=np.zeros(len(runs), dtype=np.uint64),
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
    owner, frame = run_frames(spans, keys)
    order_key = keys.frame_keys(spans.dataset, spans.lap, spans.episode, owner, frame)
    if spans.floor.any():
        left = order_key >= spans.floor[owner]
        owner, frame, order_key = owner[left], frame[left], order_key[left]
    assert len(frame) == spans.count.sum(), f"{len(frame)} frames lie above the floors, not {spans.count.sum()}"
    if keys.clip_frames:
        frame = frame[np.lexsort((order_key, owner))]
    elif keys.shuffle:
        frame = _sort_within(owner, frame - spans.start[owner], order_key) + spans.start[owner]
    return frame, np.append(0, np.cumsum(spans.count))


def _cut_runs(runs: AnchorRuns, spec: OrderSpec) -> AnchorRuns:
    if spec.span_frames == WHOLE_EPISODE:
        return runs
    size = int(spec.span_frames)
    first, last = runs.start // size, (runs.stop - 1) // size
    run = np.repeat(np.arange(len(runs)), last - first + 1)
    cell = ragged_arange(first, last - first + 1)
    runs = runs.take(run)
    return replace(runs, start=np.maximum(runs.start, cell * size), stop=np.minimum(runs.stop, (cell + 1) * size))


def _interleave(spans: Spans, share: Ints) -> Ints:
    """Return the order that spreads the spans of each dataset evenly over the epoch; `spans` come dataset by dataset.

    Each dataset's share of the epoch is stretched to the length of the whole epoch. There, the place of a span is one
    of its own frames, chosen by its hash. So the spans of a dataset keep their order. At every prefix, the frames of a
    dataset differ from its part by less than its longest span plus its part of the sum of all datasets' longest spans.
    """
    num_frames = share[spans.dataset]
    before = np.cumsum(spans.count) - spans.count
    place = before - (np.cumsum(share) - share)[spans.dataset]
    jitter = (spans.key & np.uint64((1 << _JITTER_BITS) - 1)).view(np.int64) * spans.count >> _JITTER_BITS
    # 2**62 holds the largest share times the steps of the common axis: with 2**40 frames these are 4 million.
    bits = 62 - int(num_frames.max(initial=1)).bit_length()
    return np.argsort(((place + jitter) << bits) // num_frames, kind="stable")


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
