"""What an epoch is made of: runs of frames of episodes, as columns.

Decides which frames are anchors (subset, exclusion, lengths, dropped first and last frames, segments). Does not read a
dataset: the caller passes episode numbers, lengths, and which episodes pass the filters by tasks and columns. Several
datasets form one index, so a mixture has the same shape.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError, hide_logins
from raypipe.plan.keyhash import Ints
from raypipe.plan.rates import Rates, concat_rates, make_rates, ragged_arange
from raypipe.plan.spec import store_whole
from raypipe.text import counted, cut_inside, span_text

ALL_EPISODES: Final = "all"

EQUAL: Final = "equal"
"""Value of `weights` that makes every frame come equally often."""

ANY_LENGTH: Final = "any"
"""Value of `max_frames` that accepts episodes of any length."""

SINGLE_DATASET: Final = "dataset"
"""The name that a single dataset has in the order, whatever its path."""

_MAX_FRAMES: Final = 1 << 24
"""Most frames of an episode: the key axis of a lane has 2**24 places per span. At 30 fps this is 155 hours."""

_MOST_BITS: Final = 63
"""Of the numbers of episodes and frames in a selection: they become 64-bit integers."""

_MOST_NUMBERS: Final = 1 << 40
"""Most numbers that the frames of a dataset take in an account."""

_MOST_POSITION: Final = 1 << 62
"""Most frames of a dataset that the epochs of a run take; keeps positions within 64 bits."""

_MOST_TOLD: Final = 600
"""Most characters of a selection that a message shows."""

_FIRST_FIELDS: Final = ("episodes", "exclude", "drop_first_frames", "drop_last_frames", "segments")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSpec:
    """Which frames of one dataset are anchors."""

    episodes: tuple[int, ...] | Literal["all"] = ALL_EPISODES
    exclude: tuple[int, ...] = ()

    drop_first_frames: int = 0
    """Frames at the start of every episode that are not anchors; windows may still reach into them."""

    drop_last_frames: int = 0

    segments: tuple[tuple[int, int, int], ...] = ()
    """(episode, start, stop) runs. Only their frames are anchors, as DROID's idle filtering needs: an episode without
    a segment has no anchors. Empty: whole episodes."""

    tasks: tuple[str, ...] = ()
    """Keep episodes that have one of these tasks, by text; empty: any task."""

    min_frames: int = 1
    """Keep episodes of at least this many frames."""

    max_frames: int | Literal["any"] = ANY_LENGTH

    where: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Columns and their allowed values, as ``{"is_success": True, "scene": ("a", "b")}``. A column of the episode
    table selects episodes, a column of the rows selects frames."""

    every: int = 1
    """One frame in this many is an anchor, so an epoch has as many times fewer. Each epoch starts at another phase."""

    weights: str | tuple[tuple[int, float], ...] = EQUAL
    """How often frames come, relative to each other, at least 0; see `raypipe.plan.rates`. Give a column of the
    episode table or of the rows; a parquet file with the columns ``episode_index`` or ``index``, and ``weight``; or a
    mapping of episodes to weights (others have 1). `Pipeline` also takes a function of the episode table."""

    def __post_init__(self) -> None:
        store_whole(self, "drop_first_frames", 0, _MAX_FRAMES)
        store_whole(self, "drop_last_frames", 0, _MAX_FRAMES)
        store_whole(self, "min_frames", 1, _MAX_FRAMES)
        store_whole(self, "max_frames", self.min_frames, _MAX_FRAMES, ANY_LENGTH)
        store_whole(self, "every", 1, _MAX_FRAMES)
        object.__setattr__(self, "tasks", _check_tasks(self.tasks))
        object.__setattr__(self, "where", _check_where(self.where))
        object.__setattr__(self, "weights", _check_weights(self.weights))
        # Callers may pass lists, ranges and arrays. The spec stores plain values that compare and go into JSON.
        if not isinstance(self.episodes, str) or self.episodes != ALL_EPISODES:
            object.__setattr__(self, "episodes", _whole_numbers("episodes", self.episodes))
        object.__setattr__(self, "exclude", _whole_numbers("exclude", self.exclude))
        object.__setattr__(self, "segments", _check_segments(self.segments))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, filters only if they are set: accounts from before the filters have none."""
        plain = asdict(SelectionSpec())
        return {name: value for name, value in asdict(self).items() if name in _FIRST_FIELDS or value != plain[name]}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetShare:
    """What every epoch takes of one dataset of a mixture, and its position in its endless sequence of laps."""

    name: str
    fingerprint: str
    selection: str
    """A digest of its anchor runs."""

    size: int
    """Anchor frames of the dataset: the length of its laps."""

    frames: int
    """Frames that an epoch takes of it."""

    position: int
    """Frames of its sequence that it had given before epoch `Shares.since`."""

    revision: str

    def __post_init__(self) -> None:
        store_whole(self, "size", 1, _MOST_POSITION)
        store_whole(self, "frames", 1, _MOST_POSITION)
        store_whole(self, "position", 0, _MOST_POSITION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What every epoch takes of each dataset of a mixture."""

    since: int
    """The epoch from which these shares hold."""

    members: tuple[DatasetShare, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the datasets."""
        return tuple(one.name for one in self.members)

    @property
    def frames(self) -> tuple[int, ...]:
        """Frames that an epoch takes of each dataset."""
        return tuple(one.frames for one in self.members)

    def begins(self, epoch: int) -> tuple[int, ...]:
        """Return how many frames of its sequence every dataset has given before `epoch`.

        Raises:
            ConfigError: `epoch` is before `since`, when other shares held, or later than 64 bits can count.
        """
        if epoch < self.since:
            raise ConfigError(
                f"epoch {epoch} was of another mixture: this one holds since epoch {self.since}. Use the mixture that "
                f"the run had then."
            )
        begins = tuple(one.position + (epoch - self.since) * one.frames for one in self.members)
        if max(begins, default=0) > _MOST_POSITION:
            raise ConfigError(
                f"epoch {epoch} is after {max(begins)} frames of a dataset, and {_MOST_POSITION} are the most"
            )
        return begins


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
    """Frames of the whole episode; windows may reach into all of them."""

    start: Ints
    stop: Ints

    fingerprint: str
    """The order fingerprint of the datasets, from their reader."""

    shares: Shares | None = None
    """What an epoch takes of every dataset of a mixture; None: every anchor frame, once."""

    rates: Rates | None = None
    """How often an epoch, or a lap of a mixture, has each frame; None: once."""

    left_out: tuple[int, int] = (0, 0)
    """Episodes and frames of the datasets that no epoch emits."""

    def __len__(self) -> int:
        return len(self.episode)

    @property
    def num_frames(self) -> int:
        """The number of samples of an epoch: the anchor frames by their rates, or the sum of the shares."""
        if self.shares:
            return sum(self.shares.frames)
        return sum(self.rates.sizes) if self.rates else int((self.stop - self.start).sum())


def index_episodes(
    name: str,
    episode: Ints,
    length: Ints,
    *,
    fingerprint: str,
    selection: SelectionSpec,
    kept: NDArray[np.bool_] | None = None,
    weights: NDArray[np.float64] | None = None,
) -> EpisodeIndex:
    """Return the anchor runs of one dataset.

    Args:
        kept: whether each of `episode` passes the filters by tasks and columns.
        weights: one for each of `episode`, or one for each of their frames; None: all are equal.

    Raises:
        ConfigError: the selection names an episode that does not exist, segments overlap, or no frame is left.
    """
    order = np.argsort(episode, kind="stable")
    number = np.asarray(episode, dtype=np.int64)[order]
    frames = np.asarray(length, dtype=np.int64)[order]
    _check_episodes(name, number, frames)
    wanted = passing_episodes(name, number, frames, selection)
    wanted &= True if kept is None else np.asarray(kept)[order]
    row, start, stop = _wanted_runs(name, number, frames, selection, wanted)
    each = np.ones(len(row))
    if weights is not None:
        row, start, stop, each = _weigh(name, np.asarray(weights, dtype=np.float64), (order, length, row, start, stop))
    num_frames = int((stop - start).sum() if len(each) == len(row) else (each > 0).sum())
    rates = make_rates(name, start, stop, each, selection.every)
    _check_parts(name, rates, int(frames.sum()))
    return EpisodeIndex(
        dataset_names=(name,),
        dataset=np.zeros(len(row), dtype=np.int32),
        episode=number[row],
        length=frames[row],
        start=start,
        stop=stop,
        fingerprint=fingerprint,
        rates=rates,
        left_out=(len(number) - len(np.unique(row)), int(frames.sum()) - num_frames),
    )


def concat_indexes(indexes: Sequence[EpisodeIndex]) -> EpisodeIndex:
    """Return several datasets as one index without shares; `mix_indexes` adds them.

    An epoch takes every frame once, or by its rates. The names must differ: an episode's place depends on its
    dataset's name.
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
        rates=concat_rates([index.rates for index in indexes], [(index.start, index.stop) for index in indexes]),
        left_out=(sum(index.left_out[0] for index in indexes), sum(index.left_out[1] for index in indexes)),
    )


