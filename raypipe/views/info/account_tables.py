"""Verdicts and frames as tables for a terminal."""

from typing import TYPE_CHECKING

from raypipe.views.info.account import CheckedRun
from raypipe.views.info.where import LocatedStep

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = ("frames", "emitted", "skipped", "left_over", "to_come", "repeated", "rolled_back")


def verdict_table(checked: CheckedRun) -> "Table":
    """Return a row per epoch."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("epoch", *_COLUMNS):
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("verdict")
    for verdict in checked.verdicts:
        counts = [f"{getattr(verdict, f'num_{name}'):,}" for name in _COLUMNS]
        word = "NOT exactly once" if verdict.is_wrong else "not checked" if verdict.unchecked else "exactly once"
        table.add_row(str(verdict.epoch), *counts, word)
    return table


def step_table(located: LocatedStep) -> "Table":
    """Return a row per frame."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("dataset", "episode", "frame", "index", ""):
        table.add_column(name, justify="left" if name in ("dataset", "") else "right")
    for frame in located.frames:
        mark = "skipped" if frame.is_skipped else "repeat" if frame.is_repeat else ""
        values = (frame.dataset, frame.episode, frame.frame, frame.index, mark)
        table.add_row(*map(str, values))
    return table
