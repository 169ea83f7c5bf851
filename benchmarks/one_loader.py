"""What `raypipe.bench` does not measure of a loader: its processes at rest, and how long a training waits for it.

    python benchmarks/one_loader.py idle|wait REQUEST.json RESULT.json

Run by ``loader.py``. Times are of ``time.monotonic``, which all processes of a machine share.
"""

import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from raypipe.bench.loaders import RaypipeLoader, Request, start_ray

IDLE_S = 10.0
"""How long an idle process runs; memory is taken from the second half, when Ray has started its workers."""


def stand_idle(request: Request) -> dict[str, Any]:
    """Import and start what the loader needs, wait, and return the times between which the process was idle.

    In this time the loader's processes take their least memory, before anything is read.
    """
    import_decoder()
    pool = None
    if request.num_floor > 1:
        pool = ProcessPoolExecutor(request.num_floor, get_context("spawn"))
        # All at once, so that each process takes one job: processes start more slowly than this loop runs.
        for job in [pool.submit(import_decoder) for _ in range(request.num_floor)]:
            job.result()
    if not request.num_floor:
        import raypipe.pipeline.pipeline  # noqa: F401
    if request.needs_ray:
        start_ray(request.num_cpus)
    begin = time.monotonic()
    time.sleep(IDLE_S)
    end = time.monotonic()
    if pool is not None:
        pool.shutdown()
    return {"begin_s": (begin + end) / 2, "end_s": end}


def import_decoder() -> None:
    import torchcodec.decoders  # noqa: F401


def measure_wait(request: Request, step_s: float, num_steps: int) -> dict[str, Any]:
    """Return the share of waiting in a loop whose step sleeps, as the process does while a GPU works."""
    loader = RaypipeLoader(request)
    # The measured steps are of a warm epoch.
    for _ in loader.epoch():
        pass
    waited, asked, begin = 0.0, 0.0, 0.0
    for _ in islice(loader.epoch(), num_steps):
        now = time.monotonic()
        # The first batch waits for the epoch to start; `first_batch_s` measures that.
        if begin:
            waited += now - asked
        begin = begin or now
        time.sleep(step_s)
        asked = time.monotonic()
    loader.close()
    return {"wait_share": round(waited / (asked - begin), 4)}


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[2]).read_text())
    asked_for = Request(**told["request"])
    found = (
        stand_idle(asked_for) if sys.argv[1] == "idle" else measure_wait(asked_for, told["step_s"], told["num_steps"])
    )
    Path(sys.argv[3]).write_text(json.dumps(found))
