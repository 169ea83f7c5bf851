"""LeRobot itself opens a resharded copy and gives the source's samples. Runs where lerobot is installed."""

import pytest
import torch

from raypipe.dataset import open_dataset
from raypipe.reshard import ReshardSpec, reshard_dataset
from raypipe.testing import SynthSpec, write_dataset

pytest.importorskip("lerobot", reason="lerobot is not installed")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
def test_lerobot_reads_the_samples_of_the_source_from_the_copy(tmp_path, version):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    spec = SynthSpec(version=version, drop_columns=("index",), extra_features=("next.done",))
    source = open_dataset(str(write_dataset(tmp_path / "source", spec)), camera_dtype="float32")

    reshard_dataset(str(tmp_path / "source"), tmp_path / "copy", ReshardSpec(exclude=(1,)), where="process")

    copy = LeRobotDataset("somebody/copy", root=tmp_path / "copy")
    kept = [position for position in range(len(source)) if int(source[position]["episode_index"]) != 1]
    assert len(copy) == len(kept)
    for new, old in enumerate(kept):
        expected, found = source[old], copy[new]
        for key in ("observation.state", "action", "next.done", "timestamp", *source.spec.cameras):
            assert torch.allclose(found[key].float(), expected[key].float(), atol=1e-6), key
        assert found["task"] == expected["task"]
