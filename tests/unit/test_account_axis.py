"""The axis of accounts: one number a frame, and the way back to episodes."""

import numpy as np
import pytest

from raypipe.account import count_values, frame_numbers, lay_out
from raypipe.errors import DatasetError

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
