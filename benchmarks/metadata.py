"""How long it takes, and how much memory, to read the metadata of a large dataset.

Writes ``meta/`` of a dataset with many episodes as LeRobot's recorder does (v3.0: a row group per 10 episodes, and
statistics of every feature in most of the columns; v2.1: JSON lines), then reads it in a new process.

    python benchmarks/metadata.py --episodes 200000 --json-file results/metadata.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from machine import write_results

EPISODES_PER_FILE = 8_000
"""A file of 100 MB holds about so many: LeRobot rolls over by size."""
EPISODES_PER_ROW_GROUP = 10
STATISTICS = ("min", "max", "mean", "std", "q01", "q10", "q50", "q90", "q99")
VECTORS = {"action": 14, "observation.state": 14}
SCALARS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
CAMERAS = ("observation.images.top", "observation.images.wrist")

READ = """
import json, sys, time
import pyarrow, numpy
from raypipe.format import read_metadata
def peak_mb():
    # Not getrusage: its maximum is inherited from the process that started this one.
    return round(int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024)
before = peak_mb()
start, cpu = time.perf_counter(), time.process_time()
meta = read_metadata(sys.argv[1])
fingerprint = meta.order_fingerprint
print(json.dumps({
    "seconds": round(time.perf_counter() - start, 2),
    "cpu_s": round(time.process_time() - cpu, 2),
    "peak_mb": peak_mb(),
    "peak_mb_of_imports": before,
    "frames": meta.num_frames,
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200_000)
    parser.add_argument("--keep", help="write the metadata into this folder and keep it; used again if it is there")
    parser.add_argument("--json-file", dest="json", help="write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or temporary
        results = [measure(Path(folder) / version, version, arguments.episodes) for version in ("v3.0", "v2.1")]
    write_results(arguments.json, results)


def measure(root: Path, version: str, num_episodes: int) -> dict[str, Any]:
    started = time.perf_counter()
    write = write_packed if version == "v3.0" else write_json_lines
    if not root.exists():
        write(root, np.random.default_rng(0).integers(100, 500, num_episodes))
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    print(f"wrote {version} metadata: {size / 1e6:.0f} MB in {time.perf_counter() - started:.0f} s", flush=True)
    output = subprocess.run([sys.executable, "-c", READ, str(root)], capture_output=True, text=True, check=True)
    return {"version": version, "episodes": num_episodes, "meta_mb": round(size / 1e6), **json.loads(output.stdout)}


def write_info(root: Path, version: str, lengths: np.ndarray) -> None:
    features: dict[str, Any] = {name: {"dtype": "float32", "shape": [size]} for name, size in VECTORS.items()}
    for camera in CAMERAS:
        features[camera] = {"dtype": "video", "shape": [240, 320, 3], "names": ["height", "width", "channels"]}
    info = {
        "codebase_version": version,
        "fps": 30,
        "features": features,
        "total_episodes": len(lengths),
        "total_frames": int(lengths.sum()),
        "total_tasks": 1,
    }
    (root / "meta").mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(info))


def write_packed(root: Path, lengths: np.ndarray) -> None:
    write_info(root, "v3.0", lengths)
    pq.write_table(pa.table({"task_index": [0], "task": ["fold the towel"]}), root / "meta/tasks.parquet")
    starts = np.cumsum(lengths) - lengths
    for file, first in enumerate(range(0, len(lengths), EPISODES_PER_FILE)):
        episodes = np.arange(first, min(first + EPISODES_PER_FILE, len(lengths)))
        path = root / f"meta/episodes/chunk-000/file-{file:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.table(episode_columns(episodes, lengths[episodes], starts[episodes]))
        pq.write_table(table, path, row_group_size=EPISODES_PER_ROW_GROUP)


def episode_columns(episodes: np.ndarray, lengths: np.ndarray, starts: np.ndarray) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "episode_index": episodes,
        "tasks": [["fold the towel"]] * len(episodes),
        "length": lengths,
        "data/chunk_index": episodes * 0,
        "data/file_index": episodes // 1000,
        "dataset_from_index": starts,
        "dataset_to_index": starts + lengths,
    }
    for camera in CAMERAS:
        columns[f"videos/{camera}/chunk_index"] = episodes * 0
        columns[f"videos/{camera}/file_index"] = episodes // 100
        columns[f"videos/{camera}/from_timestamp"] = starts / 30.0
        columns[f"videos/{camera}/to_timestamp"] = (starts + lengths) / 30.0
    values = np.random.default_rng(1).normal(size=(len(episodes), 14))
    for feature in (*VECTORS, *CAMERAS, *SCALARS):
        size = VECTORS.get(feature, 3 if feature in CAMERAS else 1)
        for statistic in STATISTICS:
            flat = pa.array(values[:, :size].ravel())
            columns[f"stats/{feature}/{statistic}"] = pa.FixedSizeListArray.from_arrays(flat, size)
        columns[f"stats/{feature}/count"] = pa.FixedSizeListArray.from_arrays(pa.array(lengths), 1)
    return columns


def write_json_lines(root: Path, lengths: np.ndarray) -> None:
    write_info(root, "v2.1", lengths)
    (root / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "fold the towel"}) + "\n")
    with open(root / "meta/episodes.jsonl", "w") as stream:
        for episode, length in enumerate(lengths.tolist()):
            stream.write(json.dumps({"episode_index": episode, "tasks": ["fold the towel"], "length": length}) + "\n")


if __name__ == "__main__":
    main()
