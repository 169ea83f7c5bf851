"""Whether Ray has a CPU left for reading."""

from typing import Final

import ray

from raypipe.errors import ConfigError

_WAIT_S: Final = 60.0


def check_free_cpu(wait_s: float = _WAIT_S) -> None:
    """Raise where no CPU is left for tasks: Ray would wait for one for ever, without a word.

    CPUs that other tasks hold come free; those that actors hold do not. A task of our own tells which it is.
    """
    if ray.available_resources().get("CPU", 0) >= 1:
        return
    probe = ray.remote(num_cpus=1)(lambda: None).remote()
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
