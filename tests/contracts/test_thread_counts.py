"""How many threads a rank decodes with, where Ray has not started its process."""

import os

import pytest

from raypipe.feeder import FeederSource, FeedSpec


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("num_processes", "expected"), [("", 8), ("1", 8), ("3", 2), ("8", 1), ("64", 1)])
def test_processes_of_torchrun_share_the_cpus_of_the_machine(num_processes, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_processes)

    assert FeederSource(None, FeedSpec()).assigned_cpus() == expected
