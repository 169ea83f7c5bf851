"""Runs one loader for two epochs and some steps of a simulated training, in a process of its own.

Started by its path, with a request and a result as JSON files. It imports only what its loader needs, so that it also
runs in an environment with LeRobot and without raypipe. Times are those of ``time.monotonic``; the process that started
it uses them to find the CPU time of an epoch.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

SHUFFLE_BUFFER = 4000
"""Samples in the buffer of Ray's local shuffle."""

FIGURES = ("fetch_s", "decode_s", "decoded_frames", "emitted_frames", "assemble_s", "decode_wait_s")
"""The loader's own figures that go into the result."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure."""

    loader: str
    root: str
    """A local folder: LeRobot's loaders read nothing else."""
    batch_size: int
    observation_frames: int
    episodes: list[int] | None
    step_ms: float
    num_steps: int
    num_cpus: int
    live_bytes: int
    """Memory of raypipe for the live spans; 0: raypipe's default."""
    parts: dict[str, Any]
    """Further parts for raypipe's pipeline."""
    windows: dict[str, list[float]]
    """The action chunk and the last observation frames, in seconds; see `measure.sample_windows`."""
    max_s: float = 0.0
    """An epoch stops this many seconds after its first batch; 0: never."""
    idle_s: float = 0.0
    """Seconds to stay idle, without a loader, when all is imported and started; 0: run the loader."""


@dataclass(frozen=True)
class Item:
    """What the bench needs to know of one batch."""

    num_samples: int
    episodes: Any = None


class Loader(Protocol):
    """A loader to measure."""

    settings: dict[str, Any]
    """Settings that it chose by itself, for the record."""

    def epoch(self) -> Iterator[Item]:
        """Yield the batches of the next epoch; start at its beginning even if the epoch before was stopped early."""
        ...

    def figures(self) -> dict[str, float]:
        """Return the loader's own figures, summed since its start."""
        ...

    def close(self) -> None:
        """End its threads and processes."""
        ...


def make_floor(request: Request, num_processes: int) -> Loader:
    """Return the loader that only decodes; imports it here, since it needs raypipe."""
    from raypipe.bench.floor import FloorLoader

    return FloorLoader(request.root, request.episodes, num_processes)


class RaypipeLoader:
    """raypipe with its defaults, except for what the request sets."""

    def __init__(self, request: Request) -> None:
        from raypipe.mixture import open_dataset
        from raypipe.pipeline import Pipeline

        if needs_ray(request):
            _start_ray(request)
        parts = raypipe_parts(request)
        self._pipe = Pipeline(
            open_dataset(request.root),
            batch_size=request.batch_size,
            seed=0,
            delta_timestamps=request.windows,
            **parts,
        )
        self._loader = self._pipe.loader(num_epochs=3, progress=False)
        self._num_begun = 0
        order, feed = self._pipe.config.order, self._pipe.config.feed
        self.settings: dict[str, Any] = {
            "span_frames": order.span_frames,
            "live_spans": order.live_spans,
            "clip_frames": order.clip_frames,
            "spans_per_block": feed.spans_per_block,
        }

    def epoch(self) -> Iterator[Item]:  # noqa: D102
        # After an early stop, the loader is inside its epoch and would continue with the rest.
        self._loader.set_epoch(self._num_begun)
        self._num_begun += 1
        for batch in self._loader:
            yield Item(len(batch["index"]), batch["episode_index"].numpy())

    def figures(self) -> dict[str, float]:  # noqa: D102
        stats = self._loader.stats().to_dict()
        return {name: float(stats[name]) for name in FIGURES}

    def close(self) -> None:  # noqa: D102
        self._loader.close()


class ReadLerobotLoader:
    """Ray's own reader of LeRobot datasets, one task per episode; shuffles, if asked, in a buffer of 4,000 samples."""

    def __init__(self, request: Request, *, is_shuffled: bool) -> None:
        import ray.data

        _start_ray(request)
        ray.data.DataContext.get_current().enable_progress_bars = False
        self._request = request
        self.settings: dict[str, Any] = {}
        self._shuffle = SHUFFLE_BUFFER if is_shuffled else None
        self._data = ray.data.read_lerobot(
            request.root,
            read_granularity="episode",
            episodes=request.episodes,
            delta_timestamps=request.windows or None,
        )

    def epoch(self) -> Iterator[Item]:  # noqa: D102
        for batch in self._data.iter_batches(
            batch_size=self._request.batch_size, batch_format="numpy", local_shuffle_buffer_size=self._shuffle
        ):
            yield Item(len(as_tensors(batch)["index"]), batch["episode_index"])

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
            delta_timestamps=request.windows or None,
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
    "floor, 1 process": lambda request: make_floor(request, 1),
    "floor, all cores": lambda request: make_floor(request, request.num_cpus),
    "raypipe": RaypipeLoader,
    "raypipe-ray": RaypipeLoader,
    "raypipe-cluster": RaypipeLoader,
    "ray read_lerobot": lambda request: ReadLerobotLoader(request, is_shuffled=False),
    "ray read_lerobot, shuffled": lambda request: ReadLerobotLoader(request, is_shuffled=True),
    "lerobot map-style, 2 workers": LerobotLoader,
}
PEERS = ("ray read_lerobot", "ray read_lerobot, shuffled", "lerobot map-style, 2 workers")
"""The loaders that need LeRobot's package."""


