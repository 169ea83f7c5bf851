"""Where files of the Hub are on disk: huggingface_hub's own cache, or a folder of the user's.

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
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from raypipe.errors import DownloadError
from raypipe.storage.hub.client import is_offline
from raypipe.storage.hub.names import HubSource, check_revision, is_commit, leaves_folder, parse_pinned
from raypipe.text import parse_json

_LISTING_FORMAT: Final = 1
_SHOWN_FILES: Final = 3

_SAY_S = 30.0
"""Warn of a wait for a lock after this time, as the node cache does."""

_WAIT_S = 600.0
"""How long to wait for a lock while nothing changes in the folder that its holder writes to."""

_LOOK_S: Final = 1.0

_TOUCH_S = 5.0
"""After which a holder shows again that it is at work."""

_HASH: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

_SNAPSHOTS: dict[tuple[str, str], str] = {}
"""Folders of complete snapshots by cache and URI. A process checks each once: a check takes a system call per file."""
_SNAPSHOTS_LOCK = threading.Lock()


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
    return HubPlace(
        folder=folder,
        blobs=None,
        listing=cache_place(source).listing,
        partial=kept / "partial",
        stamps=kept / "stamps.json",
        lock=kept / "lock",
    )


@contextmanager
def locked(place: HubPlace) -> Iterator[None]:
    """Let one process at a time download to a place, on one node or on a shared file system."""
    place.lock.parent.mkdir(parents=True, exist_ok=True)
    with _lock(place.lock, place.partial), _touched(place.partial):
        yield


@contextmanager
def _touched(folder: Path) -> Iterator[None]:
    """Show those who wait for a lock that its holder lives: also where it compares hashes, or the Hub lets it wait."""
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(_TOUCH_S):
            with suppress(OSError):
                os.utime(folder)

    # Whoever may not write there fetches nothing, and needs no such folder.
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    toucher = threading.Thread(target=touch, name="raypipe-lock", daemon=True)
    toucher.start()
    try:
        yield
    finally:
        ended.set()
        toucher.join()


@contextmanager
def _lock(path: Path, moves: Path) -> Iterator[None]:
    """Hold a lock file of the cache, which other users may share.

    Raises:
        DownloadError: nothing has changed in the folder `moves` for `_WAIT_S` while another process had the lock.
    """
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock

    since = begun = time.monotonic()
    is_said, seen = False, _look(moves)
    with ExitStack() as lock:
        while True:
            try:
                lock.enter_context(WeakFileLock(path, timeout=_LOOK_S))
                break
            except Timeout:
                now, found = time.monotonic(), _look(moves)
            if found != seen:
                since, seen = now, found
            if now - begun > _SAY_S and not is_said:
                warnings.warn(f"waits for the lock of {str(path)!r}, which another process has", stacklevel=2)
                is_said = True
            if now - since > _WAIT_S:
                raise DownloadError(
                    f"another process has the lock of {str(path)!r} for {now - begun:.0f} s, and nothing has moved. "
                    f"End it (`fuser {path}` tells which), or give HF_HUB_CACHE another folder."
                )
        yield


def _look(folder: Path) -> tuple[int, int]:
    """Return the modification time of a folder and the bytes in it, which change as files are fetched to it."""
    try:
        return os.stat(folder).st_mtime_ns, sum(one.stat().st_size for one in os.scandir(folder))
    except OSError:
        return 0, 0


@contextmanager
def listing_locked(place: HubPlace) -> Iterator[None]:
    """Let one process at a time request the listing of a commit; the others find it in the cache.

    Not the lock for downloads.
    """
    path, lock = place.lock.with_name(f"{place.listing.stem}.lock"), ExitStack()
    # The cache may belong to another user or be read-only, or the holder may hang; then each process asks by itself.
    with suppress(OSError, DownloadError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.enter_context(_lock(path, place.listing.parent))
    with lock:
        yield


def find_snapshot(uri: str) -> str | None:
    """Return the local folder of a pinned URI if all its files are in the cache, else None; sends no request.

    Raises:
        DownloadError: files are missing, and ``HF_HUB_OFFLINE`` forbids fetching them.
    """
    source = parse_pinned(uri)
    if source is None:
        return None
    key = (str(_cache_root()), uri)
    with _SNAPSHOTS_LOCK:
        known = _SNAPSHOTS.get(key)
    if known is not None:
        return known
    place = cache_place(source)
    missing = _find_missing(place, source, is_all=is_offline())
    if missing:
        if is_offline():
            raise _offline_error(source, place, missing)
        return None
    found = str(place.folder / source.folder)
    with _SNAPSHOTS_LOCK:
        _SNAPSHOTS[key] = found
    return found


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
    write_file(path, json.dumps({"format_version": _LISTING_FORMAT, "files": files}, indent=1))


def write_file(path: Path, text: str) -> None:
    """Write a small file; a reader sees the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_ref(repo_id: str, revision: str) -> str:
    """Return the commit that the cache has for a revision, or an empty string."""
    if leaves_folder(revision):
        return ""
    try:
        commit = (_repo_folder(repo_id) / "refs" / revision).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return commit if is_commit(commit) else ""


def write_ref(repo_id: str, revision: str, commit: str) -> None:
    """Remember the commit of a revision for use without network."""
    check_revision(revision, repo_id)
    if revision != commit and read_ref(repo_id, revision) != commit:
        try:
            write_file(_repo_folder(repo_id) / "refs" / revision, commit)
        except OSError:
            # The cache may belong to another user; then the Hub is asked again next time.
            return


def list_refs(repo_id: str) -> list[str]:
    """Return the revisions whose commit the cache knows."""
    refs = _repo_folder(repo_id) / "refs"
    return sorted(path.relative_to(refs).as_posix() for path in refs.rglob("*") if path.is_file())


def download_command(repo_id: str, revision: str) -> str:
    """Return the command that fetches a revision."""
    return f"raypipe download {repo_id}" + (f" --revision {revision}" if revision else "")


def _find_missing(place: HubPlace, source: HubSource, *, is_all: bool) -> list[str]:
    """Return the files of the listing that are missing or of another size: all of them, or only the first."""
    listing = read_listing(place.listing)
    if listing is None:
        # Fetched by a huggingface_hub that keeps no listings. Without network, use the folder as it is.
        return [] if is_all and (place.folder / source.folder / "meta/info.json").is_file() else ["all files"]
    missing = []
    for name, one in listing.items():
        try:
            is_there = os.stat(place.folder / name).st_size == one.size_bytes
        except OSError:
            is_there = False
        if not is_there:
            missing.append(name)
            if not is_all:
                break
    return missing


def _offline_error(source: HubSource, place: HubPlace, missing: list[str]) -> DownloadError:
    shown = ", ".join(missing[:_SHOWN_FILES])
    more = f" and {len(missing) - _SHOWN_FILES} more" if len(missing) > _SHOWN_FILES else ""
    return DownloadError(
        f"{source.repo_id!r} at commit {source.commit} is not complete at {str(place.folder)!r}, and HF_HUB_OFFLINE is "
        f"set. Missing: {shown}{more}. With network: HF_HUB_OFFLINE=0 {download_command(source.repo_id, source.commit)}"
    )


def _cache_root() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().absolute()


def _repo_folder(repo_id: str) -> Path:
    return _cache_root() / f"datasets--{repo_id.replace('/', '--')}"
