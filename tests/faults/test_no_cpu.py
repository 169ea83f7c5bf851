"""A cluster whose CPUs are all held is an error, not a silent wait."""

import pytest
import ray

from raypipe.errors import ConfigError
from raypipe.feed.feeder import check_free_cpu


@ray.remote
class Holder:
    def ready(self):
        return True


@pytest.mark.usefixtures("ray_cluster")
def test_cpus_that_actors_hold_are_an_error_that_says_what_to_do():
    holders = [Holder.options(num_cpus=1).remote() for _ in range(2)]
    ray.get([holder.ready.remote() for holder in holders])

    with pytest.raises(ConfigError, match="no CPU is free for reading: all 2 CPUs"):
        check_free_cpu(wait_s=1.0)
    for holder in holders:
        ray.kill(holder)


@pytest.mark.usefixtures("ray_cluster")
def test_a_free_cpu_is_found():
    check_free_cpu(wait_s=60.0)
