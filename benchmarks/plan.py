"""What a plan costs at the size of the largest robot datasets: 1,000,000 episodes, 300,000,000 frames, 64 lanes.

Run ``python benchmarks/plan.py [--json-file FILE]``. Every figure is the best of three in one process; memory is the
peak of the process above what the imports and the index of episodes take.
"""

import argparse
import json
import platform
import resource
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.feed import feed_order, resident_spans, simulate_split
from raypipe.plan import (
    BatchSpec,
    EpisodeIndex,
    Leg,
    OrderSpec,
    SelectionSpec,
    WorldPlan,
    index_episodes,
    plan_epoch,
    plan_world,
)

REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--other-world-size", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--json-file", dest="json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    figures = measure(arguments)
    for name, value in figures.items():
        print(f"{name:<44} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    index = make_index(arguments.episodes)
    spec = OrderSpec(seed=0, lanes=arguments.lanes)
    batch = BatchSpec(size=arguments.batch_size)
    memory_before = peak_bytes()
    plan_s, plan = best(lambda: plan_epoch(index, spec, epoch=0))
    memory = peak_bytes() - memory_before
    world = plan_world(plan, world_size=arguments.lanes, batch=batch)
    return {
        **describe_machine(),
        "episodes": len(index),
        "frames": index.num_frames,
        "order and queues, s": round(plan_s, 3),
        "memory of the index, MB": round(index_bytes(index) / 1e6),
        "memory of planning above the index, MB": round(memory / 1e6),
        "fingerprint, s": round(best(lambda: plan_epoch(index, spec, epoch=0).fingerprint)[0] - plan_s, 3),
        **measure_batches(world),
        **measure_resume(index, world, batch, arguments.other_world_size),
        **measure_feed(world),
    }


def measure_batches(world: WorldPlan) -> dict[str, Any]:
    first_s, _ = best(lambda: next(world.rank(0).batches()))
    random_s, _ = best(lambda: world.frames_at(world.num_steps // 3, 0))
    chunks_s, chunk_frames = best(lambda: sum(chunk.span.size for chunk in world.rank(0).chunks()))
    batches_s, num_frames = best(lambda: sum(batch.span.size for batch in islice(world.rank(0).batches(), 20_000)))
    return {
        "steps": world.num_steps,
        "first batch's indices after the plan, s": round(first_s, 4),
        "frames of any step on a rank, s": round(random_s, 4),
        "indices/s of a rank, as chunks": round(chunk_frames / chunks_s),
        "indices/s of a rank, batch by batch": round(num_frames / batches_s),
    }


def measure_resume(index: EpisodeIndex, world: WorldPlan, batch: BatchSpec, other: int) -> dict[str, Any]:
    middle = world.at(world.num_steps // 2)
    same_s, _ = best(lambda: next(world.at(world.num_steps // 2).rank(0).batches()))
    legs = (*middle.plan.legs, Leg(lanes=other, live_spans=world.plan.spec.live_spans))
    whole_s, _ = best(lambda: plan_epoch(index, world.plan.spec, epoch=0))
    other_s, plan = best(lambda: plan_epoch(index, world.plan.spec, epoch=0, legs=legs))
    first_s, _ = best(lambda: next(plan_world(plan, world_size=other, batch=batch).rank(0).batches()))
    return {
        "resume, same world size, after the plan, s": round(same_s, 4),
        f"resume on {other} ranks, all, s": round(other_s + first_s, 3),
        f"resume on {other} ranks, above a plan, s": round(other_s + first_s - whole_s, 3),
    }


def measure_feed(world: WorldPlan) -> dict[str, Any]:
    ranks = [world.rank(rank) for rank in range(world.world_size)]
    queues_s, queues = best(lambda: [world.rank(rank).queue.num_rows for rank in range(world.world_size)])
    feed_s, feed = best(lambda: feed_order(queues))
    delivered = simulate_split(feed.num_rows, world.world_size)
    assert np.array_equal(delivered, feed.rank)
    started = time.perf_counter()
    resident = resident_spans(feed, [rank.lives() for rank in ranks], world.steps)
    return {
        "queues of all ranks, s": round(queues_s, 3),
        f"feed order of {len(feed)} blocks, s": round(feed_s, 3),
        "lives of all spans and resident spans, s": round(time.perf_counter() - started, 2),
        "resident spans, most over ranks": int(resident.max()),
    }


def best(measured: Callable[[], Any]) -> tuple[float, Any]:
    """Return the shortest time of a few calls, and what the last one returned."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        result = measured()
        times.append(time.perf_counter() - started)
    return min(times), result


def make_index(num_episodes: int) -> EpisodeIndex:
    lengths = np.random.default_rng(0).integers(100, 501, num_episodes)
    return index_episodes("bench", np.arange(num_episodes), lengths, fingerprint="bench", selection=SelectionSpec())


def index_bytes(index: EpisodeIndex) -> int:
    return sum(column.nbytes for column in (index.dataset, index.episode, index.length, index.start, index.stop))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe_machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")] if cpuinfo.exists() else []
    )
    return {
        "machine": f"{len(models)} x {models[0].split(':')[1].strip()}" if models else platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


if __name__ == "__main__":
    main()
