"""Texts of every frame: subtasks and annotations as samples, batches, windows and mixtures have them."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batches import assert_equals_samples, local_loader

from raypipe.dataset import open_dataset
from raypipe.errors import DatasetError
from raypipe.mixture import Mixture
from raypipe.pipeline import Pipeline
from raypipe.reshard import ReshardSpec, reshard_dataset
from raypipe.testing import SynthSpec, write_dataset

LENGTHS = (6, 4)
SUBTASKS = ("reach", "grasp", "lift")


def write_with(root, columns, version="v3.0"):
    """Write a dataset whose rows have further columns: by name the declared dtype, and values by (episode, frame)."""
    write_dataset(root, SynthSpec(version=version, lengths=LENGTHS, cameras=(), robot_type=root.name))
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    for name, (dtype, _) in columns.items():
        info["features"][name] = {"dtype": dtype, "shape": [1], "names": None}
    path.write_text(json.dumps(info))
    for file in sorted((root / "data").rglob("*.parquet")):
        table = pq.read_table(file)
        places = zip(table.column("episode_index").to_pylist(), table.column("frame_index").to_pylist(), strict=True)
        places = list(places)
        for name, (_, value) in columns.items():
            table = table.append_column(name, pa.array([value(*place) for place in places]))
        pq.write_table(table, file)
    return str(root)


def write_subtasks(root, number=lambda episode, frame: (episode + frame) % 3):
    """Write a dataset with subtasks as LeRobot 0.5 has them: the text is a pandas index, and its rows are looked up."""
    written = write_with(root, {"subtask_index": ("int64", number)})
    # The column disagrees with the rows, as in files that were edited: rows decide.
    table = pa.table({"subtask_index": [2, 1, 0], "subtask": list(SUBTASKS)})
    pq.write_table(table, root / "meta/subtasks.parquet")
    return written


@pytest.fixture(scope="module")
def subtasks(tmp_path_factory):
    return write_subtasks(tmp_path_factory.mktemp("texts") / "subtasks")


def test_a_sample_has_the_subtask_of_its_frame(subtasks):
    dataset = open_dataset(subtasks)

    for episode, length in enumerate(LENGTHS):
        for frame in range(length):
            assert dataset.sample_of(episode, frame)["subtask"] == SUBTASKS[(episode + frame) % 3]


def test_batches_have_texts_with_and_without_windows(subtasks):
    plain = open_dataset(subtasks)

    for dataset in (plain, plain.windowed(offsets={"subtask": [-1, 0, 2]}), plain.select_features(["subtask"])):
        batches = list(local_loader(Pipeline(dataset, batch_size=3, seed=0)))
        assert len(batches) == 4
        for batch in batches:
            assert_equals_samples(batch, dataset)


def test_a_window_of_subtasks_repeats_at_the_ends(subtasks):
    sample = open_dataset(subtasks).windowed(offsets={"subtask": [-1, 0, 2]}).sample_of(0, 5)

    assert sample["subtask"] == ["grasp", "lift", "lift"]
    assert sample["subtask_is_pad"].tolist() == [False, False, True]


def test_a_member_without_subtasks_has_empty_ones(subtasks, tmp_path):
    other = str(write_dataset(tmp_path / "plain", SynthSpec(lengths=(5,), cameras=())))
    mixture = Mixture([subtasks, other], on_missing="fill", progress=False)

    batches = list(local_loader(Pipeline(mixture, batch_size=4, seed=0)))

    seen = set()
    for batch in batches:
        for number, episode, frame, text in zip(
            batch["dataset_index"], batch["episode_index"], batch["frame_index"], batch["subtask"], strict=True
        ):
            seen.add(int(number))
            assert text == ("" if number else SUBTASKS[(int(episode) + int(frame)) % 3])
    assert seen == {0, 1}


def test_a_subtask_that_is_not_listed_is_bad_data_of_its_episode(tmp_path):
    root = write_subtasks(tmp_path / "bad", lambda episode, frame: 7 if (episode, frame) == (1, 2) else 0)
    dataset = open_dataset(root)

    with pytest.raises(DatasetError, match=r"column 'subtask_index' of episode 1 .* has 7, and meta/subtasks\.parquet"):
        dataset.sample_of(1, 0)
    loader = local_loader(Pipeline(dataset, batch_size=3, seed=0, on_bad_episode="skip"))
    with pytest.warns(UserWarning, match="left out 1 bad span"):
        came = [episode for batch in loader for episode in batch["episode_index"].tolist()]
    assert set(came) == {0}
    without = dataset.drop_features(["subtask"])
    assert sum(len(batch["index"]) for batch in local_loader(Pipeline(without, batch_size=3, seed=0))) == 10


def test_without_the_file_there_is_no_subtask(tmp_path):
    root = write_with(tmp_path / "numbers", {"subtask_index": ("int64", lambda *_: 0)})

    sample = open_dataset(root)[0]

    assert "subtask" not in sample
    assert sample["subtask_index"] == 0


def test_a_column_of_that_name_stays_what_it_is(tmp_path):
    root = tmp_path / "own"
    write_with(root, {"subtask_index": ("int64", lambda *_: 0), "subtask": ("string", lambda *_: "its own")})
    pq.write_table(pa.table({"subtask": ["listed"], "subtask_index": [0]}), root / "meta/subtasks.parquet")

    assert open_dataset(str(root))[0]["subtask"] == "its own"


def test_the_subtask_of_language_records_is_the_one_that_has_begun(tmp_path):
    def records(*_):
        about = {"role": "assistant", "camera": None, "tool_calls": None}
        return [
            {**about, "style": "plan", "content": "a plan", "timestamp": 0.0},
            {**about, "style": "subtask", "content": "grasp", "timestamp": float(np.float32(0.3))},
            {**about, "style": "subtask", "content": "reach", "timestamp": float(np.float32(0.1))},
        ]

    root = write_with(tmp_path / "records", {"language_persistent": ("language", records)})
    dataset = open_dataset(root)

    assert [dataset.sample_of(0, frame)["subtask"] for frame in range(5)] == ["", "reach", "reach", "grasp", "grasp"]
    for batch in local_loader(Pipeline(dataset, batch_size=5, seed=0)):
        assert_equals_samples(batch, dataset)


def test_a_reshard_that_numbers_tasks_anew_keeps_the_texts(tmp_path):
    root = tmp_path / "gaps"
    write_with(root, {"annotation.human.action": ("int64", lambda *_: 7)}, version="v2.0")
    (root / "meta/modality.json").write_text(json.dumps({"annotation": {"human.action": {}}}))
    with (root / "meta/tasks.jsonl").open("a") as tasks:
        tasks.write(json.dumps({"task_index": 7, "task": "the seventh"}) + "\n")

    reshard_dataset(str(root), str(tmp_path / "copy"), ReshardSpec(), where="process", allow_findings=True)

    copy = open_dataset(str(tmp_path / "copy"))
    assert copy.meta.tasks.indices["the seventh"] == 2
    assert {sample["annotation.human.action_text"] for sample in copy} == {"the seventh"}


def test_annotations_are_texts_where_the_modality_file_names_them(tmp_path):
    columns = {
        "annotation.human.action": ("int64", lambda episode, frame: (episode + frame) % 2),
        "annotation.human.score": ("int64", lambda *_: 99),
    }
    root = tmp_path / "groot"
    write_with(root, columns, version="v2.0")
    annotation = {"human.action": {}, "human.coarse": {"original_key": "annotation.human.action"}, "human.gone": {}}
    (root / "meta/modality.json").write_text(json.dumps({"state": {}, "annotation": annotation}))
    dataset = open_dataset(str(root))

    sample = dataset.sample_of(0, 1)

    texts = {key: value for key, value in sample.items() if key.endswith("_text")}
    listed = dataset.meta.tasks.text(1)
    assert texts == {"annotation.human.action_text": listed, "annotation.human.coarse_text": listed}
    assert sample["annotation.human.score"] == 99
    for batch in local_loader(Pipeline(dataset, batch_size=5, seed=0)):
        assert_equals_samples(batch, dataset)
