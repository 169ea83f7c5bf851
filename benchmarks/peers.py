"""raypipe and every peer that installs here, on the same data: cost, speed, memory, mixing, and exactness.

    python benchmarks/peers.py --write BENCHMARKS.md [--python312 PATH] [--peers NAME ...]
    python benchmarks/peers.py --report benchmarks/results/peers.json --write BENCHMARKS.md

Every peer runs in an environment of its own, which is made below ``--folder`` (several GB), by a driver of
``benchmarks/peer_drivers``. Speed: two epochs, those of the peers broken off after ``--seconds``; all figures but the
first batch are of the second. CPU seconds are those of the whole process tree; they move little with the load of the
machine, samples/s move a lot. Going on is counted on a smaller dataset: an epoch is stopped after some batches, a new
process loads what the peer saves, finishes the epoch, and the frames of both are counted; then the same from 2 ranks
to 3.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from made import make_peer_dataset, make_resume_dataset

# The drivers import each other by their plain names, as they do where they run.
sys.path.insert(0, str(Path(__file__).with_name("peer_drivers")))

from peer_counts import count_frames, judge_resume
from peer_drivers.common import Request
from peer_envs import PROJECT_ENV, EnvironmentMissingError, environments, make_environment, read_versions
from peer_report import print_table, write_page, write_plot
from peer_runs import RunError, Runner, convert, measure_speed

from raypipe import open_dataset
from raypipe.bench.machine import describe_machine

PARTS = ("speed", "counts")
STOP_AFTER = 20
"""Batches of a rank before a run is stopped."""
SMALL_BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A row of the table."""

    driver: str
    environment: str
    options: dict[str, Any] = field(default_factory=dict)
    count_options: dict[str, Any] = field(default_factory=dict)
    """Further options where frames are counted; the table names them."""
    no_resume: str = ""
    """Why it cannot go on inside an epoch; empty where it can."""
    needs_copy: bool = False
    is_one_process: bool = False
    """Whether one process serves all ranks."""
    is_whole: bool = False
    """Whether its epochs are never broken off: it decodes far ahead, and a part would not tell what that costs."""


RAYPIPE_MEMORY = {"live_bytes": 3_200_000_000}
PEERS = {
    "floor: sequential decode, all cores": Peer(driver="floor", environment=PROJECT_ENV, no_resume="no loader"),
    "raypipe": Peer(
        driver="raypipe_loader",
        environment=PROJECT_ENV,
        options={"decode": {"where": "rank"}, **RAYPIPE_MEMORY},
        is_one_process=True,
        is_whole=True,
    ),
    "raypipe-cluster": Peer(
        driver="raypipe_loader",
        environment=PROJECT_ENV,
        options={"decode": {"where": "cluster"}, **RAYPIPE_MEMORY},
        is_one_process=True,
        is_whole=True,
    ),
    "LeRobot map-style": Peer(driver="lerobot_map", environment="lerobot"),
    "LeRobot streaming": Peer(driver="lerobot_streaming", environment="lerobot", no_resume="none"),
    "Ray read_lerobot": Peer(
        driver="read_lerobot", environment="lerobot", options={"buffer": 0}, no_resume="none inside an epoch"
    ),
    "Ray read_lerobot, shuffle buffer 4,000": Peer(
        driver="read_lerobot", environment="lerobot", options={"buffer": 4000}, no_resume="none inside an epoch"
    ),
    # With its default of 10, loading a state ends with an IndexError inside datasets 5.2.0.
    "Hugging Face datasets streaming": Peer(
        driver="hf_datasets", environment="datasets", count_options={"max_buffer_input_shards": 1}
    ),
    "torch DataLoader": Peer(driver="torch_loader", environment="torchdata", no_resume="none"),
    "torchdata StatefulDataLoader": Peer(driver="stateful_loader", environment="torchdata"),
    "MosaicML Streaming": Peer(driver="mosaic", environment="streaming", needs_copy=True),
    "LitData": Peer(driver="lit", environment="litdata", needs_copy=True),
}


