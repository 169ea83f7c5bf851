"""`MixtureStats`: the statistics of every dataset of a mixture under the mixture's names and widths, and pooled.

A vector that is padded to the mixture's width has statistics of that width. Padding gets made-up statistics that
normalise a padded 0 to 0 in every mode; their ``count`` is 0, so pooled statistics ignore them::

             own numbers (6)      padding (8)
    mean     0.31 ... -0.02       0 ... 0
    std      0.12 ...  0.40       1 ... 1
    min q01  -1.1 ... -2.00       -1 ... -1        q50 is 0
    max q99   1.4 ...  2.10       1 ... 1
    count     900 ...   900       0 ... 0

If a dataset lacks a feature, batches fill it with zeros, and its entry is all padding. If a dataset has a feature but
stores no statistics of it, its entry does not have the feature.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import ABSOLUTE, RepresentedStats, Schema
from raypipe.errors import ConfigError, DatasetError, as_damage, noting
from raypipe.format import INDEX_FEATURES, MOMENTS, FeatureStats, Stats, is_low, is_quantile, pool_stats
from raypipe.storage import Storage, open_storage
from raypipe.text import parse_json

_VERSION: Final = 1
"""Of the JSON."""
_FILL: Final = {"mean": 0.0, "std": 1.0, "count": 0.0, "q50": 0.0}
_ALONE: Final = "dataset"
"""The name of a single dataset, outside a mixture."""
_ALL_STATISTICS: Final = (*MOMENTS, "q01", "q10", "q50", "q90", "q99", "count")


class SavedAsJson:
    """A value that is saved as JSON and comes back unchanged; any other text raises a `ConfigError` that names it."""

    _KIND: ClassVar[str]

    def to_json(self) -> str:
        """Return the value as JSON; `from_json` restores it with the same numbers."""
        return json.dumps({"kind": self._KIND, "version": _VERSION, **self._to_plain()}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, place: str = "") -> Self:
        """Return the value that `to_json` wrote.

        Args:
            place: the name of the text in messages.
        """
        place = repr(place or f"the JSON of a {cls._KIND}")
        with as_damage(lambda error: ConfigError(f"{place} is not JSON: {error}. Write it again.")):
            found = parse_json(text)
        if not isinstance(found, dict) or found.get("kind") != cls._KIND:
            raise ConfigError(f"{place} is not the JSON of a {cls._KIND}; write it again, or give the right file")
        version = found.get("version")
        if version != _VERSION:
            raise ConfigError(
                f"{place} is of version {version!r}; this raypipe reads version {_VERSION}. Write it again."
            )
        damaged = f"{place} is damaged"
        with (
            noting(f"while reading {place}"),
            as_damage(lambda error: ConfigError(f"{damaged}: {type(error).__name__}: {error}. Write it again.")),
        ):
            return cls._from_plain(found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON to `path`, a local path or an fsspec URI; a reader sees all of it or nothing."""
        storage, name = _split(path)
        storage.write_atomic(name, self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return what `save` wrote to `path`."""
        storage, name = _split(path)
        if not storage.exists(name):
            raise ConfigError(f"there is no file {storage.locate(name)!r}; give the path that was saved to")
        with as_damage(lambda error: ConfigError(f"{storage.locate(name)!r} is not text: {error}. Write it again.")):
            text = storage.read_bytes(name).decode()
        return cls.from_json(text, os.fspath(path))

    def _to_plain(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def _from_plain(cls, plain: Mapping[str, Any]) -> Self:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class MemberStats:
    """The statistics that one dataset of a mixture stores."""

    name: str
    robot_type: str
    stats: Stats
    """Under the dataset's own names."""
    num_frames: int = 0
    """The count to use for statistics that have none, such as those of v2.0; 0 for unknown."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MixtureStats(SavedAsJson):
    """The statistics of a mixture: by dataset, by robot, and over all."""

    _KIND: ClassVar[str] = "MixtureStats"

    datasets: Mapping[str, Stats]
    """By name of the member, in the order of ``dataset_index``. Quantiles are as the dataset stores them; LeRobot
    stores envelopes over episodes."""

    robots: Mapping[str, Stats]
    """By robot type: pooled over its datasets."""

    pooled: Stats
    """Over all datasets: every frame counts equally, whatever the weights of the mixture."""

    robot_types: Mapping[str, str]
    """The robot type of each member."""

    cameras: tuple[str, ...]
    """The features with statistics of pixels, divided by 255."""

    envelopes: tuple[str, ...]
    """Entries with envelopes over several datasets instead of true quantiles: ``pooled/<feature>`` and
    ``robots/<robot type>/<feature>``."""

    representations: Mapping[str, str] = field(default_factory=dict)
    """By feature, the representation of the values: the text of the `ActionSpec`. A feature that is not listed has
    statistics of the values that the datasets store."""

    windows: Mapping[str, int] = field(default_factory=dict)
    """By feature in another representation, the frames of the windows behind its statistics: values of longer windows
    are on another scale. Empty for statistics saved without it."""

    def __post_init__(self) -> None:
        told: dict[str, str] = {}
        slots: dict[str, int] = {}
        for feature, values in (pair for entry in self.datasets.values() for pair in entry.items()):
            if isinstance(values, RepresentedStats):
                told[feature], slots[feature] = values.representation, values.num_slots
        object.__setattr__(self, "representations", {**told, **self.representations})
        object.__setattr__(self, "windows", {**slots, **self.windows})
        if self.robot_types.keys() != self.datasets.keys():
            raise ConfigError(
                f"robot_types names {sorted(self.robot_types)} and datasets {sorted(self.datasets)}; give a robot type "
                f"for each dataset"
            )
        if self.robots.keys() != set(self.robot_types.values()):
            raise ConfigError(
                f"robots has {sorted(self.robots)} and robot_types {sorted(set(self.robot_types.values()))}; give "
                f"statistics for each robot type"
            )

    def __repr__(self) -> str:
        features = dict.fromkeys(feature for entry in self.datasets.values() for feature in entry)
        return (
            f"MixtureStats(datasets: {', '.join(self.datasets)}; robots: {', '.join(self.robots)}; features: "
            f"{', '.join(features)})"
        )

    def _to_plain(self) -> dict[str, Any]:
        return {
            "datasets": {name: _plain_stats(entry) for name, entry in self.datasets.items()},
            "robots": {name: _plain_stats(entry) for name, entry in self.robots.items()},
            "pooled": _plain_stats(self.pooled),
            "robot_types": dict(self.robot_types),
            "cameras": list(self.cameras),
            "envelopes": list(self.envelopes),
            **({"representations": dict(self.representations)} if self.representations else {}),
            **({"windows": dict(self.windows)} if self.windows else {}),
        }

    @classmethod
    def _from_plain(cls, plain: Mapping[str, Any]) -> Self:
        return cls(
            datasets={str(name): _stats_of_plain(entry) for name, entry in plain["datasets"].items()},
            robots={str(name): _stats_of_plain(entry) for name, entry in plain["robots"].items()},
            pooled=_stats_of_plain(plain["pooled"]),
            robot_types={str(name): str(robot) for name, robot in plain["robot_types"].items()},
            cameras=tuple(map(str, plain["cameras"])),
            envelopes=tuple(map(str, plain["envelopes"])),
            representations={str(name): str(text) for name, text in plain.get("representations", {}).items()},
            windows={str(name): int(slots) for name, slots in plain.get("windows", {}).items()},
        )


def single_stats(stats: Stats) -> MixtureStats:
    """Return the statistics of a single dataset, `Dataset.stats`, as those of a mixture with one member.

    It recognises cameras by the shape of their statistics, ``(channels, 1, 1)``.
    """
    axes = {name: {np.shape(entry[key])[1:] for key in MOMENTS if key in entry} for name, entry in stats.items()}
    return MixtureStats(
        datasets={_ALONE: stats},
        robots={"": stats},
        pooled=stats,
        robot_types={_ALONE: ""},
        cameras=tuple(name for name, found in axes.items() if found == {(1, 1)}),
        envelopes=(),
    )


def mixture_stats(schema: Schema, members: Sequence[MemberStats]) -> MixtureStats:
    """Return the statistics of a mixture from those that its datasets store.

    Vectors and cameras have statistics. Texts have none, and index features are left out, since they only say where a
    frame is. Datasets without statistics take no part in pooling. A feature is not pooled if a count is missing, since
    its datasets then cannot be weighed against each other.

    Args:
        members: in the order of `schema.members`.
    """
    names = [member.name for member in members]
    if len(members) != len(schema.members) or len(set(names)) != len(names):
        raise ConfigError(
            f"the schema is of {len(schema.members)} datasets, and statistics are given of {names}; give those of each "
            f"dataset once, in the order of the mixture"
        )
    datasets = {member.name: _entry(schema, number, member) for number, member in enumerate(members)}
    _check_alike(datasets)
    robot_types = {member.name: member.robot_type for member in members}
    pooled, envelopes = _pool_datasets(datasets, "pooled")
    robots: dict[str, Stats] = {}
    for robot in dict.fromkeys(robot_types.values()):
        group = {name: entry for name, entry in datasets.items() if robot_types[name] == robot}
        robots[robot], enveloped = _pool_datasets(group, f"robots/{robot}")
        envelopes += enveloped
    return MixtureStats(
        datasets=datasets,
        robots=robots,
        pooled=pooled,
        robot_types=robot_types,
        cameras=schema.cameras,
        envelopes=tuple(envelopes),
    )


def _check_alike(datasets: Mapping[str, Stats]) -> None:
    """Raise for a feature of which datasets have statistics in unlike representations."""
    found: dict[str, dict[str, str]] = {}
    for member, entry in datasets.items():
        for name, values in entry.items():
            if not _is_padding(values):
                found.setdefault(name, {})[member] = getattr(values, "representation", ABSOLUTE)
    for name, by_member in found.items():
        if len(set(by_member.values())) > 1:
            listed = ", ".join(f"{text!r} in {member!r}" for member, text in by_member.items())
            raise ConfigError(f"the statistics of {name!r} are of unlike representations: {listed}; give one to all")


def _entry(schema: Schema, number: int, member: MemberStats) -> Stats:
    """Return the statistics of one dataset under the names and widths of the mixture."""
    own_names = schema.members[number].own_names
    entry: dict[str, FeatureStats] = {}
    for name, feature in schema.features.items():
        if name in INDEX_FEATURES or feature.kind in ("string", "language"):
            continue
        shape = (1 if feature.is_depth else 3, 1, 1) if feature.is_camera else feature.shape
        if name not in own_names:
            entry[name] = {statistic: np.full(shape, _fill(statistic)) for statistic in _ALL_STATISTICS}
            continue
        own = own_names[name]
        values = member.stats.get(own, {})
        stored = {key: value for key, value in values.items() if key in MOMENTS or is_quantile(key)}
        if stored:
            place = f"{own!r} in dataset {member.name!r}"
            own_shape = (schema.widths[name][number], *shape[1:]) if name in schema.widths else shape
            fitted = {key: _pad(_fit(value, own_shape, key, place), shape, key) for key, value in stored.items()}
            count = _find_count(member, own, place)
            if count and name in schema.widths:
                fitted["count"] = _pad(np.full(own_shape, count), shape, "count")
            elif count:
                fitted["count"] = np.array([count])
            entry[name] = fitted
            if isinstance(values, RepresentedStats):
                entry[name] = RepresentedStats(fitted, values.representation, values.num_slots)
    return entry


def _fill(statistic: str) -> float:
    return _FILL.get(statistic, -1.0 if is_low(statistic) else 1.0)


def _fit(value: NDArray[np.float64], shape: tuple[int, ...], statistic: str, place: str) -> NDArray[np.float64]:
    """Return a statistic in the shape of its feature: files differ in the axes of scalars and of cameras."""
    if value.size == np.prod(shape):
        return value.reshape(shape)
    # A grey camera is decoded to three channels; LeRobot has one row of statistics for a matrix.
    if len(shape) > 1 and value.size in (1, shape[-1]):
        return np.broadcast_to(value.reshape(-1), shape).copy()
    raise DatasetError(
        f"the {statistic!r} of {place} has the shape {value.shape}, and the feature has {shape}. Make the statistics "
        f"again."
    )


def _find_count(member: MemberStats, own: str, place: str) -> float:
    """Return the count of values behind the statistics, 0 if it is unknown."""
    if "count" not in member.stats[own]:
        return float(member.num_frames)
    stored = member.stats[own]["count"]
    if stored.size != 1 or not 0 < stored.item() < np.inf:
        raise DatasetError(
            f"the 'count' of {place} is {stored.tolist()}; expected one number above 0. Make the statistics again."
        )
    return float(stored.item())


def _pad(value: NDArray[np.float64], shape: tuple[int, ...], statistic: str) -> NDArray[np.float64]:
    return np.concatenate([value, np.full((shape[0] - value.shape[0], *shape[1:]), _fill(statistic))])


def _pool_datasets(entries: Mapping[str, Stats], place: str) -> tuple[Stats, list[str]]:
    """Return the pooled statistics, and the entries at `place` that have quantiles of several datasets.

    Pools features that a dataset has, if all datasets with statistics of them have a count.
    """
    uncounted = {key for entry in entries.values() for key, values in entry.items() if "count" not in values}
    parts = {
        name: {key: values for key, values in entry.items() if key not in uncounted and not _is_padding(values)}
        for name, entry in entries.items()
    }
    pooled = dict(pool_stats(list(parts.values()), names=[f"dataset {name!r}" for name in parts]))
    with_quantiles = [feature for feature, values in pooled.items() if any(map(is_quantile, values))]
    shared = [feature for feature in with_quantiles if sum(feature in part for part in parts.values()) > 1]
    first, *others = entries.values()
    for feature, values in first.items():
        # No dataset has it: the entry is all padding. If one has it but stores no statistics, there is none to give.
        if _is_padding(values) and all(feature in entry and _is_padding(entry[feature]) for entry in others):
            pooled[feature] = values
    return pooled, [f"{place}/{feature}" for feature in shared]


def _is_padding(values: FeatureStats) -> bool:
    return "count" in values and not values["count"].any()


def _plain_stats(stats: Stats) -> dict[str, dict[str, Any]]:
    return {feature: {name: value.tolist() for name, value in values.items()} for feature, values in stats.items()}


def _stats_of_plain(plain: Mapping[str, Mapping[str, Any]]) -> Stats:
    return {feature: {name: _numbers(value) for name, value in values.items()} for feature, values in plain.items()}


def _numbers(value: Any) -> NDArray[np.float64]:
    array = np.asarray(value)
    # numpy would read null as nan, and the text "1" as 1.
    if array.dtype.kind not in "if":
        raise ValueError(f"{value!r} where numbers are expected")
    return array.astype(np.float64)


def _split(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    text = os.fspath(path)
    folder, slash, name = text.rpartition("/")
    if not name:
        raise ConfigError(f"{text!r} does not name a file; give a path as in 'run/stats.json'")
    return open_storage(folder or slash or "."), name
