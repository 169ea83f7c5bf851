"""Files of a commit: listed, fetched whole, or read by range.

`fetch_files` is for ``raypipe download``: several files at once, each continued after a break and verified by its hash
before it gets its name. `HubFiles` is for a run. It takes names and sizes from the listing, without a request. It
verifies a whole file by its hash, and a range to be the one requested, of a file of the listed size.
"""

import errno
import functools
import hashlib
import json
import os
import posixpath
import shutil
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from raypipe.errors import DownloadError
from raypipe.storage.hub.cache import (
    HubFile,
    HubPlace,
    HubSource,
    Listing,
    cache_place,
    leaves_folder,
    listing_locked,
    read_listing,
    with_network,
    write_listing,
)
from raypipe.storage.hub.client import (
    PROGRESS_BYTES,
    RANGE_REFUSED,
    Client,
    HubRequest,
    PassingError,
    is_offline,
    odd_answer,
)
from raypipe.storage.local_files import replace_file
from raypipe.storage.node_cache import DaemonPool
from raypipe.text import join_within, parse_json

NUM_THREADS: Final = 8
"""As in huggingface_hub."""

_LAST_S: Final = 1.0
"""Time for threads to finish writing after one has failed; a thread that waits for a server is left behind."""

OnBytes = Callable[[int], None]
"""Called from several threads with the number of bytes received; negative when bytes have to be downloaded again."""


def list_files(client: Client, source: HubSource, place: HubPlace) -> dict[str, HubFile]:
    """Return the files of a commit from the listing in the cache, or ask the Hub for one and keep it.

    A node asks once: its other processes wait for the one that asks.
    """
    if (known := read_listing(place.listing)) is not None:
        return known
    if is_offline():
        raise DownloadError(
            f"HF_HUB_OFFLINE is set, and the files of {source} are not known at {str(place.folder)!r}. "
            f"{with_network(source.repo_id, source.revision)}"
        )
    with listing_locked(place):
        if (known := read_listing(place.listing)) is not None:
            return known
        listing = _request_listing(client, source)
        # If the cache belongs to another user, the listing is requested again next time.
        with suppress(OSError):
            write_listing(place.listing, listing)
        return listing


def _request_listing(client: Client, source: HubSource) -> dict[str, HubFile]:
    ask, listing = source.ask(), dict[str, HubFile]()
    for one in client.read_pages(f"{source.repo_id}/tree/{source.commit}?recursive=true&expand=false", ask):
        try:
            if one["type"] != "file":
                continue
            name, lfs = str(one["path"]), one.get("lfs") or {}
            file = HubFile(
                size_bytes=int(lfs.get("size", one["size"])),
                git_oid=str(one["oid"]),
                sha256=str(lfs.get("oid") or ""),
                xet_hash=str(one.get("xetHash") or ""),
            )
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise odd_answer(ask, f"{one!r:.200} tells no name, size and hash of a file") from error
        if file.size_bytes < 0:
            raise odd_answer(ask, f"{one!r:.200} is of a negative size")
        if not file.has_hash:
            raise DownloadError(f"{ask} lists {name!r} with the hash {file.content_hash!r}, which is none")
        if leaves_folder(name):
            raise DownloadError(f"{ask} lists a file {name!r}, which would lie outside its folder; it is not fetched")
        listing[name] = file
    return listing


def fetch_files(client: Client, source: HubSource, place: HubPlace, files: Listing, advance: OnBytes) -> list[int]:
    """Put `files` in place, and return the sizes of those that were not complete; the others cost no request.

    The caller holds the lock of the place. A file is complete if it has the size and hash that the Hub lists; the hash
    is computed once, and again when the file's modification time has changed. The first error stops all threads; what
    is complete is kept.
    """
    job = _FetchJob(client, source, place, advance, _read_stamps(place.stamps))
    pool = DaemonPool(NUM_THREADS, "raypipe-fetch")
    try:
        fetches = [pool.submit(functools.partial(job.fetch, name, one)) for name, one in files.items()]
        done = [fetch.result() for fetch in as_completed(fetches)]
    except BaseException:
        # A thread that waits minutes for a server delays neither Ctrl-C nor the end of the program. It ends when its
        # server answers or it gives up, and it writes nothing.
        client.stop()
        pool.close(_LAST_S)
        raise
    finally:
        job.write_stamps()
    return [size_bytes for size_bytes in done if size_bytes is not None]


