"""Give each process that ``torchrun``, Accelerate or the like started a loader of rank 0's pipeline."""

import os
import pickle
import platform
from typing import Any, Unpack

import torch.distributed as dist

from raypipe.decode import ASSIGNED_CPUS
from raypipe.errors import ConfigError
from raypipe.feed import LOOPBACK
from raypipe.loader import LoaderSettings, RankLoader
from raypipe.pipeline import Pipeline, Transport


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
    homes = _gather((platform.node(), tuple(sorted(os.sched_getaffinity(0)))))
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


def _gather(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _cluster_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _join_cluster(address: str, rank: int) -> None:
    from raypipe.feed import start_ray

    start_ray()
    own = _cluster_address()
    if own != address:
        raise ConfigError(f"rank {rank} is on the Ray at {own}, rank 0 on that at {address}; set RAY_ADDRESS")
