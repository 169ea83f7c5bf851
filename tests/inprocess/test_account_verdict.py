"""Accounts of honest runs balance, whatever happens to the run; a doctored account never does."""

from dataclasses import replace

import numpy as np
import pytest
from account_cases import HandRun, axis_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_cases import WORLDS, lengths, make_index, mixtures, specs

from raypipe.account import Account, Skip, add_runs, count_values, subtract_runs
from raypipe.account.verdict import check_account
from raypipe.errors import ConfigError, ResumeError
from raypipe.plan import OrderSpec, concat_indexes, mix_indexes, state_after

worlds = st.sampled_from(WORLDS)
sizes = st.integers(1, 5)


def check(run: HandRun, account: Account, attempts=()):
    return check_account(run.index, run.axis, account, attempts)


def told(verdicts) -> str:
    return "\n".join(line for verdict in verdicts for line in verdict.describe())


def start_or_assume(run, *options):
    try:
        run.start(*options)
    except ConfigError:
        # Fewer frames than lanes, or no full batch: tests of the plan.
        assume(False)


def steps_or_assume(run, num_steps):
    try:
        run.steps(num_steps)
    except ConfigError:
        assume(False)


@settings(max_examples=40)
@given(st.one_of(lengths.map(make_index), mixtures()), specs, st.data())
def test_an_honest_run_always_balances(index, spec, data):
    bad = data.draw(st.sets(st.integers(0, len(set(index.episode.tolist())) - 1), max_size=3))
    assume(len(bad) < len(set(index.episode.tolist())))
    run = HandRun(index, spec, bad=bad)
    for _ in range(data.draw(st.integers(0, 3))):
        start_or_assume(run, data.draw(worlds), data.draw(sizes))
        steps_or_assume(run, data.draw(st.integers(0, 30)))
        run.save()
        steps_or_assume(run, data.draw(st.integers(0, 6)))
        run.crash()
    start_or_assume(run, data.draw(worlds), data.draw(sizes))
    steps_or_assume(run, data.draw(st.integers(0, 20)))

    verdicts = check(run, run.save(), run.heartbeats)

    assert all(verdict.is_exact for verdict in verdicts), told(verdicts)
    for verdict in verdicts:
        assert verdict.num_emitted == run.log.count("emitted")[verdict.epoch]
        assert verdict.num_repeated == run.log.count("repeated")[verdict.epoch]
        assert verdict.num_skipped == run.log.count("skipped")[verdict.epoch]
        assert verdict.num_rolled_back == run.rolled_back[verdict.epoch]
        total = verdict.num_emitted + verdict.num_skipped + verdict.num_left_over + verdict.num_to_come
        assert total == verdict.num_frames == index.num_frames
    assert set(run.log.count("emitted")) | set(run.rolled_back) <= {verdict.epoch for verdict in verdicts}


@settings(max_examples=12)
@given(lengths, specs, worlds, st.data())
def test_going_back_in_the_same_processes_counts_as_rolled_back(frames, spec, world_size, data):
    run = HandRun(make_index(frames), spec)
    start_or_assume(run, world_size, data.draw(sizes))
    stop = data.draw(st.integers(0, run.world.num_steps - 1))
    early = state_after(run.world, stop)
    steps_or_assume(run, stop)
    counted = len(run.log.emitted)
    steps_or_assume(run, data.draw(st.integers(1, 2 * run.world.num_steps)))
    gone = len(run.log.emitted) - counted
    run.go_back(early)
    again = data.draw(st.integers(1, 10))
    steps_or_assume(run, again)

    verdicts = check(run, run.account())

    assert all(verdict.is_exact for verdict in verdicts), told(verdicts)
    assert sum(verdict.num_rolled_back for verdict in verdicts) == gone
    assert sum(verdict.num_emitted for verdict in verdicts) == len(run.log.emitted) - gone


def test_frames_of_a_mixture_are_told_apart():
    names = [make_index([9, 5, 7], name=name, fingerprint=name) for name in ("one", "two")]
    index = concat_indexes(names)
    run = HandRun(index, OrderSpec(seed=3, live_spans=2))
    run.start(2, 2)
    run.steps(run.world.num_steps)
    account = run.save()
    number = int(run.axis.starts_of(np.array([1]), np.array([2]))[0]) + 4
    removed = doctor(account, lambda part: replace(part, emitted=subtract_runs(part.emitted, one(number))))

    assert check(run, account)[0].is_exact
    (verdict,) = check(run, removed)
    assert [frames.describe() for frames in verdict.missing] == ["episode 2 of 'two': frame 4"]


