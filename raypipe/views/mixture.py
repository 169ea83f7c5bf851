"""A mixture: its contents as `raypipe info` tells them, and its card with a frame of each member.

It opens the members as training does, so members that do not fit together fail here with the same message.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from raypipe.dataset import IS_MISSING
from raypipe.format import INDEX_FEATURES
from raypipe.mixture import Mixture
from raypipe.text import counted, cut_inside, first_of, lines_table, page_part, page_table, plural
from raypipe.views.card import read_thumbnails
from raypipe.views.view import Picture, View, draw_pictures, first_lines, html_picture, html_texts, short_name, stacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, Group, RenderResult
    from rich.table import Table

_MAX_ROWS: Final = 40
"""The most rows in the table of members; use ``--json`` for more than a screen or two."""

_ANY_WIDTH: Final = 1000
"""Wider than any table, to measure the width that it needs."""

_MAX_NOTES: Final = 20
_SHOWN_NAMES: Final = 4
_SHOWN_ROBOTS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberInfo:
    """One dataset of a mixture, and what an epoch takes from it."""

    name: str
    root: str
    robot_type: str
    version: str
    fps: float
    episodes: int
    frames: int
    hours: float
    selected_episodes: int
    selected_frames: int
    """The anchor frames: all frames, unless the mixture selects some."""
    weight: float
    """As the mixture gives it; if `MixtureInfo.weights` counts frames or episodes, only 0 has an effect."""
    share: float
    """Its part of an epoch, from 0 to 1."""
    frames_per_epoch: int
    passes_per_epoch: float
    """How often an epoch shows each of the selected frames."""
    cameras: dict[str, str]
    """Name in a batch -> own name, without cameras filled with zeros."""
    widths: dict[str, int]
    """For vectors that some dataset pads: how many numbers this one has, 0 if it lacks the feature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureInfo:
    """The contents of a mixture, in plain values."""

    mixture: str
    datasets: int
    episodes: int
    frames: int
    hours: float
    robots: dict[str, int]
    """The number of datasets of each robot type."""
    weights: str
    """The rule that decided the shares."""
    frames_per_epoch: int
    rate: str
    """The common rate, or ``own``."""
    features: dict[str, str]
    """Row features of a batch, with dtype and shape."""
    cameras: dict[str, str]
    """Cameras of a batch, with ``WIDTHxHEIGHT``."""
    missing: dict[str, int]
    """Features that some datasets lack, with the number of these datasets."""
    members: tuple[MemberInfo, ...]
    notes: tuple[tuple[str, str], ...]
    """(name of the member or nothing, text): what is padded, filled, left out or odd."""
    bad: tuple[tuple[str, str, str], ...]
    """(name, root, error) of unusable members, which are skipped."""

    def to_json(self) -> dict[str, Any]:
        """Return the description as a JSON object, with all members."""
        notes = [{"name": name, "text": text} for name, text in self.notes]
        bad = [{"name": name, "root": root, "error": error} for name, root, error in self.bad]
        return {**asdict(self), "notes": notes, "bad": bad}


def describe_mixture(path: str) -> MixtureInfo:
    """Return the contents of the mixture file at `path`; reads ``meta/`` and a few footers of every member.

    Raises:
        ConfigError: the file is wrong, or the members do not fit together.
        DatasetError: members cannot be opened, and the mixture does not skip them.
    """
    with warnings.catch_warnings():
        # The value itself lists the skipped members: bad.
        warnings.simplefilter("ignore", UserWarning)
        mixture = Mixture(path)
    return describe_opened(mixture, path)


