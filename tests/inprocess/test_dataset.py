import io
import json
import pickle
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchcodec.decoders import VideoDecoder

from raypipe.dataset import open_dataset
from raypipe.errors import ConfigError, DatasetError, DecodeError
from raypipe.testing import CameraSpec, SynthSpec, read_stamp, write_dataset

TOP = "observation.images.top"
WRIST = "observation.images.wrist"


def every_frame(lengths):
    return [(episode, frame) for episode, length in enumerate(lengths) for frame in range(length)]


def assert_samples_are_right(root, spec):
    """Every sample, by its row and by the pixels of every camera, is the frame that it says."""
    dataset = open_dataset(str(root))
    assert len(dataset) == sum(spec.lengths)
    for index, (episode, frame) in enumerate(every_frame(spec.lengths)):
        sample = dataset[index]
        assert sample["action"][:2].tolist() == [episode, frame]
        numbers = [int(sample[key]) for key in ("episode_index", "frame_index", "index")]
        assert numbers == [episode, frame, index]
        assert sample["task"] == spec.tasks[int(sample["task_index"])]
        for number, camera in enumerate(spec.cameras):
            stamp = read_stamp(sample[camera.name])
            assert (stamp.episode, stamp.frame, stamp.camera) == (episode, frame, number)


cameras = st.builds(
    CameraSpec,
    name=st.just("cam"),
    height=st.sampled_from([32, 48]),
    width=st.sampled_from([32, 64]),
    kind=st.sampled_from(["video", "video", "image"]),
    gop=st.sampled_from([1, 2, 7, 250]),
    shape_order=st.sampled_from(["hwc", "chw"]),
    b_frames=st.sampled_from([0, 2]),
)


@st.composite
def specs(draw):
    version = draw(st.sampled_from(["v3.0", "v2.1", "v2.0"]))
    return SynthSpec(
        version=version,
        lengths=tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))),
        fps=draw(st.sampled_from([5, 10, 30])),
        cameras=(draw(cameras),),
        episodes_per_data_file=draw(st.integers(1, 3)),
        episodes_per_video_file=draw(st.integers(1, 3)),
        episodes_per_meta_file=draw(st.integers(1, 3)),
        row_groups=draw(st.sampled_from(["per-episode", "per-file", 4])),
        gap_frames=draw(st.sampled_from([0, 0, 3])) if version == "v3.0" else 0,
        drop_columns=draw(st.sampled_from([(), ("index",), ("index", "frame_index", "task_index")])),
        two_tasks=draw(st.booleans()),
        chunks_size=draw(st.sampled_from([2, 1000])),
    )


@given(specs())
@settings(max_examples=25)
def test_what_is_written_is_read_back_frame_by_frame(tmp_path_factory, spec):
    if spec.two_tasks and "task_index" in spec.drop_columns:
        spec = SynthSpec(**{name: getattr(spec, name) for name in spec.__slots__} | {"two_tasks": False})

    root = write_dataset(tmp_path_factory.mktemp("round") / "trip", spec)

    assert_samples_are_right(root, spec)


HARD = {
    "odd clips joined by stream copy": {"join": "concat"},
    "odd clips joined, B-frames, one keyframe each": {
        "join": "concat",
        "cameras": (CameraSpec(name="cam", gop=250, b_frames=3),),
    },
    "unused video between episodes": {"gap_frames": 5},
    "unused video, B-frames, long GOP": {"gap_frames": 4, "cameras": (CameraSpec(name="cam", gop=250, b_frames=2),)},
}


@pytest.mark.parametrize("case", HARD)
def test_the_right_frame_is_found_in_a_packed_video_with(tmp_path, case):
    spec = SynthSpec(lengths=(7, 1, 13, 5, 9), episodes_per_video_file=5, **HARD[case])

    root = write_dataset(tmp_path / "d", spec)

    assert_samples_are_right(root, spec)


@pytest.fixture(scope="module")
def dataset(tiny_dataset):
    return open_dataset(str(tiny_dataset))


