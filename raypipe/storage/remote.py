"""A remote root: what it lists, and how its bytes come.

One listing tells names, sizes and versions of all files, so that nothing is asked per file. The Hub's listing of a
commit is kept by its cache. That of other storage is made on the driver, and made anew on every node whose cache lacks
it; the processes of a node share it there by the digest of the driver's, which they are sent. A listing of another
digest would let a node read other files than the driver has planned with, and is an error.

A web server lists nothing: there each process asks for each file that it reads, by its name.
"""

import errno
import hashlib
import io
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Final, Literal

from fsspec.callbacks import Callback

from raypipe.errors import DownloadError
from raypipe.storage import bodies
from raypipe.storage.hub import HubFiles, leaves_folder
from raypipe.storage.node_cache import FileCache, Progress
from raypipe.storage.request_budget import count_requests
from raypipe.storage.retry import retry_transient
from raypipe.storage.streams import open_asked
from raypipe.text import MOST_JSON_BYTES

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
"""What filesystems of fsspec say of a file that changes with its content: s3fs, adlfs, gcsfs, http, sftp, memory. The
first that is there counts: a listing tells times more exactly than a single file does."""

_MISSING: Final = (404, 410)
"""What a web server says of a file that it does not have."""

_UNKNOWN: Final = 401
"""What it says to somebody whose rights it does not know: nothing of the file."""

REFUSED: Final = 403
"""What it says of a file that is not for everybody. S3 says it also of one that it lacks, where nobody may list."""

Presence = Literal["there", "missing", "refused"]
"""Of a file that is asked for by its name; a refused one may be there, and need not be."""

_MD5: Final = re.compile("[0-9a-f]{32}")
"""An ETag of S3 that may be one: that of an object in several parts has a dash."""

_TRIES_OF_MD5: Final = 3

_PAGE: Final = 1000
"""Files that one request of a listing brings, on S3 and GCS."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file of a remote root."""

    size_bytes: int
    stamp: str
    """Another one for another content; empty where the storage does not tell."""