def describe_opened(mixture: Mixture, name: str) -> MixtureInfo:
    """Return the contents of an opened mixture; reads nothing more.

    Args:
        name: a name for the mixture, such as the path of its file.
    """
    schema = mixture.schema
    cameras = {name: schema.features[name] for name in schema.cameras}
    members = tuple(_member_info(mixture, position) for position in range(len(mixture.members)))
    return MixtureInfo(
        mixture=name,
        datasets=len(members),
        episodes=sum(one.episodes for one in members),
        frames=sum(one.frames for one in members),
        hours=round(sum(one.frames / one.fps for one in members) / 3600, 3),
        robots={robot: mixture.robot_types.count(robot) for robot in dict.fromkeys(mixture.robot_types)},
        weights=_weights_text(mixture),
        frames_per_epoch=len(mixture),
        rate=f"{mixture.spec.rate:g}" if not isinstance(mixture.spec.rate, str) else mixture.spec.rate,
        features={name: f"{feature.dtype} {list(feature.shape)}" for name, feature in schema.rows.items()},
        cameras={name: f"{one.width}x{one.height}{' depth' * one.is_depth}" for name, one in cameras.items()},
        missing={name: int(mask.sum()) for name, mask in schema.is_missing.items()},
        members=members,
        notes=tuple((note.name, note.text) for note in mixture.notes),
        bad=tuple((one.name, one.root, one.error) for one in mixture.bad),
    )


def _member_info(mixture: Mixture, position: int) -> MemberInfo:
    member, schema, given = mixture.members[position], mixture.schema, mixture.spec.weights
    meta, index = member.dataset.meta, member.index()
    share = mixture.shares[member.name]
    return MemberInfo(
        name=member.name,
        root=meta.root,
        robot_type=member.robot_type,
        version=meta.version,
        fps=meta.fps,
        episodes=len(meta.episodes),
        frames=meta.num_frames,
        hours=round(meta.num_frames / meta.fps / 3600, 3),
        selected_episodes=len(set(index.episode.tolist())),
        selected_frames=index.num_frames,
        weight=member.spec.weight if isinstance(given, str) else given[position],
        share=share / len(mixture),
        frames_per_epoch=share,
        passes_per_epoch=share / index.num_frames,
        cameras=dict(schema.members[position].cameras),
        widths={name: widths[position] for name, widths in schema.widths.items()},
    )


def _weights_text(mixture: Mixture) -> str:
    rule, temperature = mixture.spec.weights, mixture.spec.temperature
    by = {"frames": "by frames", "episodes": "by episodes", "sqrt": "by the square root of frames"}
    text = by.get(rule, "as given") if isinstance(rule, str) else "as given"
    return text if temperature == 1 else f"{text}, at temperature {temperature:g}"


def mixture_table(info: MixtureInfo) -> "Group":
    """Return the description for a terminal: a summary, a row per member, notes, and the skipped members."""
    from rich.console import Group
    from rich.text import Text

    cut = f"; the table has the {_MAX_ROWS - 1} with the largest shares, --json all" * (info.datasets > _MAX_ROWS)
    parts: list[Any] = [lines_table(_summary_lines(info, cut)), Text(), _Members(info)]
    notes = _note_lines(info.notes)
    bad = [("skipped", f"{name} ({root}): {error}") for name, root, error in info.bad]
    if notes or bad:
        parts += [Text(), lines_table([*_cut(notes, "note"), *_cut(bad, "skipped dataset")])]
    return Group(*parts)


def _summary_lines(info: MixtureInfo, cut: str = "") -> list[tuple[str, str]]:
    robots = [name if count == 1 else f"{name} ({counted(count, 'dataset')})" for name, count in info.robots.items()]
    passes = info.frames_per_epoch / max(1, sum(one.selected_frames for one in info.members))
    whole = "" if passes == 1 else f", {passes:.3g} {plural(passes, 'pass')} over the selected frames"
    plain = [name for name in info.features if name in INDEX_FEATURES]
    rates = (
        "each dataset at its own"
        if info.rate == "own"
        else f"{info.rate} {plural(float(info.rate), 'frame')} a second, the nearest own frame"
    )
    skipped = f", and {len(info.bad)} skipped" if info.bad else ""
    return [
        ("mixture", info.mixture),
        ("datasets", f"{info.datasets:,}{skipped}{cut}"),
        ("robots", first_of(robots, _SHOWN_ROBOTS)),
        ("episodes", f"{info.episodes:,}"),
        ("frames", f"{info.frames:,} ({info.hours:,.4g} hours)"),
        ("epoch", f"{counted(info.frames_per_epoch, 'frame')}{whole}; shares {info.weights}"),
        ("window rate", rates),
        *(("camera", f"{name}  {text}{_missing_text(info, name)}") for name, text in info.cameras.items()),
        *(
            ("feature", f"{name}  {text}{_missing_text(info, name)}")
            for name, text in info.features.items()
            if name not in plain
        ),
        ("index", ", ".join(plain)),
    ]


