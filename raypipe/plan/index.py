"""What an epoch is made of: runs of frames of episodes, as columns.

Decides which frames are anchors (subset, exclusion, dropped first and last frames, segments). Does not read a
dataset: the caller gives episode numbers and lengths. Several datasets are one index, so a mixture has the same shape.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError
from raypipe.plan.keyhash import Ints
from raypipe.plan.spec import check_whole
from raypipe.wording import counted, span_text

ALL_EPISODES: Final = "all"

SINGLE_DATASET: Final = "dataset"
"""The name in the order of a dataset that stands alone: the same wherever it lies."""

_MAX_FRAMES: Final = 1 << 24
"""Frames of an episode: the key axis of a lane has 2**24 places per span. At 30 fps it is 155 hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSpec:
    """Which frames of one dataset are anchors."""

    episodes: tuple[int, ...] | Literal["all"] = ALL_EPISODES
    exclude: tuple[int, ...] = ()

    drop_first_frames: int = 0
    """Frames at the start of every episode that are no anchors; windows may still reach into them."""

    drop_last_frames: int = 0

    segments: tuple[tuple[int, int, int], ...] = ()
    """(episode, start, stop) runs that alone hold anchors, as DROID's idle filtering needs; empty: whole episodes.
    An episode without a segment has no anchors."""

    def __post_init__(self) -> None:
        for name in ("drop_first_frames", "drop_last_frames"):
            object.__setattr__(self, name, check_whole(name, getattr(self, name), 0, _MAX_FRAMES))
        # Lists, ranges and arrays are welcome; what is kept is plain, comparable, and JSON.
        if not isinstance(self.episodes, str):
            object.__setattr__(self, "episodes", tuple(map(int, self.episodes)))
        object.__setattr__(self, "exclude", tuple(map(int, self.exclude)))
        object.__setattr__(self, "segments", tuple(tuple(map(int, segment)) for segment in self.segments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What every epoch takes of each dataset of a mixture, and where each stands in its endless sequence of laps."""

    names: tuple[str, ...]
    frames: tuple[int, ...]
    """Frames of an epoch."""

    since: int
    """The epoch from which these shares hold."""

    positions: tuple[int, ...]
    """Frames of its sequence that each dataset had given before epoch `since`."""

    fingerprints: tuple[str, ...]
    """The order fingerprint of every dataset."""

    sizes: tuple[int, ...]
    """Anchor frames of every dataset: the length of its laps."""

    selections: tuple[str, ...]
    """A digest of the anchor runs of every dataset."""

    revisions: tuple[str, ...]

    def begins(self, epoch: int) -> tuple[int, ...]:
        """Return how many frames of its sequence every dataset has given before `epoch`.

        Raises:
            ConfigError: other shares held in that epoch.
        """
        if epoch < self.since:
            raise ConfigError(
                f"epoch {epoch} was of another mixture: this one holds since epoch {self.since}. Use the mixture that "
                f"the run had then."
            )
        return tuple(
            position + (epoch - self.since) * frames
            for position, frames in zip(self.positions, self.frames, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeIndex:
    """Runs of anchor frames in file order; several rows of one episode are segments of it."""

    dataset_names: tuple[str, ...]
    """Names in the mixture. They enter the order, so they are never paths."""

    dataset: NDArray[np.int32]
    """Position in `dataset_names`."""

    episode: Ints
    """LeRobot's `episode_index`."""

    length: Ints
    """Frames of the whole episode, into which windows may reach."""

    start: Ints
    stop: Ints

    fingerprint: str
    """The order fingerprint of the datasets, as their reader gives it."""

    shares: Shares | None = None
    """What an epoch takes of every dataset of a mixture; None: every anchor frame, once."""

    def __len__(self) -> int:
        return len(self.episode)

    @property
    def num_frames(self) -> int:
        """The number of samples of an epoch: the anchor frames, or the sum of the shares."""
        return sum(self.shares.frames) if self.shares else int((self.stop - self.start).sum())


def index_episodes(
    name: str, episode: Ints, length: Ints, *, fingerprint: str, selection: SelectionSpec
) -> EpisodeIndex:
    """Return the anchor runs of one dataset.

    Raises:
        ConfigError: an episode that is asked for does not exist, segments overlap, or no frame is left.
    """
    order = np.argsort(episode, kind="stable")
    number = np.asarray(episode, dtype=np.int64)[order]
    frames = np.asarray(length, dtype=np.int64)[order]
    _check_episodes(name, number, frames)
    row, start, stop = _anchor_runs(name, number, frames, selection)
    start = np.maximum(start, selection.drop_first_frames)
    stop = np.minimum(stop, frames[row] - selection.drop_last_frames)
    kept = (stop > start) & _selected(name, number, selection)[row]
    if not kept.any():
        raise ConfigError(
            f"no frame is left of the {counted(len(number), 'episode')} of dataset {name!r} under {selection}"
        )
    row = row[kept]
    return EpisodeIndex(
        dataset_names=(name,),
        dataset=np.zeros(len(row), dtype=np.int32),
        episode=number[row],
        length=frames[row],
        start=start[kept],
        stop=stop[kept],
        fingerprint=fingerprint,
    )


def concat_indexes(indexes: Sequence[EpisodeIndex]) -> EpisodeIndex:
    """Return several datasets as one index, every frame of which an epoch takes once; `mix_indexes` gives shares.

    The names must differ, since an episode's place depends on its dataset's name.
    """
    names = tuple(name for index in indexes for name in index.dataset_names)
    if len(set(names)) < len(names):
        raise ConfigError(f"the datasets of a mixture need different names, got {names}")
    offsets = np.cumsum([0] + [len(index.dataset_names) for index in indexes])
    shifted = [index.dataset + np.int32(offset) for index, offset in zip(indexes, offsets, strict=False)]
    return EpisodeIndex(
        dataset_names=names,
        dataset=np.concatenate(shifted),
        episode=np.concatenate([index.episode for index in indexes]),
        length=np.concatenate([index.length for index in indexes]),
        start=np.concatenate([index.start for index in indexes]),
        stop=np.concatenate([index.stop for index in indexes]),
        fingerprint="+".join(index.fingerprint for index in indexes),
    )


def describe_selection(index: EpisodeIndex) -> str:
    """Return a line that is equal for equal anchor runs: their number, their frames, and a digest."""
    digest = hashlib.blake2b(repr(index.dataset_names).encode(), digest_size=8)
    for column in (index.dataset, index.episode, index.start, index.stop):
        digest.update(np.ascontiguousarray(column).data)
    if index.shares is not None:
        taken = (index.shares.frames, index.shares.since, index.shares.positions)
        digest.update(repr(taken).encode())
    return f"{len(index)} runs, {index.num_frames} frames, {digest.hexdigest()}"


def _check_episodes(name: str, number: Ints, frames: Ints) -> None:
    if np.any(frames > _MAX_FRAMES):
        raise ConfigError(f"dataset {name!r} has an episode of {frames.max()} frames; the limit is {_MAX_FRAMES}")
    twice = number[1:][number[1:] == number[:-1]]
    if len(twice):
        raise ConfigError(f"dataset {name!r} lists episode {twice[0]} twice")


def _selected(name: str, number: Ints, selection: SelectionSpec) -> NDArray[np.bool_]:
    _check_known(name, number, selection.exclude)
    if selection.episodes == ALL_EPISODES:
        wanted = np.ones(len(number), dtype=np.bool_)
    else:
        _check_known(name, number, selection.episodes)
        wanted = np.isin(number, np.asarray(selection.episodes, dtype=np.int64))
    return wanted & ~np.isin(number, np.asarray(selection.exclude, dtype=np.int64))


def _check_known(name: str, number: Ints, wanted: Sequence[int] | str) -> None:
    asked = np.unique(np.asarray(wanted, dtype=np.int64))
    unknown = asked[~np.isin(asked, number)]
    if len(unknown):
        shown = ", ".join(map(str, unknown[:10])) + (", ..." if len(unknown) > 10 else "")
        span = span_text(number[0], number[-1]) if len(number) else "none"
        raise ConfigError(
            f"dataset {name!r} has no episode {shown} ({len(unknown)} unknown); it has "
            f"{counted(len(number), 'episode')}, {span}"
        )


def _anchor_runs(name: str, number: Ints, frames: Ints, selection: SelectionSpec) -> tuple[Ints, Ints, Ints]:
    if not selection.segments:
        return np.arange(len(number)), np.zeros(len(number), dtype=np.int64), frames
    segments = np.asarray(selection.segments, dtype=np.int64).reshape(-1, 3)
    _check_known(name, number, segments[:, 0].tolist())
    segments = segments[np.lexsort((segments[:, 1], segments[:, 0]))]
    row = np.searchsorted(number, segments[:, 0])
    _check_segments(name, segments, frames[row])
    return row, segments[:, 1], segments[:, 2]


def _check_segments(name: str, segments: Ints, length: Ints) -> None:
    outside = (segments[:, 1] < 0) | (segments[:, 2] > length) | (segments[:, 1] >= segments[:, 2])
    overlap = (segments[1:, 0] == segments[:-1, 0]) & (segments[1:, 1] < segments[:-1, 2])
    for wrong, why in (
        (outside, "is empty or leaves its episode"),
        (np.append(False, overlap), "overlaps the one before"),
    ):
        if wrong.any():
            episode, start, stop = segments[wrong][0].tolist()
            raise ConfigError(f"segment [{start}, {stop}) of episode {episode} of dataset {name!r} {why}")
