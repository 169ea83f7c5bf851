"""From a memory budget to live spans and span length.

Decided once, on the driver, at the first start. The result goes into the state and is never derived again: a changed
dataset or camera size must not move the order of a run.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from raypipe.errors import ConfigError
from raypipe.plan.index import EpisodeIndex
from raypipe.plan.keyhash import Ints, OrderKeys, mix
from raypipe.plan.spans import cut_spans
from raypipe.plan.spec import WHOLE_EPISODE, OrderSpec

DEFAULT_LIVE_BYTES: Final = 2 << 30

SHORTEST_SPAN: Final = 32
"""Shorter spans cost more blocks than they save memory: a block costs Ray 20 to 40 ms."""

RESIDENT_PER_LIVE: Final = 1.3
"""Frames that a rank holds per live frame: Ray balances rows, not need, so a rank pulls ahead of its own window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBudget:
    """What a memory budget buys."""

    span_frames: int | Literal["episode"]
    live_spans: int
    is_decode_on_exit: bool
    """The pixels of live spans do not fit: keep rows live, and decode each batch's frames as it leaves."""

    live_bytes: int
    """Estimate for a rank of one lane."""


def resolve_live(
    index: EpisodeIndex,
    *,
    row_bytes: int,
    pixel_bytes: int,
    live_spans: int = 128,
    live_bytes: int = DEFAULT_LIVE_BYTES,
) -> LiveBudget:
    """Return the longest spans of which `live_spans` fit in `live_bytes`: whole episodes, else down to 32 frames.

    If even those do not fit, rows alone are live by the same rule, and pixels are decoded on exit.

    Args:
        row_bytes: bytes of a frame without its cameras.
        pixel_bytes: bytes of a frame's cameras as they are kept live; 0 if they are not.
    """
    if live_spans < 1 or live_bytes < 1:
        raise ConfigError(f"live_spans and live_bytes must be at least 1, got {live_spans} and {live_bytes}")
    for frame_bytes, is_decode_on_exit in ((row_bytes + pixel_bytes, False), (row_bytes, True)):
        for span_frames in _span_choices(index):
            size_bytes = _resident_frames(_ordered_lengths(index, span_frames), live_spans) * frame_bytes
            if size_bytes <= live_bytes:
                return LiveBudget(
                    span_frames=span_frames,
                    live_spans=live_spans,
                    is_decode_on_exit=is_decode_on_exit,
                    live_bytes=size_bytes,
                )
    raise ConfigError(
        f"live_bytes={live_bytes} does not hold {live_spans} live spans of {SHORTEST_SPAN} frames of {row_bytes} "
        f"bytes, even without pixels; raise live_bytes to {size_bytes} or lower live_spans"
    )


def _span_choices(index: EpisodeIndex) -> Iterator[int | Literal["episode"]]:
    """Yield span lengths, longest first."""
    yield WHOLE_EPISODE
    size = 1 << (int((index.stop - index.start).max()).bit_length() - 1)
    while size >= SHORTEST_SPAN:
        yield size
        size //= 2


def _ordered_lengths(index: EpisodeIndex, span_frames: int | Literal["episode"]) -> Ints:
    """Return the frames of every span that a span length gives, in a shuffled order.

    One that does not depend on the seed: of two runs that differ in it alone both get the same spans.
    """
    spec = OrderSpec(seed=0, span_frames=span_frames, shuffle=index.shares is not None)
    epoch = index.shares.since if index.shares else 0
    keys = OrderKeys(seed=spec.seed, epoch=epoch, shuffle=spec.shuffle, dataset_names=index.dataset_names)
    lengths = cut_spans(index, spec, keys).count
    return lengths if spec.shuffle else lengths[np.argsort(mix(np.arange(len(lengths), dtype=np.uint64)))]


def _resident_frames(lengths: Ints, live_spans: int) -> int:
    """Return about the most frames of `live_spans` spans that follow each other.

    A mean would do for even lengths; with a few long episodes the peak is several times that.
    """
    ends = np.append(0, np.cumsum(lengths))
    window = min(live_spans, len(lengths))
    peak = int((ends[window:] - ends[: len(ends) - window]).max())
    return min(int(ends[-1]), math.ceil(RESIDENT_PER_LIVE * peak))
