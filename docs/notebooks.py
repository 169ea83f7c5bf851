"""The notebooks of ``examples/`` as pages of the site, with the outputs of the run that ``make docs`` makes.

A page asks for one by ``<!-- notebook: NAME -->``. Where it was not run since it changed, its cells are shown alone.
"""

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).parent
EXAMPLES = _DOCS.parent / "examples"
RUN = _DOCS.parent / "build" / "notebooks"
"""Where ``make docs`` puts them after it has run them."""

_PLACE = re.compile(r"<!-- notebook: ([\w.]+) -->")
_MARK = '<div class="notebook-output" data-cell="{}"></div>'
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the cells of a notebook where a page asks for them; MkDocs calls this for every page."""
    found = _PLACE.search(markdown)
    if found is None:
        return markdown
    cells = read_cells(found[1])
    page.meta["outputs"] = {number: outputs_html(cell) for number, cell in enumerate(cells)}
    return markdown.replace(found[0], "\n\n".join(_cell_markdown(number, cell) for number, cell in enumerate(cells)))


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Put the outputs behind their cells: in HTML already, which no rule of Markdown may change."""
    for number, output in page.meta.pop("outputs", {}).items():
        content = content.replace(_MARK.format(number), output)
    return content


def read_cells(name: str) -> list[dict[str, Any]]:
    """Return the cells of a notebook, with outputs if it was run as it is now."""
    cells = _cells(EXAMPLES / name)
    if not (RUN / name).exists():
        return cells
    run = _cells(RUN / name)
    return run if [_source(one) for one in run] == [_source(one) for one in cells] else cells


def outputs_html(cell: dict[str, Any]) -> str:
    """Return what a cell has given, as HTML; files are named from the folder that it ran in."""
    parts = [_output_html(one).replace(f"{RUN}/", "") for one in cell.get("outputs", ())]
    return f'<div class="notebook-output">{"".join(parts)}</div>' if any(parts) else ""


def _cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def _cell_markdown(number: int, cell: dict[str, Any]) -> str:
    if cell["cell_type"] != "code":
        return _source(cell)
    return f"```python\n{_source(cell)}\n```\n\n{_MARK.format(number)}"


def _output_html(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        return "".join(data["text/html"])
    if "image/png" in data:
        png = "".join(data["image/png"]).replace("\n", "")
        assert base64.b64decode(png, validate=True)
        return f'<img alt="output of the cell above" src="data:image/png;base64,{png}">'
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"<pre>{html.escape(_COLOURS.sub('', text))}</pre>" if text.strip() else ""
