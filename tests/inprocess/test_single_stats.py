"""One way for one dataset and for mixtures: the statistics of a dataset normalise, and a dataset is a member."""

import pytest
import torch
from batches import local_loader

from raypipe.dataset import open_dataset
from raypipe.errors import ConfigError
from raypipe.mixture import Mixture, Normaliser
from raypipe.pipeline import Pipeline

TOP, WRIST = "observation.images.top", "observation.images.wrist"


@pytest.fixture(scope="module")
def dataset(tiny_dataset):
    return open_dataset(str(tiny_dataset))


@pytest.fixture(scope="module")
def batch(dataset):
    windowed = dataset.windowed(offsets={"action": [0, 1, 2]})
    return next(iter(local_loader(Pipeline(windowed, batch_size=4, seed=0))))


def test_the_statistics_of_a_dataset_scale_its_actions_and_observations(dataset, batch):
    scaled = Normaliser(dataset.stats).normalise(batch)

    for name, divisor in {"action": 1, "observation.state": 1, TOP: 255, WRIST: 255}.items():
        mean, std = (torch.from_numpy(dataset.stats[name][part]).float() for part in ("mean", "std"))
        torch.testing.assert_close(scaled[name], (batch[name].float() / divisor - mean) / (std + 1e-8))
    assert torch.equal(scaled["timestamp"], batch["timestamp"])
    assert torch.equal(scaled["index"], batch["index"])


@pytest.mark.parametrize("mode", ["mean_std", "min_max", "quantiles"])
def test_a_dataset_alone_and_as_the_only_member_are_scaled_alike(dataset, batch, mode):
    mixture = Mixture([dataset])
    member = {**batch, "dataset": list(mixture.names) * 4}

    alone, mixed = Normaliser(dataset.stats, mode), Normaliser(mixture.stats, mode)

    assert alone.modes == mixed.modes
    for name in alone.modes:
        assert torch.equal(alone.normalise(batch)[name], mixed.normalise(member)[name])


def test_actions_come_back_also_from_a_checkpoint(dataset, batch):
    again = Normaliser.from_json(Normaliser(dataset.stats, "min_max").to_json())

    action = again.unnormalise(again.normalise(batch))["action"]

    torch.testing.assert_close(action, batch["action"])


def test_no_statistics_are_an_error_with_the_remedy(dataset):
    with pytest.raises(ConfigError, match=r"no statistics of actions or observations are stored.*raypipe reshard"):
        Normaliser({})
    with pytest.raises(ConfigError, match=r"the mode of '.*' is 'std'.* Known: 'mean_std'"):
        Normaliser(dataset.stats, "std")


def test_an_opened_dataset_is_a_member_without_what_it_leaves_out(dataset, tiny_dataset):
    mixture = Mixture([(dataset.drop_features([WRIST]), 2.0), str(tiny_dataset)], on_missing="drop")

    assert set(mixture.schema.cameras) == {TOP}
    assert [member.spec.weight for member in mixture.members] == [2.0, 1.0]
    assert len(next(iter(local_loader(Pipeline(mixture, batch_size=4, seed=0))))["action"]) == 4


def test_a_dataset_of_fewer_cameras_gives_those(tiny_dataset):
    mixture = Mixture([open_dataset(str(tiny_dataset), cameras=[TOP])])

    assert set(mixture.schema.cameras) == {TOP}


def test_windows_are_the_mixtures(dataset):
    with pytest.raises(ConfigError, match="has windows, and a mixture has its own for all members"):
        Mixture([dataset.windowed(offsets={"action": [0, 1]})])
    with pytest.raises(ConfigError, match="a mixture has one representation for all members"):
        Mixture([dataset.with_actions({"mode": "relative"})])
