"""raypipe and every peer that installs here, on the same two datasets: cost, speed, memory, mixing, and exactness.

    python benchmarks/peers.py --plot benchmarks/plots/peers.png --write BENCHMARKS.md [--python312 PATH]
    python benchmarks/peers.py --data av1-640 --peers raypipe "LeRobot map-style"
    python benchmarks/peers.py --report benchmarks/results/peers.json --write BENCHMARKS.md

Every peer runs in an environment of its own, which is made below ``--folder`` (several GB), by a driver of
``benchmarks/peer_drivers``. Speed: two epochs, those of the peers broken off after ``--seconds``; all figures but the
first batch are of the second. CPU seconds are those of the whole process tree; they move little with the load of the
machine, samples/s move a lot. Going on is counted on a smaller dataset: an epoch is stopped after some batches, a new
process loads what the peer saves, finishes the epoch, and the frames of both are counted; then the same from 2 ranks
to 3. A run of some peers, datasets or parts leaves the other figures of the JSON file as they are.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from made import make_peer_dataset, make_resume_dataset, peer_spec

# The drivers import each other by their plain names, as they do where they run.
sys.path.insert(0, str(Path(__file__).with_name("peer_drivers")))

from peer_counts import count_frames, judge_resume
from peer_drivers.common import Request
from peer_envs import PROJECT_ENV, EnvironmentMissingError, environments, make_environment, read_versions
from peer_figures import KINDS, Figures, join_figures, order_figures, read_figures
from peer_report import FLOOR, KEPT, RAYPIPE, TASKS, print_table, write_page, write_plot
from peer_runs import RunError, Runner, convert, measure_kept, measure_speed

from raypipe import open_dataset
from raypipe.bench.run import describe_machine

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


KEPT_BYTES = 40_000_000_000
"""Of `keep_frames`: more than either dataset has decoded."""
PEERS = {
    FLOOR: Peer(driver="floor", environment=PROJECT_ENV, no_resume="no loader"),
    RAYPIPE: Peer(driver="raypipe_loader", environment=PROJECT_ENV, is_one_process=True, is_whole=True),
    KEPT: Peer(
        driver="raypipe_loader",
        environment=PROJECT_ENV,
        options={"keep_frames": {"max_bytes": KEPT_BYTES}},
        is_one_process=True,
        is_whole=True,
    ),
    TASKS: Peer(
        driver="raypipe_loader",
        environment=PROJECT_ENV,
        options={"decode": {"where": "cluster"}},
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
class Bench:
    """What all runs share."""

    arguments: argparse.Namespace
    pythons: dict[str, str | EnvironmentMissingError]
    folder: Path
    roots: dict[str, Path]
    """The datasets by kind."""
    small: Path
    """The dataset on which frames are counted."""


def main() -> None:
    arguments = parse_arguments()
    if arguments.report:
        written = order_figures(reduce(join_figures, map(read_figures, arguments.report)), PEERS)
    else:
        written = measure_all(arguments)
    print_table(written)
    if arguments.plot:
        write_plot(written, arguments.plot)
    if arguments.write:
        write_page(written, arguments.write, arguments.plot)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path(__file__).with_name("results")
    parser.add_argument("--folder", type=Path, default=results, help="for environments, datasets and copies")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="NAME")
    parser.add_argument("--data", nargs="+", choices=KINDS, default=KINDS, help="which datasets; all unless given")
    parser.add_argument("--episodes", type=int, default=50, help="of a dataset, each of about 200 frames")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--action-frames", type=int, default=16)
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes of a peer")
    parser.add_argument("--seconds", type=float, default=30.0, help="after which an epoch is broken off")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; the rest stays")
    parser.add_argument("--python312", metavar="PATH", help="for peers that need it; else one of the path")
    parser.add_argument(
        "--json-file", dest="json", type=Path, default=results / "peers.json", help="where all figures go"
    )
    parser.add_argument(
        "--report", nargs="+", type=Path, metavar="FILE", help="measure nothing: show the figures of these files"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw the figures")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the page BENCHMARKS.md")
    return parser.parse_args()


def measure_all(arguments: argparse.Namespace) -> Figures:
    """Return the figures of all peers, with those of other peers and datasets that the JSON file has."""
    # First of all: nothing is installed beside what is measured.
    pythons = make_environments(dict.fromkeys(PEERS[name].environment for name in arguments.peers), arguments)
    folder = arguments.folder / "peers"
    bench = Bench(
        arguments=arguments,
        pythons=pythons,
        folder=folder,
        roots={
            kind: make_peer_dataset(kind, folder / f"{kind}-{arguments.episodes}", arguments.episodes)
            for kind in KINDS
            if kind in arguments.data
        },
        small=make_resume_dataset(folder / "small"),
    )
    written = begin_figures(bench)
    run = written["machine"]["time"]
    if arguments.json.exists():
        written = join_figures(read_figures(arguments.json), written)
    for section, figures in sections(bench, written):
        for name in arguments.peers:
            found = measure_peer(name, section, bench)
            if found:
                figures[name] = {**found, "run": run}
                print(json.dumps({section: {name: figures[name]}}), flush=True)
            if not isinstance(python := pythons[PEERS[name].environment], EnvironmentMissingError):
                written["versions"][name] = read_versions(python, PEERS[name].environment)
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(order_figures(written, PEERS), indent=2) + "\n")
    return order_figures(written, PEERS)


def sections(bench: Bench, written: Figures) -> list[tuple[str, Figures]]:
    """Return what is measured, a dataset or the counts, each with the place of its figures."""
    parts = bench.arguments.parts
    speed = [(kind, written["data"][kind]["speed"]) for kind in bench.roots] if "speed" in parts else []
    return [*speed, *([("counts", written["counts"])] if "counts" in parts else [])]


def begin_figures(bench: Bench) -> Figures:
    """Return the conditions of this run, and no figures."""
    given = ("batch_size", "action_frames", "workers", "seconds")
    conditions = {name: getattr(bench.arguments, name) for name in given}
    return {
        "machine": describe_machine(),
        "conditions": {**conditions, "small_frames": count_dataset(bench.small)},
        "data": {kind: {**describe_data(kind, bench.arguments.episodes), "speed": {}} for kind in bench.roots},
        "counts": {},
        "versions": {},
    }


def describe_data(kind: str, num_episodes: int) -> dict[str, Any]:
    """Return what the page says of a dataset."""
    spec = peer_spec(kind, num_episodes)
    camera = spec.cameras[0]
    return {
        "episodes": num_episodes,
        "frames": sum(spec.lengths),
        "shortest": min(spec.lengths),
        "longest": max(spec.lengths),
        "fps": spec.fps,
        "cameras": len(spec.cameras),
        "size": f"{camera.width}x{camera.height}",
        "codec": camera.codec,
        "gop": camera.gop,
        "values": spec.state_dim,
    }


def count_dataset(root: Path) -> int:
    """Return the frames of a dataset."""
    return open_dataset(str(root)).meta.num_frames


def make_environments(names: Iterable[str], arguments: argparse.Namespace) -> dict[str, str | EnvironmentMissingError]:
    """Return the Python of every environment, or why it cannot be made."""
    pythons: dict[str, str | EnvironmentMissingError] = {}
    for name in names:
        try:
            pythons[name] = make_environment(name, arguments.folder / "envs", arguments.python312)
        except EnvironmentMissingError as error:
            pythons[name] = error
    return pythons


def measure_peer(name: str, section: str, bench: Bench) -> dict[str, Any]:
    """Return the figures of one peer on a dataset, or its counts; or why there are none. Empty: nothing to measure."""
    peer = PEERS[name]
    python = bench.pythons[peer.environment]
    if isinstance(python, EnvironmentMissingError):
        return {} if section == "counts" else {"error": str(python)}
    runner = Runner(
        python=python,
        driver=peer.driver,
        has_raypipe=peer.environment == PROJECT_ENV or environments()[peer.environment].has_raypipe,
        folder=bench.folder / "runs" / f"{peer.driver}-{os.getpid()}",
    )
    request = make_request(peer, section, bench, runner.folder / "state")
    if section != "counts":
        return time_peer(peer, runner, request)
    if peer.driver == "floor":
        return {}
    return count_peer(peer, runner, request, count_dataset(bench.small)) | {"count_options": peer.count_options}


def make_request(peer: Peer, section: str, bench: Bench, state: Path) -> Request:
    """Return what the driver of a peer is to do, but for the mode."""
    is_count, arguments = section == "counts", bench.arguments
    options = peer.options | (peer.count_options if is_count else {})
    if "keep_frames" in options:
        folder = (bench.folder / "kept" / section).resolve()
        options = options | {"keep_frames": {**options["keep_frames"], "folder": str(folder)}}
    return Request(
        mode="speed",
        root=str((bench.small if is_count else bench.roots[section]).resolve()),
        batch_size=SMALL_BATCH if is_count else arguments.batch_size,
        num_workers=arguments.workers,
        action_frames=arguments.action_frames,
        options=options,
        max_s=0.0 if peer.is_whole else arguments.seconds,
        copy=str((bench.folder / "copies" / peer.driver / section).resolve()),
        state=str(state.resolve()),
    )


def time_peer(peer: Peer, runner: Runner, request: Request) -> dict[str, Any]:
    """Return cost and speed of a peer, or why there are none."""
    try:
        figures = convert(runner, request) if peer.needs_copy else {}
        figures |= (measure_kept if "keep_frames" in request.options else measure_speed)(runner, request)
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