def describe_selection(index: EpisodeIndex) -> str:
    """Return a line that is equal for equal anchor runs: their number, their frames, and a digest."""
    digest = hashlib.blake2b(repr(index.dataset_names).encode(), digest_size=8)
    for column in (index.dataset, index.episode, index.start, index.stop):
        digest.update(np.ascontiguousarray(column).data)
    for column in index.rates.digest_columns() if index.rates else ():
        digest.update(np.ascontiguousarray(column).data)
    if index.shares is not None:
        taken = (index.shares.frames, index.shares.since, index.shares.begins(index.shares.since))
        digest.update(repr(taken).encode())
    return f"{len(index)} runs, {index.num_frames} frames, {digest.hexdigest()}"


def _wanted_runs(
    name: str, number: Ints, frames: Ints, selection: SelectionSpec, wanted: NDArray[np.bool_]
) -> tuple[Ints, Ints, Ints]:
    """Return rows, first frames and ends of the runs of wanted episodes that still have frames."""
    row, start, stop = _anchor_runs(name, number, frames, selection)
    start = np.maximum(start, selection.drop_first_frames)
    stop = np.minimum(stop, frames[row] - selection.drop_last_frames)
    is_kept = (stop > start) & wanted[row]
    if not is_kept.any():
        raise ConfigError(
            f"no frame is left of the {counted(len(number), 'episode')} of dataset {name!r} under "
            f"{cut_inside(str(selection.to_dict()), _MOST_TOLD)}"
        )
    return row[is_kept], start[is_kept], stop[is_kept]


