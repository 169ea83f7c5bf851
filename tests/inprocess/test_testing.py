"""The made datasets are what they say: checked with plain pyarrow, json and a plain sequential decode."""

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torchcodec.decoders import VideoDecoder

from raypipe.errors import ConfigError, DecodeError
from raypipe.testing import (
    GAP_EPISODE,
    CameraSpec,
    Stamp,
    SynthSpec,
    assert_resumes_exactly,
    draw_stamp,
    encoders,
    has_encoder,
    numbered_cameras,
    read_stamp,
    write_dataset,
)

TOP = "observation.images.top"
LENGTHS = (7, 1, 12, 5)
needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs the ffmpeg command")
stamps = st.builds(Stamp, st.integers(0, 2**22 - 1), st.integers(0, 2**22 - 1), st.integers(0, 15))


def one_camera(**changes: object) -> tuple[CameraSpec, ...]:
    return (CameraSpec(name=TOP, **changes),)


def read_info(root: Path) -> dict:
    return json.loads((root / "meta/info.json").read_text())


def read_episodes(root: Path) -> list[dict]:
    files = sorted((root / "meta/episodes").glob("*/*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def decode(path: Path) -> tuple[list[Stamp], list[float]]:
    decoder = VideoDecoder(str(path), seek_mode="exact", num_ffmpeg_threads=1)
    frames = decoder.get_frames_in_range(0, len(decoder))
    return [read_stamp(frame) for frame in frames.data], frames.pts_seconds.tolist()


def episode_stamps(spec: SynthSpec, episode: int, camera: int = 0) -> list[Stamp]:
    return [Stamp(episode, frame, camera) for frame in range(spec.lengths[episode])]


def check_videos(root: Path, spec: SynthSpec) -> None:
    """Every episode of every camera starts at the frame nearest its from_timestamp."""
    info, episodes = read_info(root), read_episodes(root)
    for number, camera in enumerate(spec.cameras):
        decoded = {}
        for episode, row in enumerate(episodes):
            place = {key: row[f"videos/{camera.name}/{key}"] for key in ("chunk_index", "file_index")}
            path = root / info["video_path"].format(video_key=camera.name, **place)
            if path not in decoded:
                decoded[path] = decode(path)
            found, times = decoded[path]
            start = np.abs(np.array(times) - row[f"videos/{camera.name}/from_timestamp"]).argmin()
            assert found[start : start + spec.lengths[episode]] == episode_stamps(spec, episode, number)


@given(stamp=stamps, height=st.integers(32, 120), width=st.integers(32, 120))
@settings(max_examples=50)
def test_stamp_reads_back_at_any_size_that_a_camera_may_have(stamp, height, width):
    frame = draw_stamp(stamp, height, width)

    assert read_stamp(frame) == stamp


def test_stamp_reads_from_every_layout_and_range():
    stamp = Stamp(123456, 4000000, 15)
    frame = torch.from_numpy(draw_stamp(stamp, 48, 64))

    channels_first = frame.permute(2, 0, 1)

    assert read_stamp(channels_first) == stamp
    assert read_stamp(channels_first / 255) == stamp
    assert read_stamp((channels_first / 255 - 0.45) / 0.22) == stamp
    assert read_stamp(frame[..., 0].numpy().astype(np.uint16) * 10) == stamp


def test_stamp_outlives_resizing():
    stamp = Stamp(77, 31, 2)
    frame = torch.from_numpy(draw_stamp(stamp, 96, 128)).permute(2, 0, 1)

    for size in ((32, 32), (17, 23), (224, 224)):
        resized = torch.nn.functional.interpolate(frame[None].float(), size=size, mode="bilinear", antialias=True)
        assert read_stamp(resized[0]) == stamp


@pytest.mark.parametrize("frame", [np.zeros((3, 32, 32)), np.full((32, 32, 3), 255, np.uint8)])
def test_stamp_of_a_blank_frame_is_a_decode_error(frame):
    with pytest.raises(DecodeError, match="checksum"):
        read_stamp(frame)


def test_stamp_of_a_flipped_frame_is_a_decode_error():
    frame = draw_stamp(Stamp(3, 9, 1), 64, 64)

    with pytest.raises(DecodeError, match="flipped"):
        read_stamp(frame[:, ::-1])


def test_stamp_refuses_what_is_not_one_frame():
    with pytest.raises(ConfigError, match=r"\(2, 3, 32, 32\)"):
        read_stamp(np.zeros((2, 3, 32, 32)))


@pytest.mark.parametrize("pixels", ["flat", "textured"])
@pytest.mark.parametrize("gop", [2, 250])
@pytest.mark.parametrize(("codec", "size"), [("h264", 32), ("hevc", 64), ("vp9", 32), ("av1", 64)])
def test_stamps_outlive_lossy_coding(tmp_path, codec, size, gop, pixels):
    if not has_encoder(codec):
        pytest.skip(f"FFmpeg here does not encode {codec}")
    cameras = one_camera(codec=codec, height=size, width=size, gop=gop, crf=30)
    spec = SynthSpec(lengths=(60,), cameras=cameras, pixels=pixels)

    root = write_dataset(tmp_path / "out", spec)

    assert decode(root / f"videos/{TOP}/chunk-000/file-000.mp4")[0] == episode_stamps(spec, 0)


def test_encoders_names_those_that_work():
    assert (
        encoders().items()
        <= {
            "h264": "libx264",
            "av1": "libsvtav1",
            "hevc": "libx265",
            "vp9": "libvpx-vp9",
        }.items()
    )
    with pytest.raises(ConfigError, match="'h264'"):
        has_encoder("h266")


@pytest.mark.parametrize(
    "choice", [{"codec": "vp9", "crf": 64}, {"gop": 3_000_000_000}, {"height": 20_000, "width": 20_000}]
)
def test_what_the_encoder_cannot_do_is_refused_before_anything_is_written(tmp_path, choice):
    with pytest.raises(ConfigError, match=rf"camera '{TOP}': .* cannot be encoded: "):
        write_dataset(tmp_path / "out", SynthSpec(cameras=one_camera(**choice)))

    assert not (tmp_path / "out").exists()


def test_a_size_without_end_is_refused():
    with pytest.raises(ConfigError, match="WIDTHxHEIGHT"):
        numbered_cameras(1, "9" * 5000 + "x64", "h264", 2)


def test_default_dataset_is_small_and_whole(tmp_path):
    spec = SynthSpec()

    root = write_dataset(tmp_path / "out", spec)

    info = read_info(root)
    assert info["codebase_version"] == "v3.0"
    assert info["total_frames"] == sum(spec.lengths) == 34
    assert info["features"][TOP]["info"]["video.codec"] == "h264"
    assert {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()} == {
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        *[f"data/chunk-000/file-00{file}.parquet" for file in (0, 1)],
        *[f"videos/{camera.name}/chunk-000/file-00{file}.mp4" for camera in spec.cameras for file in (0, 1)],
    }
    check_videos(root, spec)


@pytest.mark.parametrize("join", ["encode", pytest.param("concat", marks=needs_ffmpeg)])
@pytest.mark.parametrize("gap_frames", [0, 3])
@pytest.mark.parametrize(("gop", "b_frames"), [(2, 0), (250, 3), (250, 2)])
def test_packed_videos_have_each_episode_where_meta_says(tmp_path, gop, b_frames, gap_frames, join):
    cameras = one_camera(gop=gop, b_frames=b_frames)
    spec = SynthSpec(lengths=LENGTHS, cameras=cameras, gap_frames=gap_frames, join=join, fps=30)
    spec = dataclasses.replace(spec, episodes_per_video_file=len(LENGTHS))

    root = write_dataset(tmp_path / "out", spec)

    check_videos(root, spec)
    found, _ = decode(root / f"videos/{TOP}/chunk-000/file-000.mp4")
    gap = [Stamp(GAP_EPISODE, frame, 0) for frame in range(gap_frames)]
    assert found == sum((gap + episode_stamps(spec, e) for e in range(1, 4)), episode_stamps(spec, 0))


@needs_ffmpeg
def test_video_has_keyframes_and_b_frames_as_asked(tmp_path):
    spec = SynthSpec(lengths=(25,), cameras=one_camera(gop=10, b_frames=2))
    root = write_dataset(tmp_path / "out", spec)
    probe = ["ffprobe", "-v", "error", "-show_entries", "frame=pict_type", "-of", "csv=p=0"]

    kinds = subprocess.check_output([*probe, root / f"videos/{TOP}/chunk-000/file-000.mp4"], text=True)

    pictures = "".join(line[0] for line in kinds.split())
    assert [place for place, kind in enumerate(pictures) if kind == "I"] == [0, 10, 20]
    assert pictures.startswith("IBBP")


def test_rows_tell_which_they_are(tmp_path):
    spec = SynthSpec(lengths=LENGTHS, cameras=(), episodes_per_data_file=2, state_dim=3, action_dim=2)

    root = write_dataset(tmp_path / "out", spec)

    table = pq.read_table(root / "data/chunk-000/file-001.parquet")
    state = np.array(table["observation.state"].to_pylist(), np.float32)
    action = np.array(table["action"].to_pylist(), np.float32)
    frames = np.concatenate([np.arange(12), np.arange(5)])
    assert table.schema.field("action").type.list_size == 2
    assert state.shape == (17, 3)
    for values in (state, action, table.select(["episode_index", "frame_index"]).to_pandas().to_numpy()):
        assert values[:, 0].tolist() == [2] * 12 + [3] * 5
        assert values[:, 1].tolist() == frames.tolist()
    assert table["index"].to_pylist() == list(range(8, 25))
    assert table["timestamp"].to_numpy().tolist() == (frames / 10).astype(np.float32).tolist()


@pytest.mark.parametrize(("row_groups", "sizes"), [("per-episode", [7, 1, 12]), ("per-file", [20]), (6, [6, 6, 6, 2])])
def test_row_groups_are_cut_as_asked(tmp_path, row_groups, sizes):
    spec = SynthSpec(lengths=(7, 1, 12), cameras=(), row_groups=row_groups)

    root = write_dataset(tmp_path / "out", spec)

    footer = pq.ParquetFile(root / "data/chunk-000/file-000.parquet").metadata
    assert [footer.row_group(group).num_rows for group in range(footer.num_row_groups)] == sizes


def test_chunks_roll_over_and_cameras_differ_from_data(tmp_path):
    spec = SynthSpec(lengths=(2,) * 7, cameras=one_camera(), chunks_size=2, fps=5)
    spec = dataclasses.replace(spec, episodes_per_data_file=1, episodes_per_video_file=2, episodes_per_meta_file=3)

    root = write_dataset(tmp_path / "out", spec)

    rows = read_episodes(root)
    assert [(row["data/chunk_index"], row["data/file_index"]) for row in rows][-2:] == [(2, 1), (3, 0)]
    assert [row[f"videos/{TOP}/chunk_index"] for row in rows] == [0, 0, 0, 0, 1, 1, 1]
    assert [row["meta/episodes/file_index"] for row in rows] == [0, 0, 0, 1, 1, 1, 0]
    assert (root / "data/chunk-003/file-000.parquet").exists()
    check_videos(root, spec)


@pytest.mark.parametrize("version", ["v2.1", "v2.0"])
def test_v2_has_one_file_per_episode_and_jsonl_meta(tmp_path, version):
    spec = SynthSpec(version=version, lengths=LENGTHS, cameras=one_camera(shape_order="chw"), chunks_size=3)

    root = write_dataset(tmp_path / "out", spec)

    info = read_info(root)
    for episode in range(4):
        place = {"episode_chunk": episode // 3, "episode_index": episode, "video_key": TOP}
        assert decode(root / info["video_path"].format(**place))[0] == episode_stamps(spec, episode)
        table = pq.read_table(root / info["data_path"].format(**place))
        assert set(table["episode_index"].to_pylist()) == {episode}
    lines = (root / "meta/episodes.jsonl").read_text().splitlines()
    assert [json.loads(line)["length"] for line in lines] == list(LENGTHS)
    assert json.loads((root / "meta/tasks.jsonl").read_text().splitlines()[1])["task_index"] == 1
    assert (info["total_videos"], info["total_chunks"]) == (4, 2)
    assert info["features"][TOP]["shape"] == [3, 64, 64]
    assert (root / "meta/stats.json").exists() == (version == "v2.0")
    assert (root / "meta/episodes_stats.jsonl").exists() == (version == "v2.1")


def test_tasks_parquet_has_the_task_as_pandas_index(tmp_path):
    root = write_dataset(tmp_path / "out", SynthSpec(lengths=(2,), cameras=(), tasks=("b", "a")))

    tasks = pd.read_parquet(root / "meta/tasks.parquet")

    assert tasks.index.name == "task"
    assert tasks.index.tolist() == ["b", "a"]
    assert tasks["task_index"].tolist() == [0, 1]


def test_two_tasks_share_an_episode(tmp_path):
    spec = SynthSpec(lengths=(5, 1), cameras=(), tasks=("a", "b"), two_tasks=True)

    root = write_dataset(tmp_path / "out", spec)

    assert [row["tasks"] for row in read_episodes(root)] == [["a", "b"], ["b"]]
    table = pq.read_table(root / "data/chunk-000/file-000.parquet")
    assert table["task_index"].to_pylist() == [0, 0, 0, 1, 1, 1]


def test_dropped_columns_are_in_neither_rows_nor_info(tmp_path):
    dropped = ("index", "frame_index", "task_index")

    root = write_dataset(tmp_path / "out", SynthSpec(lengths=(3,), cameras=(), drop_columns=dropped))

    columns = pq.read_schema(root / "data/chunk-000/file-000.parquet").names
    assert columns == list(read_info(root)["features"])
    assert not set(columns) & set(dropped)


def test_extra_features_have_their_types(tmp_path):
    extra = ("next.done", "observation.grid", "note")

    root = write_dataset(tmp_path / "out", SynthSpec(lengths=(2, 3), cameras=(), extra_features=extra))

    rows = pq.read_table(root / "data/chunk-000/file-000.parquet").to_pylist()
    assert [row["next.done"] for row in rows] == [False, True, False, False, True]
    assert rows[1]["observation.grid"] == [[1, 2, 3], [4, 5, 6]]
    assert rows[4]["note"] == "episode 1 frame 2"
    assert read_info(root)["features"]["observation.grid"]["shape"] == [2, 3]


def test_stats_are_those_of_the_rows(tmp_path):
    spec = SynthSpec(lengths=LENGTHS, cameras=one_camera(), extra_features=("next.done", "note"))

    root = write_dataset(tmp_path / "out", spec)

    stats = json.loads((root / "meta/stats.json").read_text())
    rows = pq.read_table(root / "data").to_pandas()
    action = np.stack(rows["action"]).astype(np.float64)
    assert np.allclose(stats["action"]["mean"], action.mean(axis=0))
    assert np.allclose(stats["action"]["std"], action.std(axis=0))
    assert stats["index"] | {"max": [24], "count": [25]} == stats["index"]
    assert stats["next.done"]["max"] == [True]
    assert np.shape(stats[TOP]["mean"]) == (3, 1, 1)
    assert "note" not in stats
    second = read_episodes(root)[1]
    assert second["stats/frame_index/max"] == [0]
    assert np.shape(second[f"stats/{TOP}/q99"]) == (3, 1, 1)


@pytest.mark.parametrize("version", ["v2.0", "v3.0"])
def test_pooled_stats_of_whole_numbers_are_whole(tmp_path, version):
    root = write_dataset(tmp_path / "dataset", SynthSpec(version=version))

    stats = json.loads((root / "meta/stats.json").read_text())["frame_index"]

    whole = [*stats["min"], *stats["max"], *stats.get("count", [])]
    assert {type(number) for number in whole} == {int}


def test_stats_can_be_left_out(tmp_path):
    root = write_dataset(tmp_path / "out", SynthSpec(lengths=(2,), cameras=(), with_stats=False))

    assert not (root / "meta/stats.json").exists()
    assert not any(name.startswith("stats/") for name in read_episodes(root)[0])


def test_inline_images_carry_stamps(tmp_path):
    from PIL import Image

    cameras = (CameraSpec(name="rgb", kind="image"), CameraSpec(name="far", kind="depth-image", width=48))
    root = write_dataset(tmp_path / "out", SynthSpec(lengths=(1, 4), cameras=cameras))

    rows = pq.read_table(root / "data/chunk-000/file-000.parquet").to_pylist()

    for number, camera in enumerate(cameras):
        path = tmp_path / "image"
        path.write_bytes(rows[3][camera.name]["bytes"])
        image = np.array(Image.open(path))
        assert read_stamp(image) == Stamp(1, 2, number)
        assert image.dtype == (np.uint16 if camera.is_depth else np.uint8)
    assert read_info(root)["video_path"] is None


@needs_ffmpeg
def test_depth_video_gives_the_distances_back(tmp_path):
    spec = SynthSpec(lengths=(3, 2), cameras=(CameraSpec(name="far", kind="depth", width=96),))
    root = write_dataset(tmp_path / "out", spec)
    command = ["ffmpeg", "-v", "error", "-i", root / "videos/far/chunk-000/file-000.mp4", "-f", "rawvideo", "-"]

    codes = np.frombuffer(subprocess.check_output(command), "<u2").reshape(5, 64, 96)

    low, high = np.log(0.01 + 3.5), np.log(10 + 3.5)
    metres = np.exp(codes * (high - low) / 4095 + low) - 3.5
    assert np.allclose(np.unique(np.round(metres, 2)), [0.8, 2.4])
    assert [read_stamp(frame) for frame in metres] == episode_stamps(spec, 0) + episode_stamps(spec, 1)


def test_write_dataset_refuses_a_folder_with_files(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")

    with pytest.raises(ConfigError, match="Choose another folder"):
        write_dataset(tmp_path, SynthSpec())

    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "v1.6"}, "'v3.0'"),
        ({"lengths": ()}, "number of episodes"),
        ({"lengths": (3, 0)}, "at least 1, got 0"),
        ({"row_groups": 0}, "row_groups"),
        ({"gap_frames": 1, "version": "v2.1"}, "gap_frames=1"),
        ({"tasks": ("a",), "two_tasks": True}, "tasks"),
        ({"drop_columns": ("timestamp",)}, "drop_columns"),
        ({"cameras": one_camera() * 2}, "different names"),
    ],
)
def test_synth_spec_names_what_is_impossible(changes, message):
    with pytest.raises(ConfigError, match=message):
        SynthSpec(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 33}, "even"),
        ({"width": 16}, "32x32 or more"),
        ({"codec": "av1", "width": 32}, "64x64 or more"),
        ({"codec": "vp9", "b_frames": 2}, "B-frames"),
        ({"name": "a/b"}, "'/'"),
        ({"gop": 0}, "gop"),
    ],
)
def test_camera_spec_names_what_is_impossible(changes, message):
    with pytest.raises(ConfigError, match=message):
        CameraSpec(**({"name": TOP} | changes))


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple),
    per_file=st.integers(1, 4),
    gap_frames=st.integers(0, 2),
    gop=st.sampled_from([1, 2, 7, 250]),
    b_frames=st.integers(0, 3),
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_datasets_are_where_meta_says(tmp_path, lengths, per_file, gap_frames, gop, b_frames):
    cameras = one_camera(gop=gop, b_frames=b_frames, height=32, width=48)
    spec = SynthSpec(lengths=lengths, cameras=cameras, gap_frames=gap_frames, episodes_per_video_file=per_file)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)

    root = write_dataset(tmp_path / "out", spec)

    check_videos(root, spec)
    rows = pq.read_table(root / "data")
    assert rows["index"].to_pylist() == list(range(sum(lengths)))


class Counter:
    """Yields batches of tensors 1..5; `restore` says at which of them a saved place resumes."""

    def __init__(self, restore=lambda place: place) -> None:
        self.place, self.restore = 0, restore

    def __iter__(self):
        while self.place < 5:
            self.place += 1
            yield {"x": torch.full((2,), self.place), "task": ["a"], "nan": np.array([np.nan])}

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = self.restore(state["place"])


def test_assert_resumes_exactly_accepts_an_iterator_that_does():
    assert_resumes_exactly(Counter)


def test_assert_resumes_exactly_names_the_batch_that_differs():
    with pytest.raises(AssertionError, match="stopped after 1 batch: batch 1"):
        assert_resumes_exactly(lambda: Counter(lambda place: max(0, place - 1)))


def test_assert_resumes_exactly_counts_what_is_too_much():
    with pytest.raises(AssertionError, match="stopped after 5 batches: 2 follow, not 0"):
        assert_resumes_exactly(lambda: Counter(lambda place: 3 if place == 5 else place))
