"""What `raypipe reshard` costs, and what one row group per episode is worth.

Copies and re-encodes made datasets on a local Ray, whose start is reported apart, then reads episodes in a random order
from a dataset whose data files are one row group each, and from its copy.

    python benchmarks/reshard.py --episodes 2000 --encoded-episodes 60 --json-file results/reshard.json
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from machine import write_results
from made import make_dataset, make_small_episodes

from raypipe.bench.run import TreeSampler
from raypipe.format import RowReader, read_metadata
from raypipe.reshard import ReshardSpec, reshard_dataset
from raypipe.testing import SynthSpec, write_dataset
from raypipe.validate import validate_dataset

COLUMNS = (
    "what",
    "episodes",
    "frames",
    "source_mb",
    "seconds",
    "of_which_validate_s",
    "episodes_per_s",
    "mb_per_s",
    "cpu_s_per_1000_episodes",
    "cpu_s_per_1000_frames",
    "rows_per_s",
    "ms_per_episode",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2_000, help="of the stream copy: 40 frames of 96x96")
    parser.add_argument("--large-episodes", type=int, default=50, help="of 200 frames and two cameras of 320x240")
    parser.add_argument("--encoded-episodes", type=int, default=20, help="re-encoded of the latter")
    parser.add_argument("--row-episodes", type=int, default=1_000, help="of 300 rows, for the speed of reading rows")
    parser.add_argument("--json-file", dest="json", help="write the figures to this file")
    arguments = parser.parse_args()
    started = time.perf_counter()
    ray.init(address="local", num_cpus=os.cpu_count(), include_dashboard=False, logging_level="warning")
    results = [{"what": "start of Ray", "seconds": time.perf_counter() - started}]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        small = make_small_episodes(arguments.episodes, made / "small")
        large = make_dataset("h264", made / "large", arguments.large_episodes)
        few = make_dataset("h264", made / "few", arguments.encoded_episodes)
        results.append(measure_copy("copy, v2.1, 96x96", small, made / "small-copy", ReshardSpec()))
        results.append(measure_copy("copy, v3.0, 2x 320x240", large, made / "large-copy", ReshardSpec()))
        results.append(measure_copy("re-encode h264 g=2", few, made / "few-h264", ReshardSpec(gop=2)))
        results.append(measure_copy("re-encode to 160x224", few, made / "few-size", ReshardSpec(size=(160, 224))))
        results += measure_rows(made, arguments.row_episodes)
    write_results(arguments.json, results, COLUMNS)


def measure_copy(what: str, root: Path, out: Path, spec: ReshardSpec) -> dict[str, Any]:
    """Reshard a dataset, with the check at its end."""
    size_mb = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) / 1e6
    sampler = TreeSampler(os.getpid())
    begin = time.monotonic()
    report = reshard_dataset(str(root), out, spec, where="ray", allow_findings=True)
    end = time.monotonic()
    validate_dataset(str(out), where="ray")
    validated = time.monotonic() - end
    sampler.stop()
    cpu_s = sampler.cpu_between(begin, end)
    seconds = end - begin
    print(f"{what}: {seconds:.1f} s, {cpu_s:.1f} CPU s", flush=True)
    return {
        "what": what,
        "episodes": report.num_episodes,
        "frames": report.num_frames,
        "source_mb": size_mb,
        "seconds": seconds,
        "of_which_validate_s": validated,
        "episodes_per_s": report.num_episodes / seconds,
        "mb_per_s": size_mb / seconds,
        "cpu_s_per_1000_episodes": 1000 * cpu_s / report.num_episodes,
        "cpu_s_per_1000_frames": 1000 * cpu_s / report.num_frames,
    }


def measure_rows(folder: Path, num_episodes: int) -> list[dict[str, Any]]:
    """Read whole episodes in a random order, before and after."""
    spec = SynthSpec(
        lengths=(300,) * num_episodes,
        cameras=(),
        state_dim=14,
        action_dim=14,
        episodes_per_data_file=500,
        row_groups="per-file",
        with_stats=False,
    )
    root = write_dataset(folder / "rows", spec)
    out = folder / "rows-copy"
    reshard_dataset(str(root), out, where="ray", allow_findings=True)
    return [read_rows("rows, one group a file", root, 50), read_rows("rows, one group an episode", out, num_episodes)]


def read_rows(what: str, root: Path, num_episodes: int) -> dict[str, Any]:
    meta = read_metadata(str(root))
    reader = RowReader(meta, ["action", "observation.state"])
    rows = np.random.default_rng(0).permutation(len(meta.episodes))[:num_episodes]
    reader.read_episode(int(rows[0]))
    begin = time.perf_counter()
    num_rows = sum(len(reader.read_episode(int(row))) for row in rows)
    seconds = time.perf_counter() - begin
    return {
        "what": what,
        "episodes": len(rows),
        "frames": num_rows,
        "seconds": seconds,
        "rows_per_s": num_rows / seconds,
        "ms_per_episode": 1000 * seconds / len(rows),
    }


if __name__ == "__main__":
    main()
