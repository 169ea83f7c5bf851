"""The README and the pages of the documentation, and the code blocks in them, for the tests that run them."""

import re
import shlex
import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
PAGES = REPOSITORY / "docs" / "pages"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    code: str
    line: int
    """Where its code begins, counted from 1."""


def all_pages() -> list[Path]:
    """Return the README and every page."""
    return [README, *sorted(PAGES.rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [Block(match[1], match[2], text.count("\n", 0, match.start(2)) + 1) for match in found]


def fenced(language: str, page: Path = README) -> list[str]:
    """Return the code of a page's blocks of one language."""
    return [block.code for block in blocks(page) if block.language == language]


def prose(page: Path) -> str:
    """Return a page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(block: Block) -> list[list[str]]:
    """Return the arguments of the ``raypipe`` commands in a block, without what explains them.

    In a shell block that is a comment; in a block without a language it stands in a column of its own.
    """
    lines = [line for line in block.code.replace("\\\n", " ").splitlines() if line.startswith("raypipe ")]
    if not block.language:
        lines = [line.split("  ")[0] for line in lines]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def has_placeholder(arguments: list[str]) -> bool:
    """Return whether a command has a word for the reader to replace, as ROOT or OWNER/NAME."""
    return any(re.fullmatch(r"[A-Z][A-Z/_]+", argument) for argument in arguments)


def load_docs(name: str) -> ModuleType:
    """Return a program of the documentation, such as ``pictures``."""
    spec = spec_from_file_location(f"docs_{name}", REPOSITORY / "docs" / f"{name}.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
