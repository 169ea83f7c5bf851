"""Views of much: what a picture has no room for is counted and named, and the picture can be drawn."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.text import Text

import raypipe as rp
from raypipe.testing import SynthSpec, write_dataset
from raypipe.views import batch as batch_module
from raypipe.views import card as card_module
from raypipe.views import episode as episode_module
from raypipe.views import view_batch, view_dataset, view_episode
from raypipe.views.episode import Curves
from raypipe.views.rows import Range

PIXELS = 2**16
"""matplotlib's limit for either side; people print at 300 dpi."""


@pytest.fixture(scope="module")
def rows_dataset(tmp_path_factory):
    return rp.open_dataset(str(write_dataset(tmp_path_factory.mktemp("many") / "rows", SynthSpec(cameras=()))))


def texts_of(figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def can_be_printed(figure) -> bool:
    return 300 * max(figure.get_size_inches()) < PIXELS


def curves_of(feature, length, numbers):
    values = np.arange(length * numbers, dtype=np.float32).reshape(length, numbers)
    return Curves(feature=feature, names=tuple(map(str, range(numbers))), values=values)


def ranges_of(feature, numbers):
    ends = np.arange(numbers, dtype=np.float64)
    names = tuple(map(str, range(numbers)))
    return Range(feature=feature, names=names, low=ends, mean=ends, std=ends, high=ends + 1, source="made")


def test_episode_draws_the_first_numbers_of_a_large_feature_and_says_how_many_it_leaves_out(rows_dataset):
    view = view_episode(rows_dataset, 2)

    figure = replace(view, curves=(curves_of("observation.points", view.length, 4096 * 3),)).figure()

    assert "observation.points (12,288 numbers, 12,240 of them not drawn)" in texts_of(figure)
    lines = [line.get_ydata() for line in figure.subfigs[1].axes[0].get_lines()]
    assert len(lines) == 48
    np.testing.assert_array_equal(lines[47], np.arange(view.length) * 12288 + 47)


def test_episode_names_the_features_that_its_picture_has_no_room_for(rows_dataset):
    view = view_episode(rows_dataset, 2)
    many = replace(view, curves=tuple(curves_of(f"feature_{number}", view.length, 2) for number in range(400)))

    figure = many.figure()

    assert can_be_printed(figure)
    drawn = texts_of(figure)
    assert "feature_31 (2 numbers)" in drawn
    assert "not drawn: 368 features: feature_32, feature_33, " in drawn
    assert "feature_32 (2 numbers)" not in drawn


def test_page_of_an_episode_names_the_features_that_are_not_drawn(rows_dataset, monkeypatch):
    monkeypatch.setattr(episode_module, "_DRAWN_FEATURES", 1)

    page = view_episode(rows_dataset, 2).page()

    assert "not drawn: 1 feature: observation.state</div>" in page


def test_episode_with_many_cameras_errors_and_constants_can_be_drawn(rows_dataset):
    view = view_episode(rows_dataset, 2)
    picture = rp.views.Picture(np.zeros((8, 8, 3), dtype=np.uint8), "frame 0")
    constants = [
        Curves(feature=f"constant_{number}", names=("0",), values=np.ones((view.length, 1))) for number in range(1000)
    ]
    many = replace(
        view,
        strips={f"camera_{number}": (picture,) for number in range(500)},
        failures=tuple(f"broken_{number}" for number in range(500)),
        curves=tuple(constants),
    )

    figure = many.figure()

    assert can_be_printed(figure)
    assert "not drawn: 476 cameras: camera_24, camera_25, " in texts_of(figure)
    assert "and 470 more lines" in texts_of(figure)


def test_card_names_the_features_that_its_picture_has_no_room_for(rows_dataset):
    card = view_dataset(rows_dataset)
    many = replace(
        card,
        ranges=tuple(ranges_of(f"feature_{number}", 60) for number in range(300)),
        lines=(*card.lines, *(("camera", f"camera_{number}") for number in range(5000))),
    )

    figure = many.figure()

    assert can_be_printed(figure)
    drawn = texts_of(figure)
    left_out = [one.feature for one in many.ranges[len(many.drawn_ranges) :]]
    assert len(left_out) == 290
    assert f"not drawn: {len(left_out)} features: {left_out[0]}, " in drawn
    assert "feature_0 (60 numbers, 12 of them not drawn): made" in drawn


def test_page_of_a_card_names_the_features_that_are_not_drawn(rows_dataset, monkeypatch):
    monkeypatch.setattr(card_module, "_RANGES_HEIGHT", 2.0)

    page = view_dataset(rows_dataset).page()

    assert "not drawn: 1 feature: observation.state</div>" in page


def many_cameras(size):
    numbers = torch.arange(size)
    cameras = {f"camera_{number}": torch.zeros((size, 3, 8, 8), dtype=torch.uint8) for number in range(400)}
    return {"episode_index": numbers, "frame_index": numbers, **cameras, "action": torch.rand((size, 12288))}


def test_batch_names_the_pictures_that_it_has_no_room_for():
    figure = view_batch(many_cameras(1)).figure()

    assert can_be_printed(figure)
    drawn = texts_of(figure)
    assert "not drawn: 352 pictures: camera_48, camera_49, " in drawn
    assert "action, 12,288 numbers, 12,240 of them not drawn" in drawn
    assert len([axes for axes in figure.axes if axes.get_images()]) == 48


def test_batch_says_how_many_of_its_samples_are_drawn():
    numbers = torch.arange(1000)

    view = view_batch({"episode_index": numbers, "frame_index": numbers}, num_samples=1000)

    figure = view.figure()
    assert can_be_printed(figure)
    assert len(view.samples) == 1000
    assert texts_of(figure).endswith("a batch of 1,000 samples from 1,000 episodes, 64 shown")


def test_page_of_a_batch_says_what_is_not_drawn(monkeypatch):
    monkeypatch.setattr(batch_module, "_DRAWN_SAMPLES", 2)
    monkeypatch.setattr(batch_module, "_DRAWN_PICTURES", 1)

    page = view_batch(many_cameras(5), num_samples=4).page()

    assert "<h2>2 of its 5 samples</h2>" in page
    assert "not drawn: 399 pictures: camera_1, " in page
    assert "camera_398, camera_399</div>" in page
