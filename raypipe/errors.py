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
from collections.abc import Iterable


class RaypipeError(Exception):
    """Any error that raypipe raises on purpose."""


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


def suggest(wanted: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'? Known: ..."`` for a name that is not in `known`."""
    names = list(known)
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{hint} Known: {', '.join(map(repr, names)) or 'none'}."
