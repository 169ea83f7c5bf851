"""Videos that are not as the recorder writes them, and the command line around it all."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from reshard_checks import assert_times_exact, camera_packets, copied_rows, packets
from typer.testing import CliRunner

from raypipe.cli import app
from raypipe.dataset import open_dataset
from raypipe.reshard import ReshardSpec, reshard_dataset
from raypipe.testing import CameraSpec, SynthSpec, read_stamp, write_dataset

TOP = "observation.images.top"
VIDEO = f"videos/chunk-000/{TOP}/episode_00000{{}}.mp4"

needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="there is no ffmpeg command")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    spec = SynthSpec(version="v2.1", lengths=(8, 6, 7), cameras=(CameraSpec(name=TOP, gop=4),))
    return write_dataset(tmp_path_factory.mktemp("made") / "dataset", spec)


@pytest.fixture
def source(made, tmp_path):
    """A copy of the made dataset to change."""
    return shutil.copytree(made, tmp_path / "source")


def change(root, episode, *options):
    """Write an episode's video again with ffmpeg, its packets copied."""
    path = root / VIDEO.format(episode)
    before = path.with_name("before.mp4")
    path.rename(before)
    command = ["ffmpeg", "-v", "error", "-y", "-i", str(before), *options, "-c:v", "copy", str(path)]
    subprocess.run(command, check=True)
    before.unlink()


def change_column(path, name, change):
    """Write a data file again with another column of this name."""
    table = pq.read_table(path)
    column = change(table.column(name).to_pylist())
    pq.write_table(table.set_column(table.column_names.index(name), name, column), path)


def reshard(root, out, **choices):
    return reshard_dataset(str(root), out, ReshardSpec(**choices), where="process", allow_findings=True)


def assert_same_frames(made, out):
    for old, new in zip(open_dataset(str(made)), open_dataset(str(out)), strict=True):
        assert torch.equal(old[TOP], new[TOP])


def test_further_fields_of_an_episodes_line_are_copied_whatever_their_names(source, tmp_path):
    lines = [json.loads(line) for line in (source / "meta/episodes.jsonl").read_text().splitlines()]
    more = [{"data/source": f"lab {line['episode_index']}", "videos/quality": 3, "operator": "ann"} for line in lines]
    # In another order than their numbers.
    text = "\n".join(json.dumps({**line, **own}) for line, own in reversed(list(zip(lines, more, strict=True))))
    (source / "meta/episodes.jsonl").write_text(text)

    reshard(source, tmp_path / "copy")

    table = pq.read_table(tmp_path / "copy/meta/episodes/chunk-000/file-000.parquet")
    assert table.select(list(more[0])).to_pylist() == more


def test_further_files_of_meta_are_copied_whatever_their_names(source, tmp_path):
    names = ("tasks_zh.jsonl", "episodes_quality.csv", "stats.json.bak", "modality.json")
    for name in names:
        (source / "meta" / name).write_text(name)

    reshard(source, tmp_path / "copy")

    assert [(tmp_path / "copy/meta" / name).read_text() for name in names] == list(names)