def test_a_frame_that_is_missing_in_the_second_lap_of_an_epoch_is_named_with_its_lap():
    index = mix_indexes([make_index([4], name="small"), make_index([9, 5], name="large", fingerprint="x")], [10, 14])
    run = HandRun(index, OrderSpec(seed=3, live_spans=2))
    run.start(2, 2)
    run.steps(run.world.num_steps)
    account = run.save()
    number = int(run.axis.starts_of(np.array([0]), np.array([0]), np.array([1]))[0]) + 2
    removed = doctor(account, lambda part: replace(part, emitted=subtract_runs(part.emitted, one(number))))

    assert check(run, account)[0].is_exact
    (verdict,) = check(run, removed)
    assert [frames.describe() for frames in verdict.missing] == ["episode 0 of 'small': frame 2 in lap 2 of the epoch"]


def test_skipped_frames_are_listed_by_episode_with_the_first_line_of_the_error():
    run = HandRun(make_index([6, 8, 7, 9]), OrderSpec(seed=1, live_spans=2), bad={2})
    run.start(2, 2)
    run.steps(run.world.num_steps)

    (verdict,) = check(run, run.save())

    assert verdict.is_exact
    assert verdict.is_finished
    assert (verdict.num_emitted, verdict.num_skipped) == (23, 7)
    assert verdict.describe()[1:] == ("  skipped: episode 2: 7 frames: episode 2 is bad",)


def test_an_epoch_that_is_left_by_set_epoch_misses_its_rest():
    run = HandRun(make_index([6, 8, 7, 9]), OrderSpec(seed=1, live_spans=2))
    run.start(2, 2)
    run.steps(3)
    run.go_back(run.state.next_epoch())
    run.steps(2)

    first, second = check(run, run.save())

    assert not first.is_exact
    assert sum(frames.num_frames for frames in first.missing) == 30 - 12
    assert "the run left epoch 0 before its end" in told([first])
    assert second.is_exact


def test_an_epoch_to_whose_start_the_run_went_back_is_to_come():
    run = HandRun(make_index([6, 8, 7, 9]), OrderSpec(seed=1, live_spans=2))
    run.start(2, 2)
    begin = run.state
    run.steps(run.world.num_steps + 2)
    run.go_back(begin)

    first, second = check(run, run.save())

    assert first.is_exact
    assert second.is_exact
    assert (first.num_emitted, first.num_to_come, first.num_rolled_back) == (0, 30, 30)
    assert second.num_rolled_back == 8


def test_a_state_that_lags_behind_the_parts_is_caught():
    run = HandRun(make_index([6, 8, 7, 9]), OrderSpec(seed=1, live_spans=2))
    run.start(2, 2)
    run.steps(3)
    before = run.save()
    run.steps(1)
    after = run.save()

    (verdict,) = check(run, replace(after, header=before.header))

    assert "the parts lead up to epoch 0, after 8 frames of each of 2 lanes" in told([verdict])
    assert not verdict.is_exact


def test_frames_that_no_rank_can_have_are_left_over():
    # Three frames are left when the run goes on with four ranks: none has a step, and the epoch is over.
    run = HandRun(make_index([5, 5, 5]), OrderSpec(seed=1, live_spans=2))
    run.start(1, 3)
    run.steps(4)
    run.save()
    run.start(4, 3)

    first, *_ = check(run, run.save())

    assert first.is_exact
    assert first.is_finished
    assert first.num_left_over == 3


def test_an_account_of_another_dataset_is_refused():
    run = HandRun(make_index([6, 8]), OrderSpec(seed=1))
    run.start(1, 2)
    run.steps(2)
    other = make_index([6, 8], fingerprint="another")

    with pytest.raises(ResumeError, match=r"of another dataset.*'robot-1'.*'another'"):
        check_account(other, axis_of(other), run.save())


def test_an_account_without_parts_says_nothing():
    run = HandRun(make_index([6, 8]), OrderSpec(seed=1))
    run.start(2, 2)

    assert check(run, run.save()) == ()


# From here on: accounts that are not true.


