"""Measures the settings of a pipeline on this machine and this dataset, each in a fresh process.

The cost of a process is that of everything it started too: CPU seconds and memory, sampled from ``/proc`` (Linux).
"""

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from raypipe.bench.loaders import (
    BenchSpec,
    Request,
    Setting,
    differing,
    grid,
    make_pipeline,
    parse_setting,
    sample_windows,
)
from raypipe.bench.report import BenchReport, left_out_lines, row_line, with_cores
from raypipe.dataset import Dataset, unreadable_cameras
from raypipe.errors import ConfigError
from raypipe.mixture import is_mixture_file, open_dataset
from raypipe.pipeline import Pipeline, measure_members
from raypipe.plan import LiveBudget, expected_distinct
from raypipe.storage import open_root, parse_pinned

FLOOR: Final = "floor, all cores"
_FLOOR_FRAMES: Final = 3000
"""Frames to measure the floor on: a second or two of decoding."""
_START_S: Final = 10.0
"""Time for a process with its own Ray to start and to end, for the estimate of the total time."""
_MOST_PER_S: Final = 10_000
"""The fastest rate used to size an epoch: reading only rows is a hundred times faster than making batches of them."""
_UNKNOWN_PER_S: Final = 500
"""The rate used to size an epoch if the floor of cameras failed: slow, so that an epoch does not take many minutes."""
_PACKAGES: Final = ("raypipe", "ray", "torch", "torchcodec", "pyarrow", "numpy", "lerobot")
_SHOWN_LINES: Final = 3
"""Lines to show of the output of a process that ended without a result."""
_INTERVAL_S: Final = 0.1
_SAMPLES_PER_MEMORY_SAMPLE: Final = 10
"""Memory is sampled less often: the proportional set size walks the page tables of a process, some 20 ms per GB."""


def run_bench(
    spec: BenchSpec,
    settings: Sequence[str] = (),
    *,
    is_quick: bool = False,
    on_line: Callable[[str], None] = lambda _line: None,
) -> BenchReport:
    """Return the figures of the settings and of the floor.

    Args:
        settings: those to try, in the form that `parse_setting` reads; if empty, a small grid around the default.
        is_quick: a smaller grid.
        on_line: receives the plan as text, then every row when it is measured.
    """
    if not Path("/proc/self/stat").exists():
        raise ConfigError("bench reads CPU time and memory of all processes from /proc, which only Linux has")
    with warnings.catch_warnings():
        # The bench itself reports left-out cameras and the cost of far keyframes, below.
        warnings.simplefilter("ignore", UserWarning)
        dataset = _open(spec.root)
        base = _make_request(dataset, spec)
        pipe = make_pipeline(dataset, base)
        tried = _choose(pipe, dataset, base, settings, is_quick=is_quick)
    for line in left_out_lines(_left_out(dataset)):
        on_line(line)
    if pipe.config.budget.is_long_gop and not settings:
        on_line(_tell_long_gop(pipe.config.budget))
    with tempfile.TemporaryDirectory(prefix="raypipe-bench-") as folder:
        few = replace(base, episodes=_first_episodes(dataset, _FLOOR_FRAMES), num_floor=base.num_cpus)
        named = {"loader": FLOOR, "observation_frames": spec.observation_frames}
        floor = {**named, **with_cores(measure(few, Path(folder)), spec.gpu_samples_per_s)}
        on_line(row_line(FLOOR, floor))
        episodes = _first_episodes(dataset, _epoch_frames(dataset, spec, floor))
        lengths = dataset.meta.episodes.length[: len(episodes)].tolist()
        kept = tried if settings else differing(tried, lengths)
        for setting in tried:
            if setting not in kept:
                on_line(f"left out, since these episodes are too few for a difference: {setting.name}")
        base = replace(base, episodes=episodes, max_s=2 * spec.seconds)
        rows = _measure_settings(base, kept, spec, Path(folder), on_line)
    return BenchReport(
        machine=describe_machine(),
        conditions={**asdict(spec), **_describe_data(dataset, episodes, spec.batch_size)},
        floor=floor,
        rows=tuple(rows),
    )


