"""What every member gives under the mixture's names, after its `rename`, `cameras` and `drop`.

Pure: values in, values and misfits out. These functions raise nothing, so that one error can list everything wrong.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np

from raypipe.dataset import Dataset
from raypipe.errors import suggest
from raypipe.format import INDEX_FEATURES, Feature
from raypipe.mixture.spec import MemberSpec

_SHOWN_NAMES: Final = 6
"""The most members named in a line; of the others it gives the number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFeatures:
    """The features of one dataset by its own names."""

    name: str
    rows: Mapping[str, Feature]
    cameras: Mapping[str, Feature]
    others: tuple[str, ...] = ()
    """Declared but not given: columns and cameras without files. A spec may drop them, but not rename them."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a member gives: name in the mixture -> its own feature."""

    name: str
    rows: Mapping[str, Feature]
    cameras: Mapping[str, Feature]

    @cached_property
    def features(self) -> Mapping[str, Feature]:
        """Row features, then cameras."""
        return {**self.rows, **self.cameras}


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """One reason why the members do not fit together."""

    text: str
    name: str = ""
    """The feature in the mixture, if the misfit is about one."""
    kind: Literal["missing", "size", "other"] = "other"


def features_of(name: str, dataset: Dataset) -> MemberFeatures:
    """Return the features of a dataset under its `name` in the mixture; reads which columns the rows have."""
    rows = {key: feature for key, feature in dataset.row_features.items() if not feature.is_camera}
    cameras = {key: dataset.features[key] for key in dataset.spec.cameras}
    others = tuple(key for key in dataset.features if key not in rows and key not in cameras)
    return MemberFeatures(name=name, rows=rows, cameras=cameras, others=others)


def offer_of(member: MemberFeatures, spec: MemberSpec) -> tuple[Offer, list[Misfit]]:
    """Return what a member gives under the mixture's names, and its misfits: names that it lacks or gives twice."""
    misfits = _unknown_names(member, spec)
    rows = {own: feature for own, feature in member.rows.items() if own not in spec.drop}
    for own, dtype in INDEX_FEATURES.items():
        rows[own] = Feature(name=own, kind="vector", dtype=dtype, shape=(1,))
    named_rows = [(spec.rename.get(own, own), own) for own in rows]
    named_cameras = [(spec.rename.get(own, own), own) for own in member.cameras if own not in spec.drop]
    if not isinstance(spec.cameras, str):
        named_cameras = [(name, own) for name, own in spec.cameras.items() if own in member.cameras]
    misfits += [
        Misfit(text=f"{member.name}: {first!r} and {second!r} both become {name!r}; rename or drop one of them")
        for name, first, second in _doubled([*named_rows, *named_cameras])
    ]
    offer = Offer(
        name=member.name,
        rows={name: rows[own] for name, own in named_rows},
        cameras={name: member.cameras[own] for name, own in named_cameras},
    )
    return offer, misfits


def _doubled(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return each name in the mixture that two own names claim, with both."""
    named: dict[str, str] = {}
    return [(name, named[name], own) for name, own in pairs if named.setdefault(name, own) != own]


def _unknown_names(member: MemberFeatures, spec: MemberSpec) -> list[Misfit]:
    given = [*(name for name in member.rows if name not in INDEX_FEATURES), *member.cameras]
    cameras = [] if isinstance(spec.cameras, str) else list(spec.cameras.values())
    misfits = []
    for key, names, known in (
        ("rename", spec.rename, given),
        ("cameras", cameras, [*member.cameras]),
        ("drop", spec.drop, [*given, *member.others]),
    ):
        for name in names:
            if name not in known:
                why = " declares and does not give" if name in member.others else " does not have"
                misfits.append(Misfit(text=f"{member.name}: {key} names {name!r}, which it{why}{suggest(name, known)}"))
    if not isinstance(spec.cameras, str):
        misfits += [
            Misfit(
                text=f"{member.name}: rename names the camera {name!r}; give its name in `cameras`, which stands too"
            )
            for name in spec.rename
            if name in member.cameras
        ]
    return misfits


def sample_dtype(dtype: str) -> str:
    """Return the dtype that numbers have in a sample: float32, int64 or bool, as LeRobot's samples have them."""
    kind = np.dtype(dtype).kind
    return "bool" if kind == "b" else "float32" if kind == "f" else "int64"


def family(feature: Feature) -> str:
    """Return the family of a feature; only features of one family can become one: pixels of a sort, or numbers."""
    if feature.is_camera:
        return "depth" if feature.is_depth else "rgb"
    return feature.kind


def describe(feature: Feature) -> str:
    """Return a feature in two words: its kind, and its shape or its height and width."""
    if feature.is_camera:
        return f"{family(feature)} {feature.height or '?'}x{feature.width or '?'}"
    shape = "x".join(map(str, feature.shape))
    word = sample_dtype(feature.dtype) if feature.kind == "vector" else feature.kind
    return f"{word} [{shape}]" if feature.kind == "vector" or feature.shape != (1,) else word


def list_names(names: Sequence[str]) -> str:
    """Return names as a list; if there are many, the first ones and the number of the others."""
    if len(names) <= _SHOWN_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _SHOWN_NAMES - 1])} and {len(names) - _SHOWN_NAMES + 1} more"


def list_by_value(values: Mapping[str, str]) -> str:
    """Return which members have which value, grouped by value: ``x in a, b; y in c``."""
    grouped: dict[str, list[str]] = {}
    for name, value in values.items():
        grouped.setdefault(value, []).append(name)
    return "; ".join(f"{value} in {list_names(names)}" for value, names in grouped.items())
