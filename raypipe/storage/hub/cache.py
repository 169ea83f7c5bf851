"""From the name of a dataset on the Hub to a commit, and to its place on disk: huggingface_hub's cache, or a folder.

A name is ``owner/name``, or ``hf://datasets/owner/name@revision/folder``. `resolve` turns it into a commit once, on the
driver; every node then reads that commit.

::

    HF_HUB_CACHE/.locks/datasets--OWNER--NAME/raypipe.lock      one download at a time
    HF_HUB_CACHE/datasets--OWNER--NAME/
      refs/REVISION            the commit behind a tag or branch
      trees/COMMIT.json        the listing of a commit: sizes and hashes
      blobs/HASH               a file, by its hash
      snapshots/COMMIT/NAME    a link to a blob
      raypipe/                 partial files, and stamps of what was verified

All but ``raypipe/`` and ``raypipe.lock`` is huggingface_hub's layout, so that both use each other's files. Only version
2 of huggingface_hub reads listings; a listing of another format is requested again.
"""

import json
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import quote, unquote

from raypipe.errors import ConfigError, DownloadError, suggest
from raypipe.storage.hub.client import Client, HubRequest, endpoint, is_offline, ref_names
from raypipe.storage.local_files import replace_file, wait_for_lock
from raypipe.text import first_of, parse_json

SCHEME: Final = "hf://datasets/"

FORMAT_TAGS: Final = ("v3.0", "v2.1", "v2.0")
"""The tags of the formats that raypipe reads, newest first."""

_MAIN: Final = "main"

