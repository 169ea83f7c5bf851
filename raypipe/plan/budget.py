"""From a memory budget to clip length, live spans and span length; and the decoded frames that a plan then holds.

The driver decides once, at the first start. The result goes into the state and is never derived again: a changed
dataset or camera size must not move the order of a run.

Decoding costs a rank more than anything else, and mixing gains more from many live spans than from short spans. So, for
every dataset: find the clip length that decodes cheapest, take the shortest that costs at most a tenth more, then as
many live spans as fit.

The order is known in advance, so `measure_held` counts the peak of decoded frames and does not estimate it:

::

    step            0    1    2    3    4    5    6
    clip of a       [ask ......... a7 ......... a6]        asked for some batches ahead of its first frame
    frame a7        |==============|                       held until it leaves; with windows, until its clip does
    frame a6        |=============================|
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError
from raypipe.plan.epoch import WorldPlan
from raypipe.plan.index import EpisodeIndex
from raypipe.plan.keyhash import Ints, mix
from raypipe.plan.spans import cut_spans, make_keys
from raypipe.plan.spec import WHOLE_EPISODE, WHOLE_SPAN, ClipLength, OrderSpec, SpanLength

DEFAULT_LIVE_BYTES: Final = 1 << 30

AHEAD_BATCHES: Final = 4
"""How many batches ahead a loader decodes clips by default."""

MOST_LIVE_SPANS: Final = 1024
"""More spans mix no better: a batch of 64 shares 4 episodes with one 10 steps later, as in a full shuffle."""

SHORTEST_SPAN: Final = 32
"""Shorter spans cost more blocks than they save memory: a block costs Ray 20 to 40 ms."""

RESIDENT_PER_LIVE: Final = 1.3
"""Rows that a rank holds per live row: Ray balances rows, not need, so a rank pulls ahead of its own window."""

LONG_GOP_FRAMES: Final = 16
LONG_GOP_COST: Final = 2.5
"""If keyframes are more than `LONG_GOP_FRAMES` apart and decoding costs more than `LONG_GOP_COST` times sequential
decoding, raypipe gives up live spans for clips long enough to cost that much."""

_ROW_SHARE: Final = 4
"""Rows may take a quarter of the budget, in addition to the frames."""

_NEAR_CHEAPEST: Final = 1.1
_SEEK_FRAMES: Final = 0.05
_SEEK_PIXELS: Final = 25_000
_MOST_SEEK_FRAMES: Final = 0.4
"""The cost of a jump to another place of a video, in frames: `_SEEK_FRAMES` plus the time to decode `_SEEK_PIXELS`.
Measured: 0.13 for 640x480, 0.4 for 320x240. Without the limit, small frames, which decode cheaply, would get long clips
for little gain."""

_CLIPS_SAMPLED: Final = 64

_MOST_FRAMES: Final = 1 << 21
"""Frames of a rank to look at. The peak comes soon after the start, when all live spans begin."""

_CLIP_BITS: Final = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraCost:
    """What decides the cost of a camera's clips."""

    name: str
    keyframe_interval: int
    """Frames from one keyframe to the next; 1 for images."""

    frame_bytes: int
    offsets: tuple[int, ...] = (0,)
    """Frames that a sample shows, relative to its own."""

    num_pixels: int = 640 * 480
    """Pixels of a stored frame; 0 for images, which need no jumps."""

    def decoded_frames(self, clip_frames: int) -> float:
        """Return the mean number of frames that a decoder decodes for a sample; sequential decoding needs 1.

        A decoder begins at the keyframe before a frame and decodes on to the next frame that the clip needs.
        """
        interval, seek = self.keyframe_interval, 0.0
        if self.num_pixels:
            seek = min(_MOST_SEEK_FRAMES, _SEEK_FRAMES + _SEEK_PIXELS / self.num_pixels)
        num_starts = min(_CLIPS_SAMPLED, interval // math.gcd(interval, clip_frames))
        total = 0.0
        for number in range(num_starts):
            frames = self.shown_frames(number * clip_frames, clip_frames)
            gops, firsts = np.unique(frames // interval, return_index=True)
            lasts = np.append(firsts[1:], len(frames)) - 1
            total += float((frames[lasts] - gops * interval + 1).sum())
            total += seek * (1 + int((np.diff(frames) > 1).sum()))
        return total / (num_starts * clip_frames)

    def shown_frames(self, start: int, clip_frames: int) -> Ints:
        """Return the frames that a clip in the middle of an episode shows."""
        return np.unique(np.arange(start, start + clip_frames)[:, None] + np.asarray(self.offsets))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberCost:
    """What decides the memory and the cost of one dataset."""

    row_bytes: int
    """Bytes of a frame without its cameras, windows gathered, and with the images that its rows store."""

    cameras: tuple[CameraCost, ...] = ()

    @property
    def sample_bytes(self) -> int:
        """Bytes of the decoded frames that one sample shows."""
        return sum(camera.frame_bytes * len(set(camera.offsets)) for camera in self.cameras)

    def clip_bytes(self, clip_frames: int) -> int:
        """Return the bytes of the decoded frames of a clip."""
        return sum(camera.frame_bytes * len(camera.shown_frames(0, clip_frames)) for camera in self.cameras)

    def held_bytes(self, clip_frames: int) -> int:
        """Return the most bytes that a live span holds between two batches: those of a clip that has begun."""
        if clip_frames == 1:
            return 0
        has_windows = any(camera.offsets != (0,) for camera in self.cameras)
        return self.clip_bytes(clip_frames) - (0 if has_windows else self.sample_bytes)

    def cost(self, clip_frames: int) -> float:
        """Return the CPU of decoding in clips, relative to decoding every frame once in file order."""
        total = sum(camera.frame_bytes for camera in self.cameras)
        weighed = sum(camera.frame_bytes * camera.decoded_frames(clip_frames) for camera in self.cameras)
        return weighed / total if total else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBudget:
    """What a memory budget buys."""

    span_frames: SpanLength
    clip_frames: ClipLength
    live_spans: int
    cost: float
    """CPU of decoding, relative to decoding every frame once in file order; of the most expensive dataset."""

    clip_bytes: int
    """Bytes of the most decoded frames, at hand and ahead of need, that a rank of one lane holds."""

    live_bytes: int
    ample_bytes: int = 0
    """With a long GOP: the budget with which nothing has to be given up; else 0."""

    decoded_bytes: int = 0
    """Bytes of all frames of the videos, decoded: what it takes to keep them."""

    @property
    def is_long_gop(self) -> bool:
        """Whether keyframes are so far apart that live spans were given up for longer clips."""
        return self.ample_bytes > 0

    def describe_remedies(self, members: Sequence[MemberCost]) -> str:
        """Return what makes decoding as cheap as with this budget, with figures."""
        interval = max(camera.keyframe_interval for member in members for camera in member.cameras)
        remedy = f"live_bytes={self.clip_bytes:_} brings it to {self.cost:.1f}"
        if interval > LONG_GOP_FRAMES:
            remedy += (
                f", and `raypipe reshard ROOT TARGET --gop 2` to about 1, in any memory: the videos have a keyframe "
                f"every {interval} frames only"
            )
        return remedy


def clip_bound(live_bytes: int, batch_bytes: int) -> int:
    """Return how many bytes of clips a rank may hold and decode ahead, of the budget for all decoded frames.

    Four batches come off the budget: the one in training, the one that is ready, the next one, which is both clips and
    batch for a moment, and one for open decoders and rows. At least two batches of clips remain: else a rank could not
    decode ahead.
    """
    return max(2 * batch_bytes, live_bytes - 4 * batch_bytes)


def decoded_bytes(index: EpisodeIndex, members: Sequence[MemberCost]) -> int:
    """Return the size of all frames of all videos, decoded; images stored in rows are not counted."""
    num_frames = np.bincount(index.dataset, index.stop - index.start, minlength=len(members)).astype(np.int64)
    sizes = [sum(camera.frame_bytes for camera in member.cameras if camera.num_pixels) for member in members]
    return sum(int(frames) * size for frames, size in zip(num_frames, sizes, strict=True))


def resolve_live(
    index: EpisodeIndex,
    members: Sequence[MemberCost],
    *,
    batch: int,
    live_bytes: int = DEFAULT_LIVE_BYTES,
    live_spans: int | None = None,
    clip_frames: ClipLength | None = None,
    span_frames: SpanLength | None = None,
) -> LiveBudget:
    """Return clip length, live spans and span length for a budget; keeps those that the caller gives.

    Args:
        batch: frames that a step takes from a lane.
        live_bytes: memory of a rank for frames that are decoded and have not left.

    Raises:
        ConfigError: the frames of one batch do not fit.
    """
    _check_batch_fits(members, batch, live_bytes)
    span_frames, most_rows, num_spans = _choose_span(index, members, batch, live_bytes, live_spans, span_frames)
    wanted = min(live_spans or min(2 * batch, most_rows), num_spans)
    sizes, ample_bytes = zip(*(_choose_clip(member, batch, live_bytes, wanted) for member in members), strict=True)
    if clip_frames is None and any(member.cameras for member in members):
        clip_frames = sizes if len(set(sizes)) > 1 else sizes[0]
    clip_frames = WHOLE_SPAN if clip_frames is None else clip_frames
    if live_spans is None:
        live_spans = _choose_spans(members, clip_frames, batch, live_bytes, most_rows)
    pairs = list(zip(members, _as_lengths(clip_frames, len(members)), strict=True))
    return LiveBudget(
        span_frames=span_frames,
        clip_frames=clip_frames,
        live_spans=live_spans,
        cost=max(member.cost(length) for member, length in pairs),
        clip_bytes=max(_need(member, length, batch, min(live_spans, num_spans)) for member, length in pairs),
        live_bytes=live_bytes,
        ample_bytes=0 if clip_frames == WHOLE_SPAN else max(ample_bytes),
        decoded_bytes=decoded_bytes(index, members),
    )


def _choose_clip(member: MemberCost, batch: int, live_bytes: int, wanted: int) -> tuple[int, int]:
    """Return the clip length of a dataset that should have `wanted` live spans, and with a long GOP its ample bytes."""
    lengths = _clip_choices(member)
    cost = {length: member.cost(length) for length in lengths}
    fitting = [length for length in lengths if _need(member, length, batch, wanted) <= live_bytes] or [1]
    best = _shortest_cheap(fitting, cost)
    interval = max([1, *(camera.keyframe_interval for camera in member.cameras)])
    if cost[best] <= LONG_GOP_COST or interval <= LONG_GOP_FRAMES:
        return best, 0
    ample = _shortest_cheap(lengths, cost)
    bearable = [length for length in lengths if cost[length] <= LONG_GOP_COST]
    possible = [length for length in bearable if _need(member, length, batch, 1) <= live_bytes]
    return min(possible, default=best), _need(member, ample, batch, wanted)


def _shortest_cheap(lengths: Sequence[int], cost: dict[int, float]) -> int:
    least = min(cost[length] for length in lengths)
    return min(length for length in lengths if cost[length] <= _NEAR_CHEAPEST * least)


def _clip_choices(member: MemberCost) -> list[int]:
    """Return clip lengths, ascending: powers of two, the midpoints between them, and keyframe intervals."""
    longest = 2 * max([1, *(camera.keyframe_interval for camera in member.cameras)])
    reach = max([0, *(max(camera.offsets) - min(camera.offsets) for camera in member.cameras)])
    lengths = {camera.keyframe_interval for camera in member.cameras}
    size = 1
    while size <= max(longest, 2 * reach):
        lengths |= {size, size * 3 // 2}
        size *= 2
    return sorted({1, *lengths})


def _need(member: MemberCost, clip_frames: int, batch: int, live_spans: int) -> int:
    """Return the bytes of the most decoded frames that a rank holds, with one batch decoded ahead.

    Every live span holds at most one clip that has begun, since the frames of a clip follow each other.
    """
    ahead = max(batch * member.sample_bytes, 2 * member.clip_bytes(clip_frames))
    return live_spans * member.held_bytes(clip_frames) + batch * member.sample_bytes + ahead


def _choose_spans(
    members: Sequence[MemberCost], clip_frames: ClipLength, batch: int, live_bytes: int, most: int
) -> int:
    if isinstance(clip_frames, str):
        return most
    lengths, fitting = _as_lengths(clip_frames, len(members)), most
    for member, length in zip(members, lengths, strict=True):
        held = member.held_bytes(length)
        if held:
            fitting = min(fitting, (live_bytes - _need(member, length, batch, 0)) // held)
    return max(1, fitting)


def _as_lengths(clip_frames: ClipLength, num_members: int) -> tuple[int, ...]:
    if isinstance(clip_frames, tuple):
        return clip_frames
    # Without clips, frames are decoded one by one if whole spans do not fit.
    return (1 if isinstance(clip_frames, str) else clip_frames,) * num_members


def _choose_span(
    index: EpisodeIndex,
    members: Sequence[MemberCost],
    batch: int,
    live_bytes: int,
    live_spans: int | None,
    given: SpanLength | None,
) -> tuple[SpanLength, int, int]:
    """Return the longest spans of which enough fit in the memory for rows, how many fit, and how many exist."""
    row_bytes, room = max(member.row_bytes for member in members), live_bytes // _ROW_SHARE
    wanted = live_spans or 2 * batch
    choices = [given] if given is not None else list(_span_choices(index))
    for span_frames in choices:
        lengths = _ordered_lengths(index, span_frames)
        most = _fitting_spans(lengths, room // max(1, row_bytes))
        if most >= min(wanted, len(lengths)):
            break
    return span_frames, max(1, min(most, MOST_LIVE_SPANS)), len(lengths)


def _fitting_spans(lengths: Ints, num_frames: int) -> int:
    """Return how many consecutive spans a rank can hold in `num_frames` frames."""
    sizes = range(1, len(lengths) + 1)
    fitting = bisect_right(sizes, num_frames, key=lambda size: _resident_frames(lengths, size))
    # If all fit, any number may be live.
    return fitting if fitting < len(lengths) else max(fitting, MOST_LIVE_SPANS)


def _check_batch_fits(members: Sequence[MemberCost], batch: int, live_bytes: int) -> None:
    if live_bytes < 1:
        raise ConfigError(f"live_bytes must be at least 1, got {live_bytes}")
    largest = max(member.sample_bytes for member in members)
    if largest * batch > live_bytes:
        raise ConfigError(
            f"live_bytes={live_bytes:,} does not hold the decoded frames of one batch: {batch} samples of {largest:,} "
            f"bytes take {batch * largest:,}. Raise live_bytes to {2 * batch * largest:,}, take a smaller batch_size, "
            f"or smaller frames by decode={{'resize': (height, width)}}"
        )


def _span_choices(index: EpisodeIndex) -> Iterator[SpanLength]:
    """Yield span lengths, longest first."""
    yield WHOLE_EPISODE
    size = 1 << (int((index.stop - index.start).max()).bit_length() - 1)
    while size >= SHORTEST_SPAN:
        yield size
        size //= 2


def _ordered_lengths(index: EpisodeIndex, span_frames: SpanLength) -> Ints:
    """Return the frames of every span that a span length gives, in a shuffled order.

    The order does not depend on the seed: two runs that differ only in it get the same spans.
    """
    spec = OrderSpec(seed=0, span_frames=span_frames, shuffle=index.shares is not None)
    epoch = index.shares.since if index.shares else 0
    lengths = cut_spans(index, spec, make_keys(index, spec, epoch)).count
    return lengths if spec.shuffle else lengths[np.argsort(mix(np.arange(len(lengths), dtype=np.uint64)))]


def _resident_frames(lengths: Ints, live_spans: int) -> int:
    """Return about the most frames that a rank holds of `live_spans` consecutive spans.

    A mean would do for even lengths; with a few long episodes the peak is several times the mean.
    """
    ends = np.append(0, np.cumsum(lengths))
    window = min(live_spans, len(lengths))
    peak = int((ends[window:] - ends[: len(ends) - window]).max())
    return min(int(ends[-1]), math.ceil(RESIDENT_PER_LIVE * peak))


def measure_held(
    world: WorldPlan, members: Sequence[MemberCost], clip_frames: Sequence[int], *, live_bytes: int, rank: int = 0
) -> tuple[int, int]:
    """Return the bytes of the most decoded frames that a rank holds at once in the rest of an epoch.

    The first number has clips of `AHEAD_BATCHES` decoded ahead, as far as the budget allows, and two batches. The
    second has nothing decoded ahead: what the order needs whatever the budget.

    The rank decodes `clip_frames` of every dataset together.
    """
    batch_bytes = world.batch_size * max(member.sample_bytes for member in members)
    step, key, dataset = _emissions(world, rank, np.asarray(clip_frames, dtype=np.int64))
    if not len(step):
        return 2 * batch_bytes, 0
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    asked = step[first][number]
    last = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(last, number, step)
    has_windows = np.array([any(camera.offsets != (0,) for camera in member.cameras) for member in members])
    # A frame that the tail repeats stays as long as its clip.
    has_windows |= world.rank(rank).steps.num_repeats > 0
    left = np.where(has_windows[dataset], last[number], step)
    pairs = zip(members, clip_frames, strict=True)
    weight = np.array([member.clip_bytes(size) / size for member, size in pairs])[dataset]
    next_bytes, ahead_bytes = _peak(asked, left, weight), _peak(np.maximum(asked - AHEAD_BATCHES, 0), left, weight)
    return max(next_bytes, min(ahead_bytes, clip_bound(live_bytes, batch_bytes))) + 2 * batch_bytes, next_bytes


def _emissions(world: WorldPlan, rank: int, clip_frames: Ints) -> Ints:
    """Return the step, the clip and the dataset of every sample, in the order of emission: ``(3, N)``."""
    plan, num_frames = world.rank(rank), 0
    parts = [np.empty((3, 0), dtype=np.int64)]
    for chunk in plan.chunks():
        span, frame = chunk.span.ravel(), chunk.frame.ravel()
        dataset = plan.queue.dataset[span].astype(np.int64)
        step = chunk.step + np.repeat(np.arange(len(chunk.span)), chunk.span.shape[1])
        parts.append(np.stack([step, (span << _CLIP_BITS) | (frame // clip_frames[dataset]), dataset]))
        num_frames += len(span)
        if num_frames > _MOST_FRAMES:
            break
    return np.concatenate(parts, axis=1)


def _peak(begin: Ints, end: Ints, weight: NDArray[np.float64]) -> int:
    size = int(end.max()) + 2
    change = np.bincount(begin, weights=weight, minlength=size) - np.bincount(end + 1, weights=weight, minlength=size)
    return int(np.rint(np.cumsum(change).max()))
