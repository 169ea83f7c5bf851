"""`Normaliser`: scales the values of a batch for a policy, and scales the policy's actions back.

The formulas are LeRobot's. It scales each sample by the statistics of its own dataset, of its robot, or of all datasets
together. A batch gives the dataset and robot of each sample by name, because a dataset's number differs between
mixtures. It holds statistics as numpy values, and makes tensors for each device that it meets; it imports torch with
the first batch.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import ABSOLUTE, DIM_IS_PAD, IS_MISSING, REPRESENTATION
from raypipe.errors import ConfigError, suggest
from raypipe.format import Stats
from raypipe.mixture.stats import MixtureStats, SavedAsJson, single_stats
from raypipe.text import check_choice, counted

if TYPE_CHECKING:
    import torch

Mode = Literal["mean_std", "min_max", "quantiles", "identity"]
By = Literal["dataset", "robot", "pooled"]

EPS: Final = 1e-8
"""LeRobot's value: added to a standard deviation, and used instead of a range of 0."""

_MAX_RANGE_IN_STD: Final = 1e6
"""The range of n values is at most sqrt(2 n) standard deviations, so a million takes 5e11 values, all equal but two.
Published datasets have cameras with a std of 0 and pixels from 0 to 1; `mean_std` would scale them to 1e8."""

_NEEDS: Final = {"mean_std": ("mean", "std"), "min_max": ("min", "max"), "quantiles": ("q01", "q99")}
_NO_ROBOT: Final = ("", "unknown")
_NAMED_BY: Final = {"dataset": "dataset", "robot": "robot_type"}
"""The batch key that names the dataset or robot of each sample."""


