"""How many frames of every dataset of a mixture an epoch takes, and which ones.

A dataset is an endless sequence of *laps*, each a permutation of all its anchor runs. An epoch takes the next `frames`
of it and cuts by frame number if the border falls inside a run. So shares are exact, and over epochs every frame of a
dataset is emitted equally often, give or take one:

::

    dataset of 10 frames, 7 an epoch

    lap          0                     1                     2
    sequence     [c   ][a ][b     ]    [b     ][c   ][a ]    [a ][b     ]...
    epoch        |-----0------|-------1------|------2-----|----3...

If an epoch takes more than a lap, a frame comes twice in it; the lap tells the two apart.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError
from raypipe.plan.index import EpisodeIndex, Shares, concat_indexes, describe_selection
from raypipe.plan.keyhash import Ints, OrderKeys
from raypipe.plan.rates import count_taken, frames_taken, list_taken, ragged_arange
from raypipe.plan.spec import OrderSpec

UNVERSIONED: Final = "unversioned"
"""The revision of a dataset that has none."""

_COMPARED: Final = ("data", "selected frames", "frames per epoch", "revision")

_COLUMNS: Final = {
    "name": "names",
    "fingerprint": "fingerprints",
    "selection": "selections",
    "size": "sizes",
    "frames": "frames",
    "position": "positions",
    "revision": "revisions",
}
"""The keys of a dataset in a state, with their fields of `Shares`."""

_KINDS: Final[dict[str, Any]] = {
    column: int if column in ("sizes", "frames", "positions") else str for column in _COLUMNS.values()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorRuns:
    """The anchor runs of one epoch, as columns."""

    row: Ints
    """The row of the index that the run belongs to."""

    lap: Ints
    start: Ints
    stop: Ints

    def take(self, rows: Ints | NDArray[np.bool_]) -> "AnchorRuns":
        """Return some of the runs."""
        return AnchorRuns(row=self.row[rows], lap=self.lap[rows], start=self.start[rows], stop=self.stop[rows])


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

    Args:
        indexes: one per dataset.
        frames: one number per dataset, at least 1.
        revisions: of the datasets, such as commits of the Hub; empty: they have none.

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
    shares = Shares(
        names=index.dataset_names,
        frames=tuple(map(int, frames)),
        since=0,
        positions=(0,) * len(indexes),
        fingerprints=fingerprints,
        sizes=tuple(one.num_frames for one in indexes),
        selections=tuple(describe_selection(one).rsplit(" ", 1)[-1] for one in indexes),
        revisions=tuple(revisions) or (UNVERSIONED,) * len(indexes),
    )
    return replace(index, fingerprint=digest.hexdigest()[:32], shares=shares)


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
        row, lap = _all_parts(index, np.arange(len(index)), np.array([keys.epoch]))
        return AnchorRuns(row=row, lap=lap, start=index.start[row], stop=index.stop[row])
    parts = []
    order = np.argsort(index.dataset, kind="stable")
    borders = np.searchsorted(index.dataset[order], np.arange(len(index.dataset_names) + 1))
    for number, begin in enumerate(index.shares.begins(keys.epoch)):
        rows = order[borders[number] : borders[number + 1]]
        parts.append(_take_laps(index, rows, begin, begin + index.shares.frames[number], keys))
    columns = [field.name for field in fields(AnchorRuns)]
    return AnchorRuns(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in columns})


def run_frames(index: EpisodeIndex, runs: AnchorRuns, keys: OrderKeys) -> tuple[Ints, Ints]:
    """Return the run of every frame and the frame itself, without the frames that the laps do not have."""
    if index.rates is not None:
        return list_taken(index.rates, keys, runs.row, runs.lap, runs.start, runs.stop)
    length = runs.stop - runs.start
    return np.repeat(np.arange(len(length)), length), ragged_arange(runs.start, length)


def _take_laps(index: EpisodeIndex, rows: Ints, begin: int, end: int, keys: OrderKeys) -> AnchorRuns:
    """Return the runs in ``[begin, end)`` of the endless sequence of a dataset, in its order."""
    size = int(lap_sizes(index)[index.dataset[rows[0]]])
    laps = np.arange(begin // size, -(-end // size))
    row, lap = _all_parts(index, rows, laps)
    if keys.shuffle:
        key = keys.run_keys(index.dataset[row], lap, index.episode[row], index.start[row])
        whole_lap = lap if index.rates is None else lap // index.rates.parts[row]
        order = np.lexsort((key, whole_lap))
        row, lap = row[order], lap[order]
    start, stop = index.start[row], index.stop[row]
    length = stop - start if index.rates is None else count_taken(index.rates, keys, row, lap, start, stop)
    last = int(laps[0]) * size + np.cumsum(length)
    first = last - length
    skipped, cut = np.maximum(begin - first, 0), np.maximum(last - end, 0)
    kept = skipped + cut < length
    runs = AnchorRuns(row=row, lap=lap, start=start, stop=stop).take(kept)
    return _cut_ends(index, runs, skipped[kept], cut[kept], keys)


def _all_parts(index: EpisodeIndex, rows: Ints, laps: Ints) -> tuple[Ints, Ints]:
    """Return the rows and laps of the order that make up these laps over `rows`: one of each for every part."""
    row, lap = np.tile(rows, len(laps)), np.repeat(laps, len(rows))
    if index.rates is None:
        return row, lap
    most = index.rates.most[row]
    part = ragged_arange(np.zeros(len(row), dtype=np.int64), most)
    row, lap = np.repeat(row, most), np.repeat(lap * index.rates.parts[row], most) + part
    order = np.argsort(lap, kind="stable")
    return row[order], lap[order]


def _cut_ends(index: EpisodeIndex, runs: AnchorRuns, skipped: Ints, cut: Ints, keys: OrderKeys) -> AnchorRuns:
    """Return the runs without their first `skipped` and last `cut` frames: at the borders of an epoch."""
    if index.rates is None:
        return replace(runs, start=runs.start + skipped, stop=runs.stop - cut)
    start, stop = runs.start.copy(), runs.stop.copy()
    for i in np.flatnonzero(skipped + cut).tolist():
        frames = frames_taken(index.rates, keys, int(runs.row[i]), int(runs.lap[i]), int(start[i]), int(stop[i]))
        start[i], stop[i] = frames[skipped[i]], frames[len(frames) - cut[i] - 1] + 1
    return replace(runs, start=start, stop=stop)


def interleave(place: Ints, num_frames: Ints, jitter: Ints) -> Ints:
    """Return the order that spreads the spans of each dataset evenly over the epoch.

    Each dataset's share of the epoch is stretched to the length of the whole epoch. There, the place of a span is one
    of its own frames, chosen by `jitter`. So the spans of a dataset keep their order. At every prefix, the frames of a
    dataset differ from its part by less than its longest span plus its part of the sum of all datasets' longest spans.

    Args:
        place: frames of its dataset before each span's jittered frame; ascending within a dataset.
        num_frames: share of each span's dataset.
        jitter: added to `place`; below the span's length.
    """
    # 2**62 holds the largest share times the steps of the common axis: with 2**40 frames these are 4 million.
    bits = 62 - int(num_frames.max(initial=1)).bit_length()
    return np.argsort(((place + jitter) << bits) // num_frames, kind="stable")


def describe_changes(saved: Shares, given: Shares) -> tuple[str, ...]:
    """Return in words how two mixtures differ; empty if a run may pass from one to the other unchanged."""
    before, now = _by_name(saved), _by_name(given)
    lines = [f"{name!r} is in the state and not here" for name in before if name not in now]
    lines += [f"{name!r} is here and not in the state" for name in now if name not in before]
    for name in (name for name in before if name in now):
        for what, one, other in zip(_COMPARED, before[name], now[name], strict=True):
            is_known = what != "revision" or UNVERSIONED not in (one, other)
            if one != other and is_known:
                lines.append(f"{what} of {name!r}: {one} in the state, {other} here")
    if not lines and saved.names != given.names:
        lines.append(f"the order of the datasets: {', '.join(saved.names)} in the state, {', '.join(given.names)} here")
    return tuple(lines)


def go_on_with(saved: Shares, given: Shares, *, epoch: int) -> Shares:
    """Return `given` with every dataset that `saved` has with the same data at the position it had at `epoch`.

    A dataset with another selection of frames begins its next lap: the rest of the lap before is of another order.
    """
    if not describe_changes(saved, given):
        return replace(given, since=saved.since, positions=saved.positions)
    positions = [_position(name, saved, given, epoch) for name in given.names]
    return replace(given, since=epoch, positions=tuple(positions))


def _position(name: str, saved: Shares, given: Shares, epoch: int) -> int:
    if name not in saved.names:
        return 0
    was, now = saved.names.index(name), given.names.index(name)
    if saved.fingerprints[was] != given.fingerprints[now]:
        return 0
    position = saved.begins(epoch)[was]
    if saved.selections[was] == given.selections[now]:
        return position
    return -(-position // saved.sizes[was]) * given.sizes[now]


def shares_to_dict(shares: Shares) -> dict[str, Any]:
    """Return shares as a JSON object."""
    columns = [getattr(shares, column) for column in _COLUMNS.values()]
    return {
        "since": shares.since,
        "members": [dict(zip(_COLUMNS, row, strict=True)) for row in zip(*columns, strict=True)],
    }


def shares_from_dict(saved: Any) -> Shares:
    """Return the shares from a JSON object; raises `KeyError`, `TypeError` or `ValueError` if it has none."""
    members = saved["members"]
    columns = {column: tuple(_KINDS[column](one[key]) for one in members) for key, column in _COLUMNS.items()}
    return Shares(since=int(saved["since"]), **columns)


def lap_sizes(index: EpisodeIndex) -> NDArray[np.int64]:
    """Return the anchor frames of every dataset, by their rates: the length of its laps."""
    if index.rates is not None:
        return np.array(index.rates.sizes, dtype=np.int64)
    return np.bincount(
        index.dataset, weights=(index.stop - index.start).astype(np.float64), minlength=len(index.dataset_names)
    ).astype(np.int64)


def first_laps(index: EpisodeIndex, epoch: int) -> NDArray[np.int64]:
    """Return for every dataset the lap in which the epoch begins; without shares and rates an epoch is a lap."""
    first = np.full(len(index.dataset_names), epoch)
    if index.shares is not None:
        first = np.array(index.shares.begins(epoch)) // lap_sizes(index)
    return first if index.rates is None else first * index.rates.laps


def _by_name(shares: Shares) -> dict[str, tuple[Any, ...]]:
    rows = zip(shares.fingerprints, shares.selections, shares.frames, shares.revisions, strict=True)
    return dict(zip(shares.names, rows, strict=True))
