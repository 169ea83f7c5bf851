"""The budget of requests, on a clock that stands still until it is told to go on."""

from hypothesis import example, given
from hypothesis import strategies as st

from raypipe.requests import Budget, count_requests, num_requests

budgets = st.tuples(st.integers(1, 60), st.floats(0.5, 600))
waits = st.floats(0, 700)
"""Seconds between two requests of somebody who does not wait as told."""


class Clock:
    def __init__(self, now_s=0.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


def assert_kept(granted, limit, period_s):
    """No period, from wherever it starts, holds more than the limit; a period ends before its last moment."""
    for i, first in enumerate(granted):
        # The clock's own rounding may put a request a moment early.
        held = [at for at in granted[i:] if at < first + period_s * (1 - 1e-6)]
        assert len(held) <= limit, f"{len(held)} of {limit} within {period_s} s from {first}"


@given(budgets, st.lists(waits, max_size=150), st.sampled_from([0.0, 1e6]))
def test_a_budget_grants_at_most_its_limit_in_any_period(budget, pauses, began_s):
    limit, period_s = budget
    clock, granted = Clock(began_s), []
    gate = Budget(limit=limit, period_s=period_s, clock=clock)

    for pause_s in pauses:
        # As often as it is let: a burst.
        while gate.take() == 0:
            granted.append(clock.now_s)
        clock.now_s += pause_s * period_s / 700

    assert_kept(granted, limit, period_s)
    assert gate.num_granted == len(granted)


@given(budgets, st.integers(1, 200), st.sampled_from([0.0, 1.0, 1e6, 1e9]))
@example((1, 300.0), 5, 1e9)
def test_who_waits_as_told_is_let_through_and_gets_what_is_left_of_the_limit(budget, num_wanted, began_s):
    limit, period_s = budget
    clock, granted, asked = Clock(began_s), [], 0
    gate = Budget(limit=limit, period_s=period_s, clock=clock)

    while len(granted) < num_wanted:
        asked += 1
        assert asked < 10 * num_wanted + 10, "it is told to wait for ever"
        wait_s = gate.take()
        if wait_s == 0:
            granted.append(clock.now_s)
        # A clock of a process that runs for long does not resolve less.
        clock.now_s += wait_s and max(wait_s, 1e-6)

    assert_kept(granted, limit, period_s)
    # Two thirds of the limit at least in every period.
    assert granted[-1] - began_s <= (num_wanted / max(1, limit - max(1, limit // 3)) + 1) * period_s * 1.001


@given(budgets, st.floats(0.001, 1000), st.lists(st.floats(0, 1), max_size=20))
def test_nothing_is_let_through_before_a_pause_ends(budget, pause_s, parts):
    limit, period_s = budget
    clock = Clock()
    gate = Budget(limit=limit, period_s=period_s, clock=clock)
    gate.pause(pause_s)

    for part in sorted(parts):
        clock.now_s = part * pause_s * 0.999
        left_s = gate.take()
        assert left_s > 0
        assert clock.now_s + left_s >= pause_s * (1 - 1e-9)
    clock.now_s = pause_s + period_s

    assert gate.take() == 0


def test_a_shorter_pause_does_not_end_a_longer_one():
    clock = Clock()
    gate = Budget(limit=10, period_s=10, clock=clock)

    gate.pause(5)
    gate.pause(1)
    clock.now_s = 3

    assert gate.take() == 2


@given(st.integers(3, 60), st.integers(0, 100))
def test_requests_that_were_sent_before_are_taken_off_the_burst(limit, num_sent):
    gate = Budget(limit=limit, period_s=100, clock=Clock())
    gate.spend(num_sent)

    burst = 0
    while gate.take() == 0:
        burst += 1

    assert burst == max(0, limit // 3 - num_sent)


def test_requests_of_a_process_are_counted():
    before = num_requests()

    count_requests()
    count_requests(3)

    assert num_requests() == before + 4
