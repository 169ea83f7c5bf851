"""Whether cost grows with the number of episodes: raypipe alone on 50, 500 and 5,000 small ones.

    python benchmarks/scaling.py [--json-file FILE] [--episodes 50 500 5000] [--parts JSON]

An episode has 40 frames of one 96x96 camera and files of its own; most videos are hard links of the first 50. CPU per
1,000 samples and peak memory should be flat. Every epoch has a start of some CPU seconds, the same for any number of
episodes, which the smallest dataset shows; `cpu_ms_per_episode` is the cost of one more, against the size before.
"""

import argparse
import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import write_results
from made import make_small_episodes

from raypipe.bench.loaders import Request, sample_windows
from raypipe.bench.run import measure
from raypipe.dataset import open_dataset

COLUMNS = (
    "episodes",
    "samples",
    "cpu_s_per_1k",
    "cpu_ms_per_episode",
    "samples_per_s",
    "first_batch_s",
    "peak_mb",
    "distinct_episodes",
    "spans_per_block",
    "error",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, nargs="+", default=[50, 500, 5000])
    parser.add_argument("--ray", action="store_true", help="read rows by Ray Data")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--parts", type=json.loads, default={}, help="further parts of raypipe's pipeline, as JSON")
    parser.add_argument("--json-file", dest="json", help="also write the figures here")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="raypipe-bench-") as folder:
        for num_episodes in arguments.episodes:
            root = make_small_episodes(num_episodes, Path(folder) / str(num_episodes))
            figures = measure(make_request(arguments, root), Path(folder))
            results.append({"episodes": num_episodes, **figures})
            print(json.dumps({name: results[-1].get(name) for name in COLUMNS}), flush=True)
    add_slopes(results)
    write_results(arguments.json, results, COLUMNS)


def make_request(arguments: argparse.Namespace, root: Path) -> Request:
    return Request(
        root=str(root),
        batch_size=arguments.batch_size,
        num_cpus=os.cpu_count() or 1,
        windows=sample_windows(open_dataset(str(root)), action_frames=16, observation_frames=1),
        parts={"live_bytes": 2 << 30, **arguments.parts},
        starts_ray=arguments.ray,
    )


def add_slopes(results: list[dict[str, Any]]) -> None:
    """Add what one more episode costs, from each size to the next."""
    for small, large in pairwise(results):
        if "cpu_s_per_1k" in small and "cpu_s_per_1k" in large:
            cpu_s = [r["cpu_s_per_1k"] * r["samples"] / 1000 for r in (small, large)]
            more = large["episodes"] - small["episodes"]
            large["cpu_ms_per_episode"] = round(1000 * (cpu_s[1] - cpu_s[0]) / more, 2)


if __name__ == "__main__":
    main()
