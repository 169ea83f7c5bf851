"""A remote root: its listing, and how its bytes are fetched.

One listing gives names, sizes and versions of all files, so that no request per file is needed. The Hub's cache keeps
the listing of a commit. For other storage the driver makes the listing and sends its digest to the workers. A node
whose cache lacks that listing makes it again, and its processes share it. A different digest is an error: the node
would read other files than the driver planned with.

A web server lists nothing: each process asks for each file that it reads, by name.
"""

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Literal

from fsspec.callbacks import Callback

from raypipe.errors import DownloadError
from raypipe.storage.copies import SizedFile
from raypipe.storage.hub.cache import leaves_folder
from raypipe.storage.node_cache import FileCache, Progress
from raypipe.storage.request_budget import count_requests
from raypipe.storage.retry import retry_transient
from raypipe.text import MOST_JSON_BYTES

if TYPE_CHECKING:
    from raypipe.storage.bodies import S3Objects

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
    "Last-Modified",
    "updated",
    "created",
)
"""Keys of a file's version in fsspec filesystems: s3fs, adlfs, gcsfs, http, sftp, memory. The first one present counts:
a listing gives times more exactly than a single file does."""

_MISSING: Final = (404, 410)
"""Status of a web server for a file that it does not have."""

_UNKNOWN: Final = 401
"""Status for a caller whose rights are unknown; it says nothing about the file."""

REFUSED: Final = 403
"""Status for a file that the caller may not read. S3 also gives it for a missing file if the caller may not list."""

AHEAD_BYTES: Final = 5 << 20
"""Bytes that a small read from a web server asks for, as in fsspec: readers usually read on."""

_PAGE: Final = 1000
"""Files that one listing request returns, on S3 and GCS."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file of a remote root."""

    size_bytes: int
    stamp: str
    """Changes with the content; empty if the storage gives no version."""

    @property
    def etag(self) -> str:
        """The ETag by which S3 knows the version; empty if the listing gave none."""
        return self.stamp.partition(", ETag ")[2]