def _open(root: str) -> Dataset:
    if is_mixture_file(root):
        raise ConfigError(
            f"{root!r} is a mixture, and bench measures one dataset: measure its members one by one; "
            f"`raypipe info {root}` lists them"
        )
    storage = open_root(root)
    if not storage.is_local:
        pinned = parse_pinned(storage.uri)
        fetch = f"`raypipe download {pinned.repo_id}`" if pinned else "copy it to a local folder"
        raise ConfigError(
            f"{root!r} is not on this machine, and bench would measure the network with the loader: {fetch} first"
        )
    dataset = open_dataset(storage.path)
    assert isinstance(dataset, Dataset)
    return dataset


def _make_request(dataset: Dataset, spec: BenchSpec) -> Request:
    """Return the request for a pipeline's own choice of settings, on all episodes."""
    frames = {"action_frames": spec.action_frames, "observation_frames": spec.observation_frames}
    return Request(
        root=dataset.meta.storage.path,
        batch_size=spec.batch_size,
        num_cpus=len(os.sched_getaffinity(0)),
        windows=sample_windows(dataset, **frames),
        parts={"live_bytes": spec.live_bytes},
    )


def _with_setting(request: Request, setting: Setting) -> Request:
    return replace(request, parts={**request.parts, **setting.parts()})


def _choose(
    pipe: Pipeline, dataset: Dataset, base: Request, settings: Sequence[str], *, is_quick: bool
) -> list[Setting]:
    """Return the settings to try around those that `pipe` has chosen by itself."""
    order = pipe.config.order
    # A tuple would belong to the members of a mixture, which the bench does not measure.
    assert not isinstance(order.clip_frames, tuple)
    default = Setting(
        where="rank" if dataset.spec.cameras else "none",
        threads=base.num_cpus,
        clip_frames=order.clip_frames,
        span_frames=order.span_frames,
        live_spans=order.live_spans,
    )
    if settings:
        return list(dict.fromkeys(parse_setting(text, default) for text in settings))
    # Decoding ahead fills the given memory with frames, and rows come on top: so the default may take more.
    room = max(base.parts["live_bytes"], pipe.live_bytes())
    (member,) = measure_members(pipe.config.dataset, pipe.config.decode)
    return grid(
        default,
        lambda setting: make_pipeline(dataset, _with_setting(base, setting)).live_bytes() <= room,
        num_cpus=base.num_cpus,
        keyframe_interval=max([1, *(camera.keyframe_interval for camera in member.cameras)]),
        is_quick=is_quick,
    )


def _tell_long_gop(budget: LiveBudget) -> str:
    enough = math.ceil(budget.ample_bytes / 1e8) / 10
    return (
        f"keyframes are far apart: in {budget.live_bytes / 1e9:.3g} GB the default decodes at {budget.cost:.1f} "
        f"times the cost of file order. --live-bytes {enough}GB is enough for longer clips"
    )


def _epoch_frames(dataset: Dataset, spec: BenchSpec, floor: dict[str, Any]) -> int:
    """Return the frames of an epoch: as many as the floor decodes in half of `seconds`."""
    unknown = _UNKNOWN_PER_S if dataset.spec.cameras else _MOST_PER_S
    per_s = min(floor.get("samples_per_s") or unknown, _MOST_PER_S)
    return max(4 * spec.batch_size, int(per_s * spec.seconds / 2))


def _first_episodes(dataset: Dataset, num_frames: int) -> list[int]:
    ends = np.cumsum(dataset.meta.episodes.length)
    count = min(len(ends), int(np.searchsorted(ends, num_frames)) + 1)
    return [int(number) for number in dataset.meta.episodes.episode_index[:count]]


