"""Statistics of actions as a window represents them: computed exactly from all rows, once, and kept in a file.

Every window slot of every anchor frame counts once, unless it is padding; each is one vector. So a window of 50 slots
counts an action up to 50 times, each time relative to another state. Minimum, maximum, mean and standard deviation (of
the population) cover all these vectors, in float64. Quantiles equal ``numpy.quantile`` on all of them: they are neither
an envelope nor read from bins.

::

    data files -> actions and states in memory     4 bytes a number
      | first pass     moments, and how many values share their upper 16 bits
      | second pass    the lower 16 bits, around the ranks that the quantiles need
      v RepresentedStats -> FOLDER/<fingerprint>.json
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset.windows import ActionMap, window_rows
from raypipe.errors import ConfigError, DatasetError
from raypipe.format import DatasetMeta, RowReader, column_values
from raypipe.plan import EpisodeIndex, describe_selection
from raypipe.storage import open_storage, remote_stamp, retry_transient
from raypipe.text import count_bar, parse_json

if TYPE_CHECKING:
    from raypipe.dataset.dataset import Dataset

STATS_FOLDER: Final = "~/.cache/raypipe/stats"

QUANTILES: Final = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}

_VERSION: Final = 2
"""Raise it whenever the same actions would give other numbers."""

_ANCHORS_AT_ONCE: Final = 2048
_BINS: Final = 1 << 16
_LOW: Final = np.uint32(_BINS - 1)
_SIGN: Final = np.uint32(1 << 31)


class RepresentedStats(dict[str, NDArray[np.float64]]):
    """The statistics of a feature in another representation than the dataset stores."""

    representation: str
    """How the values are represented: the text of the `ActionSpec`."""

    num_slots: int
    """Frames in each window: later frames differ more from the state."""

    def __init__(self, values: Mapping[str, NDArray[np.float64]], representation: str, num_slots: int) -> None:
        super().__init__(values)
        self.representation = representation
        self.num_slots = num_slots

    def __reduce__(self) -> tuple[Any, ...]:
        return RepresentedStats, (dict(self), self.representation, self.num_slots)


@dataclass(frozen=True, kw_only=True)
class _ActionSource:
    """The actions of some frames of one dataset, and how they are represented."""

    dataset: "Dataset"
    actions: ActionMap
    offsets: Sequence[int]
    index: EpisodeIndex


def action_stats(dataset: "Dataset", index: EpisodeIndex, *, folder: str = STATS_FOLDER) -> RepresentedStats:
    """Return the statistics of actions in their representation; reuse those kept earlier if the files are the same.

    If nothing is kept, this reads the action and the state of every row and holds them in memory.

    Args:
        index: the anchor frames, of this dataset alone.
        folder: where statistics are kept for the next time, by fingerprint.
    """
    assert dataset.actions is not None, "stored statistics are those of actions as they are stored"
    source = _ActionSource(
        dataset=dataset,
        actions=dataset.actions,
        offsets=dataset.window.offsets.get(dataset.actions.action, (0,)),
        index=index,
    )
    name = _file_name(source)
    kept = _find(folder, name, source) if name else None
    if kept is not None:
        return kept
    found = RepresentedStats(_measure(source), str(source.actions.spec), len(source.offsets))
    if name:
        _keep(folder, name, found)
    return found


def _measure(source: _ActionSource) -> dict[str, NDArray[np.float64]]:
    read = []
    with count_bar("statistics of actions", len(source.index), is_on=True) as advance:
        for run in _read(source):
            read.append(run)
            advance(1)
    first = _FirstPass(source.dataset.row_features[source.actions.action].shape[0])
    for values in _vectors(source, read):
        first.add(values)
    ranks = _Ranks(first)
    for values in _vectors(source, read):
        ranks.add(values)
    return {**first.result(), **ranks.result(), "count": np.array([first.count], dtype=np.float64)}


@dataclass(frozen=True, slots=True)
class _RowRun:
    """The actions ``(frames, D)`` and states ``(frames, S)`` of an episode, and its anchor frames."""

    actions: NDArray[np.float32]
    states: NDArray[Any]
    anchors: NDArray[np.int64]


def _read(source: _ActionSource) -> Iterator[_RowRun]:
    meta, index, features = source.dataset.meta, source.index, source.dataset.row_features
    names = (source.actions.action, source.actions.state)
    reader = RowReader(meta, names)
    for i in range(len(index)):
        row = meta.episodes.find_row(int(index.episode[i]))
        table = reader.read_episode(row)
        place = f"episode {index.episode[i]} of {meta.root!r}"
        actions, states = (np.asarray(column_values(table, features[name], place)) for name in names)
        for name, values in zip(names, (actions, states), strict=True):
            if not np.isfinite(values).all():
                raise DatasetError(
                    f"feature {name!r} of {place} has NaN or infinite values, and statistics of actions need numbers. "
                    f"Leave the episode out by selection={{'exclude': ({index.episode[i]},)}}, and take pipe.stats."
                )
        yield _RowRun(actions, states, _anchors(index, i))


def _anchors(index: EpisodeIndex, row: int) -> NDArray[np.int64]:
    """Return the frames that an epoch can take from a run of the index: all but those of weight 0."""
    frames = np.arange(index.start[row], index.stop[row])
    if index.rates is None:
        return frames
    rows = np.full(len(frames), row)
    return frames[index.rates.position(rows, frames + 1) > index.rates.position(rows, frames)]


def _vectors(source: _ActionSource, read: list[_RowRun]) -> Iterator[NDArray[np.float32]]:
    """Yield the actions that are not padding, ``(M, D)`` float32, some anchors at a time."""
    for run in read:
        for begin in range(0, len(run.anchors), _ANCHORS_AT_ONCE):
            anchors = run.anchors[begin : begin + _ANCHORS_AT_ONCE]
            slots, is_pad = window_rows(anchors, len(run.actions), source.offsets)
            encoded = source.actions.encode(run.actions[slots], run.states[anchors], has_window=True)
            yield encoded.reshape(*slots.shape, -1)[~is_pad]


class _FirstPass:
    """Moments, and for each number of the vector a histogram of the upper 16 bits."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self.upper = np.zeros((width, _BINS), dtype=np.int64)
        self._mean = np.zeros(width)
        self._spread = np.zeros(width)
        self._least = np.full(width, np.inf)
        self._greatest = np.full(width, -np.inf)

    def add(self, values: NDArray[np.float32]) -> None:
        if not len(values):
            return
        numbers = values.astype(np.float64)
        mean = numbers.mean(axis=0)
        total, distance = self.count + len(values), mean - self._mean
        # Chan's formula: as accurate as two passes, even when the mean is large.
        self._spread += ((numbers - mean) ** 2).sum(axis=0) + distance**2 * (self.count * len(values) / total)
        self._mean += distance * (len(values) / total)
        self.count = total
        self._least = np.minimum(self._least, numbers.min(axis=0))
        self._greatest = np.maximum(self._greatest, numbers.max(axis=0))
        keys = _keys(values) >> np.uint32(16)
        for dim in range(values.shape[1]):
            self.upper[dim] += np.bincount(keys[:, dim], minlength=_BINS)

    def result(self) -> dict[str, NDArray[np.float64]]:
        if not self.count:
            raise ConfigError(
                "every slot of every window of the actions is padding: there is nothing to make statistics of. Give a "
                "window that begins within the episodes."
            )
        std = np.sqrt(self._spread / self.count)
        return {"min": self._least, "max": self._greatest, "mean": self._mean, "std": std}


