"""Mixtures: exact shares, equal visits over epochs, even mixing, and every promise of the order."""

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from plan_cases import (
    WORLDS,
    carry_out,
    left_over,
    make_index,
    mixtures,
    plan_resumed,
    plan_start,
    specs,
    start_or_assume,
)

from raypipe.errors import ConfigError, ResumeError
from raypipe.plan import (
    OrderSpec,
    OrderState,
    SelectionSpec,
    follow_state,
    index_episodes,
    lap_sizes,
    mix_indexes,
    plan_epoch,
    resume,
    split_frames,
    start,
    state_after,
    state_at,
)

worlds = st.sampled_from(WORLDS)
sizes = st.integers(1, 7)


def emitted_of(world):
    return [frame for step in carry_out(world) for frame in step.frames] + left_over(world)


def mix(*members, frames):
    indexes = [make_index(one, name=f"robot-{i}", fingerprint=f"data-{i}") for i, one in enumerate(members)]
    return mix_indexes(indexes, frames)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.integers(0, 10**9))
@example([0.1] * 10, 10)
@example([1 / 3] * 3, 10**9)
def test_weights_share_frames_out_exactly_to_one(weights, num_frames):
    assume(sum(weights) > 0)

    frames = split_frames(weights, num_frames)

    assert sum(frames) == num_frames
    total = sum(map(Fraction, weights))
    for weight, part in zip(weights, frames, strict=True):
        assert abs(part - Fraction(weight) * num_frames / total) < 1


def test_the_largest_remainders_are_rounded_up_and_the_first_of_equal_ones():
    # 4.5, 2.7 and 1.8 of 9; a third of 10 each.
    assert split_frames([5, 3, 2], 9) == (4, 3, 2)
    assert split_frames([1, 1, 1], 10) == (4, 3, 3)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf")]])
def test_weights_that_share_nothing_out_are_refused(weights):
    with pytest.raises(ConfigError, match="weights must be"):
        split_frames(weights, 10)


def test_a_dataset_that_would_give_nothing_is_refused_by_name():
    with pytest.raises(ConfigError, match="'robot-1' would give 0 frames"):
        mix([3], [4], frames=[7, 0])


@settings(max_examples=18)
@given(mixtures(), specs, worlds, sizes, st.integers(0, 50))
def test_every_epoch_has_the_exact_share_of_every_dataset_and_equal_steps(index, spec, world_size, per_lane, epoch):
    world = start_or_assume(index, spec, world_size=world_size, per_lane=per_lane, epoch=epoch)

    emitted = emitted_of(world)

    counts = Counter(dataset for dataset, *_ in emitted)
    assert [counts[i] for i in range(len(index.dataset_names))] == list(index.shares.frames)
    assert len(set(emitted)) == len(emitted)


@settings(max_examples=18)
@given(mixtures(), specs, st.integers(1, 6))
def test_over_epochs_every_frame_of_a_dataset_is_visited_equally_often(index, spec, num_epochs):
    spec = replace(spec, tail="short", lanes=1)
    visits = [
        frame
        for epoch in range(num_epochs)
        for frame in emitted_of(plan_start(index, spec, world_size=1, per_lane=64, epoch=epoch))
    ]

    assert len(set(visits)) == len(visits), "a frame comes once in a lap"
    counts = Counter((dataset, episode, frame) for dataset, _, episode, frame in visits)
    for number, size in enumerate(lap_sizes(index)):
        mine = [count for (dataset, *_), count in counts.items() if dataset == number]
        seen = mine + [0] * (int(size) - len(mine))
        assert max(seen) - min(seen) <= 1


@settings(max_examples=12)
@given(mixtures(), specs)
def test_which_frames_an_epoch_takes_depends_neither_on_spans_nor_on_ranks(index, spec):
    spec = replace(spec, tail="short", shuffle=True)
    one = emitted_of(plan_start(index, replace(spec, lanes=1, span_frames="episode"), world_size=1, epoch=3))
    other = emitted_of(start_or_assume(index, replace(spec, span_frames=4), world_size=3, epoch=3))

    assert sorted(one) == sorted(other)


