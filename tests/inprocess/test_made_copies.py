"""The datasets of ``benchmarks/made_copies.py``: longer than what is encoded for them, and otherwise sound."""

from pathlib import Path

import pytest
import torch
from torchcodec.decoders import VideoDecoder

from raypipe.dataset import open_dataset
from raypipe.testing import CameraSpec, SynthSpec, read_stamp, write_dataset
from raypipe.validate import validate_dataset

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LENGTHS = (7, 1, 12, 5, 9)


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_repeated_videos_begin_each_episode_with_its_first_frame(tmp_path):
    from made_copies import write_repeated

    spec = SynthSpec(lengths=LENGTHS, episodes_per_video_file=3)

    root = write_repeated(tmp_path / "arm", spec, 2)

    assert validate_dataset(str(root), where="process", deep=True).findings == ()
    dataset = open_dataset(str(root))
    stamps = [read_stamp(dataset[i]["observation.images.wrist"]) for i in range(len(dataset))]
    assert [stamp.frame for stamp in stamps] == [i for length in LENGTHS for i in range(length)]
    assert {stamp.episode for stamp in stamps} == {0, 1}
    assert len(list(root.glob("videos/*/*/*.mp4"))) == 4
    assert not list(root.glob("encoded-*"))


def test_repeated_videos_have_every_frame_at_its_time_as_lerobot_demands(tmp_path):
    from made_copies import write_repeated

    spec = SynthSpec(lengths=LENGTHS, fps=30, episodes_per_video_file=len(LENGTHS))

    root = write_repeated(tmp_path / "arm", spec, 2)

    decoder = VideoDecoder(str(next(root.glob("videos/*/*/*.mp4"))))
    times = decoder.get_frames_in_range(0, sum(LENGTHS)).pts_seconds
    # LeRobot refuses a frame that is further away than this.
    assert (times - torch.arange(sum(LENGTHS)) / 30).abs().max() < 1e-4


def test_copied_episodes_are_a_sound_dataset_with_every_episode_so_many_times(tmp_path):
    from made_copies import copy_episodes

    camera = CameraSpec(name="observation.images.top")
    source = write_dataset(tmp_path / "arm", SynthSpec(version="v2.1", lengths=(4, 6), cameras=(camera,)))

    root = copy_episodes(source, tmp_path / "copies", 3)

    report = validate_dataset(str(root), where="process", deep=True)
    assert {finding.kind for finding in report.findings} == {"episode-duplicate"}
    dataset = open_dataset(str(root))
    assert dataset.meta.episodes.length.tolist() == [4, 6, 4, 6, 4, 6]
    assert [int(dataset[i]["index"]) for i in (0, 11, 29)] == [0, 11, 29]
    last = VideoDecoder(str(root / "videos/chunk-000/observation.images.top/episode_000005.mp4"))
    assert read_stamp(last[5]).episode == 1


def test_episodes_that_share_files_are_not_copied(tmp_path):
    from made_copies import copy_episodes

    source = write_dataset(tmp_path / "arm", SynthSpec(cameras=()))

    with pytest.raises(SystemExit, match=r"is of v3\.0"):
        copy_episodes(source, tmp_path / "copies", 2)
