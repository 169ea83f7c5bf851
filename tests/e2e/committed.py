"""What training runs did, by the files that their ranks write, and what their plan says.

A rank writes a line when it starts, with the state that it starts from, and a line for every step, with its frames and
the state after it. A step is *committed* if the next start begins after it: what came later in that attempt was never
saved, and is done again.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.plan import OrderState, plan_epoch, plan_world, resume


class Journal:
    """Where one rank of one attempt writes what it does."""

    def __init__(self, folder, rank, world_size, loader):
        self._path = Path(folder) / f"rank-{rank}-{time.time_ns()}.jsonl"
        self._write(world_size=world_size, state=loader.state_dict())

    def add(self, batch, loader, **more):
        frames = list(zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True))
        self._write(frames=frames, state=loader.state_dict(), **more)

    def _write(self, **line):
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks, and what each did after it."""

    world_size: int
    state: dict[str, Any]
    ranks: list[list[dict[str, Any]]]

    def frames(self, rank, num_steps=None) -> list[list[tuple[int, int]]]:
        return [[tuple(frame) for frame in line["frames"]] for line in self.ranks[rank][:num_steps]]

    def num_steps_to(self, state) -> int:
        """How many steps lead from the start of this attempt to a state; rank 0 wrote them all."""
        states = [self.state, *(line["state"] for line in self.ranks[0])]
        return states.index(state)


def read_attempts(folder) -> list[Attempt]:
    """The attempts in the order of their starts. Of a later one there may be more or fewer ranks."""
    files: dict[int, list[list[dict[str, Any]]]] = {}
    for path in sorted(Path(folder).glob("rank-*.jsonl"), key=lambda path: int(path.stem.split("-")[2])):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        files.setdefault(int(path.stem.split("-")[1]), []).append(lines)
    attempts = []
    while files.get(0):
        start = files[0][0][0]
        ranks = [files[rank].pop(0) for rank in range(start["world_size"])]
        assert all(lines[0] == start for lines in ranks), "ranks started at different places"
        attempts.append(Attempt(start["world_size"], start["state"], [lines[1:] for lines in ranks]))
    return attempts


def committed_frames(attempts) -> list[list[list[list[tuple[int, int]]]]]:
    """The committed frames by attempt, rank and step: all of the last attempt, and of others up to the next start."""
    committed = []
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        num_steps = attempt.num_steps_to(following.state) if following else None
        committed.append([attempt.frames(rank, num_steps) for rank in range(attempt.world_size)])
    return committed


def flatten(committed) -> list[tuple[int, int]]:
    return [frame for attempt in committed for rank in attempt for step in rank for frame in step]


def plan_from(pipe, state, world_size):
    """The plan of the rest of an epoch after a state, on a number of ranks."""
    index = pipe.config.index()
    at = resume(OrderState.from_dict(state), index, pipe.config.order, world_size=world_size, batch=pipe.config.batch)
    plan = plan_epoch(index, at.spec, epoch=at.epoch, legs=at.legs)
    return plan_world(plan, world_size=world_size, batch=pipe.config.batch)
