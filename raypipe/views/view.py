"""`View`: what all views can do, namely show themselves in a notebook and save to a file; and what several draw."""

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError
from raypipe.storage import check_writable, write_whole
from raypipe.text import counted, cut_inside, encode_pixels, figure_png, make_page, new_figure, page_part

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMED_LINES: Final = 12
_NAMED_OF_MORE: Final = 8
"""With more lines than that, the legend names this many; colours show where the others lie between them."""
_MOST_LINES: Final = 8
"""The most lines of one error in a picture."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Some pixels, and what they show."""

    pixels: NDArray[np.uint8]
    """``(height, width, 3)``."""
    caption: str


class View(ABC):
    """Something to look at: it shows itself at the end of a notebook cell, or saves itself to a file."""

    @property
    @abstractmethod
    def title(self) -> str:
        """One line that names what it shows."""

    @abstractmethod
    def figure(self) -> "Figure":
        """Return the view as a figure of matplotlib."""

    @abstractmethod
    def parts(self) -> list[str]:
        """Return the view as pieces of HTML, without the title."""

    def save(self, path: str | Path) -> Path:
        """Write the view to a file, in the format of its suffix, and return the path; the folder must exist."""
        path, writers = Path(path), self.writers()
        if path.suffix not in writers:
            raise ConfigError(
                f"cannot write {type(self).__name__} to {str(path)!r}: give a file that ends in {', '.join(writers)}"
            )
        check_writable(path)
        writers[path.suffix](path)
        return path

    def writers(self) -> Mapping[str, Callable[[Path], object]]:
        """Return the functions that write the view, by suffix of the file."""
        return {
            ".png": lambda path: write_whole(path, figure_png(self.figure())),
            ".html": lambda path: write_whole(path, self.page()),
        }

    def page(self) -> str:
        """Return the view as a self-contained HTML document."""
        return make_page(self.title, self._repr_html_())

    def _repr_html_(self) -> str:
        return str(page_part("view", self.title, "\n".join(self.parts())))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title})"


def stacked(width: float, heights: Sequence[float], *, above: float = 0.0) -> tuple["Figure", list[Any]]:
    """Return a figure, and in it a subfigure for each of these heights, one below the other.

    Each lays itself out: long names in one do not squeeze another.

    Args:
        above: the height of the title.
    """
    figure = new_figure(width, sum(heights) + above)
    return figure, list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])


def draw_picture(axes: Any, picture: Picture) -> None:
    """Draw pixels without axes, with the caption above."""
    axes.imshow(picture.pixels)
    axes.set_title(picture.caption, fontsize=8)
    axes.set_axis_off()


def draw_text(place: Any, lines: Sequence[str], **style: Any) -> None:
    """Draw lines of text at the top left of a subfigure."""
    axes = place.subplots()
    axes.set_axis_off()
    axes.text(0, 1, "\n".join(lines), va="top", transform=axes.transAxes, **style)


def draw_pictures(figure: Any, pictures: Sequence[Picture], columns: int) -> list[Any]:
    """Draw pictures in a row with this many places, and return their axes."""
    row = list(figure.subplots(1, columns, squeeze=False)[0])
    for axes, picture in zip_longest(row, pictures[:columns]):
        if picture is None:
            axes.set_axis_off()
        else:
            draw_picture(axes, picture)
    return row


def html_picture(picture: Picture) -> str:
    """Return a picture with its caption below."""
    return page_part("picture", encode_pixels(picture.pixels), picture.caption)


def html_texts(texts: Iterable[str], kind: str = "note") -> list[str]:
    """Return a paragraph for each text; `kind` is ``note``, ``warning`` or ``error``."""
    return [page_part("text", text, kind) for text in texts]


def html_plot(figure: "Figure", meaning: str) -> str:
    """Return a figure as HTML, with `meaning` as text for readers who cannot see it."""
    return page_part("image", figure_png(figure), meaning)


def spread(total: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `total`, evenly spread, from the first to the last."""
    return np.unique(np.linspace(0, total - 1, most).round().astype(int)).tolist() if total else []


def short_name(name: str) -> str:
    """Return a name without ``observation.`` and ``images.`` before it."""
    return name.removeprefix("observation.").removeprefix("images.") or name


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3].rstrip()}..."


def wrapped(text: str, width: int) -> list[str]:
    """Return a text as lines of at most `width` characters; a very long one loses its middle."""
    return textwrap.wrap(cut_inside(text, _MOST_LINES * width), width) or [""]


def duration(seconds: float) -> str:
    """Return a readable time: seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:,.2f} hours"


def numbers_told(total: int, shown: int) -> str:
    """Return how many numbers there are, and how many of them are not drawn."""
    return counted(total, "number") + (f", {total - shown:,} of them not drawn" if shown < total else "")


def not_drawn(names: Sequence[str], word: str) -> list[str]:
    """Return one text that counts and names what a picture leaves out; none if it leaves nothing out."""
    return [f"not drawn: {counted(len(names), word)}: {', '.join(names)}"] if names else []


def first_lines(lines: Sequence[str], most: int, noun: str = "line") -> list[str]:
    """Return at most `most` lines, and one more with the number of the others."""
    more = [f"and {counted(len(lines) - most, f'more {noun}')}"] if len(lines) > most else []
    return [*lines[:most], *more]


def line_colours(number: int) -> list[Any]:
    """Return a colour for each of `number` lines: matplotlib's ten, or colours of a rainbow if there are more."""
    from matplotlib import colormaps

    if number <= 10:
        return [colormaps["tab10"](place) for place in range(max(1, number))]
    return [colormaps["turbo"](0.02 + 0.96 * place / (number - 1)) for place in range(number)]


def draw_legend(axes: Any) -> None:
    """Name the lines of a plot at its right; of many lines only some, from the first to the last."""
    handles, _ = axes.get_legend_handles_labels()
    title = None
    if len(handles) > _NAMED_LINES:
        title = f"{_NAMED_OF_MORE} of {len(handles)}"
        handles = [handles[number] for number in spread(len(handles), _NAMED_OF_MORE)]
    style = {"fontsize": 7, "title_fontsize": 7, "frameon": False}
    axes.legend(handles=handles, title=title, loc="center left", bbox_to_anchor=(1.0, 0.5), **style)


def share_scales(axis: str, drawn: Iterable[tuple[Any, Sequence[str]]]) -> None:
    """Give plots of vectors with the same number names one scale: a state beside the action that commands it.

    Args:
        axis: ``x`` or ``y``.
        drawn: axes, and the names of their numbers; bare positions do not count as names.
    """
    first: dict[tuple[str, ...], Any] = {}
    for axes, names in drawn:
        if len(names) > 1 and not all(map(str.isdecimal, names)):
            known = first.setdefault(tuple(names), axes)
            if known is not axes:
                getattr(axes, f"share{axis}")(known)
                known.autoscale(axis=axis)
