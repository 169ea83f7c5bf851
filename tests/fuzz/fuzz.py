"""The command behind `make fuzz`: runs inputs in worker processes, counts outcomes, and keeps every failure.

python tests/fuzz/fuzz.py --minutes 30                   all sites
python tests/fuzz/fuzz.py --seed 17 --site mp4           one input again, with its traceback
python tests/fuzz/fuzz.py --seed 17 --site mp4 --keep bad-edit-list     and keep it in the corpus
"""

import argparse
import base64
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from fuzz_site import Damage  # noqa: E402
from fuzz_sites import SITES  # noqa: E402
from fuzz_worker import make_site, run_damage  # noqa: E402

CORPUS: Final = Path(__file__).parent / "corpus.jsonl"
FAILURES: Final = ("raw", "wrong", "unnamed", "memory", "hang", "crash")
_SILENT_S: Final = 60.0
"""An input takes a few milliseconds; where a machine is busy, seconds."""
_TURN: Final = 800
"""Inputs of a site per unit of its weight, before the next site has its turn."""


@dataclass
class Counts:
    """What came of all inputs."""

    outcomes: Counter = field(default_factory=Counter)
    """By site and outcome."""
    failures: dict = field(default_factory=dict)
    """By site and key: seeds, of which the first is told whole."""
    peak: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def add(self, site: str, told: dict[str, Any]) -> None:
        """Count one input; print a failure that is the first of its kind."""
        with self.lock:
            self.outcomes[site, told["outcome"]] += 1
            self.peak = max(self.peak, told.get("peak", 0))
            if told["outcome"] not in FAILURES:
                return
            seeds = self.failures.setdefault((site, told["outcome"], told.get("key", "")), [])
            seeds.append(told["seed"])
            if len(seeds) == 1:
                print(f"--- {site} --seed {told['seed']}: {told['outcome']} {json.dumps(told, indent=1)}", flush=True)
                print(told.get("error", ""), flush=True)

    @property
    def num_inputs(self) -> int:
        """All inputs so far."""
        return sum(self.outcomes.values())

    def describe(self) -> str:
        """Return the counts as lines."""
        sites = sorted({site for site, _ in self.outcomes})
        lines = [f"{self.num_inputs:,} inputs, most memory of a worker {self.peak / 1e6:,.0f} MB"]
        for site in sites:
            found = {kind: count for (one, kind), count in sorted(self.outcomes.items()) if one == site}
            lines.append(f"  {site:14} {sum(found.values()):7,}  {', '.join(f'{k} {v:,}' for k, v in found.items())}")
        for (site, outcome, key), seeds in sorted(self.failures.items()):
            lines.append(f"FAILED {site} {outcome}: {key}: {len(seeds)} inputs, --seed {seeds[:5]}")
        return "\n".join(lines)


def run_site(site: str, first: int, count: int, counts: Counts, *, deadline: float = float("inf")) -> None:
    """Run inputs `first` to ``first + count`` of a site, in a worker that is started again where it dies."""
    seed, stop = first, first + count
    while seed < stop and time.monotonic() < deadline:
        seed = _run_worker(site, seed, stop, counts, deadline)


def _run_worker(site: str, seed: int, stop: int, counts: Counts, deadline: float) -> int:
    """Run a worker until it dies or is done; return the seed with which to go on."""
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        str(Path(__file__).with_name("fuzz_worker.py")),
        site,
        str(seed),
        "1",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment(site), start_new_session=True
    ) as process:
        lines, said = _lines_of(process), _tail_of(process)
        begun = next(lines)
        if not begun:
            process.wait(timeout=_SILENT_S)
            raise RuntimeError(f"a worker of {site} has not begun: {b''.join(said)[-3000:].decode(errors='replace')}")
        folder = json.loads(begun).get("folder", "")
        try:
            for line in lines:
                if line is None or line == "":
                    kind = "hang" if line is None else "crash"
                    _stop(process)
                    told = {
                        "seed": seed,
                        "outcome": kind,
                        "key": kind,
                        "error": b"".join(said)[-3000:].decode(errors="replace"),
                    }
                    counts.add(site, {**told, "status": process.returncode})
                    return seed + 1
                told = json.loads(line)
                counts.add(site, told)
                seed += 1
                if seed >= stop or told["outcome"] == "memory" or time.monotonic() > deadline:
                    return seed
        finally:
            _stop(process)
            shutil.rmtree(folder, ignore_errors=True)
    return seed


