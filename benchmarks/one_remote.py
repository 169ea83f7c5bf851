"""Runs one epoch of one loader of ``remote.py`` under a pretended training, in a process of its own.

Times are of ``time.monotonic``; by them ``remote.py`` finds the CPU time of an epoch. The process has a Ray and a home
of its own; what it reads is local or on S3, and the environment says where S3 is.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from raypipe import Pipeline, open_dataset
from raypipe.dataset import Dataset
from raypipe.loader import RankLoader
from raypipe.storage import CacheSpec, open_cache


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure."""

    root: str
    cache: dict[str, Any]
    """The fields of a `CacheSpec`."""
    batch_size: int
    step_ms: float
    live_spans: int
    num_cpus: int


def measure(request: Request) -> dict[str, Any]:
    """Return times, waits and figures of an epoch."""
    ray.init(
        address="local", num_cpus=request.num_cpus, include_dashboard=False, logging_level="error", log_to_driver=False
    )
    opened_at = time.monotonic()
    dataset = open_dataset(request.root)
    open_s = time.monotonic() - opened_at
    cache = CacheSpec(**request.cache)
    pipe = Pipeline(
        dataset,
        batch_size=request.batch_size,
        seed=0,
        delta_timestamps={"action": [i / dataset.meta.fps for i in range(16)]},
        order={"live_spans": request.live_spans},
        decode={"where": "rank"},
        cache=cache,
    )
    loader = pipe.loader(progress=False)
    times = run_epoch(loader, request.step_ms / 1000)
    stats = loader.stats()
    loader.close()
    return {
        **times,
        "open_s": open_s,
        "needed_bytes": plan_bytes(pipe, dataset, is_whole=cache.whole_bytes > 0),
        "stats": {**stats.to_dict(), "waits_for": stats.waits_for},
        "cache": asdict(open_cache(cache).stats()),
    }


def plan_bytes(pipe: Pipeline, dataset: Dataset, *, is_whole: bool) -> list[int]:
    """Return the bytes of videos that must have come before every batch, by the plan.

    Args:
        is_whole: a span needs the whole of its files, if no span before did; else its share of them.
    """
    meta, plan = dataset.meta, pipe.plan().rank(0)
    rows = [int(np.flatnonzero(meta.episodes.episode_index == episode)[0]) for episode in plan.queue.episode]
    files = [[meta.video_file(row, camera) for camera in meta.cameras] for row in rows]
    sizes = {name: meta.storage.size_bytes(name) for names in files for name in names}
    frames = meta.episodes.length[rows]
    seen: set[str] = set()
    ends = []
    for names in files:
        seen.update(names)
        ends.append(sum(sizes[name] for name in seen))
    if not is_whole:
        ends = (np.cumsum(frames) / frames.sum() * ends[-1]).astype(int).tolist()
    return [ends[batch.num_needed - 1] for batch in plan.batches()]


def run_epoch(loader: RankLoader, step_s: float) -> dict[str, Any]:
    """Return when the epoch began, had its first batch, and ended, and the wait before every batch but the first.

    A step sleeps, as the process does while a GPU works.
    """
    begin = time.monotonic()
    asked, first, waits, num_samples = begin, None, [], 0
    for batch in loader:
        now = time.monotonic()
        if first is None:
            first = now
        else:
            waits.append(now - asked)
            num_samples += len(batch["index"])
        time.sleep(step_s)
        asked = time.monotonic()
    return {"begin_s": begin, "first_s": first, "end_s": asked, "waits_s": waits, "num_samples": num_samples}


def main() -> None:
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(measure(request)))


if __name__ == "__main__":
    main()
