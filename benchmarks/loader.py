"""raypipe beside the floor: cost, speed, memory and mixing, on one dataset in one run; ``peers.py`` compares others.

    python benchmarks/loader.py [--json-file FILE]
    python benchmarks/loader.py DATASET
    python benchmarks/loader.py --make h264
    python benchmarks/loader.py --real DATASET --copies 8

Without a dataset one is made that is as costly as two real cameras, in some minutes. `--real` makes a longer one out of
a real one of v2.x, by copying its episodes. Batches of 64, an action chunk of 16, one frame of each camera; raypipe is
told nothing else.

Every loader runs in a new process, with a Ray of its own if it uses one, for two epochs; all figures but the first
batch are of the second. "raypipe" is the local feed, "raypipe-ray" reads rows by Ray Data, "raypipe-cluster" decodes in
Ray tasks too.

CPU seconds are those of the whole process tree, Ray's daemons and tasks included; they move little with the load of
the machine, samples/s move a lot. Memory is the peak of the sum of proportional set sizes; idle is that of the
same processes with torch, torchcodec and raypipe imported and Ray started, and nothing read. Batch times and samples/s
are of a loop that does nothing else; the share of waiting is of one that sleeps `--step-ms` after a batch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from machine import write_results
from made import KINDS, make_dataset
from made_copies import copy_episodes

from raypipe import open_dataset
from raypipe.bench.loaders import Request, sample_windows
from raypipe.bench.run import TreeSampler, measure

LOADERS: dict[str, dict[str, Any]] = {
    "floor, 1 process": {"num_floor": 1},
    "floor, all cores": {"num_floor": os.cpu_count() or 1},
    "raypipe": {},
    "raypipe-ray": {"starts_ray": True},
    "raypipe-cluster": {"parts": {"decode": {"where": "cluster"}}},
}
"""What each loader asks for."""

COLUMNS = (
    "loader",
    "observation_frames",
    "cpu_s_per_1k",
    "floor_ratio",
    "samples_per_s",
    "samples_per_s_overall",
    "first_batch_s",
    "peak_mb",
    "idle_mb",
    "above_idle_mb",
    "distinct_episodes",
    "wait_share",
    "batch_ms_p50",
    "batch_ms_p95",
    "batch_ms_p99",
    "error",
)


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="raypipe-bench-") as folder:
        root = find_dataset(arguments, Path(folder))
        results: list[dict[str, Any]] = []
        idle: dict[str, float | None] = {}
        for frames in arguments.observation_frames:
            for name in arguments.loaders:
                request = make_request(arguments, root, name, frames)
                # Where raypipe decodes makes no difference before it does.
                kind = name.replace("-cluster", "-ray")
                if kind not in idle:
                    idle[kind] = measure_idle(request, Path(folder))
                results.append({"loader": name, "observation_frames": frames, **measure(request, Path(folder))})
                add_idle(results[-1], idle[kind])
                if not request.num_floor and arguments.steps and "error" not in results[-1]:
                    steps = {"step_s": arguments.step_ms / 1000, "num_steps": arguments.steps}
                    results[-1] |= run_apart("wait", {"request": asdict(request), **steps}, Path(folder))[0]
                print(json.dumps({key: results[-1].get(key) for key in COLUMNS[:10]}), flush=True)
        add_ratios(results)
    write_results(arguments.json, results, COLUMNS)


def find_dataset(arguments: argparse.Namespace, folder: Path) -> str:
    """Return the dataset that was named, or make the one that was asked for in `folder`."""
    if arguments.dataset:
        return str(arguments.dataset)
    if arguments.real:
        return str(copy_episodes(Path(arguments.real), folder / "real", arguments.copies))
    return str(make_dataset(arguments.make, folder / arguments.make, arguments.episodes))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", nargs="?", help="a folder with a LeRobot dataset")
    parser.add_argument("--make", choices=KINDS, help=f"make one of this kind instead; by default {KINDS[0]}")
    parser.add_argument("--real", metavar="DATASET", help="make one of the episodes of this one, of v2.0 or v2.1")
    parser.add_argument("--copies", type=int, default=8, help="how many times those episodes come")
    parser.add_argument("--episodes", type=int, help="episodes of the dataset that is made")
    parser.add_argument("--json-file", dest="json", help="also write the figures here")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--observation-frames", type=int, nargs="+", default=[1])
    parser.add_argument("--loaders", nargs="+", choices=list(LOADERS), default=list(LOADERS), metavar="NAME")
    parser.add_argument("--max-samples", type=int, help="use the first episodes only, up to so many frames")
    parser.add_argument("--step-ms", type=float, default=50.0, help="a training step, for the share of waiting")
    parser.add_argument("--steps", type=int, default=60, help="steps of that; 0 leaves it out")
    parser.add_argument("--live-gb", type=float, default=0.0, help="memory of raypipe for spans; 0: its own choice")
    parser.add_argument("--parts", type=json.loads, default={}, help="further parts of raypipe's pipeline, as JSON")
    arguments = parser.parse_args()
    given = [arguments.dataset, arguments.make, arguments.real]
    if len(given) - given.count(None) > 1:
        parser.error("give one of DATASET, --make and --real")
    if given.count(None) == len(given):
        arguments.make = KINDS[0]
    return arguments


def make_request(arguments: argparse.Namespace, root: str, name: str, observation_frames: int) -> Request:
    dataset, episodes = open_dataset(root), None
    if arguments.max_samples:
        ends = np.cumsum(dataset.meta.episodes.length)
        episodes = list(range(max(1, int(np.searchsorted(ends, arguments.max_samples, side="right")))))
    asked = LOADERS[name]
    live = {"live_bytes": int(arguments.live_gb * 1e9)} if arguments.live_gb else {}
    decode = asked.get("parts", {}).get("decode", {}) | arguments.parts.get("decode", {})
    return Request(
        root=str(root),
        batch_size=arguments.batch_size,
        num_cpus=os.cpu_count() or 1,
        windows=sample_windows(dataset, action_frames=16, observation_frames=observation_frames),
        episodes=episodes,
        parts={**live, **arguments.parts, **({"decode": decode} if decode else {})},
        num_floor=asked.get("num_floor", 0),
        starts_ray=asked.get("starts_ray", False),
    )


def measure_idle(request: Request, folder: Path) -> float | None:
    """Return the megabytes of a loader's processes when all is imported and started, and nothing is read."""
    times, sampler = run_apart("idle", {"request": asdict(request)}, folder)
    found = [size for time_s, size in sampler.memory if times and times["begin_s"] <= time_s <= times["end_s"]]
    return float(np.median(found)) / 1e6 if found else None


