import json
from dataclasses import replace

import numpy as np
import pytest
from plan_cases import carry_out, make_index, plan_resumed, plan_start

from raypipe.errors import ConfigError, ResumeError
from raypipe.plan import (
    Leg,
    OrderSpec,
    OrderState,
    SelectionSpec,
    index_episodes,
    mix_indexes,
    plan_epoch,
    resume,
    start,
    state_after,
    state_at,
    state_of,
)

SPEC = OrderSpec(seed=7, live_spans=4)
INDEX = make_index([9, 14, 3, 20, 11, 8, 17, 6])


def state_mid_epoch(steps=3, world_size=4):
    return state_after(plan_start(INDEX, SPEC, world_size=world_size), steps)


def test_state_is_a_small_json_object():
    saved = state_mid_epoch().to_dict()

    assert json.loads(json.dumps(saved)) == saved
    assert saved == {
        "order_version": 1,
        "fingerprint": "robot-1",
        "seed": 7,
        "epoch": 0,
        "order": {
            "shuffle": True,
            "live_spans": 4,
            "span_frames": "episode",
            "tail": "short",
            "lanes": 4,
            "selection": saved["order"]["selection"],
        },
        "legs": [{"lanes": 4, "live_spans": 4, "frames_per_lane": 9}],
    }
    assert OrderState.from_dict(saved) == state_mid_epoch()


@pytest.mark.parametrize("done_before", [0, 2])
def test_state_after_the_last_batch_stands_at_the_next_epoch(done_before):
    world = plan_start(INDEX, SPEC, world_size=4).at(done_before)

    state = state_after(world, world.num_steps)

    assert (state.epoch, state.legs) == (1, ())


def test_state_has_no_empty_legs():
    state = state_mid_epoch()

    other = plan_resumed(state, INDEX, SPEC, world_size=3)

    assert other.plan.legs == (*state.legs, Leg(lanes=3, live_spans=4))
    assert state_of(other.plan) == state
    assert state_after(other, 1).legs == (*state.legs, Leg(lanes=3, live_spans=4, frames_per_lane=3))


def test_a_world_size_that_divides_the_lanes_goes_on_in_the_same_leg():
    state = state_mid_epoch()

    assert resume(state, INDEX, SPEC, world_size=2).legs == state.legs
    assert resume(state, INDEX, SPEC, world_size=8).legs == (*state.legs, Leg(lanes=8, live_spans=4))


def test_other_live_spans_are_a_new_leg_on_the_same_lanes():
    state = state_mid_epoch()

    resumed = resume(state, INDEX, replace(SPEC, live_spans=9), world_size=2)

    assert resumed.legs == (*state.legs, Leg(lanes=4, live_spans=9))


def test_the_next_epoch_goes_back_to_the_lanes_of_the_first_start():
    world = plan_start(INDEX, SPEC, world_size=4)
    done = state_after(world, world.num_steps)

    assert resume(done, INDEX, SPEC, world_size=2).legs == (Leg(lanes=4, live_spans=4),)
    assert resume(done, INDEX, SPEC, world_size=3).legs == (Leg(lanes=3, live_spans=4),)
    assert resume(done, INDEX, SPEC, world_size=3).spec.lanes == 4


@pytest.mark.parametrize(
    ("index", "spec", "shown"),
    [
        (
            make_index([9], fingerprint="robot-2"),
            SPEC,
            "order fingerprint is 'robot-1' in the state and 'robot-2' here",
        ),
        (INDEX, replace(SPEC, seed=8), "seed is 7 in the state and 8 here"),
        (INDEX, replace(SPEC, tail="drop"), "tail is 'short' in the state and 'drop' here"),
        (INDEX, replace(SPEC, span_frames=5), "span_frames is 'episode' in the state and 5 here"),
        (INDEX, replace(SPEC, clip_frames=2), "clip_frames is 'span' in the state and 2 here"),
        (INDEX, replace(SPEC, shuffle=False), "shuffle is True in the state and False here"),
        (INDEX, replace(SPEC, lanes=8), "lanes is 4 in the state and 8 here"),
        (make_index([9, 14]), SPEC, r"selection is '8 runs, 88 frames, \w+' in the state and '2 runs, 23 frames, \w+'"),
    ],
)
def test_a_foreign_state_is_an_error_that_shows_both_sides(index, spec, shown):
    with pytest.raises(ResumeError, match=shown):
        resume(state_mid_epoch(), index, spec, world_size=4)


