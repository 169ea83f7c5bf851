"""How a dataset on the Hub is called: ``owner/name``, or ``hf://datasets/owner/name@revision/folder``."""

import os
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

from raypipe.errors import ConfigError

SCHEME: Final = "hf://datasets/"

_PART: Final = r"(?!\.{1,2}(?:/|$))[\w.-]+"
_NAME: Final = re.compile(rf"{_PART}/{_PART}")
_URI: Final = re.compile(
    rf"{SCHEME}(?P<repo_id>[^/@]+/[^/@]+)(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<folder>.*))?"
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """One commit of a dataset on the Hub."""

    repo_id: str
    revision: str
    """The tag, branch or commit that was asked for or chosen."""
    commit: str
    """The full SHA."""
    folder: str = ""
    """Where the dataset is in the repo; empty for its root."""

    @property
    def uri(self) -> str:
        """The address that always gives the same bytes."""
        below = f"/{self.folder}" if self.folder else ""
        return f"{SCHEME}{self.repo_id}@{self.commit}{below}"

    def __str__(self) -> str:
        shown = "" if self.revision == self.commit else f" (commit {self.commit})"
        return f"{self.repo_id!r} at revision {self.revision!r}{shown}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A dataset on the Hub as a person wrote it."""

    repo_id: str
    revision: str
    """Empty where none is given."""
    folder: str


def is_repo_id(root: str | os.PathLike[str]) -> bool:
    """Return whether `root` names a dataset on the Hub: ``hf://datasets/...``, or ``owner/name`` that is no folder."""
    text = os.fspath(root)
    if text.startswith(SCHEME):
        return _URI.fullmatch(text) is not None
    return isinstance(root, str) and _NAME.fullmatch(text) is not None and not os.path.exists(text)


def is_commit(revision: str) -> bool:
    """Return whether `revision` is a full commit SHA; one of digits only is one too."""
    return _COMMIT.fullmatch(revision) is not None


def parse_name(root: str, revision: str = "") -> HubName:
    """Return what `root` says, with `revision` in place of none."""
    match = _URI.fullmatch(root)
    if match is None and not _NAME.fullmatch(root):
        raise ConfigError(f"{root!r} is no dataset of the Hub; give OWNER/NAME or {SCHEME}OWNER/NAME@REVISION")
    if match is None:
        return HubName(repo_id=root, revision=revision, folder="")
    given = unquote(match["revision"] or "")
    if given and revision and given != revision:
        raise ConfigError(
            f"{root!r} names revision {given!r}, and revision={revision!r} is given too; give one of them"
        )
    return HubName(repo_id=match["repo_id"], revision=given or revision, folder=(match["folder"] or "").strip("/"))


def parse_pinned(uri: str) -> HubSource | None:
    """Return the commit that a URI names, or None where it names none."""
    match = _URI.fullmatch(uri)
    if match is None or not is_commit(match["revision"] or ""):
        return None
    commit = match["revision"]
    folder = (match["folder"] or "").strip("/")
    return HubSource(repo_id=match["repo_id"], revision=commit, commit=commit, folder=folder)


def quote_name(name: str) -> str:
    """Return a revision or file name as one part of an address; slashes stay only in files."""
    return quote(name, safe="")