def test_a_sample_has_lerobots_keys_dtypes_and_shapes(tmp_path):
    spec = SynthSpec(lengths=(3,), extra_features=("next.done", "observation.grid", "note"))

    sample = open_dataset(str(write_dataset(tmp_path / "d", spec)))[1]

    described = {
        key: value if isinstance(value, str) else (value.dtype, tuple(value.shape)) for key, value in sample.items()
    }
    assert described == {
        TOP: (torch.uint8, (3, 64, 64)),
        WRIST: (torch.uint8, (3, 64, 64)),
        "observation.state": (torch.float32, (6,)),
        "action": (torch.float32, (6,)),
        "next.done": (torch.bool, ()),
        "observation.grid": (torch.float32, (2, 3)),
        "note": described["note"],
        "timestamp": (torch.float32, ()),
        "frame_index": (torch.int64, ()),
        "episode_index": (torch.int64, ()),
        "index": (torch.int64, ()),
        "task_index": (torch.int64, ()),
        "task": "pick up the cube",
    }


def test_windows_keep_the_time_axis_except_for_a_single_camera_frame(dataset):
    windowed = dataset.windowed({"action": [0.0], "timestamp": [0.0, 0.1], TOP: [0.0], WRIST: [-0.1, 0.0, 0.1]})

    sample = windowed.sample_of(2, 4)

    shapes = {key: tuple(sample[key].shape) for key in ("action", "timestamp", TOP, WRIST, "observation.state")}
    assert shapes == {
        "action": (1, 6),
        "timestamp": (2,),
        TOP: (3, 64, 64),
        WRIST: (3, 3, 64, 64),
        "observation.state": (6,),
    }
    assert [key for key in sample if key.endswith("_is_pad")] == [
        f"{TOP}_is_pad",
        f"{WRIST}_is_pad",
        "action_is_pad",
        "timestamp_is_pad",
    ]


def test_a_window_stays_in_its_episode_and_marks_padding(dataset):
    windowed = dataset.windowed(offsets={"action": [-2, -1, 0, 1, 2], WRIST: [-2, 0, 2]})

    first, last = windowed.sample_of(2, 0), windowed.sample_of(2, 11)

    assert first["action"][:, :2].tolist() == [[2, 0], [2, 0], [2, 0], [2, 1], [2, 2]]
    assert first["action_is_pad"].tolist() == [True, True, False, False, False]
    assert [read_stamp(frame).frame for frame in last[WRIST]] == [9, 11, 11]
    assert last[f"{WRIST}_is_pad"].tolist() == [False, False, True]


def test_a_window_covers_a_one_frame_episode_with_padding(dataset):
    sample = dataset.windowed(offsets={"action": [-1, 0, 1]}).sample_of(1, 0)

    assert sample["action"][:, :2].tolist() == [[1, 0]] * 3
    assert sample["action_is_pad"].tolist() == [True, False, True]


def test_float_cameras_are_the_bytes_divided_by_255(tiny_dataset, dataset):
    as_float = open_dataset(str(tiny_dataset), camera_dtype="float32")[5]

    torch.testing.assert_close(as_float[TOP], dataset[5][TOP].float() / 255, rtol=0, atol=0)


@pytest.mark.parametrize("hold", [list, np.array, iter])
def test_only_the_cameras_asked_for_are_there(tiny_dataset, hold):
    sample = open_dataset(str(tiny_dataset), cameras=hold([WRIST]))[0]

    assert read_stamp(sample[WRIST]).camera == 1
    assert TOP not in sample


def test_features_and_tolerances_may_be_of_any_type_that_holds_them(tiny_dataset):
    dataset = open_dataset(str(tiny_dataset), cameras=np.array([TOP, WRIST]), tolerance_s=np.float32(1e-3))

    assert dataset.spec.tolerance_s == pytest.approx(1e-3)
    assert {"action", TOP} <= set(dataset.select_features(iter(["action", TOP]))[0])
    assert not {"action", TOP} & set(dataset.drop_features(iter(["action", TOP]))[0])


