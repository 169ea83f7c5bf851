"""The few numbers that validate keeps of every episode while it checks a dataset, as columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Minimum, maximum and mean of a feature in each episode: ``(episodes, numbers)`` float32.

    NaN if an episode has no values, or values that are not finite.
    """

    minimum: NDArray[np.float32]
    maximum: NDArray[np.float32]
    mean: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeSummary:
    """The measurements of the episodes whose rows can be read, as columns of equal length."""

    episode_index: NDArray[np.int64]
    num_frames: NDArray[np.int64]
    """Distinct frames in the rows."""
    first_index: NDArray[np.int64]
    """``index`` of the first frame; -1 if the rows have none."""
    is_sound: NDArray[np.bool_]
    """Whether frames count 0, 1, 2, ... each once. The columns below are meaningful only then."""
    offset_s: NDArray[np.float64]
    """The first timestamp; NaN if there is none."""
    drift_s: NDArray[np.float64]
    """By how much timestamps differ from ``first + frame / fps`` at most, signed."""
    step_s: NDArray[np.float64]
    """The median step of timestamps; NaN with fewer than two frames."""
    digest: NDArray[np.uint64]
    """A hash of the values of all features, frame by frame; 0 if they never change."""
    moments: Mapping[str, Moments]
    """By feature of rows, without the index columns."""

    def __len__(self) -> int:
        return len(self.episode_index)


_COLUMNS = tuple(field.name for field in fields(EpisodeSummary) if field.name != "moments")
_DTYPES = {
    "episode_index": np.int64,
    "num_frames": np.int64,
    "first_index": np.int64,
    "is_sound": np.bool_,
    "digest": np.uint64,
}


def join_summaries(parts: Sequence[EpisodeSummary]) -> EpisodeSummary:
    """Return one summary of all episodes, ascending by number."""
    columns = {
        name: np.concatenate([np.zeros(0, _DTYPES.get(name, np.float64)), *(getattr(part, name) for part in parts)])
        for name in _COLUMNS
    }
    order = np.argsort(columns["episode_index"], kind="stable")
    features = dict.fromkeys(name for part in parts for name in part.moments)
    moments = {name: _join_moments(parts, name, order) for name in features}
    ordered: dict[str, Any] = {
        name: values[order].astype(_DTYPES.get(name, np.float64)) for name, values in columns.items()
    }
    return EpisodeSummary(**ordered, moments=moments)


def _join_moments(parts: Sequence[EpisodeSummary], name: str, order: NDArray[np.int64]) -> Moments:
    width = max(part.moments[name].mean.shape[1] for part in parts if name in part.moments)

    def joined(which: str) -> NDArray[np.float32]:
        pieces = [
            getattr(part.moments[name], which) if name in part.moments else np.full((len(part), width), np.nan)
            for part in parts
        ]
        return np.concatenate(pieces)[order].astype(np.float32)

    return Moments(joined("minimum"), joined("maximum"), joined("mean"))
