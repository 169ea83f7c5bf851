import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.dataset import WindowSpec, window_rows
from raypipe.dataset.windows import window_from_timestamps
from raypipe.errors import ConfigError

offsets_lists = st.lists(st.integers(-30, 30), min_size=1, max_size=8)


@given(st.integers(1, 20), offsets_lists, st.data())
def test_window_rows_equal_a_loop_over_slots(num_frames, offsets, data):
    anchors = data.draw(st.lists(st.integers(0, num_frames - 1), min_size=1, max_size=10))

    rows, padding = window_rows(np.array(anchors), num_frames, offsets)

    for i, anchor in enumerate(anchors):
        for j, offset in enumerate(offsets):
            wanted = anchor + offset
            assert rows[i, j] == min(max(wanted, 0), num_frames - 1)
            assert padding[i, j] == (wanted < 0 or wanted >= num_frames)


def test_window_at_the_edges_repeats_the_nearest_frame_and_marks_it():
    rows, padding = window_rows(np.array([0, 9]), 10, [-2, -1, 0, 1, 2])

    assert rows.tolist() == [[0, 0, 0, 1, 2], [7, 8, 9, 9, 9]]
    assert padding.tolist() == [[True, True, False, False, False], [False, False, False, True, True]]


@given(st.integers(1, 120), st.lists(st.integers(-100, 99), min_size=1, max_size=20))
def test_multiples_of_the_frame_time_become_their_frame_numbers(fps, offsets):
    window = window_from_timestamps({"action": [offset / fps for offset in offsets]}, fps=fps)

    assert window.offsets["action"] == tuple(offsets)


def test_a_delta_within_the_tolerance_is_taken_and_one_beyond_is_listed():
    near = window_from_timestamps({"action": [0.1 + 0.9e-4]}, fps=10)

    assert near.offsets == {"action": (1,)}
    with pytest.raises(ConfigError, match=r"'action': \[0\.10011, 0\.25\]"):
        window_from_timestamps({"action": [0.0, 0.10011, 0.25], "state": [0.3]}, fps=10)


def test_a_window_on_an_unknown_feature_suggests_the_nearest():
    window = WindowSpec(offsets={"actoin": (0, 1)})

    with pytest.raises(ConfigError, match=r"'actoin'; did you mean 'action'"):
        window.check_features(["action", "observation.state"])


@pytest.mark.parametrize("offsets", [(), (0.5,), (True,), (2**63,), (-(2**62),)])
def test_a_window_of_no_or_broken_offsets_is_an_error(offsets):
    with pytest.raises(ConfigError, match="action"):
        WindowSpec(offsets={"action": offsets})


def test_reach_covers_all_offsets_and_zero():
    window = WindowSpec(offsets={"action": (2, 5), "observation.state": (-3, -1)})

    assert window.reach(["action"]) == (0, 5)
    assert window.reach(["action", "observation.state"]) == (-3, 5)
    assert window.reach(["timestamp"]) == (0, 0)
