"""Fetches files of a commit: several at once, each continued after a break and verified before it gets its name."""

import errno
import json
import os
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from raypipe.errors import DownloadError
from raypipe.storage.hub.cache import (
    HubFile,
    HubPlace,
    Listing,
    download_command,
    read_listing,
    write_file,
    write_listing,
)
from raypipe.storage.hub.client import Client, HubRequest, is_offline, odd_answer
from raypipe.storage.hub.names import HubSource, leaves_folder
from raypipe.storage.hub.receive import OnBytes, Receiver, hash_of, size_of
from raypipe.text import parse_json

NUM_THREADS: Final = 8
"""As in huggingface_hub."""

_LAST_S: Final = 1.0
"""Time for threads to finish writing after one has failed; a thread that waits for a server is left behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """How many files and bytes were fetched."""

    num_fetched: int
    fetched_bytes: int
    num_skipped: int
    """Files that were complete already."""


def list_files(client: Client, source: HubSource, place: HubPlace) -> dict[str, HubFile]:
    """Return the files of a commit from the listing in the cache, or ask the Hub for one and keep it."""
    known = read_listing(place.listing)
    if known is not None:
        return known
    if is_offline():
        raise DownloadError(
            f"HF_HUB_OFFLINE is set, and the files of {source} are not known at {str(place.folder)!r}. With network: "
            f"HF_HUB_OFFLINE=0 {download_command(source.repo_id, source.revision)}"
        )
    ask = HubRequest(repo_id=source.repo_id, revision=source.revision)
    path = f"{source.repo_id}/tree/{source.commit}?recursive=true&expand=false"
    listing: dict[str, HubFile] = {}
    for one in client.read_pages(path, ask):
        if _is_file(one, ask):
            listing[_check_name(str(one["path"]), ask)] = _hub_file(one, ask)
    # If the cache belongs to another user, the listing is requested again next time.
    with suppress(OSError):
        write_listing(place.listing, listing)
    return listing


def fetch_files(client: Client, source: HubSource, place: HubPlace, files: Listing, advance: OnBytes) -> Fetched:
    """Put `files` in place; send no request for those that are complete already.

    The caller holds the lock of the place. A file is complete if it has the size and hash that the Hub lists; the hash
    is computed once, and again when the file's modification time has changed.

    Raises:
        DownloadError: a file cannot be fetched; the error names it. Complete files are kept.
    """
    job = _FetchJob(client, source, place, advance)
    try:
        done = _run_all(client, [partial(job.fetch, name, one) for name, one in files.items()])
    finally:
        job.write_stamps()
    fetched = [size_bytes for size_bytes in done if size_bytes is not None]
    return Fetched(num_fetched=len(fetched), fetched_bytes=sum(fetched), num_skipped=len(done) - len(fetched))


def _run_all(client: Client, jobs: Sequence[Callable[[], int | None]]) -> list[int | None]:
    """Return the results of the jobs, in the order in which they end; the first error stops the others.

    The jobs run on daemon threads: a thread that waits minutes for a server delays neither Ctrl-C nor the end of the
    program. A thread left behind ends when its server answers or it gives up, and it writes nothing.
    """
    waiting, ended = deque(jobs), queue.SimpleQueue[Future[int | None]]()

    def work() -> None:
        while True:
            try:
                job = waiting.popleft()
            except IndexError:
                return
            done: Future[int | None] = Future()
            try:
                done.set_result(job())
            except BaseException as error:
                done.set_exception(error)
            ended.put(done)

    threads = [threading.Thread(target=work, name="raypipe-fetch", daemon=True) for _ in jobs[:NUM_THREADS]]
    try:
        for thread in threads:
            thread.start()
        return [ended.get().result() for _ in jobs]
    except BaseException:
        waiting.clear()
        client.stop()
        until_s = time.monotonic() + _LAST_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, until_s - time.monotonic()))
        raise


class _FetchJob:
    def __init__(self, client: Client, source: HubSource, place: HubPlace, advance: OnBytes) -> None:
        self._client = client
        self._source = source
        self._place = place
        self._advance = advance
        self._stamps = _read_stamps(place.stamps)
        self._lock = threading.Lock()
        self._blob_locks: dict[str, threading.Lock] = {}
        self._receiver = Receiver(client, source, advance)

    def fetch(self, name: str, file: HubFile) -> int | None:
        """Fetch a file and return its size, or None if it was complete."""
        ask = HubRequest(repo_id=self._source.repo_id, revision=self._source.revision, file=name)
        with self._lock:
            # Two names with the same content share a blob.
            blob_lock = self._blob_locks.setdefault(file.content_hash, threading.Lock())
        try:
            with blob_lock:
                if self._is_complete(name, file):
                    self._advance(file.size_bytes)
                    return None
                self._download(name, file, ask)
                return file.size_bytes
        except OSError as error:
            why = "the disk is full" if error.errno == errno.ENOSPC else f"{type(error).__name__}: {error}"
            raise DownloadError(f"cannot keep {ask} below {str(self._place.folder)!r}: {why}") from error

    def write_stamps(self) -> None:
        """Remember which files were verified."""
        with self._lock:
            content = json.dumps(self._stamps, indent=1)
        # This fails too on a full disk; then the files are verified again next time.
        with suppress(OSError):
            write_file(self._place.stamps, content)

    def _is_complete(self, name: str, file: HubFile) -> bool:
        path = self._place.folder / name
        if not path.exists() and self._place.blobs is not None:
            # The content may be there already under another name or from another commit.
            blob = self._place.blobs / file.content_hash
            if _has_size(blob, file) and hash_of(blob, file) == file.content_hash:
                _link(blob, path)
        if not _has_size(path, file):
            return False
        if self._stamps.get(name) == _stamp(path, file):
            return True
        return hash_of(path, file) == file.content_hash and self._note(name, file)

    def _note(self, name: str, file: HubFile) -> bool:
        with self._lock:
            self._stamps[name] = _stamp(self._place.folder / name, file)
        return True

    def _download(self, name: str, file: HubFile, ask: HubRequest) -> None:
        half = self._place.partial / file.content_hash
        half.parent.mkdir(parents=True, exist_ok=True)
        self._client.attempt(ask, lambda: self._receiver.receive(name, file, half))
        self._client.check_running()
        target = self._place.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if self._place.blobs is None:
            os.replace(half, target)
        else:
            self._place.blobs.mkdir(parents=True, exist_ok=True)
            blob = self._place.blobs / file.content_hash
            os.replace(half, blob)
            _link(blob, target)
        self._note(name, file)


def _hub_file(one: Mapping[str, Any], ask: HubRequest) -> HubFile:
    lfs = one.get("lfs") or {}
    try:
        file = HubFile(
            size_bytes=int(lfs.get("size", one["size"])),
            git_oid=str(one["oid"]),
            sha256=str(lfs.get("oid") or ""),
            xet_hash=str(one.get("xetHash") or ""),
        )
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise odd_answer(ask, f"{one!r:.200} tells no size and hash of a file") from error
    if file.size_bytes < 0:
        raise odd_answer(ask, f"{one!r:.200} is of a negative size")
    if not file.has_hash:
        raise DownloadError(f"{ask} lists {one['path']!r} with the hash {file.content_hash!r}, which is none")
    return file


def _is_file(one: Any, ask: HubRequest) -> bool:
    if not isinstance(one, dict) or "type" not in one or "path" not in one:
        raise odd_answer(ask, f"the listing has {one!r:.200}, which is no file or folder")
    return bool(one["type"] == "file")


def _check_name(name: str, ask: HubRequest) -> str:
    if leaves_folder(name):
        raise DownloadError(f"{ask} lists a file {name!r}, which would lie outside its folder; it is not fetched")
    return name


def _has_size(path: Path, file: HubFile) -> bool:
    return path.is_file() and size_of(path) == file.size_bytes


def _stamp(path: Path, file: HubFile) -> str:
    found = os.stat(path)
    return f"{file.content_hash} {found.st_size} {found.st_mtime_ns}"


def _read_stamps(path: Path) -> dict[str, str]:
    try:
        return {str(name): str(stamp) for name, stamp in parse_json(path.read_bytes()).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _link(blob: Path, target: Path) -> None:
    """Make `target` a link to `blob` atomically; if links are not supported, move the blob there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    link = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        os.symlink(os.path.relpath(blob, target.parent), link)
    except OSError:
        os.replace(blob, target)
        return
    os.replace(link, target)
