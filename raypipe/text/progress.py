"""Progress bars for an epoch and for files, in a terminal or a notebook; elsewhere nothing is shown."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

from raypipe.text.terminal import open_console


class RecentSpeed(Protocol):
    """The latest speed of a loader, and the share of time it waits."""

    @property
    def samples_per_s(self) -> float: ...  # noqa: D102

    @property
    def wait_share(self) -> float: ...  # noqa: D102


class SpeedFigures(Protocol):
    """The part of `raypipe.feed.LoaderStats` that a bar shows."""

    @property
    def recent(self) -> RecentSpeed: ...  # noqa: D102


class Bar(Protocol):
    """Follows the progress of an epoch."""

    def advance(self, stats: SpeedFigures) -> None:
        """Count one more batch."""
        ...


class _NoBar:
    def advance(self, stats: SpeedFigures) -> None:
        """Show nothing."""


class _RichBar:
    def __init__(self, progress: Any, task: Any) -> None:
        self._progress = progress
        self._task = task

    def advance(self, stats: SpeedFigures) -> None:
        """Show one more batch, the speed, and the share of time that training waited for data."""
        told = f"{stats.recent.samples_per_s:,.0f} samples/s, waiting {stats.recent.wait_share:.0%}"
        self._progress.update(self._task, advance=1, told=told)


def is_shown() -> bool:
    """Return whether a person is looking: at a terminal, or at a notebook with ipywidgets, which a bar needs."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    is_notebook = type(shell).__name__ == "ZMQInteractiveShell" and find_spec("ipywidgets") is not None
    return sys.stderr.isatty() or is_notebook


@contextmanager
def progress_bar(title: str, num_batches: int, waiting: Callable[[], str], *, is_on: bool) -> Iterator[Bar]:
    """Show a bar while the body runs, if `is_on` and a person is looking.

    Args:
        waiting: returns what the first batch is waiting for; a thread calls it several times a second until then.
    """
    if not is_on or not is_shown():
        yield _NoBar()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Told(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(task.fields["told"] or waiting())

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        Told(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=open_console(stderr=True), transient=True) as progress:
        yield _RichBar(progress, progress.add_task(title, total=num_batches, told=""))


@contextmanager
def count_bar(title: str, total: int, *, is_on: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar that counts up to `total` while the body runs, if `is_on` and a person is looking."""
    if not is_on or not is_shown():
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # A copy of the terminal's descriptor: raypipe captures standard error itself while it decodes a video.
    with os.fdopen(os.dup(2), "w") as terminal:
        console = open_console(file=terminal, force_terminal=True)
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.advance(task, count)
