"""An S3 store on loopback that is as slow as it is told to be, in processes of its own.

::

    client -> proxy: wait a latency, then
                GET of an object (whole or a range)  -> its bytes from the local copy, within the cap    this process
                all else (listing, HEAD)             -> moto, an S3 server                               its child

Moto's server sends fewer MB/s than the cap by default, so that it would be measured in place of the loader: the bytes
come from the files that were put there, with the ETag that moto gave them; ``remote.py`` prints what each gives.
Latency and cap can be changed
while it runs, and what was sent is counted; see `Store`.

    python benchmarks/slow_store.py FOLDER
"""

import asyncio
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUCKET = "lab"
ROOT = f"s3://{BUCKET}/arm"
CHUNK_BYTES = 256 << 10
"""Sent at once: 5 ms of 50 MB/s, so that requests at one time share the cap evenly."""

ACCESS = {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "benchmark", "AWS_DEFAULT_REGION": "us-east-1"}


class Store:
    """A store with the files of `folder` as ``s3://lab/arm``, until `stop`."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        told = next((json.loads(line) for line in lines if line.startswith("{")), None)
        if told is None:
            raise SystemExit("the store did not start; its error stands above. It needs: pip install moto[server] s3fs")
        self.url: str = told["url"]
        self.moto_url: str = told["moto_url"]
        self.pid = self._process.pid

    def set_speed(self, latency_s: float, bytes_per_s: float) -> None:
        """Answer every request so late, and all together not faster than this."""
        self._ask("/-/speed", json.dumps({"latency_s": latency_s, "bytes_per_s": bytes_per_s}).encode())

    def counts(self) -> dict[str, int]:
        """Return the requests and the bytes of objects that were sent since the start."""
        counts: dict[str, int] = json.loads(self._ask("/-/counts"))
        return counts

    def environment(self) -> dict[str, str]:
        """Return what makes any S3 client use this store."""
        return {**ACCESS, "AWS_ENDPOINT_URL": self.url, "AWS_CONFIG_FILE": os.devnull}

    def stop(self) -> None:
        """End the processes."""
        self._process.communicate()

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        with urllib.request.urlopen(self.url + path, data=body) as answer:
            content: bytes = answer.read()
        return content


@dataclass
class Line:
    """A connection to the world: so many bytes a second for all requests together, and a latency for each."""

    latency_s: float = 0.0
    bytes_per_s: float = 1e12
    counts: dict[str, int] = field(default_factory=lambda: {"requests": 0, "bytes": 0})
    _free_at: float = 0.0

    async def begin(self) -> None:
        """Wait as long as a request takes to be answered."""
        self.counts["requests"] += 1
        await asyncio.sleep(self.latency_s)

    async def send(self, num_bytes: int) -> None:
        """Wait until so many bytes have passed."""
        now = time.monotonic()
        # A timer is some ms late: what that has cost may be made up for, idle time may not.
        self._free_at = max(self._free_at, now - 0.01) + num_bytes / self.bytes_per_s
        self.counts["bytes"] += num_bytes
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class Proxy:
    """Answers what clients ask, by the bytes of local files or by asking moto."""

    def __init__(self, folder: Path, moto_url: str, headers: dict[str, dict[str, str]]) -> None:
        self._folder = folder
        self._moto_url = moto_url
        self._headers = headers
        self._line = Line()
        self._session: Any = None

    async def answer(self, request: Any) -> Any:
        """Return the answer to one request."""
        from aiohttp import web

        if request.path == "/-/counts":
            return web.json_response(self._line.counts)
        if request.path == "/-/speed":
            told = await request.json()
            self._line.latency_s, self._line.bytes_per_s = told["latency_s"], told["bytes_per_s"]
            return web.Response()
        await self._line.begin()
        name = request.path.removeprefix(f"/{BUCKET}/arm/")
        if request.method == "GET" and name in self._headers and not request.query:
            return await self._send_object(request, name)
        return await self._forward(request)

    async def _send_object(self, request: Any, name: str) -> Any:
        from aiohttp import web

        path = self._folder / name
        size = path.stat().st_size
        start, stop = _range_of(request.headers.get("Range", ""), size)
        headers = {**self._headers[name], "Content-Length": str(stop - start)}
        if stop - start != size:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        answer = web.StreamResponse(status=200 if stop - start == size else 206, headers=headers)
        await answer.prepare(request)
        with path.open("rb") as stream:
            stream.seek(start)
            for first in range(start, stop, CHUNK_BYTES):
                content = stream.read(min(CHUNK_BYTES, stop - first))
                await self._line.send(len(content))
                await answer.write(content)
        await answer.write_eof()
        return answer

    async def _forward(self, request: Any) -> Any:
        from aiohttp import web

        headers = {key: value for key, value in request.headers.items() if key.lower() != "content-length"}
        url = f"{self._moto_url}{request.path_qs}"
        async with self._client.request(request.method, url, headers=headers, data=await request.read()) as found:
            body = await found.read()
            dropped = ("transfer-encoding", "connection", "content-length", "content-encoding")
            kept = {key: value for key, value in found.headers.items() if key.lower() not in dropped}
            if request.method == "HEAD":
                kept["Content-Length"] = found.headers.get("Content-Length", "0")
            return web.Response(status=found.status, headers=kept, body=None if request.method == "HEAD" else body)

    async def close(self) -> None:
        """Close the connections to moto."""
        if self._session is not None:
            await self._session.close()

    @property
    def _client(self) -> Any:
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession()
        return self._session


def _range_of(header: str, size: int) -> tuple[int, int]:
    """Return the bytes that a request asks for: ``bytes=first-last``, ``bytes=first-`` or ``bytes=-count``."""
    if not header:
        return 0, size
    first, last = header.removeprefix("bytes=").split("-")
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1 if last else size)


def serve_moto(folder: Path, told: Any) -> None:
    """Serve the files of `folder`, put there first, until the parent ends."""
    os.environ.update(ACCESS)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=url)
    client.create_bucket(Bucket=BUCKET)
    headers = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            client.put_object(Bucket=BUCKET, Key=f"arm/{name}", Body=path.read_bytes())
            found = client.head_object(Bucket=BUCKET, Key=f"arm/{name}")["ResponseMetadata"]["HTTPHeaders"]
            headers[name] = {key: found[key] for key in ("etag", "last-modified", "content-type")}
    told.put((url, headers))
    threading.Event().wait()


async def serve(proxy: Proxy, moto_url: str) -> None:
    """Serve clients, and tell the parent where, until that closes our input."""
    from aiohttp import web

    # Connections stay open as those to S3 do.
    runner = web.ServerRunner(web.Server(proxy.answer, access_log=None, keepalive_timeout=60))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    print(json.dumps({"url": f"http://{host}:{port}", "moto_url": moto_url}), flush=True)
    # Also where the parent was killed.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()
    await proxy.close()


def main() -> None:
    folder = Path(sys.argv[1])
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    moto = context.Process(target=serve_moto, args=(folder, told), daemon=True)
    moto.start()
    moto_url, headers = told.get(timeout=120)
    asyncio.run(serve(Proxy(folder, moto_url, headers), moto_url))


if __name__ == "__main__":
    main()
