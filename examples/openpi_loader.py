"""openpi trains from a raypipe pipeline: any LeRobot dataset (v2.0, v2.1, v3.0), resumed exactly.

Copy this file beside openpi's ``scripts/train.py`` (JAX) or ``scripts/train_pytorch.py``, and build the loader with it
in place of ``openpi.training.data_loader.create_data_loader``:

    data_loader = create_data_loader(config, "lerobot/pusht", sharding=data_sharding, first_step=first_step)

openpi's own transforms run as they are: the repack and data transforms of the config, its normalisation with the
statistics that ``scripts/compute_norm_stats.py`` wrote, and the model's, with the tokenizer. Only where samples come
from changes. The loader has what openpi's protocol ``DataLoader`` asks for: ``data_config()``, and an endless iterator
over ``(Observation, actions)``.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

import raypipe as rp

Transforms = list[Callable[[Any], Any]]
"""openpi's, of one sample each."""

ENDLESS = 1_000_000
"""Epochs: openpi's loop ends by the number of its steps."""


class PipelineLoader:
    """openpi's ``DataLoader`` over a pipeline."""

    def __init__(self, loader: Any, data_config: Any, transforms: Transforms, place: Callable[[Any], Any]) -> None:
        """Wrap a loader of a pipeline.

        Args:
            place: makes an array of the framework out of one of numpy.
        """
        self._loader, self._data_config = loader, data_config
        self._transforms, self._place = transforms, place

    def data_config(self) -> Any:
        """Return openpi's config of the data, which its checkpoints keep."""
        return self._data_config

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        from openpi.models import model

        while True:
            for batch in self._loader:
                made = _map(self._place, _transformed(batch, self._data_config, self._transforms))
                yield model.Observation.from_dict(made), made["actions"]


def create_data_loader(
    config: Any, root: str, *, sharding: Any = None, framework: str = "jax", first_step: int = 0
) -> PipelineLoader:
    """Return the loader of a run.

    Args:
        config: openpi's ``TrainConfig``.
        root: the dataset: a Hub id, a path or a URI.
        sharding: of JAX, as openpi's script makes it.
        first_step: how many steps the run has done: the loader goes on with the batch after them.
    """
    import openpi.transforms

    data = config.data.create(config.assets_dirs, config.model)
    if data.norm_stats is None:
        raise ValueError("the config has no normalisation statistics: compute them first, as stats_batches says")
    group = torch.distributed if framework == "pytorch" and torch.distributed.is_initialized() else None
    num_ranks = group.get_world_size() if group else 1
    pipe = _pipeline(config, data, root, config.batch_size // num_ranks)
    loader = (rp.train.share_loader if group else rp.Pipeline.loader)(pipe, num_epochs=ENDLESS)
    # The state is a function of the step: a checkpoint of openpi, which knows no data loader, tells enough.
    loader.load_state_dict(pipe.state_at(first_step, world_size=num_ranks))
    normalise = openpi.transforms.Normalize(data.norm_stats, use_quantiles=data.use_quantile_norm)
    transforms = [
        *data.repack_transforms.inputs,
        *data.data_transforms.inputs,
        normalise,
        *data.model_transforms.inputs,
    ]
    return PipelineLoader(loader, data, transforms, torch.as_tensor if framework == "pytorch" else _shard(sharding))


def stats_batches(config: Any, root: str) -> Iterator[dict[str, Any]]:
    """Yield one epoch of what openpi's ``scripts/compute_norm_stats.py`` counts, in place of its own loader.

    Its loop takes ``state`` and ``actions`` of every batch, as the data transforms leave them.
    """
    data = config.data.create(config.assets_dirs, config.model)
    transforms = [*data.repack_transforms.inputs, *data.data_transforms.inputs]
    for batch in _pipeline(config, data, root, config.batch_size).loader():
        yield _transformed(batch, data, [*transforms, _numbers])


def _numbers(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {key: sample[key] for key in ("state", "actions")}


def _pipeline(config: Any, data: Any, root: str, batch_size: int) -> rp.Pipeline:
    dataset = rp.open_dataset(root)
    horizon = range(config.model.action_horizon)
    windows = {key: [step / dataset.meta.fps for step in horizon] for key in data.action_sequence_keys}
    return rp.Pipeline(dataset, delta_timestamps=windows, batch_size=batch_size, seed=config.seed)


def _shard(sharding: Any) -> Callable[[Any], Any]:
    import jax

    return lambda array: jax.make_array_from_process_local_data(sharding, array)


def _transformed(batch: Mapping[str, Any], data: Any, transforms: Transforms) -> Any:
    """Return a batch as openpi's transforms make it, which know one sample at a time, in numpy."""
    arrays = {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    samples = []
    for number in range(len(batch["index"])):
        sample = {key: values[number] for key, values in arrays.items()}
        if data.prompt_from_task:
            sample["prompt"] = sample["task"]
        for transform in transforms:
            sample = transform(sample)
        samples.append(sample)
    return _stack(samples)


def _map(change: Callable[[Any], Any], tree: Any) -> Any:
    return {key: _map(change, value) for key, value in tree.items()} if isinstance(tree, dict) else change(tree)


def _stack(samples: list[Any]) -> Any:
    if isinstance(samples[0], dict):
        return {key: _stack([sample[key] for sample in samples]) for key in samples[0]}
    return np.stack([np.asarray(sample) for sample in samples])