def one(number):
    return count_values(np.array([number]))


def doctor(account, change, place=-1):
    """Return the account with one part changed."""
    parts = list(account.parts)
    parts[place] = change(parts[place])
    return replace(account, parts=tuple(parts))


def run_of_three_parts(frames, spec, data, tamper=None):
    """Return a run that changes its world size twice, within an epoch or not."""
    run = HandRun(make_index(frames), spec, tamper=tamper)
    for _ in range(3):
        start_or_assume(run, data.draw(st.sampled_from([2, 3, 4])), data.draw(sizes))
        steps_or_assume(run, data.draw(st.integers(1, 5)))
        account = run.save()
    return run, account


def draw_frame(data, part):
    values = part.emitted.values()
    assume(len(values))
    return int(data.draw(st.sampled_from(values.tolist())))


def remove(data, part):
    return replace(part, emitted=subtract_runs(part.emitted, one(draw_frame(data, part))))


def double(data, part):
    return replace(part, emitted=add_runs(part.emitted, one(draw_frame(data, part))))


def invent(data, part):
    return replace(part, emitted=add_runs(part.emitted, one(10**6 + data.draw(st.integers(0, 9)))))


def skip_what_was_emitted(data, part):
    number = draw_frame(data, part)
    return replace(part, skipped=(Skip(dataset=0, episode=0, frames=one(number), why="invented"),))


def skip_instead(data, part):
    number = draw_frame(data, part)
    skip = Skip(dataset=0, episode=0, frames=one(number), why="invented")
    return replace(part, emitted=subtract_runs(part.emitted, one(number)), skipped=(skip,))


def count_otherwise(data, part):
    record = part.ranks[0]
    lanes = ((record.lanes[0][0], record.lanes[0][1] + 1), *record.lanes[1:]) if record.lanes else ((0, 1),)
    return replace(part, ranks=(replace(record, lanes=lanes), *part.ranks[1:]))


def repeat_more(data, part):
    return replace(part, repeated=add_runs(part.repeated, one(draw_frame(data, part))))


def shorten(data, part):
    assume(part.num_steps > 1)
    return replace(part, num_steps=part.num_steps - 1)


def move_start(data, part):
    leg = part.legs[-1]
    return replace(part, legs=(*part.legs[:-1], replace(leg, frames_per_lane=leg.frames_per_lane + 1)))


DOCTORS = [
    remove,
    double,
    invent,
    skip_what_was_emitted,
    skip_instead,
    count_otherwise,
    repeat_more,
    shorten,
    move_start,
]


@pytest.mark.parametrize("change", DOCTORS, ids=lambda change: change.__name__)
@settings(max_examples=6)
@given(lengths, specs, st.data())
def test_a_doctored_part_is_always_caught(change, frames, spec, data):
    run, account = run_of_three_parts(frames, spec, data)
    place = data.draw(st.integers(0, len(account.parts) - 1))
    doctored = doctor(account, lambda part: change(data, part), place)

    verdicts = check(run, doctored)

    assert not all(verdict.is_exact for verdict in verdicts), told(verdicts)


def swap_in_order(handed):
    """Swap two frames of a batch of the first rank that has two."""
    for batches in handed:
        for place, batch in enumerate(batches):
            fresh = np.flatnonzero(~batch.is_repeat)
            if len(fresh) > 1:
                numbers = batch.numbers.copy()
                numbers[fresh[[0, 1]]] = numbers[fresh[[1, 0]]]
                batches[place] = replace(batch, numbers=numbers)
                return True
    return False


def move_to_another_rank(handed):
    """Swap the first frames of two ranks in a step: every count and every set stays."""
    for place, (left, right) in enumerate(zip(handed[0], handed[1], strict=True)):
        a, b = np.flatnonzero(~left.is_repeat), np.flatnonzero(~right.is_repeat)
        if len(a) and len(b):
            left_numbers, right_numbers = left.numbers.copy(), right.numbers.copy()
            left_numbers[a[0]], right_numbers[b[0]] = right.numbers[b[0]], left.numbers[a[0]]
            handed[0][place] = replace(left, numbers=left_numbers)
            handed[1][place] = replace(right, numbers=right_numbers)
            return True
    return False


