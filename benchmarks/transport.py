"""What Ray costs per block: rows only, ranks that pull their blocks through the feeder and throw them away.

    python benchmarks/transport.py [--json-file FILE] [--ranks 1 8 64] [--episodes 640]

A rank is a thread of one process, so that 64 of them fit on a small machine; nothing is shuffled or put into batches.
Each line is a new process with a Ray of its own: spans per block (packing) and ranks per split (groups) are varied. CPU
is that of the whole process tree in a second pass, from its first block to its last; what comes before, the start of an
epoch, is given apart.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from machine import write_results

from raypipe.bench.run import TreeSampler
from raypipe.testing import SynthSpec, write_dataset

COLUMNS = (
    "ranks",
    "spans_per_block",
    "ranks_per_split",
    "blocks",
    "blocks_per_s",
    "cpu_ms_per_block",
    "spans_per_s",
    "cpu_ms_per_span",
    "first_block_s",
    "start_cpu_s",
    "peak_mb",
    "error",
)
PACKED = 16
GROUP = 16


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1] == "--pull":
        pull(json.loads(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--episodes", type=int, default=640)
    parser.add_argument("--rows", type=int, default=100, help="of an episode")
    parser.add_argument("--json-file", dest="json", help="also write the figures here")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="raypipe-bench-") as folder:
        root = Path(folder) / "dataset"
        lengths = (arguments.rows,) * arguments.episodes
        write_dataset(root, SynthSpec(lengths=lengths, cameras=(), episodes_per_data_file=500, with_stats=False))
        for request in list_requests(arguments.ranks):
            results.append(measure({**request, "root": str(root)}, Path(folder)))
            print(json.dumps(results[-1]), flush=True)
    write_results(arguments.json, results, COLUMNS)


def list_requests(ranks: list[int]) -> list[dict[str, int]]:
    """Return the settings to measure: with and without packing, and with one split or several where ranks fill them."""
    return [
        {"ranks": world_size, "spans_per_block": packed, "ranks_per_split": group}
        for world_size in ranks
        for group in ([world_size] if world_size <= GROUP else [world_size, GROUP])
        for packed in (1, PACKED)
    ]


def measure(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    named = {name: value for name, value in request.items() if name != "root"}
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    with (folder / "output.txt").open("w+") as output:
        command = [sys.executable, __file__, "--pull", json.dumps(request), str(result)]
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        sampler = TreeSampler(child.pid)
        child.wait()
        sampler.stop()
        output.seek(0)
        lines = output.read().strip().splitlines()
    if not result.exists():
        return {**named, "error": "\n".join(lines[-3:])}
    pulled = json.loads(result.read_text())
    seconds, blocks, spans = pulled["end_s"] - pulled["first_s"], pulled["blocks"], pulled["spans"]
    cpu_s = sampler.cpu_between(pulled["first_s"], pulled["end_s"])
    return {
        **named,
        "blocks": blocks,
        "blocks_per_s": round(blocks / seconds, 1),
        "cpu_ms_per_block": round(1000 * cpu_s / blocks, 1),
        "spans_per_s": round(spans / seconds, 1),
        "cpu_ms_per_span": round(1000 * cpu_s / spans, 1),
        "first_block_s": round(pulled["first_s"] - pulled["begin_s"], 2),
        "start_cpu_s": round(sampler.cpu_between(pulled["begin_s"], pulled["first_s"]), 2),
        "peak_mb": round(sampler.peak_mb),
    }


def pull(request: dict[str, Any], result: Path) -> None:
    """Pull the blocks of all ranks at once; write when it began and ended, and how many came."""
    import ray

    from raypipe import Pipeline, open_dataset
    from raypipe.feed import FeederSource, name_attempt, start_feeder

    ray.init(
        address="local", num_cpus=os.cpu_count(), include_dashboard=False, logging_level="error", log_to_driver=False
    )
    feed = {"spans_per_block": request["spans_per_block"], "ranks_per_split": request["ranks_per_split"]}
    pipe = Pipeline(open_dataset(request["root"]), batch_size=16, seed=0, order={"live_spans": 8}, feed=feed)
    config = pipe.config
    feeder = start_feeder(config.block_context(), config.index(), config.feed, world_size=request["ranks"])
    source = FeederSource(config.block_context(), config.feed, name_attempt(), feeder=feeder)
    world = pipe.plan(world_size=request["ranks"])

    def pull_rank(rank: int) -> list[float]:
        return [time.monotonic() for _ in source.open(world, rank, None).blocks()]

    with ThreadPoolExecutor(request["ranks"]) as pool:
        for _ in range(2):
            begin = time.monotonic()
            arrivals = [time_s for times in pool.map(pull_rank, range(request["ranks"])) for time_s in times]
    spans = sum(len(world.rank(rank).queue) for rank in range(request["ranks"]))
    figures = {"begin_s": begin, "first_s": min(arrivals), "end_s": max(arrivals)}
    result.write_text(json.dumps({**figures, "blocks": len(arrivals), "spans": spans}))


if __name__ == "__main__":
    main()
