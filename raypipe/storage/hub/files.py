"""The files of one commit as an fsspec filesystem: read by range, through `Client`.

File names and sizes come from the listing, without a request. A node requests the listing of a commit once and keeps it
in the Hub's cache. A whole file is verified by its hash. A range is verified to be the one requested, of a file of the
listed size.
"""

import functools
import posixpath
import shutil
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from raypipe.storage.hub.cache import HubFile, cache_place, listing_locked, read_listing
from raypipe.storage.hub.client import Client, HubRequest, PassingError, file_url
from raypipe.storage.hub.fetch import list_files
from raypipe.storage.hub.names import HubSource
from raypipe.storage.hub.receive import Receiver, hash_of, size_of
from raypipe.text import join_within

_BLOCK_BYTES: Final = 4 << 20
"""Read-ahead of an open file: a request costs as much as some megabytes."""


class HubFiles(AbstractFileSystem):  # type: ignore[misc]
    """Files of a commit, by ``datasets/owner/name@commit/file``; read-only."""

    protocol = "raypipe-hub"
    cachable = False

    def __init__(self, source: HubSource) -> None:
        super().__init__()
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
                self._listing = self._list()
            return self._listing

    def _list(self) -> dict[str, HubFile]:
        place = cache_place(self._source)
        known = read_listing(place.listing)
        if known is not None:
            return known
        with listing_locked(place):
            return list_files(self._client, self._source, place)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return kind and size of a file or folder, from the listing."""
        name = self._name(path)
        if name in self.listing:
            return {"name": f"{self.root}/{name}", "size": self.listing[name].size_bytes, "type": "file"}
        if not name or name in self._folders:
            return {"name": f"{self.root}/{name}".rstrip("/"), "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Return the files and folders in a folder, from the listing."""
        name = self._name(path)
        if name in self.listing:
            return [self.info(path)] if detail else [path]
        inside = [one for one in (*self.listing, *self._folders) if posixpath.dirname(one) == name and one != name]
        if not inside and name not in self._folders:
            raise FileNotFoundError(path)
        found = [self.info(f"{self.root}/{one}") for one in sorted(inside)]
        return found if detail else [one["name"] for one in found]

    def find(self, path: str, detail: bool = False, **_: Any) -> Any:
        """Return all files below a folder, from the listing."""
        name = self._name(path)
        below = f"{name}/" if name else ""
        names = [one for one in sorted(self.listing) if one.startswith(below) or one == name]
        infos = {info["name"]: info for info in (self.info(f"{self.root}/{one}") for one in names)}
        return infos if detail else list(infos)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return the bytes ``[start, end)`` of a file, with one request."""
        file, first = self._file(path), start or 0
        stop = min(file.size_bytes if end is None else end, file.size_bytes)
        if first >= stop:
            return b""
        ask = self._ask(path)
        return self._client.attempt(ask, lambda: self._read_range(path, first, stop))

    def fetch(self, path: str, target: str, progress: Callable[[int], None]) -> None:
        """Write a whole file to `target`, verified by its hash; `progress` may raise to stop it."""
        file, received, kept = self._file(path), [0], cache_place(self._source).folder / self._name(path)
        if self.has_hash(path, kept):
            # A part of the dataset was downloaded before.
            progress(file.size_bytes)
            shutil.copyfile(kept, target)
            return

        def advance(count: int) -> None:
            received[0] += count
            progress(min(received[0], file.size_bytes))

        receiver = Receiver(self._client, self._source, advance)
        name = self._name(path)
        self._client.attempt(self._ask(path), lambda: receiver.receive(name, file, Path(target)))

    def has_hash(self, path: str, copy: str | Path) -> bool:
        """Return whether a local copy of a file has the hash that the Hub lists."""
        file, kept = self._file(path), Path(copy)
        return kept.is_file() and size_of(kept) == file.size_bytes and hash_of(kept, file) == file.content_hash

    def _open(self, path: str, mode: str = "rb", **_: Any) -> AbstractBufferedFile:
        size = self._file(path).size_bytes
        return _HubStream(self, path, mode, block_size=_BLOCK_BYTES, cache_type="readahead", size=size)

    def _read_range(self, path: str, start: int, stop: int) -> bytes:
        url = file_url(self._source.repo_id, self._source.commit, self._name(path))
        size = self._file(path).size_bytes
        is_whole = start == 0 and stop == size
        with self._client.open(url, {} if is_whole else {"Range": f"bytes={start}-{stop - 1}"}) as response:
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

    @cached_property
    def _folders(self) -> frozenset[str]:
        parents = {posixpath.dirname(name) for name in self.listing}
        return frozenset(
            "/".join(parts[: depth + 1]) for parts in (one.split("/") for one in parents) for depth in range(len(parts))
        )

    def _name(self, path: str) -> str:
        name = path.removeprefix(self.root).strip("/")
        return posixpath.normpath(name) if name else ""

    def _file(self, path: str) -> HubFile:
        try:
            return self.listing[self._name(path)]
        except KeyError:
            raise FileNotFoundError(path) from None

    def _ask(self, path: str) -> HubRequest:
        return HubRequest(repo_id=self._source.repo_id, revision=self._source.commit, file=self._name(path))


class _HubStream(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end))


def open_files(source: HubSource) -> HubFiles:
    """Return the files of a commit; a process keeps one object per commit, with its listing."""
    return _open_files(source, str(cache_place(source).listing))


@functools.lru_cache(maxsize=512)
def _open_files(source: HubSource, _: str) -> HubFiles:
    return HubFiles(source)
