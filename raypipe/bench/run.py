"""Measures the settings of a pipeline on this machine and this dataset, each in a fresh process."""

import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from raypipe.bench.machine import describe_machine
from raypipe.bench.measure import find_obstacle, measure, sample_windows
from raypipe.bench.one_loader import PEERS, Request
from raypipe.bench.report import BenchReport, with_cores
from raypipe.bench.settings import Setting, differing, grid, parse_setting
from raypipe.bench.spec import BenchSpec
from raypipe.bench.table import left_out_lines, row_line
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


def run_bench(
    spec: BenchSpec,
    settings: Sequence[str] = (),
    *,
    is_quick: bool = False,
    on_line: Callable[[str], None] = lambda _line: None,
) -> BenchReport:
    """Return the figures of the settings, of the floor, and of LeRobot's loaders if they can be imported.

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
        pipe = _make_pipe(dataset, spec)
        tried = _choose(pipe, dataset, spec, settings, is_quick=is_quick)
    for line in left_out_lines(_left_out(dataset)):
        on_line(line)
    if pipe.config.budget.is_long_gop and not settings:
        on_line(_tell_long_gop(pipe.config.budget))
    with tempfile.TemporaryDirectory(prefix="raypipe-bench-") as folder:
        floor_request = _request(dataset, spec, FLOOR, _first_episodes(dataset, _FLOOR_FRAMES))
        floor = with_cores(measure(floor_request, Path(folder)), spec.gpu_samples_per_s)
        on_line(row_line(FLOOR, floor))
        episodes = _first_episodes(dataset, _epoch_frames(dataset, spec, floor))
        base = replace(_request(dataset, spec, "", episodes), max_s=2 * spec.seconds)
        lengths = dataset.meta.episodes.length[: len(episodes)].tolist()
        kept = tried if settings else differing(tried, lengths)
        for setting in tried:
            if setting not in kept:
                on_line(f"left out, since these episodes are too few for a difference: {setting.name}")
        todo = [_setting_row(base, setting) for setting in kept]
        todo += [(replace(base, loader=name), {"name": name}) for name in PEERS if not find_obstacle(name)]
        rows = _measure_rows(todo, spec, Path(folder), on_line)
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


def _make_pipe(dataset: Dataset, spec: BenchSpec, **parts: Any) -> Pipeline:
    """Return the pipeline to measure, on all episodes."""
    windows = _request(dataset, spec, "", None).windows
    return Pipeline(
        dataset,
        batch_size=spec.batch_size,
        seed=0,
        delta_timestamps=windows,
        live_bytes=spec.live_bytes,
        **parts,
    )


def _choose(
    pipe: Pipeline, dataset: Dataset, spec: BenchSpec, settings: Sequence[str], *, is_quick: bool
) -> list[Setting]:
    """Return the settings to try around those that `pipe` has chosen by itself."""
    num_cpus, order = len(os.sched_getaffinity(0)), pipe.config.order
    # A tuple would belong to the members of a mixture, which the bench does not measure.
    assert not isinstance(order.clip_frames, tuple)
    default = Setting(
        where="rank" if dataset.spec.cameras else "none",
        threads=num_cpus,
        clip_frames=order.clip_frames,
        span_frames=order.span_frames,
        live_spans=order.live_spans,
    )
    if settings:
        return list(dict.fromkeys(parse_setting(text, default) for text in settings))
    # Decoding ahead fills the given memory with frames, and rows come on top: so the default may take more.
    room = max(spec.live_bytes, pipe.live_bytes())
    (member,) = measure_members(pipe.config.dataset, pipe.config.decode)
    return grid(
        default,
        lambda setting: _make_pipe(dataset, spec, **setting.parts()).live_bytes() <= room,
        num_cpus=num_cpus,
        keyframe_interval=max([1, *(camera.keyframe_interval for camera in member.cameras)]),
        is_quick=is_quick,
    )


def _tell_long_gop(budget: LiveBudget) -> str:
    enough = math.ceil(budget.ample_bytes / 1e8) / 10
    return (
        f"keyframes are far apart: in {budget.live_bytes / 1e9:.3g} GB the default decodes at {budget.cost:.1f} "
        f"times the cost of file order. --live-bytes {enough}GB is enough for longer clips"
    )


def _request(dataset: Dataset, spec: BenchSpec, loader: str, episodes: list[int] | None) -> Request:
    return Request(
        loader=loader,
        root=dataset.meta.storage.path,
        batch_size=spec.batch_size,
        observation_frames=spec.observation_frames,
        episodes=episodes,
        step_ms=0.0,
        num_steps=0,
        num_cpus=len(os.sched_getaffinity(0)),
        live_bytes=spec.live_bytes,
        parts={},
        windows=sample_windows(dataset, action_frames=spec.action_frames, observation_frames=spec.observation_frames),
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
    return {why: list(names) for why, names in unreadable.items() if names}


def _setting_row(base: Request, setting: Setting) -> tuple[Request, dict[str, Any]]:
    named = {"name": setting.name, "setting": asdict(setting)}
    return replace(base, loader="raypipe", parts=setting.parts()), named


def _measure_rows(
    todo: Sequence[tuple[Request, dict[str, Any]]], spec: BenchSpec, folder: Path, on_line: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the row of every request, together with the fields that name it."""
    on_line(f"{len(todo)} to measure, {_about(len(todo) * (2 * spec.seconds + _START_S))}")
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    for request, named in todo:
        rows.append({**with_cores(measure(request, folder), spec.gpu_samples_per_s), **named})
        left = (time.monotonic() - begin) / len(rows) * (len(todo) - len(rows))
        end = f"; {_about(left)} left" if left else ""
        on_line(f"{len(rows)} of {len(todo)}: {row_line(named['name'], rows[-1])}{end}")
    return rows


def _about(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} minutes"
