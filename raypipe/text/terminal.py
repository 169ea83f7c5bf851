"""What people read: the words of messages, what the program prints on a terminal, progress bars, and exit codes.

Text from a dataset cannot control the terminal, and no error is a raw traceback. Exit codes: 2 for what the user can
fix, 3 for a fault of raypipe itself; 1 is left for commands to report findings. Bars show in a terminal or a notebook;
elsewhere nothing is shown.
"""

import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raypipe import __version__
from raypipe.errors import RaypipeError, hide_logins

if TYPE_CHECKING:
    from rich.table import Table

BAD_INPUT: Final = 2
FAULT: Final = 3

_ES: Final = ("s", "x", "ch", "sh")
"""Endings of nouns whose plural ends in ``es``: batches, passes."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 frame``, ``0 frames``, ``1,200 batches``."""
    return f"{number:,} {plural(number, noun)}"


def plural(number: float, noun: str) -> str:
    """Return the noun that follows a number: singular for one, plural for any other."""
    if number == 1:
        return noun
    return f"{noun}es" if noun.endswith(_ES) else f"{noun}s"


def either(number: float, one: str, several: str) -> str:
    """Return the word that agrees with a number: ``is`` or ``are``, ``it`` or ``them``."""
    return one if number == 1 else several


def span_text(first: float, last: float) -> str:
    """Return a range with both ends, or its one number: ``3 to 461``, ``461``."""
    return f"{first}" if first == last else f"{first} to {last}"


def frames_text(start: int, stop: int) -> str:
    """Return the frames ``[start, stop)`` in words: ``frames 3 to 9``, ``frame 3``."""
    return f"{plural(stop - start, 'frame')} {span_text(start, stop - 1)}"


def cut_inside(text: str, most: int) -> str:
    """Return a text cut to `most` characters in its middle, since an error ends with what to do about it."""
    if len(text) <= most:
        return text
    kept = most - len(" ... ")
    return f"{text[: kept - kept // 2].rstrip()} ... {text[len(text) - kept // 2 :].lstrip()}"


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of raypipe from its own origin: a clone, a URL or an index."""
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").exists():
        return f"pip install --editable '{clone}[{extra}]'"
    # pip writes direct_url.json for packages that did not come from an index.
    told = (found.read_text("direct_url.json") for found in distributions(name="raypipe"))
    origin = json.loads(next(filter(None, told), "{}"))
    url, vcs = origin.get("url", ""), origin.get("vcs_info")
    if vcs:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install 'raypipe[{extra}] @ {url}'" if url else f"pip install 'raypipe[{extra}]'"


def first_of(names: Sequence[str], most: int) -> str:
    """Return names in a row, the first `most` alone if there are more: ``a, b and 4 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def constant_text(constant: Sequence[str], total: int) -> str:
    """Return which of a feature's numbers never change, by name; the first 8 if there are more."""
    if len(constant) == total:
        return f"none of its {total} numbers ever changes" if total > 1 else "its number never changes"
    verb = either(len(constant), "changes", "change")
    return f"{len(constant)} of its {total} numbers never {verb}: {first_of(constant, 8)}"


# C0 except tab and line break, DEL, C1, marks that change the direction of text, and surrogates, which Python uses for
# bytes of file names that are not UTF-8.
_UNSAFE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Return a text in which characters that a terminal would obey or cannot print are written as escapes."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def echo(text: str, *, err: bool = False) -> None:
    """Print a text that may contain names and tasks of a dataset; to standard error with `err`."""
    # Imported here: the library shows bars through this module but does not need typer.
    import typer

    typer.echo(visible(hide_logins(text)), err=err)


