import numpy as np
import pyarrow as pa
import pytest
import torch
from plan_cases import make_index

from raypipe.errors import ConfigError
from raypipe.plan import SelectionSpec, concat_indexes, describe_selection, index_episodes


def index_of(selection, lengths=(10, 20, 30), episodes=(0, 1, 2)):
    return index_episodes("robot", np.array(episodes), np.array(lengths), fingerprint="robot-1", selection=selection)


def runs(index):
    return list(zip(index.episode.tolist(), index.start.tolist(), index.stop.tolist(), strict=True))


def test_index_has_every_frame_of_every_episode_in_file_order():
    index = index_of(SelectionSpec(), lengths=(30, 10, 20), episodes=(7, 2, 4))

    assert runs(index) == [(2, 0, 10), (4, 0, 20), (7, 0, 30)]
    assert index.length.tolist() == [10, 20, 30]
    assert index.num_frames == 60


def test_index_takes_a_subset_and_leaves_episodes_out():
    assert runs(index_of(SelectionSpec(episodes=(2, 0)))) == [(0, 0, 10), (2, 0, 30)]
    assert runs(index_of(SelectionSpec(exclude=(1,)))) == [(0, 0, 10), (2, 0, 30)]
    assert runs(index_of(SelectionSpec(episodes=(0, 1), exclude=(1,)))) == [(0, 0, 10)]


def test_index_drops_frames_at_the_ends_and_episodes_that_have_no_others():
    index = index_of(SelectionSpec(drop_first_frames=4, drop_last_frames=6))

    assert runs(index) == [(1, 4, 14), (2, 4, 24)]
    assert index.length.tolist() == [20, 30]


def test_index_keeps_segments_apart_and_cuts_them_at_dropped_frames():
    segments = ((2, 15, 25), (0, 2, 5), (2, 0, 10))

    index = index_of(SelectionSpec(segments=segments, drop_first_frames=3))

    assert runs(index) == [(0, 3, 5), (2, 3, 10), (2, 15, 25)]


@pytest.mark.parametrize("selection", [SelectionSpec(episodes=(1, 8, 9)), SelectionSpec(exclude=(8, 9))])
def test_index_names_episodes_that_do_not_exist(selection):
    with pytest.raises(ConfigError, match=r"'robot' has no episode 8, 9 \(2 unknown\); it has 3 episodes, 0 to 2"):
        index_of(selection)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (((0, 0, 5), (0, 4, 8)), r"segment \[4, 8\) of episode 0 of dataset 'robot' overlaps"),
        (((0, 5, 11),), r"segment \[5, 11\) of episode 0 of dataset 'robot' is empty or leaves"),
        (((0, 5, 5),), "is empty or leaves"),
        (((9, 0, 5),), "has no episode 9"),
    ],
)
def test_index_refuses_segments_that_are_none(segments, message):
    with pytest.raises(ConfigError, match=message):
        index_of(SelectionSpec(segments=segments))


def test_index_refuses_to_be_empty():
    with pytest.raises(ConfigError, match="no frame is left of the 3 episodes"):
        index_of(SelectionSpec(drop_first_frames=99))


def test_index_refuses_an_episode_twice():
    with pytest.raises(ConfigError, match="lists episode 1 twice"):
        index_of(SelectionSpec(), episodes=(0, 1, 1))


def test_index_refuses_an_episode_that_the_key_axis_cannot_hold():
    with pytest.raises(ConfigError, match="16777217 frames; the limit is 16777216"):
        index_of(SelectionSpec(), lengths=(1, 2, 2**24 + 1))


def test_a_mixture_is_one_index_with_positions_into_its_names():
    mixed = concat_indexes([make_index([3, 4], name="a", fingerprint="x"), make_index([5], name="b", fingerprint="y")])

    assert mixed.dataset_names == ("a", "b")
    assert mixed.dataset.tolist() == [0, 0, 1]
    assert mixed.num_frames == 12
    assert mixed.fingerprint == "x+y"


def test_a_mixture_refuses_equal_names():
    with pytest.raises(ConfigError, match="need different names"):
        concat_indexes([make_index([3], name="a"), make_index([5], name="a")])


def test_equal_selections_read_equal_and_others_differ():
    one = describe_selection(index_of(SelectionSpec(exclude=(1,))))

    assert one == describe_selection(index_of(SelectionSpec(episodes=(0, 2))))
    assert one != describe_selection(index_of(SelectionSpec(episodes=(0, 1))))
    assert one.startswith("2 runs, 40 frames, ")


@pytest.mark.parametrize("given", [{"exclude": [10**30]}, {"episodes": [0, -(10**30)]}, {"segments": [(0, 0, 10**30)]}])
def test_a_number_that_no_dataset_reaches_is_refused(given):
    with pytest.raises(ConfigError, match="a number of 100 bits"):
        SelectionSpec(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"segments": [(0, 1), (1, 2), (2, 5)]}, r"segments has \(0, 1\), and a segment is \(episode, start, stop\)"),
        ({"segments": [(0, 0, 5), (2, 3)]}, r"segments has \(2, 3\)"),
        ({"segments": ["abc"]}, "segments is 'abc'; give whole numbers"),
        ({"episodes": [1.7]}, "episodes has 1.7; give whole numbers"),
        ({"episodes": "some"}, "episodes is 'some'; give whole numbers"),
        ({"exclude": ["x"]}, "exclude has 'x'; give whole numbers"),
        ({"exclude": [float("inf")]}, "exclude has inf; give whole numbers"),
        ({"exclude": "12"}, "exclude is '12'; give whole numbers"),
        ({"exclude": b"12"}, "exclude is b'12'; give whole numbers"),
        ({"episodes": 5}, "episodes is 5; give whole numbers"),
        ({"episodes": np.array(5)}, r"episodes is array\(5\); give whole numbers"),
        ({"episodes": [True, False]}, "episodes has True; give whole numbers"),
        ({"episodes": np.array([True])}, "episodes has True; give whole numbers"),
        ({"episodes": torch.tensor([True])}, "episodes has True; give whole numbers"),
        ({"episodes": pa.array([0, None])}, "episodes has None; give whole numbers"),
        ({"tasks": 5}, "tasks is 5; give a list of texts"),
    ],
)
def test_numbers_that_are_none_and_segments_that_are_no_three_of_them_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        SelectionSpec(**given)


@pytest.mark.parametrize(
    "numbers",
    [
        range(3),
        iter([0, 1, 2]),
        {0: "a", 1: "b", 2: "c"},
        [0.0, np.int8(1), 2],
        np.arange(3.0),
        torch.arange(3),
        list(torch.arange(3)),
        pa.array(range(3)),
        pa.chunked_array([[0], [1, 2]]),
        list(pa.array(range(3))),
    ],
)
def test_numbers_may_be_of_any_type_that_holds_whole_ones(numbers):
    assert SelectionSpec(segments=[numbers]).segments == ((0, 1, 2),)


def test_whole_selections_may_be_arrays():
    spec = SelectionSpec(episodes=np.array([2, 0]), exclude=pa.array([1]), segments=torch.tensor([[0, 1, 2]]))

    assert (spec.episodes, spec.exclude, spec.segments) == ((2, 0), (1,), ((0, 1, 2),))
