"""Start a local Ray cluster if needed, and check that the cluster has enough for the pipeline."""

import logging
from typing import Final

import ray

from raypipe.errors import ConfigError

_WAIT_S: Final = 60.0


def check_free_cpu(wait_s: float = _WAIT_S) -> None:
    """Raise if no CPU is left for tasks: Ray would silently wait without end.

    CPUs held by tasks come free; those held by actors do not. A probe task finds out which.
    """
    if ray.available_resources().get("CPU", 0) >= 1:
        return
    # Set the strategy, or the task would run in the placement group of the calling trainer.
    probe = ray.remote(num_cpus=1, scheduling_strategy="DEFAULT")(lambda: None).remote()
    ready, _ = ray.wait([probe], timeout=wait_s)
    if ready:
        return
    ray.cancel(probe)
    total = ray.cluster_resources().get("CPU", 0)
    raise ConfigError(
        f"no CPU is free for reading: all {total:g} CPUs of the Ray cluster were taken for {wait_s:g} s, by training "
        f"workers or others. Leave at least one: take fewer workers, fewer CPUs for each, more nodes, or let Ray count "
        f"more CPUs on this one by ray.init(num_cpus=...) or `ray start --num-cpus`."
    )


def start_ray() -> None:
    """Use the Ray that this process is connected to; else call `ray.init` and print the number of CPUs."""
    if ray.is_initialized():
        return
    # Ray logs "authentication is enabled" as a warning: hide it. Show the one that it is off.
    told = logging.getLogger("ray._private.authentication.authentication_token_setup")
    told.addFilter(_is_no_good_news)
    try:
        ray.init(logging_level="warning")
    finally:
        told.removeFilter(_is_no_good_news)
    print(f"raypipe: using Ray with {ray.cluster_resources().get('CPU', 0):g} CPUs", flush=True)


def _is_no_good_news(record: logging.LogRecord) -> bool:
    return "authentication is enabled" not in record.getMessage()


def check_object_store(live_bytes: int) -> None:
    """Raise if the frames in transit to all ranks would fill more than half of the cluster's object store."""
    size = sum(node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"])
    if live_bytes > size / 2:
        raise ConfigError(
            f"decoding on the cluster puts up to {live_bytes / 1e9:.2f} GB of decoded frames into Ray's object store, "
            f"which has {size / 1e9:.2f} GB, and half of it must stay free. Use decode={{'where': 'rank'}}, a smaller "
            f"live_bytes, decode={{'resize': ...}}, or a larger object store."
        )


def has_spare_cpu_nodes() -> bool:
    """Return whether the cluster has CPU-only nodes besides nodes with GPUs."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has_gpu = any(resources.get("GPU", 0) for resources in nodes)
    return has_gpu and any(resources.get("CPU", 0) >= 1 and not resources.get("GPU", 0) for resources in nodes)
