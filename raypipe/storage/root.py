"""`Storage`: the root of a dataset. All names below it are relative, with ``/``.

A plain value: it pickles, and opens its filesystem where it is used. With a `CacheSpec` remote files are kept on the
node that reads them; a commit of the Hub that is complete in the Hub's own cache is read there, on each node by itself.
"""

import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import IO, Any

from fsspec.implementations.local import LocalFileSystem

from raypipe.errors import ConfigError, DatasetError, DownloadError, RaypipeError
from raypipe.storage.copies import (
    Copied,
    Copies,
    check_file,
    list_parts,
    note_part,
    open_cache,
    read_twice,
    unreadable_file,
)
from raypipe.storage.hub import find_snapshot, is_repo_id, open_files, parse_pinned, resolve
from raypipe.storage.node_cache import Fetch, HeldFile, Progress
from raypipe.storage.protocols import check_root, join_login, login_of, open_filesystem_of, take_login
from raypipe.storage.ranged import RangedFile
from raypipe.storage.remote import ListedFile, Remote, check_listed, digest_of, pack_entries
from raypipe.storage.spec import CacheSpec
from raypipe.storage.streams import HeldStream
from raypipe.storage.writing import inside

_LFS = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class Storage:
    """The root folder of a dataset, on any filesystem that fsspec knows."""

    uri: str
    """The root as an absolute path, or as a URI with its protocol; without user and password, which are `login`."""

    cache: CacheSpec | None = None
    """Keeps files of a remote root on the node that reads them; None reads them from afar, by range."""

    listing: str = field(default="", compare=False)
    """The digest of what a remote root listed where the run began; empty there, on the Hub, and without a cache."""

    beside_bytes: int = field(default=0, compare=False)
    """Of other remote roots that a run reads through the same cache."""

    login: str = field(default="", compare=False, repr=False)
    """``user:password`` of the root, where it was given with them."""

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
        """True where files are plain paths that any library can open by name; on this node, where others may differ."""
        return isinstance(self.filesystem, LocalFileSystem)

    @cached_property
    def is_remote(self) -> bool:
        """True where a node may have to fetch the files, also if this one has all of a commit of the Hub."""
        return bool(self.commit) or not self.is_local

    @property
    def is_listable(self) -> bool:
        """False of a web server, which tells of the files that it is asked for by name."""
        return self.is_local or self._remote.is_listable

    @cached_property
    def commit(self) -> str:
        """The commit of the Hub that this root is pinned to; empty elsewhere."""
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
            remote.share_listing(open_cache(self.cache), self.uri, self.listing)
        return remote

    def __getstate__(self) -> dict[str, Any]:
        # A live filesystem holds connections and threads: each process opens its own.
        listing = self.listing or self._keep_listing()
        kept = {"uri": self.uri, "cache": self.cache, "listing": listing, "beside_bytes": self.beside_bytes}
        return kept | {"login": self.login}

    def _keep_listing(self) -> str:
        """Keep the listing on this node and return its digest, where processes of a run are to share it."""
        remote = self.__dict__.get("_remote")
        if self.cache is None or self.commit or remote is None or not remote.is_listable:
            return ""
        remote.keep_listing(open_cache(self.cache), self.uri)
        return digest_of(pack_entries(remote.entries))

    def cached(self, cache: CacheSpec | None) -> "Storage":
        """Return this root with another cache; what it has listed stays known."""
        return self._changed(cache=cache)

    def beside(self, num_bytes: int) -> "Storage":
        """Return this root as one of several that a run reads, the others of which have so many bytes together."""
        return self._changed(beside_bytes=num_bytes)

    def _changed(self, **fields: Any) -> "Storage":
        changed = replace(self, **fields)
        for name in ("_resolved", "_remote"):
            if name in self.__dict__:
                changed.__dict__[name] = self.__dict__[name]
        return changed

    def for_a_look(self) -> "Storage":
        """Return this root for readers of footers and indexes alone; see `CacheSpec.for_a_look`."""
        return self if self.cache is None or self.is_local else self.cached(self.cache.for_a_look())

    def locate(self, name: str) -> str:
        """Return the full path of the file `name`, for this filesystem and for messages."""
        return f"{self.path.rstrip('/')}/{name}" if name else self.path

    def exists(self, name: str = "") -> bool:
        """Return whether there is a file or folder `name`.

        Raises:
            DownloadError: the storage does not tell, as a web server that refuses a file.
        """
        if self.is_local:
            return os.path.exists(self.locate(name))
        with self._naming(name):
            # Of a dataset all files are listed anyway, and the listing tells.
            is_known = self._is_listed or not self.is_listable
            return self._remote.exists(name) if is_known else bool(self.filesystem.exists(self.locate(name)))

    def is_refused(self, name: str) -> bool:
        """Return whether a web server answers for the file `name` with `REFUSED`: it may be there, and need not be."""
        with self._naming(name):
            return not self.is_listable and self._remote.ask(name) == "refused"

    def offers(self, name: str) -> bool:
        """Return whether the file `name` is there to be read; False also where a web server refuses it."""
        if self.is_listable:
            return self.exists(name)
        with self._naming(name):
            return self._remote.ask(name) == "there"

    def list_files(self, folder: str = "") -> list[str]:
        """Return the names of all files below `folder`, sorted; none where the folder is missing.

        Raises:
            DownloadError: a web server shows no files there, which says nothing.
        """
        with self._naming(folder):
            if self._is_listed:
                return sorted(name for name in self._remote.entries if not folder or name.startswith(f"{folder}/"))
        if self.is_listable and not self.exists(folder):
            return []
        top = self.locate(folder)
        if self.is_local:
            return sorted(f"{folder}/{name}".lstrip("/") for name in walk_files(top))
        with self._naming(folder):
            prefix = len(self.path.rstrip("/")) + 1
            names = sorted(check_listed(str(found)[prefix:]) for found in self.filesystem.find(top))
        if not names and not self.is_listable:
            raise DownloadError(
                f"the web server shows no files in {top!r}, and which there are has to be known. Let it show its "
                f"folders, or copy the dataset."
            )
        return names

    def size_bytes(self, name: str) -> int:
        """Return the size of the file `name`."""
        self._check_file(name)
        with self._naming(name):
            if self._is_listed or not self.is_listable:
                return self._entry(name).size_bytes
            return int(self.filesystem.size(self.locate(name)))

    def list_bytes(self) -> int:
        """Return the bytes of all files that are to be fetched, by the listing: none where they are on this node."""
        with self._naming(""):
            return 0 if self.is_local else self._remote.total_bytes

    def hold(self, name: str) -> HeldFile | None:
        """Return a remote file in the cache of this node, fetched if it is not there; it stays until it is closed.

        None where there is no cache, the file is too large to be fetched whole, or the storage does not tell one
        content of it from another.
        """
        wanted = self._whole(name)
        return open_cache(self.cache).hold(*wanted) if self.cache is not None and wanted else None

    def is_ranged(self, name: str) -> bool:
        """Return whether of a remote file only the parts in use are kept on this node."""
        if self.cache is None or self.is_local:
            return False
        entry = self._entry(name)
        run_bytes = self._remote.total_bytes + self.beside_bytes
        return bool(entry.stamp) and not self.cache.is_fetched_whole(entry.size_bytes, run_bytes)

    def version(self, name: str) -> str:
        """Return what tells the content of a file from another that had its name; empty where nothing does.

        Of a local file that is its size, the time of its last change, and its number on the disk.
        """
        if not self.is_local:
            return self._entry(name).stamp
        with suppress(OSError):
            found = os.stat(self.locate(name))
            return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ino}"
        return ""

    def read_again(self, name: str, read: Callable[[], Copied], close: Callable[[], None] = lambda: None) -> Copied:
        """Return what `read` returns of the file `name`, also where this node keeps a copy of it that was garbled.

        See `read_twice`.

        Args:
            close: lets go what is open of the file, before it is read again.
        """
        return read_twice(read, lambda: self._copies(name), close)

    def _copies(self, name: str) -> Copies | None:
        entry = None if self.cache is None or self.is_local else self._remote.find_entry(name)
        if self.cache is None or entry is None or not entry.stamp:
            return None
        whole = self._whole(name)
        wanted = [whole] if whole is not None else []
        wanted += [self._part(name, *part) for part in list_parts(self.uri, name)]
        cache, file = open_cache(self.cache), f"{self.locate(name)} {entry.stamp}"

        def is_sound() -> bool:
            # A sum is of a whole file.
            return whole is not None and self._remote.has_sum(name, cache.path_of(whole[0]))

        return Copies(cache=cache, file=file, wanted=wanted, is_sound=is_sound)

    def prefetch(self, name: str) -> "Future[bool] | None":
        """Start to fetch a remote file into the cache of this node, if there is one and room in it.

        What is returned may be cancelled. It need not be looked at: whoever uses the file fetches it again, and has the
        error.
        """
        wanted = self._whole(name)
        return open_cache(self.cache).prefetch(*wanted) if self.cache is not None and wanted else None

    def prefetch_part(self, name: str, start: int, stop: int) -> "Future[bool]":
        """Start to fetch bytes of a remote file of which only parts are kept; see `prefetch`."""
        assert self.cache is not None, "only a cache keeps parts"
        return open_cache(self.cache).prefetch(*self._part(name, start, min(stop, self._entry(name).size_bytes)))

    def _whole(self, name: str) -> tuple[str, Fetch, int] | None:
        """Return what a cache needs: the name of the content, how to fetch it, and its bytes."""
        if self.cache is None or self.is_local or self.is_ranged(name):
            return None
        entry = self._entry(name)
        return (
            (f"{self.uri}/{name} {entry.stamp}", partial(self._fetch, name), entry.size_bytes) if entry.stamp else None
        )

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
        progress(len(content))
        with open(target, "wb") as out:
            out.write(content)

    def open_file(self, name: str) -> IO[bytes]:
        """Open the file `name` for reading; of a remote one, from the cache, or by range as it is used."""
        self._check_file(name)
        held = self.hold(name)
        if held is not None:
            return HeldStream(held)
        if self.is_ranged(name):
            return self.open_ranged(name)  # type: ignore[return-value]
        with self._naming(name):
            opened: IO[bytes] = (
                self.filesystem.open(self.locate(name), "rb")
                if self.is_local
                else self._remote.open(name, partial(self._naming, name))
            )
        return opened

    def open_ranged(self, name: str) -> RangedFile:
        """Open a remote file of which only parts are kept on this node."""
        assert self.cache is not None, "only a cache keeps parts"
        cache = open_cache(self.cache)

        def hold(start: int, stop: int) -> HeldFile:
            note_part(self.uri, name, (start, stop))
            return cache.hold(*self._part(name, start, stop))

        return RangedFile(self._entry(name).size_bytes, hold)

    def read_bytes(self, name: str) -> bytes:
        """Return the whole file `name`."""
        return self._read(name, 0, None)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)`` of the file `name`; fewer where the file ends before `stop`."""
        return self._read(name, start, stop)

    def _read(self, name: str, start: int, stop: int | None) -> bytes:
        self._check_file(name)
        if self.is_local or self.cache is not None:
            with self.open_file(name) as stream:
                stream.seek(start)
                return stream.read() if stop is None else stream.read(stop - start)
        with self._naming(name):
            return self._remote.read_range(name, start, stop)

    def write_atomic(self, name: str, content: bytes) -> None:
        """Write the file `name` so that a reader sees the old content or the new, never a part."""
        target = self.locate(name)
        if not self.is_local:
            # Object stores publish an object when its upload is complete.
            self.filesystem.pipe_file(target, content)
            return
        target = str(inside(self.path, name))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        half = f"{target}.{uuid.uuid4().hex}.part"
        try:
            with open(half, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(half, target)
        finally:
            if os.path.exists(half):
                os.remove(half)

    @property
    def _is_listed(self) -> bool:
        """Whether one listing tells of all files: of a root that nobody writes to while it is read."""
        return not self.is_local and (bool(self.commit) or self.cache is not None) and self._remote.is_listable

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Give errors of a remote filesystem, which are of many classes, the name of the file."""
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
        # Only locally: for an object store this would be a request per read.
        if self.is_local and not os.path.isfile(self.locate(name)):
            raise self._missing(name)

    def check_readable(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Raise where it is the machine that does not read bytes of a local file, and not their content that is bad.

        For a file that a library could not read, and did not say why.

        Raises:
            DownloadError: the disk fails, or too many files are open.
        """
        if self.is_local:
            check_file(self.locate(name), start, stop)

    def unreadable(self, name: str, error: OSError) -> DownloadError:
        """Return the error for a file that this machine could not read, whatever it holds."""
        if self.is_local:
            return unreadable_file(self.locate(name), error)
        return unreadable_file(self.locate(name), error, "look at the network and the server, and try again")

    def check_no_pointer(self, name: str) -> None:
        """Raise where a file that makes no sense is a pointer of Git LFS, as a clone without LFS has in place of files.

        Raises:
            DatasetError: it is one.
        """
        if self.exists(name) and self.read_range(name, 0, len(_LFS)) == _LFS:
            raise DatasetError(
                f"{self.locate(name)!r} is a Git LFS pointer in place of the file. Fetch the files: git lfs pull, in "
                f"{self.uri!r}"
            )

    def _missing(self, name: str) -> DatasetError:
        return DatasetError(f"missing file {self.locate(name)!r} of {self.uri!r}. Fetch or restore it.")


def walk_files(top: str, below: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of all files in a local folder and its folders, with ``/``.

    Links are followed, as reading does, but for those that lead back to a folder in which they are.

    Args:
        below: the folder to look at, in `top`.
        above: the true paths of the folders in which it is.
    """
    place = os.path.realpath(os.path.join(top, below))
    try:
        entries = list(os.scandir(place)) if place not in above else []
    except OSError:
        # Reading what is in it tells what is wrong with it.
        return
    for entry in entries:
        name = f"{below}/{entry.name}".lstrip("/")
        if entry.is_dir():
            yield from walk_files(top, name, (*above, place))
        elif entry.is_file():
            yield name


def open_storage(root: str | os.PathLike[str]) -> Storage:
    """Return the storage of `root`: a local path (made absolute) or an fsspec URI, without a cache.

    Raises:
        ConfigError: the root is empty, or of a protocol that is not opened; see `check_root`.
    """
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
    """Return the storage of a dataset: as `open_storage` does, and ``owner/name`` of the Hub pinned to a commit.

    Remote files are kept in the default cache of the node. Only for roots that are read and that nobody writes to: a
    folder that is yet to be written may be called like a dataset of the Hub.

    Raises:
        ConfigError: a revision is given for a root that is not on the Hub, or the Hub has no such dataset or revision.
        DownloadError: the Hub does not answer, or may not be asked.
    """
    if root and is_repo_id(root):
        source = resolve(os.fspath(root), revision)
        # Now, not at the first read: that is tried again where it fails, and being offline does not pass.
        find_snapshot(source.uri)
        return Storage(source.uri, CacheSpec())
    if revision:
        raise ConfigError(f"revision={revision!r} is for a dataset of the Hub, and {os.fspath(root)!r} is none")
    storage = open_storage(root)
    return storage.cached(CacheSpec()) if "://" in storage.uri else storage
