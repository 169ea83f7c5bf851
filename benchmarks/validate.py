"""How fast `raypipe validate` is: episodes per second, CPU per 1,000 episodes, and decoding beside its floor.

The floor is a plain sequential decode of the same videos, in the same run. CPU is of the whole tree of processes; what
Ray and its workers cost to start is a figure of its own. Datasets are made once below ``--folder``.

    python benchmarks/validate.py --episodes 5000 --json-file results/validate.json
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from machine import write_results
from made import make_dataset, make_small_episodes
from torchcodec.decoders import VideoDecoder

from raypipe.bench.run import TreeSampler
from raypipe.testing import SynthSpec, write_dataset
from raypipe.validate import validate_dataset

COLUMNS = (
    "what",
    "where",
    "episodes",
    "frames",
    "files",
    "wall_s",
    "cpu_s",
    "episodes_per_s",
    "cpu_s_per_1000_episodes",
)
FLOOR_COLUMNS = ("decoded_frames", "cpu_ms_per_frame", "cpu_beside_floor")

_PIECE_FRAMES = 64
"""About the 16 MB of pixels that raypipe decodes at a time, at 320x240."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=5000, help="of the datasets that are not decoded")
    parser.add_argument("--decoded-episodes", type=int, default=50, help="of the dataset that is decoded")
    parser.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "raypipe-bench-validate"))
    parser.add_argument("--cpus", type=int, default=os.cpu_count())
    parser.add_argument("--json-file", dest="path")
    arguments = parser.parse_args()
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    sampler = TreeSampler(os.getpid())
    shallow = {
        "v2.1, a file and a video each": make_small_episodes(
            arguments.episodes, folder / f"small-{arguments.episodes}"
        ),
        "v3.0, rows with statistics": make_rows(arguments.episodes, folder / f"rows-{arguments.episodes}"),
    }
    deep = make_dataset("h264", folder / f"h264-{arguments.decoded_episodes}", arguments.decoded_episodes)
    results = [measure(what, "process", lambda r=root: check(r, "process")) for what, root in shallow.items()]
    floor = measure("plain sequential decode", "process", lambda: decode_all(deep))
    results += [floor, measure("deep", "process", lambda: check(deep, "process", deep=True))]
    results.append(measure("starting Ray", "ray", lambda: start_ray(arguments.cpus)))
    for what, root in shallow.items():
        results.append(measure(what, "ray", lambda r=root: check(r, "ray")))
    results.append(measure("deep, starting workers", "ray", lambda: check(deep, "ray", deep=True)))
    results.append(measure("deep", "ray", lambda: check(deep, "ray", deep=True)))
    sampler.stop()
    results = [finish(sampler, result, floor) for result in results]
    write_results(arguments.path, results, (*COLUMNS, *FLOOR_COLUMNS))


def make_rows(num_episodes: int, root: Path) -> Path:
    """Write a v3.0 dataset of rows with statistics, unless it is there."""
    if (root / "meta/info.json").exists():
        return root
    spec = SynthSpec(
        lengths=(150,) * num_episodes, cameras=(), fps=30, state_dim=14, action_dim=14, episodes_per_data_file=500
    )
    return write_dataset(root, spec)


def check(root: Path, where: str, *, deep: bool = False) -> dict[str, Any]:
    report = validate_dataset(str(root), where=where, deep=deep)  # type: ignore[arg-type]
    assert report.exit_code == 0, report.tally
    counts = report.counts
    return {
        "episodes": counts.episodes,
        "frames": counts.frames,
        "files": counts.data_files + counts.video_files,
        "decoded_frames": counts.decoded_frames or None,
    }


def decode_all(root: Path) -> dict[str, Any]:
    """Decode every video once, forward, on one thread, and drop the pixels."""
    count = 0
    for path in sorted(root.glob("videos/**/*.mp4")):
        decoder = VideoDecoder(str(path), dimension_order="NHWC", seek_mode="approximate", num_ffmpeg_threads=1)
        for start in range(0, len(decoder), _PIECE_FRAMES):
            decoder.get_frames_in_range(start, min(start + _PIECE_FRAMES, len(decoder)))
        count += len(decoder)
    return {"decoded_frames": count}


def start_ray(num_cpus: int) -> dict[str, Any]:
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, logging_level="warning", log_to_driver=False)
    return {}


def measure(what: str, where: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `run` returns, with the times between which it ran."""
    begin = time.monotonic()
    found = run()
    end = time.monotonic()
    # The CPU time of a tree is sampled every 0.1 s.
    time.sleep(0.3)
    return {"what": what, "where": where, **found, "begin": begin, "end": end}


def finish(sampler: TreeSampler, result: dict[str, Any], floor: dict[str, Any]) -> dict[str, Any]:
    """Return a result with its figures."""
    cpu_s = sampler.cpu_between(result["begin"], result["end"])
    wall_s = result["end"] - result["begin"]
    figures: dict[str, Any] = {"wall_s": round(wall_s, 3), "cpu_s": round(cpu_s, 3)}
    if result.get("episodes"):
        figures["episodes_per_s"] = round(result["episodes"] / wall_s, 1)
        figures["cpu_s_per_1000_episodes"] = round(cpu_s / result["episodes"] * 1000, 3)
    if result.get("decoded_frames"):
        floor_s = sampler.cpu_between(floor["begin"], floor["end"]) / floor["decoded_frames"]
        figures["cpu_ms_per_frame"] = round(cpu_s / result["decoded_frames"] * 1000, 4)
        figures["cpu_beside_floor"] = round(cpu_s / result["decoded_frames"] / floor_s, 3)
    return {**{name: value for name, value in result.items() if name not in ("begin", "end")}, **figures}


if __name__ == "__main__":
    main()