class Remote:
    """The files below a remote root, by their names there."""

    def __init__(self, filesystem: Any, path: str, commit: str) -> None:
        self.filesystem = filesystem
        self._path = path.rstrip("/")
        self._commit = commit
        self._met_bytes = 0
        self._has_md5 = True
        """Whether ETags of S3 are sums of the content, as far as is known."""
        self._lock = threading.Lock()
        self._listing_lock = threading.Lock()
        self._entries: dict[str, ListedFile] | None = None

    @property
    def is_listable(self) -> bool:
        """False of plain HTTP: its folders, where it shows any, tell neither sizes nor versions."""
        return "http" not in _protocols(self.filesystem)

    @property
    def entries(self) -> dict[str, ListedFile]:
        """All files by name; of a root that cannot be listed, those that were asked for so far."""
        # Not a cached_property: before Python 3.12 all its owners share one lock, and the roots of a mixture would be
        # listed one after the other.
        with self._listing_lock:
            if self._entries is None:
                self._entries = self._list()
            return self._entries

    def _list(self) -> dict[str, ListedFile]:
        if not self.is_listable:
            return {}
        if not isinstance(self.filesystem, HubFiles):
            # A filesystem may remember listings for as long as the process lives.
            self.filesystem.invalidate_cache(self._path)
        try:
            files: dict[str, dict[str, Any]] = self.filesystem.find(self._path, detail=True)
        except FileNotFoundError:
            files = {}
        self._count(1 + len(files) // _PAGE)
        first = len(self._path) + 1
        return {
            check_listed(str(path)[first:]): ListedFile(int(info.get("size") or 0), self._commit or remote_stamp(info))
            for path, info in files.items()
        }

    @property
    def total_bytes(self) -> int:
        """The bytes of all files together; of a root that cannot be listed, of those that were asked for so far."""
        return self._listed_bytes if self.is_listable else self._met_bytes

    @cached_property
    def _listed_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries.values())

    def find_entry(self, name: str) -> ListedFile | None:
        """Return what is known of a file; None where there is none."""
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
        """Return whether there is a file or folder; of a web server, a file, since it need not show folders."""
        if not self.is_listable:
            return not name or self.find_entry(name) is not None
        return not name or name in self.entries or any(one.startswith(f"{name}/") for one in self.entries)

    def ask(self, name: str) -> Presence:
        """Return what the storage tells of a file; ``"refused"`` of a web server alone."""
        try:
            return "there" if self.find_entry(name) is not None else "missing"
        except RefusedError:
            return "refused"

    def fetch(self, name: str, target: str, progress: Progress) -> None:
        """Write a whole file to `target`; raises where it is not the version that was listed."""
        path, entry = self._locate(name), self.entries[name]
        if isinstance(self.filesystem, HubFiles):
            self.filesystem.fetch(path, target, progress)
            return
        self._count(1 + entry.size_bytes // bodies.PART_BYTES)
        progress(entry.size_bytes)
        if self._is_s3:
            with self._one_version(name) as asked:
                self._fetch_object(asked, entry, target, progress)
        else:
            self._answered(name, lambda: self.filesystem.get_file(path, target, callback=_Told(progress)))
            self._check_version(name, entry)

    def has_sum(self, name: str, copy: str) -> bool:
        """Return whether a local copy of a file has the sum that the storage tells; false where it tells none."""
        try:
            if isinstance(self.filesystem, HubFiles):
                return self.filesystem.has_hash(self._locate(name), copy)
            told = self._md5_of(self.entries[name]) if self._is_s3 else ""
            return bool(_MD5.fullmatch(told)) and _md5_of_file(copy) == told
        except OSError:
            return False

    def _md5_of(self, entry: ListedFile) -> str:
        return entry.stamp.partition(", ETag ")[2].strip('"') if self._has_md5 else ""

    def _fetch_object(self, asked: dict[str, Any], entry: ListedFile, target: str, progress: Progress) -> None:
        """Write an object of S3, with the MD5 that its ETag is where it was put there at once.

        Raises:
            DownloadError: other bytes came than were stored.
        """
        sums: list[str] = []
        told = self._md5_of(entry)
        while told not in sums:
            bodies.fetch_object(self.filesystem, asked, entry.size_bytes, target, progress)
            if not _MD5.fullmatch(told):
                return
            sums.append(_md5_of_file(target))
            if told not in sums and sums[-1] in sums[:-1]:
                # Twice the same: of an encrypted object, and on some stores, the ETag is another number.
                self._has_md5 = False
                return
            if len(sums) == _TRIES_OF_MD5:
                raise DownloadError(
                    f"other bytes came than the storage has, {len(sums)} times: their MD5 is not {told}"
                )

    def fetch_range(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)`` of a file; raises where it is not the version that was listed."""
        entry = self.entries[name]
        if self._is_s3:
            self._count(1)
            with self._one_version(name) as asked:
                content = bodies.read_object(self.filesystem, asked, start, stop)
        else:
            content = self.read_range(name, start, stop)
            if not self._commit:
                self._check_version(name, entry)
        _check_part(name, start, stop, content)
        return content

    @property
    def _is_s3(self) -> bool:
        return "s3" in _protocols(self.filesystem)

    @contextmanager
    def _one_version(self, name: str) -> Iterator[dict[str, Any]]:
        """Give what to ask S3 for an object, which it refuses where the object is another by now."""
        etag = self.entries[name].stamp.partition(", ETag ")[2]
        try:
            yield self._asked(name) | ({"IfMatch": etag} if etag else {})
        except OSError as error:
            if error.errno == errno.EINVAL:
                self._check_version(name, self.entries[name])
            raise
        if not etag:
            self._check_version(name, self.entries[name])

    def _asked(self, name: str) -> dict[str, Any]:
        bucket, key, _ = self.filesystem.split_path(self._locate(name))
        return {"Bucket": bucket, "Key": key, **self.filesystem.req_kw}

    def read_range(self, name: str, start: int, stop: int | None) -> bytes:
        """Return bytes of a file, fewer where it ends before `stop`."""
        self._count(1)
        if self._is_s3 and stop is not None and start < stop:
            content = bodies.read_object(self.filesystem, self._asked(name), start, stop)
        elif self.is_listable:
            asked = {"start": start, "end": stop} if start or stop is not None else {}
            content = bytes(self.filesystem.cat_file(self._locate(name), **asked))
        else:
            content = self._read_web(name, start, stop)
        if stop is not None and len(content) > stop - start:
            _check_part(name, start, stop, content)
        return content

    def _read_web(self, name: str, start: int, stop: int | None) -> bytes:
        known = self.entries.get(name)
        most = stop - start if stop is not None else (known.size_bytes if known else 0) or MOST_JSON_BYTES
        part = {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"} if start or stop is not None else {}
        path = self._locate(name)
        content: bytes = self._answered(name, lambda: self.filesystem.read_within(path, part, most))
        if stop is None and len(content) > most:
            raise DownloadError(f"{path!r} has more than {most:,} bytes. Check the server.")
        return content

    def open(self, name: str, naming: Callable[[], AbstractContextManager[None]]) -> Any:
        """Return a file that is read by range as it is used; of a web server with retries, which fsspec does not make.

        Args:
            naming: gives the errors of later reads the name of the file.
        """
        if self.is_listable:
            self._count(1)
            return self.filesystem.open(self._locate(name), "rb")
        entry = self._look(name)
        if not entry.size_bytes:
            # A server that makes a page as it sends it does not tell how large it is.
            return io.BytesIO(self.read_range(name, 0, None))

        def ask(start: int, stop: int) -> bytes:
            with naming():
                content = self.read_range(name, start, stop)
                _check_part(name, start, stop, content)
                return content

        return open_asked(entry.size_bytes, ask)

    def keep_listing(self, cache: FileCache, uri: str) -> None:
        """Keep the listing on this node for processes that are given its digest."""
        content = pack_entries(self.entries)
        with cache.use(_listing_key(uri, digest_of(content)), _writer(content), len(content)):
            return

    def share_listing(self, cache: FileCache, uri: str, digest: str) -> None:
        """Take the listing that this node keeps; where there is none, make it: it must be the same as the driver's.

        Raises:
            DownloadError: files have changed since the driver looked.
        """

        def fetch(target: str, progress: Progress) -> None:
            content = pack_entries(self.entries)
            if digest_of(content) != digest:
                raise DownloadError(
                    f"the files of {uri!r} have changed since the run began: a listing is not what it was then. Start "
                    f"the run again, from a copy that nobody writes to."
                )
            _writer(content)(target, progress)

        with cache.use(_listing_key(uri, digest), fetch) as path, open(path, "rb") as stream:
            self._entries = unpack_entries(stream.read())

    def _check_version(self, name: str, entry: ListedFile) -> None:
        if not entry.stamp:
            return
        now = self._look(name)
        # adlfs before 2026.5 gives the ETag of a single file in quotes, and in a listing without: its issue 461.
        if now.stamp.replace('"', "") != entry.stamp.replace('"', ""):
            raise DownloadError(
                f"{name!r} changed while it was read: it was {entry.stamp}, and is {now.stamp}. Open the dataset again."
            )

    def _look(self, name: str) -> ListedFile:
        path = self._locate(name)
        self.filesystem.invalidate_cache(path)
        self._count(1)
        info = self._answered(name, lambda: self.filesystem.info(path))
        return ListedFile(int(info.get("size") or 0), self._commit or remote_stamp(info))

    def _answered(self, name: str, ask: Callable[[], Any]) -> Any:
        """Return what `ask` returns, which is tried again where a web server does not answer: fsspec does not."""
        if self.is_listable:
            return ask()
        return retry_transient(lambda: _ask_server(self._locate(name), ask))

    def _locate(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _count(self, num_requests: int) -> None:
        # The Hub's own client counts what it sends.
        if not isinstance(self.filesystem, HubFiles):
            count_requests(num_requests)


class _Told(Callback):  # type: ignore[misc]
    """Tells the cache how far a fetch is, which may stop it."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def call(self, *_: Any, **__: Any) -> None:
        self._progress(int(self.value))


def _md5_of_file(path: str) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, partial(hashlib.md5, usedforsecurity=False)).hexdigest()


