"""How long a training run with some 400 datasets takes to open them all, ten of which are broken.

Writes a few small datasets of every format version, and copies of them with unlike numbers of episodes; ten are broken
in ten ways. Then opens all, each way in a process of its own: one after the other with `open_dataset`, and at once in
threads; the files themselves are in the page cache of the system each time. Last on a storage that answers every call
after 20 ms. Datasets are made once below ``--folder``.

    python benchmarks/mixture.py --datasets 400 --json-file results/mixture.json
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from machine import write_results

from raypipe.dataset import open_dataset
from raypipe.errors import RaypipeError
from raypipe.mixture import members as opening
from raypipe.mixture.spec import MemberSpec

COLUMNS = ("what", "storage", "threads", "datasets", "bad", "episodes", "wall_s", "cpu_s", "peak_mb", "opening_mb")
VERSIONS = ("v3.0", "v2.1", "v2.0")
MOST_EPISODES = 60
LATENCY_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", type=int, default=400)
    parser.add_argument("--remote-datasets", type=int, default=100, help="of those that are opened slowly")
    parser.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "raypipe-bench-mixture"))
    parser.add_argument("--json-file", dest="path")
    parser.add_argument("--run", help="what to measure in this process, as JSON; used by the benchmark itself")
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(run(**json.loads(arguments.run))))
        return
    roots = make_datasets(Path(arguments.folder) / str(arguments.datasets), arguments.datasets)
    write_results(arguments.path, measure_all(roots, arguments.remote_datasets), COLUMNS)


def measure_all(roots: list[str], num_remote: int) -> list[dict[str, Any]]:
    remote = [f"slow://{root}" for root in roots[:num_remote]]
    slow = f"{LATENCY_S * 1000:.0f} ms a call"
    results = [measure("one by one", "local", roots, threads=1)]
    results += [measure("at once", "local", roots, threads=threads) for threads in (1, 2, 4, 8, 16, 32, 64)]
    results.append(measure("one by one", slow, remote, threads=1))
    results += [measure("at once", slow, remote, threads=threads) for threads in (8, 16, 32, 64)]
    return results


def measure(what: str, storage: str, roots: list[str], *, threads: int) -> dict[str, Any]:
    """Return what opening the datasets costs in a new process."""
    task = json.dumps({"what": what, "roots": roots, "threads": threads})
    command = [sys.executable, __file__, "--run", task]
    environment = {**os.environ, "RAYPIPE_PROTOCOLS": "slow"}
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    result = {"what": what, "storage": storage, "threads": threads, **json.loads(output)}
    print(f"{what}, {storage}, {threads} threads: {result['wall_s']} s", flush=True)
    return result


def run(what: str, roots: list[str], threads: int) -> dict[str, Any]:
    fsspec.register_implementation("slow", SlowFileSystem)
    # What a first use imports is no part of opening.
    open_one_by_one(roots[-1:])
    opening.NUM_THREADS.update(local=threads, remote=threads)
    before = peak_mb()
    start, cpu = time.perf_counter(), time.process_time()
    found = open_one_by_one(roots) if what == "one by one" else open_at_once(roots)
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    peak = peak_mb()
    return {
        "datasets": len(roots),
        **found,
        "wall_s": round(wall_s, 3),
        "cpu_s": round(cpu_s, 3),
        "peak_mb": peak,
        "opening_mb": round(peak - before, 1),
    }


def open_one_by_one(roots: list[str]) -> dict[str, Any]:
    """Open the datasets as a loop over `open_dataset` does, and find their columns as a pipeline does."""
    datasets, num_bad = [], 0
    for root in roots:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dataset = open_dataset(root)
                assert dataset.row_features
            datasets.append(dataset)
        except (RaypipeError, OSError, pa.ArrowException):
            num_bad += 1
    return {"bad": num_bad, "episodes": sum(len(dataset.meta.episodes) for dataset in datasets)}


def open_at_once(roots: list[str]) -> dict[str, Any]:
    members = [MemberSpec(root=root, name=f"dataset-{i}") for i, root in enumerate(roots)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opened = opening.open_members(members, on_bad_dataset="skip", progress=False)
    return {"bad": len(opened.bad), "episodes": sum(len(dataset.meta.episodes) for dataset in opened.datasets)}


def peak_mb() -> float:
    # Not getrusage: its maximum is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text().splitlines()
    return round(int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024, 1)


class SlowFileSystem(AbstractFileSystem):
    """Local files behind a storage that answers every call late."""

    protocol = "slow"
    local = LocalFileSystem()

    def ls(self, path: str, detail: bool = True, **_options: Any) -> list[Any]:
        """Return what is in a folder."""
        time.sleep(LATENCY_S)
        return self.local.ls(self._strip_protocol(path), detail=detail)

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        """Return what is known of a file."""
        time.sleep(LATENCY_S)
        return self.local.info(self._strip_protocol(path))

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> AbstractBufferedFile:
        return SlowFile(self, path, mode)


class SlowFile(AbstractBufferedFile):
    """A file whose every range is a call."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        time.sleep(LATENCY_S)
        with open(self.path, "rb") as stream:
            stream.seek(start)
            return stream.read(end - start)


