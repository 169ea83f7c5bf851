"""A run goes on with any number of ranks and any batch: where lanes do not share out, the rest is a new leg."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_cases import carry_out, frames_of_index, left_over, lengths, make_index, specs

from raypipe.errors import ConfigError
from raypipe.plan import BatchSpec, Leg, OrderSpec, OrderState, plan_epoch, plan_world, resume, start, state_after

SPEC = OrderSpec(seed=3, live_spans=4)
BATCH = BatchSpec(size=4)


def serve(index, at, world_size, batch):
    plan = plan_epoch(index, at.spec, epoch=at.epoch, legs=at.legs)
    return plan_world(plan, world_size=world_size, batch=batch)


def go_on(state, index, spec, world_size, batch):
    saved = OrderState.from_dict(state.to_dict())
    return serve(index, resume(saved, index, spec, world_size=world_size, batch=batch), world_size, batch)


def emitted(steps):
    return [frame for step in steps for frame in step.frames]


def test_all_320_pairs_of_world_sizes_go_on_at_the_same_batch_of_a_rank():
    index = make_index([9, 14, 3, 20, 11, 8, 17, 30])
    for before, after in product(range(1, 17), range(1, 21)):
        first = serve(index, start(SPEC, world_size=before), before, BATCH)
        second = go_on(state_after(first, 1), index, SPEC, after, BATCH)
        following = go_on(state_after(second, second.num_steps), index, SPEC, after, BATCH)

        coming = int(second.frames_per_rank.sum()) + len(second.left_over())
        assert coming == index.num_frames - before * BATCH.size, (before, after)
        assert following.plan.epoch == 1
        assert following.num_steps


def test_lanes_that_do_not_share_out_over_a_batch_are_a_new_leg():
    index = make_index([40, 60])
    first = serve(index, start(SPEC, world_size=3), 3, BATCH)
    state = state_after(first, 1)

    assert resume(state, index, SPEC, world_size=1, batch=BATCH).legs == (*state.legs, Leg(lanes=1, live_spans=4))
    assert resume(state, index, SPEC, world_size=1, batch=BatchSpec(size=6)).legs == state.legs
    assert resume(state, index, SPEC, world_size=1, batch=BatchSpec(size=6, scope="global")).legs == state.legs


def test_an_epoch_whose_base_lanes_do_not_share_out_has_a_lane_a_rank():
    spec = replace(SPEC, lanes=8)

    assert start(spec, world_size=2, batch=BatchSpec(size=6), epoch=1).legs == (Leg(lanes=2, live_spans=4),)
    assert start(spec, world_size=2, batch=BatchSpec(size=8), epoch=1).legs == (Leg(lanes=8, live_spans=4),)
    assert start(spec, world_size=2, batch=BatchSpec(size=6), epoch=1).spec.lanes == 8


@settings(max_examples=25)
@given(lengths, specs, st.data())
def test_any_history_of_world_sizes_and_batches_goes_on_over_the_ends_of_epochs(frames, spec, data):
    spec, index = replace(spec, lanes="world_size"), make_index([*frames, 60])
    state, done = None, {}
    for _ in range(data.draw(st.integers(2, 7))):
        world_size, batch = data.draw(st.integers(1, 12)), BatchSpec(size=data.draw(st.integers(1, 5)))
        at = start(spec, world_size=world_size) if state is None else None
        world = serve(index, at, world_size, batch) if at else go_on(state, index, spec, world_size, batch)
        for _ in range(data.draw(st.integers(0, 2))):
            stop = data.draw(st.integers(0, world.num_steps))
            epoch = world.plan.epoch
            done.setdefault(epoch, []).extend(emitted(carry_out(world)[:stop]))
            state = state_after(world, stop)
            if stop == world.num_steps:
                state = replace(state, epoch=epoch + 1, legs=())
                assert sorted(done[epoch] + left_over(world)) == frames_of_index(index)
            world = go_on(state, index, spec, world_size, batch)
        state = state or state_after(world, 0)


@pytest.mark.parametrize(
    ("tail", "world_size", "batch", "shown"),
    [
        ("short", 31, BATCH, "30 frames cannot be shared out over 31 lanes"),
        ("drop", 2, BatchSpec(size=16), "tail='drop' leaves no batch"),
        ("short", 4, BatchSpec(size=6, scope="global"), "global_batch_size=6 does not share out over 4 lanes"),
    ],
)
def test_ranks_on_which_no_epoch_can_begin_are_refused_before_the_rest_of_this_one(tail, world_size, batch, shown):
    index, spec = make_index([10, 20]), replace(SPEC, tail=tail)
    first = serve(index, start(spec, world_size=1), 1, BATCH)

    with pytest.raises(ConfigError, match=shown):
        resume(state_after(first, 1), index, spec, world_size=world_size, batch=batch)


@given(lengths, specs, st.integers(1, 4))
def test_what_is_left_over_is_counted_without_being_listed(frames, spec, world_size):
    spec, index = replace(spec, lanes=world_size), make_index(frames)
    assume(index.num_frames >= 4 * world_size)
    world = plan_world(plan_epoch(index, spec, epoch=0), world_size=world_size, batch=BatchSpec(size=3))

    assert world.num_left_over == len(world.left_over())


def test_a_plan_is_printed_in_a_few_lines():
    spec = replace(SPEC, lanes=2, clip_frames=4, tail="drop")
    world = plan_world(plan_epoch(make_index((9, 8, 20)), spec, epoch=1), world_size=2, batch=BATCH)

    assert str(world).splitlines() == [
        "epoch 1, shuffled, seed 3",
        "  steps       4 of 4 frames on each rank, the end 'drop'",
        "  ranks       2, with 1 lane each",
        "  frames      32 to emit",
        f"  spans       {int(world.spans_per_rank.sum())}, whole episodes",
        "  live spans  4 in each lane",
        "  clips       of 4 frames",
        "  left over   5 frames",
    ]
