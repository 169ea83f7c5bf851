"""Datasets as people have them: moved, linked, half fetched, without a column. They open, or one is told what to do."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batches import ADDED_KEYS, frames_of_all, frames_of_dataset, local_loader
from damages import DAMAGES, TOP, WRIST, base_spec, edit_info, write_groups

from raypipe.dataset import open_dataset
from raypipe.errors import ConfigError, DatasetError, RaypipeError
from raypipe.mixture import Mixture
from raypipe.pipeline import Pipeline
from raypipe.reshard import reshard_dataset
from raypipe.testing import SynthSpec, write_dataset
from raypipe.validate import KINDS, validate_dataset
from raypipe.views import describe


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Sound datasets by version, with two cameras."""
    folder = tmp_path_factory.mktemp("wild")
    return {version: write_dataset(folder / version, base_spec(version)) for version in ("v3.0", "v2.1", "v2.0")}


@pytest.fixture(params=["v3.0", "v2.1"])
def root(request, bases, tmp_path):
    """A copy of a sound dataset that a test may change."""
    return shutil.copytree(bases[request.param], tmp_path / "dataset")


def findings_of(root, *kinds):
    report = validate_dataset(str(root), where="process")
    return [finding for finding in report.findings if not kinds or finding.kind in kinds]


def test_no_remedy_tells_to_remove_a_file():
    advised = {name: kind.remedy for name, kind in KINDS.items()}

    assert [
        name for name, remedy in advised.items() if any(word in remedy for word in ("remove", "delete", "rm "))
    ] == []


def test_a_file_that_meta_does_not_name_is_said_to_be_left_unread(root):
    DAMAGES["extra-data-file"].apply(root)
    (root / "videos/old.mp4").write_bytes(b"an older take")

    told = {finding.place.file: finding for finding in findings_of(root, "file-extra")}

    assert set(told) == {"data/chunk-000/copy.parquet", "videos/old.mp4"}
    assert all("raypipe does not read it" in finding.remedy for finding in told.values())
    assert "LeRobot" not in told["videos/old.mp4"].message
    assert "LeRobot reads every parquet file below data/" in told["data/chunk-000/copy.parquet"].message


@pytest.mark.parametrize(("folder", "key"), [("data", "data_path"), ("videos", "video_path")])
def test_files_elsewhere_than_the_template_says_are_told_with_the_template_that_fits(root, folder, key):
    (root / folder).rename(root / f"{folder}-moved")

    told = findings_of(root)

    assert {finding.kind for finding in told if finding.severity != "note"} == {"template-mismatch"}
    assert "file-extra" not in {finding.kind for finding in told}
    mended = told[0].message.rpartition("there is ")[2].strip("'")
    edit_info(root, lambda info: info.update({key: mended}))
    assert findings_of(root) == []


INDEX_COLUMNS = ("timestamp", "frame_index", "episode_index", "index", "task_index")