def make_datasets(folder: Path, num_datasets: int) -> list[str]:
    """Return the roots of the datasets, which are written unless they are there; broken ones are spread among them."""
    roots = [folder / f"dataset-{i:03d}" for i in range(num_datasets)]
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        bases = [write_base(folder / f"base-{version}", version) for version in VERSIONS]
        for number, root in enumerate(roots):
            copy_with_episodes(bases[number % len(bases)], root, 5 + number * 7 % (MOST_EPISODES - 4))
        for number, damage in enumerate(DAMAGES):
            damage(roots[number * num_datasets // len(DAMAGES)])
        (folder / "done").touch()
    return [str(root) for root in roots]


def write_base(root: Path, version: str) -> Path:
    # Not above: the processes that are measured would import torch with it.
    from raypipe.testing import CameraSpec, SynthSpec, write_dataset

    cameras = tuple(CameraSpec(name=f"observation.images.{place}") for place in ("top", "wrist"))
    lengths = (12,) * MOST_EPISODES
    return write_dataset(root, SynthSpec(version=version, lengths=lengths, cameras=cameras, episodes_per_data_file=20))  # type: ignore[arg-type]


def copy_with_episodes(base: Path, root: Path, num_episodes: int) -> None:
    """Copy a dataset, of which ``meta/`` then lists the first episodes only; videos are hard links."""
    shutil.copytree(
        base, root, copy_function=lambda old, new: (os.link if old.endswith("mp4") else shutil.copy2)(old, new)
    )
    info = json.loads((root / "meta/info.json").read_text())
    info.update(total_episodes=num_episodes, total_frames=12 * num_episodes, splits={"train": f"0:{num_episodes}"})
    (root / "meta/info.json").write_text(json.dumps(info))
    lines = root / "meta/episodes.jsonl"
    if lines.exists():
        lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:num_episodes]))
    for path in (root / "meta/episodes").rglob("*.parquet"):
        pq.write_table(pq.read_table(path).slice(0, num_episodes), path)


def change_info(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / "meta/info.json"
        info = json.loads(path.read_text())
        change(info)
        path.write_text(json.dumps(info))

    return damage


def cut_info(root: Path) -> None:
    path = root / "meta/info.json"
    path.write_bytes(path.read_bytes()[:100])


def remove_info(root: Path) -> None:
    (root / "meta/info.json").unlink()


def remove_tasks(root: Path) -> None:
    for path in root.glob("meta/tasks*"):
        path.unlink()


def empty_episode_table(root: Path) -> None:
    for path in [*root.glob("meta/episodes.jsonl"), *root.glob("meta/episodes/*/*.parquet")]:
        path.write_bytes(b"")


def remove_rows(root: Path) -> None:
    shutil.rmtree(root / "data")


def empty_rows(root: Path) -> None:
    for path in root.glob("data/*/*.parquet"):
        path.write_bytes(b"")


DAMAGES: tuple[Callable[[Path], None], ...] = (
    shutil.rmtree,
    remove_info,
    cut_info,
    change_info(lambda info: info.update(codebase_version="v1.6")),
    change_info(lambda info: info.update(fps=0)),
    change_info(lambda info: info["features"]["action"].update(dtype="floaty")),
    remove_tasks,
    empty_episode_table,
    remove_rows,
    empty_rows,
)


if __name__ == "__main__":
    main()
