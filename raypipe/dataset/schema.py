"""The features of a batch, and which dataset gives which of them.

A single dataset has a schema too, with its own names. In a mixture names differ, some robots lack a camera, and vectors
have different widths:

::

    name in a batch             aloha                           so101                       lacks it
    action (14,)                action (14,)                    action (6,), 8 zeros behind
    observation.images.wrist    observation.images.cam_left     observation.images.gripper
    observation.images.top      observation.images.cam_high                                 so101: black, marked
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset.dataset import Dataset, keeps_time_axis
from raypipe.format import Feature

DIM_IS_PAD = "_dim_is_pad"
"""Suffix to the name of a vector: the mask ``(B, width)`` of numbers that a narrower robot does not have."""

IS_MISSING = "_is_missing"
"""Suffix to the name of a feature: the mask ``(B,)`` of samples from robots that do not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberMap:
    """What one dataset gives: name in a batch -> its own name, without the features that it lacks."""

    rows: Mapping[str, str]
    cameras: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The features of a batch, and each dataset's own names for them."""

    features: Mapping[str, Feature]
    """As batches have them: row features in the widest shape and a dtype that holds all, then cameras."""

    members: tuple[MemberMap, ...]
    """One per dataset, in the order of the mixture."""

    widths: Mapping[str, tuple[int, ...]]
    """For vectors that some dataset pads: how many numbers each dataset has, 0 if it lacks the feature."""

    windows: Mapping[str, int]
    """Frames in the window of each feature; a feature that is not listed has no window."""

    time_axes: tuple[str, ...]
    """Cameras that have a time axis: windows of several frames, and all windows of images stored in rows."""

    @cached_property
    def cameras(self) -> tuple[str, ...]:
        """The features that give pixels."""
        return tuple(name for name, feature in self.features.items() if feature.is_camera)

    @cached_property
    def rows(self) -> Mapping[str, Feature]:
        """The features read from rows."""
        return {name: feature for name, feature in self.features.items() if not feature.is_camera}

    @cached_property
    def dim_is_pad(self) -> Mapping[str, NDArray[np.bool_]]:
        """For each padded vector, which numbers are padding: ``(datasets, width)``."""
        return {
            name: np.arange(self.features[name].shape[0]) >= np.array(widths)[:, None]
            for name, widths in self.widths.items()
        }

    @cached_property
    def is_missing(self) -> Mapping[str, NDArray[np.bool_]]:
        """For each feature that some dataset lacks, which datasets lack it: ``(datasets,)``."""
        lacking = {
            name: np.array([name not in (one.cameras if feature.is_camera else one.rows) for one in self.members])
            for name, feature in self.features.items()
        }
        return {name: mask for name, mask in lacking.items() if mask.any()}

    def value_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a row feature in one sample, including its window; a scalar has no axis of its own."""
        feature = self.features[name]
        window = (self.windows[name],) if name in self.windows else ()
        return (*window, *(() if feature.shape == (1,) else feature.shape))

    def only(self, names: Collection[str]) -> "Schema":
        """Return the schema with only these features; raypipe neither reads nor decodes the others."""
        members = tuple(
            MemberMap(
                rows={name: own for name, own in member.rows.items() if name in names},
                cameras={name: own for name, own in member.cameras.items() if name in names},
            )
            for member in self.members
        )
        return replace(
            self,
            features={name: feature for name, feature in self.features.items() if name in names},
            members=members,
            widths={name: widths for name, widths in self.widths.items() if name in names},
            windows={name: length for name, length in self.windows.items() if name in names},
            time_axes=tuple(name for name in self.time_axes if name in names),
        )

    def masks(self, dataset: NDArray[Any]) -> dict[str, NDArray[np.bool_]]:
        """Return the masks for samples of these datasets: which numbers are padding, and which features are missing."""
        padding = {f"{name}{DIM_IS_PAD}": mask[dataset] for name, mask in self.dim_is_pad.items()}
        return {**padding, **{f"{name}{IS_MISSING}": mask[dataset] for name, mask in self.is_missing.items()}}


def schema_of(dataset: Dataset) -> Schema:
    """Return the schema of a single dataset."""
    rows = {name: feature for name, feature in dataset.row_features.items() if not feature.is_camera}
    cameras = {name: dataset.features[name] for name in dataset.spec.cameras}
    return Schema(
        features={**rows, **cameras},
        members=(MemberMap(rows={name: name for name in rows}, cameras={name: name for name in cameras}),),
        widths={},
        windows={name: len(offsets) for name, offsets in dataset.window.offsets.items()},
        time_axes=tuple(name for name in cameras if keeps_time_axis(dataset, name)),
    )
