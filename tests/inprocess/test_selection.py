"""Filters of a selection against the tables of a dataset: exactly what they say is left, or an error that helps."""

import threading
from itertools import count

import numpy as np
import pytest
from batches import frames_of_all
from selection_cases import LENGTHS, TASKS, write_rows

import raypipe as rp
from raypipe.dataset.selection import _read_row_values
from raypipe.errors import ConfigError
from raypipe.format import rows as rows_module
from raypipe.format.tables import open_parquet
from raypipe.pipeline import index_frames
from raypipe.plan import SelectionSpec
from raypipe.testing import SynthSpec, write_dataset

SUCCESS = [True, False, True, True, False, False, True, True, False]
SCENE = ["a", "b", "c", "a", "b", "c", "a", "b", "c"]


@pytest.fixture(scope="module", params=["v3.0", "v2.1"])
def dataset(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows") / "dataset"
    return rp.open_dataset(
        write_rows(folder, request.param, episode_columns={"is_success": SUCCESS, "scene": SCENE, "score": range(9)})
    )


def episodes_left(dataset, **selection):
    return index_frames(dataset, SelectionSpec(**selection)).episode.tolist()


def test_filters_leave_exactly_the_episodes_that_they_name(dataset):
    assert episodes_left(dataset, tasks=[TASKS[1]]) == [1, 3, 5, 7]
    assert episodes_left(dataset, tasks=TASKS) == list(range(9))
    assert episodes_left(dataset, min_frames=5) == [e for e, length in enumerate(LENGTHS) if length >= 5]
    assert episodes_left(dataset, min_frames=4, max_frames=7) == [0, 3, 7, 8]
    assert episodes_left(dataset, where={"is_success": True}) == [0, 2, 3, 6, 7]
    assert episodes_left(dataset, where={"scene": ["a", "c"], "is_success": False}) == [5, 8]
    assert episodes_left(dataset, where={"score": (1, 2.0, 3)}, exclude=(2,)) == [1, 3]
    assert episodes_left(dataset, tasks=[TASKS[0]], min_frames=7, where={"is_success": [True]}) == [0, 2, 6]


def test_values_of_a_set_are_in_one_order():
    given = SelectionSpec(tasks=frozenset("dcba"), where={"scene": {"c", "b", "a", 1}})

    assert given == SelectionSpec(tasks=list("abcd"), where={"scene": [1, "a", "b", "c"]})


def test_what_is_left_out_is_counted(dataset):
    index = index_frames(dataset, SelectionSpec(min_frames=5, drop_last_frames=1))

    assert index.left_out == (3, sum(LENGTHS) - index.num_frames)


def test_a_loader_gives_exactly_the_filtered_frames(dataset):
    pipe = rp.Pipeline(dataset, batch_size=4, seed=0, selection={"tasks": [TASKS[1]], "min_frames": 3})

    frames = frames_of_all(pipe.loader(progress=False))

    assert sorted(frames) == [(e, f) for e in (3, 5, 7) for f in range(LENGTHS[e])]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"tasks": ["pick up the cub"]}, r"has no task 'pick up the cub'; did you mean 'pick up the cube'\? Known"),
        ({"tasks": "pick up the cube"}, r"give a list of texts, as \['pick up the cube'\]"),
        ({"where": {"is_sucess": True}}, r"'is_sucess', which neither .* have; did you mean 'is_success'\?"),
        ({"where": {"is_success": []}}, "no value for 'is_success'"),
        ({"where": 3}, r"where is 3; give columns with values, as \{'is_success': True\}"),
        ({"min_frames": 0}, "min_frames must be an integer of at least 1, got 0"),
        ({"min_frames": 8, "max_frames": 7}, "max_frames must be an integer of at least 8"),
        ({"where": {"scene": ["a", "z"]}}, r"where has 'z' for 'scene', which no episode .* has. Known: 'a', 'b', 'c'"),
        ({"where": {"scene": "b"}, "episodes": [0]}, "no frame is left of the 9 episodes"),
        ({"where": {"frame_index": float("inf")}}, "where has inf for 'frame_index' .* whose rows hold int64"),
        ({"where": {"frame_index": float("nan")}}, "where has nan for 'frame_index' .* whose rows hold int64"),
        ({"where": {"frame_index": 2**70}}, "where has 1180591620717411303424 for 'frame_index' .* hold int64"),
        ({"where": {"tasks": TASKS[0]}}, "where has 'pick up the cube' for 'tasks', which no episode"),
        ({"minframes": 3}, r"selection has no field 'minframes'; did you mean 'min_frames'\?"),
    ],
)
def test_what_cannot_be_selected_is_told(dataset, selection, message):
    with pytest.raises(ConfigError, match=message):
        rp.Pipeline(dataset, batch_size=4, seed=0, selection=selection)


def test_members_of_a_mixture_have_filters_of_their_own(tmp_path):
    for name in ("one", "two"):
        write_rows(tmp_path / name, episode_columns={"is_success": SUCCESS})
    file = tmp_path / "mixture.yaml"
    file.write_text(
        "datasets:\n"
        "  one: {root: one, selection: {where: {is_success: true}, min_frames: 6}}\n"
        f"  two: {{root: two, selection: {{tasks: ['{TASKS[1]}']}}}}\n"
    )

    index = rp.Mixture(file, progress=False).index()

    assert index.episode[index.dataset == 0].tolist() == [0, 2, 6]
    assert index.episode[index.dataset == 1].tolist() == [1, 3, 5, 7]


def test_a_selection_without_filters_is_written_as_before_there_were_any():
    first = {"episodes": (0, 2), "exclude": (), "drop_first_frames": 0, "drop_last_frames": 1, "segments": ()}

    assert SelectionSpec(**first).to_dict() == first
    saved = SelectionSpec(**first, where={"is_success": True}, tasks=["x"]).to_dict()
    assert SelectionSpec(**saved).to_dict() == saved


class SlowOpening:
    """Notes the files that are opened; the first two open only together."""

    def __init__(self):
        self.names, self._numbers, self._together = [], count(), threading.Barrier(2)

    def __call__(self, storage, name):
        self.names.append(name)
        if next(self._numbers) < 2:
            self._together.wait(timeout=60)
        return open_parquet(storage, name)


def test_a_column_of_the_rows_is_read_file_by_file_in_threads(tmp_path, monkeypatch):
    spec = SynthSpec(lengths=LENGTHS, cameras=(), episodes_per_data_file=2)
    dataset = rp.open_dataset(write_dataset(tmp_path / "dataset", spec))
    opening = SlowOpening()
    monkeypatch.setattr(rows_module, "open_parquet", opening)

    found = _read_row_values(dataset.meta, "index", np.ones(len(LENGTHS), bool).tobytes())

    assert found.tolist() == list(range(sum(LENGTHS)))
    assert sorted(opening.names) == sorted({dataset.meta.data_file(row) for row in range(len(LENGTHS))})