@settings(max_examples=25)
@given(mixtures(), st.integers(0, 2**32), st.sampled_from(["episode", 1, 5]), st.integers(0, 5))
def test_spans_come_so_that_at_every_prefix_each_dataset_has_its_share(index, seed, span_frames, epoch):
    spec = OrderSpec(seed=seed, span_frames=span_frames, lanes=1)
    spans = plan_start(index, spec, world_size=1, epoch=epoch).plan.queues.lane(0).spans

    shares, total = np.array(index.shares.frames), index.num_frames
    length = spans.stop - spans.start
    longest = np.array([length[spans.dataset == i].max() for i in range(len(shares))])
    emitted = np.cumsum(length)
    for number, share in enumerate(shares):
        mine = np.cumsum(np.where(spans.dataset == number, length, 0))
        bound = longest[number] + share / total * longest.sum()
        assert (np.abs(mine - emitted * share / total) <= bound).all()


@settings(max_examples=18)
@given(mixtures(), specs, worlds, sizes)
def test_at_every_step_each_dataset_has_its_share_within_the_live_window(index, spec, world_size, per_lane):
    spec = replace(spec, shuffle=True, tail="short")
    world = start_or_assume(index, spec, world_size=world_size, per_lane=per_lane)

    steps = carry_out(world)

    # The bound that the README states: what the lanes hold live, and the bound of the spans' order.
    spans, shares = world.plan.queues.spans, np.array(index.shares.frames)
    longest = int(spans.count.max())
    lanes, total = world.plan.leg.lanes, index.num_frames
    counts, emitted = np.zeros(len(shares)), 0
    for step in steps:
        counts += np.bincount([dataset for dataset, *_ in step.frames], minlength=len(shares))
        emitted += len(step.frames)
        parts = shares / total
        bound = parts * lanes * (spec.live_spans + 2) * longest + longest + parts * len(shares) * longest
        assert (np.abs(counts - emitted * parts) <= bound).all()


@settings(max_examples=8)
@given(mixtures(most_frames=90), specs, st.sampled_from([1, 2, 3, 4]), st.integers(2, 7))
def test_a_mixture_resumes_after_every_batch_as_if_it_had_never_stopped(index, spec, world_size, per_lane):
    world = start_or_assume(index, spec, world_size=world_size, per_lane=per_lane, epoch=2)
    whole = carry_out(world)

    for stop in range(world.num_steps):
        saved = json.loads(json.dumps(state_after(world, stop).to_dict()))
        resumed = plan_resumed(OrderState.from_dict(saved), index, spec, world_size=world_size, per_lane=per_lane)
        assert carry_out(resumed) == whole[stop:]
        assert resumed.plan.fingerprint == world.plan.fingerprint


@settings(max_examples=12)
@given(mixtures(), specs, st.data())
def test_a_mixture_is_emitted_exactly_once_over_any_history_of_restarts(index, spec, data):
    world_size = data.draw(worlds)
    whole = start_or_assume(index, spec, world_size=world_size, per_lane=data.draw(sizes), epoch=1)
    expected, world, emitted = sorted(emitted_of(whole)), whole, []
    for _ in range(5):
        stop = data.draw(st.integers(0, world.num_steps))
        emitted += [frame for step in carry_out(world)[:stop] for frame in step.frames]
        if stop == world.num_steps:
            break
        state = state_after(world, stop)
        if not state.legs:
            continue
        world_size = data.draw(st.sampled_from([*WORLDS, 5, 11]))
        world = plan_resumed(state, index, spec, world_size=world_size, per_lane=data.draw(sizes))
    else:
        emitted += [frame for step in carry_out(world) for frame in step.frames]

    assert sorted(emitted + left_over(world)) == expected