def test_index_counts_from_both_ends_and_stops(dataset):
    assert dataset[-1]["index"] == len(dataset) - 1
    for index in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match=f"no sample {index}; the dataset has {len(dataset)} frames"):
            dataset[index]


def test_iterating_gives_every_sample_once(dataset):
    assert [int(sample["index"]) for sample in dataset] == list(range(len(dataset)))


def test_the_episode_table_and_repr_tell_what_is_there(dataset):
    assert dataset.episodes.column("length").to_pylist() == [7, 1, 12, 5, 9]
    assert "v3.0, 5 episodes, 34 frames, 10 fps" in repr(dataset)
    assert f"{TOP} 64x64" in repr(dataset)
    assert dataset.features["action"].shape == (6,)
    assert set(dataset.stats["action"]) >= {"mean", "std", "min", "max", "count"}


def test_a_dataset_pickles_after_use(dataset):
    expected = dataset[3]

    again = pickle.loads(pickle.dumps(dataset))[3]

    assert torch.equal(again[TOP], expected[TOP])


FORKING = """
import os, sys
import numpy as np
from raypipe.decode import VideoPool
from raypipe.format import OpenFiles
from raypipe.storage import open_storage

pool, files, storage, wanted = VideoPool(2), OpenFiles(), open_storage(sys.argv[1]), np.arange(3)
with pool.lend(storage, sys.argv[2]) as opened:
    before = opened.read_frames(wanted)
rows = files.open(storage, sys.argv[3])
child = os.fork()
with pool.lend(storage, sys.argv[2]) as lent:
    is_right = (lent is opened) == (child != 0) and bool((lent.read_frames(wanted) == before).all())
again = files.open(storage, sys.argv[3])
is_right = is_right and (again is rows) == (child != 0) and again.read().equals(rows.read())
if child == 0:
    os._exit(not is_right)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or not is_right)
"""


def test_a_forked_process_opens_files_of_its_own(tiny_dataset):
    """torch forks the workers of a `DataLoader`, and two processes that read one open file move its position."""
    names = [f"videos/{TOP}/chunk-000/file-000.mp4", "data/chunk-000/file-000.parquet"]

    found = subprocess.run([sys.executable, "-c", FORKING, tiny_dataset, *names], timeout=300, check=False)

    assert found.returncode == 0


def test_image_depth_comes_in_millimetres(tmp_path):
    spec = SynthSpec(lengths=(2,), cameras=(CameraSpec(name="depth", kind="depth-image"),))
    dataset = open_dataset(str(write_dataset(tmp_path / "d", spec)))

    depth = dataset[1]["depth"]

    stored = pq.read_table(next((tmp_path / "d/data").rglob("*.parquet"))).column("depth")[1].as_py()["bytes"]
    expected = np.asarray(Image.open(io.BytesIO(stored))).astype(np.float32)
    assert (depth.dtype, tuple(depth.shape)) == (torch.float32, (1, 64, 64))
    np.testing.assert_array_equal(depth[0].numpy(), expected)
    assert expected.max() > 255


def copy(root, tmp_path):
    shutil.copytree(root, tmp_path / "copy")
    return tmp_path / "copy"


def rewrite_rows(path, change):
    pq.write_table(change(pq.read_table(path)), path)


def test_drifted_timestamps_decide_nothing_and_are_reported(tiny_dataset, tmp_path, dataset):
    root = copy(tiny_dataset, tmp_path)

    def drift(table):
        late = pa.array(table.column("timestamp").to_numpy() + np.float32(1.5))
        return table.set_column(table.column_names.index("timestamp"), "timestamp", late)

    rewrite_rows(root / "data/chunk-000/file-000.parquet", drift)

    drifted = open_dataset(str(root))

    assert torch.equal(drifted[4][TOP], dataset[4][TOP])
    np.testing.assert_allclose(drifted.timestamp_drift(0), 1.5, atol=1e-5)
    np.testing.assert_allclose(dataset.timestamp_drift(0), 0, atol=1e-5)
    with pytest.raises(DecodeError, match=r"episode 0 .*camera 'observation.images.top'.*1\.5000 s apart.*'position'"):
        open_dataset(str(root), timestamps="strict")[4]
    assert open_dataset(str(tiny_dataset), timestamps="strict")[4]["frame_index"] == 4
    assert open_dataset(str(root), timestamps="strict", tolerance_s=2.0)[4]["frame_index"] == 4


