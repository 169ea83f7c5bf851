"""Runs on one Ray, as a program: prints a line of JSON for every run, its name and the digests of its batches.

``FOLDER`` and then by run its name, the URI of its root, whether that is kept by ``parts``, ``whole`` or not
(``local``), in which cache, and whether its ranks are ``killed`` or ``unbroken``.
"""

import json
import os
import signal
import sys
from pathlib import Path

import ray
from batches import WINDOWS, digest_of
from ray_session import run_ranks

import raypipe as rp

KEPT = {"whole": 1 << 30, "parts": 0}


def make_pipe(root: str, **options) -> rp.Pipeline:
    dataset = rp.open_dataset(root).windowed(offsets=WINDOWS)
    batch = {"size": 8, "scope": "global"}
    return rp.Pipeline(dataset, batch_size=batch, seed=5, order={"live_spans": 3}, **options)


@ray.remote(num_cpus=0, max_restarts=0)
class Rank:
    """A rank as a process of its own: takes some batches, tells them, and waits to be killed."""

    def __init__(self, loader) -> None:
        self.loader = loader

    def pid(self) -> int:
        return os.getpid()

    def steps(self, num_steps):
        return take(self.loader, num_steps)


def take(loader, num_steps):
    return [digest_of(batch) for batch in loader.steps(num_steps)], loader.state_dict()


def begin_killed(loaders) -> list:
    """Let ranks take three steps in processes of their own, and kill them."""
    ranks = [Rank.remote(loader) for loader in loaders]
    pids = ray.get([rank.pid.remote() for rank in ranks])
    begun = ray.get([rank.steps.remote(3) for rank in ranks])
    # Not after the last batch: both have more on its way.
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return begun


def begin_unbroken(loaders) -> list:
    return run_ranks(loaders, lambda loader: take(loader, 3))


BEGIN = {"killed": begin_killed, "unbroken": begin_unbroken}


def run(root: str, kept: str, cache: Path, fate: str) -> list:
    """Three steps on two ranks, then the rest of the epoch on one; by step the digests of the ranks."""
    spec = {"folder": str(cache), "max_bytes": 1 << 30, "whole_bytes": KEPT[kept]} if kept in KEPT else {}
    pipe = make_pipe(root, cache=spec)
    begun = BEGIN[fate](pipe.loaders(2))
    (rest,) = pipe.loaders(1)
    rest.load_state_dict(json.loads(json.dumps(begun[0][1])))
    steps = [list(step) for step in zip(*(taken for taken, _ in begun), strict=True)]
    (rested,) = run_ranks([rest], lambda loader: [[digest_of(batch)] for batch in loader])
    return steps + rested


if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    for name, root, kept, cache, fate in zip(*(words[i::5] for i in range(5)), strict=True):
        print(json.dumps({name: run(root, kept, Path(folder) / cache, fate)}), flush=True)
