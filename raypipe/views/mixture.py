"""The card of a mixture: its members with a frame of each, and what an epoch takes from each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from raypipe.mixture import Mixture
from raypipe.text import counted, cut_inside, new_figure, page_part, page_table, plural
from raypipe.views.card import first_thumbnail
from raypipe.views.info.mixture import MemberInfo, MixtureInfo, describe_opened
from raypipe.views.view import (
    Picture,
    View,
    draw_pictures,
    duration,
    html_picture,
    short_name,
    stacked,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PICTURED_MEMBERS: Final = 24
"""The most members to decode frames of: those with the largest shares."""
_LISTED_MEMBERS: Final = 60
_DRAWN_PICTURES: Final = 288
"""48 rows of them are 91 inches high, so that the figure, with the members below, stays under `MAX_INCHES`."""
_NOTES_SHOWN: Final = 30
_COLUMNS: Final = 6
_WIDTH: Final = 12.0
_TITLES: Final = (
    "dataset",
    "",
    "robot",
    "fps",
    "episodes",
    "frames",
    "share",
    "an epoch",
    "passes",
    "cameras",
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MixtureCard(View):
    """The contents of a mixture."""

    info: MixtureInfo
    thumbnails: Mapping[str, tuple[Picture, ...]]
    """The middle frame of a member's first episode, camera by camera, for the members with the largest shares."""

    @property
    def title(self) -> str:
        """The number of datasets, and the name of the mixture."""
        info = self.info
        return (
            f"{info.mixture}: {counted(info.datasets, 'dataset')}, {counted(info.frames_per_epoch, 'frame')} an epoch"
        )

    @property
    def members(self) -> tuple[MemberInfo, ...]:
        """The members, the largest share first."""
        return tuple(sorted(self.info.members, key=lambda one: -one.frames_per_epoch))

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
        figure = new_figure(_WIDTH, sum(heights) + 0.4)
        places = stacked(figure, heights)
        for place, row in zip(places, rows, strict=False):
            draw_pictures(place, row, _COLUMNS)
        _draw_shares(places[-1].subplots(), shown, len(self.info.members))
        more = f"\n{len(drawn)} of {len(pictures)} pictures shown" if len(drawn) < len(pictures) else ""
        figure.suptitle(f"{self.title}{more}", fontsize=11)
        return figure

    def parts(self) -> list[str]:
        """Return the card as pieces of HTML."""
        parts = [page_part("lines", self._lines())]
        bad = [page_part("text", f"skipped: {name} ({root}): {error}", "error") for name, root, error in self.info.bad]
        notes = [page_part("text", f"{name}: {text}" if name else text) for name, text in self.info.notes]
        cut = (
            [page_part("text", f"and {counted(len(notes) - _NOTES_SHOWN, 'more note')}")]
            if len(notes) > _NOTES_SHOWN
            else []
        )
        if bad or notes:
            parts += [page_part("heading", "What is odd about it"), *bad, *notes[:_NOTES_SHOWN], *cut]
        rows = [self._row(one) for one in self.members[:_LISTED_MEMBERS]]
        parts += [page_part("heading", "Datasets"), page_table(_TITLES, rows)]
        if len(self.members) > len(rows):
            parts.append(page_part("text", f"and {len(self.members) - len(rows)} more with smaller shares"))
        return parts

    def _lines(self) -> list[tuple[str, str]]:
        info = self.info
        robots = ", ".join(f"{name or '-'} ({count})" for name, count in info.robots.items())
        return [
            ("datasets", f"{info.datasets:,}"),
            ("robots", robots),
            ("episodes", f"{info.episodes:,}"),
            ("frames", f"{info.frames:,}: {duration(info.hours * 3600)}"),
            ("epoch", f"{counted(info.frames_per_epoch, 'frame')}; shares {info.weights}"),
            *(("camera", f"{name}  {text}{self._lacking(name)}") for name, text in info.cameras.items()),
        ]

    def _lacking(self, name: str) -> str:
        missing = self.info.missing.get(name, 0)
        return f"  (black for {missing} of {counted(self.info.datasets, 'dataset')})" if missing else ""

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
    largest = sorted(range(len(info.members)), key=lambda number: -info.members[number].frames_per_epoch)
    thumbnails = {}
    for number in largest[:_PICTURED_MEMBERS]:
        dataset = mixture.members[number].dataset
        found = [first_thumbnail(dataset, own) for own in info.members[number].cameras.values()]
        thumbnails[info.members[number].name] = tuple(one for one in found if one is not None)
    return MixtureCard(info=info, thumbnails=thumbnails)


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