@pytest.mark.parametrize("dropped", INDEX_COLUMNS[:4])
def test_an_index_column_that_lacks_is_derived_and_the_others_are_read(tmp_path, dropped):
    spec = SynthSpec(version="v2.0", lengths=(5, 7), cameras=(), tasks=("pick", "place"), two_tasks=True)
    whole = open_dataset(str(write_dataset(tmp_path / "whole", spec)))
    root = write_dataset(tmp_path / "lacking", spec)
    edit_info(root, lambda info: info["features"].pop(dropped))
    for path in root.glob("data/*/*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns([dropped]), path)
    # As GR00T's tools write it: the episode table has texts that are no tasks of the rows.
    lines = [json.loads(line) for line in (root / "meta/episodes.jsonl").read_text().splitlines()]
    (root / "meta/episodes.jsonl").write_text(
        "".join(json.dumps({**line, "tasks": ["valid", "another"]}) + "\n" for line in lines)
    )

    lacking = open_dataset(str(root))

    assert lacking.meta.num_frames == 12
    for i in range(12):
        assert {name: lacking[i][name] for name in (*INDEX_COLUMNS, "task")} == {
            name: whole[i][name] for name in (*INDEX_COLUMNS, "task")
        }
    assert any(dropped in note for note in describe(str(root)).notes)
    assert not [finding for finding in findings_of(root) if finding.severity == "error"]
    reshard_dataset(str(root), tmp_path / "copy", where="process")
    assert open_dataset(str(tmp_path / "copy"))[7]["task"] == whole[7]["task"]


def test_a_stray_copy_of_the_episode_table_is_named_and_not_read(bases, tmp_path):
    root = shutil.copytree(bases["v3.0"], tmp_path / "dataset")
    stray = "meta/episodes/file-000.parquet"
    shutil.copy(root / "meta/episodes/chunk-000/file-000.parquet", root / stray)

    assert open_dataset(str(root)).meta.episodes.episode_index.tolist() == [0, 1, 2, 3, 4]

    assert [note for note in describe(str(root)).notes if stray in note]
    assert [(finding.kind, finding.severity, finding.place.file) for finding in findings_of(root)] == [
        ("file-extra", "note", stray)
    ]
    reshard_dataset(str(root), tmp_path / "copy", where="process")
    assert findings_of(tmp_path / "copy") == []


def test_an_episode_table_above_its_folders_alone_is_read(bases, tmp_path):
    root = shutil.copytree(bases["v3.0"], tmp_path / "dataset")
    shutil.move(root / "meta/episodes/chunk-000/file-000.parquet", root / "meta/episodes/file-000.parquet")

    assert len(open_dataset(str(root)).meta.episodes) == 5


def test_an_episode_that_two_tables_list_is_told_with_both(bases, tmp_path):
    root = shutil.copytree(bases["v3.0"], tmp_path / "dataset")
    first, copy = (root / f"meta/episodes/chunk-000/{name}.parquet" for name in ("file-000", "file-000 (copy)"))
    shutil.copy(first, copy)

    with pytest.raises(
        DatasetError, match=r"episode 0 more than once.*file-000 \(copy\).parquet and .*file-000.parquet"
    ):
        open_dataset(str(root))


@pytest.mark.parametrize("linked", ["data", "videos", "meta", "data/chunk-000", "meta/episodes/chunk-000"])
def test_a_linked_folder_is_seen_by_all(root, tmp_path, linked):
    if not (root / linked).exists():
        linked = "meta"
    frames = len(open_dataset(str(root)))
    (root / linked).rename(tmp_path / "elsewhere")
    (root / linked).symlink_to(tmp_path / "elsewhere", target_is_directory=True)

    dataset = open_dataset(str(root))

    assert len(dataset) == frames
    assert dataset[frames - 1]["task"]
    assert describe(str(root)).frames == frames
    assert findings_of(root) == []
    reshard_dataset(str(root), tmp_path / "copy", where="process")
    assert findings_of(tmp_path / "copy") == []


def test_a_folder_that_links_to_itself_is_listed_once(root):
    before = open_dataset(str(root)).meta.storage.list_files()
    (root / "data/again").symlink_to(root, target_is_directory=True)

    assert open_dataset(str(root)).meta.storage.list_files() == before


def test_a_link_to_nothing_is_no_file(root):
    (root / "data/gone.parquet").symlink_to(root / "nowhere")

    assert "data/gone.parquet" not in open_dataset(str(root)).meta.storage.list_files()


@pytest.mark.parametrize("template", ["", "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"])
def test_a_dataset_without_its_data_files_is_told_so_and_not_of_its_tables(bases, tmp_path, template):
    root = shutil.copytree(bases["v3.0"], tmp_path / "dataset")
    shutil.rmtree(root / "data")
    edit_info(root, lambda info: info.update(data_path=template or info["data_path"]))

    dataset = open_dataset(str(root))

    assert len(dataset.meta.episodes) == 5
    with pytest.raises(DatasetError, match=r"missing file .*data/chunk-000/"):
        dataset[0]
    assert {finding.kind for finding in findings_of(root) if finding.severity == "error"} == {"data-missing"}


@pytest.mark.parametrize("name", ["datasets/mistyped", "mistyped"])
def test_a_mistyped_path_is_told_as_no_such_folder_first(tmp_path, monkeypatch, name):
    (tmp_path / "datasets").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(RaypipeError, match=r"^no such folder: ") as told:
        open_dataset(name)

    assert str(tmp_path / name) in str(told.value)


def add_binary_column(root):
    edit_info(root, lambda info: info["features"].update(blob={"dtype": "binary", "shape": [1], "names": None}))
    for path in root.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        numbers = table.column("episode_index").to_numpy()
        table = table.append_column("blob", pa.array([b"\x00\xff"] * len(table)))
        write_groups(path, [table.filter(pa.array(numbers == number)) for number in np.unique(numbers)])


def test_a_feature_of_an_unknown_dtype_is_left_out_by_name_and_the_rest_is_read(root, bases, tmp_path):
    whole = open_dataset(str(root))
    add_binary_column(root)

    with pytest.warns(UserWarning, match=r"leaving out blob: raypipe has no words for the dtype 'binary'") as told:
        dataset = open_dataset(str(root))

    assert len(told) == 1
    assert set(dataset[3]) == set(whole[3])
    assert [note for note in describe(str(root)).notes if "blob" in note] == [
        "feature 'blob' is left out of samples: raypipe has no words for the dtype 'binary'"
    ]
    assert [(finding.kind, finding.place.feature) for finding in findings_of(root)] == [("feature-unknown", "blob")]
    assert [note.text for note in Mixture([str(root)]).notes if "blob" in note.text] == [
        "feature 'blob' is left out: raypipe has no words for the dtype 'binary'"
    ]
    reshard_dataset(str(root), tmp_path / "copy", where="process")
    assert pq.read_table(tmp_path / "copy/data/chunk-000/file-000.parquet").column("blob")[0].as_py() == b"\x00\xff"


@pytest.mark.parametrize("dtype", ["binary", "object", "bytes", "str", "datetime64[s]", "complex64", "float23"])
def test_only_numbers_are_vectors(root, dtype):
    edit_info(root, lambda info: info["features"]["action"].update(dtype=dtype))

    with pytest.warns(UserWarning, match="leaving out action"):
        assert "action" not in open_dataset(str(root))[0]


def test_features_are_chosen_or_dropped_in_samples_and_batches(root):
    dataset = open_dataset(str(root)).windowed(offsets={"action": (0, 1), "observation.state": (-1, 0)})
    index = {"timestamp", "frame_index", "episode_index", "index", "task_index", "task"}

    chosen = dataset.select_features(["action", TOP])
    dropped = dataset.drop_features(["observation.state", WRIST])

    batches = [next(iter(local_loader(Pipeline(one, batch_size=2, seed=0)))) for one in (chosen, dropped)]
    assert set(chosen[0]) == set(dropped[0]) == {*index, "action", "action_is_pad", TOP}
    assert set(batches[0]) == set(batches[1])
    assert {TOP, "action", "action_is_pad"} < set(batches[0])
    assert not {"observation.state", "observation.state_is_pad", WRIST} & set(batches[0])
    assert chosen.meta.order_fingerprint == dataset.meta.order_fingerprint
    with pytest.raises(ConfigError, match=r"no feature 'actoin'.*'action'"):
        dataset.select_features(["actoin"])
    with pytest.raises(ConfigError, match="no feature 'frame_index' to drop"):
        dataset.drop_features(["frame_index"])


def test_a_pipeline_gives_the_chosen_features_and_decodes_no_other_camera(root):
    dataset = open_dataset(str(root))
    for path in root.glob("videos/**/*.mp4"):
        if WRIST in path.parts:
            path.write_bytes(b"no video")

    pipe = Pipeline(dataset, batch_size=4, seed=0, features=["action", TOP], delta_timestamps={"action": [0.0, 0.1]})
    batches = list(local_loader(pipe))

    kept = {"timestamp", "frame_index", "episode_index", "index", "task_index", "task", "action", "action_is_pad", TOP}
    assert all(set(batch) - ADDED_KEYS == kept for batch in batches)
    assert sorted(frames_of_all(batches)) == frames_of_dataset(dataset)
    with pytest.raises(DatasetError, match="damaged video"):
        list(local_loader(Pipeline(dataset, batch_size=4, seed=0)))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"features": ["actoin"]}, r"no feature 'actoin'; did you mean 'action'\?"),
        ({"features": "action"}, r"give a list of names, as \['action'\]"),
        ({"features": [TOP], "delta_timestamps": {"action": [0.0]}}, "'action'"),
    ],
)
def test_features_that_are_not_there_are_refused_with_the_nearest(root, choice, message):
    for dataset in (open_dataset(str(root)), Mixture([str(root)])):
        with pytest.raises(ConfigError, match=message):
            Pipeline(dataset, batch_size=4, seed=0, **choice)