def _describe_data(dataset: Dataset, episodes: list[int], batch_size: int) -> dict[str, Any]:
    meta = dataset.meta
    lengths = meta.episodes.length[: len(episodes)]
    return {
        "fingerprint": meta.order_fingerprint,
        "cameras": len(dataset.spec.cameras),
        "left_out_cameras": _left_out(dataset),
        "episodes": len(meta.episodes),
        "frames": meta.num_frames,
        "used_episodes": len(episodes),
        "used_frames": int(lengths.sum()),
        "full_shuffle_episodes": expected_distinct(lengths, batch_size),
    }


def _left_out(dataset: Dataset) -> dict[str, list[str]]:
    """Return the declared cameras that the bench does not measure, by reason."""
    unreadable = unreadable_cameras(dataset.meta, dataset.missing_cameras)
    return {why: [name for name in unreadable if unreadable[name] == why] for why in unreadable.values()}


def _measure_settings(
    base: Request, settings: Sequence[Setting], spec: BenchSpec, folder: Path, on_line: Callable[[str], None]
) -> list[dict[str, Any]]:
    on_line(f"{len(settings)} to measure, {_about(len(settings) * (2 * spec.seconds + _START_S))}")
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    for setting in settings:
        figures = with_cores(measure(_with_setting(base, setting), folder), spec.gpu_samples_per_s)
        named = {"name": setting.name, "setting": asdict(setting)}
        rows.append({"loader": "raypipe", "observation_frames": spec.observation_frames, **figures, **named})
        left = (time.monotonic() - begin) / len(rows) * (len(settings) - len(rows))
        end = f"; {_about(left)} left" if left else ""
        on_line(f"{len(rows)} of {len(settings)}: {row_line(setting.name, rows[-1])}{end}")
    return rows


def _about(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} minutes"


def measure(request: Request, folder: Path) -> dict[str, Any]:
    """Return the figures of one loader; if there are none, the reason under ``error``.

    Args:
        folder: for the files that the processes exchange.
    """
    files = [folder / "request.json", folder / "result.json"]
    files[0].write_text(json.dumps(asdict(request)))
    files[1].unlink(missing_ok=True)
    program = "from raypipe.bench.loaders import main; main()"
    # A file, not a pipe: processes that outlive the child would keep a pipe open.
    with (folder / "output.txt").open("w+") as output:
        child = subprocess.Popen([sys.executable, "-c", program, *files], stdout=output, stderr=subprocess.STDOUT)
        sampler = TreeSampler(child.pid)
        child.wait()
        sampler.stop()
        output.seek(0)
        lines = output.read().strip().splitlines()
    if not files[1].exists():
        return {"error": "\n".join(lines[-_SHOWN_LINES:]) or f"ended with {child.returncode}"}
    return describe(json.loads(files[1].read_text()), sampler)


def describe(result: dict[str, Any], sampler: "TreeSampler") -> dict[str, Any]:
    """Return the figures of a loader, from the result of its process and the samples."""
    cold, warm = result["epochs"]
    seconds = warm["end_s"] - warm["begin_s"]
    figures = warm["figures"]
    is_partial = cold["is_partial"] or warm["is_partial"]
    p50, p95, p99 = np.percentile(warm["batch_ms"], [50, 95, 99]).tolist()
    shown = {
        "cpu_s_per_1k": sampler.cpu_between(warm["begin_s"], warm["end_s"]) / warm["num_samples"] * 1000,
        "cpu_s_per_1k_first_epoch": sampler.cpu_between(cold["begin_s"], cold["end_s"]) / cold["num_samples"] * 1000,
        "samples_per_s": warm["num_samples"] / seconds,
        "samples_per_s_overall": (cold["num_samples"] + warm["num_samples"]) / (warm["end_s"] - cold["begin_s"]),
        "first_batch_s": cold["first_batch_s"],
        "first_batch_second_epoch_s": warm["first_batch_s"],
        "peak_mb": sampler.peak_mb,
        "distinct_episodes": warm["distinct_episodes"],
        "decoded_per_emitted": None if is_partial else _decoded_per_emitted(cold["figures"], figures),
        "batch_ms_p50": p50,
        "batch_ms_p95": p95,
        "batch_ms_p99": p99,
        "decoded_frames_per_s": figures["decoded_frames"] / seconds if figures.get("decoded_frames") else None,
        "samples": warm["num_samples"],
        "is_partial": is_partial,
    }
    shown |= {name: figures.get(name) for name in ("fetch_s", "decode_s", "decode_wait_s", "assemble_s")}
    shown |= result["settings"]
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in shown.items()}


