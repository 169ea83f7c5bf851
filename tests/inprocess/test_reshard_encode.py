"""Re-encoded copies: frames near the originals, keyframes and sizes as asked, rows untouched."""

import json
import os
import shutil

import numpy as np
import pytest
from reshard_checks import assert_rows_kept, assert_times_exact, camera_packets, digests, info_of

from raypipe.dataset import open_dataset
from raypipe.format import read_metadata, read_video_format, read_video_index
from raypipe.reshard import ReshardSpec, reshard_dataset
from raypipe.storage import open_storage
from raypipe.testing import CameraSpec, SynthSpec, has_encoder, read_stamp, write_dataset

TOP, STILL = "observation.images.top", "observation.images.still"
SPEC = SynthSpec(
    version="v3.0",
    lengths=(9, 1, 14, 6),
    episodes_per_video_file=4,
    cameras=(CameraSpec(name=TOP, gop=30, height=96, width=128), CameraSpec(name=STILL, kind="image")),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("source") / "dataset", SPEC)


def reshard(root, out, **choices):
    return reshard_dataset(str(root), out, ReshardSpec(**choices), where="process")


def keyframes_by_episode(root):
    meta = read_metadata(str(root))
    starts = np.cumsum(meta.episodes.length) - meta.episodes.length
    index = read_video_index(meta.storage, meta.video_file(0, TOP))
    return [index.is_keyframe[s : s + n].tolist() for s, n in zip(starts, meta.episodes.length, strict=True)]


def assert_near(source, copy):
    for old, new in zip(open_dataset(str(source)), open_dataset(str(copy)), strict=True):
        stamp = read_stamp(new[TOP])
        assert (stamp.episode, stamp.frame) == (int(old["episode_index"]), int(old["frame_index"]))
        if old[TOP].shape == new[TOP].shape:
            assert np.abs(old[TOP].numpy().astype(float) - new[TOP].numpy()).mean() < 4


@pytest.mark.parametrize("gop", [1, 2, 5])
def test_keyframes_stand_as_asked_from_the_start_of_every_episode(source, tmp_path, gop):
    reshard(source, tmp_path / "copy", gop=gop)

    expected = [[frame % gop == 0 for frame in range(length)] for length in SPEC.lengths]
    assert keyframes_by_episode(tmp_path / "copy") == expected
    assert_near(source, tmp_path / "copy")
    assert_rows_kept(source, tmp_path / "copy", range(4))
    assert_times_exact(tmp_path / "copy")
    assert info_of(tmp_path / "copy")["features"][TOP]["info"]["video.g"] == gop


def test_bytes_do_not_depend_on_what_memory_held_before(source, tmp_path):
    reshard(source, tmp_path / "first", gop=5, size=(48, 48))
    for number in range(3):
        # x264 takes memory that others have let go.
        litter = [b"\xff" * 60_000 for _ in range(200)]
        del litter

        reshard(source, tmp_path / f"copy {number}", gop=5, size=(48, 48))

        assert digests(tmp_path / f"copy {number}") == digests(tmp_path / "first")


def test_a_camera_has_the_size_asked_for(source, tmp_path):
    reshard(source, tmp_path / "copy", size=(48, 64))

    feature = info_of(tmp_path / "copy")["features"][TOP]
    assert open_dataset(str(tmp_path / "copy"))[3][TOP].shape == (3, 48, 64)
    assert (feature["shape"], feature["info"]["video.height"], feature["info"]["video.width"]) == ([48, 64, 3], 48, 64)
    assert info_of(tmp_path / "copy")["features"][STILL] == info_of(source)["features"][STILL]
    assert_near(source, tmp_path / "copy")


def test_a_camera_without_a_declared_shape_has_one_in_the_copy(source, tmp_path):
    root = shutil.copytree(source, tmp_path / "source")
    info = info_of(root)
    info["features"][TOP] = {"dtype": "video"}
    (root / "meta/info.json").write_text(json.dumps(info))

    reshard(root, tmp_path / "copy", gop=5)

    assert info_of(tmp_path / "copy")["features"][TOP]["shape"] == [96, 128, 3]


@pytest.mark.parametrize("codec", ["h264", "av1", "hevc", "vp9"])
def test_a_camera_has_the_codec_asked_for(source, tmp_path, codec):
    if not has_encoder(codec):
        pytest.skip(f"FFmpeg here has no encoder for {codec}")

    reshard(source, tmp_path / "copy", codec=codec, gop=4)

    path = next((tmp_path / "copy").rglob("*.mp4"))
    assert read_video_format(open_storage(path.parent), path.name).codec == codec
    assert info_of(tmp_path / "copy")["features"][TOP]["info"]["video.codec"] == codec
    assert keyframes_by_episode(tmp_path / "copy")[2] == [frame % 4 == 0 for frame in range(14)]
    assert_near(source, tmp_path / "copy")


def test_excluded_episodes_leave_no_frame_behind(source, tmp_path):
    report = reshard(source, tmp_path / "copy", gop=2, exclude=(0, 2))

    assert len(camera_packets(tmp_path / "copy", TOP)) == 1 + 6
    assert not any("excluded" in note for note in report.notes)


@pytest.mark.skipif(not has_encoder("av1"), reason="FFmpeg has no AV1 encoder here")
def test_encoding_leaves_the_priority_of_the_process_as_it_was(tmp_path):
    camera = CameraSpec(name=TOP, height=64, width=64, codec="av1")

    root = write_dataset(tmp_path / "made", SynthSpec(lengths=(6,), cameras=(camera,)))
    after_writing = os.sched_getscheduler(0)
    reshard(root, tmp_path / "copy", gop=3)

    # Run by root, SVT-AV1 would leave it at the highest real-time priority, for all that it starts later.
    assert os.SCHED_FIFO not in (after_writing, os.sched_getscheduler(0))
