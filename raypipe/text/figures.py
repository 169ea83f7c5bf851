"""Figures that show texts literally, whatever the names and tasks of datasets contain.

By default matplotlib sets text between two dollar signs as a formula, and warns of letters that its font lacks. This
module imports matplotlib: import it only where you draw.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from matplotlib import rc_context
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.text import Text
from matplotlib.ticker import ScalarFormatter


class PlainFigure(Figure):
    """A figure without formulas: it draws every text letter by letter, also when it is saved later.

    A letter that the font lacks becomes a box, without a warning: pages have the text, and `has_letters` detects it.
    """

    def draw(self, renderer: Any) -> None:
        """Draw the figure; every way to show or save it calls this."""
        with self._as_it_stands():
            super().draw(renderer)

    def get_tightbbox(self, renderer: Any = None, *, bbox_extra_artists: Any = None) -> Any:
        """Return the box around the drawing; notebooks crop figures to it."""
        with self._as_it_stands():
            return super().get_tightbbox(renderer, bbox_extra_artists=bbox_extra_artists)

    @contextmanager
    def _as_it_stands(self) -> Iterator[None]:
        for text in self.findobj(Text):
            text.set_parse_math(False)
        for axis in self.findobj(Axis):
            formatter = axis.get_major_formatter()
            if isinstance(formatter, ScalarFormatter):
                # Some styles write the numbers on axes as formulas.
                formatter.set_useMathText(False)
        # The setting covers texts that matplotlib makes while it draws, such as those of ticks.
        with rc_context({"text.parse_math": False}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from")
            yield


def has_letters(text: str, family: str | None = None) -> bool:
    """Return whether the font that draws a text has all its letters.

    Args:
        family: the font of the text; None: the families of matplotlib's settings.
    """
    known = [_letters(path) for path in _font_files(family)]
    return all(letter.isspace() or any(ord(letter) in some for some in known) for letter in text)


def boxes_told(texts: Iterable[str], family: str | None = None) -> list[str]:
    """Return one text that explains the boxes, if a picture shows boxes in some of these texts; else none."""
    return [] if all(has_letters(text, family) for text in texts) else ["boxes are letters that the font lacks"]


def _font_files(family: str | None) -> list[str]:
    """Return the font files that matplotlib searches for a letter: of this family, or of all in its settings."""
    found: list[str] = []
    for one in FontProperties(family=family).get_family():
        try:
            found.append(findfont(FontProperties(family=[one]), fallback_to_default=False))
        except ValueError:
            continue
    return found or [findfont(FontProperties())]


@cache
def _letters(path: str) -> frozenset[int]:
    return frozenset(get_font(path).get_charmap())
