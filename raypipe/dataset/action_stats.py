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
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset.windows import ActionMap, window_rows
from raypipe.errors import ConfigError, DatasetError
from raypipe.format import QUANTILES, DatasetMeta, RowReader, column_values
from raypipe.plan import EpisodeIndex, describe_selection
from raypipe.storage import open_storage, remote_stamp, retry_transient
from raypipe.text import count_bar, parse_json

if TYPE_CHECKING:
    from raypipe.dataset.dataset import Dataset

STATS_FOLDER: Final = "~/.cache/raypipe/stats"

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


_RowRun = tuple[NDArray[np.float32], NDArray[Any], NDArray[np.int64]]
"""The actions ``(frames, D)`` and states ``(frames, S)`` of an episode, and its anchor frames."""


def action_stats(dataset: "Dataset", index: EpisodeIndex, *, folder: str = STATS_FOLDER) -> RepresentedStats:
    """Return the statistics of actions in their representation; reuse those kept earlier if the files are the same.

    If nothing is kept, this reads the action and the state of every row and holds them in memory.

    Args:
        index: the anchor frames, of this dataset alone.
        folder: where statistics are kept for the next time, by fingerprint.
    """
    actions = dataset.actions
    assert actions is not None, "stored statistics are those of actions as they are stored"
    offsets = dataset.window.offsets.get(actions.action, (0,))
    representation, name = str(actions.spec), _file_name(dataset.meta, index, actions, offsets)
    found = _find(folder, name, representation) if name else None
    if found is None:
        found = _measure(dataset, index, actions, offsets)
        if name:
            _keep(folder, name, representation, found)
    return RepresentedStats(found, representation, len(offsets))


def _measure(
    dataset: "Dataset", index: EpisodeIndex, actions: ActionMap, offsets: Sequence[int]
) -> dict[str, NDArray[np.float64]]:
    runs = _read(dataset, index, actions)
    width = dataset.row_features[actions.action].shape[0]
    moments, count, upper = _first_pass(_vectors(runs, actions, offsets), width)
    quantiles = _second_pass(_vectors(runs, actions, offsets), count, upper)
    return {**moments, **quantiles, "count": np.array([count], dtype=np.float64)}


def _read(dataset: "Dataset", index: EpisodeIndex, actions: ActionMap) -> list[_RowRun]:
    meta, names, runs = dataset.meta, (actions.action, actions.state), []
    reader = RowReader(meta, names)
    with count_bar("statistics of actions", len(index), is_on=True) as advance:
        for i in range(len(index)):
            table = reader.read_episode(meta.episodes.find_row(int(index.episode[i])))
            place = f"episode {index.episode[i]} of {meta.root!r}"
            values = [np.asarray(column_values(table, dataset.row_features[name], place)) for name in names]
            for name, numbers in zip(names, values, strict=True):
                if not np.isfinite(numbers).all():
                    raise DatasetError(
                        f"feature {name!r} of {place} has NaN or infinite values, and statistics of actions need "
                        f"numbers. Leave the episode out by selection={{'exclude': ({index.episode[i]},)}}, and take "
                        f"pipe.stats."
                    )
            runs.append((values[0], values[1], _anchors(index, i)))
            advance(1)
    return runs


def _anchors(index: EpisodeIndex, row: int) -> NDArray[np.int64]:
    """Return the frames that an epoch can take from a run of the index: all but those of weight 0."""
    frames = np.arange(index.start[row], index.stop[row])
    if index.rates is None:
        return frames
    rows = np.full(len(frames), row)
    return frames[index.rates.position(rows, frames + 1) > index.rates.position(rows, frames)]


def _vectors(runs: list[_RowRun], actions: ActionMap, offsets: Sequence[int]) -> Iterator[NDArray[np.float32]]:
    """Yield the actions that are not padding, ``(M, D)`` float32, some anchors at a time."""
    for values, states, frames in runs:
        for begin in range(0, len(frames), _ANCHORS_AT_ONCE):
            anchors = frames[begin : begin + _ANCHORS_AT_ONCE]
            slots, is_pad = window_rows(anchors, len(values), offsets)
            encoded = actions.encode(values[slots], states[anchors], has_window=True)
            yield encoded.reshape(*slots.shape, -1)[~is_pad]


def _first_pass(
    vectors: Iterator[NDArray[np.float32]], width: int
) -> tuple[dict[str, NDArray[np.float64]], int, NDArray[np.int64]]:
    """Return the moments, the count, and for each number of the vector a histogram of the upper 16 bits."""
    count, upper = 0, np.zeros((width, _BINS), dtype=np.int64)
    mean, spread = np.zeros(width), np.zeros(width)
    least, greatest = np.full(width, np.inf), np.full(width, -np.inf)
    for values in vectors:
        if not len(values):
            continue
        numbers = values.astype(np.float64)
        own = numbers.mean(axis=0)
        total, distance = count + len(values), own - mean
        # Chan's formula: as accurate as two passes, even when the mean is large.
        spread += ((numbers - own) ** 2).sum(axis=0) + distance**2 * (count * len(values) / total)
        mean += distance * (len(values) / total)
        count = total
        least, greatest = np.minimum(least, numbers.min(axis=0)), np.maximum(greatest, numbers.max(axis=0))
        keys = _keys(values) >> np.uint32(16)
        for dim in range(width):
            upper[dim] += np.bincount(keys[:, dim], minlength=_BINS)
    if not count:
        raise ConfigError(
            "every slot of every window of the actions is padding: there is nothing to make statistics of. Give a "
            "window that begins within the episodes."
        )
    return {"min": least, "max": greatest, "mean": mean, "std": np.sqrt(spread / count)}, count, upper


