"""The frames around a frame: turns offsets into row numbers and padding, inside one episode.

Pure arithmetic on integers. A window never leaves its episode: a slot outside repeats the nearest frame of the episode
and is marked as padding.

::

    episode of 5 frames, offsets (-1, 0, +2)        rows          padding
      frame 0                                       0 0 2         x . .
      frame 3                                       2 3 4         . . x
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError, suggest

TOLERANCE_S = 1e-4
"""How far a delta may be from a multiple of 1/fps, in seconds: LeRobot's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """The frames that a sample holds for each feature, relative to the sample's own frame."""

    offsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Relative frame numbers by feature. A feature that is not listed gives its own frame only, unpadded."""

    def __post_init__(self) -> None:
        for key, offsets in self.offsets.items():
            if not offsets:
                raise ConfigError(f"the window of {key!r} is empty; give at least one offset, or leave it out")
            wrong = [offset for offset in offsets if isinstance(offset, bool) or not isinstance(offset, int)]
            if wrong:
                raise ConfigError(
                    f"the window of {key!r} has offsets that are not frame numbers: {wrong}; give integers, or "
                    f"seconds as delta_timestamps"
                )

    def check_features(self, known: Sequence[str]) -> None:
        """Raise a `ConfigError` for a window on a feature that is not in `known`."""
        for key in self.offsets:
            if key not in known:
                raise ConfigError(f"the window names an unknown feature {key!r}{suggest(key, known)}")

    def reach(self, keys: Sequence[str]) -> tuple[int, int]:
        """Return the smallest and the largest offset over `keys` and 0."""
        used = [offset for key in keys for offset in self.offsets.get(key, ())]
        return min([0, *used]), max([0, *used])


def window_from_timestamps(
    delta_timestamps: Mapping[str, Sequence[float]], *, fps: float, tolerance_s: float = TOLERANCE_S
) -> WindowSpec:
    """Return the window with slots `delta_timestamps` seconds away.

    Raises:
        ConfigError: a delta is further than `tolerance_s` from a multiple of 1/fps; the message lists all of them.
    """
    _check_seconds(delta_timestamps)
    offsets = {key: tuple(round(delta * fps) for delta in deltas) for key, deltas in delta_timestamps.items()}
    wrong = {
        key: [d for d, o in zip(deltas, offsets[key], strict=True) if abs(d * fps - o) / fps > tolerance_s]
        for key, deltas in delta_timestamps.items()
    }
    wrong = {key: deltas for key, deltas in wrong.items() if deltas}
    if wrong:
        raise ConfigError(
            f"delta_timestamps must be multiples of 1/fps = {1 / fps:.6g} s, within {tolerance_s:g} s, and these "
            f"are not: {wrong}. Round them to the frame rate, or give frame offsets instead."
        )
    return WindowSpec(offsets=offsets)


def window_from_offsets(offsets: Mapping[str, Sequence[int]]) -> WindowSpec:
    """Return the window of relative frame numbers, given as any sequences of integers."""
    plain = {}
    for key, values in offsets.items():
        try:
            plain[key] = tuple(operator.index(value) for value in values)
        except TypeError as error:
            raise ConfigError(
                f"the window of {key!r} is {values!r}; give a list of frame numbers, or seconds as delta_timestamps"
            ) from error
    return WindowSpec(offsets=plain)


def _check_seconds(delta_timestamps: Mapping[str, Sequence[float]]) -> None:
    for key, deltas in delta_timestamps.items():
        try:
            is_finite = all(math.isfinite(delta) for delta in deltas)
        except TypeError:
            is_finite = False
        if not is_finite:
            raise ConfigError(f"the window of {key!r} is {deltas!r}; give a list of seconds")


def window_rows(
    anchors: NDArray[np.int64], num_frames: int, offsets: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the frame in every window slot ``(len(anchors), len(offsets))``, and which slots are padding.

    Slot ``[i, j]`` is frame ``anchors[i] + offsets[j]`` of an episode of `num_frames` frames.
    """
    wanted = anchors[:, None] + np.asarray(offsets, dtype=np.int64)
    rows = wanted.clip(0, num_frames - 1)
    return rows, rows != wanted
