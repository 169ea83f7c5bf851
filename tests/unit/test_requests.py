"""The budget of requests, on a clock that stands still until it is told to go on."""

from hypothesis import example, given
from hypothesis import strategies as st

from raypipe.storage import num_requests
from raypipe.storage.request_budget import Budget, count_requests

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
        # A millionth of a request counts as none, and a clock of 1e9 s resolves 1e-7 s: a request may be that early.
        held = [at for at in granted[i:] if at < first + period_s * (1 - 1e-6) - 1e-6]
        assert len(held) <= limit, f"{len(held)} of {limit} within {period_s} s from {first}"


@given(budgets, st.lists(waits, max_size=150), st.sampled_from([0.0, 1e6]))
def test_a_budget_grants_at_most_its_limit_in_any_period(budget, pauses, began_s):
    limit, period_s = budget
    clock, granted = Clock(began_s), []
    gate = Budget(limit=limit, period_s=period_s, clock=clock)

    for pause_s in pauses:
        # As often as it is let at once, and once more: a burst.
        while (wait_s := gate.take().wait_s) == 0:
            granted.append(clock.now_s)
        granted.append(clock.now_s + wait_s)
        clock.now_s += pause_s * period_s / 700

    assert_kept(sorted(granted), limit, period_s)
    assert gate.num_granted == len(granted)


@given(budgets, st.integers(1, 200), st.sampled_from([0.0, 1.0, 1e6, 1e9]))
@example((1, 300.0), 5, 1e9)
@example((1, 0.6528233345180579), 12, 1e9)
def test_who_waits_as_told_is_let_through_and_gets_what_is_left_of_the_limit(budget, num_wanted, began_s):
    limit, period_s = budget
    clock, granted, asked, turn = Clock(began_s), [], 0, None
    gate = Budget(limit=limit, period_s=period_s, clock=clock)

    while len(granted) < num_wanted:
        asked += 1
        turn = gate.take(turn)
        if turn.wait_s == 0:
            granted.append(clock.now_s)
            turn = None
        else:
            # A clock of a process that runs for long does not resolve less.
            clock.now_s += max(turn.wait_s, 1e-6)

    # It asks for a turn, and when it has waited for it. Once more where the clock has rounded.
    assert asked <= 3 * num_wanted
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
        left_s = gate.take().wait_s
        assert left_s > 0
        assert clock.now_s + left_s >= pause_s * (1 - 1e-9)
    clock.now_s = pause_s + period_s * (len(parts) + 1)

    assert gate.take().wait_s == 0


pauses = st.tuples(st.floats(0, 700), st.floats(0.01, 700))
"""When in a run the Hub asks for a pause, and for how long."""


@given(budgets, st.integers(2, 100), st.lists(pauses, max_size=4))
def test_many_that_wait_are_let_through_in_their_order_also_after_pauses(budget, num_waiting, told):
    limit, period_s = budget
    clock = Clock()
    gate = Budget(limit=limit, period_s=period_s, clock=clock)
    # All ask at once; then each asks again when it has waited as told.
    waiting = {number: gate.take() for number in range(num_waiting)}
    wakes = {number: turn.wait_s for number, turn in waiting.items()}
    told = sorted((at_s * period_s / 700, wait_s * period_s / 700) for at_s, wait_s in told)
    closed, came, granted, asked = [], [], [], 0

    while wakes:
        first = min(wakes, key=lambda number: (wakes[number], number))
        if told and told[0][0] <= wakes[first]:
            clock.now_s, wait_s = told.pop(0)
            gate.pause(wait_s)
            closed.append((clock.now_s, clock.now_s + wait_s))
            continue
        clock.now_s, asked = wakes.pop(first), asked + 1
        turn = gate.take(waiting[first])
        if turn.wait_s:
            wakes[first] = clock.now_s + max(turn.wait_s, 1e-6)
        else:
            came.append(first)
            granted.append(clock.now_s)

    assert came == sorted(came)
    assert not any(start < at < end - 1e-6 for start, end in closed for at in granted)
    assert_kept(granted, limit, period_s)
    # Nobody asks more often than there were pauses, and where the clock has rounded.
    assert asked <= num_waiting * (2 + 2 * len(closed))


def test_a_turn_of_another_budget_is_a_turn_anew():
    """As after the loss of the cluster's."""
    clock = Clock()
    lost, gate = (Budget(limit=3, period_s=3, clock=clock) for _ in range(2))
    lost.take()
    turn = lost.take()

    assert turn.wait_s > 0
    assert gate.take(turn).wait_s == 0
    assert gate.num_granted == 1


def test_a_budget_that_begins_empty_has_no_burst_to_give():
    clock = Clock()
    gate = Budget(limit=30, period_s=10, clock=clock, is_empty=True)

    waits = [gate.take().wait_s for _ in range(3)]

    assert waits == [0.5, 1.0, 1.5]


def test_a_shorter_pause_does_not_end_a_longer_one():
    clock = Clock()
    gate = Budget(limit=10, period_s=10, clock=clock)

    gate.pause(5)
    gate.pause(1)
    clock.now_s = 3

    assert gate.take().wait_s == 2


@given(st.integers(3, 60), st.integers(0, 100))
def test_requests_that_were_sent_before_are_taken_off_the_burst(limit, num_sent):
    gate = Budget(limit=limit, period_s=100, clock=Clock())
    gate.spend(num_sent)

    burst = 0
    while gate.take().wait_s == 0:
        burst += 1

    assert burst == max(0, limit // 3 - num_sent)


@given(st.integers(3, 60), st.integers(0, 20), st.floats(0, 300))
def test_requests_are_recent_until_time_has_made_up_for_them(limit, num_sent, later_s):
    clock = Clock()
    gate = Budget(limit=limit, period_s=100, clock=clock)
    for _ in range(num_sent):
        gate.take()

    at_once = gate.num_recent()
    clock.now_s = later_s

    assert at_once == num_sent
    assert 0 <= gate.num_recent() <= num_sent
    assert gate.num_recent() == 0 or later_s < num_sent * 100 / (limit - limit // 3) + 1e-6


def test_requests_that_were_sent_before_do_not_give_turns_back():
    gate = Budget(limit=3, period_s=3, clock=Clock())
    waits = [gate.take().wait_s for _ in range(3)]

    gate.spend(5)

    assert gate.take().wait_s > waits[-1]


def test_requests_of_a_process_are_counted():
    before = num_requests()

    count_requests()
    count_requests(3)

    assert num_requests() == before + 4
