"""Give each worker of Ray Train its loaders of the pipelines. See `raypipe.train`."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import pyarrow.fs
import ray
import ray.train
import ray.train.torch
import torch

from raypipe.errors import ConfigError
from raypipe.loader import LoaderSettings, RankLoader
from raypipe.pipeline import Pipeline
from raypipe.train.processes import STATE_FOLDER, restore_from, state_in, write_states


def ingest(**pipelines: Pipeline) -> dict[str, Any]:
    """Return ``datasets`` and ``dataset_config`` for a `TorchTrainer`: every worker gets a loader of each pipeline."""
    for name, pipeline in pipelines.items():
        if not isinstance(pipeline, Pipeline):
            raise ConfigError(f"ingest({name}=...) takes a raypipe.Pipeline, got {pipeline!r}")
    return {"datasets": dict(pipelines), "dataset_config": PipelineDataConfig()}


class PipelineDataConfig(ray.train.DataConfig):  # type: ignore[misc]
    """Gives every training worker its loaders. Ray's own config would slice blocks and drop rows."""

    def configure(self, datasets: Mapping[str, Pipeline], world_size: int, *_: Any, **__: Any) -> list[dict[str, Any]]:
        """Return the loaders of every worker; Ray calls this at every start of the worker group."""
        loaders = {name: one.loaders(world_size, name=name, transport="ray") for name, one in datasets.items()}
        return [{name: ranks[rank] for name, ranks in loaders.items()} for rank in range(world_size)]


def get_loader(name: str = "train", **settings: Unpack[LoaderSettings]) -> RankLoader:
    """Return this worker's loader of the pipeline `name`, positioned where the run's checkpoint left off.

    Call it on every worker. Without a checkpoint, or with one that has no state of this loader, it starts at epoch 0.

    Args:
        name: the keyword given to `ingest`.
        settings: the fields of `LoaderSpec`, such as ``num_epochs``, ``transform`` and ``device``. The default device
            is the worker's GPU, if it has one.
    """
    try:
        # Without worker processes (num_workers=0) Ray asserts that it knows the name.
        shard = ray.train.get_dataset_shard(name)
    except (KeyError, AssertionError) as error:
        raise ConfigError(f"the trainer has no pipeline {name!r}; pass it as rp.train.ingest({name}=...)") from error
    # Without worker processes (num_workers=0) Ray hands out the pipeline itself.
    loader = shard.loaders(1, name=name)[0] if isinstance(shard, Pipeline) else shard
    if not isinstance(loader, RankLoader):
        raise ConfigError(
            f"the dataset {name!r} of the trainer is a {type(shard).__name__}; pass pipelines by **rp.train.ingest(...)"
        )
    settings.setdefault("device", _worker_device())
    loader = loader.with_settings(**settings)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        files, path = checkpoint.filesystem, checkpoint.path
        is_restored = restore_from(loader, files, path)
        if not is_restored and files.get_file_info(f"{path}/{STATE_FOLDER}").type == pyarrow.fs.FileType.NotFound:
            warnings.warn(
                f"the checkpoint {path!r} has no state of any loader: {name!r} starts at epoch 0. Save states with "
                f"rp.train.report(metrics, checkpoint_dir, loader), with a checkpoint_dir on rank 0.",
                stacklevel=2,
            )
    _keep_account(loader)
    return loader


def _keep_account(loader: RankLoader) -> None:
    """Make a loader write its account beside the run's checkpoints.

    Ray Train exposes the run's storage only through an interface for developers; only this function uses it.
    """
    try:
        storage = ray.train.get_context().get_storage()
    except NotImplementedError:
        # Without worker processes (num_workers=0) there is no storage.
        return
    loader.keep_account(storage.experiment_fs_path, storage.storage_filesystem)


def report(metrics: Mapping[str, Any], checkpoint_dir: str | Path | None, *loaders: RankLoader) -> None:
    """Report metrics and a checkpoint, as `ray.train.report` does, with the state of `loaders` inside.

    Call it on every worker. The state is the same on all of them, so rank 0 writes it. Each worker writes its own
    account: into the checkpoint if it passes a folder, else beside the checkpoints of the run.

    Args:
        metrics: as for `ray.train.report`.
        checkpoint_dir: a folder with this worker's files; None if it saves nothing. Without a folder from rank 0
            raypipe saves no state.
        loaders: the loaders to save; the same on every worker.
    """
    if checkpoint_dir is None:
        for loader in loaders:
            loader.save_account()
        ray.train.report(dict(metrics))
        return
    write_states(checkpoint_dir, *loaders)
    for loader in loaders:
        if loader.rank == 0:
            loader.mark_checkpoint()
    ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(str(checkpoint_dir)))


def read_checkpoint(checkpoint: ray.train.Checkpoint, name: str = "train") -> dict[str, Any] | None:
    """Return the state of the loader `name` in a checkpoint; None if it has none. Reads only that file."""
    return state_in(name, checkpoint.filesystem, checkpoint.path)


def _worker_device() -> str:
    if ray.get_runtime_context().get_accelerator_ids().get("GPU") and torch.cuda.is_available():
        return str(ray.train.torch.get_device())
    return "cpu"