def swap_steps(handed):
    """Swap two batches of rank 0 that differ."""
    if len(handed[0]) > 1 and not np.array_equal(handed[0][0].numbers, handed[0][1].numbers):
        handed[0][0], handed[0][1] = handed[0][1], handed[0][0]
        return True
    return False


@pytest.mark.parametrize("tamper", [swap_in_order, move_to_another_rank, swap_steps], ids=lambda f: f.__name__)
@settings(max_examples=6)
@given(lengths, specs, st.data())
def test_another_order_with_the_same_frames_is_always_caught(tamper, frames, spec, data):
    done = []
    run, account = run_of_three_parts(frames, spec, data, lambda handed: done.append(tamper(handed)))
    assume(any(done))

    verdicts = check(run, account)

    assert any(verdict.out_of_order for verdict in verdicts)
    assert not any(verdict.missing or verdict.doubled for verdict in verdicts)


@settings(max_examples=8)
@given(lengths, specs, st.data())
def test_a_missing_rank_is_always_caught(frames, spec, data):
    run = HandRun(make_index(frames), spec)
    world_size = data.draw(st.sampled_from([2, 3, 4]))
    start_or_assume(run, world_size, data.draw(sizes))
    steps_or_assume(run, data.draw(st.integers(1, 8)))

    verdicts = check(run, run.account(without_rank=data.draw(st.integers(0, world_size - 1))))

    assert verdicts[-1].missing_ranks
    assert not verdicts[-1].is_exact


@settings(max_examples=8)
@given(lengths, specs, st.data())
def test_a_missing_leg_is_always_caught(frames, spec, data):
    run, account = run_of_three_parts(frames, spec, data)
    place = data.draw(st.integers(0, len(account.parts) - 1))
    # An epoch of which nothing else is recorded, before all others, is where such an account begins.
    assume(place > 0 or (account.parts[1:] and account.parts[1].epoch == account.parts[0].epoch))
    rest = (*account.parts[:place], *account.parts[place + 1 :])

    verdicts = check(run, replace(account, parts=rest))

    assert not all(verdict.is_exact for verdict in verdicts), told(verdicts)


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (0, "nothing leads up to epoch 0, leg 2"),
        (1, "does not begin where the part before it ends"),
        (2, "the parts lead up to epoch 0, after"),
    ],
)
def test_a_missing_leg_is_told_where_it_is_missing(place, told):
    run = HandRun(make_index([9, 8, 7, 12]), OrderSpec(seed=1, live_spans=2))
    for world_size in (2, 3, 2):
        run.start(world_size, 2)
        run.steps(2)
        account = run.save()

    (verdict,) = check(run, replace(account, parts=(*account.parts[:place], *account.parts[place + 1 :])))

    assert len(account.parts) == 3
    assert any(told in gap for gap in verdict.gaps), verdict.gaps


@pytest.mark.parametrize("epoch", [50_000, (1 << 63) - 1])
@pytest.mark.parametrize("place", ["state", "part"])
def test_an_account_that_claims_epochs_without_end_is_refused(place, epoch):
    run = HandRun(make_index([6, 8, 7, 9]), OrderSpec(seed=1))
    run.start(2, 2)
    run.steps(2)
    account = run.save()
    if place == "state":
        changed = replace(account, header=replace(account.header, state={**account.header.state, "epoch": epoch}))
    else:
        changed = doctor(account, lambda part: replace(part, epoch=epoch))

    with pytest.raises(ResumeError, match=f"leads up to epoch {epoch}, and has a record of 1 epoch: it was changed"):
        check(run, changed)


def test_a_verdict_names_what_is_missing_and_doubled():
    run = HandRun(make_index([6, 8, 7, 9]), OrderSpec(seed=1, live_spans=2))
    run.start(2, 2)
    run.steps(run.world.num_steps)
    account = run.save()
    emitted = add_runs(subtract_runs(account.parts[0].emitted, one(7)), one(15))
    changed = doctor(account, lambda part: replace(part, emitted=emitted))

    (verdict,) = check(run, changed)

    assert verdict.describe()[0].startswith("epoch 0: NOT exactly once: 1 frame missing, 1 frame doubled")
    assert [frames.describe() for frames in verdict.missing] == ["episode 1: frame 1"]
    assert [frames.describe() for frames in verdict.doubled] == ["episode 2: frame 1"]
    assert verdict.to_json()["is_exact"] is False
