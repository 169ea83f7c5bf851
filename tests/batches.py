"""What the tests of loaders share: datasets that hold a bit of everything, and batches compared with samples."""

import hashlib
from functools import cache

import numpy as np
import pytest
import torch

from raypipe.dataset import open_dataset
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

TOP, WRIST = "observation.images.top", "observation.images.wrist"

ADDED_KEYS = {"dataset_index", "augment_seed", "is_repeat"}
"""What a batch has beside the keys of samples."""

MODES = {"rank": {"where": "rank"}, "cluster": {"where": "cluster"}}

WINDOWS = {
    "action": [0, 1, 2, 3],
    "observation.state": [-1, 0],
    "note": [-1, 0],
    TOP: [-2, -1, 0],
    WRIST: [0, 3],
}
"""Offsets in frames, into the past and the future, of rows, of text, of a video and of an image camera."""


def varied_spec(version="v3.0", lengths=(7, 1, 12, 5, 9, 3, 10, 4, 6)) -> SynthSpec:
    """A video camera with B-frames, an image camera, a text, a bool and a matrix, in episodes of unlike lengths."""
    return SynthSpec(
        version=version,
        lengths=lengths,
        cameras=(
            CameraSpec(name=TOP, height=32, width=48, gop=4, b_frames=1),
            CameraSpec(name=WRIST, height=32, width=32, kind="image"),
        ),
        extra_features=("next.done", "observation.grid", "note"),
        two_tasks=True,
        episodes_per_data_file=4,
    )


def rows_spec(lengths=(7, 1, 12, 5, 9, 3, 10, 4, 6)) -> SynthSpec:
    return SynthSpec(lengths=lengths, cameras=(), state_dim=2, action_dim=2)


@pytest.fixture(scope="session")
def varied(tmp_path_factory):
    """Open datasets of 57 frames with windows on everything, by format version; read-only."""
    roots = tmp_path_factory.mktemp("varied")
    return {
        version: open_dataset(str(write_dataset(roots / version, varied_spec(version)))).windowed(offsets=WINDOWS)
        for version in ("v2.0", "v2.1", "v3.0")
    }


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """A dataset of 57 frames without cameras; read-only."""
    return open_dataset(str(write_dataset(tmp_path_factory.mktemp("rows") / "dataset", rows_spec())))


def frames_of(batch) -> list[tuple[int, int]]:
    """The (episode, frame) of every sample of a batch."""
    return list(zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True))


def frames_of_all(batches) -> list[tuple[int, int]]:
    return [frame for batch in batches for frame in frames_of(batch)]


def digest_of(batch) -> str:
    """A hash of all keys, types, shapes and values of a batch."""
    digest = hashlib.sha256()
    for key in sorted(batch):
        value = batch[key]
        digest.update(key.encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.contiguous().numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


def frames_of_dataset(dataset) -> list[tuple[int, int]]:
    table = dataset.meta.episodes
    pairs = zip(table.episode_index.tolist(), table.length.tolist(), strict=True)
    return sorted((episode, frame) for episode, length in pairs for frame in range(length))


def planned_frames(world, step, rank) -> list[tuple[int, int]]:
    frames = world.frames_at(step, rank)
    return list(zip(frames.episode.tolist(), frames.frame.tolist(), strict=True))


def planned_epoch(world, rank) -> list[list[tuple[int, int]]]:
    return [planned_frames(world, step, rank) for step in range(world.num_steps)]


def assert_equals_samples(batch, dataset) -> None:
    """Require every key of every sample of a batch to be exactly what the reference path gives."""
    for i, (episode, frame) in enumerate(frames_of(batch)):
        sample = _sample(_Same(dataset), episode, frame)
        assert set(batch) - ADDED_KEYS == set(sample)
        for key, wanted in sample.items():
            found = batch[key][i]
            place = f"{key} of frame {frame} of episode {episode}"
            if isinstance(wanted, torch.Tensor):
                assert found.dtype == wanted.dtype, place
                assert found.shape == wanted.shape, f"{place}: {found.shape}, not {wanted.shape}"
                np.testing.assert_array_equal(found.numpy(), wanted.numpy(), err_msg=place)
            else:
                assert found == wanted, place


class _Same:
    """A dataset as a key of a cache: itself, not its values, which are slow to compare."""

    def __init__(self, dataset) -> None:
        self.dataset = dataset

    def __hash__(self) -> int:
        return id(self.dataset)

    def __eq__(self, other) -> bool:
        return self.dataset is other.dataset


@cache
def _sample(same: _Same, episode: int, frame: int):
    return same.dataset.sample_of(episode, frame)


def local_loader(pipe, rank=0, world_size=1, **settings):
    """The loader of one rank on the local feed, which waits for no other rank; all are of one attempt."""
    loader = pipe.loader(rank=rank, world_size=world_size, transport="local", **settings)
    loader._source.attempt = "local"
    loader.load_account(())
    return loader