def _missing_text(info: MixtureInfo, name: str) -> str:
    if name not in info.missing:
        return ""
    return f"  (zeros for {info.missing[name]} of {counted(info.datasets, 'dataset')}, marked in {name}{IS_MISSING})"


class _Members:
    """A row per member: one table, or two if the terminal is too narrow for a dozen columns."""

    def __init__(self, info: MixtureInfo) -> None:
        self._columns = _columns(info)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.measure import Measurement

        whole = _as_table(self._columns)
        if Measurement.get(console, options.update(width=_ANY_WIDTH), whole).minimum <= options.max_width:
            yield whole
            return
        name = self._columns[0]
        yield _as_table([name, *(column for column in self._columns[1:] if not column.is_share)])
        yield ""
        yield _as_table([name, *(column for column in self._columns[1:] if column.is_share)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    title: str
    cells: list[str]
    is_share: bool = False
    """Whether the column is about what an epoch takes, not about the dataset itself."""
    is_text: bool = False


def _as_table(columns: Sequence[_Column]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    # No lines between columns: they would cost the width of one.
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        if column.is_text:
            table.add_column(column.title, overflow="fold", min_width=min(12, max(map(len, column.cells))))
        else:
            table.add_column(column.title, justify="right", no_wrap=True)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    return table


def _columns(info: MixtureInfo) -> list[_Column]:
    """Return the columns of the table: a row for each member shown, then one row for all others."""
    shown, rest = _largest(info.members)
    rows = [*([one] for one in shown), *([rest] if rest else [])]
    numbers: dict[str, Callable[[Sequence[MemberInfo]], str]] = {
        "episodes": lambda some: _selected(_sum(some, "selected_episodes"), _sum(some, "episodes")),
        "frames": lambda some: _selected(_sum(some, "selected_frames"), _sum(some, "frames")),
        "weight": lambda some: f"{_sum(some, 'weight'):g}",
        "share": lambda some: _percent(_sum(some, "frames_per_epoch") / info.frames_per_epoch),
        "per epoch": lambda some: f"{_sum(some, 'frames_per_epoch'):,}",
        "passes": lambda some: f"{_sum(some, 'frames_per_epoch') / _sum(some, 'selected_frames'):.3g}",
    }
    if not info.weights.startswith("as given"):
        del numbers["weight"]
    names = [some[0].name if len(some) == 1 else counted(len(some), "other") for some in rows]
    columns = [
        _Column(title="dataset", cells=names, is_text=True),
        _Column(title="robot", cells=[_robot_cell(some) for some in rows], is_text=True),
        _Column(title="format", cells=[_range([one.version for one in some]) for some in rows]),
        _Column(title="fps", cells=[_range([one.fps for one in some]) for some in rows]),
        *(_Column(title=title, cells=list(map(cell, rows)), is_share=True) for title, cell in numbers.items()),
    ]
    if info.cameras:
        columns.append(_Column(title="cameras", cells=[_camera_cell(some, info) for some in rows], is_text=True))
    padded = info.members[0].widths
    if padded:
        title = ", ".join(_short_names(padded).values())
        columns.append(_Column(title=title, cells=[_width_cell(some, padded) for some in rows], is_text=True))
    return columns


def _largest(members: Sequence[MemberInfo]) -> tuple[list[MemberInfo], list[MemberInfo]]:
    """Return the members to show, in their order, and those to sum up; with many, show the largest shares."""
    if len(members) <= _MAX_ROWS:
        return list(members), []
    names = {one.name for one in _by_share(members)[: _MAX_ROWS - 1]}
    return [one for one in members if one.name in names], [one for one in members if one.name not in names]


def _by_share(members: Iterable[MemberInfo]) -> tuple[MemberInfo, ...]:
    return tuple(sorted(members, key=lambda one: -one.frames_per_epoch))


def _sum(some: Sequence[MemberInfo], field: str) -> Any:
    return sum(getattr(one, field) for one in some)


def _robot_cell(some: Sequence[MemberInfo]) -> str:
    robots = {one.robot_type for one in some}
    return some[0].robot_type or "-" if len(robots) == 1 else f"{len(robots)} robots"


def _camera_cell(some: Sequence[MemberInfo], info: MixtureInfo) -> str:
    """Return the cameras that a member has; for several members, how many have each."""
    short = _short_names(info.cameras)
    counts = {short[name]: sum(name in one.cameras for one in some) for name in info.cameras}
    if all(count == len(some) for count in counts.values()) and len(counts) > 1:
        return "all"
    has = [name if len(some) == 1 else f"{name} ({count})" for name, count in counts.items() if count]
    return ", ".join(has) or "-"


def _width_cell(some: Sequence[MemberInfo], padded: Iterable[str]) -> str:
    return ", ".join(_range([one.widths[name] or "-" for one in some]) for name in padded)


def _selected(number: int, total: int) -> str:
    return f"{number:,}" if number == total else f"{number:,} of {total:,}"


def _percent(part: float) -> str:
    return f"{part:.1%}" if part >= 0.001 else f"{part * 100:.2g}%"


def _range(values: Sequence[Any]) -> str:
    """Return the values of several members as one text, from the least to the largest; numbers sort by size."""
    numbers = [value for value in values if not isinstance(value, str)]
    texts = sorted({value for value in values if isinstance(value, str)})
    ends = [f"{end:g}" for end in (min(numbers), max(numbers))] if numbers else [texts[0], texts[-1]]
    return "-".join(dict.fromkeys(ends))


def _short_names(names: Iterable[str]) -> dict[str, str]:
    """Return names without the part before their last dot, if they stay distinct."""
    last = {name: name.rpartition(".")[2] for name in names}
    return last if len(set(last.values())) == len(last) else {name: name for name in last}


def _note_lines(notes: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return a line for each text, with the members that it is about; lines about all members come first."""
    about: dict[str, list[str]] = {}
    for name, text in sorted(notes, key=lambda note: bool(note[0])):
        about.setdefault(text, []).extend([name] if name else [])
    return [("note", f"{first_of(names, _SHOWN_NAMES)}: {text}" if names else text) for text, names in about.items()]


def _cut(lines: list[tuple[str, str]], what: str) -> list[tuple[str, str]]:
    more = len(lines) - _MAX_NOTES
    return lines if more <= 0 else [*lines[:_MAX_NOTES], ("", f"and {counted(more, f'more {what}')}: --json has all")]


_PICTURED_MEMBERS: Final = 24
"""The most members to decode frames of: those with the largest shares."""
_LISTED_MEMBERS: Final = 60
_DRAWN_PICTURES: Final = 288
"""48 rows of them are 91 inches high, so that the figure, with the members below, stays under `MAX_INCHES`."""
_NOTES_SHOWN: Final = 30
_COLUMNS: Final = 6
_WIDTH: Final = 12.0
_TITLES: Final = ("dataset", "", "robot", "fps", "episodes", "frames", "share", "an epoch", "passes", "cameras")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MixtureCard(View):
    """The contents of a mixture."""

    info: MixtureInfo
    thumbnails: Mapping[str, tuple[Picture, ...]]
    """The middle frame of a member's first episode, camera by camera, for the members with the largest shares."""

    @property
    def title(self) -> str:
        """The number of datasets, and the name of the mixture."""
        epoch = counted(self.info.frames_per_epoch, "frame")
        return f"{self.info.mixture}: {counted(self.info.datasets, 'dataset')}, {epoch} an epoch"

    @property
    def members(self) -> tuple[MemberInfo, ...]:
        """The members, the largest share first."""
        return _by_share(self.info.members)

    def figure(self) -> "Figure":
        """Return the frames of members and the shares of an epoch, as one picture."""
        pictures = [
            Picture(one.pixels, f"{cut_inside(name, 26)}\n{one.caption.splitlines()[0]}")
            for name, some in self.thumbnails.items()
            for one in some
        ]
        drawn = pictures[:_DRAWN_PICTURES]
        rows = [drawn[i : i + _COLUMNS] for i in range(0, len(drawn), _COLUMNS)]
        shown = self.members[:_LISTED_MEMBERS]
        heights = [*[1.9] * len(rows), 0.9 + 0.24 * len(shown)]
        figure, places = stacked(_WIDTH, heights, above=0.4)
        for place, row in zip(places, rows, strict=False):
            draw_pictures(place, row, _COLUMNS)
        _draw_shares(places[-1].subplots(), shown, len(self.info.members))
        more = f"\n{len(drawn)} of {len(pictures)} pictures shown" if len(drawn) < len(pictures) else ""
        figure.suptitle(f"{self.title}{more}", fontsize=11)
        return figure

    def parts(self) -> list[str]:
        """Return the card as pieces of HTML."""
        parts = [page_part("lines", _summary_lines(self.info))]
        bad = [page_part("text", f"skipped: {name} ({root}): {error}", "error") for name, root, error in self.info.bad]
        notes = [f"{name}: {text}" if name else text for name, text in self.info.notes]
        if bad or notes:
            shown = html_texts(first_lines(notes, _NOTES_SHOWN, "note"))
            parts += [page_part("heading", "What is odd about it"), *bad, *shown]
        rows = [self._row(one) for one in self.members[:_LISTED_MEMBERS]]
        parts += [page_part("heading", "Datasets"), page_table(_TITLES, rows)]
        if len(self.members) > len(rows):
            parts.append(page_part("text", f"and {len(self.members) - len(rows)} more with smaller shares"))
        return parts

    def _row(self, one: MemberInfo) -> tuple[str, ...]:
        width = round(120 * one.share / max(1e-9, self.members[0].share))
        cameras = [short_name(name) + (f" = {short_name(own)}" * (own != name)) for name, own in one.cameras.items()]
        return (
            one.name,
            page_part("joined", list(map(html_picture, self.thumbnails.get(one.name, ())))),
            one.robot_type or "-",
            f"{one.fps:g}",
            f"{one.selected_episodes:,}",
            f"{one.selected_frames:,}",
            page_part("share", f"{one.share:.1%}", width),
            f"{one.frames_per_epoch:,}",
            f"{one.passes_per_epoch:.3g}",
            page_part("names", cameras or ["none"]),
        )


def view_mixture(mixture: Mixture, name: str = "mixture") -> MixtureCard:
    """Return the card of a mixture; decodes a frame of every camera of up to 24 members.

    Args:
        name: the name of the mixture in the title.
    """
    info = describe_opened(mixture, name)
    opened = {member.name: member.dataset for member in mixture.members}
    thumbnails, notes = {}, []
    for one in _by_share(info.members)[:_PICTURED_MEMBERS]:
        pictures, failures = read_thumbnails(opened[one.name], one.cameras.values())
        thumbnails[one.name] = tuple(pictures)
        notes += [(one.name, failure) for failure in failures]
    return MixtureCard(info=replace(info, notes=(*notes, *info.notes)), thumbnails=thumbnails)


def _draw_shares(axes: Any, members: tuple[MemberInfo, ...], total: int) -> None:
    places = np.arange(len(members))
    bars = axes.barh(places, [100 * one.share for one in members], color="#9db7ee")
    texts = [
        f"{one.share:.1%}: {one.frames_per_epoch:,} of {counted(one.selected_frames, 'frame')}, "
        f"{one.passes_per_epoch:.3g} {plural(one.passes_per_epoch, 'pass')}"
        for one in members
    ]
    axes.bar_label(bars, texts, padding=3, fontsize=7)
    axes.set_yticks(places, [cut_inside(one.name, 44) for one in members], fontsize=8)
    axes.set_ylim(len(members) - 0.4, -0.6)
    axes.margins(x=0.35)
    more = f", the {len(members)} largest of {total}" if len(members) < total else ""
    axes.set_title(f"what an epoch takes of every dataset{more}", fontsize=9, loc="left")
    axes.set_xlabel("percent of an epoch")