@pytest.mark.parametrize("pattern", ["videos/**/*.mp4", "data/**/*.parquet", "meta/*.json", "meta/**/*.*"])
def test_pointers_of_git_lfs_are_named_as_such(root, pattern):
    for path in root.glob(pattern):
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4711\n")

    with pytest.raises(DatasetError, match=r"Git LFS pointer.*git lfs pull"):
        open_dataset(str(root))[0]

    told = [finding.message for finding in findings_of(root) if finding.kind.endswith("-unreadable")]
    assert told
    assert all("is a Git LFS pointer in place of the file. Fetch the files: git lfs pull" in text for text in told)


@pytest.mark.parametrize("lost", [1, 99])
def test_info_tells_what_a_dataset_holds_and_lacks(root, lost):
    whole = describe(str(root))
    gone = sorted(root.glob("data/*/*.parquet"))[:lost]
    for path in gone:
        path.unlink()

    told = describe(str(root))

    assert told.missing_files == tuple(str(path.relative_to(root)) for path in gone)
    assert replace(told, missing_files=(), row_groups=whole.row_groups, timestamp_drift_s=0.0) == replace(
        whole, timestamp_drift_s=0.0
    )


def test_a_camera_that_lies_elsewhere_is_left_out_with_the_template_that_fits(root):
    (root / "videos").rename(root / "video")

    with pytest.warns(UserWarning, match="video_path in info.json gives no file, and 'video/"):
        open_dataset(str(root))

    assert [note for note in describe(str(root)).notes if "'video/" in note]


