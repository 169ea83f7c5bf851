"""Real datasets, checked against an independent reading: plain pyarrow rows, frames by a plain sequential decode."""

import glob
import json
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchcodec.decoders import VideoDecoder

from raypipe.dataset import open_dataset
from raypipe.views import describe

REAL_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

pytestmark = pytest.mark.skipif(not REAL_DATA.exists(), reason="the real datasets are not part of the project")

# version, episodes, frames, cameras on disk, fps, row groups, (width, height)
EXPECTED = {
    "cr5_v21": ("v2.1", 8, 1840, ["observation.images.top"], 10, "per-episode", (640, 480)),
    "groot_simpnp_v20": ("v2.0", 5, 2096, ["observation.images.ego_view"], 20, "per-episode", (256, 256)),
    "piper_v30": (
        "v3.0",
        1,
        300,
        ["observation.images.top", "observation.images.wrist"],
        15,
        "per-episode",
        (424, 240),
    ),
    "so_front_v30": ("v3.0", 1, 296, ["observation.images.front"], 30, "per-episode", (480, 640)),
    "so101_wrist_v30": ("v3.0", 6, 1782, ["observation.images.wrist"], 30, "per-episode", (640, 360)),
    "pusht_v30_novid": ("v3.0", 206, 25650, [], 10, "other", None),
}

_ACTION = "annotation.human.action.task_description"
TEXTS = {
    "groot_simpnp_v20": {
        f"{_ACTION}_text": _ACTION,
        "annotation.human.coarse_action_text": _ACTION,
        "annotation.human.validity_text": "annotation.human.validity",
    }
}
"""Texts that meta/modality.json names, and the column that has the number of their task."""


@pytest.mark.parametrize("name", EXPECTED)
def test_info_of_a_real_dataset_agrees_with_its_description(name):
    version, episodes, frames, cameras, fps, row_groups, size = EXPECTED[name]

    info = describe(str(REAL_DATA / name)).to_json()

    assert (info["version"], info["episodes"], info["frames"], info["fps"]) == (version, episodes, frames, fps)
    assert info["cameras"] == cameras
    assert info["row_groups"] == row_groups
    for camera in cameras:
        assert info["camera_sizes"][camera].startswith(f"{size[0]}x{size[1]} ")


def test_what_real_datasets_lack_is_told():
    assert describe(str(REAL_DATA / "groot_simpnp_v20")).missing_cameras == ("observation.images.egoview",)
    assert describe(str(REAL_DATA / "pusht_v30_novid")).missing_cameras == ("observation.image",)
    assert describe(str(REAL_DATA / "cr5_v21")).timestamp_drift_s > 1.5


@cache
def plain_rows(name):
    files = sorted(glob.glob(str(REAL_DATA / name / "data/*/*.parquet")))
    return pa.concat_tables(pq.read_table(path) for path in files).to_pylist()


@cache
def plain_video(path):
    decoder = VideoDecoder(path)
    return decoder.get_frames_in_range(0, len(decoder)).data


def plain_frame(name, camera, episode, frame):
    root = REAL_DATA / name
    if "v30" in name:
        # Each of these cameras has one file with all episodes back to back.
        lengths = [0] * (episode + 1)
        for row in plain_rows(name):
            if row["episode_index"] < episode:
                lengths[row["episode_index"]] += 1
        return plain_video(str(root / f"videos/{camera}/chunk-000/file-000.mp4"))[sum(lengths) + frame]
    return plain_video(str(root / f"videos/chunk-000/{camera}/episode_{episode:06d}.mp4"))[frame]


def plain_tasks(name):
    if "v30" in name:
        table = pq.read_table(REAL_DATA / name / "meta/tasks.parquet")
        return table.column(next(c for c in table.column_names if c != "task_index")).to_pylist()
    lines = (REAL_DATA / name / "meta/tasks.jsonl").read_text().splitlines()
    return {line["task_index"]: line["task"] for line in map(json.loads, lines)}


def some_frames(name):
    """The first, the last and two middle frames of the first, a middle and the last episode."""
    rows = plain_rows(name)
    episodes = sorted({row["episode_index"] for row in rows})
    for episode in sorted({episodes[0], episodes[len(episodes) // 2], episodes[-1]}):
        length = sum(row["episode_index"] == episode for row in rows)
        for frame in sorted({0, 1, length // 2, length - 1}):
            yield episode, frame


@pytest.mark.parametrize("name", EXPECTED)
def test_every_key_of_real_samples_equals_a_plain_reading(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dataset = open_dataset(str(REAL_DATA / name))
    cameras = EXPECTED[name][3]
    rows, tasks = plain_rows(name), plain_tasks(name)
    starts = {}
    for position, row in enumerate(rows):
        starts.setdefault(row["episode_index"], position)

    for episode, frame in some_frames(name):
        sample = dataset.sample(starts[episode] + frame)
        expected = dict(rows[starts[episode] + frame])
        expected.setdefault("frame_index", frame)
        texts = TEXTS.get(name, {})
        assert set(sample) == set(expected) | set(cameras) | set(texts) | {"task"}
        for key, column in texts.items():
            assert sample[key] == tasks[expected[column]]
        for key, value in expected.items():
            assert_value(sample[key], value)
        assert sample["task"] == tasks[expected["task_index"]]
        for camera in cameras:
            assert torch.equal(sample[camera], plain_frame(name, camera, episode, frame))


def assert_value(tensor, value):
    stored = np.asarray(value)
    dtype = {"f": torch.float32, "i": torch.int64, "b": torch.bool}[stored.dtype.kind]
    assert tensor.dtype == dtype
    np.testing.assert_array_equal(tensor.numpy(), stored.astype(tensor.numpy().dtype))


@pytest.mark.parametrize("name", ["so101_wrist_v30", "groot_simpnp_v20"])
def test_windows_of_real_samples_equal_single_samples(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dataset = open_dataset(str(REAL_DATA / name))
    camera, fps = EXPECTED[name][3][0], EXPECTED[name][4]
    windowed = dataset.windowed({"action": [i / fps for i in range(4)], camera: [-1 / fps, 0.0]})
    first, last = 0, int(dataset.meta.episodes.length[0]) - 1

    at_start, at_end = windowed[first], windowed[last]

    assert torch.equal(at_start[camera], torch.stack([dataset[0][camera]] * 2))
    assert at_start[f"{camera}_is_pad"].tolist() == [True, False]
    assert torch.equal(at_end["action"], torch.stack([dataset[last]["action"]] * 4))
    assert at_end["action_is_pad"].tolist() == [False, True, True, True]
    assert torch.equal(windowed[2]["action"], torch.stack([dataset[i]["action"] for i in range(2, 6)]))
