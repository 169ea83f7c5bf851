"""One file of a commit, streamed to a partial file, continued after a break, and verified by its hash."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from raypipe.storage.hub.cache import HubFile
from raypipe.storage.hub.client import PROGRESS_BYTES, RANGE_REFUSED, Client, PassingError, file_url
from raypipe.storage.hub.names import HubSource

_CHUNK_BYTES: Final = 1 << 20

OnBytes = Callable[[int], None]
"""Called from several threads with the number of bytes received; negative when bytes have to be downloaded again."""


class Receiver:
    """Downloads files of one commit; several threads may use it, each for other files."""

    def __init__(self, client: Client, source: HubSource, advance: OnBytes) -> None:
        self._client = client
        self._source = source
        self._advance = advance
        self._most_received: dict[str, int] = {}

    def receive(self, name: str, file: HubFile, partial: Path) -> None:
        """Download the rest of the partial file, and verify it."""
        start = size_of(partial)
        if start > file.size_bytes:
            partial.unlink()
            start = 0
        self._advance(start)
        received = start
        if start < file.size_bytes or not partial.exists():
            received = self._stream(name, file, partial, start)
        if received == file.size_bytes and hash_of(partial, file) == file.content_hash:
            return
        self._advance(-received)
        # A short file is removed too: the answer was complete, so it was not this file.
        partial.unlink(missing_ok=True)
        if received < file.size_bytes:
            raise PassingError(f"it ended after {received} of {file.size_bytes} bytes")
        raise PassingError(f"its content is not what the Hub lists, which has the hash {file.content_hash}")

    def _stream(self, name: str, file: HubFile, partial: Path, start: int) -> int:
        """Return the size of the partial file when the response ends."""
        url = file_url(self._source.repo_id, self._source.commit, name)
        headers = {"Range": f"bytes={start}-"} if start else {}
        begun = received = start
        try:
            with self._client.open(url, headers) as response:
                if start and not _continues(response, start):
                    self._advance(-start)
                    begun = received = 0
                with open(partial, "r+b" if begun else "wb") as stream:
                    stream.seek(begun)
                    for chunk in self._client.pieces(response):
                        received += len(chunk)
                        self._advance(len(chunk))
                        if received > file.size_bytes:
                            # Not written: the caller has reserved room for the listed size only.
                            break
                        stream.write(chunk)
                        # So that bytes survive if the process is killed, and are not downloaded again.
                        stream.flush()
                    os.fsync(stream.fileno())
        except PassingError as fault:
            self._advance(-received)
            if fault.status == RANGE_REFUSED:
                partial.unlink(missing_ok=True)
            # Measured from the best attempt so far: a server that ignores ranges sends the same bytes forever.
            best = self._most_received.get(name, start)
            fault.has_progress = received - best >= PROGRESS_BYTES
            self._most_received[name] = max(received, best)
            raise
        return received


def hash_of(path: Path, file: HubFile) -> str:
    """Return the hash of a local file, SHA-256 or git's, as the Hub lists it."""
    digest = hashlib.sha256()
    if not file.sha256:
        digest = hashlib.sha1(f"blob {size_of(path)}\0".encode(), usedforsecurity=False)
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _continues(response: Any, start: int) -> bool:
    return bool(response.status_code == 206) and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 if there is none."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
