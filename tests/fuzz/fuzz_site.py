"""What a site is: something sound, of which one file at a time is damaged, and what must come out.

A site draws a damage from a random generator, applies it, uses the whole, and compares. A damage is plain data, so that
a past failure can be kept and applied again.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raypipe.errors import RaypipeError

TOP, IMAGE = "observation.images.top", "observation.images.still"
LENGTHS: Final = (3, 2, 4)
"""Frames of the episodes of made datasets."""

RIGHT, CHANGED = "right", "changed"
"""Equal to the undamaged data; or what the files say now."""


class WrongData(Exception):  # noqa: N818
    """A site got data that is neither the undamaged nor what the files say now."""


@dataclass(frozen=True)
class Damage:
    """One input: a file of a site with other content, and what is done with it then."""

    file: str
    content: bytes
    use: str


class Site:
    """Something sound in a folder of its own."""

    weight = 1
    """How many inputs of a mixed run are of this site, relative to others."""

    folder: Path

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def draw(self, rng: random.Random) -> Damage:
        """Return a damage; nothing is changed yet."""
        raise NotImplementedError

    def use(self, damage: Damage) -> str:
        """Use the damaged whole; return `RIGHT` or `CHANGED`, raise `WrongData`, or what the product raises."""
        raise NotImplementedError

    def names(self, error: RaypipeError, damage: Damage) -> bool:
        """Return whether an error tells where it is: the damaged file, or another that the damage leads to."""
        told = "\n".join([str(error), *getattr(error, "__notes__", ())])
        return any(name in told for name in (damage.file, str(self.folder), f"dataset {self.folder.name!r}"))

    def apply(self, damage: Damage) -> str:
        """Damage the file, use the whole, and mend the file."""
        with self.damaged(damage):
            return self.use(damage)

    @contextmanager
    def damaged(self, damage: Damage) -> Iterator[None]:
        """Have the damaged file in place while the body runs."""
        path = self.folder / damage.file
        sound = path.read_bytes()
        path.write_bytes(damage.content)
        try:
            yield
        finally:
            path.write_bytes(sound)