def _open_console(**options: Any) -> Any:
    """Return a rich console that passes all text through `visible`, for bars and their titles."""
    from rich.console import Console

    class Visible(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterator[Any]:
            for segment in super().render(renderable, options):
                # Control segments are rich's own commands to the terminal.
                yield segment if segment.control else segment._replace(text=visible(segment.text))

    return Visible(**options)


def print_table(renderable: Any) -> None:
    """Print a rich renderable as `echo` prints a text; a column's end does not cut an escape off."""
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.segment import Segment

    class Drawn:
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for text, style, control in plain.render(renderable, options):
                yield Segment(visible(text), style, control)

    if sys.stdout is None:
        return
    # Names and tasks are data: neither brackets nor colons in them are markup.
    plain = Console(width=None if sys.stdout.isatty() else 120, markup=False, emoji=False, highlight=False)
    plain.print(Drawn())


def lines_table(lines: Iterable[tuple[str, str]]) -> "Table":
    """Return names and texts as two columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines:
        # Names and tasks are data: do not read markup or emoji in them.
        table.add_row(name, Text(text))
    return table


def rows_table(titles: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[str]) -> "Table":
    """Return rows below their titles; columns are aligned right, as numbers are, except those named in `texts`."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in titles:
        if title in texts:
            table.add_column(title, overflow="fold")
        else:
            # A number that does not fit ends in an ellipsis: cut without one it would be another number.
            table.add_column(title, justify="right", overflow="ellipsis")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def run_to_an_end(command: Callable[[], Any], *, is_debug: bool) -> None:
    """Run a command; an error ends the program with a few lines, and with its traceback if `is_debug`."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Letters that the encoding of the terminal lacks become escapes, as they do on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        command()
    except (RaypipeError, OSError) as error:
        _tell_error(error, [str(error), *(f"  {note}" for note in getattr(error, "__notes__", ()))], is_debug=is_debug)
        sys.exit(BAD_INPUT)
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        report = f"This is a fault of raypipe {__version__}: please report it, with what --debug adds to the command."
        _tell_error(error, [f"unexpected {what}. {report}"], is_debug=is_debug)
        sys.exit(FAULT)


def _tell_error(error: BaseException, lines: list[str], *, is_debug: bool) -> None:
    if is_debug:
        echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    echo("raypipe: " + "\n".join(lines), err=True)


Bar = Callable[[], None]
"""Counts one more batch of an epoch."""


def is_shown() -> bool:
    """Return whether a person is looking: at a terminal, or at a notebook with ipywidgets, which a bar needs."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    is_notebook = type(shell).__name__ == "ZMQInteractiveShell" and find_spec("ipywidgets") is not None
    return sys.stderr.isatty() or is_notebook


@contextmanager
def progress_bar(title: str, num_batches: int, describe: Callable[[], str], *, is_on: bool) -> Iterator[Bar]:
    """Show a bar that counts batches, if `is_on` and a person looks.

    Args:
        describe: returns the text beside the bar, in which markup has no meaning; a thread calls it several times a
            second.
    """
    if not is_on or not is_shown():
        yield lambda: None
        return
    from rich import progress
    from rich.text import Text

    class Told(progress.ProgressColumn):
        def render(self, task: Any) -> Text:  # noqa: ARG002
            return Text(describe())

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        Told(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=_open_console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=num_batches)
        yield partial(bar.advance, task)


@contextmanager
def count_bar(title: str, total: int, *, is_on: bool, of_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar that counts up to `total` while the body runs, if `is_on` and a person is looking."""
    if not is_on or not is_shown() or not total:
        yield lambda _: None
        return
    from rich import progress

    size = (progress.DownloadColumn(), progress.TransferSpeedColumn())
    counts = size if of_bytes else (progress.MofNCompleteColumn(),)
    text = progress.TextColumn("{task.description}", markup=False)
    columns = (text, progress.BarColumn(), *counts, progress.TimeRemainingColumn())
    # A copy of the terminal's descriptor: raypipe captures standard error itself while it decodes a video.
    with os.fdopen(os.dup(2), "w") as terminal:
        console = _open_console(file=terminal, force_terminal=True)
        with progress.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.advance(task, count)