def test_times_of_episodes_decide_their_order_in_a_video_and_not_their_frames(tmp_path):
    spec = SynthSpec(lengths=(4, 4, 6), cameras=(CameraSpec(name="cam"),), episodes_per_video_file=3)
    root = write_dataset(tmp_path / "d", spec)
    (path,) = (root / "meta/episodes").rglob("*.parquet")
    column = "videos/cam/from_timestamp"

    def swap_and_drift(table):
        # The first two lie the other way round; all are late by 0.7 frames, as sums of rounded durations may be.
        starts = table.column(column).to_numpy()[[1, 0, 2]] + 0.7 / spec.fps
        return table.set_column(table.column_names.index(column), column, pa.array(starts))

    rewrite_rows(path, swap_and_drift)

    dataset = open_dataset(str(root))

    stamps = [read_stamp(dataset.sample_of(episode, 2)["cam"]) for episode in range(3)]
    assert [(stamp.episode, stamp.frame) for stamp in stamps] == [(1, 2), (0, 2), (2, 2)]


@pytest.mark.parametrize("time", [float("nan"), float("inf")])
@pytest.mark.parametrize("bad", range(3))
def test_an_episode_without_a_time_in_its_video_is_an_error_and_moves_no_other(tmp_path, bad, time):
    spec = SynthSpec(lengths=(3, 1, 4), cameras=(CameraSpec(name="cam"),), episodes_per_video_file=3)
    root = write_dataset(tmp_path / "d", spec)
    (path,) = (root / "meta/episodes").rglob("*.parquet")
    column = "videos/cam/from_timestamp"

    def forget_time(table):
        starts = table.column(column).to_numpy().copy()
        starts[bad] = time
        return table.set_column(table.column_names.index(column), column, pa.array(starts))

    rewrite_rows(path, forget_time)

    dataset = open_dataset(str(root))

    with pytest.raises(DecodeError, match=f"episode {bad} .* no frame within half a frame of (nan|inf) s"):
        dataset.sample_of(bad, 0)
    good = [episode for episode in range(3) if episode != bad]
    stamps = [read_stamp(dataset.sample_of(episode, 0)["cam"]) for episode in good]
    assert [(stamp.episode, stamp.frame) for stamp in stamps] == [(episode, 0) for episode in good]


class NeighbourDecoder(VideoDecoder):
    """Gives the frames after those asked for, in some of the modes in which it may be opened."""

    wrong_modes = ("approximate",)

    def __init__(self, source, *, seek_mode, **options):
        super().__init__(source, seek_mode=seek_mode, **options)
        self.is_wrong = seek_mode in self.wrong_modes

    def get_frames_in_range(self, start, stop):
        return super().get_frames_in_range(start + self.is_wrong, stop + self.is_wrong)


def test_another_frame_than_the_one_asked_for_is_found_by_the_index_of_the_file(tiny_dataset, dataset, monkeypatch):
    expected = dataset[4][TOP]
    monkeypatch.setattr("torchcodec.decoders.VideoDecoder", NeighbourDecoder)

    assert torch.equal(open_dataset(str(tiny_dataset))[4][TOP], expected)
    monkeypatch.setattr(NeighbourDecoder, "wrong_modes", ("approximate", "exact"))
    with pytest.raises(
        DecodeError, match=r"frame 4 of .* is at 0\.4000 s by the file's index and came out at 0\.5000 s"
    ):
        open_dataset(str(tiny_dataset))[4]