def _weigh(
    name: str, weights: NDArray[np.float64], runs: tuple[Ints, Ints, Ints, Ints, Ints]
) -> tuple[Ints, Ints, Ints, NDArray[np.float64]]:
    """Return the runs that have a weight, and one weight per run, or one per frame if frames of a run differ."""
    # The order of the episodes, their lengths as given, and rows, first frames and ends of the runs.
    order, length, row, start, stop = runs
    if len(weights) not in (len(length), int(length.sum())):
        raise ConfigError(
            f"there are {counted(len(weights), 'weight')} for dataset {name!r}, which has "
            f"{counted(len(length), 'episode')} of {counted(int(length.sum()), 'frame')}: give one for each of either"
        )
    each = weights[order][row]
    if len(weights) != len(length):
        first = (np.cumsum(length) - length)[order][row]
        every = weights[ragged_arange(first + start, stop - start)]
        begins = np.cumsum(stop - start) - (stop - start)
        each, least = np.maximum.reduceat(every, begins), np.minimum.reduceat(every, begins)
    has_weight = each > 0
    if not has_weight.any():
        raise ConfigError(f"all weights of the selected frames of dataset {name!r} are 0: no frame is left")
    if len(weights) == len(length) or np.array_equal(each, least):
        return row[has_weight], start[has_weight], stop[has_weight], each[has_weight]
    return row[has_weight], start[has_weight], stop[has_weight], every[np.repeat(has_weight, stop - start)]


def _check_episodes(name: str, number: Ints, frames: Ints) -> None:
    if np.any(frames > _MAX_FRAMES):
        raise ConfigError(f"dataset {name!r} has an episode of {frames.max()} frames; the limit is {_MAX_FRAMES}")
    twice = number[1:][number[1:] == number[:-1]]
    if len(twice):
        raise ConfigError(f"dataset {name!r} lists episode {twice[0]} twice")


def _check_parts(name: str, rates: Rates | None, num_frames: int) -> None:
    """Raise if an account has too few numbers for each time of each frame."""
    parts = int(rates.parts.max()) if rates is not None else 1
    if parts * num_frames >= _MOST_NUMBERS:
        raise ConfigError(
            f"an epoch of dataset {name!r} has a frame {parts:,} times, and one of {counted(num_frames, 'frame')} can "
            f"have it {_MOST_NUMBERS // num_frames:,} times at most; lower the largest weights"
        )


def passing_episodes(name: str, episode: Ints, length: Ints, selection: SelectionSpec) -> NDArray[np.bool_]:
    """Return which episodes pass the numbers, lengths and segments of a selection."""
    most = _MAX_FRAMES if isinstance(selection.max_frames, str) else selection.max_frames
    _check_known(name, episode, selection.exclude)
    passing = (length >= selection.min_frames) & (length <= most) & ~np.isin(episode, selection.exclude)
    if selection.episodes != ALL_EPISODES:
        _check_known(name, episode, selection.episodes)
        passing &= np.isin(episode, selection.episodes)
    if selection.segments:
        passing &= np.isin(episode, [segment[0] for segment in selection.segments])
    return passing


