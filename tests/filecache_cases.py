"""Fetches into a file cache, and what its folder holds."""

import os
import random
import threading
import time

from raypipe.filecache.survey import name_of

SOON_S = 30.0
"""For what must come: a test that waits so long has failed."""


def content_of(key, size):
    return random.Random(key).randbytes(size)


class Fetch:
    """Writes the content of a key in small pieces; counts its calls."""

    def __init__(self, key, size, *, announces=True, piece=64):
        self.content = content_of(key, size)
        self.announces = announces
        self.piece = piece
        self.calls = 0

    def __call__(self, path, progress):
        self.calls += 1
        with open(path, "wb", buffering=0) as stream:
            for start in range(0, len(self.content), self.piece):
                part = self.content[start : start + self.piece]
                if self.announces:
                    progress(start + len(part))
                self.during(stream.tell())
                stream.write(part)

    def during(self, written):
        """Called before each piece is written."""


class Gated(Fetch):
    """Waits in the middle of a fetch until it is let go."""

    def __init__(self, key, size, **options):
        super().__init__(key, size, **options)
        self.started, self.gate = threading.Event(), threading.Event()

    def during(self, written):
        self.started.set()
        assert self.gate.wait(SOON_S)


def data_bytes(folder):
    """The bytes of whole and partial files."""
    return sum(path.stat().st_size for path in folder.iterdir() if len(path.name) == 32 or ".part" in path.name)


def ledger_bytes(folder):
    return int((folder / "ledger").read_bytes())


def extras(folder):
    """Whatever is there besides whole files and the ledger."""
    return sorted(path.name for path in folder.iterdir() if len(path.name) != 32 and path.name != "ledger")


def is_there(cache, key):
    return os.path.exists(os.path.join(cache.folder, name_of(key)))


def put(cache, *keys, size=100):
    for key in keys:
        cache.hold(key, Fetch(key, size), size).close()


def never(path, progress):
    raise AssertionError("fetched again")


def until(holds):
    end = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)
