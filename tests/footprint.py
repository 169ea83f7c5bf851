"""What loaders leave behind in this process and in those that it has started."""

import gc
import os
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from raypipe.loader import RankLoader
from raypipe.loader.epoch_run import EpochRun


@dataclass(frozen=True)
class Footprint:
    runs: int
    loaders: int
    threads: int
    """Of raypipe and Ray Data, and pools."""
    files: int
    """Open ones, without sockets: to a process that owned an object fetched here, Ray 2.60 keeps one until gRPC
    finds it idle, after 30 minutes, also where that process has ended: the split of a loader that is dropped."""
    actors: int
    """Feeders and coordinators of splits, of all Rays that this process has started."""

    def is_within(self, other) -> bool:
        mine, most = asdict(self), asdict(other)
        return all(mine[name] <= most[name] for name in mine)


def footprint() -> Footprint:
    # Not the collector's count of garbage: objects that are still there.
    kinds = [type(one) for one in gc.get_objects()]
    return Footprint(
        runs=kinds.count(EpochRun),
        loaders=kinds.count(RankLoader),
        threads=sum(thread.name.startswith(("raypipe-", "iter_threaded")) for thread in threading.enumerate()),
        files=sum(not link.startswith("socket:") for link in map(_read_link, Path("/proc/self/fd").iterdir())),
        actors=sum(name.startswith(("ray::Feeder", "ray::SplitCoordinator")) for name in _names_of_children()),
    )


def num_descriptors() -> int:
    """Return how many files and sockets are open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def settled_descriptors(most: int, timeout_s: float = 30.0) -> int:
    """Return how many are open when they are at most `most`, since threads at work open files for a moment; or after a
    while.
    """
    deadline = time.monotonic() + timeout_s
    while (found := num_descriptors()) > most and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def no_collector():
    """Let nothing be freed by the collector: what stands in a cycle stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def wait_until_within(most: Footprint, timeout_s: float = 30.0) -> Footprint:
    """Return the footprint when threads and processes that were given up have ended; or what it is after a while."""
    deadline = time.monotonic() + timeout_s
    while not (found := footprint()).is_within(most) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _read_link(path: Path) -> str:
    with suppress(OSError):
        return str(path.readlink())
    return "socket: of the listing itself"


def _names_of_children() -> list[str]:
    parents, names = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                stat = (folder / "stat").read_text()
                parents[int(folder.name)] = int(stat[stat.rindex(")") + 2 :].split()[1])
                names[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")

    def is_mine(pid):
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return [name for pid, name in names.items() if pid != os.getpid() and is_mine(pid)]
