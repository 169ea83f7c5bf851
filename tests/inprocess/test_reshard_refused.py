"""What reshard refuses, what it says then, and that it leaves nothing behind."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reshard_checks import digests

from raypipe.errors import ConfigError, DatasetError, DecodeError, ResumeError
from raypipe.reshard import ReshardSpec, parse_spec, reshard_dataset
from raypipe.reshard import run as run_module
from raypipe.testing import SynthSpec, write_dataset

TOP = "observation.images.top"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("source") / "dataset", SynthSpec(version="v2.1"))


@pytest.fixture
def damaged(source, tmp_path):
    """A copy of the source to break."""
    return shutil.copytree(source, tmp_path / "damaged")


def reshard(root, out, *, allow_findings=False, **choices):
    return reshard_dataset(str(root), out, ReshardSpec(**choices), where="process", allow_findings=allow_findings)


@pytest.mark.parametrize("inside", ["", "copy", "../"])
def test_a_dataset_is_never_written_over(source, inside):
    before = digests(source)

    with pytest.raises(ConfigError, match="never changes a dataset in place"):
        reshard(source, source / inside)

    assert digests(source) == before


def test_a_folder_of_somebody_else_is_refused(source, tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/file").write_text("mine")

    with pytest.raises(ConfigError, match="is there already, and was not made by these arguments"):
        reshard(source, tmp_path / "copy")

    assert (tmp_path / "copy/file").read_text() == "mine"
    assert not list(tmp_path.glob("*.partial-*"))


def test_an_empty_folder_may_be_there(source, tmp_path):
    (tmp_path / "copy").mkdir()

    reshard(source, tmp_path / "copy")

    assert (tmp_path / "copy/meta/info.json").exists()


def test_a_store_is_refused(source):
    with pytest.raises(ConfigError, match="OUT is 's3://bucket/copy'"):
        reshard(source, "s3://bucket/copy")


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"exclude": (2, 9)}, r"exclude names the episodes \[9\].*has 5 episodes, numbered 0 to 4"),
        ({"exclude": (0, 1, 2, 3, 4)}, "nothing would be left"),
        ({"drop_cameras": ("observation.images.tip",)}, "did you mean 'observation.images.top'"),
    ],
)
def test_what_is_not_there_is_refused_by_name(source, tmp_path, choice, told):
    with pytest.raises(ConfigError, match=told):
        reshard(source, tmp_path / "copy", **choice)

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("choice", [{"crf": 64}, {"gop": 3_000_000_000}, {"size": (20_000, 20_000)}])
def test_what_the_encoder_cannot_do_is_refused_before_anything_is_written(source, tmp_path, choice):
    with pytest.raises(ConfigError, match=r"top' cannot be re-encoded to 'vp9' of \d+x\d+ with gop \d+ and crf \d+: "):
        reshard(source, tmp_path / "copy", codec="vp9", **choice)

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"exclude": "9" * 5000}, "'9999.*' is no number and no run"),
        ({"gop": "9" * 5000}, "got '9999"),
        ({"size": "9" * 5000 + "x64"}, "got '9999"),
    ],
    ids=["exclude", "gop", "size"],
)
def test_a_number_without_end_on_the_command_line_is_refused(option, told):
    encoding = {"gop": "source", "size": "source", "codec": "source", "crf": 24, **option}

    with pytest.raises(ConfigError, match=told):
        parse_spec(
            exclude=encoding.pop("exclude", ""), exclude_file=None, drop_cameras=(), encoding=encoding, limits={}
        )


def test_a_camera_without_files_is_refused_with_the_option_that_helps(damaged, tmp_path):
    shutil.rmtree(damaged / "videos/chunk-000" / TOP)

    with pytest.raises(DatasetError, match=f"--drop-camera {TOP}"):
        reshard(damaged, tmp_path / "copy")

    reshard(damaged, tmp_path / "copy", drop_cameras=(TOP,))
    assert (tmp_path / "copy/meta/info.json").exists()


def test_a_missing_video_of_an_episode_is_named(damaged, tmp_path):
    (damaged / f"videos/chunk-000/{TOP}/episode_000003.mp4").unlink()

    with pytest.raises(DatasetError, match="episode_000003"):
        reshard(damaged, tmp_path / "copy")

    assert not (tmp_path / "copy").exists()


def test_a_short_video_is_named_and_may_be_excluded(damaged, tmp_path):
    folder = damaged / f"videos/chunk-000/{TOP}"
    shutil.copy(folder / "episode_000001.mp4", folder / "episode_000002.mp4")

    with pytest.raises(DecodeError, match=r"episode 2 .* has 1 frame, and the episode needs"):
        reshard(damaged, tmp_path / "copy")

    reshard(damaged, tmp_path / "copy", exclude=(2,))
    assert [path.name for path in tmp_path.iterdir() if "copy" in path.name] == ["copy"]
    assert json.loads((tmp_path / "copy/meta/info.json").read_text())["total_episodes"] == 4


def test_a_data_file_with_a_column_of_its_own_is_named(damaged, tmp_path):
    path = damaged / "data/chunk-000/episode_000002.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("extra", pa.array(range(len(table)))), path)

    with pytest.raises(DatasetError, match=r"episode_000002.*\['extra'\]"):
        reshard(damaged, tmp_path / "copy")


def test_an_unknown_task_is_named(damaged, tmp_path):
    (damaged / "meta/tasks.jsonl").write_text('{"task_index": 0, "task": "only"}\n')
    info = json.loads((damaged / "meta/info.json").read_text())
    (damaged / "meta/info.json").write_text(json.dumps(info | {"total_tasks": 1}))

    with pytest.raises(DatasetError, match=r"episode 1 .* has task_index 1"):
        reshard(damaged, tmp_path / "copy")


@pytest.mark.parametrize("has_tasks", [True, False])
def test_a_row_without_a_task_is_named(damaged, tmp_path, has_tasks):
    path = damaged / "data/chunk-000/episode_000001.parquet"
    table = pq.read_table(path)
    nothing = pa.nulls(len(table), pa.int64())
    pq.write_table(table.set_column(table.column_names.index("task_index"), "task_index", nothing), path)
    if not has_tasks:
        info = json.loads((damaged / "meta/info.json").read_text())
        (damaged / "meta/info.json").write_text(json.dumps(info | {"total_tasks": 0}))

    with pytest.raises(DatasetError, match=r"'task_index' of episode 1 .* has empty values"):
        reshard(damaged, tmp_path / "copy", allow_findings=True)


def test_errors_of_the_source_are_kept_only_where_they_are_allowed(damaged, tmp_path):
    path = damaged / "data/chunk-000/episode_000000.parquet"
    table = pq.read_table(path)
    flat = np.full(len(table) * 6, np.nan, dtype=np.float32)
    place = table.column_names.index("action")
    broken = pa.FixedSizeListArray.from_arrays(pa.array(flat), 6)
    pq.write_table(table.set_column(place, "action", broken), path)

    with pytest.raises(DatasetError, match="--allow-findings"):
        reshard(damaged, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()

    report = reshard(damaged, tmp_path / "copy", allow_findings=True)
    assert report.num_kept_files == report.num_data_files + report.num_video_files
    assert any("validate found" in note for note in report.notes)


def interrupted(source, out, monkeypatch, **choices):
    """Leave an unfinished copy: everything is written, and the run ends before its folder is renamed."""
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "publish", lambda workspace: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            reshard(source, out, **choices)
    assert not out.exists()


def test_an_unfinished_copy_of_other_arguments_is_in_the_way(source, tmp_path, monkeypatch):
    out = tmp_path / "copy"
    interrupted(source, out, monkeypatch, exclude=(1,))

    with pytest.raises(ResumeError, match=r"exclude was \[1\] and is \[2\].*rm -r"):
        reshard(source, out, exclude=(2,))

    report = reshard(source, out, exclude=(1,))
    assert report.num_kept_files == report.num_data_files + report.num_video_files


def test_an_unfinished_copy_that_says_nothing_is_in_the_way(source, tmp_path):
    (tmp_path / "copy.partial-0").mkdir()
    (tmp_path / "copy.partial-0/manifest.json").write_text("[]")

    with pytest.raises(ResumeError, match="cannot be told apart"):
        reshard(source, tmp_path / "copy")


def test_an_unfinished_copy_of_a_source_that_changed_is_in_the_way(damaged, tmp_path, monkeypatch):
    out = tmp_path / "copy"
    interrupted(damaged, out, monkeypatch)
    with open(damaged / "meta/episodes.jsonl", "a") as stream:
        stream.write("\n")

    with pytest.raises(ResumeError, match="is another one or has changed since"):
        reshard(damaged, out)


def test_two_runs_of_the_same_arguments_do_not_meet(source, tmp_path, monkeypatch):
    out = tmp_path / "copy"

    def at_the_same_time(*_args, **_choices):
        with pytest.raises(ResumeError, match="another run of the same arguments is at work"):
            reshard(source, out)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "check_copy", at_the_same_time)
    with pytest.raises(KeyboardInterrupt):
        reshard(source, out)


def test_a_finished_copy_is_left_alone_by_the_same_arguments(source, tmp_path):
    reshard(source, tmp_path / "copy", exclude=(1,))
    before = digests(tmp_path / "copy")

    report = reshard(source, tmp_path / "copy", exclude=(1,))

    assert report.was_complete
    assert report.num_episodes == 4
    assert digests(tmp_path / "copy") == before
    with pytest.raises(ConfigError, match="was not made by these arguments"):
        reshard(source, tmp_path / "copy", exclude=(2,))


def test_a_file_that_lost_its_end_is_written_again(source, tmp_path, monkeypatch):
    reshard(source, tmp_path / "whole")
    out = tmp_path / "copy"
    interrupted(source, out, monkeypatch)
    partial = next(tmp_path.glob("copy.partial-*"))
    video = next((partial / "dataset").rglob("*.mp4"))
    video.write_bytes(video.read_bytes()[:100])

    report = reshard(source, out)

    assert report.num_kept_files == report.num_data_files + report.num_video_files - 1
    assert digests(out) == digests(tmp_path / "whole")
