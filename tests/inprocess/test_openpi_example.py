"""The example for openpi keeps openpi's protocol, which a stand-in of its classes checks: openpi is on no index."""

import importlib.util
import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from batches import TOP, varied_spec

import raypipe as rp
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

EXAMPLE = Path(__file__).parents[2] / "examples" / "openpi_loader.py"
HORIZON = 5
MEAN, STD = 2.0, 4.0


@dataclass
class Observation:
    """What openpi's `Observation.from_dict` takes, with its checks of types and shapes written out."""

    images: dict[str, Any]
    image_masks: dict[str, Any]
    state: Any
    tokenized_prompt: Any

    @classmethod
    def from_dict(cls, data):
        assert set(data) >= {"image", "image_mask", "state", "tokenized_prompt", "tokenized_prompt_mask", "actions"}
        for images in data["image"].values():
            assert (images.dtype, images.ndim, images.shape[-1]) == (torch.uint8, 4, 3)
        assert data["state"].dtype == torch.float32
        return cls(data["image"], data["image_mask"], data["state"], data["tokenized_prompt"])


class Normalize:
    def __init__(self, norm_stats, use_quantiles):
        assert use_quantiles is False
        self.stats = norm_stats

    def __call__(self, data):
        scaled = {key: (data[key] - mean) / std for key, (mean, std) in self.stats.items()}
        return {**data, **{key: value.astype(np.float32) for key, value in scaled.items()}}


def repack(data):
    """As a config of openpi names what it takes from a LeRobot sample."""
    return {"top": data[TOP], "state": data["observation.state"], "actions": data["action"], "prompt": data["prompt"]}


def to_inputs(data):
    """As the policies of openpi make inputs: cameras as they are in LeRobot, channels first."""
    image = np.transpose(data.pop("top"), (1, 2, 0))
    return {"image": {"base_0_rgb": image}, "image_mask": {"base_0_rgb": np.True_}, **data}


def tokenize(data):
    prompt = data.pop("prompt")
    assert isinstance(prompt, str)
    tokens = np.array([len(prompt)], dtype=np.int32)
    return {**data, "tokenized_prompt": tokens, "tokenized_prompt_mask": np.array([True])}


@dataclass
class TrainConfig:
    batch_size: int = 6
    seed: int = 3
    assets_dirs: str = "assets"
    model: Any = field(default_factory=lambda: SimpleNamespace(action_horizon=HORIZON))
    data: Any = None

    def __post_init__(self):
        made = SimpleNamespace(
            action_sequence_keys=("action",),
            norm_stats={"state": (MEAN, STD)},
            prompt_from_task=True,
            use_quantile_norm=False,
            repack_transforms=SimpleNamespace(inputs=[repack]),
            data_transforms=SimpleNamespace(inputs=[to_inputs]),
            model_transforms=SimpleNamespace(inputs=[tokenize]),
        )
        self.data = SimpleNamespace(create=lambda assets, model: made)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    spec = SynthSpec(lengths=(7, 12, 9), cameras=(CameraSpec(name=TOP),), version=varied_spec().version)
    return write_dataset(tmp_path_factory.mktemp("openpi") / "dataset", spec)


@pytest.fixture
def example(monkeypatch):
    """The example, where the two modules of openpi that it imports are stand-ins."""
    stand_ins = {name: ModuleType(name) for name in ("openpi", "openpi.models", "openpi.models.model")}
    stand_ins["openpi.models.model"].Observation = Observation
    stand_ins["openpi.models"].model = stand_ins["openpi.models.model"]
    stand_ins["openpi.transforms"] = stand_ins["openpi"].transforms = ModuleType("openpi.transforms")
    stand_ins["openpi.transforms"].Normalize = Normalize
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("openpi_loader", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_batches(loader, count):
    iterator = iter(loader)
    taken = list(itertools.islice(iterator, count))
    iterator.close()
    return taken


def test_loader_for_openpi_yields_what_its_transforms_make_of_the_planned_samples(example, root):
    config = TrainConfig()

    loader = example.create_data_loader(config, str(root), framework="pytorch")

    assert loader.data_config() is config.data.create("assets", config.model)
    dataset = rp.open_dataset(str(root))
    windows = {"action": [step / dataset.meta.fps for step in range(HORIZON)]}
    pipe = rp.Pipeline(dataset, delta_timestamps=windows, batch_size=6, seed=3)
    steps = len(pipe.loader())
    # More than an epoch: openpi's iterator never ends.
    taken = first_batches(loader, steps + 2)
    assert len(taken) == steps + 2
    for (observation, actions), batch in zip(taken, pipe.loader(), strict=False):
        assert torch.equal(observation.images["base_0_rgb"], batch[TOP].permute(0, 2, 3, 1))
        assert torch.equal(observation.state, (batch["observation.state"] - MEAN) / STD)
        assert observation.tokenized_prompt[:, 0].tolist() == list(map(len, batch["task"]))
        assert torch.equal(actions, batch["action"])
        assert actions.shape[1] == HORIZON


@pytest.mark.parametrize("first_step", [1, 4, 7])
def test_loader_for_openpi_goes_on_after_the_step_of_a_checkpoint(example, root, first_step):
    whole = first_batches(example.create_data_loader(TrainConfig(), str(root), framework="pytorch"), 9)

    rest = first_batches(
        example.create_data_loader(TrainConfig(), str(root), framework="pytorch", first_step=first_step), 9 - first_step
    )

    for (_, actions), (_, wanted) in zip(rest, whole[first_step:], strict=True):
        assert torch.equal(actions, wanted)


def test_statistics_for_openpi_are_of_every_frame_as_its_data_transforms_leave_it(example, root):
    config = TrainConfig()
    config.data.create("assets", config.model).norm_stats = None

    batches = list(example.stats_batches(config, str(root)))

    states = np.concatenate([batch["state"] for batch in batches])
    stored = rp.open_dataset(str(root)).stats["observation.state"]
    assert len(states) == 28
    np.testing.assert_allclose(states.mean(axis=0), stored["mean"], rtol=1e-5)
    assert batches[0]["actions"].shape[1:] == (HORIZON, 6)
    with pytest.raises(ValueError, match="compute them first"):
        example.create_data_loader(config, str(root), framework="pytorch")


def test_loader_for_openpi_gives_jax_its_arrays(example, root, monkeypatch):
    jax = pytest.importorskip("jax", reason="needs the package jax")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    seen = []
    monkeypatch.setattr(Observation, "from_dict", seen.append)

    loader = example.create_data_loader(TrainConfig(), str(root), sharding=sharding)

    ((_, actions),) = first_batches(loader, 1)
    assert isinstance(actions, jax.Array)
    assert seen[0]["image"]["base_0_rgb"].dtype == np.uint8
