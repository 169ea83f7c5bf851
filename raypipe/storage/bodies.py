"""Objects of S3 and files of web servers, piece by piece; a body that arrives too slowly is given up.

s3fs reads each part of an object whole and does not notice a body that arrives a byte at a time. fsspec gives a body of
a web server 300 s in all: too little for a large file on a slow line, and too much for one that arrives a byte at a
time. Here a body may take any time, as long as the server is not silent and keeps the pace of
`raypipe.storage.request_budget`. Requests for file information and folders keep the time-outs of s3fs and fsspec.

This module needs aiohttp, which `import raypipe` does not load, so it is imported only where such a root is opened.
"""

import asyncio
import hashlib
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from itertools import count
from typing import Any, Final

from aiohttp import ClientTimeout
from fsspec.asyn import sync_wrapper
from fsspec.implementations.http import HTTPFileSystem

from raypipe.errors import DownloadError
from raypipe.storage.request_budget import SILENCE_S, Pace, count_requests
from raypipe.text import BODY_CODES

PART_BYTES = 50 << 20
"""Part of an object per request, as in s3fs."""

_PARTS_AT_ONCE: Final = 10
"""Parts of one object, as in s3fs."""

_FIRST_WAIT_S: Final = 0.05
"""Doubled after every break of a part; s3fs sets how many breaks there may be."""

_PIECE_BYTES: Final = 1 << 18

_MD5: Final = re.compile("[0-9a-f]{32}")
"""An ETag of S3 that may be an MD5; the ETag of an object uploaded in parts has a dash."""

_TRIES: Final = 3
"""Of an object that comes with other bytes than it has, or with fewer."""

Write = Callable[[int, bytes], None]
"""Takes the offset in the file, and the bytes."""


