"""Frames in another size: by camera, stretched, between bars or cut, of single datasets and of mixtures."""

import numpy as np
import pytest
import torch
from batches import local_loader
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from raypipe.dataset import open_dataset
from raypipe.decode.pixels import middle_of, resize_frames
from raypipe.errors import ConfigError
from raypipe.mixture import Mixture
from raypipe.pipeline import Pipeline
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

TOP, WRIST = "observation.images.top", "observation.images.wrist"
OWN = (48, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    cameras = tuple(CameraSpec(name=name, height=OWN[0], width=OWN[1]) for name in (TOP, WRIST))
    return write_dataset(tmp_path_factory.mktemp("made") / "arm", SynthSpec(lengths=(7, 5), cameras=cameras))


@pytest.fixture(scope="module")
def dataset(folder):
    return open_dataset(str(folder))


def by_frame(pipe, camera):
    return {
        int(i): pixels for batch in local_loader(pipe) for i, pixels in zip(batch["index"], batch[camera], strict=True)
    }


def pillow_frame(pixels, size, box):
    """Return a frame ``(channels, height, width)`` as another implementation of the same filter makes it."""
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    resized = image.crop(box).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def assert_alike(found, wanted):
    assert found.shape == wanted.shape
    assert (found.int() - wanted.int()).abs().max() <= 1


def test_a_camera_has_its_own_size_and_the_others_theirs(dataset):
    pipe = Pipeline(dataset, batch_size=4, seed=0, decode={"resize": {WRIST: (24, 20)}})

    tops, wrists = by_frame(pipe, TOP), by_frame(pipe, WRIST)

    for i in range(len(dataset)):
        assert torch.equal(tops[i], dataset[i][TOP])
        assert_alike(wrists[i], pillow_frame(dataset[i][WRIST], (24, 20), (0, 0, 64, 48)))


def test_a_frame_is_cut_to_its_middle(dataset):
    pipe = Pipeline(dataset, batch_size=4, seed=0, decode={"resize": (24, 24), "fit": "crop"})

    for i, pixels in by_frame(pipe, TOP).items():
        assert_alike(pixels, pillow_frame(dataset[i][TOP], (24, 24), (8, 0, 56, 48)))


def test_a_frame_stands_whole_between_black_bars(dataset):
    pipe = Pipeline(dataset, batch_size=4, seed=0, decode={"resize": (32, 32), "fit": "letterbox"})

    for i, pixels in by_frame(pipe, TOP).items():
        assert not pixels[:, :4].any()
        assert not pixels[:, 28:].any()
        assert_alike(pixels[:, 4:28], pillow_frame(dataset[i][TOP], (24, 32), (0, 0, 64, 48)))


@given(st.integers(1, 300), st.integers(1, 300), st.tuples(st.integers(1, 300), st.integers(1, 300)))
def test_the_middle_has_the_shape_asked_for_and_touches_two_sides(height, width, shape):
    top, left, part_height, part_width = middle_of(height, width, shape)

    assert (part_height == height) or (part_width == width)
    assert 0 <= height - part_height - 2 * top <= 1
    assert 0 <= width - part_width - 2 * left <= 1
    # As near as whole pixels are.
    near_height, near_width = part_width * shape[0] / shape[1], part_height * shape[1] / shape[0]
    assert abs(part_height - max(1, near_height)) <= 0.5 or abs(part_width - max(1, near_width)) <= 0.5


@pytest.mark.parametrize("fit", ["stretch", "letterbox", "crop"])
def test_a_frame_does_not_depend_on_those_beside_it(fit):
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 30, 52, 3), dtype=np.uint8))

    together = resize_frames(frames, (17, 23), fit)

    assert together.shape == (3, 17, 23, 3)
    for one, frame in zip(together, frames, strict=True):
        assert torch.equal(one, resize_frames(frame[None], (17, 23), fit)[0])


def test_a_mixture_has_sizes_by_the_names_of_its_batches(folder, tmp_path):
    other = write_dataset(
        tmp_path / "other", SynthSpec(lengths=(6,), cameras=(CameraSpec(name="eye", height=40, width=40),))
    )
    members = [
        {"root": str(folder), "cameras": {"front": TOP, "side": WRIST}},
        {"root": str(other), "cameras": {"front": "eye"}},
    ]
    mixture = Mixture(members, resize={"front": (24, 24)}, fit="crop", on_missing="fill")
    arm, eye = mixture.datasets

    batches = list(local_loader(Pipeline(mixture, batch_size=6, seed=0)))

    for batch in batches:
        assert (batch["front"].shape[1:], batch["side"].shape[1:]) == ((3, 24, 24), (3, *OWN))
        for number, episode, frame, front, side in zip(
            batch["dataset_index"],
            batch["episode_index"],
            batch["frame_index"],
            batch["front"],
            batch["side"],
            strict=True,
        ):
            own, box = ((arm, TOP), (8, 0, 56, 48)) if number == 0 else ((eye, "eye"), (0, 0, 40, 40))
            place = int(own[0].meta.episodes.length[: int(episode)].sum()) + int(frame)
            assert_alike(front, pillow_frame(own[0][place][own[1]], (24, 24), box))
            assert torch.equal(side, arm[place][WRIST] if number == 0 else torch.zeros_like(side))


def test_a_size_of_a_camera_that_is_not_there_is_refused(dataset, folder):
    with pytest.raises(ConfigError, match=f"wrst', which the dataset does not have; did you mean '{WRIST}'"):
        Pipeline(dataset, batch_size=4, seed=0, decode={"resize": {"observation.images.wrst": (8, 8)}})
    with pytest.raises(ConfigError, match="names the camera 'front', which the mixture does not have"):
        Pipeline(Mixture([str(folder)], resize={"front": (8, 8)}), batch_size=4, seed=0)


BAD = {
    "a text": ({TOP: "8"}, f"decode resize of '{TOP}' is '8'; give"),
    "three": ((8, 8, 3), r"decode resize is \(8, 8, 3\); give"),
    "zero": ((0, 8), r"decode resize \(0, 8\): a side must be an integer of at least 1"),
    "half": ((8.5, 8), r"decode resize \(8.5, 8\): a side must be an integer"),
    "a slip": ((8, 224_224), "at most 32768"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_size_is_refused(dataset, name):
    resize, message = BAD[name]

    with pytest.raises(ConfigError, match=message):
        Pipeline(dataset, batch_size=4, seed=0, decode={"resize": resize})


def test_an_unknown_fit_is_refused(dataset):
    with pytest.raises(ConfigError, match="decode fit is 'letterbx'; did you mean 'letterbox'"):
        Pipeline(dataset, batch_size=4, seed=0, decode={"resize": (8, 8), "fit": "letterbx"})


def test_a_fit_without_a_size_is_refused(dataset, folder):
    with pytest.raises(ConfigError, match=r"decode fit is 'crop', and no size is given beside it: give resize="):
        Pipeline(dataset, batch_size=4, seed=0, decode={"fit": "crop"})
    with pytest.raises(ConfigError, match="decode fit is 'crop'"):
        Pipeline(Mixture([str(folder)], resize=(8, 8)), batch_size=4, seed=0, decode={"fit": "crop"})
    with pytest.raises(ConfigError, match="fit is 'letterbox', and no size"):
        Mixture([str(folder)], fit="letterbox")
