"""The promises of the order, over random datasets, specs and histories of stops and restarts."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import (
    WORLDS,
    carry_out,
    frames_of_index,
    left_over,
    lengths,
    make_index,
    plan_resumed,
    plan_start,
    specs,
    start_or_assume,
)

from raypipe.plan import OrderSpec, OrderState, state_after

worlds = st.sampled_from(WORLDS)
sizes = st.integers(1, 7)


@settings(max_examples=30)
@given(lengths, specs, worlds, sizes, st.integers(0, 2**20))
def test_every_frame_is_emitted_once_and_ranks_have_equal_steps(frames, spec, world_size, per_lane, epoch):
    index = make_index(frames)
    world = start_or_assume(index, spec, world_size=world_size, per_lane=per_lane, epoch=epoch)

    steps = carry_out(world)

    emitted = [frame for step in steps for frame in step.frames]
    left = left_over(world)
    assert sorted(emitted + left) == frames_of_index(index)
    assert len(emitted) == world.frames_per_rank.sum()
    if spec.tail != "drop":
        # A batch of one frame of every lane has no place for the extra frames of some.
        num_extra = index.num_frames % world.plan.leg.lanes
        assert len(left) == (num_extra if spec.tail == "short" and per_lane == 1 else 0)
    if spec.tail != "short":
        full = per_lane * world.plan.leg.lanes
        assert all(len(step.frames) + len(step.repeats) == full for step in steps)


@settings(max_examples=20)
@given(lengths, specs, st.data())
def test_every_frame_is_emitted_once_over_any_history_of_restarts(frames, spec, data):
    index, world_size = make_index(frames), data.draw(worlds)
    world = start_or_assume(index, spec, world_size=world_size, per_lane=data.draw(sizes))
    emitted = []
    for _ in range(6):
        stop = data.draw(st.integers(0, world.num_steps))
        emitted += [frame for step in carry_out(world)[:stop] for frame in step.frames]
        if stop == world.num_steps:
            break
        state = state_after(world, stop)
        if not state.legs:
            # Still the start of the epoch, which may refuse a world size that a resume accepts.
            continue
        world_size = data.draw(st.sampled_from([*WORLDS, 5, 11]))
        spec = replace(spec, live_spans=data.draw(st.sampled_from([spec.live_spans, spec.live_spans, 5])))
        world = plan_resumed(state, index, spec, world_size=world_size, per_lane=data.draw(sizes))
    else:
        emitted += [frame for step in carry_out(world) for frame in step.frames]

    left = left_over(world)

    assert sorted(emitted + left) == frames_of_index(index)
    if spec.tail != "drop":
        assert len(left) < world.plan.leg.lanes


@settings(max_examples=12)
@given(lengths, specs, st.sampled_from([1, 2, 3, 4]), sizes)
def test_a_resume_after_every_batch_is_as_if_the_run_had_never_stopped(frames, spec, world_size, per_lane):
    index = make_index(frames[:10])
    world = start_or_assume(index, spec, world_size=world_size, per_lane=per_lane)
    whole = carry_out(world)

    for stop in range(world.num_steps):
        saved = json.loads(json.dumps(state_after(world, stop).to_dict()))
        resumed = plan_resumed(OrderState.from_dict(saved), index, spec, world_size=world_size, per_lane=per_lane)
        assert carry_out(resumed) == whole[stop:]
        assert resumed.plan.fingerprint == world.plan.fingerprint


@settings(max_examples=12)
@given(lengths, specs, st.sampled_from([4, 6, 12]), sizes)
def test_the_global_batch_is_the_same_set_on_every_world_size_that_divides_the_lanes(frames, spec, lanes, per_lane):
    index, spec = make_index(frames), replace(spec, lanes=lanes)
    fitting = [size for size in range(1, lanes + 1) if lanes % size == 0]
    worlds = [start_or_assume(index, spec, world_size=size, per_lane=per_lane) for size in fitting]

    steps = [[(sorted(s.frames), sorted(s.repeats)) for s in carry_out(world)] for world in worlds]

    assert all(other == steps[0] for other in steps)
    assert len({world.plan.fingerprint for world in worlds}) == 1


@settings(max_examples=20)
@given(lengths, specs, worlds)
def test_a_lane_has_at_most_live_spans_open_and_they_come_and_go_in_order(frames, spec, world_size):
    spec = replace(spec, tail="short")
    world = start_or_assume(make_index(frames), spec, world_size=world_size)
    for rank in range(world_size):
        plan = world.rank(rank)
        admitted, retired = plan.lives()
        for lane in world.lanes_of(rank):
            mine = np.flatnonzero(plan.queue.lane == lane)
            mine = mine[np.argsort(plan.queue.place[mine])]
            begin, end = admitted[mine], retired[mine]
            assert (np.diff(begin) >= 0).all()
            assert (np.diff(end) >= 0).all()
            live = [((begin <= position) & (position < end)).sum() for position in range(int(end.max(initial=0)))]
            assert max(live, default=0) <= (spec.live_spans if spec.shuffle else 1)
        held = [plan.queue.num_rows[(admitted <= at) & (at < retired)].sum() for at in range(retired.max(initial=0))]
        assert max(held, default=0) <= world.peak_live_frames()


@settings(max_examples=20)
@given(lengths, specs, worlds)
def test_frames_are_emitted_within_the_life_of_their_span(frames, spec, world_size):
    spec = replace(spec, tail="short")
    world = start_or_assume(make_index(frames), spec, world_size=world_size, per_lane=1)
    for rank in range(world_size):
        plan = world.rank(rank)
        admitted, retired = plan.lives()
        for batch in plan.batches():
            assert (admitted[batch.span] <= batch.step).all()
            assert (batch.step < retired[batch.span]).all()


@settings(max_examples=30)
@given(lengths, specs, worlds, st.integers(1, 9), st.data())
def test_frames_of_a_clip_follow_each_other_in_their_span_also_after_a_restart(
    frames, spec, world_size, clip_frames, data
):
    spec = replace(spec, clip_frames=clip_frames, shuffle=True, tail="short")
    index = make_index(frames)
    world = start_or_assume(index, spec, world_size=world_size)
    state = state_after(world, data.draw(st.integers(0, max(0, world.num_steps - 1))))
    world = plan_resumed(state, index, spec, world_size=data.draw(worlds))

    for rank in range(world.world_size):
        orders: dict[int, list[int]] = {}
        for batch in world.rank(rank).batches():
            for span, frame in zip(batch.span.tolist(), batch.frame.tolist(), strict=True):
                orders.setdefault(span, []).append(frame // clip_frames)

        for clips in orders.values():
            changes = sum(before != after for before, after in pairwise(clips))
            assert changes == len(set(clips)) - 1


def test_first_batch_waits_for_the_spans_of_its_own_frames_only():
    spec = OrderSpec(seed=0, live_spans=500, clip_frames=2, lanes=1)
    index = make_index([100 + i % 400 for i in range(1000)])
    world = plan_start(index, spec, world_size=1, per_lane=64)

    for step in (0, 1000):
        first = next(world.at(step).rank(0).batches())

        assert first.num_needed == len(np.unique(first.span))


@settings(max_examples=20)
@given(lengths, specs, worlds, st.data())
def test_leaving_an_episode_out_keeps_the_relative_order_of_the_other_spans(frames, spec, world_size, data):
    dropped = data.draw(st.integers(0, len(frames) - 1))
    rest = [episode for episode in range(len(frames)) if episode != dropped]
    # One lane: the spans are not cut to make lanes equal, so the queue is the order itself.
    spec = replace(spec, lanes=1)
    full = plan_start(make_index(frames), replace(spec, tail="short"), world_size=1).plan.queues.lane(0).spans
    part_index = make_index([frames[episode] for episode in rest], episodes=rest)

    part = plan_start(part_index, replace(spec, tail="short"), world_size=1).plan.queues.lane(0).spans

    kept = full.episode != dropped
    assert part.episode.tolist() == full.episode[kept].tolist()
    assert part.start.tolist() == full.start[kept].tolist()


@settings(max_examples=20)
@given(lengths, specs, worlds, worlds, st.data())
def test_a_restart_without_a_step_changes_nothing(frames, spec, world_size, other, data):
    index = make_index(frames)
    world = start_or_assume(index, spec, world_size=world_size)
    state = state_after(world, data.draw(st.integers(0, world.num_steps - 1)))

    between = plan_resumed(state, index, spec, world_size=other, per_lane=1) if state.legs else None

    if between:
        assert state_after(between, 0).legs == state.legs
        again = plan_resumed(state_after(between, 0), index, spec, world_size=world_size)
        assert again.plan.fingerprint == world.plan.fingerprint
        assert again.steps.position == state.legs[-1].frames_per_lane


@pytest.mark.parametrize(("seed", "epoch"), [(1, 0), (0, 1), (1, 1), (2**64 - 1, 7)])
def test_another_seed_or_epoch_is_another_order_of_the_same_frames(seed, epoch):
    index = make_index([20] * 12)
    base = carry_out(plan_start(index, OrderSpec(seed=0), world_size=2))

    other = carry_out(plan_start(index, OrderSpec(seed=seed), world_size=2, epoch=epoch))

    assert base != other
    assert sorted(f for s in base for f in s.frames) == sorted(f for s in other for f in s.frames)


def test_seed_and_epoch_do_not_stand_in_for_each_other():
    index = make_index([20] * 12)

    one = carry_out(plan_start(index, OrderSpec(seed=1), world_size=1, epoch=2))
    other = carry_out(plan_start(index, OrderSpec(seed=2), world_size=1, epoch=1))

    assert one != other


@settings(max_examples=20)
@given(lengths, specs, worlds, st.data())
def test_any_step_is_found_without_going_through_those_before(frames, spec, world_size, data):
    world = start_or_assume(make_index(frames), spec, world_size=world_size)
    step, rank = data.draw(st.integers(0, world.num_steps - 1)), data.draw(st.integers(0, world_size - 1))

    found = world.frames_at(step, rank)

    plan = world.rank(rank)
    batch = list(plan.batches())[step]
    assert found.frame.tolist() == batch.frame.tolist()
    assert found.episode.tolist() == plan.queue.episode[batch.span].tolist()
    assert found.is_repeat.tolist() == batch.is_repeat.tolist()


@settings(max_examples=20)
@given(lengths, st.sampled_from(["episode", 4]))
def test_without_shuffle_one_rank_reads_the_files_in_order(frames, span_frames):
    index = make_index(frames)
    spec = OrderSpec(seed=0, shuffle=False, span_frames=span_frames)

    steps = carry_out(plan_start(index, spec, world_size=1))

    assert [frame for step in steps for frame in step.frames] == frames_of_index(index)


@settings(max_examples=20)
@given(lengths, worlds)
def test_without_shuffle_every_lane_reads_a_contiguous_run(frames, world_size):
    index = make_index(frames)
    world = start_or_assume(index, OrderSpec(seed=0, shuffle=False), world_size=world_size)

    runs = []
    for rank in range(world_size):
        plan = world.rank(rank)
        runs += [
            (int(plan.queue.episode[s]), int(f)) for b in plan.batches() for s, f in zip(b.span, b.frame, strict=True)
        ]

    # Extras that a step of the others cannot hold come last in a lane, so lanes in turn are file order.
    assert runs == frames_of_index(index)


def test_wrap_repeats_the_frames_that_its_lane_emitted_last():
    # 2 lanes of 10 frames, 4 a step: the last step has 2 new frames a lane, and repeats them.
    world = plan_start(make_index([10, 10]), OrderSpec(seed=0, tail="wrap"), world_size=2, per_lane=4)

    last = list(world.rank(1).batches())[-1]

    assert last.is_repeat.tolist() == [False, False, True, True]
    assert last.frame[2:].tolist() == last.frame[:2].tolist()


def test_wrap_goes_round_where_a_lane_has_less_than_a_batch():
    world = plan_start(make_index([3]), OrderSpec(seed=0, tail="wrap"), world_size=1, per_lane=8)

    (batch,) = world.rank(0).batches()

    assert batch.frame.tolist() == [*batch.frame[:3], *batch.frame[:3], *batch.frame[:2]]
    assert batch.is_repeat.tolist() == [False] * 3 + [True] * 5
