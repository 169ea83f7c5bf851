"""Runs on one Ray, as a program: for every root the digests of its batches, also of one that is killed and goes on.

``FOLDER`` and then by root its name, its URI, and whether it is kept by ``parts``, ``whole`` or not (``local``).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import ray
from hub_run import digest_of, make_pipe
from ray_session import run_ranks

KEPT = {"whole": 1 << 30, "parts": 0}


@ray.remote(num_cpus=0, max_restarts=0)
class Rank:
    """A rank as a process of its own: takes some batches, tells them, and waits to be killed."""

    def __init__(self, loader) -> None:
        self.loader = loader

    def pid(self) -> int:
        return os.getpid()

    def steps(self, num_steps):
        taken = [digest_of(batch) for batch in self.loader.steps(num_steps)]
        return taken, self.loader.state_dict()


def run(root: str, kind: str, folder: Path) -> list:
    """Three steps on two ranks, which are killed; then the rest of the epoch on one; by step the digests."""
    cache = {"folder": str(folder / "cache"), "max_bytes": 1 << 30, "whole_bytes": KEPT[kind]} if kind in KEPT else {}
    pipe = make_pipe(root, cache=cache)
    ranks = [Rank.remote(loader) for loader in pipe.loaders(2)]
    pids = ray.get([rank.pid.remote() for rank in ranks])
    begun = ray.get([rank.steps.remote(3) for rank in ranks])
    # Not after the last batch: both have more on its way.
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    (rest,) = pipe.loaders(1)
    rest.load_state_dict(json.loads(json.dumps(begun[0][1])))
    steps = [list(step) for step in zip(*(taken for taken, _ in begun), strict=True)]
    (rested,) = run_ranks([rest], lambda loader: [[digest_of(batch)] for batch in loader])
    return steps + rested


if __name__ == "__main__":
    folder, *roots = sys.argv[1:]
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    found = {}
    for name, root, kind in zip(roots[::3], roots[1::3], roots[2::3], strict=True):
        began = time.monotonic()
        found[name] = run(root, kind, Path(folder) / name)
        print(name, f"{time.monotonic() - began:.1f} s", file=sys.stderr)
    print(json.dumps(found))
