"""Measures one loader in a process of its own, and watches that process and its children from here."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from raypipe.bench import one_loader
from raypipe.bench.one_loader import PEERS, Request
from raypipe.bench.processes import TreeSampler
from raypipe.dataset import Dataset

_SHOWN_LINES: Final = 3
"""Lines to show of the output of a process that ended without a result."""
_IDLE_S: Final = 10.0
"""How long an idle process runs; memory is taken from the second half, when Ray has started its workers."""


def measure(request: Request, folder: Path, peer_python: str = sys.executable) -> dict[str, Any]:
    """Return the figures of one loader; if there are none, the reason under ``error``.

    Args:
        folder: for the files that the processes exchange.
        peer_python: Python of an environment with LeRobot, for the loaders that need it.
    """
    named = {"loader": request.loader, "observation_frames": request.observation_frames}
    python = peer_python if request.loader in PEERS else sys.executable
    reason = find_obstacle(request.loader, python)
    if reason:
        return {**named, "error": reason}
    result, sampler = _run_child(request, folder, python)
    return {**named, **(result if "error" in result else describe(result, sampler))}


def measure_idle(request: Request, folder: Path, peer_python: str = sys.executable) -> float | None:
    """Return the megabytes of a loader's processes when all is imported and started, and nothing is read.

    None if the loader cannot run.
    """
    python = peer_python if request.loader in PEERS else sys.executable
    if find_obstacle(request.loader, python):
        return None
    result, sampler = _run_child(replace(request, idle_s=_IDLE_S), folder, python)
    if "error" in result:
        return None
    return sampler.memory_mb_between((result["begin_s"] + result["end_s"]) / 2, result["end_s"])


def _run_child(request: Request, folder: Path, python: str) -> tuple[dict[str, Any], TreeSampler]:
    """Return what the process of a request wrote, or under ``error`` why it wrote nothing, and the samples."""
    files = [folder / "request.json", folder / "result.json"]
    files[0].write_text(json.dumps(asdict(request)))
    files[1].unlink(missing_ok=True)
    # A file, not a pipe: processes that outlive the child would keep a pipe open.
    with (folder / "output.txt").open("w+") as output:
        child = subprocess.Popen([python, one_loader.__file__, *files], stdout=output, stderr=subprocess.STDOUT)
        sampler = TreeSampler(child.pid)
        child.wait()
        sampler.stop()
        output.seek(0)
        lines = output.read().strip().splitlines()
    if not files[1].exists():
        return {"error": "\n".join(lines[-_SHOWN_LINES:]) or f"ended with {child.returncode}"}, sampler
    return json.loads(files[1].read_text()), sampler


def find_obstacle(loader: str, python: str = sys.executable) -> str:
    """Return why a loader cannot run with this Python; empty if it can."""
    if loader not in PEERS:
        return ""
    probe = "import lerobot.datasets.lerobot_dataset"
    if loader.startswith("ray"):
        probe = "import lerobot.datasets.dataset_metadata, ray.data; ray.data.read_lerobot"
    tried = subprocess.run([python, "-c", probe], check=False, capture_output=True, text=True)
    if tried.returncode == 0:
        return ""
    return (tried.stderr.strip().splitlines() or [f"{python} -c {probe!r} ended with {tried.returncode}"])[-1]


def sample_windows(dataset: Dataset, *, action_frames: int, observation_frames: int) -> dict[str, list[float]]:
    """Return the time offsets of the action chunk and of each camera's last observation frames, in seconds."""
    fps = dataset.meta.fps
    windows = {"action": [i / fps for i in range(action_frames)]} if "action" in dataset.row_features else {}
    if observation_frames > 1:
        windows |= {name: [i / fps for i in range(1 - observation_frames, 1)] for name in dataset.spec.cameras}
    return windows


def describe(result: dict[str, Any], sampler: TreeSampler) -> dict[str, Any]:
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
        "wait_share": result["wait_share"],
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