class _Ranks:
    """The values at the ranks that the quantiles interpolate between."""

    def __init__(self, first: _FirstPass) -> None:
        position = np.array(list(QUANTILES.values())) * (first.count - 1)
        below = np.floor(position).astype(np.int64)
        self._part = position - below
        self._ranks = np.stack([below, np.minimum(below + 1, first.count - 1)])
        ends = np.cumsum(first.upper, axis=1)
        self._upper = np.stack([np.searchsorted(end, self._ranks, side="right") for end in ends])
        """The upper half of the value, for every number and rank."""
        self._before = np.stack([(end - one)[at] for end, one, at in zip(ends, first.upper, self._upper, strict=True)])
        self._lower = {
            (dim, int(upper)): np.zeros(_BINS, dtype=np.int64)
            for dim, uppers in enumerate(self._upper)
            for upper in np.unique(uppers)
        }

    def add(self, values: NDArray[np.float32]) -> None:
        keys = _keys(values)
        upper, lower = keys >> np.uint32(16), keys & _LOW
        for dim, wanted in self._lower:
            self._lower[dim, wanted] += np.bincount(lower[upper[:, dim] == wanted, dim], minlength=_BINS)

    def result(self) -> dict[str, NDArray[np.float64]]:
        ordered = np.empty(self._upper.shape)
        for place in np.ndindex(*self._upper.shape):
            dim, rank = place[0], self._ranks[place[1:]]
            upper = int(self._upper[place])
            ends = np.cumsum(self._lower[dim, upper])
            lower = int(np.searchsorted(ends, rank - self._before[place], side="right"))
            ordered[place] = _value_of((upper << 16) | lower)
        low, high = ordered[:, 0], ordered[:, 1]
        quantiles = low + (high - low) * self._part
        return {name: quantiles[:, i] for i, name in enumerate(QUANTILES)}


