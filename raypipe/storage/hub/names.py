"""Names of datasets on the Hub: ``owner/name``, or ``hf://datasets/owner/name@revision/folder``."""

import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
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
    """The tag, branch or commit that the user gave or `resolve` chose."""
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
    """Empty if none is given."""
    folder: str


def is_repo_id(root: str | os.PathLike[str]) -> bool:
    """Return whether `root` names a Hub dataset: ``hf://datasets/...``, or ``owner/name`` unless that path exists."""
    text = os.fspath(root)
    if text.startswith(SCHEME):
        return _URI.fullmatch(text) is not None
    return isinstance(root, str) and _NAME.fullmatch(text) is not None and not os.path.exists(text)


def is_commit(revision: str) -> bool:
    """Return whether `revision` is a full commit SHA; it may consist of digits only."""
    return _COMMIT.fullmatch(revision) is not None


def leaves_folder(name: str) -> bool:
    """Return whether a foreign name, appended to a folder, may lead out of that folder.

    Check every name of a listing and every revision: both become paths on this machine.
    """
    path = PurePosixPath(name)
    return path.is_absolute() or not path.parts or ".." in path.parts or not name.isprintable() or "\\" in name


def check_revision(revision: str, root: str) -> str:
    """Return the revision if it is safe as a file name in the cache.

    Raises:
        ConfigError: it leads out of the cache.
    """
    if revision and leaves_folder(revision):
        raise ConfigError(
            f"{root!r} is asked for at revision {revision!r}, which is none; give a tag, branch or commit"
        )
    return revision


def parse_name(root: str, revision: str = "") -> HubName:
    """Return the parts of `root`; `revision` counts if `root` names none."""
    match = _URI.fullmatch(root)
    if match is None and not _NAME.fullmatch(root):
        raise ConfigError(f"{root!r} is no dataset of the Hub; give OWNER/NAME or {SCHEME}OWNER/NAME@REVISION")
    if match is None:
        return HubName(repo_id=root, revision=check_revision(revision, root), folder="")
    given = unquote(match["revision"] or "")
    if given and revision and given != revision:
        raise ConfigError(
            f"{root!r} names revision {given!r}, and revision={revision!r} is given too; give one of them"
        )
    return HubName(
        repo_id=_check_repo_id(match), revision=check_revision(given or revision, root), folder=_check_folder(match)
    )


def parse_pinned(uri: str) -> HubSource | None:
    """Return the commit that a URI names, or None if it names none."""
    match = _URI.fullmatch(uri)
    if match is None or not is_commit(match["revision"] or ""):
        return None
    commit = match["revision"]
    return HubSource(repo_id=_check_repo_id(match), revision=commit, commit=commit, folder=_check_folder(match))


def _check_repo_id(match: re.Match[str]) -> str:
    repo_id = match["repo_id"]
    if not _NAME.fullmatch(repo_id):
        raise ConfigError(f"{match[0]!r} names {repo_id!r}, which is no OWNER/NAME of the Hub")
    return repo_id


def _check_folder(match: re.Match[str]) -> str:
    folder = (match["folder"] or "").strip("/")
    if folder and leaves_folder(folder):
        raise ConfigError(f"{match[0]!r} names the folder {folder!r}, which leads out of the dataset; give one in it")
    return folder


def quote_name(name: str) -> str:
    """Return a revision as one part of an address, with slashes quoted."""
    return quote(name, safe="")