def _second_pass(
    vectors: Iterator[NDArray[np.float32]], count: int, upper: NDArray[np.int64]
) -> dict[str, NDArray[np.float64]]:
    """Return the quantiles: they interpolate between the values at some ranks, whose upper 16 bits are known."""
    position = np.array(list(QUANTILES.values())) * (count - 1)
    below = np.floor(position).astype(np.int64)
    ranks = np.stack([below, np.minimum(below + 1, count - 1)])
    ends = np.cumsum(upper, axis=1)
    # For every number of the vector and every rank: the upper half of the value, and how many values have a lesser one.
    halves = np.stack([np.searchsorted(end, ranks, side="right") for end in ends])
    before = np.stack([(end - one)[at] for end, one, at in zip(ends, upper, halves, strict=True)])
    lower = {
        (dim, half): np.zeros(_BINS, dtype=np.int64)
        for dim, own in enumerate(halves)
        for half in np.unique(own).tolist()
    }
    for values in vectors:
        keys = _keys(values)
        high, low = keys >> np.uint32(16), keys & _LOW
        for dim, half in lower:
            lower[dim, half] += np.bincount(low[high[:, dim] == half, dim], minlength=_BINS)
    keys = np.empty(halves.shape, dtype=np.uint32)
    for place in np.ndindex(*halves.shape):
        half = int(halves[place])
        rank = ranks[place[1:]] - before[place]
        keys[place] = (half << 16) | int(np.searchsorted(np.cumsum(lower[place[0], half]), rank, side="right"))
    bits = np.where(keys & _SIGN, keys & ~_SIGN, ~keys)
    ordered = bits.view(np.float32).astype(np.float64)
    quantiles = ordered[:, 0] + (ordered[:, 1] - ordered[:, 0]) * (position - below)
    return {name: quantiles[:, i] for i, name in enumerate(QUANTILES)}


def _keys(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return integers that sort in the same order as the values."""
    # Minus zero becomes zero.
    bits = np.ascontiguousarray(values + np.float32(0)).view(np.uint32)
    return np.asarray(np.where(bits & _SIGN, ~bits, bits | _SIGN), dtype=np.uint32)


def _file_name(meta: DatasetMeta, index: EpisodeIndex, actions: ActionMap, offsets: Sequence[int]) -> str:
    """Return the name of the file that keeps the statistics: a hash of all their inputs, or empty without a state."""
    state = _data_state(meta)
    if state is None:
        return ""
    about = {
        "version": _VERSION,
        "root": meta.storage.uri,
        "files": state,
        "order": meta.order_fingerprint,
        "frames": describe_selection(index),
        "offsets": list(offsets),
        "actions": [str(actions.spec), actions.action, actions.state],
        "numbers": [actions.dims, actions.state_dims, actions.periods],
    }
    return f"{hashlib.sha256(json.dumps(about).encode(errors='surrogatepass')).hexdigest()[:32]}.json"


def _data_state(meta: DatasetMeta) -> list[str] | None:
    """Return a state that changes when rows change: a commit, or versions of files; None if unknown."""
    storage = meta.storage
    if storage.commit:
        return [storage.commit]
    if not storage.is_listable:
        return None
    if storage.is_local:
        # Size and time, without the inode: some mounts number it anew. A missing file has none; reading names it.
        names = dict.fromkeys(map(meta.data_file, range(len(meta.episodes))))
        stamps = [" ".join(storage.version(name).split("-")[:2]) for name in names]
    else:
        files = retry_transient(lambda: storage.filesystem.find(storage.path, detail=True))
        stamps = [remote_stamp(info) for _, info in sorted(files.items())]
    return stamps if all(stamps) else None


def _find(folder: str, name: str, representation: str) -> dict[str, NDArray[np.float64]] | None:
    try:
        kept = parse_json(open_storage(os.path.expanduser(folder)).read_bytes(name))
        values = {key: np.asarray(value, dtype=np.float64) for key, value in kept["stats"].items()}
        return values if kept["representation"] == representation and "count" in values else None
    except (DatasetError, OSError, ValueError, KeyError, TypeError, AttributeError):
        # A missing or damaged file is computed again.
        return None


def _keep(folder: str, name: str, representation: str, stats: Mapping[str, NDArray[np.float64]]) -> None:
    plain = {key: value.tolist() for key, value in stats.items()}
    content = json.dumps({"representation": representation, "stats": plain}).encode()
    # If the home folder is not writable: compute again next time.
    with suppress(DatasetError, OSError):
        open_storage(os.path.expanduser(folder)).write_atomic(name, content)