def test_rows_in_another_order_come_by_their_frame_number(tiny_dataset, tmp_path, dataset):
    root = copy(tiny_dataset, tmp_path)
    rewrite_rows(root / "data/chunk-000/file-000.parquet", lambda t: t.take(np.arange(len(t))[::-1]))

    assert open_dataset(str(root))[9]["action"].tolist() == dataset[9]["action"].tolist()


def test_a_float64_column_is_read_as_float32(tiny_dataset, tmp_path, dataset):
    root = copy(tiny_dataset, tmp_path)

    def widen(table):
        lists = pa.array(table.column("action").to_pylist(), pa.list_(pa.float64()))
        return table.set_column(table.column_names.index("action"), "action", lists)

    rewrite_rows(root / "data/chunk-000/file-000.parquet", widen)

    assert torch.equal(open_dataset(str(root))[9]["action"], dataset[9]["action"])


def test_a_declared_dtype_decides_not_the_files(tiny_dataset, tmp_path, dataset):
    root = copy(tiny_dataset, tmp_path)

    def as_integers(table):
        lists = pa.array([[int(x) for x in row] for row in table.column("action").to_pylist()], pa.list_(pa.int32()))
        return table.set_column(table.column_names.index("action"), "action", lists)

    rewrite_rows(root / "data/chunk-000/file-000.parquet", as_integers)

    assert open_dataset(str(root))[9]["action"].dtype == torch.float32
    assert torch.equal(open_dataset(str(root))[9]["action"], dataset[9]["action"].trunc())


def test_lists_of_other_lengths_are_an_error_also_where_the_total_is_right(tiny_dataset, tmp_path):
    root = copy(tiny_dataset, tmp_path)

    def shift(table):
        rows = table.column("action").to_pylist()
        rows[0], rows[1] = rows[0][:5], [*rows[1], 0.0]
        return table.set_column(table.column_names.index("action"), "action", pa.array(rows))

    rewrite_rows(root / "data/chunk-000/file-000.parquet", shift)

    with pytest.raises(DatasetError, match="lists of other lengths"):
        open_dataset(str(root)).windowed(offsets={"action": [0, 1]})[0]


def test_index_columns_may_be_lists_of_one_number(tiny_dataset, tmp_path, dataset):
    root = copy(tiny_dataset, tmp_path)

    def wrap(table):
        for name in ("episode_index", "timestamp", "task_index", "frame_index", "index"):
            lists = pa.array([[value] for value in table.column(name).to_pylist()])
            table = table.set_column(table.column_names.index(name), name, lists)
        return table

    rewrite_rows(root / "data/chunk-000/file-000.parquet", wrap)

    wrapped = open_dataset(str(root))
    assert {key: str(value) for key, value in wrapped[9].items()} == {
        key: str(value) for key, value in dataset[9].items()
    }
    np.testing.assert_allclose(wrapped.timestamp_drift(0), 0, atol=1e-5)


def rewrite_tasks(root, tasks):
    path = root / "meta/episodes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("\n".join(json.dumps({**line, "tasks": tasks[i]}) for i, line in enumerate(lines)))


def test_a_missing_task_column_is_filled_from_the_episode_or_refused(tmp_path):
    spec = SynthSpec(version="v2.1", cameras=(), lengths=(2, 2), drop_columns=("task_index",))
    root = write_dataset(tmp_path / "d", spec)
    assert open_dataset(str(root)).sample_of(1, 0)["task"] == "open the drawer"

    rewrite_tasks(root, [[0], [1]])
    assert open_dataset(str(root)).sample_of(1, 0)["task"] == "open the drawer"

    for unknown in (["something else"], []):
        rewrite_tasks(root, [["pick up the cube"], unknown])
        with pytest.raises(DatasetError, match=r"episode 1 .*none of the 2 tasks"):
            open_dataset(str(root)).sample_of(1, 0)