def _decoded_per_emitted(*epochs: dict[str, float]) -> float | None:
    """Return how often each frame was decoded on average, over all epochs from the first on.

    At the end of an epoch, the first clips of the next one are already decoded. Over all epochs, only those of the
    epoch after the last add to the count, and the figure is never below 1. For one epoch it would depend on timing.
    """
    decoded = sum(figures.get("decoded_frames", 0.0) for figures in epochs)
    emitted = sum(figures.get("emitted_frames", 0.0) for figures in epochs)
    return decoded / emitted if decoded and emitted else None


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory, load, Python and package versions, and the command line."""
    versions = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    # Show the name of an installed program, but the typed path of a script.
    words = ["python", sys.argv[0]] if sys.argv[0].endswith(".py") else [Path(sys.argv[0]).name]
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
        "command": " ".join([*words, *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


class TreeSampler:
    """Samples the processes of one tree in a thread, from its creation until `stop`.

    A process that was once seen in the tree stays in the sum with its last CPU time, even after it or its parent has
    ended. So the sum misses at most one interval of CPU time per process that ends. Reading ``/proc`` costs time in the
    sampling process, not in the measured one.
    """

    def __init__(self, root: int) -> None:
        self.memory: list[tuple[float, int]] = []
        """Times of ``time.monotonic``, and the sums of proportional set sizes, which count shared memory once."""
        self._root = root
        self._cpu_s: dict[tuple[int, int], float] = {}
        """By start time and process number: the system reuses numbers."""
        self._samples: list[tuple[float, float]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the sampling."""
        self._stopped.set()
        self._thread.join()

    @property
    def peak_mb(self) -> float:
        """The largest sum of memory."""
        return max((size for _, size in self.memory), default=0) / 1e6

    def cpu_between(self, begin_s: float, end_s: float) -> float:
        """Return the CPU seconds of the tree between two times of ``time.monotonic``, taken by any process."""
        times, sums = zip(*self._samples, strict=True)
        begin, end = np.interp([begin_s, end_s], times, sums)
        return float(end - begin)

    def _work(self) -> None:
        count = 0
        while not self._stopped.is_set():
            live = self._sample_cpu()
            if count % _SAMPLES_PER_MEMORY_SAMPLE == 0:
                self.memory.append((time.monotonic(), sum(map(_proportional_bytes, live))))
            count += 1
            self._stopped.wait(_INTERVAL_S)
        self._sample_cpu()

    def _sample_cpu(self) -> set[int]:
        """Add the CPU time of the tree, and return its processes."""
        live = set()
        # Parents before their children: a child starts later.
        for started, pid, parent, cpu_s in sorted(_list_processes()):
            key = (started, pid)
            if pid == self._root or parent in live or key in self._cpu_s:
                live.add(pid)
                self._cpu_s[key] = cpu_s
        self._samples.append((time.monotonic(), sum(self._cpu_s.values())))
        return live


def _list_processes() -> list[tuple[int, int, int, float]]:
    """Return (start time, process number, parent, CPU seconds) of every process."""
    processes = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        # A process may have ended; its name, in brackets, may contain blanks.
        if fields := _read(Path("/proc", pid, "stat")).rpartition(")")[2].split():
            cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            processes.append((int(fields[19]), int(pid), int(fields[1]), cpu_s))
    return processes


def _proportional_bytes(pid: int) -> int:
    lines = _read(Path("/proc", str(pid), "smaps_rollup")).splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _read(place: Path) -> str:
    try:
        return place.read_text()
    except OSError:
        return ""