def _check_part(name: str, start: int, stop: int, content: bytes) -> None:
    if len(content) == stop - start:
        return
    asked = f"the {stop - start} bytes from {start} of {name!r} came"
    if len(content) < stop - start:
        raise DownloadError(f"{len(content)} of {asked}")
    raise DownloadError(
        f"more than {asked}: the storage gives whole files alone. Give the cache a max_bytes that holds all remote "
        f"datasets of the run, and a whole_bytes that is no less than the file."
    )


class RefusedError(PermissionError):
    """A web server answers for a file with `REFUSED`."""


def _ask_server(url: str, ask: Callable[[], Any]) -> Any:
    """Return what `ask` returns; a file is missing where the server says so, and not where it does not answer.

    Raises:
        FileNotFoundError: the server has no such file.
        RefusedError: it refuses it, and does not tell whether there is one.
        PermissionError: it does not know who asks.
        DownloadError: it answers with another error, or not at all.
    """
    from aiohttp import ClientError

    try:
        return ask()
    except (FileNotFoundError, ClientError) as error:
        # fsspec raises FileNotFoundError for whatever goes wrong, and its cause tells what; without one it is a 404.
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
    """Return what tells one content of a remote file from another, by what a listing says; empty where it does not."""
    key = next((key for key in _VERSION_KEYS if info.get(key)), "")
    return f"size {info.get('size')}, {key} {_as_text(info[key])}" if key else ""


def _as_text(version: Any) -> str:
    # Some filesystems tell a time as a number in a listing, and as a date of the file alone.
    seconds = version.timestamp() if isinstance(version, datetime) else version
    return f"{seconds:.3f}" if isinstance(seconds, float) else str(seconds)


def pack_entries(entries: Mapping[str, ListedFile]) -> bytes:
    """Return a listing as bytes, the same for the same files."""
    return json.dumps([[name, one.size_bytes, one.stamp] for name, one in sorted(entries.items())]).encode()


def unpack_entries(content: bytes) -> dict[str, ListedFile]:
    """Return the listing of `pack_entries`."""
    return {check_listed(name): ListedFile(size_bytes, stamp) for name, size_bytes, stamp in json.loads(content)}


def check_listed(name: str) -> str:
    """Return a name of a listing: below its root, wherever files of that name are written.

    Raises:
        DownloadError: it leads elsewhere.
    """
    if leaves_folder(name):
        raise DownloadError(f"the storage lists a file {name!r}, which would lie outside its folder. Remove it there.")
    return name


def digest_of(content: bytes) -> str:
    """Return what names a listing."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _listing_key(uri: str, digest: str) -> str:
    return f"{uri} listing {digest}"


def _writer(content: bytes) -> Callable[[str, Progress], None]:
    def write(target: str, progress: Progress) -> None:
        progress(len(content))
        with open(target, "wb") as stream:
            stream.write(content)

    return write


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
