"""Loaders in the processes of any trainer: shared among those that ``torchrun`` started, saved and restored.

A checkpoint folder holds what a run keeps of its loaders: position (a JSON file each), account and figures. Needs no
Ray.
"""

import json
import os
import pickle
import platform
from pathlib import Path
from typing import Any, Final, Unpack

import pyarrow.fs
import torch.distributed as dist

from raypipe.account import HEAD, read_rank_accounts, write_rank_account
from raypipe.decode import ASSIGNED_CPUS
from raypipe.errors import ConfigError, ResumeError, as_damage
from raypipe.feed import LOOPBACK
from raypipe.loader import LoaderSettings, RankLoader
from raypipe.pipeline import Pipeline, Transport
from raypipe.storage import write_whole
from raypipe.text import parse_json

STATE_FOLDER: Final = "raypipe"
"""The folder in a checkpoint that holds one JSON file per loader."""


def share_loader(
    pipeline: Pipeline, name: str = "train", *, transport: Transport = "auto", **settings: Unpack[LoaderSettings]
) -> RankLoader:
    """Return this process's loader in a group that ``torchrun``, Accelerate or the like started.

    Call it in every process, after ``torch.distributed.init_process_group`` and, with NCCL, after
    ``torch.cuda.set_device``: the processes exchange small objects through the group. With the local transport each
    process reads its own rows, and the ranks compare their positions in the process of rank 0, on a free port of its
    machine; so that process must outlive their iterations. Do not let Accelerate prepare the loader: it would split
    each rank's batches a second time.

    Args:
        pipeline: the same in every process; raypipe uses rank 0's.
        name: see `RankLoader.name`.
        transport: see `Transport`; raypipe uses rank 0's. With "ray" all processes must reach the same Ray: set
            ``RAY_ADDRESS``, or start them on a node of the cluster. The feeder lives as long as rank 0's process.
        settings: the fields of `LoaderSpec`.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group() or make Accelerate's "
            "Accelerator first. In a single process use pipe.loader()."
        )
    rank = dist.get_rank()
    homes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(homes, (platform.node(), tuple(sorted(os.sched_getaffinity(0)))))
    nodes = [node for node, _ in homes]
    shared: list[Any] = [None]
    loaders: list[RankLoader] = []
    if rank == 0:
        try:
            loaders = _make_loaders(pipeline, transport, name, nodes)
            cluster = _cluster_address() if pipeline.transport(transport) == "ray" else ""
            shared = [(pickle.dumps(loaders), pipeline.config.decode.num_threads, cluster)]
        except Exception as error:
            # The other ranks wait for the broadcast, so send them the error.
            dist.broadcast_object_list([error], src=0)
            raise
    dist.broadcast_object_list(shared, src=0)
    if isinstance(shared[0], Exception):
        raise shared[0]
    content, num_threads, cluster = shared[0]
    if cluster:
        _join_cluster(cluster, rank)
    if num_threads == ASSIGNED_CPUS:
        # Only processes on the same node with the same CPU affinity share cores.
        settings.setdefault("num_threads", max(1, len(homes[rank][1]) // homes.count(homes[rank])))
    # Rank 0 keeps its original loader, which keeps the ranks' meeting alive.
    own: RankLoader = loaders[0] if rank == 0 else pickle.loads(content)[rank]
    return own.with_settings(**settings)


def _make_loaders(pipeline: Pipeline, transport: Transport, name: str, nodes: list[str]) -> list[RankLoader]:
    if pipeline.transport(transport) == "ray":
        return pipeline.loaders(len(nodes), name=name, transport="ray")
    # torchrun starts rank 0 on the machine named by MASTER_ADDR.
    host = LOOPBACK if len(set(nodes)) == 1 else os.environ.get("MASTER_ADDR", nodes[0])
    return pipeline.served_loaders(len(nodes), host=host, name=name)


def _cluster_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _join_cluster(address: str, rank: int) -> None:
    from raypipe.feed import start_ray

    start_ray()
    own = _cluster_address()
    if own != address:
        raise ConfigError(f"rank {rank} is on the Ray at {own}, rank 0 on that at {address}; set RAY_ADDRESS")


def write_states(checkpoint_dir: str | Path, *loaders: RankLoader) -> None:
    """Write the loaders' states and accounts into a folder that becomes a checkpoint.

    Rank 0 writes the state; every rank that calls this writes its own account. If only rank 0 calls it, the state is
    complete and the account is not.
    """
    names = [loader.name for loader in loaders]
    if len(set(names)) < len(names):
        raise ConfigError(f"loaders of one checkpoint need different names, got {names}")
    folder = Path(checkpoint_dir) / STATE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for loader in loaders:
        account = loader.account()
        write_rank_account(folder, account, loader.rank, loader.world_size)
        if loader.rank == 0:
            # Whole at any time: the folder may hold the state of an earlier step.
            saved = {**account.header.state, HEAD: account.header.head}
            write_whole(folder / f"{loader.name}.json", json.dumps(saved, indent=2))


def restore(checkpoint_dir: str | Path, loader: RankLoader) -> bool:
    """Resume a loader from a folder that `write_states` wrote; return whether the folder has its state."""
    return restore_from(loader, *pyarrow.fs.FileSystem.from_uri(str(Path(checkpoint_dir).absolute())))


def restore_from(loader: RankLoader, filesystem: pyarrow.fs.FileSystem, path: str) -> bool:
    """Do what `restore` does with the folder `path` of any filesystem."""
    state = state_in(loader.name, filesystem, path)
    if state is None:
        return False
    loader.load_state_dict(state)
    # Rank 0 carries the earlier parts of all ranks. The other ranks drop what they did since the checkpoint.
    folder = f"{path}/{STATE_FOLDER}"
    loader.load_account(read_rank_accounts(filesystem, folder, loader.name) if loader.rank == 0 else ())
    return True


def read_state(checkpoint_dir: str | Path, name: str = "train") -> dict[str, Any] | None:
    """Return the state of the loader `name` in a folder that `write_states` wrote; None if it has none."""
    return state_in(name, *pyarrow.fs.FileSystem.from_uri(str(Path(checkpoint_dir).absolute())))


def state_in(name: str, filesystem: pyarrow.fs.FileSystem, path: str) -> dict[str, Any] | None:
    """Return the state of the loader `name` in the folder `path` of a checkpoint; None if it has none."""
    place = f"{path}/{STATE_FOLDER}/{name}.json"
    try:
        with filesystem.open_input_file(place) as file:
            content = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    with as_damage(lambda error: ResumeError(f"damaged state {place!r}: {error}. Go back to an earlier checkpoint.")):
        state = parse_json(content)
    if not isinstance(state, dict):
        raise ResumeError(f"damaged state {place!r}: {state!r} is no JSON object. Go back to an earlier checkpoint.")
    state.pop(HEAD, None)
    return state


def loader_metrics(loader: RankLoader) -> dict[str, Any]:
    """Return figures of all ranks together and of this one, for a log or `ray.train.report`.

    Keys begin with the loader's name. ``train/samples_per_s`` and ``train/wait_share`` cover all ranks over the last
    steps; ``train/worst_rank`` is the rank that waits most, and ``train/waits_for`` is what it waits for.
    """
    world, mine = loader.world_stats(recent=True), loader.stats()
    figures = {**world.to_dict(), "first_batch_s": mine.first_batch_s, "live_bytes": mine.live_bytes}
    figures["decoded_per_emitted"] = mine.decoded_per_emitted
    return {f"{loader.name}/{key}": value for key, value in figures.items()}