@dataclass(frozen=True, eq=False, init=False)
class Normaliser(SavedAsJson):
    """Scales the features of a batch, and scales them back.

    ::

        scale = rp.Normaliser(ds.stats)                                    all actions and observations by mean_std
        scale = rp.Normaliser(mixture.stats, {"action": "min_max"}, by="robot")

        mean_std    (x - mean) / (std + 1e-8)
        min_max     2 (x - min) / (max - min) - 1        a range of 0 counts as 1e-8
        quantiles   2 (x - q01) / (q99 - q01) - 1        likewise; values beyond the quantiles are not clipped
        identity    x

    It computes and returns float32, or float64 for float64 input. Numbers marked by ``<key>_dim_is_pad`` and samples
    marked by ``<key>_is_missing`` are 0 in both directions. It returns a new batch and leaves the given one unchanged.
    """

    _KIND: ClassVar[str] = "Normaliser"

    stats: MixtureStats
    modes: Mapping[str, Mode]
    """By key of a batch. Other keys stay as they are; a key that a batch lacks is ignored."""
    by: By

    def __init__(
        self, stats: MixtureStats | Stats, modes: Mapping[str, Mode] | Mode = "mean_std", by: By = "dataset"
    ) -> None:
        """Check that there are statistics for every mode.

        Args:
            stats: `Mixture.stats`, or `Dataset.stats` of a single dataset.
            modes: by key of a batch; a single mode applies to all actions and observations that have statistics.
            by: the statistics that scale a sample: its dataset's, its robot's, or those of all together.
        """
        object.__setattr__(self, "stats", stats if isinstance(stats, MixtureStats) else single_stats(stats))
        named = dict.fromkeys(_usual_keys(self.stats), modes) if isinstance(modes, str) else dict(modes)
        object.__setattr__(self, "modes", named)
        object.__setattr__(self, "by", by)
        check_choice("by", self.by, get_args(By))
        for key, mode in self.modes.items():
            check_choice(f"the mode of {key!r}", mode, get_args(Mode))
        if isinstance(modes, str) and not named:
            check_choice("modes", modes, get_args(Mode))
            raise ConfigError(
                "no statistics of actions or observations are stored, so nothing can be normalised by them. "
                "`raypipe reshard ROOT OUT` computes those of rows; or name what to do: modes={'action': 'identity'}."
            )
        if self.by == "robot":
            _check_robots(self.stats)
        # Build the tables now, so that missing statistics raise here and not at the first batch.
        if self._tables:
            self._warn_of_statistics()

    def __getstate__(self) -> dict[str, Any]:
        # Tensors stay behind: another process may have other devices.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def normalise(self, batch: Mapping[str, Any], *, dataset: str = "", robot: str = "") -> dict[str, Any]:
        """Return the batch with the features of `modes` scaled, each sample by the dataset or robot that it names.

        Batches of a mixture name both: ``by="robot"`` reads their ``robot_type``, ``by="dataset"`` their ``dataset``.

        Vectors are ``([B,] [T,] D)``, scalars ``([B,] [T])``, cameras ``([B,] [T,] C, H, W)``: uint8, divided by 255
        first, or float in [0, 1].

        Args:
            dataset: treat all samples as this member's, whatever the batch says. Batches that name nothing need it,
                unless the statistics have only one dataset, or one robot.
            robot: likewise, treat all samples as this robot type's.

        Raises:
            ConfigError: there are no statistics of a sample's dataset or robot, or its actions are in another
                representation than the statistics.
        """
        return self._apply(batch, dataset, robot, inverse=False)

    def unnormalise(self, batch: Mapping[str, Any], *, dataset: str = "", robot: str = "") -> dict[str, Any]:
        """Return the batch with the features of `modes` back on their own scale; takes the arguments of `normalise`.

        Integers come back as float, cameras as float in [0, 1].
        """
        return self._apply(batch, dataset, robot, inverse=True)

    def _to_plain(self) -> dict[str, Any]:
        return {"by": self.by, "modes": dict(self.modes), "stats": json.loads(self.stats.to_json())}

    @classmethod
    def _from_plain(cls, plain: Mapping[str, Any]) -> Self:
        stats = MixtureStats.from_json(json.dumps(plain["stats"]), "'stats' of the normaliser")
        return cls(stats, plain["modes"], plain["by"])

    @cached_property
    def _entries(self) -> dict[str, Stats]:
        """The statistics by name of the dataset or robot: the rows of the tables."""
        if self.by == "pooled":
            return {"": self.stats.pooled}
        return dict(self.stats.datasets if self.by == "dataset" else self.stats.robots)

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self._entries)}

    @cached_property
    def _tables(self) -> dict[str, "_Table"]:
        return {key: self._build_table(key, mode) for key, mode in self.modes.items() if mode != "identity"}

    @cached_property
    def _tensors(self) -> "dict[tuple[Any, ...], torch.Tensor]":
        return {}

    def _build_table(self, key: str, mode: Mode) -> "_Table":
        found: dict[str, list[NDArray[np.float64]]] = {statistic: [] for statistic in _NEEDS[mode]}
        for name, entry in self._entries.items():
            label = "the mixture" if self.by == "pooled" else f"{self.by} {name!r}"
            for statistic, rows in found.items():
                if statistic not in entry.get(key, {}):
                    raise ConfigError(_missing_message(self.stats, self.by, key, mode, label))
                rows.append(entry[key][statistic])
                if not np.isfinite(rows[-1]).all():
                    raise ConfigError(
                        f"the {statistic!r} of {key!r} for {label} is {rows[-1].tolist()}, and mode {mode!r} needs "
                        f"finite numbers. Make the statistics again, or choose the mode 'identity'."
                    )
        if mode == "mean_std":
            _check_spread(self.stats, key)
        low, high = (np.stack(rows) for rows in found.values())
        # A scalar has no axis of its own in a batch.
        if low.shape[1:] == (1,):
            low, high = low[:, 0], high[:, 0]
        if mode == "mean_std":
            return _Table(shift=low, scale=high + EPS, offset=0.0)
        half = (high - low) / 2
        # Test in float32, because most values are scaled in it and a tiny range becomes 0 there.
        return _Table(shift=low, scale=np.where(half.astype(np.float32) == 0, EPS / 2, half), offset=1.0)

    def _warn_of_statistics(self) -> None:
        if self.by == "dataset":
            return
        keys = [key for key, mode in self.modes.items() if mode == "quantiles"]
        folders = ["pooled"] if self.by == "pooled" else [f"robots/{robot}" for robot in self.stats.robots]
        enveloped = [name for one in folders for key in keys if (name := f"{one}/{key}") in self.stats.envelopes]
        if enveloped:
            warnings.warn(
                f"the quantiles of {', '.join(enveloped)} are envelopes of several datasets' quantiles and wider than "
                f"those of all values; by='dataset' has no such envelopes.",
                stacklevel=3,
            )
        entries = self.stats.datasets.items()
        uncovered = [f"{key} of {name!r}" for key in self._tables for name, entry in entries if key not in entry]
        if uncovered:
            warnings.warn(
                f"there are no statistics of {', '.join(uncovered)}: it is normalised by those of the other datasets.",
                stacklevel=3,
            )

    def _apply(self, batch: Mapping[str, Any], dataset: str, robot: str, *, inverse: bool) -> dict[str, Any]:
        keys = [key for key in self._tables if key in batch]
        for key in keys:
            _check_representation(key, batch, self.stats.representations.get(key, ABSOLUTE), inverse=inverse)
            if key in self.stats.windows and not inverse:
                _check_window(key, batch, self._tables[key].shift.ndim - 1, self.stats.windows[key])
        row = self._rows(batch, dataset, robot) if keys else 0
        scaled = {key: self._scale(key, batch, row, inverse=inverse) for key in keys}
        return {**batch, **scaled}

    def _rows(self, batch: Mapping[str, Any], dataset: str, robot: str) -> "torch.Tensor | int":
        """Return the row of the tables that scales each sample, or the one row for all."""
        if dataset and robot:
            raise ConfigError(f"both dataset={dataset!r} and robot={robot!r} are given; give one of them")
        if dataset or robot:
            return self._row_of[self._name_of(dataset, robot)]
        key = _NAMED_BY.get(self.by, "")
        if key in batch:
            return self._named_rows(batch[key], key)
        if len(self._entries) == 1:
            return 0
        raise ConfigError(
            f"the batch has no {key!r}, and normalising by {self.by!r} needs to know whose the samples are. Give "
            f"dataset= (of {', '.join(map(repr, self.stats.datasets))}) or robot=, or put {key!r} into the batch, "
            f"which batches of a mixture have."
        )

    def _named_rows(self, names: "str | Sequence[str]", key: str) -> "torch.Tensor | int":
        """Return the row for every name; a single sample outside a batch has one name."""
        import torch

        row_of = self._row_of
        try:
            if isinstance(names, str):
                return row_of[names]
            return torch.tensor([row_of[name] for name in names], dtype=torch.int64)
        except KeyError as error:
            (name,) = error.args
            raise ConfigError(
                f"the batch has a sample whose {key!r} is {name!r}, and there are no statistics of it"
                f"{suggest(str(name), row_of)} Make the normaliser from a mixture that has it, or say whose statistics "
                f"to take by dataset= or robot=."
            ) from error

    def _name_of(self, dataset: str, robot: str) -> str:
        """Return the name of the row that scales all samples of a dataset or of a robot."""
        kind, name = ("dataset", dataset) if dataset else ("robot", robot)
        known = self.stats.datasets if dataset else self.stats.robots
        if name not in known:
            raise ConfigError(f"there is no {kind} {name!r} in the mixture{suggest(name, known)}")
        names = [dataset] if dataset else [one for one, found in self.stats.robot_types.items() if found == robot]
        if self.by == "dataset" and len(names) > 1:
            raise ConfigError(
                f"robot={robot!r} is of the datasets {', '.join(map(repr, names))}, and values are scaled by dataset; "
                f"give dataset=, one of these"
            )
        return {"dataset": names[0], "robot": self.stats.robot_types[names[0]], "pooled": ""}[self.by]

    def _scale(self, key: str, batch: Mapping[str, Any], row: "torch.Tensor | int", *, inverse: bool) -> "torch.Tensor":
        import torch

        value: torch.Tensor = batch[key]
        table = self._tables[key]
        _check_value(key, value, table.shape, row)
        row = row if isinstance(row, int) else row.to(value.device)
        dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
        shift, scale = (self._lined_up(key, part, row, value, dtype) for part in ("shift", "scale"))
        # After the first new tensor compute in place: a batch of cameras is hundreds of megabytes.
        if inverse:
            scaled = (value.to(dtype) + table.offset).mul_(scale).add_(shift)
        else:
            is_bytes = key in self.stats.cameras and value.dtype == torch.uint8
            # One number for all rows and columns: statistics of a camera, of pixels in [0, 1].
            if value.dtype == torch.uint8 and not is_bytes and table.shape[-2:] == (1, 1):
                raise ConfigError(
                    f"{key!r} in the batch is uint8, and its statistics are of pixels in [0, 1], which do not name it "
                    f"a camera. Divide it by 255 first, or make the statistics from a mixture or dataset that has the "
                    f"camera."
                )
            scaled = (value.to(dtype).div_(255) if is_bytes else value.to(dtype)) - shift
            scaled = scaled.div_(scale).sub_(table.offset)
        for mask in _masks(key, batch, value, len(table.shape)):
            scaled = scaled.masked_fill(mask.to(value.device), 0)
        return scaled

    def _lined_up(
        self, key: str, part: str, row: "torch.Tensor | int", value: "torch.Tensor", dtype: "torch.dtype"
    ) -> "torch.Tensor":
        """Return the table rows of the samples, with an axis of 1 for time: ``(B, 1, *shape)``."""
        import torch

        wanted = (key, part, value.device, dtype)
        if wanted not in self._tensors:
            self._tensors[wanted] = torch.as_tensor(getattr(self._tables[key], part), dtype=dtype, device=value.device)
        chosen = self._tensors[wanted][row]
        if isinstance(row, int):
            return chosen
        shape = chosen.shape[row.ndim :]
        return chosen.reshape(*row.shape, *[1] * (value.ndim - chosen.ndim), *shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """``(x - shift) / scale - offset`` for one feature, by row: ``(rows, *shape)``."""

    shift: NDArray[np.float64]
    scale: NDArray[np.float64]
    offset: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shift.shape[1:]


def _usual_keys(stats: MixtureStats) -> list[str]:
    """Return the keys that LeRobot normalises for its policies: actions and observations, not rewards and flags."""
    known = dict.fromkeys(key for entry in stats.datasets.values() for key in entry)
    return [key for key in known if key == "action" or key.startswith(("action.", "observation."))]


def _check_robots(stats: MixtureStats) -> None:
    nameless = [name for name, robot in stats.robot_types.items() if robot in _NO_ROBOT]
    if len(nameless) > 1:
        raise ConfigError(
            f"the datasets {', '.join(map(repr, nameless))} do not say of which robot they are, and by='robot' would "
            f"take them for one. Give each a robot_type in the mixture, or normalise by 'dataset'."
        )


def _check_spread(stats: MixtureStats, key: str) -> None:
    # Check each dataset, even if `by` pools them: pooling hides a std of 0.
    for name, entry in stats.datasets.items():
        found = entry.get(key, {})
        if not {"std", "min", "max"} <= found.keys():
            continue
        is_wrong = found["max"] - found["min"] > _MAX_RANGE_IN_STD * (found["std"] + EPS)
        if is_wrong.any():
            std, low, high = (found[statistic][is_wrong][0] for statistic in ("std", "min", "max"))
            raise ConfigError(
                f"the statistics of {key!r} in dataset {name!r} contradict each other: std {std:g} with values from "
                f"{low:g} to {high:g}. Make the statistics again, or choose another mode for {key!r}, as 'min_max'."
            )


def _missing_message(stats: MixtureStats, by: By, key: str, mode: Mode, label: str) -> str:
    known = dict.fromkeys(feature for entry in stats.datasets.values() for feature in entry)
    if key not in known:
        return f"no dataset of the mixture has statistics of {key!r}{suggest(key, known)}"
    needed = (*_NEEDS[mode], *(("count",) if by != "dataset" else ()))
    absent = {name: [one for one in needed if one not in entry.get(key, {})] for name, entry in stats.datasets.items()}
    lacking = [f"{name!r} (no {', '.join(statistics)})" for name, statistics in absent.items() if statistics]
    return (
        f"{label} has no statistics to normalise {key!r} with mode {mode!r}: it needs {', '.join(needed)}. Lacking are "
        f"the datasets {', '.join(lacking)}. Make their statistics (`raypipe reshard ROOT OUT` computes those of "
        f"rows), choose another mode for {key!r} ('identity' needs none), or leave the datasets out."
    )


def _check_representation(key: str, batch: Mapping[str, Any], expected: str, *, inverse: bool) -> None:
    """Raise if values are in another representation than the statistics.

    Scaling back cannot be checked this way: a policy's output does not name its representation.
    """
    told = batch.get(f"{key}{REPRESENTATION}", expected if inverse else ABSOLUTE)
    found = {told} if isinstance(told, str) else set(told)
    if found - {expected}:
        name, other = f"{key}{REPRESENTATION}", next(iter(found - {expected}))
        says = f"by its {name!r}" if name in batch else f"as it has no {name!r}"
        raise ConfigError(
            f"{key!r} in the batch is {other!r}, {says}, and the statistics are of {key!r} {expected!r}: they are on "
            f"other scales. Give the normaliser the stats of the pipeline that makes the batches (pipe.stats), or "
            f"choose the mode 'identity' for {key!r}."
        )


def _check_window(key: str, batch: Mapping[str, Any], num_axes: int, expected: int) -> None:
    """Raise if windows, of frames with `num_axes` axes, have another length than those of the statistics.

    Scaling back is not checked: a policy may return fewer steps than it was trained on.
    """
    # A sample names its representation with one text, a batch with a list.
    shape = batch[key].shape[0 if isinstance(batch[f"{key}{REPRESENTATION}"], str) else 1 :]
    found = int(shape[0]) if len(shape) > num_axes else 1
    if found != expected:
        raise ConfigError(
            f"{key!r} in the batch has windows of {counted(found, 'frame')}, and the statistics are of windows of "
            f"{counted(expected, 'frame')}: later actions differ more from the state, so they are on other scales. "
            f"Give the normaliser the stats of the pipeline that makes the batches (pipe.stats), or make them with "
            f"`raypipe stats ROOT --frames {found}`."
        )


def _check_value(key: str, value: Any, shape: tuple[int, ...], row: "torch.Tensor | int") -> None:
    import torch

    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{key!r} in the batch is a {type(value).__name__}; a normaliser takes tensors")
    ends = tuple(value.shape[value.ndim - len(shape) :]) if value.ndim >= len(shape) else ()
    # Statistics of length 1 along an axis apply to all of it, such as all pixels of a camera.
    if len(ends) < len(shape) or any(one not in (1, size) for one, size in zip(shape, ends, strict=True)):
        raise ConfigError(
            f"{key!r} in the batch has the shape {tuple(value.shape)}, and its statistics are {shape}; the last axes "
            f"must fit. Pad it to the width of the mixture."
        )
    if not isinstance(row, int) and tuple(value.shape[: row.ndim]) != tuple(row.shape):
        raise ConfigError(
            f"{key!r} in the batch has the shape {tuple(value.shape)}, and the batch says of "
            f"{counted(len(row), 'sample')} whose they are; they must be the same samples"
        )


def _masks(key: str, batch: Mapping[str, Any], value: "torch.Tensor", num_axes: int) -> "list[torch.Tensor]":
    """Return masks of what stays 0, shaped to fit `value`; the last `num_axes` axes are the feature's own."""
    masks = []
    if f"{key}{DIM_IS_PAD}" in batch:
        padding = batch[f"{key}{DIM_IS_PAD}"]
        samples, width = padding.shape[:-1], padding.shape[-1:]
        between = [1] * (value.ndim - len(samples) - num_axes)
        behind = [1] * (num_axes - 1)
        masks.append(padding.reshape(*samples, *between, *(width if num_axes else ()), *behind))
    if f"{key}{IS_MISSING}" in batch:
        missing = batch[f"{key}{IS_MISSING}"]
        masks.append(missing.reshape(*missing.shape, *[1] * (value.ndim - missing.ndim)))
    return masks
