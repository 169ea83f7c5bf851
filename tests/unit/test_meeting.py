"""All ranks are compared before the first batch, whatever the order in which they come; the policy for bad data."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import ConfigError, DatasetError, ResumeError
from raypipe.feed import BadDataSpec, BadSpan, PassPlace, agreement
from raypipe.feed.agreement import Ask, Meeting, RollCall, add_span, describe_difference
from raypipe.plan import BatchSpec, Leg, OrderSpec

ASK = Ask(
    order=OrderSpec(seed=7, live_spans=4),
    epoch=2,
    legs=(Leg(lanes=3, live_spans=4, frames_per_lane=12),),
    world_size=3,
    batch=BatchSpec(size=12, scope="global"),
    fingerprint="0123456789abcdef",
)

DIFFERENCES = {
    "seed": (replace(ASK, order=OrderSpec(seed=8, live_spans=4)), "seed 8"),
    "epoch": (replace(ASK, epoch=3), "epoch 3"),
    "legs": (replace(ASK, legs=()), r"legs \[\]"),
    "batch size": (replace(ASK, batch=BatchSpec(size=24, scope="global")), "global batch 24"),
    "data": (replace(ASK, fingerprint="fedcba9876543210"), "plan fedcba987654"),
}


def answer_all(roll_call, asks):
    """Let every rank answer in a thread of its own; return the series, or the message, that each got."""

    def answer(pair):
        try:
            return roll_call.answer(*pair)
        except ResumeError as error:
            return str(error)

    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(answer, asks.items()))


def test_ranks_that_ask_for_the_same_go_on_also_after_they_differed():
    roll_call = RollCall(3)

    first = answer_all(roll_call, {2: ASK, 0: ASK, 1: ASK})
    answer_all(roll_call, {0: ASK, 1: replace(ASK, epoch=3), 2: ASK})
    second = answer_all(roll_call, dict.fromkeys(range(3), replace(ASK, epoch=3)))

    # Each series has a number of its own, the same for all ranks.
    assert len(set(first)) == len(set(second)) == 1
    assert first != second


@pytest.mark.parametrize("name", DIFFERENCES)
def test_every_rank_is_told_which_ranks_differ_and_how(name):
    other, shown = DIFFERENCES[name]

    messages = answer_all(RollCall(3), {0: ASK, 1: other, 2: ASK})

    assert len(set(messages)) == 1
    with pytest.raises(ResumeError, match=f"ranks 0, 2 asked for epoch 2.*; rank 1 asked for .*{shown}"):
        raise ResumeError(messages[0])


def test_a_rank_that_asks_again_takes_its_earlier_answer_back():
    roll_call = RollCall(3)
    later = replace(ASK, epoch=3)

    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(roll_call.answer, 0, ASK)
        while roll_call.missing_ranks() != [1, 2]:
            pass
        messages = answer_all(roll_call, dict.fromkeys(range(3), later))

    assert messages == [1, 1, 1]
    with pytest.raises(ResumeError, match="rank 0 has asked for something else meanwhile"):
        early.result()


def test_a_refused_rank_is_let_go_at_once():
    class Holder:
        """Held by the frame of a rank that waits, as a loader is."""

    def ask(roll_call, number):
        holder = Holder()
        held.append(weakref.ref(holder))
        with pytest.raises(ResumeError):
            roll_call.answer(number, (ASK, DIFFERENCES["seed"][0])[number])

    held = []
    gc.collect()
    gc.disable()
    try:
        roll_call = RollCall(2)
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(ask, roll_call, number) for number in range(2)]:
                done.result()
        del done
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()


def test_nobody_is_missed_where_nobody_waits():
    assert RollCall(3).missing_ranks() == []


def test_equal_asks_have_no_difference():
    assert describe_difference({0: ASK, 5: replace(ASK)}) == ""


@pytest.mark.parametrize(
    ("old", "asked", "is_over"),
    [
        ((1, 5), (2, 0), True),
        ((1, 0), (1, 3), True),
        ((1, 1), (1, 3), False),
        ((1, 3), (1, 3), False),
        # A request that was under way when the ranks began anew.
        ((2, 0), (1, 7), False),
    ],
)
def test_pass_is_over_when_all_ranks_have_gone_on(old, asked, is_over):
    assert PassPlace(*old).is_over_at(PassPlace(*asked)) == is_over


def wait_for(roll_call, rank, left):
    """Let a rank begin anew in a thread of its own; return its future when it waits."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(roll_call.answer, rank, ASK, left)
    while rank in roll_call.missing_ranks() or not roll_call.missing_ranks():
        pass
    pool.shutdown(wait=False)
    return future


