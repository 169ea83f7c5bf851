"""Where files are: a local path or any fsspec URI, behind one small value.

A `Storage` is the root of a dataset. All names below it are relative, with ``/``. It is a plain value: it pickles, and
opens its filesystem where it is used. With a `CacheSpec` whole files are kept on the node that reads them; a commit of
the Hub that is complete in the Hub's own cache is read there, on each node by itself. What fails for a while is tried
again by whoever reads, with `retry_transient`.
"""

import functools
import io
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import IO, Any, Final, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from raypipe.errors import ConfigError, DatasetError, DownloadError, RaypipeError
from raypipe.filecache import Fetch, FileCache, HeldFile, Progress
from raypipe.hub import find_snapshot, is_repo_id, parse_pinned, reason_of, resolve

RETRY_WAITS_S: Final = (0.5, 2.0, 8.0)
"""Waits before reading again after a passing fault."""

_VERSION_KEYS: Final = (
    "ETag",
    "etag",
    "generation",
    "blob_id",
    "md5Hash",
    "content_md5",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)
"""What filesystems of fsspec say of a file that changes with its content: s3fs, adlfs, gcsfs, the Hub, sftp, memory."""

_CHUNK_BYTES: Final = 4 << 20

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Where every node keeps files of remote storage, and how many bytes of them."""

    folder: str
    """On a local disk of the node. All processes and jobs of a user may share it."""

    max_bytes: int
    """Of whole and half-fetched files together. The least recently used that nobody uses make room."""

    def __post_init__(self) -> None:
        if not self.folder or "://" in self.folder:
            raise ConfigError(f"the folder of a cache is {self.folder!r}; give a folder on a local disk")
        if self.max_bytes < 1:
            raise ConfigError(f"max_bytes of a cache must be at least 1, got {self.max_bytes}")


@dataclass(frozen=True)
class Storage:
    """The root folder of a dataset, on any filesystem that fsspec knows."""

    uri: str
    """The root as an absolute path, or as a URI with its protocol."""

    cache: CacheSpec | None = None
    """Keeps whole files of a remote root on the node that reads them; None reads them from afar, by range."""

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
        """True where files are plain paths that any library can open by name."""
        return isinstance(self.filesystem, LocalFileSystem)

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
        try:
            filesystem, path = fsspec.url_to_fs(self.uri)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"cannot open {self.uri!r}: {error}. Give a local path, or a URI of a protocol whose fsspec "
                f"package is installed (s3fs for s3://, gcsfs for gs://)."
            ) from error
        return filesystem, path

    def __getstate__(self) -> dict[str, Any]:
        # A live filesystem holds connections and threads: each process opens its own.
        return {"uri": self.uri, "cache": self.cache}

    def locate(self, name: str) -> str:
        """Return the full path of the file `name`, for this filesystem and for messages."""
        return f"{self.path.rstrip('/')}/{name}" if name else self.path

    def exists(self, name: str = "") -> bool:
        """Return whether there is a file or folder `name`."""
        with self._naming(name):
            if self.commit and not self.is_local:
                # Its own `exists` takes a Hub that does not answer for a file that is not there.
                return self._is_listed(name)
            return bool(self.filesystem.exists(self.locate(name)))

    def list_files(self, folder: str = "") -> list[str]:
        """Return the names of all files below `folder`, sorted; none where the folder is missing."""
        if not self.exists(folder):
            return []
        top = self.locate(folder)
        with self._naming(folder):
            prefix = len(self.path.rstrip("/")) + 1
            return sorted(str(found)[prefix:] for found in self.filesystem.find(top))

    def size_bytes(self, name: str) -> int:
        """Return the size of the file `name`."""
        self._check_file(name)
        with self._naming(name):
            return int(self.filesystem.size(self.locate(name)))

    def hold(self, name: str) -> HeldFile | None:
        """Return a remote file in the cache of this node, fetched if it is not there; it stays until it is closed.

        None where there is no cache, or the storage does not tell one content of the file from another.
        """
        wanted = self._cached(name)
        return open_cache(self.cache).hold(*wanted) if self.cache is not None and wanted else None

    def prefetch(self, name: str) -> None:
        """Start to fetch a remote file into the cache of this node, if there is one and room in it."""
        wanted = self._cached(name)
        if self.cache is not None and wanted:
            # Whoever uses the file fetches it again, and has the error.
            open_cache(self.cache).prefetch(*wanted)

    def _cached(self, name: str) -> tuple[str, Fetch, int] | None:
        """Return what a cache needs: the name of the content, how to fetch it, and its bytes."""
        if self.cache is None or self.is_local:
            return None
        if name not in self._listing:
            raise self._missing(name)
        size_bytes, stamp = self._listing[name]
        return (f"{self.uri}/{name} {stamp}", partial(self._fetch, name), size_bytes) if stamp else None

    @cached_property
    def _listing(self) -> dict[str, tuple[int, str]]:
        """Bytes and stamp of every file, by one listing: no request for each file."""
        with self._naming(""):
            files: dict[str, dict[str, Any]] = self.filesystem.find(self.path, detail=True)
        prefix = len(self.path.rstrip("/")) + 1
        return {
            str(path)[prefix:]: (int(info["size"]), self.commit or remote_stamp(info)) for path, info in files.items()
        }

    def _fetch(self, name: str, target: str, progress: Progress) -> None:
        with self._naming(name):
            source = self.filesystem.open(self.locate(name), "rb")
        with source, open(target, "wb") as out:
            num_bytes = 0
            while chunk := self._read_chunk(name, source):
                num_bytes += len(chunk)
                progress(num_bytes)
                out.write(chunk)

    def _read_chunk(self, name: str, source: IO[bytes]) -> bytes:
        with self._naming(name):
            return source.read(_CHUNK_BYTES)

    def open_file(self, name: str) -> IO[bytes]:
        """Open the file `name` for reading; remote files are read by range as they are used, or from the cache."""
        self._check_file(name)
        held = self.hold(name)
        if held is not None:
            return _HeldStream(held)
        with self._naming(name):
            opened: IO[bytes] = self.filesystem.open(self.locate(name), "rb")
        return opened

    def read_bytes(self, name: str) -> bytes:
        """Return the whole file `name`."""
        self._check_file(name)
        if self.cache is not None and not self.is_local:
            with self.open_file(name) as stream:
                return stream.read()
        with self._naming(name):
            return bytes(self.filesystem.cat_file(self.locate(name)))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)`` of the file `name`; fewer where the file ends before `stop`."""
        self._check_file(name)
        if self.cache is not None and not self.is_local:
            with self.open_file(name) as stream:
                stream.seek(start)
                return stream.read(stop - start)
        with self._naming(name):
            return bytes(self.filesystem.cat_file(self.locate(name), start=start, end=stop))

    def write_atomic(self, name: str, content: bytes) -> None:
        """Write the file `name` so that a reader sees the old content or the new, never a part."""
        target = self.locate(name)
        if not self.is_local:
            # Object stores publish an object when its upload is complete.
            self.filesystem.pipe_file(target, content)
            return
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

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Give errors of a remote filesystem, which are of many classes, the name of the file."""
        try:
            yield
        except FileNotFoundError as error:
            raise self._missing(name) from error
        except Exception as error:
            if self.is_local:
                raise
            reason = reason_of(error) if self.commit else f"{type(error).__name__}: {error}"
            raise DownloadError(
                f"cannot reach {self.locate(name)!r} of {self.uri!r}: {reason}. Check the network, the address and "
                f"your permissions."
            ) from error

    def _is_listed(self, name: str) -> bool:
        try:
            self.filesystem.info(self.locate(name))
        except FileNotFoundError:
            return False
        return True

    def _check_file(self, name: str) -> None:
        # Only locally: for an object store this would be a request per read.
        if self.is_local and not os.path.isfile(self.locate(name)):
            raise self._missing(name)

    def _missing(self, name: str) -> DatasetError:
        return DatasetError(
            f"missing file {self.locate(name)!r}. Fetch or restore it; `raypipe info {self.uri}` shows what the "
            f"dataset should hold."
        )


class _HeldStream(io.BufferedReader):
    """A file of the cache, opened: it stays there as long as it is open."""

    def __init__(self, held: HeldFile) -> None:
        super().__init__(io.FileIO(held.path))
        self._held = held

    def close(self) -> None:
        """Close the file, and let the cache remove it when it needs room."""
        super().close()
        self._held.close()

    def __del__(self) -> None:
        # Readers of parquet keep files open for as long as they live, and do not close them.
        self.close()


@functools.cache
def open_cache(spec: CacheSpec) -> FileCache:
    """Return the cache of this process; its files are shared with all processes of the node."""
    return FileCache(spec.folder, spec.max_bytes)


def remote_stamp(info: Mapping[str, Any]) -> str:
    """Return what tells one content of a remote file from another, by what a listing says; empty where it does not."""
    versions = [f"{key} {info[key]}" for key in _VERSION_KEYS if info.get(key)]
    return ", ".join([f"size {info.get('size')}", *versions]) if versions else ""


def open_storage(root: str | os.PathLike[str]) -> Storage:
    """Return the storage of `root`: a local path (made absolute) or an fsspec URI."""
    uri = os.fspath(root)
    if not uri:
        raise ConfigError("the root of the dataset is empty; give a path or a URI")
    if "://" not in uri:
        uri = os.path.abspath(os.path.expanduser(uri))
    return Storage(uri)


def open_root(root: str | os.PathLike[str], revision: str = "") -> Storage:
    """Return the storage of a dataset: as `open_storage` does, and ``owner/name`` of the Hub pinned to a commit.

    Only for roots that are read: a folder that is yet to be written may be called like a dataset of the Hub.

    Raises:
        ConfigError: a revision is given for a root that is not on the Hub, or the Hub has no such dataset or revision.
        DownloadError: the Hub does not answer, or may not be asked.
    """
    if root and is_repo_id(root):
        source = resolve(os.fspath(root), revision)
        # Now, not at the first read: that is tried again where it fails, and being offline does not pass.
        find_snapshot(source.uri)
        return Storage(source.uri)
    if revision:
        raise ConfigError(f"revision={revision!r} is for a dataset of the Hub, and {os.fspath(root)!r} is none")
    return open_storage(root)


def retry_transient(read: Callable[[], Result], sleep: Callable[[float], None] = time.sleep) -> Result:
    """Return what `read` returns, tried again after a wait while it fails in a way that may pass."""
    for wait_s in RETRY_WAITS_S:
        try:
            return read()
        except (RaypipeError, OSError) as error:
            if not is_transient(error):
                raise
            sleep(wait_s)
    return read()


def is_transient(error: BaseException) -> bool:
    """Return whether an error, or what caused it, is a fault of storage that may pass."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError | ConnectionError | DownloadError):
            return True
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | PermissionError):
            # pyarrow raises a plain OSError for a damaged file: only those with a number come from the system.
            return cause.errno is not None
        cause = cause.__cause__
    return False
