"""Figures whose texts are shown as they stand, whatever names and tasks of datasets hold.

matplotlib sets what is between two dollar signs as a formula, and warns of letters that its font lacks. Imports
matplotlib: import it where something is drawn.
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
    """A figure without formulas: every text in it is drawn letter by letter, also when it is saved later.

    A letter that the font lacks is a box, and no warning: pages have the text, and `has_letters` finds out.
    """

    def draw(self, renderer: Any) -> None:
        """Draw it, as every way to show or save a figure does."""
        with self._as_it_stands():
            super().draw(renderer)

    def get_tightbbox(self, renderer: Any = None, *, bbox_extra_artists: Any = None) -> Any:
        """Return the box around what is drawn: notebooks cut figures to it."""
        with self._as_it_stands():
            return super().get_tightbbox(renderer, bbox_extra_artists=bbox_extra_artists)

    @contextmanager
    def _as_it_stands(self) -> Iterator[None]:
        for text in self.findobj(Text):
            text.set_parse_math(False)
        for axis in self.findobj(Axis):
            formatter = axis.get_major_formatter()
            if isinstance(formatter, ScalarFormatter):
                # Some styles write the numbers of scales as formulas.
                formatter.set_useMathText(False)
        # The setting is for texts that are made while the figure is drawn, such as those of ticks.
        with rc_context({"text.parse_math": False}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from")
            yield


def has_letters(text: str) -> bool:
    """Return whether the font of figures has all letters of a text."""
    known = [_letters(path) for path in _font_files()]
    return all(letter.isspace() or any(ord(letter) in some for some in known) for letter in text)


def boxes_told(texts: Iterable[str]) -> list[str]:
    """Return one text that says what boxes are, where some of these texts have them in a picture; else none."""
    return [] if all(map(has_letters, texts)) else ["boxes are letters that the font lacks"]


def _font_files() -> list[str]:
    """Return the files that matplotlib looks for a letter in: one for each family of its settings."""
    found: list[str] = []
    for family in FontProperties().get_family():
        try:
            found.append(findfont(FontProperties(family=[family]), fallback_to_default=False))
        except ValueError:
            continue
    return found or [findfont(FontProperties())]


@cache
def _letters(path: str) -> frozenset[int]:
    return frozenset(get_font(path).get_charmap())