@dataclass(slots=True)
class _FetchJob:
    client: Client
    source: HubSource
    place: HubPlace
    advance: OnBytes
    stamps: dict[str, str]
    """Of files that were verified, by name."""
    blob_locks: dict[str, threading.Lock] = field(default_factory=dict)
    """By hash: two names with the same content share a blob."""

    def fetch(self, name: str, file: HubFile) -> int | None:
        """Fetch a file and return its size, or None if it was complete."""
        try:
            with self.blob_locks.setdefault(file.content_hash, threading.Lock()):
                if self._is_complete(name, file):
                    self.advance(file.size_bytes)
                    return None
                self._download(name, file)
                return file.size_bytes
        except OSError as error:
            why = "the disk is full" if error.errno == errno.ENOSPC else f"{type(error).__name__}: {error}"
            raise DownloadError(
                f"cannot keep {self.source.ask(name)} below {str(self.place.folder)!r}: {why}"
            ) from error

    def write_stamps(self) -> None:
        """Remember which files were verified."""
        # A thread that was left behind may still add to the original.
        content = json.dumps(dict(self.stamps), indent=1)
        # This fails too on a full disk; then the files are verified again next time.
        with suppress(OSError):
            replace_file(self.place.stamps, content.encode())

    def _is_complete(self, name: str, file: HubFile) -> bool:
        path = self.place.folder / name
        if not path.exists() and self.place.blobs is not None:
            # The content may be there already under another name or from another commit.
            blob = self.place.blobs / file.content_hash
            if has_content(blob, file):
                _link(blob, path)
        if not file.is_at(path):
            return False
        stamp = _stamp(path, file)
        if self.stamps.get(name) != stamp and not has_content(path, file):
            return False
        self.stamps[name] = stamp
        return True

    def _download(self, name: str, file: HubFile) -> None:
        half, target = self.place.partial / file.content_hash, self.place.folder / name
        half.parent.mkdir(parents=True, exist_ok=True)
        _Transfer(self.client, self.source.file_url(name), file, half, self.advance).run(self.source.ask(name))
        self.client.check_running()
        target.parent.mkdir(parents=True, exist_ok=True)
        if self.place.blobs is None:
            os.replace(half, target)
        else:
            self.place.blobs.mkdir(parents=True, exist_ok=True)
            blob = self.place.blobs / file.content_hash
            os.replace(half, blob)
            _link(blob, target)
        self.stamps[name] = _stamp(target, file)


@dataclass(slots=True)
class _Transfer:
    """One file, streamed to a partial file, continued after a break, and verified by its hash."""

    client: Client
    url: str
    file: HubFile
    partial: Path
    advance: OnBytes
    most_received: int = 0
    """In any attempt so far: a server that ignores ranges sends the same bytes forever."""

    def run(self, ask: HubRequest) -> None:
        """Download what is missing; retry what may pass."""
        self.client.attempt(ask, self._attempt)

    def _attempt(self) -> None:
        file, start = self.file, self.partial.stat().st_size if self.partial.exists() else 0
        if start > file.size_bytes:
            self.partial.unlink()
            start = 0
        self.advance(start)
        received = start
        if start < file.size_bytes or not self.partial.exists():
            received = self._stream(start)
        if received == file.size_bytes and has_content(self.partial, file):
            return
        self.advance(-received)
        # A short file is removed too: the answer was complete, so it was not this file.
        self.partial.unlink(missing_ok=True)
        if received < file.size_bytes:
            raise PassingError(f"it ended after {received} of {file.size_bytes} bytes")
        raise PassingError(f"its content is not what the Hub lists, which has the hash {file.content_hash}")

    def _stream(self, start: int) -> int:
        """Return the size of the partial file when the response ends."""
        begun = received = start
        try:
            with self.client.open(self.url, {"Range": f"bytes={start}-"} if start else {}) as response:
                told = response.headers.get("Content-Range", "")
                if start and not (response.status_code == 206 and told.startswith(f"bytes {start}-")):
                    self.advance(-start)
                    begun = received = 0
                with open(self.partial, "r+b" if begun else "wb") as stream:
                    stream.seek(begun)
                    for chunk in self.client.pieces(response):
                        received += len(chunk)
                        self.advance(len(chunk))
                        if received > self.file.size_bytes:
                            # Not written: the caller has reserved room for the listed size only.
                            break
                        stream.write(chunk)
                        # So that bytes survive if the process is killed, and are not downloaded again.
                        stream.flush()
                    os.fsync(stream.fileno())
        except PassingError as fault:
            self.advance(-received)
            if fault.status == RANGE_REFUSED:
                self.partial.unlink(missing_ok=True)
            best = max(start, self.most_received)
            fault.has_progress = received - best >= PROGRESS_BYTES
            self.most_received = max(received, best)
            raise
        return received