def _whole_numbers(name: str, given: Any) -> tuple[int, ...]:
    usage = "give whole numbers, as [0, 1, 2] or range(3)"
    listed = _as_python(given)
    if isinstance(listed, str | bytes) or not isinstance(listed, Iterable):
        raise ConfigError(f"{name} is {given!r}; {usage}")
    values = tuple(map(_as_python, listed))
    for value in values:
        if not _is_whole(value):
            raise ConfigError(f"{name} has {value!r}; {usage}")
    numbers = tuple(map(int, values))
    largest = max((number.bit_length() for number in numbers), default=0)
    if largest > _MOST_BITS:
        raise ConfigError(f"{name} has a number of {largest} bits, and no dataset has so many episodes or frames")
    return numbers


def _as_python(value: Any) -> Any:
    """Return an array or a number of NumPy, torch or Arrow as Python's; anything else as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.as_py() if hasattr(value, "as_py") else value


def _check_segments(given: Any) -> tuple[tuple[int, ...], ...]:
    segments = tuple(_whole_numbers("segments", one) for one in (given if isinstance(given, Iterable) else [given]))
    for segment in segments:
        if len(segment) != 3:
            raise ConfigError(f"segments has {segment}, and a segment is (episode, start, stop)")
    return segments


def _is_whole(value: Any) -> bool:
    """Return whether a value is a whole number.

    A text is not, since its characters are numbers: "12" would be the episodes 1 and 2. Neither is a truth: a mask of
    episodes would be the episodes 0 and 1.
    """
    return isinstance(value, Real) and not isinstance(value, bool) and value == value // 1


def _check_tasks(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"tasks is {given!r}; give a list of texts, as [{given!r}]")
    tasks = tuple(_in_one_order(given))
    if not all(isinstance(task, str) for task in tasks):
        raise ConfigError(f"tasks is {list(tasks)!r}; give the texts of tasks")
    return tasks


def _check_weights(given: Any) -> str | tuple[tuple[int, float], ...]:
    """Return the name of a column, the path of a file, or weights by episode; accepts its own result."""
    if isinstance(given, str | os.PathLike):
        name = os.fspath(given)
        if hide_logins(name) != name:
            raise ConfigError(
                f"weights={hide_logins(name)!r} has a password, and states keep where weights are: fetch the file"
            )
        return os.path.abspath(name) if name.endswith(".parquet") and "://" not in name else name
    try:
        pairs = list(given.items() if isinstance(given, Mapping) else given)
        # Keys from JSON are text.
        weights = {int(str(episode)): float(weight) for episode, weight in pairs}
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"weights is {cut_inside(repr(given), _MOST_TOLD)}; give the name of a column, the path of a parquet file, "
            f"or a mapping of episodes to numbers: {error}"
        ) from error
    if len(weights) < len(pairs):
        raise ConfigError(f"weights is {cut_inside(repr(given), _MOST_TOLD)}, and has an episode twice")
    return tuple(sorted(weights.items()))


def _in_one_order(given: Any) -> Any:
    """Return a set in an order that every process shares, since ranks compare selections; other values as they are."""
    return sorted(given, key=lambda one: (type(one).__name__, one)) if isinstance(given, Set) else given


def _check_where(given: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Return the columns with their allowed values, from a dict or from its own result."""
    try:
        pairs = given.items() if isinstance(given, Mapping) else given
        listed = tuple((str(column), _list_values(values)) for column, values in pairs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"where is {given!r}; give columns with values, as {{'is_success': True}}") from error
    for column, values in listed:
        if not values:
            raise ConfigError(f"where has no value for {column!r}: no frame could be left")
    return listed


def _list_values(given: Any) -> tuple[Any, ...]:
    several = (given,) if isinstance(given, str) or np.isscalar(given) else _in_one_order(given)
    # NumPy's numbers become Python's, since the spec goes into JSON.
    return tuple(one.item() if isinstance(one, np.generic) else one for one in several)


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
    row, start, stop = np.searchsorted(number, segments[:, 0]), segments[:, 1], segments[:, 2]
    outside = (start < 0) | (stop > frames[row]) | (start >= stop)
    overlap = np.append(False, (row[1:] == row[:-1]) & (start[1:] < stop[:-1]))
    for wrong, why in ((outside, "is empty or leaves its episode"), (overlap, "overlaps the one before")):
        if wrong.any():
            episode, first, end = segments[wrong][0].tolist()
            raise ConfigError(f"segment [{first}, {end}) of episode {episode} of dataset {name!r} {why}")
    return row, start, stop