def _lines_of(process: Any) -> Iterator[str | None]:
    """Yield the lines of a worker; None where none comes for too long, an empty one at its end."""
    lines: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(b"")

    threading.Thread(target=read, daemon=True).start()
    # Datasets are made first.
    wait_s = 10 * _SILENT_S
    while True:
        try:
            line = lines.get(timeout=wait_s)
        except queue.Empty:
            yield None
            return
        yield line.decode().strip()
        if not line:
            return
        wait_s = _SILENT_S


def _tail_of(process: Any) -> list[bytes]:
    said: list[bytes] = []

    def read() -> None:
        for line in process.stderr:
            said.append(line)
            del said[:-60]

    threading.Thread(target=read, daemon=True).start()
    return said


def _stop(process: Any) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_corpus() -> list[dict[str, Any]]:
    """Return the past failures: site, damage, and why each is kept."""
    lines = CORPUS.read_text().splitlines() if CORPUS.exists() else []
    return [json.loads(line) for line in lines]


def keep(site: str, name: str, damage: Damage) -> None:
    """Add a damage to the corpus."""
    content = base64.b64encode(zlib.compress(damage.content, 9)).decode()
    line = json.dumps({"site": site, "name": name, "file": damage.file, "use": damage.use, "content": content})
    with CORPUS.open("a") as file:
        file.write(f"{line}\n")


def run_corpus() -> dict[str, str]:
    """Return what comes of every past failure now, by its name; it runs in a process of its own."""
    command = [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name("fuzz_worker.py")), "corpus"]
    told = subprocess.run(
        command, input=CORPUS.read_text(), capture_output=True, text=True, env=_environment(""), check=False
    )
    found = {one["name"]: one["outcome"] for one in map(json.loads, told.stdout.splitlines())}
    # A crash ends the process: what was not reached has no line.
    return {kept["name"]: found.get(kept["name"], f"crash: {told.stderr[-2000:]}") for kept in read_corpus()}


def _environment(site: str) -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "0" if site == "hub" else "1",
        "RAYPIPE_PROTOCOLS": "memory",
        "OMP_NUM_THREADS": "1",
        "HOME": tempfile.gettempdir(),
    }


def _replay(site: str, seed: int, name: str, use: str) -> None:
    made, folder = make_site(site)
    try:
        damage = made.draw(random.Random(f"{site}:{seed}"))
        damage = replace(damage, use=use or damage.use)
        print(
            json.dumps(
                {"seed": seed, "site": site, "file": damage.file, "use": damage.use, "bytes": len(damage.content)}
            )
        )
        if name:
            keep(site, name, damage)
        told = run_damage(made, damage)
        print(told["outcome"], told.get("key", ""))
        print(told.get("error", ""))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_all(options: argparse.Namespace) -> Counts:
    counts, deadline = Counts(), time.monotonic() + 60 * options.minutes
    turns: queue.Queue[tuple[str, int, int]] = queue.Queue()
    sites = options.site or list(SITES)
    started: Counter = Counter()

    def work() -> None:
        while time.monotonic() < deadline and not (options.inputs and counts.num_inputs >= options.inputs):
            with counts.lock:
                if turns.empty():
                    for site in sites:
                        size = _TURN * SITES[site].weight
                        turns.put((site, options.first + started[site], size))
                        started[site] += size
                turn = turns.get()
            run_site(*turn, counts, deadline=deadline)
            print(
                f"{time.strftime('%H:%M:%S')} {turn[0]} {turn[1]}+{turn[2]}: {counts.num_inputs:,} inputs", flush=True
            )

    threads = [threading.Thread(target=work) for _ in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def main() -> None:
    """Run inputs, or one of them again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--inputs", type=int, default=0, help="stop after so many")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2)))
    parser.add_argument("--site", action="append", choices=list(SITES))
    parser.add_argument("--first", type=int, default=0, help="the first seed of every site")
    parser.add_argument("--seed", type=int, help="run this one alone; needs --site")
    parser.add_argument("--keep", default="", metavar="NAME", help="with --seed: add it to the corpus")
    parser.add_argument("--use", default="", help="with --seed: use the file so, not as the seed says")
    options = parser.parse_args()
    if options.seed is not None:
        _replay(options.site[0], options.seed, options.keep, options.use)
        return
    counts = _run_all(options)
    print(counts.describe())
    sys.exit(1 if counts.failures else 0)


if __name__ == "__main__":
    main()