def test_a_column_that_only_some_files_have_is_never_lost_silently(tiny_dataset, tmp_path):
    root = copy(tiny_dataset, tmp_path)
    files = sorted((root / "data/chunk-000").glob("*.parquet"))
    rewrite_rows(files[-1], lambda table: table.drop_columns(["action"]))

    with pytest.raises(DatasetError, match=r"file-001\.parquet' has no column for \['action'\]"):
        open_dataset(str(root))[-1]

    rewrite_rows(files[0], lambda table: table.drop_columns(["action"]))
    with pytest.warns(UserWarning, match="leaving out action"):
        assert "action" not in open_dataset(str(root))[0]


def test_a_window_of_one_stored_image_keeps_its_time_axis(tmp_path):
    cameras = (CameraSpec(name="image", kind="image"), CameraSpec(name="video"))
    dataset = open_dataset(str(write_dataset(tmp_path / "d", SynthSpec(lengths=(3,), cameras=cameras))))

    sample = dataset.windowed(offsets={"image": [0], "video": [0]})[1]

    assert tuple(sample["image"].shape) == (1, 3, 64, 64)
    assert tuple(sample["video"].shape) == (3, 64, 64)
    assert tuple(dataset[1]["image"].shape) == (3, 64, 64)


def test_a_slice_is_a_list_of_samples(dataset):
    assert [int(sample["index"]) for sample in dataset[3:9:2]] == [3, 5, 7]


def test_a_video_cut_by_an_edit_list_shows_what_a_player_shows(tmp_path):
    camera = CameraSpec(name="cam", gop=250, b_frames=2)
    root = write_dataset(tmp_path / "d", SynthSpec(version="v2.1", lengths=(40,), cameras=(camera,)))
    path = root / "videos/chunk-000/cam/episode_000000.mp4"
    cut = tmp_path / "cut.mp4"
    subprocess.run(["ffmpeg", "-v", "error", "-ss", "0.25", "-i", path, "-c", "copy", cut], check=True)
    shutil.copy(cut, path)
    shown = VideoDecoder(str(path))
    length = len(shown)
    rewrite_rows(root / "data/chunk-000/episode_000000.parquet", lambda table: table.slice(0, length))
    (root / "meta/episodes.jsonl").write_text(json.dumps({"episode_index": 0, "tasks": ["a"], "length": length}))

    last = open_dataset(str(root))[-1]["cam"]

    assert length < 40
    assert torch.equal(last, shown[length - 1])


def first_rows(root):
    return root / "data/chunk-000/file-000.parquet"


def first_video(root):
    return root / f"videos/{TOP}/chunk-000/file-000.mp4"


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def drop_rows(root):
    rewrite_rows(first_rows(root), lambda table: table.slice(0, 3))


def repeat_frame_numbers(root):
    def repeat(table):
        return table.set_column(table.column_names.index("frame_index"), "frame_index", pa.array([0] * len(table)))

    rewrite_rows(first_rows(root), repeat)


def double_column(root):
    rewrite_rows(first_rows(root), lambda table: table.append_column("action", table.column("action")))


def shorten_actions(root):
    def shorten(table):
        lists = pa.array([row[:5] for row in table.column("action").to_pylist()])
        return table.set_column(table.column_names.index("action"), "action", lists)

    rewrite_rows(first_rows(root), shorten)


def unknown_task(root):
    def change(table):
        return table.set_column(table.column_names.index("task_index"), "task_index", pa.array([9] * len(table)))

    rewrite_rows(first_rows(root), change)


def replace_video(root):
    shutil.copy(root / f"videos/{TOP}/chunk-000/file-001.mp4", first_video(root))


