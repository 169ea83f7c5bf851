"""Runs the drivers of the peers, each in a process of its environment, and measures the process tree."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peer_drivers.common import Request
from peer_envs import PROJECT

from raypipe.bench.run import TreeSampler

DRIVERS = Path(__file__).with_name("peer_drivers")
LIMIT_S = 1200
"""After which a run is ended and counts as failed."""
LIMIT_MB = round(0.7 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6)
"""Memory of a process tree at which it is ended and counts as failed, before the system ends something else."""


class RunError(Exception):
    """A driver ended with an error; the message is the end of what it printed."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a driver wrote, and what its process tree cost."""

    result: dict[str, Any]
    sampler: TreeSampler
    started_at_s: float


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Starts one driver in one environment."""

    python: str
    driver: str
    has_raypipe: bool
    folder: Path
    """For requests, results and what the drivers print."""

    def run(self, request: Request) -> Ran:
        """Run the driver of one rank to its end."""
        return self.run_ranks([request])[0]

    def run_ranks(self, requests: list[Request]) -> list[Ran]:
        """Run the driver of all ranks at once; where one fails the others are ended."""
        self.folder.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        started = [self._start(request, port) for request in requests]
        deadline, limit = time.monotonic() + LIMIT_S, ""
        try:
            while not limit and any(child.poll() is None for child, _, _ in started):
                if any(child.poll() not in (None, 0) for child, _, _ in started):
                    break
                limit = _find_limit(sum(sampler.peak_mb for _, sampler, _ in started), deadline)
                time.sleep(0.05)
        finally:
            for child, sampler, _ in started:
                _end(child)
                sampler.stop()
        ranks = list(zip(requests, started, strict=True))
        # First those that failed by themselves: the others were ended here, because of them.
        ranks.sort(key=lambda rank: rank[1][0].returncode == -signal.SIGKILL)
        ran = {request.rank: self._read(request, *each, limit) for request, each in ranks}
        return [ran[request.rank] for request in requests]

    def _start(self, request: Request, port: int) -> tuple[subprocess.Popen[bytes], TreeSampler, float]:
        files = self._files(request.rank)
        files[0].write_text(json.dumps(asdict(request)))
        files[1].unlink(missing_ok=True)
        begin = time.monotonic()
        # A file and not a pipe: processes that outlive the child would keep a pipe open.
        with files[2].open("w") as output:
            child = subprocess.Popen(
                [self.python, DRIVERS / f"{self.driver}.py", *files[:2]],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(request, port),
                start_new_session=True,
            )
        return child, TreeSampler(child.pid), begin

    def _read(
        self, request: Request, child: subprocess.Popen[bytes], sampler: TreeSampler, begin: float, limit: str
    ) -> Ran:
        _, result, output = self._files(request.rank)
        if not result.exists():
            ended = f"ended with {child.returncode}: {find_message(output.read_text())}"
            raise RunError((limit or ended)[:400])
        return Ran(result=json.loads(result.read_text()), sampler=sampler, started_at_s=begin)

    def _files(self, rank: int) -> tuple[Path, Path, Path]:
        names = ("request.json", "result.json", "output.txt")
        first, second, third = (self.folder / f"rank-{rank}-{name}" for name in names)
        return first, second, third

    def _environment(self, request: Request, port: int) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ranks = {"RANK": request.rank, "LOCAL_RANK": request.rank, "WORLD_SIZE": request.world_size}
        ranks |= {"LOCAL_WORLD_SIZE": request.world_size, "MASTER_PORT": port}
        return {
            **kept,
            **{name: str(value) for name, value in ranks.items()},
            **({"PYTHONPATH": str(PROJECT)} if self.has_raypipe else {}),
            "MASTER_ADDR": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder.parent / "hf"),
        }


def find_message(output: str) -> str:
    """Return the line that says why a driver ended: that of the last exception, else the last one.

    An exception may have more lines than its first; the lines of a native stack trace begin with a library's path.
    """
    lines = [line for line in output.splitlines() if line.strip() and line[0] not in "/*"]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return (raised or lines or ["no message"])[-1]


def convert(runner: Runner, request: Request) -> dict[str, Any]:
    """Write a peer's copy anew, and return what that took."""
    shutil.rmtree(request.copy, ignore_errors=True)
    ran = runner.run(replace(request, mode="convert"))
    begin, end = ran.result["begin_s"], ran.result["end_s"]
    return {
        "convert_s": round(end - begin, 1),
        "convert_cpu_s": round(ran.sampler.cpu_between(begin, end), 1),
        "copy_mb": _size_mb(Path(request.copy)),
    }


def measure_kept(runner: Runner, request: Request) -> dict[str, Any]:
    """Return the figures of `measure_speed` for a folder of kept frames that is empty at first, and what it comes to.

    The folder is removed after that.
    """
    folder = Path(request.options["keep_frames"]["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    try:
        return {**measure_speed(runner, request), "kept_mb": _size_mb(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_speed(runner: Runner, request: Request) -> dict[str, Any]:
    """Return the figures of the second epoch, and how long the first batch took from the start of the process."""
    ran = runner.run(replace(request, mode="speed"))
    first, warm = ran.result["epochs"]
    seconds = warm["end_s"] - warm["begin_s"]
    return {
        "cpu_s_per_1k": round(ran.sampler.cpu_between(warm["begin_s"], warm["end_s"]) / warm["num_samples"] * 1000, 2),
        "samples_per_s": round(warm["num_samples"] / seconds, 1),
        "first_batch_s": round(first["first_batch_at_s"] - ran.started_at_s, 1),
        "peak_mb": round(ran.sampler.peak_mb),
        "distinct_episodes": None if warm["distinct_episodes"] is None else round(warm["distinct_episodes"], 1),
        "samples": warm["num_samples"],
        "load_average": round(os.getloadavg()[0], 1),
        "settings": ran.result["settings"],
    }


def _size_mb(folder: Path) -> float:
    # Blocks and not lengths: a file may have holes.
    return round(sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()) / 1e6, 1)


def _find_limit(memory_mb: float, deadline: float) -> str:
    """Return which limit a run has passed; empty where none."""
    if memory_mb > LIMIT_MB:
        return f"needs more than {LIMIT_MB / 1000:.0f} GB of memory"
    return f"took more than {LIMIT_S} s" if time.monotonic() > deadline else ""


def _end(child: subprocess.Popen[bytes]) -> None:
    """End what a driver left behind; its session is its own."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
