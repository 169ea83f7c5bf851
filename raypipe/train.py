"""Training workers: pipelines in, a loader per worker out, and the data's place inside the checkpoint.

::

    trainer = TorchTrainer(train_loop, ..., **rp.train.ingest(train=pipe, val=val_pipe))

    def train_loop(config):
        loader = rp.train.get_loader("train")             this rank's; stands where the checkpoint stands
        for batch in loader: ...
        rp.train.report(metrics, checkpoint_dir, loader)  ray.train.report with the data's state inside

Every start of the worker group, the first or after a failure, with as many workers or others, makes new feeders and new
loaders; where they go on is in the checkpoint alone. Without Ray Train, in processes that ``torchrun`` or Accelerate
has started, `share_loader` gives each its loader.
"""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow.fs
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from raypipe.decode.spec import ASSIGNED_CPUS
from raypipe.errors import ConfigError, ResumeError
from raypipe.keeper import read_rank_accounts, write_rank_account
from raypipe.loader import RankLoader
from raypipe.pipeline import Pipeline, start_ray

STATE_FOLDER: Final = "raypipe"
"""The folder in a checkpoint that holds one JSON file per loader."""


def ingest(**pipelines: Pipeline) -> dict[str, Any]:
    """Return ``datasets`` and ``dataset_config`` for a `TorchTrainer`: every worker gets a loader of each pipeline."""
    for name, pipeline in pipelines.items():
        if not isinstance(pipeline, Pipeline):
            raise ConfigError(f"ingest({name}=...) takes a raypipe.Pipeline, got {pipeline!r}")
    return {"datasets": dict(pipelines), "dataset_config": PipelineDataConfig()}


class PipelineDataConfig(ray.train.DataConfig):  # type: ignore[misc]
    """Gives every training worker its loaders; Ray's own config slices blocks and drops rows."""

    def configure(self, datasets: Mapping[str, Pipeline], world_size: int, *_: Any, **__: Any) -> list[dict[str, Any]]:
        """Return the loaders of every worker; Ray calls this at every start of the worker group."""
        loaders = {name: pipeline.loaders(world_size, name=name) for name, pipeline in datasets.items()}
        return [{name: ranks[rank] for name, ranks in loaders.items()} for rank in range(world_size)]


def get_loader(name: str = "train", **settings: Any) -> RankLoader:
    """Return this worker's loader of the pipeline `name`, standing where the checkpoint of the run stands.

    Call it on every worker. Without a checkpoint, or with one that has no state of this loader, it starts at epoch 0.

    Args:
        name: as given to `ingest`.
        settings: the fields of `LoaderSpec`, such as ``num_epochs``, ``transform`` and ``device``, which is the
            worker's GPU where it has one.
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
    loader = loader.with_settings(**{"device": _worker_device(), **settings})
    checkpoint = ray.train.get_checkpoint()
    state = read_checkpoint(checkpoint, name) if checkpoint is not None else None
    if checkpoint is not None and state is not None:
        _go_on(loader, state, checkpoint.filesystem, checkpoint.path)
    elif checkpoint is not None and not _has_states(checkpoint):
        warnings.warn(
            f"the checkpoint {checkpoint.path!r} has no state of any loader: {name!r} starts at epoch 0. Save states "
            f"with rp.train.report(metrics, checkpoint_dir, loader), with a checkpoint_dir on rank 0.",
            stacklevel=2,
        )
    _keep_account(loader)
    return loader


def _keep_account(loader: RankLoader) -> None:
    """Let a loader write its account beside the run's checkpoints.

    Ray Train tells workers where the run is stored by an interface for developers only; it is used here alone.
    """
    try:
        storage = ray.train.get_context().get_storage()
    except NotImplementedError:
        # Without worker processes (num_workers=0) there is no storage.
        return
    loader.keep_account(storage.experiment_fs_path, storage.storage_filesystem)


def report(metrics: Mapping[str, Any], checkpoint_dir: str | Path | None, *loaders: RankLoader) -> None:
    """Report metrics and a checkpoint, as `ray.train.report` does, with the state of `loaders` inside.

    Call it on every worker. The state is the same on all of them, so rank 0 writes it. The account of what it handed
    over each writes itself: into the checkpoint if it gives a folder, else beside the checkpoints of the run.

    Args:
        metrics: as Ray Train takes them.
        checkpoint_dir: a folder with what this worker saves; None where it saves nothing. Rank 0 must give one, or
            nothing is saved.
        loaders: those whose state is saved; the same on every worker.
    """
    if checkpoint_dir is None:
        for loader in loaders:
            loader.save_account()
        ray.train.report(dict(metrics))
        return
    write_states(checkpoint_dir, *loaders)
    ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(str(checkpoint_dir)))


def loader_metrics(loader: RankLoader) -> dict[str, Any]:
    """Return the figures of the run for `ray.train.report`: of all ranks together, and of this one.

    Keys begin with the loader's name: ``train/samples_per_s`` and ``train/wait_share`` are of all ranks,
    ``train/worst_rank`` is the one that waits most and ``train/waits_for`` what it waits for.
    """
    world, mine = loader.world_stats(), loader.stats()
    figures = {**world.to_dict(), "first_batch_s": mine.first_batch_s, "live_bytes": mine.live_bytes}
    figures["decoded_per_emitted"] = mine.decoded_per_emitted
    return {f"{loader.name}/{key}": value for key, value in figures.items()}


def share_loader(pipeline: Pipeline, name: str = "train", **settings: Any) -> RankLoader:
    """Return this process's loader in a group that ``torchrun``, Accelerate or the like has started.

    Call it in every process, after ``torch.distributed.init_process_group``. All processes must reach the same Ray:
    give its address by ``RAY_ADDRESS``, or start them on a node of the cluster. Do not let Accelerate prepare the
    loader: it would share out each rank's batches a second time. The feeder lives as long as the process of rank 0.

    Args:
        pipeline: the same in every process; that of rank 0 counts.
        name: see `RankLoader.name`.
        settings: the fields of `LoaderSpec`.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group() or make Accelerate's "
            "Accelerator first. In a single process use pipe.loader()."
        )
    start_ray()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cluster = ray.get_runtime_context().gcs_address
    shared: list[Any] = [None, cluster]
    if rank == 0:
        try:
            loaders = pipeline.loaders(world_size, name=name)
            shared[0] = ray.cloudpickle.dumps((loaders, pipeline.config.decode.num_threads))
        except Exception as error:
            # The others wait for the broadcast: they shall hear of it.
            dist.broadcast_object_list([error, cluster], src=0)
            raise
    dist.broadcast_object_list(shared, src=0)
    if isinstance(shared[0], Exception):
        raise shared[0]
    if shared[1] != cluster:
        raise ConfigError(f"rank {rank} is on the Ray at {cluster}, rank 0 on that at {shared[1]}; set RAY_ADDRESS")
    loaders, num_threads = ray.cloudpickle.loads(shared[0])
    if num_threads == ASSIGNED_CPUS:
        settings = {"num_threads": _share_cpus(), **settings}
    own: RankLoader = loaders[rank]
    return own.with_settings(**settings)


