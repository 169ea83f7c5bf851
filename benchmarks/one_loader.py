"""Runs one loader for two epochs and some steps of a pretended training, in a process of its own.

Started by ``loader.py``; imports nothing that the loader at hand does not need, so that it also runs in an environment
with LeRobot and without raypipe. Times are of ``time.monotonic``; by them ``loader.py`` finds the CPU time of an epoch.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np

SHUFFLE_BUFFER = 4000
"""Samples that Ray's local shuffle holds."""

FLOOR_PIECE = 64
"""Frames that the floor decodes at once, and throws away."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure."""

    loader: str
    root: str
    batch_size: int
    observation_frames: int
    episodes: list[int] | None
    step_ms: float
    num_steps: int
    num_cpus: int
    live_bytes: int
    parts: dict[str, Any]
    """Further parts of raypipe's pipeline."""

    def windows(self) -> dict[str, list[float]]:
        """Return an action chunk of 16 and the last observation frames, in seconds."""
        info = json.loads(Path(self.root, "meta", "info.json").read_text())
        features, fps = info["features"], info["fps"]
        windows = {"action": [i / fps for i in range(16)]} if "action" in features else {}
        if self.observation_frames > 1:
            frames = [i / fps for i in range(1 - self.observation_frames, 1)]
            windows |= dict.fromkeys(self.cameras(features), frames)
        return windows

    def cameras(self, features: dict[str, Any]) -> list[str]:
        """Return the names of the cameras."""
        return [name for name, feature in features.items() if feature["dtype"] in ("video", "image")]


@dataclass(frozen=True)
class Item:
    """One batch, as far as it is measured."""

    num_samples: int
    episodes: Any = None


class Loader(Protocol):
    """A loader that is measured."""

    settings: dict[str, Any]
    """What it chose by itself, for the record."""

    def epoch(self) -> Iterator[Item]:
        """Yield the batches of the next epoch."""
        ...

    def figures(self) -> dict[str, float]:
        """Return what the loader knows of itself, summed since its start."""
        ...

    def close(self) -> None:
        """End its threads and processes."""
        ...


class FloorLoader:
    """Decodes every frame of every camera once, in file order, in some processes; rows alone where there is no video.

    The least that any loader must do: nothing is shuffled, joined to rows or put into batches.
    """

    def __init__(self, request: Request, num_processes: int) -> None:
        from raypipe import open_dataset

        self._meta = open_dataset(request.root).meta
        self._request = request
        self._num_processes = num_processes
        self._pool = ProcessPoolExecutor(num_processes, get_context("spawn")) if num_processes > 1 else None
        rows = np.arange(len(self._meta.episodes)) if request.episodes is None else np.array(request.episodes)
        self._rows = rows
        self._num_samples = int(self._meta.episodes.length[rows].sum())
        self._num_decoded = 0
        self.settings: dict[str, Any] = {}

    def epoch(self) -> Iterator[Item]:  # noqa: D102
        jobs = self._jobs()
        mapped = map(_run_floor, jobs) if self._pool is None else self._pool.map(_run_floor, jobs)
        total = sum(mapped)
        self._num_decoded += total if self._meta.cameras else 0
        yield Item(self._num_samples)

    def figures(self) -> dict[str, float]:  # noqa: D102
        return {"decoded_frames": self._num_decoded}

    def close(self) -> None:  # noqa: D102
        if self._pool is not None:
            self._pool.shutdown()

    def _jobs(self) -> list[tuple[str, int, int]]:
        """Return (file, first frame, end) of every run to decode; a file is cut into one run per process."""
        meta, jobs = self._meta, []
        cameras = [name for name in meta.cameras if meta.features[name].kind == "video"]
        files: dict[str, int] = {}
        for row in self._rows.tolist():
            for name in [meta.video_file(row, camera) for camera in cameras] or [meta.data_file(row)]:
                files[name] = files.get(name, 0) + int(meta.episodes.length[row])
        for name, num_frames in files.items():
            ends = np.linspace(0, num_frames, self._num_processes + 1).astype(int).tolist()
            path = meta.storage.locate(name)
            jobs += [(path, begin, end) for begin, end in pairwise(ends) if begin < end]
        return jobs


