"""Resharding on Ray: the same bytes as in one process, and errors as they are."""

import pytest
from reshard_checks import digests

from raypipe.errors import DecodeError
from raypipe.reshard import ReshardSpec, reshard_dataset
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

SPEC = SynthSpec(version="v2.1", lengths=(9, 4, 1, 12, 6, 8), cameras=(CameraSpec(name="observation.images.top"),))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("source") / "dataset", SPEC)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("choices", [{"exclude": (2,)}, {"gop": 3, "size": (48, 48)}])
def test_tasks_on_ray_write_the_bytes_of_one_process(source, tmp_path, choices):
    spec = ReshardSpec(**choices)
    reshard_dataset(str(source), tmp_path / "here", spec, where="process")

    reshard_dataset(str(source), tmp_path / "there", spec, where="ray")

    assert digests(tmp_path / "there") == digests(tmp_path / "here")


@pytest.mark.usefixtures("ray_cluster")
def test_an_error_in_a_task_is_the_error_of_the_call(source, tmp_path):
    import shutil

    damaged = shutil.copytree(source, tmp_path / "damaged")
    folder = damaged / "videos/chunk-000/observation.images.top"
    shutil.copy(folder / "episode_000002.mp4", folder / "episode_000003.mp4")

    with pytest.raises(DecodeError, match=r"episode 3 .* has 1 frame,") as caught:
        reshard_dataset(str(damaged), tmp_path / "copy", where="ray")

    assert type(caught.value) is DecodeError
    assert not (tmp_path / "copy").exists()
