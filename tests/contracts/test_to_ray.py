"""An epoch as a Ray Dataset, for people who go on with Ray Data."""

import numpy as np
import pytest
import torch
from batches import frames_of_dataset

from raypipe.mixture import Mixture
from raypipe.pipeline import Pipeline
from raypipe.testing import SynthSpec, write_dataset

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_epoch_as_a_ray_dataset_has_every_sample_with_the_values_of_the_reference(varied):
    dataset = varied["v3.0"]
    pipe = Pipeline(dataset, batch_size=4, seed=0)

    tables = list(pipe.to_ray(epoch=1).iter_batches(batch_size=None, batch_format="numpy"))

    came = []
    for table in tables:
        # A block is an episode.
        assert len(set(table["episode_index"].tolist())) == 1
        for i, (episode, frame) in enumerate(zip(table["episode_index"], table["frame_index"], strict=True)):
            came.append((int(episode), int(frame)))
            for key, wanted in dataset.sample_of(int(episode), int(frame)).items():
                found = table[key][i]
                if isinstance(wanted, torch.Tensor):
                    np.testing.assert_array_equal(np.asarray(found, dtype=wanted.numpy().dtype), wanted.numpy(), key)
                else:
                    assert list(found) == wanted if isinstance(wanted, list) else found == wanted, key
    assert sorted(came) == frames_of_dataset(dataset)


def test_epoch_as_a_ray_dataset_has_its_episodes_in_the_order_of_the_plan(varied):
    pipe = Pipeline(varied["v3.0"], batch_size=4, seed=0)
    planned = pipe.plan(epoch=1).rank(0).queue.episode.tolist()

    tables = pipe.to_ray(epoch=1).select_columns(["episode_index"]).iter_batches(batch_size=None, batch_format="numpy")

    assert [int(table["episode_index"][0]) for table in tables] == planned
    assert planned != sorted(planned)


@pytest.mark.parametrize("mode", ["relative", "delta"])
def test_epoch_of_a_mixture_as_a_ray_dataset_has_the_actions_of_batches(mode, tmp_path):
    roots = []
    for width in (2, 3):
        spec = SynthSpec(lengths=(5, 7), cameras=(), state_dim=width, action_dim=width, robot_type=f"robot{width}")
        roots.append(str(write_dataset(tmp_path / f"robot{width}", spec)))
    mixture = Mixture(roots, progress=False).windowed(offsets={"action": [0, 1, 3]})
    pipe = Pipeline(mixture, batch_size=24, seed=0, actions={"mode": mode, "absolute": [0]})

    (batch,) = pipe.loader(transport="local", progress=False)
    (over_ray,) = pipe.loader(transport="ray", progress=False)
    tables = list(pipe.to_ray().iter_batches(batch_size=None, batch_format="numpy"))

    assert torch.equal(batch["action"], over_ray["action"])
    keys = ("dataset_index", "episode_index", "frame_index")
    values = {tuple(place): action for *place, action in _samples(batch, keys)}
    came = [sample for table in tables for sample in _samples(table, keys)]
    assert len(came) == 24
    for *place, action in came:
        np.testing.assert_array_equal(action, values[tuple(place)])
    assert {one for table in tables for one in table["action_representation"]} == set(batch["action_representation"])


def _samples(batch, keys):
    numbers = zip(*(batch[key].tolist() for key in keys), strict=True)
    return [(*place, np.asarray(action)) for place, action in zip(numbers, batch["action"], strict=True)]