def test_a_rank_that_goes_on_where_another_has_left_is_told_so_and_so_is_the_other():
    roll_call = RollCall(3)
    waiting = wait_for(roll_call, 1, PassPlace(4, 2))

    with pytest.raises(ResumeError, match=r"rank 1 left an epoch by a break .* and rank 0 goes on with the next"):
        roll_call.go_on(0, PassPlace(4, 3))

    with pytest.raises(ResumeError, match="rank 0 goes on with the next"):
        waiting.result(timeout=10)
    # Nobody waits any more: they may begin anew together.
    assert len(set(answer_all(roll_call, dict.fromkeys(range(3), ASK)))) == 1


@pytest.mark.parametrize("left", [None, PassPlace(4, 3), PassPlace(3, 1)], ids=["new", "ahead", "another series"])
def test_a_rank_that_is_merely_behind_may_go_on(left):
    roll_call = RollCall(3)
    waiting = wait_for(roll_call, 1, left)

    roll_call.go_on(0, PassPlace(4, 3))
    answer_all(roll_call, {0: ASK, 2: ASK})

    assert isinstance(waiting.result(timeout=10), int)


def bad_span(episode, dataset=0, start=0):
    return BadSpan(
        epoch=0, dataset=dataset, root="/data/pusht", episode=episode, start=start, stop=start + 5, why="is truncated"
    )


def skip_list(max_bad_episodes, num_episodes):
    index = SimpleNamespace(dataset=np.zeros(num_episodes, dtype=np.int64), episode=np.arange(num_episodes))
    return Meeting(BadDataSpec(on_bad_episode="skip", max_bad_episodes=max_bad_episodes), index, 1)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=40), st.integers(0, 12))
def test_list_ends_the_run_at_the_first_episode_beyond_the_budget(reported, budget):
    skips = skip_list(budget, 30)
    seen = set()

    for dataset, episode in reported:
        seen.add((dataset, episode))
        if len(seen) > budget:
            with pytest.raises(DatasetError, match=rf"{len(seen)} of 30 episodes (is|are) bad"):
                skips.report_bad(bad_span(episode, dataset))
        else:
            skips.report_bad(bad_span(episode, dataset))

    assert set(skips._bad) == seen


def test_error_beyond_the_budget_names_every_bad_episode_and_the_command():
    skips = skip_list(1, 50)
    skips.report_bad(bad_span(7))

    with pytest.raises(DatasetError) as raised:
        skips.report_bad(bad_span(9))

    assert "episode 7 of '/data/pusht', frames 0 to 4: is truncated" in str(raised.value)
    assert "episode 9 of" in str(raised.value)
    assert "raypipe validate /data/pusht" in str(raised.value)
    assert "max_bad_episodes=1" in str(raised.value)


@pytest.mark.parametrize(
    ("most", "num_episodes", "budget"),
    [(0, 100, 0), (0.0, 100, 0), (3, 100, 3), (0.05, 100, 5), (0.01, 50, 1), (0.999, 1000, 999), (1.0, 100, 1)],
)
def test_budget_is_a_count_or_a_share(most, num_episodes, budget):
    assert BadDataSpec(max_bad_episodes=most).budget(num_episodes) == budget


def frames_of_span(span):
    return {(span.episode, frame) for frame in range(span.start, span.stop)}


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40)), max_size=30))
def test_spans_that_touch_become_one_with_the_first_reason(found):
    spans = []
    for number, (episode, start) in enumerate(found):
        spans = add_span(spans, replace(bad_span(episode, start=start), why=str(number)))

    covered = [frame for one in spans for frame in frames_of_span(one)]
    assert len(set(covered)) == len(covered)
    assert set(covered) == {(episode, start + i) for episode, start in found for i in range(5)}
    for one in spans:
        assert not [other for other in spans if other is not one and agreement._touches(one, other)]
        inside = [number for number, (episode, start) in enumerate(found) if (episode, start) in frames_of_span(one)]
        assert one.why == str(inside[0])


def test_a_span_that_is_added_is_compared_once_with_every_other(monkeypatch):
    spans, compared, touches = [], [], agreement._touches
    monkeypatch.setattr(agreement, "_touches", lambda *pair: compared.append(pair) or touches(*pair))

    for episode in range(60):
        spans = add_span(spans, bad_span(episode))

    assert len(spans) == 60
    assert len(compared) == 60 * 59 // 2


@pytest.mark.parametrize("most", [-1, 1.5, "many", True, None])
def test_budget_that_is_no_number_of_episodes_is_refused(most):
    with pytest.raises(ConfigError, match="max_bad_episodes must be"):
        BadDataSpec(max_bad_episodes=most)


@pytest.mark.parametrize("policy", ["ignore", 3])
def test_unknown_policy_is_refused_with_the_known_ones(policy):
    with pytest.raises(ConfigError, match="'raise', 'skip'"):
        BadDataSpec(on_bad_episode=policy)