DAMAGES = {
    "missing rows": (lambda root: first_rows(root).unlink(), DatasetError, r"missing file '.*file-000\.parquet'"),
    "truncated rows": (lambda root: truncate(first_rows(root)), DatasetError, r"file-000\.parquet'.*footer"),
    "fewer rows than promised": (drop_rows, DatasetError, r"episode 0 .*holds 3 rows of it, .* promises 7"),
    "doubled frame numbers": (repeat_frame_numbers, DatasetError, r"episode 0 .*frame_index 0 with gaps or repeats"),
    "a column twice": (double_column, DatasetError, r"columns \['action'\] twice"),
    "narrower rows than declared": (shorten_actions, DatasetError, r"'action' of episode 0 .*shape \[6\]"),
    "a task that is not listed": (unknown_task, DatasetError, r"task_index 9"),
    "missing video": (lambda root: first_video(root).unlink(), DatasetError, r"missing file '.*file-000\.mp4'"),
    "truncated video": (lambda root: truncate(first_video(root)), DatasetError, r"damaged video '.*file-000\.mp4'"),
    "video of other episodes": (replace_video, DecodeError, r"camera 'observation\.images\.top'.*14 frames"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_data_is_an_error_that_names_the_place(tiny_dataset, tmp_path, case):
    root = copy(tiny_dataset, tmp_path)
    damage, error, message = DAMAGES[case]
    damage(root)

    # Of each episode in the file: damage at its end is met too.
    with pytest.raises(error, match=message):
        [open_dataset(str(root))[index] for index in (0, 6, 19)]


def test_a_camera_without_files_is_left_out_with_a_warning_and_refused_by_name(tiny_dataset, tmp_path):
    root = copy(tiny_dataset, tmp_path)
    shutil.rmtree(root / f"videos/{TOP}")

    with pytest.warns(UserWarning, match=f"leaving out {TOP}: no video file"):
        dataset = open_dataset(str(root))

    assert dataset.missing_cameras == (TOP,)
    assert dataset.spec.cameras == (WRIST,)
    with pytest.raises(DatasetError, match=r"declared, and its files are missing: '.*file-000\.mp4'"):
        open_dataset(str(root), cameras=[TOP])


def as_depth(root, **info):
    path = root / "meta/info.json"
    content = json.loads(path.read_text())
    content["features"][TOP]["info"].update({"is_depth_map": True, **info})
    path.write_text(json.dumps(content))


def test_a_depth_video_without_pyav_is_refused_by_name_with_what_to_install(tiny_dataset, tmp_path, monkeypatch):
    root = copy(tiny_dataset, tmp_path)
    as_depth(root, **{"video.pix_fmt": "gray12le"})
    monkeypatch.setattr("raypipe.decode.spec.find_spec", lambda name: None)

    with pytest.warns(UserWarning, match=r"leaving out .*pip install --editable '.*\[depth\]'"):
        assert open_dataset(str(root)).spec.cameras == (WRIST,)
    with pytest.raises(ConfigError, match=rf"camera '{TOP}'.*depth video.*pip install --editable '.*\[depth\]'"):
        open_dataset(str(root), cameras=[TOP])


def test_a_process_without_pyav_says_what_to_install(tiny_dataset, tmp_path, monkeypatch):
    root = copy(tiny_dataset, tmp_path)
    as_depth(root, **{"video.pix_fmt": "gray12le"})
    monkeypatch.setattr("raypipe.decode.spec.find_spec", lambda name: "found on the driver")
    monkeypatch.setitem(sys.modules, "av", None)

    with pytest.raises(ConfigError, match=r"cannot decode depth videos: .*pip install --editable '.*\[depth\]'"):
        open_dataset(str(root), cameras=[TOP])[0]


def test_a_depth_video_of_8_bits_is_refused_by_name(tiny_dataset, tmp_path):
    root = copy(tiny_dataset, tmp_path)
    as_depth(root)

    with pytest.warns(UserWarning, match="leaving out .*has 8 bits"):
        assert open_dataset(str(root)).spec.cameras == (WRIST,)
    with pytest.raises(ConfigError, match=f"camera '{TOP}'.*has 8 bits.*set is_depth_map to false"):
        open_dataset(str(root), cameras=[TOP])


def test_statistics_of_depth_in_metres_come_in_millimetres(tmp_path):
    spec = SynthSpec(lengths=(3,), cameras=(CameraSpec(name="far", kind="depth-image"),))
    root = write_dataset(tmp_path / "d", spec)
    stored = open_dataset(str(root)).stats["far"]
    path = root / "meta/info.json"
    path.write_text(path.read_text().replace('"depth_unit": "mm"', '"depth_unit": "m"'))

    found = open_dataset(str(root)).stats["far"]

    assert {name: (values / stored[name]).max() for name, values in found.items() if name in ("mean", "std")} == {
        "mean": 1000,
        "std": 1000,
    }
    np.testing.assert_array_equal(found["count"], stored["count"])


BAD_REQUESTS = {
    "a name for a list": ({"cameras": TOP}, "give a list of names"),
    "unknown camera": ({"cameras": ["observation.images.tpo"]}, f"no camera .*did you mean '{TOP}'"),
    "unknown dtype": ({"camera_dtype": "float64"}, "camera_dtype is 'float64'.*did you mean 'float32'"),
    "unknown timestamps": ({"timestamps": "exact"}, "timestamps is 'exact'"),
    "negative tolerance": ({"tolerance_s": -1.0}, "tolerance_s must be at least 0"),
    "tolerance in words": ({"tolerance_s": "1 ms"}, "tolerance_s must be at least 0"),
    "a number for a list": ({"cameras": 5}, "give a list of names"),
    "a number for a name": ({"cameras": [5]}, "no camera 5"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_wrong_request_is_an_error_with_what_is_allowed(tiny_dataset, case):
    arguments, message = BAD_REQUESTS[case]

    with pytest.raises(ConfigError, match=message):
        open_dataset(str(tiny_dataset), **arguments)


def test_wrong_windows_episodes_and_frames_are_errors(dataset):
    with pytest.raises(ConfigError, match="'actoin'; did you mean 'action'"):
        dataset.windowed({"actoin": [0.0]})
    with pytest.raises(ConfigError, match="multiples of 1/fps"):
        dataset.windowed({"action": [0.05]})
    with pytest.raises(ConfigError, match="either"):
        dataset.windowed()
    with pytest.raises(
        ConfigError, match=r"delta_timestamps is \[0.0\]; give a dict of features with lists of seconds"
    ):
        dataset.windowed([0.0])
    for nothing in (np.array([0.0]), [], 0):
        with pytest.raises(ConfigError, match="give a dict of features with lists of seconds"):
            dataset.windowed(nothing)
    with pytest.raises(ConfigError, match="offsets is 3; give a dict of features with lists of frame numbers"):
        dataset.windowed(offsets=3)
    with pytest.raises(ConfigError, match="the features to select are 3; give a list of names"):
        dataset.select_features(3)
    for wrong in (3, "action"):
        with pytest.raises(ConfigError, match=f"the features to drop are {wrong!r}; give a list of names"):
            dataset.drop_features(wrong)
    with pytest.raises(ConfigError, match=r"no feature .* to drop"):
        dataset.drop_features([["action"]])
    with pytest.raises(ConfigError, match="give a list of seconds"):
        dataset.windowed({"action": [float("nan")]})
    with pytest.raises(ConfigError, match="give a list of frame numbers"):
        dataset.windowed(offsets={"action": [0.5]})
    with pytest.raises(ConfigError, match="no episode 5; the dataset has 5 episodes, numbered 0 to 4"):
        dataset.sample_of(5, 0)
    with pytest.raises(ConfigError, match="no frame 7 in episode 0; it has 7 frames"):
        dataset.sample_of(0, 7)


def test_opening_a_sound_dataset_warns_of_nothing(tiny_dataset):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_dataset(str(tiny_dataset))


def test_a_dataset_on_another_filesystem_gives_the_same_samples(tiny_dataset, dataset):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(tiny_dataset), "/remote", recursive=True)

    remote = open_dataset("memory://remote")

    for index in (0, 12, len(dataset) - 1):
        assert torch.equal(remote[index][WRIST], dataset[index][WRIST])
        assert torch.equal(remote[index]["action"], dataset[index]["action"])
    assert remote.meta.order_fingerprint == dataset.meta.order_fingerprint
