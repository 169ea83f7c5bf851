"""Ranks that wait for each other at every step, as collectives make them, all reach the end of the epoch."""

import threading

import pytest
from batches import frames_of, frames_of_dataset, rows_spec
from ray_session import run_ranks

from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline
from raypipe.testing import write_dataset

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_ranks_in_lockstep_do_not_hang_whatever_the_lengths_of_episodes(tmp_path):
    lengths = (31, 1, 2, 25, 1, 1, 18, 3, 40, 1, 6, 2, 2, 29, 1, 11, 4, 1, 37, 5)
    dataset = open_dataset(str(write_dataset(tmp_path / "dataset", rows_spec(lengths))))
    # The least of everything that is fetched ahead, and a chapter that ends in the middle.
    feed = {"spans_per_block": 1, "prefetch_blocks": 1, "blocks_per_chapter": 12}
    pipe = Pipeline(dataset, batch_size=4, seed=0, order={"live_spans": 2}, feed=feed)
    step = threading.Barrier(3)

    def train(loader):
        emitted = []
        for batch in loader:
            step.wait(timeout=120)
            emitted.append(frames_of(batch))
        return emitted

    ranks = run_ranks(pipe.loaders(3, prefetch_batches=1), train)

    assert {len(steps) for steps in ranks} == {pipe.plan(world_size=3).num_steps}
    assert sorted(frame for steps in ranks for frames in steps for frame in frames) == frames_of_dataset(dataset)
