"""A rank that reads from S3 beside one that reads local files: what it waits for data, with prefetch on and off.

    python benchmarks/remote.py [--latency-ms 20] [--megabytes-per-s 50] [--json-file results/remote.json]

The store is on loopback and late by `--latency-ms` for every request, and sends at most `--megabytes-per-s`; see
``slow_store.py``. Every loader runs one epoch in a new process, with a Ray and, but for the warm one, an empty cache of
its own; the loop sleeps `--step-ms` after a batch, as a training does. All loaders run once a round, local first and
last; a figure is the median over the rounds. Loader and store share the cores of one machine, so the CPU of each is
told apart.

What is compared is the time from the first batch to the end of the last step, and how much of it the loop waited. The
goal: with prefetch neither grows by more than 10% of the local run. What comes before the first batch, the start of
Ray and the fetch of the first live spans, which nothing can hide, is a figure of its own. The dataset is made once
below ``--folder``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from machine import write_results
from made import make_many_files
from one_remote import Request
from remote_limits import check_goal, name_limit, probe_store
from slow_store import ROOT, Store

from raypipe.bench.run import TreeSampler

COLUMNS = (
    "loader",
    "wall_s",
    "wall_ratio",
    "wait_s",
    "wait_share",
    "more_wait",
    "waits_for",
    "samples_per_s",
    "open_s",
    "first_batch_s",
    "first_mb",
    "requests",
    "fetched_mb",
    "cpu_s_per_1k",
    "store_cpu_s",
    "decode_s",
    "misses",
    "prefetched",
    "waits",
    "error",
)

WARM = "S3, warm cache"
VARIANTS: dict[str, dict[str, Any]] = {
    "local": {},
    "S3 whole, prefetch": {"prefetch": True},
    "S3 whole, no prefetch": {"prefetch": False},
    "S3 parts, prefetch": {"prefetch": True, "whole_bytes": 0},
    "S3 parts, no prefetch": {"prefetch": False, "whole_bytes": 0},
    WARM: {"prefetch": True},
}
"""What is measured, by the fields of its `CacheSpec`."""


def main() -> None:
    arguments = parse_arguments()
    name = f"many-{arguments.episodes}-{arguments.episodes_per_file}"
    dataset = make_many_files(Path(arguments.folder) / name, arguments.episodes, arguments.episodes_per_file)
    describe_dataset(dataset)
    with run_store(dataset) as (store, sampler):
        alone = probe_store(store, dataset, latency_ms=arguments.latency_ms, cap_mb_s=arguments.megabytes_per_s)
        print(alone, flush=True)
        store.set_speed(arguments.latency_ms / 1000, arguments.megabytes_per_s * 1e6)
        results = measure_all(arguments, dataset, store, sampler)
    if "error" in results[0]:
        raise SystemExit(f"there is nothing to compare with, since the local run failed: {results[0]['error']}")
    add_ratios(results)
    for result in results:
        result["limit"] = name_limit(result, results[0], cap_mb_s=arguments.megabytes_per_s)
    write_results(arguments.json, results, COLUMNS)
    for result in results:
        print(f"{result['loader']}: {result['limit']}")
    print(check_goal(results))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, default=20.0, help="before every answer of the store")
    parser.add_argument("--megabytes-per-s", type=float, default=50.0, help="of all answers together")
    parser.add_argument("--episodes", type=int, default=60, help="of the dataset, about 200 frames each")
    parser.add_argument("--episodes-per-file", type=int, default=4, help="that share a video file")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=100.0, help="a training step, behind which to fetch")
    parser.add_argument("--live-spans", type=int, default=8, help="episodes at hand, all needed for the first batch")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--loaders", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "raypipe-bench-remote"))
    parser.add_argument("--json-file", dest="json", help="also write the figures here")
    arguments = parser.parse_args()
    if arguments.loaders[0] != "local" or (WARM in arguments.loaders and "S3 whole, prefetch" not in arguments.loaders):
        parser.error(f"the first of --loaders must be 'local', and {WARM!r} wants 'S3 whole, prefetch' before it")
    return arguments


def describe_dataset(root: Path) -> None:
    sizes = [path.stat().st_size for path in root.rglob("*.mp4")]
    print(f"{len(sizes)} video files of {statistics.median(sizes) / 1e6:.2f} MB, {sum(sizes) / 1e6:.1f} MB together")


@contextmanager
def run_store(dataset: Path) -> Iterator[tuple[Store, TreeSampler]]:
    """Give a running store, and what tells its CPU."""
    store = Store(dataset)
    sampler = TreeSampler(store.pid)
    try:
        yield store, sampler
    finally:
        sampler.stop()
        store.stop()


def measure_all(
    arguments: argparse.Namespace, dataset: Path, store: Store, sampler: TreeSampler
) -> list[dict[str, Any]]:
    """Return the figures of all loaders, each the median over the rounds."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.loaders}
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="raypipe-bench-") as folder:
            # Local last too: the load of the machine may have changed since the first.
            for name in (*arguments.loaders, *(["local"] if number == arguments.rounds - 1 else [])):
                place = Path(folder) / ("S3 whole, prefetch" if name == WARM else name)
                place.mkdir(exist_ok=True)
                root = str(dataset) if name == "local" else ROOT
                request = make_request(arguments, root, {**VARIANTS[name], "folder": str(place / "cache")})
                rounds[name].append(measure(request, place, store, sampler))
                shown = {key: rounds[name][-1].get(key) for key in ("wall_s", "wait_s", "first_batch_s", "error")}
                print(json.dumps({"loader": name, **shown}), flush=True)
    return [{"loader": name, **medians(found)} for name, found in rounds.items()]