class Remote:
    """The files below a remote root, by their names there."""

    def __init__(self, filesystem: Any, path: str, commit: str) -> None:
        self.filesystem = filesystem
        self._path = path.rstrip("/")
        self._commit = commit
        """Of the Hub, whose files are `HubFiles`; empty for other storage."""
        protocols = (filesystem.protocol,) if isinstance(filesystem.protocol, str) else filesystem.protocol
        self.is_listable = "http" not in protocols
        """False for plain HTTP: its folders, if it shows any, give neither sizes nor versions."""
        self._s3: S3Objects | None = None
        if "s3" in protocols:
            # Here: it loads aiohttp.
            from raypipe.storage import bodies

            self._s3 = bodies.S3Objects(filesystem)
        self._met_bytes = 0
        self._lock = threading.RLock()
        self._entries: dict[str, ListedFile] | None = None

    @property
    def entries(self) -> dict[str, ListedFile]:
        """All files by name; for a root that cannot be listed, those asked for so far."""
        # Not a cached_property: before Python 3.12 all instances share its lock, and the roots of a mixture would be
        # listed one after the other.
        with self._lock:
            if self._entries is None:
                self._entries = self._list()
            return self._entries

    def _list(self) -> dict[str, ListedFile]:
        if not self.is_listable:
            return {}
        if not self._commit:
            # A filesystem may cache listings as long as the process lives.
            self.filesystem.invalidate_cache(self._path)
        return {name: self._listed(info) for name, info in self.find().items()}

    def _listed(self, info: Mapping[str, Any]) -> ListedFile:
        return ListedFile(int(info.get("size") or 0), self._commit or remote_stamp(info))

    def find(self, folder: str = "") -> dict[str, dict[str, Any]]:
        """Return what the storage lists below a folder now, by name; nothing if the folder is missing.

        It leaves out empty objects whose names end in ``/``: consoles of object stores write one for each folder.
        """
        try:
            found: dict[str, dict[str, Any]] = self.filesystem.find(self._locate(folder), detail=True)
        except FileNotFoundError:
            found = {}
        self._count(1 + len(found) // _PAGE)
        names = ((str(path)[len(self._path) + 1 :], info) for path, info in found.items())
        return {check_listed(name): info for name, info in names if name and not name.endswith("/")}

    @property
    def total_bytes(self) -> int:
        """The bytes of all files together; for a root that cannot be listed, of those asked for so far."""
        return self._listed_bytes if self.is_listable else self._met_bytes

    @cached_property
    def _listed_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries.values())

    def find_entry(self, name: str) -> ListedFile | None:
        """Return size and version of a file; None if it does not exist."""
        found = self.entries.get(name)
        if self.is_listable or found is not None:
            return found
        try:
            entry = self._look(name)
        except FileNotFoundError:
            return None
        with self._lock:
            if name not in self.entries:
                self.entries[name] = entry
                self._met_bytes += entry.size_bytes
        return self.entries[name]

    def exists(self, name: str) -> bool:
        """Return whether a file or folder exists; on a web server only a file, since it need not show folders."""
        if not self.is_listable:
            return not name or self.find_entry(name) is not None
        return not name or name in self.entries or any(one.startswith(f"{name}/") for one in self.entries)

    def ask(self, name: str) -> Literal["there", "missing", "refused"]:
        """Return whether a file is there, missing, or refused; only a web server refuses."""
        try:
            return "there" if self.find_entry(name) is not None else "missing"
        except RefusedError:
            return "refused"

    def fetch(self, name: str, target: str, progress: Progress) -> None:
        """Write a whole file to `target`; raise if it is not the listed version."""
        path, entry = self._locate(name), self.entries[name]
        if self._commit:
            self.filesystem.fetch(path, target, progress)
        elif self._s3 is not None:
            with self._one_version(name) as etag:
                self._s3.fetch(path, etag, entry.size_bytes, target, progress)
        else:
            self._count(1)
            progress(entry.size_bytes)

            def note(_: Any, num_bytes: int, **__: Any) -> None:
                if not entry.size_bytes:
                    _check_most(path, num_bytes, MOST_JSON_BYTES)
                # The cache may stop the fetch.
                progress(int(num_bytes))

            # A new callback for each try, since it counts the bytes.
            self._answered(
                name, lambda: self.filesystem.get_file(path, target, callback=Callback(hooks={"progress": note}))
            )
            self._check_version(name, entry)

    def has_sum(self, name: str, copy: str) -> bool:
        """Return whether a local copy of a file has the sum that the storage tells; false where it tells none."""
        try:
            if self._commit:
                return bool(self.filesystem.has_hash(self._locate(name), copy))
            return self._s3 is not None and self._s3.has_sum(self.entries[name].etag, copy)
        except OSError:
            return False

    def fetch_range(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)`` of a file; raise if it is not the listed version."""
        if self._s3 is not None:
            with self._one_version(name) as etag:
                content = self._s3.read(self._locate(name), etag, start, stop)
        else:
            content = self.read_range(name, start, stop)
            if not self._commit:
                self._check_version(name, self.entries[name])
        _check_part(name, start, stop, content)
        return content

    @contextmanager
    def _one_version(self, name: str) -> Iterator[str]:
        """Yield the ETag to ask S3 for the listed version; S3 refuses it if the object has changed."""
        entry = self.entries[name]
        try:
            yield entry.etag
        except OSError as error:
            if error.errno == errno.EINVAL:
                self._check_version(name, entry)
            raise
        if not entry.etag:
            self._check_version(name, entry)

    def read_range(self, name: str, start: int, stop: int | None) -> bytes:
        """Return bytes of a file; fewer if it ends before `stop`."""
        if self._s3 is not None and stop is not None and start < stop:
            content = self._s3.read(self._locate(name), "", start, stop)
        elif self.is_listable:
            self._count(1)
            asked = {"start": start, "end": stop} if start or stop is not None else {}
            content = bytes(self.filesystem.cat_file(self._locate(name), **asked))
        else:
            self._count(1)
            content = self._read_web(name, start, stop)
        if stop is not None and len(content) > stop - start:
            _check_part(name, start, stop, content)
        return content

    def _read_web(self, name: str, start: int, stop: int | None) -> bytes:
        known = self.entries.get(name)
        most = stop - start if stop is not None else (known.size_bytes if known else 0) or MOST_JSON_BYTES
        path = self._locate(name)
        content, is_part = self._answered(name, lambda: self.filesystem.read_within(path, start, stop, most))
        if content and start and not is_part:
            raise _gives_whole_files(name, start, most)
        if stop is None:
            _check_most(path, len(content), most)
        return bytes(content)

    def open(self, name: str, naming: Callable[[], AbstractContextManager[None]]) -> SizedFile:
        """Return a file that reads by range; from the Hub and a web server with retries, which fsspec lacks.

        `naming` adds the name of the file to errors of later reads.
        """
        stream: Any = None
        if self.is_listable and not self._commit:
            self._count(1)
            stream = self.filesystem.open(self._locate(name), "rb")
            size_bytes = stream.seek(0, os.SEEK_END)

            def read(start: int, stop: int) -> bytes:
                # Every time: some filesystems have the same object for all who open a file.
                stream.seek(start)
                return bytes(stream.read(stop - start))
        else:
            entry = self.find_entry(name) if self._commit else self._look(name)
            if entry is None:
                raise FileNotFoundError(name)
            size_bytes, read = entry.size_bytes, partial(self.read_range, name)
            if not size_bytes:
                # A server that generates a page while sending it does not give a size.
                content = self.read_range(name, 0, None)
                return _AskedFile(len(content), lambda start, stop: content[start:stop])

        def ask(start: int, stop: int) -> bytes:
            with naming():
                content = read(start, stop)
                _check_part(name, start, stop, content)
                return content

        # Not in a `BufferedReader`, which forgets what it has when its caller looks for the size.
        return _AskedFile(size_bytes, ask, stream)

    def keep_listing(self, cache: FileCache, uri: str) -> str:
        """Keep the listing on this node, and return its digest for processes that share it."""
        content, digest = pack_entries(self.entries)
        cache.hold(f"{uri} listing {digest}", partial(write_fetched, content), len(content)).close()
        return digest

    def share_listing(self, cache: FileCache, uri: str, digest: str) -> None:
        """Use the listing that this node keeps, or make it; it must be the same as the driver's."""

        def fetch(target: str, progress: Progress) -> None:
            content, found = pack_entries(self.entries)
            if found != digest:
                raise DownloadError(
                    f"the files of {uri!r} have changed since the run began: a listing is not what it was then. Start "
                    f"the run again, from a copy that nobody writes to."
                )
            write_fetched(content, target, progress)

        with cache.hold(f"{uri} listing {digest}", fetch) as held, open(held.path, "rb") as stream:
            self._entries = unpack_entries(stream.read())

    def _check_version(self, name: str, entry: ListedFile) -> None:
        if not entry.stamp:
            return
        now = self._look(name)
        # adlfs before 2026.5 quotes the ETag of a single file, but not in a listing: its issue 461.
        if now.stamp.replace('"', "") != entry.stamp.replace('"', ""):
            raise DownloadError(
                f"{name!r} changed while it was read: it was {entry.stamp}, and is {now.stamp}. Open the dataset again."
            )

    def _look(self, name: str) -> ListedFile:
        path = self._locate(name)
        self.filesystem.invalidate_cache(path)
        self._count(1)
        return self._listed(self._answered(name, lambda: self.filesystem.info(path)))

    def _answered(self, name: str, ask: Callable[[], Any]) -> Any:
        """Return what `ask` returns; retry if a web server does not answer, which fsspec does not do."""
        if self.is_listable:
            return ask()
        return retry_transient(lambda: _ask_server(self._locate(name), ask))

    def _locate(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _count(self, num_requests: int) -> None:
        # The Hub's own client counts what it sends.
        if not self._commit:
            count_requests(num_requests)


class _AskedFile(SizedFile):
    """A file that asks for each part as it is read, and for some bytes ahead.

    It keeps the last answer, and the last one that reached the end of the file: readers look there for an index.
    """

    def __init__(self, size_bytes: int, ask: Callable[[int, int], bytes], stream: Any = None) -> None:
        super().__init__(size_bytes)
        self._ask = ask
        self._stream = stream
        self._kept = {False: (0, b""), True: (0, b"")}
        """Where an answer is in the file, and the answer, by whether it reaches the end."""

    def _read_at(self, start: int, stop: int) -> bytes:
        content = b""
        while start < stop:
            kept = (one for one in self._kept.values() if one[0] <= start < one[0] + len(one[1]))
            first, answer = next(kept, (start, b""))
            if not answer and stop - start >= AHEAD_BYTES:
                return content + self._ask(start, stop)
            if not answer:
                last = min(start + AHEAD_BYTES, self._size)
                answer = self._ask(start, last)
                self._kept[last == self._size] = (start, answer)
            piece = answer[start - first : stop - first]
            content += piece
            start += len(piece)
        return content

    def close(self) -> None:
        """Close the file of the filesystem too."""
        if self._stream is not None and not self.closed:
            self._stream.close()
        super().close()


def _check_most(path: str, num_bytes: int, most: int) -> None:
    """Raise if a web server sends more of a file than it told, or than a file of unknown size may have."""
    if num_bytes > most:
        raise DownloadError(f"{path!r} has more than {most:,} bytes. Check the server.")


def _check_part(name: str, start: int, stop: int, content: bytes) -> None:
    if len(content) == stop - start:
        return
    if len(content) < stop - start:
        raise DownloadError(f"{len(content)} of the {stop - start} bytes from {start} of {name!r} came")
    raise _gives_whole_files(name, start, stop - start)


def _gives_whole_files(name: str, start: int, num_bytes: int) -> DownloadError:
    return DownloadError(
        f"more than the {num_bytes} bytes from {start} of {name!r} came: the storage gives whole files alone. Give the "
        f"cache a max_bytes that holds all remote datasets of the run, and a whole_bytes that is no less than the file."
    )


class RefusedError(PermissionError):
    """A web server answered for a file with `REFUSED`."""


def _ask_server(url: str, ask: Callable[[], Any]) -> Any:
    """Return what `ask` returns; a file counts as missing only if the server says so.

    Raises:
        FileNotFoundError: the server has no such file.
        RefusedError: the server refuses the file, and does not say whether it exists.
        PermissionError: the server does not know the caller.
        DownloadError: the server answers with another error, or not at all.
    """
    from aiohttp import ClientError

    try:
        return ask()
    except (FileNotFoundError, ClientError) as error:
        # fsspec raises FileNotFoundError for every failure. Its cause says what happened; without a cause it is a 404.
        cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
        status = _MISSING[0] if cause is None else getattr(cause, "status", 0)
        if status in _MISSING:
            raise FileNotFoundError(url) from cause
        told = f"is answered with status {status}" if status else f"is not answered: {type(cause).__name__}: {cause}"
        if status == _UNKNOWN:
            raise PermissionError(f"{url!r} {told}") from cause
        if status == REFUSED:
            raise RefusedError(f"{url!r} {told}: it is refused, or lacking where nobody may list") from cause
        raise DownloadError(
            f"{url!r} {told}. Check the server, the address and your permissions; only a file that is answered with "
            f"{' or '.join(map(str, _MISSING))} is known to be missing."
        ) from cause


def remote_stamp(info: Mapping[str, Any]) -> str:
    """Return the version of a remote file from its entry in a listing; empty if the entry has none."""
    key = next((key for key in _VERSION_KEYS if info.get(key)), "")
    version = info[key] if key else ""
    # Some filesystems give a time as a number in a listing and as a date for a single file.
    seconds = version.timestamp() if isinstance(version, datetime) else version
    text = f"{seconds:.3f}" if isinstance(seconds, float) else str(seconds)
    return f"size {info.get('size')}, {key} {text}" if key else ""


def pack_entries(entries: Mapping[str, ListedFile]) -> tuple[bytes, str]:
    """Return a listing as bytes, and their digest; the same files give the same."""
    content = json.dumps([[name, one.size_bytes, one.stamp] for name, one in sorted(entries.items())]).encode()
    return content, hashlib.blake2b(content, digest_size=16).hexdigest()


def unpack_entries(content: bytes) -> dict[str, ListedFile]:
    """Return the listing that `pack_entries` packed."""
    return {check_listed(name): ListedFile(size_bytes, stamp) for name, size_bytes, stamp in json.loads(content)}


def check_listed(name: str) -> str:
    """Return a name from a listing; raise if it leads out of the root, wherever a file of that name is written."""
    if leaves_folder(name):
        raise DownloadError(f"the storage lists a file {name!r}, which would lie outside its folder. Remove it there.")
    return name


def write_fetched(content: bytes, target: str, progress: Progress) -> None:
    """Write a file of the cache from bytes at hand."""
    progress(len(content))
    with open(target, "wb") as stream:
        stream.write(content)