def run_apart(mode: str, told: dict[str, Any], folder: Path) -> tuple[dict[str, Any], TreeSampler]:
    """Run `one_loader.py`; return what it wrote, empty if it failed, and the samples of its process tree."""
    files = [folder / "told.json", folder / "found.json"]
    files[0].write_text(json.dumps(told))
    files[1].unlink(missing_ok=True)
    child = subprocess.Popen([sys.executable, Path(__file__).with_name("one_loader.py"), mode, *files])
    sampler = TreeSampler(child.pid)
    child.wait()
    sampler.stop()
    return json.loads(files[1].read_text()) if files[1].exists() else {}, sampler


def add_idle(result: dict[str, Any], idle_mb: float | None) -> None:
    """Add the memory of the idle processes, and what the loader takes above it, where both were measured."""
    if idle_mb is not None and "peak_mb" in result:
        result["idle_mb"] = round(idle_mb, 1)
        result["above_idle_mb"] = round(result["peak_mb"] - idle_mb, 1)


def add_ratios(results: list[dict[str, Any]]) -> None:
    """Add how many times the CPU of the floor on all cores each loader takes, where that was measured."""
    floors = {r["observation_frames"]: r.get("cpu_s_per_1k") for r in results if r["loader"] == "floor, all cores"}
    for result in results:
        floor, mine = floors.get(result["observation_frames"]), result.get("cpu_s_per_1k")
        if floor and mine:
            result["floor_ratio"] = round(mine / floor, 2)


if __name__ == "__main__":
    main()