def test_span_length_selection_and_tail_may_change_between_epochs():
    world = plan_start(INDEX, SPEC, world_size=4)
    done = state_after(world, world.num_steps)
    fewer = index_episodes(
        "robot", np.arange(4), np.full(4, 9), fingerprint="robot-1", selection=SelectionSpec(episodes=(1, 2))
    )
    spec = replace(SPEC, span_frames=5, tail="drop", lanes=2)

    resumed = resume(done, fewer, spec, world_size=2)

    assert (resumed.spec, resumed.epoch, resumed.legs) == (spec, 1, (Leg(lanes=2, live_spans=4),))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"order_version": 99}, "order_version is 99 in the state and 1 here"),
        ({"legs": [{"lanes": 4}]}, "not a state of a raypipe order"),
        ({"order": {}}, "not a state of a raypipe order .*selection"),
        ({"legs": [{"lanes": 0, "live_spans": 4}]}, "lanes must be an integer of at least 1"),
    ],
)
def test_what_is_not_a_state_is_a_resume_error(change, shown):
    with pytest.raises(ResumeError, match=shown):
        OrderState.from_dict({**state_mid_epoch().to_dict(), **change})


@pytest.mark.parametrize("name", ["size", "frames", "position"])
@pytest.mark.parametrize("number", [-1, 2**63, 10**30])
def test_a_number_of_a_mixture_that_is_none_is_a_resume_error(name, number):
    mixture = mix_indexes([make_index([9, 14])], [20])
    saved = state_after(plan_start(mixture, SPEC, world_size=4), 1).to_dict()
    saved["mixture"]["members"][0][name] = number

    with pytest.raises(ResumeError, match=f"not a state of a raypipe order .*{name} must be an integer"):
        OrderState.from_dict(saved)


def test_an_epoch_that_64_bits_cannot_count_is_an_error():
    mixture = mix_indexes([make_index([9, 14])], [20])

    with pytest.raises(ConfigError, match=r"is after \d+ frames of a dataset, and \d+ are the most"):
        plan_start(mixture, SPEC, world_size=4, epoch=2**62)


def test_a_leg_that_emitted_more_than_there_is_is_a_resume_error():
    with pytest.raises(ResumeError, match="has emitted 23 frames per lane, but this plan has 22"):
        plan_epoch(INDEX, SPEC, epoch=0, legs=(Leg(lanes=4, live_spans=4, frames_per_lane=23),))


@pytest.mark.parametrize("number", [0, 1])
def test_a_leg_of_more_lanes_than_there_are_frames_is_a_resume_error_at_once(number):
    state = state_mid_epoch()
    legs = [*state.legs, *state.legs]
    legs[number] = replace(state.legs[0], lanes=INDEX.num_frames + 1)

    with pytest.raises(ResumeError, match=r"the saved state shares epoch 0 out over 89 lanes, .* has 88 frames"):
        resume(replace(state, legs=tuple(legs)), INDEX, SPEC, world_size=4)


def test_more_steps_than_are_left_is_an_error():
    world = plan_start(INDEX, SPEC, world_size=4)

    with pytest.raises(ConfigError, match=f"between 0 and the {world.num_steps} steps left"):
        state_after(world, world.num_steps + 1)


def test_a_lost_state_is_rebuilt_from_the_number_of_steps():
    world = plan_start(INDEX, SPEC, world_size=4)

    assert state_at(world, 3) == state_mid_epoch(3)
    assert state_at(world, 2 * world.num_steps + 3) == replace(state_mid_epoch(3), epoch=2)
    assert state_at(world, world.num_steps).legs == ()


def test_fewer_frames_than_lanes_near_the_end_are_left_over_and_not_an_error():
    world = plan_start(INDEX, SPEC, world_size=4, per_lane=1)
    state = state_after(world, world.num_steps - 1)

    wide = plan_resumed(state, INDEX, SPEC, world_size=7, per_lane=1)

    assert wide.num_steps == 0
    assert carry_out(wide) == []
    assert len(wide.left_over()) == 4
    assert state_after(wide, 0) == state
    assert state_after(wide, 0).next_epoch().epoch == 1
    assert len(wide.rank(0).queue) == 0


def test_start_resolves_the_lanes_once():
    assert start(SPEC, world_size=6).spec.lanes == 6
    assert start(replace(SPEC, lanes=4), world_size=6).spec.lanes == 4