@dataclass(frozen=True, kw_only=True)
class Data:
    """The two datasets."""

    large: Path
    small: Path
    folder: Path

    @property
    def small_frames(self) -> int:
        """Frames that are counted."""
        return open_dataset(str(self.small)).meta.num_frames


def main() -> None:
    arguments = parse_arguments()
    written = read_figures(arguments.report) if arguments.report else measure_all(arguments)
    print_table(written)
    if arguments.plot:
        write_plot(written, Path(arguments.plot))
    if arguments.write:
        write_page(written, Path(arguments.write), Path(arguments.plot) if arguments.plot else None)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path(__file__).with_name("results")
    parser.add_argument("--folder", type=Path, default=results, help="for environments, datasets and copies")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="NAME")
    parser.add_argument("--episodes", type=int, default=50, help="of about 200 frames with two 320x240 cameras")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--action-frames", type=int, default=16)
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes of a peer")
    parser.add_argument("--seconds", type=float, default=30.0, help="after which an epoch is broken off")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; the rest stays")
    parser.add_argument("--python312", metavar="PATH", help="for peers that need it; else one of the path")
    parser.add_argument(
        "--json-file", dest="json", type=Path, default=results / "peers.json", help="where all figures go"
    )
    parser.add_argument("--report", nargs="+", metavar="FILE", help="measure nothing: show the figures of these files")
    parser.add_argument("--plot", metavar="PNG", help="also draw the figures")
    parser.add_argument("--write", metavar="FILE", help="also write the page BENCHMARKS.md")
    return parser.parse_args()


def read_figures(paths: list[str]) -> dict[str, Any]:
    """Return the figures of some files of the same data, later ones before earlier ones, in the order of `PEERS`."""
    files = [json.loads(Path(path).read_text()) for path in paths]
    for other in files[1:]:
        assert other["conditions"] == files[0]["conditions"], f"{paths} are of unlike data or settings"
    peers: dict[str, Any] = {}
    for name in PEERS:
        found = [file["peers"][name] for file in files if name in file["peers"]]
        if found:
            peers[name] = {key: value for figures in found for key, value in figures.items()}
    return {**files[-1], "peers": peers, "num_runs": len(files)}


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all peers; those of other peers in the JSON file of the same data stay."""
    # First of all: nothing is installed beside what is measured.
    pythons = make_environments(dict.fromkeys(PEERS[name].environment for name in arguments.peers), arguments)
    folder = arguments.folder / "peers"
    data = Data(
        large=make_peer_dataset(folder / f"data-{arguments.episodes}", arguments.episodes),
        small=make_resume_dataset(folder / "small"),
        folder=folder,
    )
    meta = open_dataset(str(data.large)).meta
    conditions = {name: getattr(arguments, name) for name in ("episodes", "batch_size", "action_frames", "workers")}
    conditions |= {"seconds": arguments.seconds, "frames": meta.num_frames, "small_frames": data.small_frames}
    written = {"machine": describe_machine(), "conditions": conditions, "peers": {}}
    if arguments.json.exists():
        before = json.loads(arguments.json.read_text())
        if before["conditions"] == conditions:
            written["peers"] = {name: figures for name, figures in before["peers"].items() if name in PEERS}
    for name in arguments.peers:
        before = written["peers"].get(name, {}) if len(arguments.parts) < len(PARTS) else {}
        written["peers"][name] = {**before, **measure_peer(PEERS[name], pythons, data, arguments)}
        print(json.dumps({name: written["peers"][name]}), flush=True)
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(written, indent=2) + "\n")
    return written


def make_environments(names: Iterable[str], arguments: argparse.Namespace) -> dict[str, str | EnvironmentMissingError]:
    """Return the Python of every environment, or why it cannot be made."""
    pythons: dict[str, str | EnvironmentMissingError] = {}
    for name in names:
        try:
            pythons[name] = make_environment(name, arguments.folder / "envs", arguments.python312)
        except EnvironmentMissingError as error:
            pythons[name] = error
    return pythons


def measure_peer(
    peer: Peer, pythons: dict[str, str | EnvironmentMissingError], data: Data, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return all figures of one peer, or why there are none."""
    python = pythons[peer.environment]
    if isinstance(python, EnvironmentMissingError):
        return {"error": str(python)}
    has_raypipe = peer.environment == PROJECT_ENV or environments()[peer.environment].has_raypipe
    runner = Runner(
        python=python,
        driver=peer.driver,
        has_raypipe=has_raypipe,
        folder=data.folder / "runs" / f"{peer.driver}-{os.getpid()}",
    )
    request = Request(
        mode="speed",
        root=str(data.large.resolve()),
        batch_size=arguments.batch_size,
        num_workers=arguments.workers,
        action_frames=arguments.action_frames,
        options=peer.options,
        max_s=0.0 if peer.is_whole else arguments.seconds,
        copy=str((data.folder / "copies" / peer.driver / "large").resolve()),
        state=str((runner.folder / "state").resolve()),
    )
    figures: dict[str, Any] = {"versions": read_versions(python, peer.environment)}
    if "speed" in arguments.parts:
        figures |= time_peer(peer, runner, request)
    if "counts" in arguments.parts and peer.driver != "floor":
        copy = str(Path(request.copy).with_name("small"))
        options = {**peer.options, **peer.count_options}
        small = replace(request, root=str(data.small.resolve()), batch_size=SMALL_BATCH, copy=copy, options=options)
        figures |= count_peer(peer, runner, small, data.small_frames) | {"count_options": peer.count_options}
    return figures


