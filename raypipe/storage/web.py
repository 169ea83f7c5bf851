"""Files of a web server, with bodies that may take as long as they need.

fsspec gives a body 300 s in all, which a large file on a slow line does not keep to, and one that comes a byte at a
time does. Here it is given up where the server is silent, or slower than the pace of `raypipe.requests`. What is no
file keeps the time of fsspec: what a server tells of a file, and its folders. Needs aiohttp, which `import raypipe`
does not: so it is imported where a web server is opened.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientTimeout
from fsspec.implementations.http import HTTPFileSystem

from raypipe.requests import SILENCE_S, Pace


class WebFiles(HTTPFileSystem):  # type: ignore[misc]
    """Files of a web server, with bodies that may take as long as they need."""

    async def _cat_file(self, url: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        asked: dict[str, Any] = {**self.kwargs, **kwargs}
        if start is not None or end is not None:
            if start == end:
                return b""
            limits = await self._process_limits(url, start, end)
            asked["headers"] = {**asked.get("headers", {}), "Range": limits}
        async with self._answer(url, asked) as response:
            self._raise_not_found_for_status(response, url)
            return b"".join([piece async for piece in Pace().follow_async(response.content.iter_any())])

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
        patience = ClientTimeout(total=None, connect=SILENCE_S, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        async with session.get(self.encode_url(url), timeout=patience, **asked) as response:
            yield response
