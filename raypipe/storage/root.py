"""`Storage`: the root of a dataset. All file names are relative to it, with ``/``.

A plain value: it pickles, and opens its filesystem in the process that uses it. With a `CacheSpec` each node keeps the
remote files that it reads. Where the Hub's own cache on a node has all of a commit, raypipe reads the commit there.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import IO, Any

from fsspec.implementations.local import LocalFileSystem

from raypipe.errors import ConfigError, DatasetError, DownloadError, RaypipeError
from raypipe.storage.copies import CacheSpec, HeldStream, RangedFile, open_cache, used_parts
from raypipe.storage.hub.cache import find_snapshot, is_repo_id, parse_pinned, resolve
from raypipe.storage.hub.files import open_files
from raypipe.storage.local_files import LOOK_AT_DISK, check_file, inside, replace_file, unreadable_file, walk_files
from raypipe.storage.node_cache import Fetch, FileCache, HeldFile, Progress, Result
from raypipe.storage.protocols import check_root, join_login, login_of, open_filesystem_of, take_login
from raypipe.storage.remote import ListedFile, Remote, write_fetched
from raypipe.storage.retry import Copies, read_twice

_LFS = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class Storage:
    """The root folder of a dataset, on any filesystem that fsspec knows."""

    uri: str
    """An absolute path, or a URI with its protocol; user and password are in `login`."""

    cache: CacheSpec | None = None
    """Where a node keeps the files of a remote root that it reads; None reads them remotely, by range."""

    listing: str = field(default="", compare=False)
    """The digest of the driver's listing of a remote root; empty on the driver, for the Hub, and without a cache."""

    beside_bytes: int = field(default=0, compare=False)
    """Bytes of the other remote roots that a run reads through the same cache."""

    login: str = field(default="", compare=False, repr=False)
    """``user:password`` of the root, if it was given with them."""

    @property
    def address(self) -> str:
        """The root as another process can open it: with `login`. Never for messages or files."""
        return join_login(self.uri, self.login)

    @cached_property
    def filesystem(self) -> Any:
        """The fsspec filesystem of this root."""
        return self._resolved[0]

    @cached_property
    def path(self) -> str:
        """The root in the filesystem's own terms, without protocol."""
        return str(self._resolved[1])

    @cached_property
    def is_local(self) -> bool:
        """True if any library can open the files by path; this may differ between nodes."""
        return isinstance(self.filesystem, LocalFileSystem)

    @cached_property
    def is_remote(self) -> bool:
        """True if a node may have to fetch the files, even if this one has all of a commit of the Hub."""
        return bool(self.commit) or not self.is_local

    @property
    def is_listable(self) -> bool:
        """False for a web server: it answers only for files that it is asked for by name."""
        return self.is_local or self._remote.is_listable

    @cached_property
    def commit(self) -> str:
        """The commit of the Hub that this root is pinned to; empty for other storage."""
        pinned = parse_pinned(self.uri)
        return pinned.commit if pinned else ""

    @cached_property
    def _resolved(self) -> tuple[Any, str]:
        snapshot = find_snapshot(self.uri)
        if snapshot is not None:
            return LocalFileSystem(), snapshot
        pinned = parse_pinned(self.uri)
        if pinned is not None:
            files = open_files(pinned)
            return files, f"{files.root}/{pinned.folder}".rstrip("/")
        return open_filesystem_of(self.uri, self.login)

    @cached_property
    def _remote(self) -> Remote:
        remote = Remote(self.filesystem, self.path, self.commit)
        if self.listing and self.cache is not None:
            remote.share_listing(self._files, self.uri, self.listing)
        return remote

    def __getstate__(self) -> dict[str, Any]:
        # A live filesystem holds connections and threads: each process opens its own.
        listing, remote = self.listing, self.__dict__.get("_remote")
        if not listing and self.cache is not None and not self.commit and remote is not None and remote.is_listable:
            # The processes of a run share the one that this node keeps.
            listing = remote.keep_listing(self._files, self.uri)
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"listing": listing}

    def cached(self, cache: CacheSpec | None) -> "Storage":
        """Return this root with another cache; it keeps its listing."""
        return self._changed(cache=cache)

    def beside(self, num_bytes: int) -> "Storage":
        """Return this root as one of several that a run reads; the others have `num_bytes` together."""
        return self._changed(beside_bytes=num_bytes)

    def _changed(self, **fields: Any) -> "Storage":
        changed = replace(self, **fields)
        for name in ("_resolved", "_remote"):
            if name in self.__dict__:
                changed.__dict__[name] = self.__dict__[name]
        return changed

    def for_a_look(self) -> "Storage":
        """Return this root for readers of footers and indexes only; see `CacheSpec.for_a_look`."""
        return self if self.cache is None or self.is_local else self.cached(self.cache.for_a_look())

    def locate(self, name: str) -> str:
        """Return the full path of the file `name`, for this filesystem and for messages."""
        return f"{self.path.rstrip('/')}/{name}" if name else self.path

    def exists(self, name: str = "") -> bool:
        """Return whether there is a file or folder `name`; raise if a web server refuses to tell."""
        if self.is_local:
            return os.path.exists(self.locate(name))
        with self._naming(name):
            return self._remote.exists(name) if self._is_known else bool(self.filesystem.exists(self.locate(name)))

    def is_refused(self, name: str) -> bool:
        """Return whether a web server answers for the file `name` with `REFUSED`; the file may or may not exist."""
        with self._naming(name):
            return not self.is_listable and self._remote.ask(name) == "refused"

    def offers(self, name: str) -> bool:
        """Return whether the file `name` can be read; False also if a web server refuses it."""
        if self.is_listable:
            return self.exists(name)
        with self._naming(name):
            return self._remote.ask(name) == "there"

    def list_files(self, folder: str = "") -> list[str]:
        """Return the names of all files below `folder`, sorted; none if the folder is missing."""
        if self.is_local:
            return sorted(walk_files(self.path, folder))
        with self._naming(folder):
            if self._is_known and self.is_listable:
                return sorted(name for name in self._remote.entries if not folder or name.startswith(f"{folder}/"))
            names = sorted(self._remote.find(folder))
        if not names and not self.is_listable:
            raise DownloadError(
                f"the web server shows no files in {self.locate(folder)!r}, and which there are has to be known. Let "
                f"it show its folders, or copy the dataset."
            )
        return names

    def size_bytes(self, name: str) -> int:
        """Return the size of the file `name`."""
        self._check_file(name)
        with self._naming(name):
            if self._is_known:
                return self._entry(name).size_bytes
            return int(self.filesystem.size(self.locate(name)))

    def list_bytes(self) -> int:
        """Return the bytes of all remote files, by the listing; 0 if the files are on this node."""
        with self._naming(""):
            return 0 if self.is_local else self._remote.total_bytes

    def hold(self, name: str) -> HeldFile | None:
        """Return a remote file in the cache of this node, fetched if missing; it stays there until closed.

        None if there is no cache, the file is too large to fetch whole, or the storage gives no version of it.
        """
        wanted = self._whole(name)
        return self._files.hold(*wanted) if wanted else None

    def is_ranged(self, name: str) -> bool:
        """Return whether this node keeps only the parts in use of a remote file."""
        if self.cache is None or self.is_local:
            return False
        entry = self._entry(name)
        run_bytes = self._remote.total_bytes + self.beside_bytes
        return bool(entry.stamp) and not self.cache.is_fetched_whole(entry.size_bytes, run_bytes)

    def version(self, name: str) -> str:
        """Return a version of the file that changes with its content; empty if the storage has none.

        For a local file it consists of size, modification time and inode.
        """
        if not self.is_local:
            return self._entry(name).stamp
        with suppress(OSError):
            found = os.stat(self.locate(name))
            return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ino}"
        return ""

    def read_again(self, name: str, read: Callable[[], Result], close: Callable[[], None] = lambda: None) -> Result:
        """Return what `read` returns for the file `name`; fetch a damaged copy on this node again. See `read_twice`."""
        return read_twice(read, lambda: self._copies(name), close)

    def _copies(self, name: str) -> Copies | None:
        entry = None if self.cache is None or self.is_local else self._remote.find_entry(name)
        if entry is None or not entry.stamp:
            return None
        whole = self._whole(name)
        wanted = [whole] if whole is not None else []
        wanted += [self._part(name, *part) for part in sorted(used_parts(self.uri, name).copy())]
        cache, file = self._files, f"{self.locate(name)} {entry.stamp}"

        def is_sound() -> bool:
            # A sum is of a whole file.
            return whole is not None and self._remote.has_sum(name, cache.path_of(whole[0]))

        return Copies(cache=cache, file=file, wanted=wanted, is_sound=is_sound)

    def prefetch(self, name: str) -> "Future[bool] | None":
        """Start to fetch a remote file into the cache of this node, if there is a cache with room.

        The caller may cancel the future or ignore it: a later use of the file fetches it again and raises the error.
        """
        wanted = self._whole(name)
        return self._files.prefetch(*wanted) if wanted else None

    def prefetch_part(self, name: str, start: int, stop: int) -> "Future[bool]":
        """Start to fetch bytes of a remote file that is kept by parts; see `prefetch`."""
        return self._files.prefetch(*self._part(name, start, min(stop, self._entry(name).size_bytes)))

    @property
    def _files(self) -> FileCache:
        """The cache of this node; only where `cache` is given."""
        assert self.cache is not None, "without a cache, this node keeps no files"
        return open_cache(self.cache)

    def _whole(self, name: str) -> tuple[str, Fetch, int | None] | None:
        """Return what a cache needs: the key of the content, how to fetch it, and its size."""
        if self.cache is None or self.is_local or self.is_ranged(name):
            return None
        entry = self._entry(name)
        key = f"{self.uri}/{name} {entry.stamp}"
        # A web server need not tell the size, and then the cache learns it from the fetch.
        return (key, partial(self._fetch, name), entry.size_bytes or None) if entry.stamp else None

    def _part(self, name: str, start: int, stop: int) -> tuple[str, Fetch, int]:
        key = f"{self.uri}/{name} {self._entry(name).stamp} bytes {start}-{stop}"
        return key, partial(self._fetch_part, name, start, stop), stop - start

    def _entry(self, name: str) -> ListedFile:
        with self._naming(name):
            entry = self._remote.find_entry(name)
        if entry is None:
            raise self._missing(name)
        return entry

    def _fetch(self, name: str, target: str, progress: Progress) -> None:
        with self._naming(name):
            self._remote.fetch(name, target, progress)

    def _fetch_part(self, name: str, start: int, stop: int, target: str, progress: Progress) -> None:
        with self._naming(name):
            content = self._remote.fetch_range(name, start, stop)
        write_fetched(content, target, progress)

    def open_file(self, name: str) -> IO[bytes]:
        """Open the file `name` for reading; a remote file from the cache, or by range as it is used."""
        self._check_file(name)
        held = self.hold(name)
        if held is not None:
            return HeldStream(held)
        if self.is_ranged(name):
            return self.open_ranged(name)  # type: ignore[return-value]
        with self._naming(name):
            if self.is_local:
                return self.filesystem.open(self.locate(name), "rb")  # type: ignore[no-any-return]
            return self._remote.open(name, partial(self._naming, name))  # type: ignore[return-value]

    def open_ranged(self, name: str) -> RangedFile:
        """Open a remote file that this node keeps by parts."""
        cache = self._files

        def hold(start: int, stop: int) -> HeldFile:
            used_parts(self.uri, name).add((start, stop))
            return cache.hold(*self._part(name, start, stop))

        return RangedFile(self._entry(name).size_bytes, hold)

    def read_bytes(self, name: str) -> bytes:
        """Return the whole file `name`."""
        return self.read_range(name, 0, None)

    def read_range(self, name: str, start: int, stop: int | None) -> bytes:
        """Return the bytes ``[start, stop)`` of the file `name`; fewer if the file ends before `stop`."""
        self._check_file(name)
        if self.is_local or self.cache is not None:
            with self.open_file(name) as stream:
                stream.seek(start)
                return stream.read() if stop is None else stream.read(stop - start)
        with self._naming(name):
            return self._remote.read_range(name, start, stop)

    def write_atomic(self, name: str, content: bytes) -> None:
        """Write the file `name`; a reader sees the old content or the new, never a part."""
        target = self.locate(name)
        if self.commit:
            raise ConfigError(f"{self.uri!r} is a commit of the Hub, which nothing is written to; give another folder")
        if not self.is_local:
            # An object store publishes an object only when its upload is complete.
            self.filesystem.pipe_file(target, content)
            return
        replace_file(inside(self.path, name), content, is_synced=True)

    @property
    def _is_known(self) -> bool:
        """Whether `_remote` answers: by the listing of a root that does not change meanwhile, or as a web server."""
        return not self.is_local and (bool(self.commit) or self.cache is not None or not self.is_listable)

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Turn the errors of a remote filesystem, of many classes, into raypipe's, with the name of the file."""
        try:
            yield
        except RaypipeError as error:
            if not self.is_local and not self.commit:
                error.add_note(f"while reading {self.locate(name)!r} of {self.uri!r}")
            raise
        except FileNotFoundError as error:
            raise self._missing(name) from error
        except Exception as error:
            if self.is_local:
                raise
            raise DownloadError(
                f"cannot reach {self.locate(name)!r} of {self.uri!r}: {type(error).__name__}: {error}. Check the "
                f"network, the address and your permissions."
            ) from error

    def _check_file(self, name: str) -> None:
        # Only for local files: an object store would need a request per read.
        if self.is_local and not os.path.isfile(self.locate(name)):
            raise self._missing(name)

    def check_readable(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Raise if this machine cannot read the bytes of a local file, whatever their content; see `check_file`."""
        if self.is_local:
            check_file(self.locate(name), start, stop)

    def unreadable(self, name: str, error: OSError) -> DownloadError:
        """Return the error for a file that this machine could not read, whatever its content."""
        remedy = LOOK_AT_DISK if self.is_local else "look at the network and the server, and try again"
        return unreadable_file(self.locate(name), error, remedy)

    def check_no_pointer(self, name: str) -> None:
        """Raise if an unreadable file is a Git LFS pointer, which a clone without LFS has in place of the file."""
        if self.exists(name) and self.read_range(name, 0, len(_LFS)) == _LFS:
            raise DatasetError(
                f"{self.locate(name)!r} is a Git LFS pointer in place of the file. Fetch the files: git lfs pull, in "
                f"{self.uri!r}"
            )

    def _missing(self, name: str) -> DatasetError:
        return DatasetError(f"missing file {self.locate(name)!r} of {self.uri!r}. Fetch or restore it.")


def open_storage(root: str | os.PathLike[str]) -> Storage:
    """Return the storage of `root`: a local path (made absolute) or an fsspec URI, without a cache."""
    uri = os.fspath(root)
    if not uri:
        raise ConfigError("the root of the dataset is empty; give a path or a URI")
    if not uri.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in uri):
        raise ConfigError(f"the path {uri!r} is no UTF-8, and libraries that read the files take no other; rename it")
    if "://" not in uri:
        uri = os.path.abspath(os.path.expanduser(uri))
    check_root(uri)
    uri = take_login(uri)
    return Storage(uri, login=login_of(uri))


def open_root(root: str | os.PathLike[str], revision: str = "") -> Storage:
    """Return the storage of a dataset as `open_storage` does; ``owner/name`` is a Hub dataset, pinned to a commit.

    The node's default cache keeps remote files. Only for roots to read: a folder that does not exist yet may have a
    name like a dataset of the Hub.
    """
    if root and is_repo_id(root):
        source = resolve(os.fspath(root), revision)
        # Here, not at the first read: reads are retried, and being offline does not pass.
        find_snapshot(source.uri)
        return Storage(source.uri, CacheSpec())
    if revision:
        raise ConfigError(f"revision={revision!r} is for a dataset of the Hub, and {os.fspath(root)!r} is none")
    storage = open_storage(root)
    return storage.cached(CacheSpec()) if "://" in storage.uri else storage