def test_a_column_that_no_episode_has_is_not_told_with_episodes_to_leave_out(root):
    edit_info(root, lambda info: info["features"].update(effort={"dtype": "float32", "shape": [6], "names": None}))

    told = findings_of(root, "feature-absent", "feature-missing")

    assert [(finding.kind, finding.severity) for finding in told] == [("feature-absent", "warning")]
    assert "episodes" not in told[0].remedy
    edit_info(root, lambda info: info["features"].pop("effort"))
    assert findings_of(root) == []


@pytest.mark.parametrize(
    "name", ["missing-column", "wrong-shape", "wrong-dtype", "null-actions", "lost-rows", "frame-gap"]
)
def test_an_error_of_rows_names_both_ways_to_go_on(root, name):
    hit = DAMAGES[name].apply(root)

    with pytest.raises(DatasetError, match=r"'exclude': \(.*on_bad_episode='skip'"):
        open_dataset(str(root)).sample_of(hit.episodes[0], 4)


def test_reshard_declares_lists_that_info_did_not(root, tmp_path):
    for path in root.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        efforts = pa.array([[0.5, 1.5, 2.5]] * len(table), pa.list_(pa.float64()))
        pq.write_table(table.append_column("effort", efforts), path)

    reshard_dataset(str(root), tmp_path / "copy", where="process")

    declared = json.loads((tmp_path / "copy/meta/info.json").read_text())["features"]["effort"]
    assert declared == {"dtype": "float64", "shape": [3], "names": None}
    assert open_dataset(str(tmp_path / "copy"))[0]["effort"].tolist() == [0.5, 1.5, 2.5]
    assert not [finding for finding in findings_of(tmp_path / "copy") if finding.severity == "error"]
