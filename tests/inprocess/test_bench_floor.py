"""What the floor of a bench decodes, how long an epoch becomes by it, and what is tried."""

import shutil

import pytest

from raypipe.bench import BenchSpec
from raypipe.bench.loaders import FloorLoader, make_pipeline, sample_windows
from raypipe.bench.run import _choose, _describe_data, _epoch_frames, _make_request
from raypipe.dataset import open_dataset
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*leaving out observation.images.wrist")
TOP, WRIST = (CameraSpec(name=f"observation.images.{place}") for place in ("top", "wrist"))


def run_floor(root, episodes=None):
    loader = FloorLoader(str(root), episodes, 1)
    ((num_samples, _),) = loader.epoch()
    return num_samples, loader.figures()["decoded_frames"]


def write_without_wrist(path):
    root = write_dataset(path, SynthSpec(cameras=(TOP, WRIST)))
    shutil.rmtree(root / "videos" / WRIST.name)
    return root


def test_floor_leaves_out_a_camera_without_files(tmp_path):
    assert run_floor(write_without_wrist(tmp_path / "arm")) == (34, 34)


@pytest.mark.parametrize("kind", ["image", "depth-image"])
def test_floor_decodes_images_stored_in_rows(tmp_path, kind):
    stored = CameraSpec(name="observation.images.wrist", kind=kind)
    root = write_dataset(tmp_path / "arm", SynthSpec(cameras=(TOP, stored)))

    assert run_floor(root) == (34, 68)
    assert run_floor(root, [0, 2]) == (19, 38)


def test_floor_cuts_images_of_episodes_between_processes(tmp_path):
    cameras = (CameraSpec(name="observation.images.wrist", kind="image"),)
    root = write_dataset(tmp_path / "arm", SynthSpec(cameras=cameras))
    loader = FloorLoader(str(root), None, 3)

    counts = [job() for job in loader._jobs()]
    loader.close()

    assert counts == [11, 11, 12]


def test_floor_of_rows_decodes_nothing(tmp_path):
    root = write_dataset(tmp_path / "rows", SynthSpec(cameras=()))

    assert run_floor(root) == (34, 0)


def test_windows_are_of_the_cameras_that_are_there(tmp_path):
    dataset = open_dataset(str(write_without_wrist(tmp_path / "arm")))

    windows = sample_windows(dataset, action_frames=2, observation_frames=2)

    assert windows == {"action": [0.0, 0.1], TOP.name: [-0.1, 0.0]}


def test_camera_without_files_is_told(tmp_path):
    dataset = open_dataset(str(write_without_wrist(tmp_path / "arm")))

    told = _describe_data(dataset, [0], 4)

    assert told["cameras"] == 1
    assert told["left_out_cameras"] == {"no video file is there": [WRIST.name]}


@pytest.mark.parametrize(
    ("floor", "frames"), [({"samples_per_s": 1e6}, 100_000), ({"samples_per_s": 700.0}, 7_000), ({"error": "x"}, 5_000)]
)
def test_epoch_is_sized_by_a_rate_that_loaders_can_reach(tiny_dataset, floor, frames):
    dataset = open_dataset(str(tiny_dataset))

    assert _epoch_frames(dataset, BenchSpec(root="x", seconds=20.0), floor) == frames


def choose(root, live_bytes):
    dataset, spec = open_dataset(str(root)), BenchSpec(root=str(root), batch_size=4, live_bytes=live_bytes)
    request = _make_request(dataset, spec)
    pipe = make_pipeline(dataset, request)
    return pipe, _choose(pipe, dataset, request, (), is_quick=False)


def test_settings_are_around_what_a_pipeline_chooses(tiny_dataset):
    pipe, tried = choose(tiny_dataset, 1 << 30)

    order = pipe.config.order
    assert (tried[0].clip_frames, tried[0].live_spans) == (order.clip_frames, order.live_spans)
    assert {one.where for one in tried} == {"rank", "cluster"}
    assert {one.clip_frames for one in tried} >= {1, 2, 4, 8}


def test_settings_that_need_more_memory_than_is_given_are_left_out(tiny_dataset):
    _, ample = choose(tiny_dataset, 1 << 30)
    _, tight = choose(tiny_dataset, 12 * 96 * 96 * 3)

    assert max(one.clip_frames for one in tight) < max(one.clip_frames for one in ample)
    assert len({one.clip_frames for one in tight}) > 1
