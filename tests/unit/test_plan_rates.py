"""Every n-th frame and weights: exact counts of every frame, on any number of ranks and over any restarts."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import (
    WORLDS,
    carry_out,
    left_over,
    lengths,
    make_index,
    plan_resumed,
    plan_start,
    specs,
    start_or_assume,
    times_of_index,
    weighted,
    weights_of,
)

from raypipe.errors import ConfigError, ResumeError
from raypipe.plan import (
    OrderSpec,
    OrderState,
    describe_selection,
    follow_state,
    mix_indexes,
    plan_epoch,
    resume,
    state_after,
)
from raypipe.plan.rates import Rates
from raypipe.plan.spans import order_frames

worlds = st.sampled_from(WORLDS)
SPEC = OrderSpec(seed=5)


@st.composite
def weights_by_frame(draw, frames):
    """Draw weights of episodes or of frames, and return them as weights of all frames, by episode and frame."""
    weight = st.sampled_from([0.0, 1.0, 1.0, 3.0]) | st.floats(0.001, 50)
    given = draw(weights_of(frames, weight).filter(any))
    each = np.repeat(given, frames) if len(given) == len(frames) else np.array(given)
    places = [(episode, frame) for episode, length in enumerate(frames) for frame in range(length)]
    return given, dict(zip(places, each.tolist(), strict=True))


@settings(max_examples=60)
@given(lengths, st.data(), st.sampled_from([1, 1, 2, 3, 7]), st.integers(0, 2**20), st.integers(0, 99))
def test_counts_are_exact_to_one_frame_of_each_frame_episode_and_weight(frames, data, every, epoch, seed):
    given_weights, weight_of = data.draw(weights_by_frame(frames))
    has_weight = [place for place, weight in weight_of.items() if weight]
    size = len(has_weight) // every
    if not size:
        return
    index = make_index(frames, weights=given_weights, every=every)

    found = times_of_index(index, OrderSpec(seed=seed), epoch)

    rate = size / sum(weight_of.values())
    times, near = Counter(found), 1 + 1e-3
    assert index.num_frames == len(found) == size
    assert set(times) <= set(has_weight)
    assert all(abs(times[place] - weight * rate) < near for place, weight in weight_of.items())
    by_episode = Counter(episode for episode, _ in found)
    for episode in range(len(frames)):
        part = sum(weight for (one, _), weight in weight_of.items() if one == episode) * rate
        assert abs(by_episode[episode] - part) < near
    if len(given_weights) == len(frames):
        by_weight = Counter(given_weights[episode] for episode, _ in found)
        for weight in set(given_weights):
            part = sum(one for one in weight_of.values() if one == weight) * rate
            assert abs(by_weight[weight] - part) < near


@settings(max_examples=15)
@given(lengths, st.data(), st.integers(0, 99))
def test_over_epochs_every_frame_comes_as_often_as_its_weight_says(frames, data, seed):
    given_weights, weight_of = data.draw(weights_by_frame(frames[:6]))
    index = make_index(frames[:6], weights=given_weights)
    rate = sum(1 for weight in weight_of.values() if weight) / sum(weight_of.values())

    times = Counter(place for epoch in range(120) for place in times_of_index(index, OrderSpec(seed=seed), epoch))

    assert all(abs(times[place] - 120 * weight * rate) < 4 for place, weight in weight_of.items())


@given(lengths, st.integers(2, 9), st.integers(0, 30))
def test_every_nth_frame_is_n_apart_and_its_phase_moves_with_the_epoch(frames, every, epoch):
    # With fewer frames than `every` times itself what is left of the division makes gaps longer.
    frames = [*frames, 100]
    index = make_index(frames, every=every)

    found = times_of_index(index, SPEC, epoch)

    assert len(set(found)) == len(found) == sum(frames) // every
    gaps = [two[1] - one[1] for one, two in pairwise(found) if one[0] == two[0]]
    assert set(gaps) <= {every, every + 1}
    assert gaps.count(every + 1) <= sum(frames) % every
    phases = {times_of_index(index, SPEC, one)[0] for one in range(20)}
    assert len(phases) > 1


@pytest.mark.parametrize("weights", [None, [1.0, 2.5, 0.7] * 1000], ids=["every", "weights"])
def test_no_epoch_of_millions_of_frames_has_one_more_or_less(weights):
    index = make_index([1401] * 3000, weights=weights, every=3)

    found = {
        int(plan_epoch(index, OrderSpec(seed=0, lanes=1), epoch=epoch).frames_per_lane.sum()) for epoch in range(60)
    }

    assert found == {1401 * 1000}


@settings(max_examples=30)
@given(lengths, specs, worlds, st.floats(0.1, 9))
def test_equal_weights_are_no_weights(frames, spec, world_size, weight):
    plain = start_or_assume(make_index(frames), spec, world_size=world_size)
    by_episode = plan_start(make_index(frames, weights=[weight] * len(frames)), spec, world_size=world_size)
    by_frame = plan_start(make_index(frames, weights=[weight] * sum(frames)), spec, world_size=world_size)

    assert plain.plan.fingerprint == by_episode.plan.fingerprint == by_frame.plan.fingerprint


@settings(max_examples=40)
@given(weighted(), specs, worlds, st.integers(1, 7), st.integers(0, 2**20))
def test_every_frame_is_emitted_its_number_of_times_and_ranks_have_equal_steps(
    index, spec, world_size, per_lane, epoch
):
    world = start_or_assume(index, spec, world_size=world_size, per_lane=per_lane, epoch=epoch)

    steps = carry_out(world)

    emitted = [frame for step in steps for frame in step.frames]
    assert sorted(emitted + left_over(world)) == times_of_index(index, spec, epoch)
    assert len(emitted) == world.frames_per_rank.sum()


@settings(max_examples=30)
@given(weighted(), specs, st.data())
def test_every_frame_is_emitted_its_number_of_times_over_any_history_of_restarts(index, spec, data):
    world = start_or_assume(index, spec, world_size=data.draw(worlds), per_lane=data.draw(st.integers(1, 7)))
    emitted = []
    for _ in range(5):
        stop = data.draw(st.integers(0, world.num_steps))
        emitted += [frame for step in carry_out(world)[:stop] for frame in step.frames]
        if stop == world.num_steps:
            break
        state = state_after(world, stop)
        if not state.legs:
            continue
        spec = replace(spec, live_spans=data.draw(st.sampled_from([spec.live_spans, 5])))
        world_size, per_lane = data.draw(st.sampled_from([*WORLDS, 5, 11])), data.draw(st.integers(1, 7))
        world = plan_resumed(state, index, spec, world_size=world_size, per_lane=per_lane)
    else:
        emitted += [frame for step in carry_out(world) for frame in step.frames]

    assert sorted(emitted + left_over(world)) == times_of_index(index, spec)


@settings(max_examples=15)
@given(weighted(most=10), specs, st.sampled_from([1, 2, 3, 4]), st.integers(1, 5))
def test_a_resume_after_every_batch_is_as_if_the_run_had_never_stopped(index, spec, world_size, per_lane):
    world = start_or_assume(index, spec, world_size=world_size, per_lane=per_lane, epoch=2)
    whole = carry_out(world)

    for stop in range(world.num_steps):
        saved = json.loads(json.dumps(state_after(world, stop).to_dict()))
        resumed = plan_resumed(OrderState.from_dict(saved), index, spec, world_size=world_size, per_lane=per_lane)
        assert carry_out(resumed) == whole[stop:]
        assert resumed.plan.fingerprint == world.plan.fingerprint


@settings(max_examples=25)
@given(st.data(), specs, worlds, st.integers(0, 50))
def test_shares_of_a_mixture_stay_exact_where_its_datasets_have_weights(data, spec, world_size, epoch):
    members = [
        data.draw(weighted(name=f"robot-{i}", fingerprint=f"data-{i}", least=2)) for i in range(data.draw(worlds))
    ]
    frames = [data.draw(st.integers(1, 2 * member.num_frames)) for member in members]
    index = mix_indexes(members, frames)
    world = start_or_assume(index, replace(spec, tail="short"), world_size=world_size, per_lane=2, epoch=epoch)

    emitted = [frame for step in carry_out(world) for frame in step.frames] + left_over(world)

    assert len(set(emitted)) == len(emitted)
    assert Counter(dataset for dataset, *_ in emitted) == dict(enumerate(frames))


@settings(max_examples=25)
@given(weighted(least=2), st.integers(1, 40), st.integers(0, 99))
def test_epochs_of_a_mixture_go_through_the_laps_of_a_weighted_dataset_one_after_the_other(index, share, seed):
    # Not more than some 40 epochs.
    share = max(share, index.num_frames // 20)
    mixed, spec = mix_indexes([index], [share]), OrderSpec(seed=seed, lanes=1)
    num_epochs = 2 * index.num_frames // share + 1
    laps = num_epochs * share // index.num_frames

    found = Counter()
    for epoch in range(num_epochs):
        world = plan_start(mixed, spec, world_size=1, per_lane=1, epoch=epoch)
        assert world.plan.queues.spans.count.sum() == share
        parts = 1 if mixed.rates is None else int(mixed.rates.laps[0])
        for step in carry_out(world):
            found.update((lap // parts, episode, frame) for _, lap, episode, frame in step.frames)

    for lap in range(laps):
        taken = sorted((e, f) for (one, e, f), times in found.items() if one == lap for _ in range(times))
        assert taken == times_of_index(index, OrderSpec(seed=seed), lap)


@pytest.mark.parametrize("span_frames", ["episode", 16])
def test_one_very_large_weight_costs_no_more_than_the_frames_that_it_gives(monkeypatch, span_frames):
    weights = np.ones((40, 200))
    weights[:, 17] = 100
    spec = OrderSpec(seed=5, live_spans=16, clip_frames=4, span_frames=span_frames, lanes=1)
    looked_at, position = [], Rates.position
    monkeypatch.setattr(Rates, "position", lambda *given: looked_at.append(len(given[1])) or position(*given))
    index = make_index([200] * 40, weights=weights.ravel())

    plan = plan_epoch(index, spec, epoch=0)
    counted = sum(looked_at)
    spans = [plan.lane(number).spans for number in range(len(plan.frames_per_lane))]
    emitted = [
        pair
        for one in spans
        for pair in zip(
            np.repeat(one.episode, one.count).tolist(), order_frames(one, plan.keys)[0].tolist(), strict=True
        )
    ]

    assert index.rates.parts.max() > 60
    # Where a frame begins and where it ends, when spans are cut, and again when they are ordered.
    assert counted <= 2 * (index.num_frames + weights.size)
    assert sum(looked_at) <= 4 * (index.num_frames + weights.size)
    assert sorted(emitted) == times_of_index(index, spec, 0)


def test_another_weight_is_another_selection_within_an_epoch_and_may_come_between_epochs():
    frames = [10, 20, 30]
    before, after = make_index(frames, weights=[1, 2, 3]), make_index(frames, weights=[1, 2, 4])
    world = plan_start(before, SPEC, world_size=2)

    assert describe_selection(before) != describe_selection(after)
    with pytest.raises(ResumeError, match=r"selection is .* It may change between epochs only"):
        plan_resumed(state_after(world, 2), after, SPEC, world_size=2)
    between = state_after(world, world.num_steps)
    assert resume(between, after, SPEC, world_size=2).epoch == 1


def test_another_weight_in_a_mixture_is_told_and_may_come_between_epochs_where_that_is_allowed():
    one, two = (make_index([10, 20], weights=weights) for weights in ([1, 2], [1, 3]))
    before, after = mix_indexes([one], [30]), mix_indexes([two], [30])
    world = plan_start(before, SPEC, world_size=1)
    state = state_after(world, world.num_steps)

    with pytest.raises(ResumeError, match="selected frames of 'robot'"):
        follow_state(state, after)
    state, index = follow_state(state, after, allow_mixture_change=True)
    assert plan_resumed(state, index, SPEC, world_size=1).plan.epoch == 1


@pytest.mark.parametrize(
    ("weights", "every", "message"),
    [
        ([0, 0, 0], 1, "all weights of the selected frames of dataset 'robot' are 0"),
        ([1, 2], 1, "there are 2 weights for dataset 'robot', which has 3 episodes of 60 frames"),
        ([0, 1, 0], 21, "every=21 leaves no frame of dataset 'robot': the selection has 20 frames"),
    ],
)
def test_weights_that_leave_nothing_or_do_not_fit_are_told(weights, every, message):
    with pytest.raises(ConfigError, match=message):
        make_index([10, 20, 30], weights=weights, every=every)
