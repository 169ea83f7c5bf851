"""Random orders and histories for the tests of the plan, and a plan carried out by hand."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from raypipe.errors import ConfigError
from raypipe.plan import (
    BatchSpec,
    EpisodeIndex,
    OrderSpec,
    SelectionSpec,
    WorldPlan,
    follow_state,
    index_episodes,
    make_keys,
    mix_indexes,
    plan_epoch,
    plan_world,
    resume,
    split_frames,
    start,
)
from raypipe.plan.rates import times_taken

WORLDS = (1, 2, 3, 4, 6)

# Bytes are one draw, numbers are one each. Half of the episodes have one frame, the others up to 40.
lengths = st.binary(min_size=6, max_size=24).map(lambda drawn: [max(1, byte % 78 - 37) for byte in drawn])
specs = st.builds(
    OrderSpec,
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.sampled_from([True, True, True, False]),
    live_spans=st.sampled_from([1, 2, 3, 4, 7, 16, 100]),
    span_frames=st.sampled_from(["episode", 1, 5, 16]),
    clip_frames=st.sampled_from(["span", "span", 1, 2, 3, 8, 100]),
    tail=st.sampled_from(["short", "drop", "wrap"]),
    lanes=st.sampled_from(["world_size", 1, 4, 6]),
)


def make_index(frames, name="robot", episodes=None, fingerprint="robot-1", weights=None, **selection) -> EpisodeIndex:
    numbers = np.arange(len(frames)) if episodes is None else np.asarray(episodes)
    lengths = np.asarray(frames, dtype=np.int64)
    known = {"fingerprint": fingerprint, "selection": SelectionSpec(**selection)}
    return index_episodes(name, numbers, lengths, weights=None if weights is None else np.array(weights), **known)


@st.composite
def weights_of(draw, frames, weight) -> list[float]:
    """Draw weights of episodes or of frames: which of a few `weight` each has, in one draw for all of them."""
    number = draw(st.sampled_from([len(frames), sum(frames)]))
    few = draw(st.lists(weight, min_size=1, max_size=24))
    return [few[place % len(few)] for place in draw(st.binary(min_size=number, max_size=number))]


@st.composite
def weighted(draw, name="robot", fingerprint="robot-1", least=6, most=16) -> EpisodeIndex:
    """Draw a dataset with weights of episodes or of frames, some of them 0, or with every n-th frame, or with both."""
    frames = draw(st.lists(st.integers(1, 30), min_size=least, max_size=most))
    weights = draw(st.none() | weights_of(frames, st.sampled_from([0.0, 1.0, 1.0, 2.0]) | st.floats(0.01, 9)))
    every = draw(st.sampled_from([1, 1, 2, 3]))
    try:
        return make_index(frames, name, fingerprint=fingerprint, weights=weights, every=every)
    except ConfigError:
        assume(False)
        raise


def times_of_index(index: EpisodeIndex, spec: OrderSpec, epoch: int = 0) -> list[tuple[int, int]]:
    """Return (episode, frame) of everything that an epoch has, as often as it has it."""
    keys = make_keys(index, spec, epoch)
    row = np.repeat(np.arange(len(index)), index.stop - index.start)
    frame = np.concatenate([np.arange(*pair) for pair in zip(index.start, index.stop, strict=True)])
    times = np.ones(len(row), dtype=np.int64)
    if index.rates is not None:
        times = times_taken(index.rates, keys, row, epoch * index.rates.parts[row], frame)
    repeated = np.repeat(index.episode[row], times).tolist(), np.repeat(frame, times).tolist()
    return sorted(zip(*repeated, strict=True))


@st.composite
def mixtures(draw, most_frames=200) -> EpisodeIndex:
    """Draw a mixture of 1 to 4 datasets with weights that share an epoch out in fractions of laps."""
    members = draw(st.lists(st.lists(st.integers(1, 25), min_size=1, max_size=8), min_size=1, max_size=4))
    weights = draw(st.lists(st.floats(0.1, 5), min_size=len(members), max_size=len(members)))
    size = draw(st.integers(12 * len(members), most_frames))
    frames = [max(1, part) for part in split_frames(weights, size)]
    indexes = [make_index(one, name=f"robot-{i}", fingerprint=f"data-{i}") for i, one in enumerate(members)]
    return mix_indexes(indexes, frames)


def frames_of_index(index: EpisodeIndex) -> list[tuple[int, int]]:
    return sorted(
        (int(episode), frame)
        for episode, begin, end in zip(index.episode, index.start, index.stop, strict=True)
        for frame in range(begin, end)
    )


def plan_start(index, spec, *, world_size, per_lane=3, epoch=0) -> WorldPlan:
    """Return the plan of a first start whose batches take `per_lane` frames of every lane."""
    return serve(index, start(spec, world_size=world_size, epoch=epoch), world_size, per_lane)


def start_or_assume(index, spec, **options) -> WorldPlan:
    """Return what `plan_start` does; where there are too few frames, which has tests of its own, the case is left."""
    try:
        return plan_start(index, spec, **options)
    except ConfigError:
        assume(False)
        raise


def plan_resumed(state, index, spec, *, world_size, per_lane=3) -> WorldPlan:
    state, index = follow_state(state, index)
    return serve(index, resume(state, index, spec, world_size=world_size), world_size, per_lane)


def serve(index, todo, world_size, per_lane) -> WorldPlan:
    plan = plan_epoch(index, todo.spec, epoch=todo.epoch, legs=todo.legs)
    batch = BatchSpec(size=per_lane * plan.leg.lanes, scope="global")
    return plan_world(plan, world_size=world_size, batch=batch)


@dataclass
class Step:
    """What all ranks emitted in one step."""

    frames: list[tuple[int, ...]] = field(default_factory=list)
    """(episode, frame), or of a mixture (dataset, lap, episode, frame)."""
    repeats: list[tuple[int, ...]] = field(default_factory=list)


def carry_out(world: WorldPlan) -> list[Step]:
    """Do what ranks do: gather rows from blocks in arrival order; check what a rank may rely on."""
    steps = [Step() for _ in range(world.num_steps)]
    for rank in range(world.world_size):
        plan = world.rank(rank)
        queue = plan.queue
        blocks = plan.list_blocks(0, len(queue))
        assert all(np.array_equal(plan.frames_of(arrival), blocks[arrival]) for arrival in range(0, len(queue), 64))
        assert list(map(len, blocks)) == queue.num_rows.tolist()
        rows, begin = np.concatenate([*blocks, np.empty(0, dtype=np.int64)]), np.cumsum(queue.num_rows) - queue.num_rows
        batches = list(plan.batches())
        assert [batch.step for batch in batches] == list(range(world.num_steps))
        if not batches:
            continue
        span, row, frame, is_repeat = (
            np.concatenate([getattr(batch, name) for batch in batches])
            for name in ("span", "row", "frame", "is_repeat")
        )
        sizes = [len(batch.span) for batch in batches]
        step, num_needed = (np.repeat(of, sizes) for of in (range(len(sizes)), [one.num_needed for one in batches]))
        assert ((span >= 0) & (span < num_needed)).all()
        assert ((row >= 0) & (row < queue.num_rows[span])).all()
        assert np.array_equal(rows[begin[span] + row], frame)
        # Every block is done in some batch, and no later batch asks for it.
        done_in = np.full(len(queue), world.num_steps)
        for batch in reversed(batches):
            done_in[batch.done] = batch.step
        assert (done_in < world.num_steps).all()
        assert (step <= done_in[span]).all()
        named = _names(world, queue.dataset[span], queue.lap[span], queue.episode[span], frame)
        for name, number, is_again in zip(named, step.tolist(), is_repeat.tolist(), strict=True):
            (steps[number].repeats if is_again else steps[number].frames).append(name)
    return steps


def left_over(world: WorldPlan) -> list[tuple[int, ...]]:
    left = world.left_over()
    return _names(world, left.dataset, left.lap, left.episode, left.frame)


def _names(world: WorldPlan, dataset, lap, episode, frame) -> list[tuple[int, ...]]:
    columns = (episode, frame) if world.plan.index.shares is None else (dataset, lap, episode, frame)
    return list(zip(*(column.tolist() for column in columns), strict=True))
