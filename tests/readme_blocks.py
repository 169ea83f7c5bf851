"""The code blocks of the README, for the tests that run them."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def fenced(language: str) -> list[str]:
    """Return the README's code blocks of one language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    return [code for name, code in blocks if name == language]
