"""Write a small dataset, feed an epoch of it to two ranks, and check what came. Run by ``make demo``."""

import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

import raypipe as rp
from raypipe.info import describe, info_table
from raypipe.testing import SynthSpec, numbered_cameras, read_stamp, varied_lengths, write_dataset

ROOT = Path("demo-data")
CAMERA = "observation.images.camera_0"


@ray.remote(num_cpus=0)
class Rank:
    """A stand-in for a training worker: takes every batch and notes what it saw."""

    def run(self, loader: Any) -> dict[str, Any]:
        """Return what an epoch brought."""
        seen, distinct, wrong = [], [], 0
        started = time.perf_counter()
        for batch in loader:
            seen += batch["index"].tolist()
            distinct.append(len(set(batch["episode_index"].tolist())))
            # The pixels of a made dataset say which frame they are: compare the first of each batch with its row.
            stamp = read_stamp(batch[CAMERA][0])
            wrong += (stamp.episode, stamp.frame) != (int(batch["episode_index"][0]), int(batch["frame_index"][0]))
        seconds = time.perf_counter() - started
        return {"seen": seen, "distinct": distinct, "wrong": wrong, "seconds": seconds, "stats": loader.stats()}


def main() -> None:
    console = Console(width=120)
    shutil.rmtree(ROOT, ignore_errors=True)
    spec = SynthSpec(lengths=varied_lengths(60, 60, seed=0), cameras=numbered_cameras(2, "96x96", "h264", gop=2))
    write_dataset(ROOT, spec)
    console.print(f"Wrote a LeRobot dataset to {ROOT}/:\n")
    console.print(info_table(describe(str(ROOT))))

    ray.init(address="local", include_dashboard=False, logging_level="warning", log_to_driver=False)
    dataset = rp.open_dataset(str(ROOT))
    pipe = rp.Pipeline(dataset, batch_size=32, seed=0, delta_timestamps={"action": [i / 10 for i in range(16)]})
    console.print("\nFeeding an epoch to two ranks, 32 samples a batch, with chunks of 16 actions ...")
    ranks = [Rank.remote() for _ in range(2)]
    results = ray.get([rank.run.remote(loader) for rank, loader in zip(ranks, pipe.loaders(2), strict=True)])

    times = Counter(index for result in results for index in result["seen"])
    for number, result in enumerate(results):
        stats, distinct = result["stats"], result["distinct"]
        after_first = stats.samples / (result["seconds"] - stats.first_batch_s)
        console.print(
            f"  rank {number}: {len(distinct)} batches, {stats.samples} samples, first batch after "
            f"{stats.first_batch_s:.1f} s, then {after_first:,.0f} samples/s\n"
            f"          {sum(distinct) / len(distinct):.1f} distinct episodes in a batch, {result['wrong']} wrong "
            f"pictures"
        )
    missing, repeated = len(dataset) - len(times), sum(count > 1 for count in times.values())
    console.print(f"  of {len(dataset)} frames {missing} are missing and {repeated} came twice: ", end="")
    console.print("exactly once" if not missing and not repeated else "NOT exactly once", style="bold")
    ray.shutdown()


if __name__ == "__main__":
    main()
