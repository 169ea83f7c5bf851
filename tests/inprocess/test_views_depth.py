"""Depth in pictures: one scale for an episode, and holes do not spoil it."""

import numpy as np
import pytest
from depth_cases import DEPTH, NEAR_MM, wall_of, write_deepening
from torchcodec.decoders import VideoDecoder

import raypipe as rp
from raypipe.views import view_episode
from raypipe.views.pixels import FrameReader, visible


def test_depth_without_a_measurement_is_black_and_leaves_the_others_as_they_are():
    values = np.array([[500.0, 1000.0, 1500.0, np.nan]], dtype=np.float32)[..., None]

    grey = visible(values)[0, :, 0]

    assert grey.tolist() == [0, 128, 255, 0]


def test_depth_that_is_endless_is_white():
    values = np.array([[500.0, 1500.0, np.inf, -np.inf]], dtype=np.float32)[..., None]

    grey = visible(values)[0, :, 0]

    assert grey.tolist() == [0, 255, 255, 0]


def test_depth_without_any_measurement_is_black():
    values = np.full((2, 3, 1), np.nan, dtype=np.float32)

    assert not visible(values).any()


def test_clip_of_depth_has_one_brightness_from_its_first_to_its_last_frame(tmp_path):
    dataset = rp.open_dataset(str(write_deepening(tmp_path / "deep")))

    clip = view_episode(dataset, 0).clip

    decoded = VideoDecoder(clip.mp4, dimension_order="NHWC")[:].numpy()
    walls = [wall_of(frame) for frame in decoded]
    assert len(walls) == 70
    assert max(walls) - min(walls) < 4
    # What moves away is as bright as the wall at first, and white at last.
    assert decoded[0, 8:40, 70:90].mean() == pytest.approx(walls[0], abs=4)
    assert decoded[-1, 8:40, 70:90].mean() > 245


def test_depth_outside_of_the_scale_is_black_or_white(tmp_path):
    dataset = rp.open_dataset(str(write_deepening(tmp_path / "deep")))

    (pixels,) = FrameReader(dataset, height=48).read(0, DEPTH, np.array([69]), (NEAR_MM + 100.0, 2000.0))

    assert (pixels[:, 8:24] == 0).all()
    assert (pixels[:, 72:88] == 255).all()
