"""Files of a web server, with bodies that may take as long as they need.

fsspec gives a body 300 s in all: too little for a large file on a slow line, and too much for one that arrives a byte
at a time. Here a body is given up when the server is silent, or slower than the pace of
`raypipe.storage.request_budget`. Requests for file information and folders keep the time-out of fsspec. This module
needs aiohttp, which `import raypipe` does not load, so it is imported only where a web server is opened.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientTimeout
from fsspec.asyn import sync
from fsspec.implementations.http import HTTPFileSystem

from raypipe.errors import DownloadError
from raypipe.storage.request_budget import SILENCE_S, Pace
from raypipe.text import BODY_CODES


class WebFiles(HTTPFileSystem):  # type: ignore[misc]
    """Files of a web server, with bodies that may take as long as they need."""

    def read_within(self, url: str, headers: dict[str, str], most: int) -> bytes:
        """Return the body of an answer, cut off at ``most + 1`` bytes."""
        return bytes(sync(self.loop, self._read_within, url, headers, most))

    async def _read_within(self, url: str, headers: dict[str, str], most: int) -> bytes:
        asked, content = {**self.kwargs, "headers": {**self.kwargs.get("headers", {}), **headers}}, bytearray()
        async with self._answer(url, asked) as response:
            self._raise_not_found_for_status(response, url)
            if (packed := response.headers.get("Content-Encoding", "")).lower() not in BODY_CODES:
                raise DownloadError(f"{url!r} comes as {packed!r}, for which nobody asked. Check the server.")
            async for piece in Pace().follow_async(response.content.iter_any()):
                content += piece
                if len(content) > most:
                    break
        return bytes(content[: most + 1])

    async def _get_file(self, rpath: str, lpath: str, *, callback: Any, **kwargs: Any) -> None:
        async with self._answer(rpath, {**self.kwargs, **kwargs}) as response:
            self._raise_not_found_for_status(response, rpath)
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
            yield response