class S3Objects:
    """Objects of S3, by bucket and key.

    All parts of an object are of one version: each request has the same ``IfMatch``, if the caller gives an ETag.
    """

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem
        self._has_md5 = True
        """Whether ETags are MD5 sums of the content, as far as is known."""
        self._met_md5 = False
        """Whether one of them was: then one that is not tells of other bytes, where S3 names no key."""

    def fetch(self, path: str, etag: str, size_bytes: int, target: str, progress: Callable[[int], None]) -> None:
        """Write an object to a file and compare its MD5 with the ETag, if the object was uploaded in one part.

        Several parts come at a time; `progress` may raise to stop it.
        """
        progress(size_bytes)
        asked, told = self._asked(path, etag), self._md5_of(etag)
        wrong, sums = "", list[str]()
        for _ in range(_TRIES):
            count_requests(max(1, -(-size_bytes // PART_BYTES)))
            with _Target(target, progress) as file:
                _wait_for(self._filesystem, _fetch_parts(self._filesystem, asked, size_bytes, file.write))
            if file.received < size_bytes:
                # A server may send less than the range that it was asked for, and the file has holes then.
                wrong = f"{file.received} of the {size_bytes} bytes of {path!r} came"
                continue
            if not told:
                return
            sums.append(_md5_of_file(target))
            wrong = f"other bytes came than the storage has, {len(sums)} times: their MD5 is not {told}"
            if sums[-1] == told:
                self._met_md5 = True
                return
            if sums[-1] in sums[:-1]:
                if self._met_md5 and not self._has_key(asked):
                    break
                # The same sum twice: the ETag of an encrypted object, or of some stores, is not the MD5.
                self._has_md5 = False
                return
        raise DownloadError(wrong)

    def read(self, path: str, etag: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)`` of an object; a little more if the server sends more."""
        count_requests(1)
        asked, pieces = _ranged(self._asked(path, etag), start, stop), list[bytes]()

        async def read() -> None:
            answer = await self._filesystem._call_s3("get_object", **asked)
            await _read_into(answer["Body"], (start, stop), lambda _, piece: pieces.append(piece))

        _wait_for(self._filesystem, read())
        return b"".join(pieces)

    def has_sum(self, etag: str, copy: str) -> bool:
        """Return whether a local copy of an object has the MD5 that its ETag is; false if it is none."""
        told = self._md5_of(etag)
        return bool(told) and _md5_of_file(copy) == told

    def _md5_of(self, etag: str) -> str:
        told = etag.strip('"')
        return told if self._has_md5 and _MD5.fullmatch(told) else ""

    def _has_key(self, asked: dict[str, Any]) -> bool:
        """Return whether an object is encrypted with a key that somebody chose: its ETag is no sum then."""
        count_requests(1)
        told = self._filesystem.call_s3("head_object", **asked)
        return told.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in told

    def _asked(self, path: str, etag: str) -> dict[str, Any]:
        """Return the arguments of ``GetObject``; with an ETag, S3 refuses an object that has changed."""
        bucket, key, _ = self._filesystem.split_path(path)
        return {"Bucket": bucket, "Key": key, **self._filesystem.req_kw} | ({"IfMatch": etag} if etag else {})


def _md5_of_file(path: str) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, partial(hashlib.md5, usedforsecurity=False)).hexdigest()


class _Target:
    """A file that parts are written to in any order, by a thread that may go on after the one that closes it."""

    def __init__(self, path: str, progress: Callable[[int], None]) -> None:
        self._progress = progress
        self.received = 0
        """Bytes written so far, each once."""
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._is_closed = False

    def write(self, start: int, piece: bytes) -> None:
        """Write all bytes of a piece; not to a closed file, whose number may be that of another file by now."""
        self.received += len(piece)
        self._progress(self.received)
        left = memoryview(piece)
        with self._lock:
            if self._is_closed:
                raise DownloadError(f"{len(piece)} bytes came after the transfer had ended")
            while left:
                written = os.pwrite(self._fd, left, start)
                start, left = start + written, left[written:]

    def __enter__(self) -> "_Target":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self._fd)


def _wait_for(filesystem: Any, transfer: Coroutine[Any, Any, None]) -> None:
    """Wait for a transfer in the thread of fsspec, and cancel it where the wait is interrupted.

    fsspec's own `sync` leaves it running there after Ctrl-C.
    """
    future = asyncio.run_coroutine_threadsafe(transfer, filesystem.loop)
    try:
        future.result()
    finally:
        future.cancel()


async def _fetch_parts(filesystem: Any, asked: dict[str, Any], size_bytes: int, write: Write) -> None:
    turns = asyncio.Semaphore(_PARTS_AT_ONCE)

    async def fetch(start: int) -> None:
        async with turns:
            stop = min(start + PART_BYTES, size_bytes)
            # No range for a whole object: an empty one has none, and S3 sends a checksum, which botocore compares.
            is_whole = start == 0 and stop == size_bytes
            await _fetch_part(filesystem, asked if is_whole else _ranged(asked, start, stop), (start, stop), write)

    fetches = [asyncio.ensure_future(fetch(start)) for start in range(0, max(size_bytes, 1), PART_BYTES)]
    try:
        await asyncio.gather(*fetches)
    finally:
        for one in fetches:
            one.cancel()
        # Nothing may write to the file once it is closed.
        await asyncio.gather(*fetches, return_exceptions=True)


async def _fetch_part(filesystem: Any, asked: dict[str, Any], part: tuple[int, int], write: Write) -> None:
    """Write a part of an object; continue after a break."""
    from s3fs.core import S3_RETRYABLE_ERRORS  # type: ignore[import-untyped]

    at, stop = part

    def note(start: int, piece: bytes) -> None:
        nonlocal at
        if start + len(piece) > stop:
            raise DownloadError(f"more than the {stop} bytes that were asked for of {asked['Key']!r} came")
        write(start, piece)
        at = start + len(piece)

    for failed in count(1):
        # Not tried again here: s3fs has, for minutes.
        answer = await filesystem._call_s3("get_object", **asked)
        try:
            return await _read_into(answer["Body"], (at, stop), note)
        except S3_RETRYABLE_ERRORS:
            if at >= stop:
                return None
            if failed >= filesystem.retries:
                raise
        await asyncio.sleep(_FIRST_WAIT_S * 2**failed)
        asked = _ranged(asked, at, stop)
    return None


def _ranged(asked: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {**asked, "Range": f"bytes={start}-{stop - 1}"}


async def _read_into(body: Any, part: tuple[int, int], write: Write) -> None:
    """Write a body as it arrives; stop once it goes past its part."""
    start, stop = part
    try:
        async for piece in Pace().follow_async(_pieces(body)):
            write(start, piece)
            start += len(piece)
            if start > stop:
                return
    finally:
        body.close()


async def _pieces(body: Any) -> AsyncIterator[bytes]:
    while piece := await body.read(_PIECE_BYTES):
        yield piece


class WebFiles(HTTPFileSystem):  # type: ignore[misc]
    """Files of a web server."""

    async def _read_within(self, url: str, start: int, stop: int | None, most: int) -> tuple[bytes, bool]:
        """Return the bytes ``[start, stop)`` of a file, cut off at ``most + 1``; and whether the server sent a part."""
        part = {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"} if start or stop is not None else {}
        asked, content = {**self.kwargs, "headers": {**self.kwargs.get("headers", {}), **part}}, bytearray()
        async with self._answer(url, asked) as response:
            async for piece in Pace().follow_async(response.content.iter_any()):
                content += piece
                if len(content) > most:
                    break
        return bytes(content[: most + 1]), response.status == HTTPStatus.PARTIAL_CONTENT

    read_within = sync_wrapper(_read_within)

    async def _get_file(self, rpath: str, lpath: str, *, callback: Any, **kwargs: Any) -> None:
        async with self._answer(rpath, {**self.kwargs, **kwargs}) as response:
            with open(lpath, "wb") as target:
                async for piece in Pace().follow_async(response.content.iter_any()):
                    callback.relative_update(len(piece))
                    target.write(piece)

    @asynccontextmanager
    async def _answer(self, url: str, asked: dict[str, Any]) -> AsyncIterator[Any]:
        session = await self.set_session()
        # aiohttp asks for packed bodies otherwise, of which a range is a part of the packed bytes.
        asked = {**asked, "headers": {**asked.get("headers", {}), "Accept-Encoding": "identity"}}
        patience = ClientTimeout(total=None, connect=SILENCE_S, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        async with session.get(self.encode_url(url), timeout=patience, **asked) as response:
            self._raise_not_found_for_status(response, url)
            if (packed := response.headers.get("Content-Encoding", "")).lower() not in BODY_CODES:
                raise DownloadError(f"{url!r} comes as {packed!r}, for which nobody asked. Check the server.")
            yield response
