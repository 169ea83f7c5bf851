"""Pages and pictures for people: one template, one style sheet, and the figures inside.

A page is self-contained, with pictures and videos in it. jinja2 escapes every text, so names and tasks of a dataset
are never markup. No figure is known to pyplot: none touches the figures of a notebook.
"""

import base64
import io
from collections.abc import Iterable, Sequence
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

    from raypipe.text.figures import PlainFigure

    assert max(width, height) <= MAX_INCHES, f"{width} x {height} inches: draw less of it"
    figure = PlainFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


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
