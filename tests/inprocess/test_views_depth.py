"""Depth in pictures: one scale for an episode, which is told, and holes do not spoil it."""

import shutil

import numpy as np
import pytest
from depth_cases import DEPTH, MIDDLE_MM, NEAR_MM, documented_mm, wall_of, write_deepening, write_numbers
from torchcodec.decoders import VideoDecoder

import raypipe as rp
from raypipe.format import DepthCodes
from raypipe.views import view_batch, view_episode
from raypipe.views.pixels import FrameReader, depth_colours, visible

BLACK = [0, 0, 0]
BLUE, GREEN, RED = (list(depth_colours()(share, bytes=True)[:3]) for share in (0.0, 0.5, 1.0))


def test_depth_is_coloured_and_black_where_nothing_was_measured():
    values = np.array([[500.0, 1000.0, 1500.0, np.nan, 0.0]], dtype=np.float32)[..., None]

    colours = visible(values, (500.0, 1500.0))[0]

    assert colours.tolist() == [BLUE, GREEN, RED, BLACK, BLACK]


def test_depth_that_is_endless_is_as_the_farthest():
    values = np.array([[500.0, 1500.0, np.inf, -np.inf]], dtype=np.float32)[..., None]

    assert visible(values)[0].tolist() == [BLUE, RED, RED, BLUE]


def test_depth_without_any_measurement_is_black():
    values = np.full((2, 3, 1), np.nan, dtype=np.float32)

    assert not visible(values).any()


def test_clip_of_depth_has_one_scale_from_its_first_to_its_last_frame(tmp_path):
    dataset = rp.open_dataset(str(write_deepening(tmp_path / "deep")))

    clip = view_episode(dataset, 0).clip

    decoded = VideoDecoder(clip.mp4, dimension_order="NHWC")[:].numpy()
    walls = [wall_of(frame) for frame in decoded]
    assert len(walls) == 70
    assert max(walls) - min(walls) < 4
    # What moves away has the colour of the wall at first, and is red at last.
    assert decoded[0, 8:40, 70:90].mean() == pytest.approx(walls[0], abs=4)
    np.testing.assert_allclose(decoded[-1, 8:40, 70:90].mean(axis=(0, 1)), RED, atol=12)
    assert clip.told.endswith("; depth: 0.10 m (blue) to 8.40 m (red), black: not measured")


def test_depth_outside_of_the_scale_has_the_colour_of_its_end(tmp_path):
    dataset = rp.open_dataset(str(write_deepening(tmp_path / "deep")))

    (pixels,) = FrameReader(dataset, height=48).read(0, DEPTH, np.array([69]), (NEAR_MM + 100.0, 2000.0))

    assert (pixels[:, 8:24] == BLUE).all()
    assert (pixels[:, 72:88] == RED).all()


def test_pictures_of_depth_tell_their_scale(tmp_path):
    dataset = rp.open_dataset(str(write_deepening(tmp_path / "deep")))

    view = view_episode(dataset, 0, num_frames=3)

    assert view.scales == {DEPTH: (NEAR_MM, MIDDLE_MM + 6900)}
    assert "0.10 m (blue) to 8.40 m (red)" in "".join(view.parts())
    labels = [axes.get_ylabel() for place in view.figure().subfigs for axes in place.axes]
    assert labels.count("metres") == 1
    batch = next(iter(rp.Pipeline(dataset, batch_size=4, seed=0).loader()))
    captions = {picture.caption for one in view_batch(batch).samples for picture, _ in one.pictures}
    assert captions == {f"depth {NEAR_MM} to {batch[DEPTH].max():.4g}"}


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs the ffmpeg command")
def test_depth_video_is_shown_without_what_was_not_measured(tmp_path):
    pytest.importorskip("av", reason="needs the package av")
    numbers = np.full((8, 64, 64), 2000)
    numbers[:, :, :32] = 0
    numbers[:, 32:, 32:] = 1000
    dataset = rp.open_dataset(str(write_numbers(tmp_path / "deep", numbers)))

    ((pixels,), scale) = FrameReader(dataset, height=64).read_measured(0, DEPTH, np.array([3]))

    assert scale == tuple(documented_mm(np.array([1000, 2000]), DepthCodes()))
    assert (pixels[:, :32] == BLACK).all()
    assert (pixels[:32, 32:] == RED).all()
    assert (pixels[32:, 32:] == BLUE).all()