def make_request(arguments: argparse.Namespace, root: str, cache: dict[str, Any]) -> Request:
    return Request(
        root=root,
        cache=cache,
        batch_size=arguments.batch_size,
        step_ms=arguments.step_ms,
        live_spans=arguments.live_spans,
        num_cpus=os.cpu_count() or 1,
    )


def measure(request: Request, folder: Path, store: Store, store_sampler: TreeSampler) -> dict[str, Any]:
    """Return the figures of one loader, or why there are none; its home is `folder`."""
    files = [folder / "request.json", folder / "result.json"]
    files[0].write_text(json.dumps(asdict(request)))
    files[1].unlink(missing_ok=True)
    script = Path(__file__).with_name("one_remote.py")
    environment = {**os.environ, **store.environment(), "HOME": str(folder)}
    before = store.counts()
    # A file and not a pipe: processes that outlive the child would keep a pipe open.
    with (folder / "output.txt").open("w+") as output:
        child = subprocess.Popen(
            [sys.executable, script, *files], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        sampler = TreeSampler(child.pid)
        child.wait()
        sampler.stop()
        output.seek(0)
        lines = output.read().strip().splitlines()
    if not files[1].exists():
        return {"error": "\n".join(lines[-3:])}
    sent = {key: count - before[key] for key, count in store.counts().items()}
    return describe(json.loads(files[1].read_text()), sampler, store_sampler, sent)


def describe(
    result: dict[str, Any], sampler: TreeSampler, store_sampler: TreeSampler, sent: dict[str, int]
) -> dict[str, Any]:
    """Return the figures of a loader from what its process wrote, what was sampled, and what the store sent."""
    stats, cache, first, end = result["stats"], result["cache"], result["first_s"], result["end_s"]
    wall_s, wait_s = end - first, sum(result["waits_s"])
    return {
        "wall_s": wall_s,
        "wait_s": wait_s,
        "wait_share": wait_s / wall_s,
        "longest_wait_s": max(result["waits_s"]),
        "waits_for": stats["waits_for"],
        "samples_per_s": result["num_samples"] / wall_s,
        "open_s": result["open_s"],
        "first_batch_s": first - result["begin_s"],
        "whole_wall_s": end - result["begin_s"],
        "loader_wait_s": stats["wait_s"],
        "requests": sent["requests"],
        "counted_requests": stats["requests"],
        "fetched_mb": sent["bytes"] / 1e6,
        "first_mb": result["needed_bytes"][0] / 1e6,
        "busiest_mb": busiest_bytes(result["needed_bytes"]) / 1e6,
        "cpu_s_per_1k": sampler.cpu_between(first, end) / result["num_samples"] * 1000,
        "cpu_share": sampler.cpu_between(first, end) / wall_s / (os.cpu_count() or 1),
        "store_cpu_s": store_sampler.cpu_between(first, end),
        "store_cpu_share": store_sampler.cpu_between(first, end) / wall_s / (os.cpu_count() or 1),
        **{key: stats[key] for key in ("decode_s", "read_wait_s", "decode_wait_s", "transport_wait_s")},
        **{key: cache[key] for key in ("hits", "misses", "waits", "prefetched", "prefetches_failed")},
    }


def busiest_bytes(needed: list[int]) -> int:
    """Return the most bytes that a quarter of the batches need beyond those before it.

    Of whole files the first quarter needs most: there nearly every span has a file that no other had.
    """
    quarter = max(1, len(needed) // 4)
    return max(last - first for first, last in zip(needed[:-quarter], needed[quarter:], strict=True))


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure over the rounds that gave figures; the first word where it is no number."""
    good = [found for found in rounds if "error" not in found]
    if not good:
        return rounds[0]
    return {
        key: round(statistics.median(found[key] for found in good), 4) if not isinstance(value, str) else value
        for key, value in good[0].items()
    } | {"walls_s": [round(found["wall_s"], 3) for found in good]}


def add_ratios(results: list[dict[str, Any]]) -> None:
    """Add how much longer than the local run each took, and how much more it waited, as a share of the local run."""
    local = results[0]
    for result in results:
        if "error" not in result:
            result["wall_ratio"] = round(result["wall_s"] / local["wall_s"], 3)
            result["more_wait"] = round((result["wait_s"] - local["wait_s"]) / local["wall_s"], 3)


if __name__ == "__main__":
    main()
