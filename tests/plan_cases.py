"""Random orders and histories for the tests of the plan, and a plan carried out by hand."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from raypipe.plan import (
    BatchSpec,
    EpisodeIndex,
    OrderSpec,
    SelectionSpec,
    WorldPlan,
    index_episodes,
    plan_epoch,
    plan_world,
    resume,
    start,
)

WORLDS = (1, 2, 3, 4, 6)

lengths = st.lists(st.one_of(st.just(1), st.integers(1, 40)), min_size=6, max_size=24)
specs = st.builds(
    OrderSpec,
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.sampled_from([True, True, True, False]),
    live_spans=st.sampled_from([1, 2, 3, 4, 7, 16, 100]),
    span_frames=st.sampled_from(["episode", 1, 5, 16]),
    tail=st.sampled_from(["short", "drop", "wrap"]),
    lanes=st.sampled_from(["world_size", 1, 4, 6]),
)


def make_index(frames, name="robot", episodes=None, fingerprint="robot-1") -> EpisodeIndex:
    numbers = np.arange(len(frames)) if episodes is None else np.asarray(episodes)
    lengths = np.asarray(frames, dtype=np.int64)
    return index_episodes(name, numbers, lengths, fingerprint=fingerprint, selection=SelectionSpec())


def frames_of_index(index: EpisodeIndex) -> list[tuple[int, int]]:
    return sorted(
        (int(episode), frame)
        for episode, begin, end in zip(index.episode, index.start, index.stop, strict=True)
        for frame in range(begin, end)
    )


def plan_start(index, spec, *, world_size, per_lane=3, epoch=0) -> WorldPlan:
    """Return the plan of a first start whose batches take `per_lane` frames of every lane."""
    return serve(index, start(spec, world_size=world_size, epoch=epoch), world_size, per_lane)


def plan_resumed(state, index, spec, *, world_size, per_lane=3) -> WorldPlan:
    return serve(index, resume(state, index, spec, world_size=world_size), world_size, per_lane)


def serve(index, todo, world_size, per_lane) -> WorldPlan:
    plan = plan_epoch(index, todo.spec, epoch=todo.epoch, legs=todo.legs)
    batch = BatchSpec(size=per_lane * plan.leg.lanes, scope="global")
    return plan_world(plan, world_size=world_size, batch=batch)


@dataclass
class Step:
    """What all ranks emitted in one step."""

    frames: list[tuple[int, int]] = field(default_factory=list)
    repeats: list[tuple[int, int]] = field(default_factory=list)


def carry_out(world: WorldPlan) -> list[Step]:
    """Do what ranks do: gather rows from blocks in arrival order; check what a rank may rely on."""
    steps = [Step() for _ in range(world.num_steps)]
    for rank in range(world.world_size):
        plan = world.rank(rank)
        blocks = [plan.frames_of(arrival) for arrival in range(len(plan.queue))]
        gone: set[int] = set()
        batches = list(plan.batches())
        assert [batch.step for batch in batches] == list(range(world.num_steps))
        for batch in batches:
            assert batch.span.max(initial=-1) < batch.num_needed
            assert not gone & set(batch.span.tolist())
            gone |= set(batch.done.tolist())
            rows = [int(blocks[span][row]) for span, row in zip(batch.span, batch.row, strict=True)]
            assert rows == batch.frame.tolist()
            for frame, span, is_repeat in zip(rows, batch.span, batch.is_repeat, strict=True):
                step = steps[batch.step]
                (step.repeats if is_repeat else step.frames).append((int(plan.queue.episode[span]), frame))
        assert gone == (set(range(len(plan.queue))) if batches else set())
    return steps


def left_over(world: WorldPlan) -> list[tuple[int, int]]:
    left = world.left_over()
    return [(int(episode), int(frame)) for episode, frame in zip(left.episode, left.frame, strict=True)]
