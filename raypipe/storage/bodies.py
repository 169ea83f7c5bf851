"""Objects of S3, read piece by piece; a body that arrives too slowly is given up.

s3fs reads each part of an object whole and does not notice a body that arrives a byte at a time. Here a body may take
any time, as long as it keeps the pace of `raypipe.storage.request_budget`. All parts are of one version: each request
has the same ``IfMatch``, if the caller gives an ETag.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import count
from typing import Any, Final

from raypipe.errors import DownloadError
from raypipe.storage.request_budget import Pace

PART_BYTES = 50 << 20
"""Part of an object per request, as in s3fs."""

_PARTS_AT_ONCE: Final = 10
"""Parts of one object, as in s3fs."""

_FIRST_WAIT_S: Final = 0.05
"""Doubled after every break of a part; s3fs sets how many breaks there may be."""

_PIECE_BYTES: Final = 1 << 18

Write = Callable[[int, bytes], None]
"""Takes the offset in the file, and the bytes."""


def fetch_object(
    filesystem: Any, asked: dict[str, Any], size_bytes: int, target: str, tell: Callable[[int], None]
) -> None:
    """Write an object of S3 to a file, several parts at a time.

    Args:
        asked: the arguments of ``GetObject``.
        tell: called with the number of bytes received so far; may raise to stop the fetch.
    """
    file, received = _Target(target), [0]

    def write(start: int, piece: bytes) -> None:
        received[0] += len(piece)
        tell(received[0])
        file.write(start, piece)

    try:
        _wait_for(filesystem, _fetch_parts(filesystem, asked, size_bytes, write))
    finally:
        file.close()


class _Target:
    """A file that parts are written to in any order, by a thread that may go on after the one that closes it."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._is_closed = False

    def write(self, start: int, piece: bytes) -> None:
        """Write all bytes of a piece.

        Raises:
            DownloadError: the file is closed. Its number may be that of another file by now.
        """
        left = memoryview(piece)
        with self._lock:
            if self._is_closed:
                raise DownloadError(f"{len(piece)} bytes came after the transfer had ended")
            while left:
                written = os.pwrite(self._fd, left, start)
                start, left = start + written, left[written:]

    def close(self) -> None:
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
    """Write a part of an object; continue after a break.

    Raises:
        DownloadError: more bytes arrive than the part has.
    """
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
        body = await _open_body(filesystem, asked)
        try:
            return await _read_into(body, (at, stop), note)
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


async def _open_body(filesystem: Any, asked: dict[str, Any]) -> Any:
    return (await filesystem._call_s3("get_object", **asked))["Body"]


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


def read_object(filesystem: Any, asked: dict[str, Any], start: int, stop: int) -> bytes:
    """Return the bytes ``[start, stop)`` of an object of S3; a little more if the server sends more."""
    pieces: list[bytes] = []

    async def read() -> None:
        body = await _open_body(filesystem, _ranged(asked, start, stop))
        await _read_into(body, (start, stop), lambda _, piece: pieces.append(piece))

    _wait_for(filesystem, read())
    return b"".join(pieces)


async def _pieces(body: Any) -> AsyncIterator[bytes]:
    while piece := await body.read(_PIECE_BYTES):
        yield piece
