"""Resharded copies of real datasets: every row value, every packet, and samples of every key."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from reshard_checks import assert_rows_kept, assert_times_exact, camera_packets

from raypipe.dataset import open_dataset
from raypipe.format import read_row_group_layout
from raypipe.reshard import ReshardSpec, reshard_dataset

REAL_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

pytestmark = pytest.mark.skipif(not REAL_DATA.exists(), reason="the real datasets are not part of the project")

# cameras on disk, cameras without a file
EXPECTED = {
    "cr5_v21": (["observation.images.top"], []),
    "groot_simpnp_v20": (["observation.images.ego_view"], ["observation.images.egoview"]),
    "piper_v30": (["observation.images.top", "observation.images.wrist"], []),
    "so_front_v30": (["observation.images.front"], []),
    "so101_wrist_v30": (["observation.images.wrist"], []),
    "pusht_v30_novid": ([], ["observation.image"]),
}


def opened(root):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return open_dataset(str(root))


def some_frames(length):
    return sorted({0, 1, length // 2, length - 1} & set(range(length)))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_copy_of_a_real_dataset_keeps_rows_packets_and_samples(tmp_path, name):
    root, out = REAL_DATA / name, tmp_path / "copy"
    cameras, missing = EXPECTED[name]
    source = opened(root)

    report = reshard_dataset(
        str(root), out, ReshardSpec(drop_cameras=tuple(missing)), where="process", allow_findings=True
    )

    # Small datasets of one encoder: one file a camera, whatever the source's bit rates.
    assert report.num_video_files == len(cameras)
    episodes = source.meta.episodes
    assert_rows_kept(root, out, episodes.episode_index.tolist())
    assert_times_exact(out)
    copy = opened(out)
    assert list(copy.spec.cameras) == cameras
    assert read_row_group_layout(copy.meta) == "per-episode"
    for camera in cameras:
        assert camera_packets(out, camera) == camera_packets(root, camera)
    for row in sorted({0, len(episodes) // 2, len(episodes) - 1}):
        for frame in some_frames(int(episodes.length[row])):
            old = source.sample_of(int(episodes.episode_index[row]), frame)
            new = copy.sample_of(row, frame)
            for key, value in old.items():
                same = torch.equal(value, new[key]) if isinstance(value, torch.Tensor) else value == new[key]
                assert same, (key, row, frame)


def test_an_episode_is_cut_out_of_a_real_packed_video(tmp_path):
    root, out = REAL_DATA / "so101_wrist_v30", tmp_path / "copy"

    report = reshard_dataset(str(root), out, ReshardSpec(exclude=(1, 4)), where="process", allow_findings=True)

    source, copy = opened(root), opened(out)
    camera = "observation.images.wrist"
    unused = sum(int(note.split()[0]) for note in report.notes if "frames of excluded" in note)
    assert len(camera_packets(out, camera)) == copy.meta.num_frames + unused
    assert unused < 2 * 2 * 2
    for new, old in enumerate((0, 2, 3, 5)):
        for frame in some_frames(int(source.meta.episodes.length[old])):
            assert torch.equal(copy.sample_of(new, frame)[camera], source.sample_of(old, frame)[camera])
    np.testing.assert_array_equal(copy.meta.episodes.length, source.meta.episodes.length[[0, 2, 3, 5]])
