"""Docstrings of the house as Markdown: ``::`` before a drawing goes, and names in backticks become links.

Only names that an API page shows are linked, so a docstring may speak of what is inside as well.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import griffe

_SHOWN = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
_ONE_NAME = re.compile(r"(?<![`\[])`([A-Za-z_]\w*)(?:\.(\w+))?`(?!`)")
_DRAWING = re.compile(r"^[ ]*::\n", re.MULTILINE)
_BEFORE_CODE = re.compile(r"::$", re.MULTILINE)


class HouseDocstrings(griffe.Extension):
    """Rewrites every docstring of the package when it is loaded."""

    def __init__(self, pages: str) -> None:
        super().__init__()
        shown = [
            name for page in Path(__file__).parent.glob(f"{pages}/*.md") for name in _SHOWN.findall(page.read_text())
        ]
        self._paths = {name.rsplit(".", 1)[-1]: name for name in shown}

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Change the docstrings of a package and of all that is in it."""
        for path in [path for path in self._paths.values() if pkg[path.removeprefix("raypipe.")].is_module]:
            functions = pkg[path.removeprefix("raypipe.")].functions
            self._paths |= {name: f"{path}.{name}" for name in functions if not name.startswith("_")}
        members = {name: set(pkg[path.removeprefix("raypipe.")].members) for name, path in self._paths.items()}
        for docstring in _docstrings(pkg):
            docstring.value = self._as_markdown(docstring.value, members)

    def _as_markdown(self, text: str, members: Mapping[str, set[str]]) -> str:
        def link(match: re.Match[str]) -> str:
            name, member = match.groups()
            if name not in self._paths or (member and member not in members[name]):
                return match.group()
            target = self._paths[name] + (f".{member}" if member else "")
            return f"[{match.group()}][{target}]"

        return _ONE_NAME.sub(link, _BEFORE_CODE.sub(":", _DRAWING.sub("", text)))


def _docstrings(item: griffe.Object) -> Iterator[griffe.Docstring]:
    if item.docstring:
        yield item.docstring
    for member in item.members.values():
        if not member.is_alias:
            yield from _docstrings(member)