def _keys(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return integers that sort in the same order as the values."""
    # Minus zero becomes zero.
    bits = np.ascontiguousarray(values + np.float32(0)).view(np.uint32)
    return np.asarray(np.where(bits & _SIGN, ~bits, bits | _SIGN), dtype=np.uint32)


def _value_of(key: int) -> float:
    bits = np.uint32(key)
    return float(np.array([bits & ~_SIGN if bits & _SIGN else ~bits], dtype=np.uint32).view(np.float32)[0])


def _file_name(source: _ActionSource) -> str:
    """Return the name of the file that keeps the statistics: a hash of all their inputs, or empty without a state."""
    meta, actions = source.dataset.meta, source.actions
    state = _data_state(meta)
    if state is None:
        return ""
    about = {
        "version": _VERSION,
        "root": meta.storage.uri,
        "files": state,
        "order": meta.order_fingerprint,
        "frames": describe_selection(source.index),
        "offsets": list(source.offsets),
        "actions": [str(actions.spec), actions.action, actions.state],
        "numbers": [actions.dims, actions.state_dims, actions.periods],
    }
    return f"{hashlib.sha256(json.dumps(about).encode(errors='surrogatepass')).hexdigest()[:32]}.json"


def _data_state(meta: DatasetMeta) -> list[str] | None:
    """Return a state that changes when rows change: a commit, or sizes and times of data files; None if unknown."""
    storage = meta.storage
    if storage.commit:
        return [storage.commit]
    names = dict.fromkeys(map(meta.data_file, range(len(meta.episodes))))
    if storage.is_local:
        try:
            found = [os.stat(storage.locate(name)) for name in names]
        except OSError:
            # A file is missing: the error from reading names it.
            return None
        return [f"{one.st_size} {one.st_mtime_ns}" for one in found]
    if not storage.is_listable:
        return None
    files = retry_transient(lambda: storage.filesystem.find(storage.path, detail=True))
    stamps = [remote_stamp(info) for _, info in sorted(files.items())]
    return stamps if all(stamps) else None


def _find(folder: str, name: str, source: _ActionSource) -> RepresentedStats | None:
    try:
        kept = parse_json(open_storage(os.path.expanduser(folder)).read_bytes(name))
        values = {key: np.asarray(value, dtype=np.float64) for key, value in kept["stats"].items()}
    except (DatasetError, OSError, ValueError, KeyError, TypeError, AttributeError):
        # A missing or damaged file is computed again.
        return None
    is_whole = kept.get("representation") == str(source.actions.spec) and "count" in values
    return RepresentedStats(values, kept["representation"], len(source.offsets)) if is_whole else None


def _keep(folder: str, name: str, stats: RepresentedStats) -> None:
    plain = {key: value.tolist() for key, value in stats.items()}
    content = json.dumps({"representation": stats.representation, "stats": plain}).encode()
    try:
        open_storage(os.path.expanduser(folder)).write_atomic(name, content)
    except (DatasetError, OSError):
        # The home folder is not writable: compute again next time.
        return