@settings(max_examples=12)
@given(mixtures(), specs, st.sampled_from([4, 6, 12]), sizes)
def test_global_batches_of_a_mixture_are_equal_on_all_world_sizes_that_divide_the_lanes(index, spec, lanes, per_lane):
    spec = replace(spec, lanes=lanes)
    fitting = [size for size in range(1, lanes + 1) if lanes % size == 0]
    plans = [start_or_assume(index, spec, world_size=size, per_lane=per_lane) for size in fitting]

    steps = [[(sorted(s.frames), sorted(s.repeats)) for s in carry_out(world)] for world in plans]

    assert all(other == steps[0] for other in steps)


@settings(max_examples=12)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=12), st.integers(0, 2**32), st.integers(0, 9))
def test_a_mixture_of_one_whole_dataset_has_the_order_of_the_dataset(frames, seed, epoch):
    alone = make_index(frames, name="a")
    mixed = mix_indexes([alone], [alone.num_frames])
    spec = OrderSpec(seed=seed, span_frames=7)

    one = carry_out(plan_start(alone, spec, world_size=2, epoch=epoch))
    other = carry_out(plan_start(mixed, spec, world_size=2, epoch=epoch))

    assert [[frame[2:] for frame in step.frames] for step in other] == [step.frames for step in one]


def test_every_epoch_of_a_mixture_has_as_many_steps_so_a_lost_state_is_rebuilt():
    index = mix([30, 20], [5], frames=[17, 40])
    world = plan_start(index, OrderSpec(seed=4), world_size=2)

    rebuilt = state_at(world, 3 * world.num_steps + 2)

    assert (rebuilt.epoch, rebuilt.legs) == (3, state_after(world.at(0), 2).legs)
    assert plan_start(index, OrderSpec(seed=4), world_size=2, epoch=3).num_steps == world.num_steps


def test_a_frame_that_comes_twice_in_an_epoch_has_two_augmentation_seeds():
    index = mix([6], frames=[12])
    plan = plan_start(index, OrderSpec(seed=0), world_size=1).plan
    frames = np.arange(6)
    zeros = np.zeros(6, dtype=np.int64)

    seeds = [plan.keys.augment_seeds(zeros, zeros + lap, zeros, frames) for lap in (0, 1)]

    assert len(np.unique(np.concatenate(seeds))) == 12


def saved_state(index, *, epoch=2, stop=0, spec=None):
    world = plan_start(index, spec or OrderSpec(seed=1), world_size=2, epoch=epoch)
    return OrderState.from_dict(json.loads(json.dumps(state_after(world, stop).to_dict())))


def test_a_changed_mixture_is_refused_and_all_differences_are_shown():
    state = saved_state(mix([9], [8], [7], frames=[10, 10, 4]))
    other = [make_index([9], name="robot-0", fingerprint="data-0"), make_index([8, 8], name="robot-1", fingerprint="x")]
    other.append(make_index([7], name="robot-9", fingerprint="data-9"))

    with pytest.raises(ResumeError) as caught:
        follow_state(state, mix_indexes(other, [11, 10, 4]))

    message = str(caught.value)
    for line in (
        "'robot-2' is in the state and not here",
        "'robot-9' is here and not in the state",
        "frames per epoch of 'robot-0': 10 in the state, 11 here",
        "data of 'robot-1': data-1 in the state, x here",
        "allow_mixture_change=True",
    ):
        assert line in message


def test_a_mixture_does_not_change_within_an_epoch_even_where_it_may_between():
    state = saved_state(mix([9], [8], frames=[10, 10]), stop=2)

    with pytest.raises(ResumeError, match="within epoch 2: go on with the mixture"):
        follow_state(state, mix([9], [8], frames=[11, 10]), allow_mixture_change=True)


