"""Nodes that die in the middle of an epoch: a data node is not noticed, that of the feeder ends the attempt."""

import sys
from collections import Counter

import pytest
import ray
from attempts import (
    FEED,
    Training,
    actors_of_attempts,
    alive_nodes,
    assert_follows_plan,
    frames_by_rank,
    frames_of_steps,
    kill_node,
    local_nodes,
    wait_for,
    watched,
)
from batches import frames_of_dataset, planned_epoch
from ray import cloudpickle
from waiting import wait_until

from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline
from raypipe.testing import SynthSpec, write_dataset

# The workers of Ray cannot import modules of the tests: what is defined here travels to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def nodes():
    """A node with one CPU, and one with GPUs that are none, where the ranks are."""
    with local_nodes({"num_cpus": 1}, {"num_cpus": 0, "num_gpus": 2}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A dataset of 800 frames in 40 episodes of 160 kB: blocks below 100 kB stay with their owner and are not lost."""
    spec = SynthSpec(lengths=(20,) * 40, cameras=(), state_dim=2000, action_dim=2)
    return open_dataset(str(write_dataset(tmp_path_factory.mktemp("rows") / "dataset", spec)))


@pytest.mark.timeout(300)
def test_data_node_that_dies_is_not_noticed(nodes, rows, tmp_path):
    doomed = nodes.add_node(num_cpus=1)
    parts = {"batch_size": 20, "seed": 1, "order": {"live_spans": 2}, "feed": FEED}
    planned = Pipeline(rows, **parts)
    world = planned.plan(world_size=2)
    queues = [world.rank(rank).queue.episode.tolist() for rank in range(2)]
    held = {episode for queue in queues for episode in queue[-3:]}
    slow, watch = watched(rows, tmp_path / "reads", held)
    training = Training()

    with training.attempt(Pipeline(slow, **parts), 2, hold_after=2) as attempt:
        attempt.wait_until_held()
        # Both nodes stand at the gate: all other blocks are read, and most lie where they were read.
        wait_until(lambda: len({read.node for read in watch.reads() if read.episode in held}) == 2, "both nodes wait")
        before = watch.reads()
        kill_node(nodes, doomed)
        watch.open_gate()
        attempt.release()
        attempt.join()

    wait_until(lambda: doomed.node_id not in alive_nodes(), "Ray knows that the node is gone")
    steps = training.steps()
    lost = {read.episode for read in before if read.node == doomed.node_id} - held
    again = {read.episode for read in watch.reads()[len(before) :]} & lost
    assert again, f"blocks of the episodes {lost} lay on the dead node, and none was read again"
    assert all(read.node != doomed.node_id for read in watch.reads()[len(before) :])
    spans = Counter(queues[0] + queues[1])
    # More often where a rank has read its first rows itself, too, while Ray started.
    assert all(Counter(read.episode for read in before)[episode] >= spans[episode] for episode in again)
    assert {step.attempt for step in steps} == {0}
    assert frames_by_rank(steps) == [planned_epoch(world, rank) for rank in range(2)]
    assert sorted(frames_of_steps(steps)) == frames_of_dataset(rows)


@ray.remote(num_cpus=0)
class Maker:
    """Makes loaders where it is, and with them their feeder."""

    def make(self, pipe, world_size):
        return pipe.loaders(world_size, progress=False)


@pytest.mark.timeout(300)
def test_feeder_whose_node_dies_ends_the_attempt_on_every_rank_and_the_next_goes_on(nodes, rows):
    doomed = nodes.add_node(num_cpus=0, resources={"doomed": 1})
    pipe = Pipeline(rows, batch_size=20, seed=2, order={"live_spans": 2}, feed=FEED)
    maker = Maker.options(resources={"doomed": 1}).remote()
    training = Training()

    with training.attempt(pipe, 2, loaders=wait_for(maker.make.remote(pipe, 2)), hold_after=2) as attempt:
        attempt.wait_until_held()
        lived = actors_of_attempts()
        kill_node(nodes, doomed)
        attempt.release()
        errors = attempt.errors()
    with training.attempt(pipe, 2) as attempt:
        attempt.join()

    wait_until(lambda: doomed.node_id not in alive_nodes(), "Ray knows that the node is gone")
    steps = training.steps()
    assert lived["Feeder"] == lived["SplitCoordinator"] == {doomed.node_id}
    # The split is gone, or a block whose owner it was.
    kinds = ray.exceptions.RayActorError | ray.exceptions.ObjectLostError
    assert all(isinstance(error, kinds) for error in errors), errors
    assert all("Start the ranks again from the last checkpoint" in str(error) for error in errors), errors
    assert {step.attempt for step in steps} == {0, 1}
    assert_follows_plan(steps, pipe)
    assert frames_by_rank(steps) == [planned_epoch(pipe.plan(world_size=2), rank) for rank in range(2)]
    assert sorted(frames_of_steps(steps)) == frames_of_dataset(rows)