def _share_cpus() -> int:
    """Return the CPUs of this node for each of the processes of the group that run on it; all of them must ask."""
    here = ray.get_runtime_context().get_node_id()
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, here)
    return max(1, len(os.sched_getaffinity(0)) // nodes.count(here))


def write_states(checkpoint_dir: str | Path, *loaders: RankLoader) -> None:
    """Write where loaders stand, and the account of what led there, into a folder that becomes a checkpoint.

    The state is written by rank 0, the account by every rank that calls it. Where rank 0 alone does, the account is
    not complete, and the state is.
    """
    names = [loader.name for loader in loaders]
    if len(set(names)) < len(names):
        raise ConfigError(f"loaders of one checkpoint need different names, got {names}")
    folder = Path(checkpoint_dir) / STATE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for loader in loaders:
        write_rank_account(folder, loader.account(), loader.rank, loader.world_size)
        if loader.rank == 0:
            path = folder / f"{loader.name}.json"
            # Whole or not at all: the folder may hold the state of an earlier step.
            path.with_suffix(".new").write_text(json.dumps(loader.state_dict(), indent=2))
            path.with_suffix(".new").replace(path)


def restore(checkpoint_dir: str | Path, loader: RankLoader) -> bool:
    """Let a loader go on from a folder that `write_states` wrote to; returns whether it has a state of the loader."""
    state = read_state(checkpoint_dir, loader.name)
    if state is None:
        return False
    filesystem, path = pyarrow.fs.FileSystem.from_uri(str(Path(checkpoint_dir).absolute()))
    _go_on(loader, state, filesystem, path)
    return True


def _go_on(loader: RankLoader, state: dict[str, Any], filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    loader.load_state_dict(state)
    if loader.rank == 0:
        # One rank carries what all of them did before.
        loader.load_account(read_rank_accounts(filesystem, f"{path}/{STATE_FOLDER}", loader.name))


def read_state(checkpoint_dir: str | Path, name: str = "train") -> dict[str, Any] | None:
    """Return the state of the loader `name` in a folder that `write_states` wrote to; None if it has none."""
    path = Path(checkpoint_dir) / STATE_FOLDER / f"{name}.json"
    return _parse_state(path.read_bytes(), str(path)) if path.exists() else None


def read_checkpoint(checkpoint: ray.train.Checkpoint, name: str = "train") -> dict[str, Any] | None:
    """Return the state of the loader `name` in a checkpoint; None if it has none. Reads that file alone."""
    path = f"{checkpoint.path}/{STATE_FOLDER}/{name}.json"
    try:
        with checkpoint.filesystem.open_input_file(path) as file:
            content = file.read()
    except FileNotFoundError:
        return None
    return _parse_state(content, path)


def _has_states(checkpoint: ray.train.Checkpoint) -> bool:
    info = checkpoint.filesystem.get_file_info(f"{checkpoint.path}/{STATE_FOLDER}")
    return bool(info.type != pyarrow.fs.FileType.NotFound)


def _parse_state(content: bytes, place: str) -> dict[str, Any]:
    try:
        state = json.loads(content)
    except ValueError as error:
        raise ResumeError(f"damaged state {place!r}: {error}. Go back to an earlier checkpoint.") from error
    if not isinstance(state, dict):
        raise ResumeError(f"damaged state {place!r}: {state!r} is no JSON object. Go back to an earlier checkpoint.")
    return state


def _worker_device() -> str:
    if ray.get_runtime_context().get_accelerator_ids().get("GPU") and torch.cuda.is_available():
        return str(ray.train.torch.get_device())
    return "cpu"