def _run_floor(job: tuple[str, int, int]) -> int:
    path, begin, end = job
    if path.endswith(".parquet"):
        return _read_floor(path, begin, end)
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(path, seek_mode="approximate", dimension_order="NHWC", num_ffmpeg_threads=1)
    count = 0
    for first in range(begin, end, FLOOR_PIECE):
        count += len(decoder.get_frames_in_range(first, min(first + FLOOR_PIECE, end)).data)
    return count


def _read_floor(path: str, begin: int, end: int) -> int:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    first = count = 0
    for group in range(file.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if begin <= first < end:
            count += len(file.read_row_group(group, use_threads=False))
        first += num_rows
    return count


class RaypipeLoader:
    """raypipe with its defaults."""

    def __init__(self, request: Request, where: str, when: str) -> None:
        import ray

        from raypipe import Pipeline, open_dataset

        _start_ray(ray, request)
        parts = {"selection": {"episodes": request.episodes or "all"}, **request.parts}
        self._pipe = Pipeline(
            open_dataset(request.root),
            batch_size=request.batch_size,
            seed=0,
            delta_timestamps=request.windows(),
            live_bytes=request.live_bytes,
            decode={"where": where, "when": when},
            **parts,
        )
        chosen = self._pipe.config.decode.when
        assert chosen == when, f"asked to decode on {when}, and {request.live_bytes} live bytes made it {chosen}"
        self._loader = self._pipe.loader(num_epochs=3, progress=False)
        order, feed = self._pipe.config.order, self._pipe.config.feed
        self.settings = {"span_frames": order.span_frames, "live_spans": order.live_spans}
        self.settings["spans_per_block"] = feed.spans_per_block

    def epoch(self) -> Iterator[Item]:  # noqa: D102
        for batch in self._loader:
            yield Item(len(batch["index"]), batch["episode_index"].numpy())

    def figures(self) -> dict[str, float]:  # noqa: D102
        stats = self._loader.stats().to_dict()
        return {name: stats[name] for name in ("fetch_s", "decode_s", "decoded_frames", "assemble_s", "decode_wait_s")}

    def close(self) -> None:  # noqa: D102
        self._loader.close()


class ReadLerobotLoader:
    """Ray's own reader of LeRobot datasets, one task per episode; shuffled: within a buffer of 4,000 samples."""

    def __init__(self, request: Request, *, is_shuffled: bool) -> None:
        import ray
        import ray.data

        _start_ray(ray, request)
        ray.data.DataContext.get_current().enable_progress_bars = False
        self._request = request
        self.settings: dict[str, Any] = {}
        self._shuffle = SHUFFLE_BUFFER if is_shuffled else None
        self._data = ray.data.read_lerobot(
            request.root,
            read_granularity="episode",
            episodes=request.episodes,
            delta_timestamps=request.windows() or None,
        )

    def epoch(self) -> Iterator[Item]:  # noqa: D102
        import torch

        for batch in self._data.iter_batches(
            batch_size=self._request.batch_size, batch_format="numpy", local_shuffle_buffer_size=self._shuffle
        ):
            # Cameras come as arrays of arrays, since their shapes may differ; training wants one tensor.
            tensors = {
                name: torch.from_numpy(np.stack(values) if values.dtype == object else values)
                for name, values in batch.items()
                if name not in ("task", "stats")
            }
            yield Item(len(tensors["index"]), batch["episode_index"])

    def figures(self) -> dict[str, float]:  # noqa: D102
        return {}

    def close(self) -> None:  # noqa: D102
        return


class LerobotLoader:
    """LeRobot's map-style dataset in a torch DataLoader, shuffled, uint8, two workers."""

    def __init__(self, request: Request) -> None:
        import inspect

        import torch
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        self.settings = {"version": version("lerobot")}
        has_uint8 = "return_uint8" in inspect.signature(LeRobotDataset).parameters
        dataset = LeRobotDataset(
            "benchmark/dataset",
            root=request.root,
            episodes=request.episodes,
            delta_timestamps=request.windows() or None,
            **({"return_uint8": True} if has_uint8 else {}),
        )
        self._batches = torch.utils.data.DataLoader(
            dataset, batch_size=request.batch_size, shuffle=True, num_workers=2, persistent_workers=True
        )

    def epoch(self) -> Iterator[Item]:  # noqa: D102
        for batch in self._batches:
            yield Item(len(batch["index"]), batch["episode_index"].numpy())

    def figures(self) -> dict[str, float]:  # noqa: D102
        return {}

    def close(self) -> None:  # noqa: D102
        return


LOADERS: dict[str, Callable[[Request], Loader]] = {
    "floor, 1 process": lambda request: FloorLoader(request, 1),
    "floor, all cores": lambda request: FloorLoader(request, request.num_cpus),
    "raypipe rank/block": lambda request: RaypipeLoader(request, "rank", "block"),
    "raypipe cluster/block": lambda request: RaypipeLoader(request, "cluster", "block"),
    "raypipe rank/exit": lambda request: RaypipeLoader(request, "rank", "exit"),
    "ray read_lerobot": lambda request: ReadLerobotLoader(request, is_shuffled=False),
    "ray read_lerobot, shuffled": lambda request: ReadLerobotLoader(request, is_shuffled=True),
    "lerobot map-style, 2 workers": LerobotLoader,
}
PEERS = ("ray read_lerobot", "ray read_lerobot, shuffled", "lerobot map-style, 2 workers")
"""Those that need LeRobot's package."""


def measure(request: Request) -> dict[str, Any]:
    """Return times, batch times and figures of two epochs, and of some steps of a training that only waits."""
    loader = LOADERS[request.loader](request)
    epochs = [_measure_epoch(loader, request.batch_size) for _ in range(2)]
    wait_share = _measure_wait(loader, request)
    loader.close()
    return {"epochs": epochs, "wait_share": wait_share, "settings": loader.settings}


def _measure_epoch(loader: Loader, batch_size: int) -> dict[str, Any]:
    before = loader.figures()
    begin = time.monotonic()
    times, num_samples, distinct = [begin], 0, []
    for item in loader.epoch():
        times.append(time.monotonic())
        num_samples += item.num_samples
        if item.episodes is not None and item.num_samples == batch_size:
            distinct.append(len(np.unique(item.episodes)))
    after = loader.figures()
    return {
        "begin_s": begin,
        "end_s": time.monotonic(),
        "first_batch_s": times[1] - begin,
        "num_samples": num_samples,
        "batch_ms": (1000 * np.diff(times)).tolist(),
        "distinct_episodes": float(np.mean(distinct)) if distinct else None,
        "figures": {name: after[name] - before[name] for name in after},
    }


def _measure_wait(loader: Loader, request: Request) -> float | None:
    """Return the share of waiting in a loop whose step sleeps, as the process does while a GPU works."""
    if isinstance(loader, FloorLoader) or not request.num_steps:
        return None
    waited, asked = 0.0, 0.0
    begin = None
    for _ in islice(loader.epoch(), request.num_steps):
        now = time.monotonic()
        # The first batch waits for the epoch to start, which `first_batch_s` tells.
        if begin is None:
            begin = now
        else:
            waited += now - asked
        time.sleep(request.step_ms / 1000)
        asked = time.monotonic()
    return waited / (asked - begin) if begin else None


def _start_ray(ray: Any, request: Request) -> None:
    ray.init(
        address="local", num_cpus=request.num_cpus, include_dashboard=False, logging_level="error", log_to_driver=False
    )


def main() -> None:
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    result = measure(request)
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
