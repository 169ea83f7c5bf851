"""The most decoded frames that a rank holds. The order is known in advance, so the peak is counted, not estimated.

::

    step            0    1    2    3    4    5    6
    clip of a       [ask ......... a7 ......... a6]        asked for some batches ahead of its first frame
    frame a7        |==============|                       held until it leaves; with windows, until its clip does
    frame a6        |=============================|
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.budget import MemberCost
from raypipe.plan.keyhash import Ints
from raypipe.plan.world import WorldPlan

_MOST_FRAMES: Final = 1 << 21
"""Frames of a rank to look at. The peak comes soon after the start, when all live spans begin."""

_CLIP_BITS: Final = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPeak:
    """The most decoded frames that a rank holds at once."""

    num_bytes: int
    """With `ahead_batches` decoded ahead."""

    next_bytes: int
    """With nothing decoded ahead: what the order needs whatever the budget."""


def measure_held(
    world: WorldPlan, members: Sequence[MemberCost], clip_frames: Sequence[int], *, ahead_batches: int, rank: int = 0
) -> HeldPeak:
    """Return the peak of a rank in the rest of an epoch.

    Args:
        members: the sizes of every dataset.
        clip_frames: frames that a rank decodes together, of every dataset.
        ahead_batches: how many batches beyond the current one have their clips decoded.
    """
    step, key, dataset = _emissions(world, rank, np.asarray(clip_frames, dtype=np.int64))
    if not len(step):
        return HeldPeak(num_bytes=0, next_bytes=0)
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
    return HeldPeak(
        num_bytes=_peak(np.maximum(asked - ahead_batches, 0), left, weight),
        next_bytes=_peak(asked, left, weight),
    )


def _emissions(world: WorldPlan, rank: int, clip_frames: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the step, the clip and the dataset of every sample, in the order of emission."""
    plan, num_frames = world.rank(rank), 0
    steps, keys, datasets = [], [], []
    for chunk in plan.chunks():
        num_steps, batch = chunk.span.shape
        dataset = plan.queue.dataset[chunk.span.ravel()].astype(np.int64)
        steps.append(np.repeat(np.arange(chunk.step, chunk.step + num_steps), batch))
        keys.append((chunk.span.ravel() << _CLIP_BITS) | (chunk.frame.ravel() // clip_frames[dataset]))
        datasets.append(dataset)
        num_frames += len(dataset)
        if num_frames > _MOST_FRAMES:
            break
    empty = np.empty(0, dtype=np.int64)
    return np.concatenate([empty, *steps]), np.concatenate([empty, *keys]), np.concatenate([empty, *datasets])


def _peak(begin: Ints, end: Ints, weight: NDArray[np.float64]) -> int:
    size = int(end.max()) + 2
    change = np.bincount(begin, weights=weight, minlength=size) - np.bincount(end + 1, weights=weight, minlength=size)
    return int(np.rint(np.cumsum(change).max()))