class HubFiles:
    """Files of a commit, by ``datasets/owner/name@commit/file``; what `Remote` uses of an fsspec filesystem."""

    protocol = "raypipe-hub"

    def __init__(self, source: HubSource) -> None:
        self._source = source
        self.root = f"datasets/{source.repo_id}@{source.commit}"
        self._client = Client()
        self._listing_lock = threading.Lock()
        self._listing: dict[str, HubFile] | None = None

    @property
    def listing(self) -> dict[str, HubFile]:
        """The files of the commit, by name."""
        # Not a cached_property; see `Remote.entries`.
        with self._listing_lock:
            if self._listing is None:
                self._listing = list_files(self._client, self._source, cache_place(self._source))
            return self._listing

    def find(self, path: str, **_: Any) -> dict[str, dict[str, int]]:
        """Return all files below a folder, from the listing."""
        below = f"{self._name(path)}/".lstrip("/")
        return {
            f"{self.root}/{name}": {"size": file.size_bytes}
            for name, file in self.listing.items()
            if name.startswith(below)
        }

    def cat_file(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes ``[start, end)`` of a file, with one request."""
        name, size = self._name(path), self._file(path).size_bytes
        stop = size if end is None else min(end, size)
        if start >= stop:
            return b""
        return self._client.attempt(self._source.ask(name), lambda: self._read_range(name, start, stop, size))

    def fetch(self, path: str, target: str, progress: Callable[[int], None]) -> None:
        """Write a whole file to `target`, verified by its hash; `progress` may raise to stop it."""
        name, file, received = self._name(path), self._file(path), 0
        kept = cache_place(self._source).folder / name
        if has_content(kept, file):
            # A part of the dataset was downloaded before.
            progress(file.size_bytes)
            shutil.copyfile(kept, target)
            return

        def advance(count: int) -> None:
            nonlocal received
            received += count
            progress(min(received, file.size_bytes))

        transfer = _Transfer(self._client, self._source.file_url(name), file, Path(target), advance)
        transfer.run(self._source.ask(name))

    def has_hash(self, path: str, copy: str) -> bool:
        """Return whether a local copy of a file has the hash that the Hub lists."""
        return has_content(Path(copy), self._file(path))

    def _read_range(self, name: str, start: int, stop: int, size: int) -> bytes:
        is_whole = start == 0 and stop == size
        headers = {} if is_whole else {"Range": f"bytes={start}-{stop - 1}"}
        with self._client.open(self._source.file_url(name), headers) as response:
            told = response.headers.get("Content-Range", "")
            if not is_whole and told != f"bytes {start}-{stop - 1}/{size}":
                asked = f"the bytes {start} to {stop - 1} of {size}"
                raise PassingError(f"asked for {asked}, and {told or 'no range'!r} came")
            try:
                content = join_within(self._client.pieces(response), stop - start)
            except ValueError as error:
                raise PassingError(f"asked for the bytes {start} to {stop - 1}, and what came has {error}") from error
        if len(content) != stop - start:
            raise PassingError(f"{len(content)} of {stop - start} bytes came")
        return content

    def _name(self, path: str) -> str:
        name = path.removeprefix(self.root).strip("/")
        return posixpath.normpath(name) if name else ""

    def _file(self, path: str) -> HubFile:
        try:
            return self.listing[self._name(path)]
        except KeyError:
            raise FileNotFoundError(path) from None


def open_files(source: HubSource) -> HubFiles:
    """Return the files of a commit; a process keeps one object per commit, with its listing."""
    return _open_files(source, str(cache_place(source).listing))


@functools.lru_cache(maxsize=512)
def _open_files(source: HubSource, _: str) -> HubFiles:
    return HubFiles(source)


def has_content(path: Path, file: HubFile) -> bool:
    """Return whether a local file has the size and the hash, SHA-256 or git's, that the Hub lists."""
    if not file.is_at(path):
        return False
    as_git = functools.partial(hashlib.sha1, f"blob {file.size_bytes}\0".encode(), usedforsecurity=False)
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, hashlib.sha256 if file.sha256 else as_git).hexdigest() == file.content_hash


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
