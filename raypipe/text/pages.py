"""Pages and pictures for people: one template, one style sheet, and the figures inside.

A page is self-contained, with pictures and videos in it. jinja2 escapes every text, so names and tasks of a dataset
are never markup. Figures show texts literally too: by default matplotlib sets text between two dollar signs as a
formula, and warns of letters that its font lacks. No figure is known to pyplot: none touches the figures of a notebook.
"""

import base64
import io
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure

MAX_INCHES: Final = 200
"""No figure is higher or wider: 60,000 pixels at 300 dpi, and matplotlib draws less than 65,536."""


def make_page(title: str, body: str) -> str:
    """Return a whole HTML document; the body is HTML already, the title is text."""
    # A plain text: what is added to it later is not escaped.
    return str(page_part("document", title, body))


def page_part(name: str, *values: Any, template: str = "text/templates/page.html") -> str:
    """Return the HTML that a macro of a template makes of some values; it escapes texts, but not the HTML of parts.

    Args:
        template: relative to the folder of the package.
    """
    made: str = getattr(_templates().get_template(template).module, name)(*values)
    return made


def page_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows of texts as a table, with numbers aligned right."""
    body = list(rows)
    columns = list(zip(*body, strict=True)) or [()] * len(titles)
    return page_part("table", titles, body, [bool(cells) and all(map(_is_number, cells)) for cells in columns])


def _is_number(text: str) -> bool:
    stripped = text.strip().rstrip("%").replace(",", "")
    try:
        float(stripped)
    except ValueError:
        return stripped == ""
    return True


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=PackageLoader("raypipe", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["base64"] = lambda data: Markup(base64.b64encode(data).decode())
    return made


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches, unknown to pyplot, that shows texts literally."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    assert max(width, height) <= MAX_INCHES, f"{width} x {height} inches: draw less of it"
    figure = _plain_figure()(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@cache
def _plain_figure() -> type["Figure"]:
    """Return the class of figures without formulas: they draw every text letter by letter, also when saved later.

    A letter that the font lacks becomes a box, without a warning: pages have the text, and `has_letters` detects it.
    """
    from matplotlib import rc_context
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.ticker import ScalarFormatter

    @contextmanager
    def literally(figure: Figure) -> Iterator[None]:
        for text in figure.findobj(Text):
            text.set_parse_math(False)
        for axis in figure.findobj(Axis):
            formatter = axis.get_major_formatter()
            if isinstance(formatter, ScalarFormatter):
                # Some styles write the numbers on axes as formulas.
                formatter.set_useMathText(False)
        # The setting covers texts that matplotlib makes while it draws, such as those of ticks.
        with rc_context({"text.parse_math": False}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from")
            yield

    class PlainFigure(Figure):
        def draw(self, renderer: Any) -> None:
            # Every way to show or save a figure calls this; notebooks also crop it to its box.
            with literally(self):
                super().draw(renderer)

        def get_tightbbox(self, renderer: Any = None, *, bbox_extra_artists: Any = None) -> Any:
            with literally(self):
                return super().get_tightbbox(renderer, bbox_extra_artists=bbox_extra_artists)

    return PlainFigure


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
    from matplotlib.font_manager import FontProperties, findfont

    found: list[str] = []
    for one in FontProperties(family=family).get_family():
        try:
            found.append(findfont(FontProperties(family=[one]), fallback_to_default=False))
        except ValueError:
            continue
    return found or [findfont(FontProperties())]


@cache
def _letters(path: str) -> frozenset[int]:
    from matplotlib.font_manager import get_font

    return frozenset(get_font(path).get_charmap())


def count_whole(*scales: Any) -> None:
    """Let the axes of a plot count in whole numbers."""
    from matplotlib.ticker import MaxNLocator

    for scale in scales:
        scale.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def figure_png(figure: "Figure", dpi: int = 110) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def encode_pixels(pixels: NDArray[np.uint8], kind: str = "png", **options: Any) -> bytes:
    """Return pixels as the bytes of a PNG file, or of another kind, without scaling."""
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, np.ascontiguousarray(pixels), format=kind, **options)
    return buffer.getvalue()
