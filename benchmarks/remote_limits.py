"""What limits a loader of ``remote.py``, in sentences made of its figures."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import s3fs
from slow_store import BUCKET, Store

GOAL = 0.10
"""How much longer than local, and how much more waiting as a share of the local run, a run with prefetch may be."""

_THREADS = 4
"""That fetch at once, as many as raypipe uses to fetch ahead."""

_BUSY = 0.85
"""Of the cores: from here on whatever computes is late."""


def probe_store(store: Store, dataset: Path, *, latency_ms: float, cap_mb_s: float) -> dict[str, float]:
    """Return the MB/s that a plain client has of moto alone, of the store without limits, and with them."""
    os.environ.update(store.environment())
    names = [path.relative_to(dataset).as_posix() for path in sorted(dataset.rglob("*.mp4"))][:24]
    moto = s3fs.S3FileSystem(endpoint_url=store.moto_url, skip_instance_cache=True)
    slow = s3fs.S3FileSystem(skip_instance_cache=True)
    figures = {"moto_whole_mb_s": _fetch_all(names, moto.cat_file)}
    figures["moto_ranges_mb_s"] = _fetch_all(names, lambda path: moto.cat_file(path, start=1000, end=201_000))
    store.set_speed(0.0, 1e12)
    figures["store_whole_mb_s"] = _fetch_all(names, slow.cat_file)
    figures["store_ranges_mb_s"] = _fetch_all(names, lambda path: slow.cat_file(path, start=1000, end=201_000))
    store.set_speed(latency_ms / 1000, cap_mb_s * 1e6)
    figures["slow_whole_mb_s"] = _fetch_all(names, slow.cat_file)
    figures["slow_ranges_mb_s"] = _fetch_all(names, lambda path: slow.cat_file(path, start=1000, end=201_000))
    return figures


def _fetch_all(names: list[str], fetch: Callable[[str], bytes]) -> float:
    begin = time.monotonic()
    with ThreadPoolExecutor(_THREADS) as pool:
        total = sum(len(content) for content in pool.map(fetch, [f"{BUCKET}/arm/{name}" for name in names]))
    return round(total / 1e6 / (time.monotonic() - begin), 1)


def name_limit(result: dict[str, Any], local: dict[str, Any], *, cap_mb_s: float) -> str:
    """Return what the time after the first batch went to."""
    if "error" in result:
        return "it failed"
    needed = 0.0 if result is local else result["busiest_mb"] / (local["wall_s"] / 4)
    busy = result["cpu_share"] + result["store_cpu_share"]
    # Of parts, threads that look ahead wait too, for the index of a video. Without any such fetch, decoding took longer
    # for another reason, such as the load of the machine.
    late_fetches = result["misses"] + result["waits"]
    fetch_s = max(0.0, result["decode_s"] - local["decode_s"]) if late_fetches else 0.0
    facts = (
        f"waits {result['wait_share']:.0%} of {result['wall_s']:.1f} s, mostly for {result['waits_for']}; needs up to "
        f"{needed:.1f} MB/s of {cap_mb_s:g} to keep up with local; the cores are {busy:.0%} busy, "
        f"{result['store_cpu_share']:.0%} with the store; {late_fetches:g} fetches were waited for, "
        f"{fetch_s:.1f} s in decoding"
    )
    return f"{_pick_limit(result, needed / cap_mb_s, busy, fetch_s)} ({facts})"


def _pick_limit(result: dict[str, Any], used: float, busy: float, fetch_s: float) -> str:
    if result["wait_share"] < 0.02:
        return "limited by the training step: data is there in time"
    if used > 0.9:
        return "limited by bandwidth: the plan needs what the cap gives, or more"
    if fetch_s > 0.5 * result["wait_s"]:
        return "limited by fetching: the decoding threads wait for bytes"
    if busy > _BUSY:
        return "limited by CPU"
    return f"limited by {result['waits_for']}"


def check_goal(results: list[dict[str, Any]]) -> str:
    """Return whether the runs with prefetch keep to the goal."""
    lines = [f"goal: with prefetch, wall and waiting at most {GOAL:.0%} of the local run more than local"]
    for result in results:
        if result["loader"].endswith(", prefetch") and "error" not in result:
            is_kept = result["wall_ratio"] <= 1 + GOAL and result["more_wait"] <= GOAL
            lines.append(
                f"  {result['loader']}: wall x{result['wall_ratio']:.2f}, waiting {result['more_wait']:+.1%}: "
                f"{'kept' if is_kept else 'NOT kept'}"
            )
    return "\n".join(lines)
