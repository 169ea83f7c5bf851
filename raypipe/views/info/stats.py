"""The answer of ``raypipe stats``: the statistics for a normaliser, of a dataset or a mixture, as a table or JSON.

It computes the statistics of actions in another representation once, and keeps them for training on this machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from raypipe.dataset import ActionSpec, Dataset, schema_of
from raypipe.errors import ConfigError
from raypipe.format import Feature, FeatureStats
from raypipe.mixture import MemberStats, Mixture, MixtureStats, mixture_stats, open_dataset

if TYPE_CHECKING:
    from rich.console import Group

_SHOWN: Final = ("min", "q01", "mean", "std", "q99", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsReport:
    """Statistics, and the names of their numbers."""

    stats: MixtureStats
    names: Mapping[str, Mapping[str, tuple[str, ...]]]
    """By dataset and feature, the names of its numbers, if the dataset gives them."""
    stay: Mapping[str, tuple[str, ...]]
    """By dataset, the numbers of the action that stay as they are."""


def parse_actions(
    mode: str, *, to: str, numbers: Mapping[str, Sequence[str] | None], frames: int
) -> tuple[ActionSpec | None, int]:
    """Return how actions are represented and the length of their window, from the options of a command line.

    Args:
        numbers: ``absolute``, ``wrap`` as NAME=PERIOD and ``match`` as NAME=NAME.
    """
    absolute, wrap, match = (numbers.get(name) or () for name in ("absolute", "wrap", "match"))
    if not mode:
        options = {**numbers, "frames": frames, "to": to != ActionSpec(mode="relative").to}
        given = [f"--{name}" for name, value in options.items() if value]
        if given:
            raise ConfigError(f"{', '.join(given)} is about --actions relative or --actions delta, which is not given")
        return None, 0
    if frames < 1:
        raise ConfigError(
            f"--actions {mode} needs the length of the window, as --frames 50: statistics are of all its slots"
        )
    spec = ActionSpec(
        mode=mode,  # type: ignore[arg-type]
        to=to,
        absolute=tuple(map(_number, absolute)),
        wrap=dict(map(_period, wrap)),
        match=dict(map(_pair, match)),
    )
    return spec, frames


def _period(text: str) -> tuple[str | int, float]:
    name, equals, period = text.rpartition("=")
    try:
        return _number(name), float(period if equals else "")
    except ValueError as error:
        raise ConfigError(f"--wrap {text!r} is not NAME=PERIOD, as wrist_roll=360") from error


def _pair(text: str) -> tuple[str | int, str | int]:
    name, equals, other = text.partition("=")
    if not (name and equals and other):
        raise ConfigError(f"--match {text!r} is not NAME=NAME: a number of the action, and that of the state")
    return _number(name), _number(other)


def _number(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def report_stats(root: str, actions: ActionSpec | None, frames: int) -> StatsReport:
    """Return the statistics of the dataset or mixture at `root`; actions have windows of `frames` frames, from 0 on."""
    dataset = open_dataset(root)
    if actions is not None:
        dataset = dataset.windowed(offsets={actions.feature: range(frames)}).with_actions(actions)
    if isinstance(dataset, Mixture):
        stats, parts = dataset.stats, dict(zip(dataset.names, dataset.datasets, strict=True))
    else:
        stats, parts = _alone(dataset), {_name_of(dataset): dataset}
    return StatsReport(
        stats=stats,
        names={name: _own_names(one, dataset) for name, one in parts.items()},
        stay={name: _staying(one) for name, one in parts.items()},
    )


def _alone(dataset: Dataset) -> MixtureStats:
    member = MemberStats(
        name=_name_of(dataset),
        robot_type=dataset.meta.robot_type,
        stats=dataset.stats,
        num_frames=dataset.meta.num_frames,
    )
    return mixture_stats(schema_of(dataset), [member])


def _name_of(dataset: Dataset) -> str:
    return str(dataset.meta.root).rstrip("/").rpartition("/")[2]


def _own_names(own: Dataset, dataset: Dataset | Mixture) -> dict[str, tuple[str, ...]]:
    if isinstance(dataset, Mixture):
        member = dataset.schema.members[dataset.datasets.index(own)]
        return {name: _numbers(own.row_features[mine]) for name, mine in member.rows.items()}
    return {name: _numbers(feature) for name, feature in own.row_features.items()}


def _numbers(feature: Feature) -> tuple[str, ...]:
    is_named = len(feature.shape) == 1 and len(feature.names) == feature.shape[0]
    return feature.names if is_named else ()


def _staying(dataset: Dataset) -> tuple[str, ...]:
    if dataset.actions is None:
        return ()
    feature = dataset.row_features[dataset.actions.action]
    names = _numbers(feature) or tuple(map(str, range(feature.shape[0])))
    return tuple(name for dim, name in enumerate(names) if dim not in dataset.actions.dims)


def stats_tables(report: StatsReport) -> "Group":
    """Return a table per dataset for a terminal, with a row for each number of a vector and channel of a camera."""
    from rich.console import Group
    from rich.table import Table

    shown: list[Any] = []
    for dataset, entry in report.stats.datasets.items():
        table = Table(box=None, pad_edge=False, title=dataset, title_justify="left")
        table.add_column("feature", overflow="fold")
        table.add_column("number", no_wrap=True)
        for name in (*_SHOWN, "count"):
            table.add_column(name, justify="right", no_wrap=True)
        for feature, values in entry.items():
            for row in _rows(feature, values, report.names[dataset].get(feature, ())):
                table.add_row(*row)
        missing = "no statistics are stored: `raypipe reshard ROOT OUT` computes those of rows"
        shown += [table if entry else f"{dataset}: {missing}", *_told(report, dataset), ""]
    return Group(*shown)


def _rows(feature: str, values: FeatureStats, names: Sequence[str]) -> Iterable[list[str]]:
    flat = {name: value.reshape(-1) for name, value in values.items()}
    width = max(len(flat[name]) for name in _SHOWN if name in flat)
    for i in range(width):
        numbers = [f"{flat[name][i]:.4g}" if name in flat else "-" for name in _SHOWN]
        counts = flat.get("count")
        count = "-" if counts is None else f"{int(counts[i if len(counts) == width else 0]):,}"
        yield [feature if i == 0 else "", names[i] if i < len(names) else str(i), *numbers, count]


def _told(report: StatsReport, dataset: str) -> list[str]:
    stay = f"; as stored: {', '.join(report.stay[dataset])}" if report.stay[dataset] else ""
    return [f"{feature} is {text}{stay}" for feature, text in report.stats.representations.items()]
