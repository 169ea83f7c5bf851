"""The errors of raypipe: one class per person who must act.

::

    RaypipeError
      ConfigError (also ValueError)   the caller asked for the impossible
      DatasetError                    the files are not what the metadata says
        DecodeError                   a video did not yield a promised frame
      ResumeError                     a saved state belongs to another plan
      DownloadError                   the hub or network failed after retries

Every class takes one string and nothing else, so that an error crosses Ray processes intact.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

_LOGIN: Final = re.compile(r"(?i)(https?://)[^/?#\s]+@|\b([a-z][a-z0-9+.-]*://)[^/?#\s:@]*:[^/?#\s]*@")
"""User and password in a URI. The part before the @ of ``abfs://container@account`` is neither."""


def hide_logins(text: str) -> str:
    """Return a text with users and passwords removed from its URIs, safe to show or write to a file."""
    return _LOGIN.sub(lambda found: f"{found[1] or found[2]}***@", text) if "@" in text else text


class RaypipeError(Exception):
    """Any error that raypipe raises on purpose; its message and notes contain no password."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(hide_logins(one) if isinstance(one, str) else one for one in args))

    def add_note(self, note: str) -> None:
        """Add a line to the message, without passwords."""
        super().add_note(hide_logins(note))


class ConfigError(RaypipeError, ValueError):
    """The caller asked for something impossible; raised before any work starts."""


class DatasetError(RaypipeError):
    """The files of a dataset are not what its metadata says."""


class DecodeError(DatasetError):
    """A video or image did not yield a promised frame."""


class ResumeError(RaypipeError):
    """A saved state belongs to another plan."""


class DownloadError(RaypipeError):
    """The hub or the network failed after retries."""


_NOT_OF_DATA: Final = (MemoryError, AssertionError, ImportError)


def is_data_fault(error: BaseException) -> bool:
    """Return whether an error that a library raised while reading a span may be the fault of the span's data.

    It is not when memory runs out, a library is missing, or raypipe itself is wrong.
    """
    # torch's class for a device that is out of memory; a RuntimeError.
    is_out_of_memory = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, Exception) and not isinstance(error, _NOT_OF_DATA) and not is_out_of_memory


@contextmanager
def as_damage(describe: Callable[[Exception], RaypipeError]) -> Iterator[None]:
    """Replace any error that a file's content causes in the body with the error that `describe` returns.

    Use it around code that parses foreign files: no library documents which errors damaged bytes cause. Three kinds
    pass through: errors of raypipe; errors of the system, which have an errno and are not the content's fault; and a
    plain NotImplementedError, with which a reader says that the file is sound but of an unknown kind.
    """
    try:
        yield
    except RaypipeError:
        raise
    except Exception as error:
        is_of_system = isinstance(error, OSError) and error.errno is not None
        if not is_data_fault(error) or is_of_system or type(error) is NotImplementedError:
            raise
        raise describe(error) from error


def causes(error: BaseException | None, *, also_context: bool) -> Iterator[BaseException]:
    """Yield an error and those that it came from; with `also_context`, also one that was being handled meanwhile."""
    while error is not None:
        yield error
        error = error.__cause__ or (error.__context__ if also_context else None)


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Add a note, such as where it happened, to any raypipe error from the body."""
    try:
        yield
    except RaypipeError as error:
        error.add_note(note)
        raise


LEAVE_OUT: Final = (
    "leave such episodes out: those that you know with selection={'exclude': (...)}, in a mixture that of the dataset, "
    "those that come up with on_bad_episode='skip'."
)
"""What to do about a bad episode, for the end of a message that does not know its number."""


def without_episode(episode: int, root: str) -> str:
    """Return how to go on without a bad episode, for the end of a message."""
    return (
        f"To go on without the episode: selection={{'exclude': ({episode},)}}, in a mixture that of the dataset, or "
        f"on_bad_episode='skip' for all that is bad. `raypipe validate {root}` lists what is."
    )


def note_episode(error: BaseException, doing: str, episode: int, root: str) -> None:
    """Add the episode to an error, and how to go on without it unless the message already says so."""
    error.add_note(f"while {doing} episode {episode} of {root!r}")
    # Storage that does not answer is not bad data: the episode must not be left out.
    if not isinstance(error, DownloadError) and "on_bad_episode" not in str(error):
        error.add_note(without_episode(episode, root))


def suggest(wanted: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'? Known: ..."`` for a name that is not in `known`."""
    names = list(known)
    near = difflib.get_close_matches(str(wanted), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{hint} Known: {', '.join(map(repr, names)) or 'none'}."