def time_peer(peer: Peer, runner: Runner, request: Request) -> dict[str, Any]:
    """Return cost and speed of a peer, or why there are none."""
    try:
        figures = convert(runner, request) if peer.needs_copy else {}
        figures |= measure_speed(runner, request)
    except RunError as error:
        return {"error": str(error)}
    if peer.driver == "floor":
        figures["first_batch_s"] = None
    return figures


def count_peer(peer: Peer, runner: Runner, request: Request, num_frames: int) -> dict[str, Any]:
    """Return what an uninterrupted epoch gives, one that was stopped, and one that went on with 3 ranks from 2."""
    counts: dict[str, Any] = {}
    try:
        if peer.needs_copy:
            convert(runner, request)
        whole = runner.run(replace(request, mode="whole")).result["batches"]
    except RunError as error:
        return {"whole": {"text": f"fails: {error}"}}
    counts["whole"] = count_frames([whole], num_frames).to_json()
    if peer.no_resume:
        return counts | {"resume": {"text": peer.no_resume}, "reshape": {"text": peer.no_resume}}
    try:
        part, rest = (collect(peer, runner, replace(request, mode=mode), 1) for mode in ("part", "rest"))
        counts["resume"] = judge_resume(whole, part[0], rest[0], num_frames)
    except RunError as error:
        counts["resume"] = {"text": f"fails: {error}"}
    try:
        begun = collect(peer, runner, replace(request, mode="part"), 2)
        ended = collect(peer, runner, replace(request, mode="rest", old_world_size=2), 3)
        counts["reshape"] = count_frames([*begun, *ended], num_frames).to_json()
    except RunError as error:
        counts["reshape"] = {"text": f"not possible: {error}"}
    return counts


def collect(peer: Peer, runner: Runner, request: Request, world_size: int) -> list[list[list[int]]]:
    """Return the batches of every process of a run on so many ranks."""
    request = replace(request, world_size=world_size, num_batches=STOP_AFTER)
    if peer.is_one_process:
        requests = [replace(request, num_batches=STOP_AFTER * world_size, old_world_size=1)]
    else:
        requests = [replace(request, rank=rank) for rank in range(world_size)]
    return [ran.result["batches"] for ran in runner.run_ranks(requests)]


if __name__ == "__main__":
    main()
