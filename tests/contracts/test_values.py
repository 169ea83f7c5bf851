"""Batches hold exactly what the reference path gives: made datasets of the older formats, and real ones."""

import shutil
import warnings
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import MODES, assert_equals_samples, frames_of, local_loader, planned_epoch
from depth_cases import DEPTH, random_numbers, write_numbers

from raypipe.dataset import open_dataset
from raypipe.decode.frames import FrameDecoder
from raypipe.pipeline import Pipeline

REAL_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

needs_real_data = pytest.mark.skipif(not REAL_DATA.exists(), reason="the real datasets are not part of the project")

REAL = ("cr5_v21", "groot_simpnp_v20", "piper_v30", "so_front_v30", "so101_wrist_v30", "pusht_v30_novid")

REAL_ON_RAY = {"cr5_v21": "rank", "groot_simpnp_v20": "cluster", "so101_wrist_v30": "rank"}
"""One of every format version, in one mode each; all others, in all modes, go the same way without Ray."""


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("version", "mode"), [("v2.0", "cluster"), ("v2.1", "rank")])
def test_batches_of_a_made_dataset_equal_its_samples(varied, version, mode):
    pipe = Pipeline(varied[version], batch_size=6, seed=2, order={"live_spans": 4}, decode=MODES[mode])

    batches = list(pipe.loader())

    assert [frames_of(batch) for batch in batches] == planned_epoch(pipe.plan(), 0)
    for batch in batches:
        assert_equals_samples(batch, varied[version])


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("mode", "transport"), [("rank", "local"), ("cluster", "ray")])
def test_batches_of_kept_frames_equal_the_samples(varied, tmp_path, mode, transport):
    keep = {"folder": str(tmp_path)}
    pipe = Pipeline(varied["v3.0"], batch_size=6, seed=2, decode=MODES[mode], keep_frames=keep)
    with pipe.loader(transport=transport) as loader:
        first = [list(loader), loader.stats()]

    with pipe.loader(transport=transport) as loader:
        later = [list(loader), loader.stats()]

    for batch in [*first[0], *later[0]]:
        assert_equals_samples(batch, varied["v3.0"])
    # Of two cameras, one is stored in the rows as images, which are not kept.
    assert first[1].kept_frames < first[1].decoded_frames
    assert later[1].kept_frames > 0
    assert first[1].decoded_frames + first[1].kept_frames == later[1].decoded_frames + later[1].kept_frames
    assert later[1].decoder_opens == 0


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs the ffmpeg command")
def test_tasks_decode_depth_videos_as_the_reference_path_does(tmp_path):
    pytest.importorskip("av", reason="needs the package av")
    dataset = open_dataset(str(write_numbers(tmp_path / "depth", random_numbers(12)))).windowed(
        offsets={DEPTH: [-1, 0]}
    )
    pipe = Pipeline(dataset, batch_size=6, seed=2, decode={"where": "cluster", "resize": (40, 50)})

    batches = list(pipe.loader(transport="ray"))

    assert sum(map(len, map(frames_of, batches))) == 26
    reference = FrameDecoder(dataset.meta, pipe.config.decode)
    for batch in batches:
        for pixels, (episode, frame) in zip(batch[DEPTH], frames_of(batch), strict=True):
            wanted = reference.decode_video(episode, DEPTH, np.array([frame]))[0]
            assert torch.equal(pixels[1, 0], wanted[..., 0])


def open_real(name):
    """Return a real dataset with a window of actions and, where it has a camera, of two of its frames."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dataset = open_dataset(str(REAL_DATA / name))
    cameras = {camera: [-2, 0] for camera in dataset.spec.cameras[:1]}
    return dataset.windowed(offsets={"action": [0, 1, 2, 3], **cameras})


def real_pipeline(dataset, mode):
    # Short spans and few of them: a first batch decodes all that are live.
    order = {"live_spans": 3, "span_frames": 8}
    return Pipeline(dataset, batch_size=6, seed=2, order=order, decode=MODES[mode])


@needs_real_data
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("name", "mode"), REAL_ON_RAY.items())
def test_batches_of_a_real_dataset_equal_its_samples(name, mode):
    dataset = open_real(name)
    pipe = real_pipeline(dataset, mode)

    with pipe.loader() as loader:
        batches = list(islice(loader, 2))

    world = pipe.plan()
    for step, batch in enumerate(batches):
        frames = world.frames_at(step, 0)
        assert frames_of(batch) == list(zip(frames.episode.tolist(), frames.frame.tolist(), strict=True))
        assert_equals_samples(batch, dataset)


@needs_real_data
@pytest.mark.parametrize("name", REAL)
def test_batches_of_a_real_dataset_equal_its_samples_in_every_mode(name):
    dataset = open_real(name)

    with local_loader(real_pipeline(dataset, "rank")) as loader:
        batches = list(islice(loader, 2))

    assert len(batches) == 2
    for batch in batches:
        assert_equals_samples(batch, dataset)