def test_tasks_that_the_table_lists_by_number_are_those_of_the_rows_in_the_copy(source, tmp_path):
    tasks = ("pick up the cube", "open the drawer")
    # Numbered from 1, and in the copy from 0.
    lines = [{"task_index": number + 1, "task": task} for number, task in enumerate(tasks)]
    (source / "meta/tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    episodes = [json.loads(line) for line in (source / "meta/episodes.jsonl").read_text().splitlines()]
    for episode in episodes:
        episode["tasks"] = [str(episode["episode_index"] % 2 + 1)]
    (source / "meta/episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in episodes))
    for path in source.glob("data/*/*.parquet"):
        change_column(path, "task_index", lambda values: pa.array(np.array(values) + 1))

    report = reshard(source, tmp_path / "copy")

    table = pq.read_table(tmp_path / "copy/meta/episodes/chunk-000/file-000.parquet")
    assert table.column("tasks").to_pylist() == [[tasks[0]], [tasks[1]], [tasks[0]]]
    assert report.notes == ()


def test_values_that_are_no_numbers_fit_the_type_of_another_file(source, tmp_path):
    for number, path in enumerate(sorted(source.glob("data/*/*.parquet"))):
        kind = pa.list_(pa.float32() if number == 0 else pa.float64())
        change_column(path, "action", lambda rows, kind=kind: pa.array([[float("nan"), *rows[0][1:]], *rows[1:]], kind))

    reshard(source, tmp_path / "copy")

    assert all(np.isnan(rows.column("action")[0].as_py()[0]) for rows in copied_rows(tmp_path / "copy"))


def test_a_feature_without_numbers_is_copied(source, tmp_path):
    info = json.loads((source / "meta/info.json").read_text())
    info["features"]["nothing"] = {"dtype": "float32", "shape": [0], "names": None}
    (source / "meta/info.json").write_text(json.dumps(info))
    for path in source.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.append_column("nothing", pa.array([[]] * len(table), pa.list_(pa.float32()))), path)

    reshard(source, tmp_path / "copy")

    assert open_dataset(str(tmp_path / "copy"))[0]["nothing"].shape == (0,)


def test_a_file_whose_name_is_no_text_is_left_out_and_told(source, tmp_path):
    Path(os.fsdecode(os.fsencode(source) + b"/notes\xff.txt")).touch()

    report = reshard(source, tmp_path / "copy")

    assert report.notes == ("1 file that no episode uses was left out: notes\udcff.txt",)


@needs_ffmpeg
def test_a_fragmented_video_is_copied_as_it_is(made, source, tmp_path):
    change(source, 1, "-movflags", "frag_keyframe+empty_moov")
    fragmented = (source / VIDEO.format(1)).read_bytes()

    report = reshard(source, tmp_path / "copy")

    assert any("1 video without a plain index" in note for note in report.notes)
    assert (tmp_path / f"copy/videos/{TOP}/chunk-000/file-001.mp4").read_bytes() == fragmented
    assert report.num_video_files == 3
    assert_same_frames(made, tmp_path / "copy")


@needs_ffmpeg
def test_sound_is_left_out_and_told(made, source, tmp_path):
    change(source, 0, "-f", "lavfi", "-i", "sine=d=0.5", "-c:a", "aac", "-map", "0:v", "-map", "1:a")

    report = reshard(source, tmp_path / "copy")

    assert any("sound and other tracks of 1 video were left out" in note for note in report.notes)
    assert camera_packets(tmp_path / "copy", TOP) == camera_packets(made, TOP)
    assert_same_frames(made, tmp_path / "copy")


@needs_ffmpeg
def test_a_video_of_another_clock_gets_a_file_of_its_own(made, source, tmp_path):
    change(source, 1, "-video_track_timescale", "90000")

    report = reshard(source, tmp_path / "copy")

    assert report.num_video_files == 3
    assert_times_exact(tmp_path / "copy")
    assert_same_frames(made, tmp_path / "copy")


def test_frames_behind_the_end_of_an_episode_stay_between_the_episodes(source, tmp_path):
    # Episode 1 has 6 rows, and now a video of 8 frames.
    shutil.copy(source / VIDEO.format(0), source / VIDEO.format(1))

    reshard(source, tmp_path / "copy")

    copy = open_dataset(str(tmp_path / "copy"))
    path = next((tmp_path / "copy").rglob("*.mp4"))
    assert len(packets(path)) == 8 + 8 + 7
    assert_times_exact(tmp_path / "copy")
    stamps = [read_stamp(sample[TOP]) for sample in copy]
    assert [(stamp.episode, stamp.frame) for stamp in stamps[14:]] == [(2, frame) for frame in range(7)]


def test_the_command_line_leaves_out_what_it_is_told(source, tmp_path):
    listed = tmp_path / "bad.txt"
    listed.write_text("# too short\n1\n")
    options = ["--exclude", "0", "--exclude-file", str(listed), "--json"]

    result = CliRunner().invoke(app, ["reshard", str(source), str(tmp_path / "copy"), *options])

    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["num_episodes"], told["num_frames"], told["num_excluded"]) == (1, 7, 2)
    again = CliRunner().invoke(app, ["reshard", str(source), str(tmp_path / "copy"), *options[:-1]])
    assert "is complete already: 1 episode, 7 frames" in again.stdout


def test_a_place_that_is_none_is_refused(source, tmp_path):
    with pytest.raises(ValueError, match="where is 'moon'"):
        reshard_dataset(str(source), tmp_path / "copy", where="moon")

    assert not list(tmp_path.glob("copy*"))
