"""What the drivers share: the request, and the loops that are measured. Needs the standard library alone.

A driver is run as ``python DRIVER.py REQUEST.json RESULT.json`` in the environment of its peer, by ``peers.py``. Times
are of ``time.monotonic``, which all processes of a machine share.
"""

import json
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Batch = tuple[list[int], list[int]]
"""The frames of a batch, by their number in the dataset, and their episodes."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a driver is to do."""

    mode: str
    """``convert``: write the copy. ``speed``: two epochs. ``whole``: one. ``part``: `num_batches`, then save the state.
    ``rest``: load the state and finish the epoch."""
    root: str
    batch_size: int
    num_workers: int
    action_frames: int
    options: dict[str, Any]
    """Of the peer: what tells two rows of the table that share a driver apart."""
    copy: str = ""
    """Folder of the converted copy, where the peer needs one."""
    state: str = ""
    """File of the state, without the rank at its end."""
    num_batches: int = 0
    max_s: float = 0.0
    """Seconds after which an epoch of ``speed`` is broken off."""
    rank: int = 0
    world_size: int = 1
    old_world_size: int = 1
    """Ranks of the run that saved the state."""
    seed: int = 0

    def windows(self) -> dict[str, list[float]]:
        """Return the action chunk, in seconds."""
        fps = json.loads(Path(self.root, "meta", "info.json").read_text())["fps"]
        return {"action": [i / fps for i in range(self.action_frames)]}


class Peer(Protocol):
    """A loader that is measured; `state` and `load` only where it can go on."""

    def epoch(self) -> Iterator[Batch]:
        """Yield what is left of this epoch; then stand at the next."""
        ...

    def state(self) -> Any:
        """Return where it stands after the batch just yielded; may be pickled."""
        ...

    def load(self, state: Any) -> None:
        """Go on from a state."""
        ...


def run(make: Callable[[Request], Any], convert: Callable[[Request], None] | None = None) -> None:
    """Do what the request of the command line says, and write the result."""
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    if request.mode == "convert":
        assert convert is not None
        result = _timed(lambda: convert(request))
    elif request.mode == "speed":
        peer = make(request)
        result = {
            "epochs": [measure_epoch(peer, request) for _ in range(2)],
            # What a peer chose by itself, and the page names.
            "settings": getattr(peer, "settings", {}),
        }
    else:
        result = {"batches": _collect(make(request), request)}
    Path(sys.argv[2]).write_text(json.dumps(result))


def measure_epoch(peer: Peer, request: Request) -> dict[str, Any]:
    """Return the times and the frames of an epoch, or of as much of it as fits in `max_s` after its first batch.

    One that is broken off is measured from its first batch on: what fills a buffer before is never seen there.
    """
    begin = time.monotonic()
    times, batches, distinct = [], [], []
    for index, episodes in peer.epoch():
        times.append(time.monotonic())
        batches.append(len(index))
        if len(index) == request.batch_size:
            distinct.append(len(set(episodes)))
        if request.max_s and times[-1] - times[0] > request.max_s:
            begin, batches[0] = times[0], 0
            break
    return {
        "begin_s": begin,
        "end_s": times[-1],
        "first_batch_at_s": times[0],
        "num_samples": sum(batches),
        "distinct_episodes": sum(distinct) / len(distinct) if distinct else None,
    }


def _collect(peer: Peer, request: Request) -> list[list[int]]:
    if request.mode == "rest":
        # A rank that was not there before takes the state of one that was.
        saved = Path(f"{request.state}.{request.rank % request.old_world_size}")
        peer.load(pickle.loads(saved.read_bytes()))
    batches = []
    for index, _ in peer.epoch():
        batches.append(index)
        if request.mode == "part" and len(batches) == request.num_batches:
            Path(f"{request.state}.{request.rank}").write_bytes(pickle.dumps(peer.state()))
            break
    return batches


def _timed(work: Callable[[], None]) -> dict[str, Any]:
    begin = time.monotonic()
    work()
    return {"begin_s": begin, "end_s": time.monotonic()}


def ids(batch: dict[str, Any]) -> Batch:
    """Return frames and episodes of a batch with LeRobot's columns."""
    return [int(i) for i in batch["index"]], [int(e) for e in batch["episode_index"]]
