"""Fetches into a file cache, and what its folder holds."""

import os
import random
import threading

from waiting import PATIENCE_S

from raypipe.storage.cache_folder import name_of
from raypipe.storage.local_files import lock_file


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
        assert self.gate.wait(PATIENCE_S)


def ledger_bytes(folder):
    return int((folder / "ledger").read_bytes())


def extras(folder):
    """Whatever is there besides whole files, the ledger and the bound."""
    known = ("ledger", "bound")
    return sorted(path.name for path in folder.iterdir() if len(path.name) != 32 and path.name not in known)


def is_there(cache, key):
    return os.path.exists(os.path.join(cache.folder, name_of(key)))


def put(cache, *keys, size=100):
    for key in keys:
        cache.hold(key, Fetch(key, size), size).close()


def never(path, progress):
    raise AssertionError("fetched again")


class Watcher(threading.Thread):
    """Measures the folder over and over: the most bytes that were on disk at once."""

    def __init__(self, folder, every_s=0.001):
        super().__init__(daemon=True)
        self.folder = folder
        self.every_s = every_s
        self.most_bytes = self.num_looks = 0
        self.stopping = threading.Event()

    def run(self):
        while not self.stopping.wait(self.every_s):
            # Else a file that goes and one that comes would both be counted. Fetches go on meanwhile.
            book = lock_file(str(self.folder / "ledger"), create=True)
            try:
                self.most_bytes = max(self.most_bytes, data_bytes(self.folder))
                self.num_looks += 1
            finally:
                book.release()

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self.join()


def data_bytes(folder):
    """The bytes of whole and partial files, some of which may go meanwhile."""
    total = 0
    for name in os.listdir(folder):
        if len(name) == 32 or ".part" in name:
            try:
                total += os.stat(folder / name).st_size
            except FileNotFoundError:
                continue
    return total