_PART: Final = r"(?!\.{1,2}(?:/|$))[\w.-]+"
_NAME: Final = re.compile(rf"{_PART}/{_PART}")
_URI: Final = re.compile(
    rf"{SCHEME}(?P<repo_id>[^/@]+/[^/@]+)(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<folder>.*))?"
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
"""A full SHA; it may consist of digits only."""

_HASH: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

_LISTING_FORMAT: Final = 1
_SHOWN_FILES: Final = 3

_TOUCH_S = 5.0
"""After which a holder shows again that it is at work."""

_SNAPSHOTS: dict[tuple[str, str], str] = {}
"""Folders of complete snapshots by cache and URI. A process checks each once: a check takes a system call per file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A dataset on the Hub: as a person wrote it, and as `resolve` returns it at one commit."""

    repo_id: str
    revision: str
    """The tag, branch or commit that the user gave or `resolve` chose; empty if none is given."""
    commit: str = ""
    """The full SHA; empty until it is resolved."""
    folder: str = ""
    """Where the dataset is in the repo; empty for its root."""

    @property
    def uri(self) -> str:
        """The address that always gives the same bytes."""
        below = f"/{self.folder}" if self.folder else ""
        return f"{SCHEME}{self.repo_id}@{self.commit}{below}"

    def file_url(self, name: str) -> str:
        """Return the address of a file of the commit."""
        return f"{endpoint()}/datasets/{self.repo_id}/resolve/{self.commit}/{quote(name)}"

    def ask(self, file: str = "") -> HubRequest:
        """Return what a request for the commit or a file of it is about."""
        return HubRequest(repo_id=self.repo_id, revision=self.revision, file=file)

    def __str__(self) -> str:
        shown = "" if self.revision == self.commit else f" (commit {self.commit})"
        return f"{self.repo_id!r} at revision {self.revision!r}{shown}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """One file of a commit, as the Hub lists it."""

    size_bytes: int
    git_oid: str
    """The hash of git's blob: the content, or the pointer to it if `sha256` is known."""
    sha256: str = ""
    """The hash of the content, if the Hub keeps it outside git."""
    xet_hash: str = ""

    @property
    def content_hash(self) -> str:
        """The hash that identifies the content, and names its blob in the cache."""
        return self.sha256 or self.git_oid

    @property
    def has_hash(self) -> bool:
        """Whether `content_hash` has the form of a hash, since it becomes a file name."""
        return _HASH.fullmatch(self.content_hash) is not None

    def is_at(self, path: Path) -> bool:
        """Return whether a local file has this size; its content may be another."""
        try:
            found = os.stat(path)
            return found.st_size == self.size_bytes and stat.S_ISREG(found.st_mode)
        except OSError:
            return False


Listing = Mapping[str, HubFile]
"""The files of a commit by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPlace:
    """Where the files of one commit go, and the files kept with them."""

    folder: Path
    """Files by name."""
    blobs: Path | None
    """Contents by hash; None if they are in `folder` itself."""
    listing: Path
    """Always in the cache, wherever the files go: a commit has one listing."""
    partial: Path
    stamps: Path
    lock: Path


def is_repo_id(root: str | os.PathLike[str]) -> bool:
    """Return whether `root` names a Hub dataset: ``hf://datasets/...``, or ``owner/name`` unless that path exists."""
    text = os.fspath(root)
    if text.startswith(SCHEME):
        return _URI.fullmatch(text) is not None
    return isinstance(root, str) and _NAME.fullmatch(text) is not None and not os.path.exists(text)


def leaves_folder(name: str) -> bool:
    """Return whether a foreign name, appended to a folder, may lead out of that folder.

    Check every name of a listing and every revision: both become paths on this machine.
    """
    path = PurePosixPath(name)
    return path.is_absolute() or not path.parts or ".." in path.parts or not name.isprintable() or "\\" in name


def _check_revision(revision: str, root: str) -> str:
    """Return the revision if it is safe as a file name in the cache."""
    if revision and leaves_folder(revision):
        raise ConfigError(
            f"{root!r} is asked for at revision {revision!r}, which is none; give a tag, branch or commit"
        )
    return revision


def parse_name(root: str, revision: str = "") -> HubSource:
    """Return the dataset that `root` names, not resolved yet; `revision` counts if `root` names none."""
    match = _URI.fullmatch(root)
    if match is None and not _NAME.fullmatch(root):
        raise ConfigError(f"{root!r} is no dataset of the Hub; give OWNER/NAME or {SCHEME}OWNER/NAME@REVISION")
    if match is None:
        return HubSource(repo_id=root, revision=_check_revision(revision, root))
    given = unquote(match["revision"] or "")
    if given and revision and given != revision:
        raise ConfigError(
            f"{root!r} names revision {given!r}, and revision={revision!r} is given too; give one of them"
        )
    repo_id, folder = match["repo_id"], (match["folder"] or "").strip("/")
    if not _NAME.fullmatch(repo_id):
        raise ConfigError(f"{root!r} names {repo_id!r}, which is no OWNER/NAME of the Hub")
    if folder and leaves_folder(folder):
        raise ConfigError(f"{root!r} names the folder {folder!r}, which leads out of the dataset; give one in it")
    return HubSource(repo_id=repo_id, revision=_check_revision(given or revision, root), folder=folder)


def parse_pinned(uri: str) -> HubSource | None:
    """Return the commit that a URI names, or None if it names none."""
    match = _URI.fullmatch(uri)
    commit = match["revision"] if match else None
    return replace(parse_name(uri), commit=commit) if commit and _COMMIT.fullmatch(commit) else None


def resolve(root: str, revision: str = "", *, is_fresh: bool = False, client: Client | None = None) -> HubSource:
    """Return the commit of a dataset on the Hub.

    A full SHA is used as it is. A format tag comes from the cache if the cache also has the listing of its commit, so
    that a second start sends no request. raypipe asks the Hub for any other tag or branch. With ``HF_HUB_OFFLINE`` only
    the cache is used.

    Args:
        root: ``owner/name``, or ``hf://datasets/owner/name``, also with ``@revision``.
        revision: a tag, branch or commit; empty for the newest tag of `FORMAT_TAGS`, else ``main``.
        is_fresh: ask the Hub even for a tag that the cache knows.
    """
    name = parse_name(root, revision)
    if _COMMIT.fullmatch(name.revision):
        return replace(name, commit=name.revision)
    try:
        if is_offline():
            return _resolve_offline(name)
        known = None if is_fresh else _resolve_known(name)
        return known or _resolve_online(name, client or Client())
    except (ConfigError, DownloadError) as error:
        if "://" in root:
            raise
        # A mistyped path looks like the name of a dataset.
        raise type(error)(
            f"no such folder: {os.path.abspath(root)!r}. As a dataset of the Hugging Face Hub: {error}"
        ) from error


def _resolve_known(name: HubSource) -> HubSource | None:
    """Return the commit of a format tag, if the cache has its listing."""
    wanted = name.revision or FORMAT_TAGS[0]
    commit = read_ref(name.repo_id, wanted) if wanted in FORMAT_TAGS else ""
    pinned = replace(name, revision=wanted, commit=commit)
    return pinned if commit and read_listing(cache_place(pinned).listing) is not None else None


def _resolve_online(name: HubSource, client: Client) -> HubSource:
    chosen = name.revision
    if not chosen:
        tags = ref_names(client.read_json(f"{name.repo_id}/refs", name.ask()), "tags")
        chosen = next((tag for tag in FORMAT_TAGS if tag in tags), _MAIN)
    ask = HubRequest(repo_id=name.repo_id, revision=chosen)
    # Not the target of the ref: an annotated tag points to a tag object, and the cache keeps files by commit.
    told: Any = client.read_json(f"{name.repo_id}/revision/{quote(chosen, safe='')}", ask)
    commit = str(told.get("sha", "")) if isinstance(told, dict) else ""
    if not _COMMIT.fullmatch(commit):
        raise DownloadError(f"the Hub tells no commit of {ask}, but {commit!r}. Check HF_ENDPOINT.")
    write_ref(name.repo_id, chosen, commit)
    return replace(name, revision=chosen, commit=commit)


def _resolve_offline(name: HubSource) -> HubSource:
    wanted = (name.revision,) if name.revision else (*FORMAT_TAGS, _MAIN)
    for revision in wanted:
        if commit := read_ref(name.repo_id, revision):
            return replace(name, revision=revision, commit=commit)
    refs = _repo_folder(name.repo_id) / "refs"
    known = sorted(path.relative_to(refs).as_posix() for path in refs.rglob("*") if path.is_file())
    raise DownloadError(
        f"HF_HUB_OFFLINE is set, and the cache does not know revision {name.revision or ' or '.join(wanted)!r} of "
        f"{name.repo_id!r}{suggest(name.revision, known)} {with_network(name.repo_id, name.revision)}"
    )


def cache_place(source: HubSource) -> HubPlace:
    """Return the place of a commit in huggingface_hub's cache."""
    repo = _repo_folder(source.repo_id)
    return HubPlace(
        folder=repo / "snapshots" / source.commit,
        blobs=repo / "blobs",
        listing=repo / "trees" / f"{source.commit}.json",
        partial=repo / "raypipe" / "partial",
        stamps=repo / "raypipe" / f"{source.commit}.json",
        lock=_cache_root() / ".locks" / repo.name / "raypipe.lock",
    )


def folder_place(source: HubSource, out: str | os.PathLike[str]) -> HubPlace:
    """Return the place of a commit in a folder of the user's."""
    folder = Path(out).expanduser().absolute()
    kept = folder / ".cache" / "raypipe"
    place = replace(cache_place(source), folder=folder, blobs=None)
    return replace(place, partial=kept / "partial", stamps=kept / "stamps.json", lock=kept / "lock")


@contextmanager
def locked(place: HubPlace) -> Iterator[None]:
    """Let one process at a time download to a place, on one node or on a shared file system.

    A thread shows those who wait that the holder lives: also where it compares hashes, or the Hub lets it wait.
    """
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(_TOUCH_S):
            with suppress(OSError):
                os.utime(place.partial)

    with _lock(place.lock, place.partial):
        # Whoever may not write there fetches nothing, and needs no such folder.
        with suppress(OSError):
            place.partial.mkdir(parents=True, exist_ok=True)
        toucher = threading.Thread(target=touch, name="raypipe-lock", daemon=True)
        toucher.start()
        try:
            yield
        finally:
            ended.set()
            toucher.join()


@contextmanager
def _lock(path: Path, moves: Path) -> Iterator[None]:
    """Hold a lock file of the cache, which other users may share; see `wait_for_lock`."""
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as lock:

        def try_lock() -> bool:
            with suppress(Timeout):
                lock.enter_context(WeakFileLock(path, timeout=1.0))
                return True
            return False

        wait_for_lock(str(path), try_lock, str(moves), "HF_HUB_CACHE")
        yield


@contextmanager
def listing_locked(place: HubPlace) -> Iterator[None]:
    """Let one process at a time request the listing of a commit; the others find it in the cache.

    Not the lock for downloads.
    """
    with ExitStack() as lock:
        # The cache may be another user's or read-only, or the holder may hang; then each process asks by itself.
        with suppress(OSError, DownloadError):
            lock.enter_context(_lock(place.lock.with_name(f"{place.listing.stem}.lock"), place.listing.parent))
        yield


def _find_missing(place: HubPlace, source: HubSource, *, is_all: bool) -> list[str]:
    """Return the files of the listing that are missing or of another size: all of them, or only the first."""
    listing = read_listing(place.listing)
    if listing is None:
        # Fetched by a huggingface_hub that keeps no listings. Without network, use the folder as it is.
        return [] if is_all and (place.folder / source.folder / "meta/info.json").is_file() else ["all files"]
    missing = (name for name, one in listing.items() if not one.is_at(place.folder / name))
    return list(islice(missing, None if is_all else 1))


def find_snapshot(uri: str) -> str | None:
    """Return the local folder of a pinned URI if all its files are in the cache, else None; sends no request."""
    source = parse_pinned(uri)
    if source is None:
        return None
    key = (str(_cache_root()), uri)
    if key in _SNAPSHOTS:
        return _SNAPSHOTS[key]
    place = cache_place(source)
    missing = _find_missing(place, source, is_all=is_offline())
    if missing and is_offline():
        raise DownloadError(
            f"{source.repo_id!r} at commit {source.commit} is not complete at {str(place.folder)!r}, and "
            f"HF_HUB_OFFLINE is set. Missing: {first_of(missing, _SHOWN_FILES)}. "
            f"{with_network(source.repo_id, source.commit)}"
        )
    if missing:
        return None
    _SNAPSHOTS[key] = str(place.folder / source.folder)
    return _SNAPSHOTS[key]


def read_listing(path: Path) -> dict[str, HubFile] | None:
    """Return the listing in a file; None if it is missing, of another format, or forged.

    Others may write to the cache. A listing with a name that leads out of the commit's folder, or with an invalid hash,
    does not count and is requested again.
    """
    try:
        content = parse_json(path.read_bytes())
        if content["format_version"] != _LISTING_FORMAT:
            return None
        listing = {
            name: HubFile(
                size_bytes=int(one["size"]),
                git_oid=str(one["blob_id"]),
                sha256=str(one.get("lfs_sha256") or ""),
                xet_hash=str(one.get("xet_hash") or ""),
            )
            for name, one in content["files"].items()
        }
        return None if any(leaves_folder(name) or not one.has_hash for name, one in listing.items()) else listing
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_listing(path: Path, listing: Listing) -> None:
    """Write a listing in huggingface_hub's format."""
    files: dict[str, dict[str, Any]] = {}
    for name, one in sorted(listing.items()):
        files[name] = {"size": one.size_bytes, "blob_id": one.git_oid}
        if one.sha256:
            files[name] |= {"lfs_sha256": one.sha256, "lfs_size": one.size_bytes}
        if one.xet_hash:
            files[name]["xet_hash"] = one.xet_hash
    replace_file(path, json.dumps({"format_version": _LISTING_FORMAT, "files": files}, indent=1).encode())


def read_ref(repo_id: str, revision: str) -> str:
    """Return the commit that the cache has for a revision, or an empty string."""
    if leaves_folder(revision):
        return ""
    try:
        commit = (_repo_folder(repo_id) / "refs" / revision).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return commit if _COMMIT.fullmatch(commit) else ""


def write_ref(repo_id: str, revision: str, commit: str) -> None:
    """Remember the commit of a revision for use without network."""
    _check_revision(revision, repo_id)
    if revision != commit and read_ref(repo_id, revision) != commit:
        # The cache may belong to another user; then the Hub is asked again next time.
        with suppress(OSError):
            replace_file(_repo_folder(repo_id) / "refs" / revision, commit.encode())


def with_network(repo_id: str, revision: str) -> str:
    """Return how to fetch a revision that is wanted offline, for the end of a message."""
    return f"With network: HF_HUB_OFFLINE=0 raypipe download {repo_id}" + (
        f" --revision {revision}" if revision else ""
    )


def _cache_root() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().absolute()


def _repo_folder(repo_id: str) -> Path:
    return _cache_root() / f"datasets--{repo_id.replace('/', '--')}"