def needs_ray(request: Request) -> bool:
    """Return whether the loader reads or decodes with Ray; raypipe does so if its parts say it."""
    return request.loader.startswith("ray") and (request.loader != "raypipe" or _is_on_cluster(raypipe_parts(request)))


def _is_on_cluster(parts: dict[str, Any]) -> bool:
    return bool(parts.get("decode", {}).get("where") == "cluster")


def raypipe_parts(request: Request) -> dict[str, Any]:
    """Return the parts of raypipe's pipeline besides batch, seed and windows; empty if the request sets none."""
    parts = dict(request.parts)
    if request.episodes is not None:
        parts = {"selection": {"episodes": request.episodes}, **parts}
    if request.live_bytes:
        parts["live_bytes"] = request.live_bytes
    if request.loader == "raypipe-cluster":
        parts["decode"] = {"where": "cluster", **request.parts.get("decode", {})}
    return parts


def as_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a batch of Ray's reader, as training needs them; leaves out texts.

    Cameras come as arrays of arrays, since their shapes may differ.
    """
    import torch

    arrays = {
        name: np.stack(values) if values.dtype == object and isinstance(values[0], np.ndarray) else values
        for name, values in batch.items()
        if name != "stats"
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items() if array.dtype.kind in "biuf"}


def measure(request: Request) -> dict[str, Any]:
    """Return times, batch times and figures of two epochs, and of some steps of a training that only sleeps."""
    loader = LOADERS[request.loader](request)
    epochs = [_measure_epoch(loader, request) for _ in range(2)]
    wait_share = _measure_wait(loader, request)
    loader.close()
    return {"epochs": epochs, "wait_share": wait_share, "settings": loader.settings}


def stand_idle(request: Request) -> dict[str, Any]:
    """Import and start what the loader needs, wait, and return the times between which the process was idle.

    In this time the loader's processes take their least memory, before anything is read.
    """
    pool = _start(request)
    begin = time.monotonic()
    time.sleep(request.idle_s)
    end = time.monotonic()
    if pool is not None:
        pool.shutdown()
    return {"begin_s": begin, "end_s": end}


def _start(request: Request) -> Any:
    """Import what the loader needs, and start its Ray or its processes; return what to shut down, if anything."""
    import torch  # noqa: F401

    if request.loader.startswith("floor"):
        from raypipe.bench.floor import start_processes

        return start_processes(1 if "1 process" in request.loader else request.num_cpus)
    if request.loader.startswith("raypipe"):
        import torchcodec  # noqa: F401

        import raypipe  # noqa: F401
    else:
        import lerobot.datasets.lerobot_dataset  # noqa: F401
    if needs_ray(request):
        _start_ray(request)
    return None


def _measure_epoch(loader: Loader, request: Request) -> dict[str, Any]:
    """Return the times and figures of an epoch, or of the part that fits in `max_s` after its first batch.

    A stopped epoch counts up to its last batch, with all the work that filled the live spans before the first. So a
    whole epoch is at least as fast.
    """
    before = loader.figures()
    begin = time.monotonic()
    times, num_samples, distinct = [begin], 0, []
    is_partial = False
    for item in loader.epoch():
        times.append(time.monotonic())
        num_samples += item.num_samples
        if item.episodes is not None and item.num_samples == request.batch_size:
            distinct.append(len(np.unique(item.episodes)))
        is_partial = bool(request.max_s) and times[-1] - times[1] > request.max_s
        if is_partial:
            break
    # Stopping a loader inside an epoch is not part of its work.
    end = times[-1] if is_partial else time.monotonic()
    after = loader.figures()
    return {
        "begin_s": begin,
        "end_s": end,
        "first_batch_s": times[1] - begin,
        "num_samples": num_samples,
        "is_partial": is_partial,
        "batch_ms": (1000 * np.diff(times)).tolist(),
        "distinct_episodes": float(np.mean(distinct)) if distinct else None,
        "figures": {name: after[name] - before[name] for name in after},
    }


def _measure_wait(loader: Loader, request: Request) -> float | None:
    """Return the share of waiting in a loop whose step sleeps, as the process does while a GPU works."""
    if request.loader.startswith("floor") or not request.num_steps:
        return None
    waited, asked = 0.0, 0.0
    begin = None
    for _ in islice(loader.epoch(), request.num_steps):
        now = time.monotonic()
        # The first batch waits for the epoch to start; `first_batch_s` measures that.
        if begin is None:
            begin = now
        else:
            waited += now - asked
        time.sleep(request.step_ms / 1000)
        asked = time.monotonic()
    return waited / (asked - begin) if begin else None


def _start_ray(request: Request) -> None:
    import ray

    ray.init(
        address="local", num_cpus=request.num_cpus, include_dashboard=False, logging_level="error", log_to_driver=False
    )


def main() -> None:
    """Measure what the first file of the command line asks for, and write the result to the second."""
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    result = stand_idle(request) if request.idle_s else measure(request)
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
