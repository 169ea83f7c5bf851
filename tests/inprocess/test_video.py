import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchcodec.decoders import VideoDecoder

from raypipe.errors import DatasetError, DecodeError
from raypipe.format import episode_first_frame, first_frames, read_metadata, read_video_index, sample_pts
from raypipe.storage import open_storage
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def starts_of(lengths, gap=0):
    return np.cumsum([0, *[length + gap for length in lengths[:-1]]])


@given(lengths_lists, st.integers(1, 60), st.floats(-0.3, 0.3), st.integers(0, 9))
def test_first_frames_with_unused_video_between_are_the_nearest(lengths, fps, off, gap):
    starts = starts_of(lengths, gap)
    num_frames = int(starts[-1]) + lengths[-1] + 1

    found = first_frames((starts + off) / fps, np.array(lengths), np.arange(num_frames) / fps)

    assert found.frame.tolist() == starts.tolist()
    assert not found.is_counted
    np.testing.assert_allclose(found.drift_s, abs(off) / fps, atol=1e-9)


@given(lengths_lists, st.integers(1, 60), st.floats(0, 3))
def test_first_frames_follow_the_lengths_where_they_fill_the_file(lengths, fps, drift_per_episode):
    starts = starts_of(lengths)
    drifted = starts / fps + drift_per_episode * np.arange(len(lengths))

    found = first_frames(drifted, np.array(lengths), np.arange(sum(lengths)) / fps)

    assert found.is_counted
    assert found.frame.tolist() == starts.tolist()


CODINGS = {
    "every-2": CameraSpec(name="cam", gop=2),
    "b-frames-gop-250": CameraSpec(name="cam", gop=250, b_frames=3),
}


@pytest.mark.parametrize("join", ["encode", "concat"])
@pytest.mark.parametrize("coding", CODINGS)
def test_video_index_equals_what_the_decoder_shows(tmp_path, coding, join):
    spec = SynthSpec(lengths=(7, 1, 12, 5), cameras=(CODINGS[coding],), join=join, episodes_per_video_file=4)
    root = write_dataset(tmp_path / "d", spec)
    name = "videos/cam/chunk-000/file-000.mp4"

    index = read_video_index(open_storage(root), name)

    decoder = VideoDecoder(str(root / name))
    frames = decoder.get_frames_in_range(0, len(decoder))
    np.testing.assert_allclose(index.pts_s, frames.pts_seconds.numpy(), atol=1e-9)
    assert np.flatnonzero(index.is_keyframe).tolist() == sorted(decoder._get_key_frame_indices().tolist())


@pytest.fixture(scope="module")
def video(tiny_dataset):
    return (tiny_dataset / "videos/observation.images.top/chunk-000/file-000.mp4").read_bytes()


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_a_cut_off_video_is_an_error_that_names_the_file(tmp_path, video, keep):
    (tmp_path / "cut.mp4").write_bytes(video[: int(len(video) * keep)])

    with pytest.raises(DatasetError, match=r"cut\.mp4.*Fetch the file again"):
        read_video_index(open_storage(tmp_path), "cut.mp4")


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_video_with_one_wrong_byte_is_read_or_refused_never_worse(tmp_path_factory, video, position, value):
    folder = tmp_path_factory.mktemp("damaged")
    damaged = bytearray(video)
    damaged[-1 - position % len(damaged)] = value
    (folder / "v.mp4").write_bytes(damaged)

    try:
        index = read_video_index(open_storage(folder), "v.mp4")
    except (DatasetError, NotImplementedError):
        return
    assert len(index.pts_s) == len(index.is_keyframe)


def test_a_git_lfs_pointer_is_an_error(tmp_path):
    (tmp_path / "v.mp4").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1234\n")

    with pytest.raises(DatasetError, match=r"v\.mp4"):
        read_video_index(open_storage(tmp_path), "v.mp4")


def test_a_video_shorter_than_its_episode_is_an_error_that_says_how_much(tiny_dataset):
    meta = read_metadata(str(tiny_dataset))
    camera = meta.cameras[0]
    index = read_video_index(meta.storage, meta.video_file(2, camera))
    shorter = type(index)(index.pts_s[:15], index.is_keyframe[:15])

    with pytest.raises(DecodeError, match=r"episode 2 .*15 frames, and the episode needs frames 8 to 19"):
        episode_first_frame(meta, 2, camera, shorter)


def test_an_episode_that_starts_behind_the_video_is_an_error(tiny_dataset):
    meta = read_metadata(str(tiny_dataset))
    camera = meta.cameras[0]
    index = read_video_index(meta.storage, meta.video_file(2, camera))
    shorter = type(index)(index.pts_s[:5], index.is_keyframe[:5])

    with pytest.raises(DecodeError, match=r"no frame within half a frame of 0\.8000 s"):
        episode_first_frame(meta, 2, camera, shorter)


def test_a_table_that_counts_billions_of_frames_is_damage_and_takes_no_memory():
    entries = struct.pack(">IIII", 0, 1, 3_000_000_000, 512)
    sizes = struct.pack(">IIII", 0, 0, 1, 100)
    samples = struct.pack(">I4s", 8 + len(entries), b"stts") + entries
    samples += struct.pack(">I4s", 8 + len(sizes), b"stsz") + sizes

    with pytest.raises(ValueError, match="times of 3000000000 frames, and sizes of 1"):
        sample_pts(samples)
