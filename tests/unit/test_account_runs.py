"""Multisets as runs, against Python's own, and the axis of accounts: one number a frame, and the way back."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.account import frame_numbers, lay_out
from raypipe.account.frames import (
    Runs,
    add_runs,
    count_ranges,
    count_values,
    empty_runs,
    make_runs,
    subtract_runs,
)
from raypipe.errors import DatasetError

values = st.lists(st.integers(-5, 40) | st.integers(2**40, 2**40 + 5), max_size=60)


def counted(numbers) -> Runs:
    return count_values(np.array(numbers, dtype=np.int64))


def as_counter(runs: Runs) -> Counter:
    """Return the multiset as a Counter; check the canonical form on the way."""
    assert (runs.start < runs.stop).all()
    assert (runs.times > 0).all()
    follows = runs.start[1:] == runs.stop[:-1]
    assert (runs.start[1:] >= runs.stop[:-1]).all()
    assert (runs.times[1:] != runs.times[:-1])[follows].all()
    return Counter(runs.values().tolist())


@given(values)
def test_values_come_back_as_often_as_they_went_in(numbers):
    runs = counted(numbers)

    assert as_counter(runs) == Counter(numbers)
    assert runs.num_values == len(numbers)


@given(values, values)
def test_operations_are_those_of_multisets(one, other):
    a, b, count_a, count_b = counted(one), counted(other), Counter(one), Counter(other)

    assert as_counter(add_runs(a, b)) == count_a + count_b
    assert as_counter(subtract_runs(a, b)) == count_a - count_b
    assert as_counter(a.intersect(b)) == count_a & count_b
    assert as_counter(a.unite(b)) == count_a | count_b
    assert as_counter(a.within(b)) == Counter({value: n for value, n in count_a.items() if value in count_b})
    assert as_counter(a.once()) == Counter(set(one))


@given(st.lists(values, max_size=5))
def test_a_sum_is_the_same_in_any_order_and_at_once(lists):
    at_once = add_runs(*map(counted, lists))
    one_by_one = empty_runs()
    for numbers in reversed(lists):
        one_by_one = add_runs(one_by_one, counted(numbers))

    assert at_once == one_by_one == counted([number for numbers in lists for number in numbers])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8), st.integers(1, 3)), max_size=20))
def test_overlapping_ranges_add_up(ranges):
    start, length, times = np.array(ranges, dtype=np.int64).reshape(-1, 3).T
    wanted = Counter(v for begin, size, n in ranges for v in range(begin, begin + size) for _ in range(n))

    assert as_counter(make_runs(start, start + length, times)) == wanted
    assert as_counter(count_ranges(start, start + length)) == Counter(
        v for begin, size, _ in ranges for v in range(begin, begin + size)
    )


@given(values, values)
def test_times_of_tells_how_often_each_value_is_there(numbers, asked):
    times = counted(numbers).times_of(np.array(asked, dtype=np.int64))

    assert times.tolist() == [Counter(numbers)[value] for value in asked]


def test_equality_is_by_value_and_never_with_something_else():
    assert counted([1, 2, 3]) == counted([3, 1, 2])
    assert counted([1, 2]) != counted([1, 2, 2])
    assert counted([1]) != [1]
    assert not empty_runs()


EPISODES = [(np.array([0, 3, 4]), np.array([5, 2, 4])), (np.array([0, 1]), np.array([3, 3]))]
AXIS = lay_out(("left", "right"), EPISODES)
SECOND = 1 << 40


def named(*numbers):
    return [frames.describe() for frames in AXIS.name_frames(count_values(np.array(numbers)))]


def test_episodes_lie_behind_each_other_and_datasets_apart():
    starts = AXIS.starts_of(np.array([1, 0, 0, 0, 1]), np.array([1, 4, 0, 3, 0]))

    assert starts.tolist() == [SECOND + 3, 7, 0, 5, SECOND]
    assert frame_numbers(1, np.array([0, 3])).tolist() == [SECOND, SECOND + 3]


@pytest.mark.parametrize("episode", [-1, 1, 2, 5, 99])
def test_an_unknown_episode_is_named(episode):
    with pytest.raises(DatasetError, match=rf"dataset 'left' has no episode {episode};"):
        AXIS.starts_of(np.array([0]), np.array([episode]))


def test_runs_are_named_by_episode():
    assert named(4) == ["episode 0 of 'left': frame 4"]
    assert named(3, 4, 5, 6, 7) == [
        "episode 0 of 'left': frames 3 to 4",
        "episode 3 of 'left': frames 0 to 1",
        "episode 4 of 'left': frame 0",
    ]
    assert named(SECOND + 3, SECOND + 3) == ["episode 1 of 'right': frame 0 (2 times)"]


def test_frames_of_no_dataset_are_named_by_their_number():
    assert named(10, 11, 12) == [
        "episode 4 of 'left': frame 3",
        "no dataset of the run has frames 11 to 12 of the axis",
    ]
    assert named(-2, -1) == ["no dataset of the run has frames -2 to -1 of the axis"]
    assert named(SECOND + 6) == [f"no dataset of the run has frame {SECOND + 6} of the axis"]