def test_another_revision_is_a_change_where_both_are_known():
    indexes = [make_index([9], name="a")]
    state = saved_state(mix_indexes(indexes, [9], revisions=["abc"]))

    follow_state(state, mix_indexes(indexes, [9]))
    with pytest.raises(ResumeError, match="revision of 'a': abc in the state, def here"):
        follow_state(state, mix_indexes(indexes, [9], revisions=["def"]))


def test_a_state_of_a_single_dataset_is_none_of_a_mixture():
    alone = make_index([9], name="robot-0", fingerprint="data-0")
    with pytest.raises(ResumeError, match="'a single dataset' in the state and 'a mixture' here"):
        resume(saved_state(alone), mix([9], frames=[9]), OrderSpec(seed=1), world_size=2)


@settings(max_examples=12)
@given(mixtures(), st.integers(0, 2**32), st.integers(1, 4), st.data())
def test_visits_stay_equal_over_a_change_of_weights(index, seed, epoch, data):
    spec, num = OrderSpec(seed=seed, lanes=1), len(index.dataset_names)
    frames = data.draw(st.lists(st.integers(1, 60), min_size=num, max_size=num))
    pairs = zip(index.shares.members, frames, strict=True)
    changed = replace(index, shares=replace(index.shares, members=tuple(replace(one, frames=n) for one, n in pairs)))
    visits = [f for e in range(epoch) for f in emitted_of(plan_start(index, spec, world_size=1, epoch=e))]

    state, changed = follow_state(saved_state(index, epoch=epoch, spec=spec), changed, allow_mixture_change=True)
    for later in range(epoch, epoch + 3):
        todo = start(spec, world_size=1, epoch=later)
        spans = plan_epoch(changed, todo.spec, epoch=later, legs=todo.legs).queues.spans
        columns = (spans.dataset, spans.lap, spans.episode, spans.start, spans.stop)
        for dataset, lap, episode, begin, end in zip(*(column.tolist() for column in columns), strict=True):
            visits += [(dataset, lap, episode, frame) for frame in range(begin, end)]

    assert resume(state, changed, spec, world_size=1).epoch == epoch
    counts = Counter((dataset, *rest) for dataset, _, *rest in visits)
    for number, size in enumerate(lap_sizes(index)):
        mine = [count for (dataset, *_), count in counts.items() if dataset == number]
        seen = mine + [0] * (int(size) - len(mine))
        assert max(seen) - min(seen) <= 1


def test_an_epoch_before_the_change_is_of_another_mixture():
    _, changed = follow_state(
        saved_state(mix([9], [8], frames=[10, 10])), mix([9], [8], frames=[11, 10]), allow_mixture_change=True
    )

    with pytest.raises(ConfigError, match="epoch 1 was of another mixture: this one holds since epoch 2"):
        plan_start(changed, OrderSpec(seed=1), world_size=1, epoch=1)


def selected(exclude, frames):
    episodes, lengths = np.arange(6), np.array([5, 7, 4, 6, 3, 8])
    selection = SelectionSpec(exclude=exclude)
    index = index_episodes("a", episodes, lengths, fingerprint="data", selection=selection)
    return mix_indexes([index, make_index([9], name="b")], frames)


def test_other_selected_frames_of_a_dataset_are_a_change_even_where_its_share_is_the_same():
    state = saved_state(selected((), [10, 4]))

    with pytest.raises(ResumeError, match="selected frames of 'a': "):
        follow_state(state, selected((3,), [10, 4]))


def test_a_dataset_of_which_other_frames_are_selected_begins_its_next_lap():
    # Of 33 frames 2 epochs have taken 20: a lap is under way, and the next one is lap 1 of 27 frames.
    _, changed = follow_state(saved_state(selected((), [10, 4])), selected((3,), [10, 4]), allow_mixture_change=True)

    assert tuple(one.position for one in changed.shares.members) == (27, 8)
    spans = plan_start(changed, OrderSpec(seed=1), world_size=1, epoch=2).plan.queues.spans
    assert set(spans.lap[spans.dataset == 0].tolist()) == {1}
