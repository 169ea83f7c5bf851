"""Ranks and data workers that fail in the middle of an epoch: what counts is exactly once, and in the planned order.

The ranks are actors on a node with GPUs that are none, the data tasks run on a node of CPUs.
"""

import os
import signal
from itertools import chain

import pytest
import ray
from attempts import (
    FEED,
    LENGTHS,
    Training,
    assert_follows_plan,
    frames_by_rank,
    frames_of_steps,
    is_feeding,
    is_gone,
    local_nodes,
    watched,
)
from batches import TOP, WINDOWS, digest_of, frames_of_dataset, planned_epoch, rows_spec, varied_spec
from waiting import wait_until

from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline
from raypipe.testing import write_dataset


@pytest.fixture(scope="module", autouse=True)
def _nodes():
    with local_nodes({"num_cpus": 2}, {"num_cpus": 0, "num_gpus": 4}):
        yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A dataset of 120 frames in 40 episodes, without cameras."""
    return open_dataset(str(write_dataset(tmp_path_factory.mktemp("rows") / "dataset", rows_spec(LENGTHS))))


@pytest.fixture(scope="module")
def filmed(tmp_path_factory):
    """A dataset of 57 frames with a video and an image camera, and windows on everything."""
    root = write_dataset(tmp_path_factory.mktemp("filmed") / "dataset", varied_spec())
    return open_dataset(str(root)).windowed(offsets=WINDOWS)


def order_of(pipe, world_size, epoch=0):
    """The batches of each rank in an epoch that nothing interrupts."""
    world = pipe.plan(world_size=world_size, epoch=epoch)
    return [planned_epoch(world, rank) for rank in range(world_size)]


def test_rank_that_is_killed_in_the_second_epoch_changes_nothing_in_the_order(rows):
    pipe = Pipeline(rows, batch_size=12, seed=2, order={"live_spans": 2}, feed=FEED)
    num_steps = pipe.plan(world_size=2).num_steps
    training = Training()

    with training.attempt(pipe, 2, num_epochs=2, hold_after=num_steps + 2) as attempt:
        attempt.wait_until_held()
        assert is_feeding()
        os.kill(attempt.pids[0], signal.SIGKILL)
        attempt.release()
        with pytest.raises(ray.exceptions.ActorDiedError):
            attempt.join()
        wait_until(lambda: is_gone(attempt.pids[0]), "the killed process is gone")
    with training.attempt(pipe, 2, num_epochs=2) as attempt:
        attempt.join()

    steps = training.steps()
    assert [step.attempt for step in steps].count(0) == num_steps + 2
    assert steps[num_steps + 1].state["epoch"] == 1
    assert frames_by_rank(steps[:num_steps]) == order_of(pipe, 2)
    assert frames_by_rank(steps[num_steps:]) == order_of(pipe, 2, epoch=1)
    assert_follows_plan(steps, pipe)
    assert sorted(frames_of_steps(steps)) == sorted(2 * frames_of_dataset(rows))


def test_data_worker_that_is_killed_is_not_noticed(filmed, tmp_path):
    parts = {"batch_size": 4, "seed": 3, "order": {"live_spans": 2}, "feed": FEED, "decode": {"where": "cluster"}}
    planned = Pipeline(filmed, **parts)
    held = set(planned.plan(world_size=2).rank(0).queue.episode[-2:].tolist())
    slow, watch = watched(filmed, tmp_path / "reads", held)
    training = Training()

    with training.attempt(Pipeline(slow, **parts), 2) as attempt:
        lost = watch.wait_for_read_of(held)
        os.kill(lost.pid, signal.SIGKILL)
        wait_until(lambda: is_gone(lost.pid), "the data worker is gone")
        watch.open_gate()
        attempt.join()
        assert {pid for step in training.steps() for pid in step.pids} == set(attempt.pids)

    steps = training.steps()
    again = [read for read in watch.reads() if read.episode == lost.episode and read.pid != lost.pid]
    assert again, f"episode {lost.episode} was read by process {lost.pid} alone, which is dead"
    assert {step.attempt for step in steps} == {0}
    assert frames_by_rank(steps) == order_of(planned, 2)
    for rank in range(2):
        wanted = [digest_of(batch) for batch in planned.loader(rank=rank, world_size=2)]
        assert [step.digests[rank] for step in steps] == wanted
    assert TOP in filmed.meta.features


@pytest.mark.timeout(360)
def test_epoch_goes_on_exactly_on_4_then_2_then_3_then_4_ranks(rows):
    # 4 lanes: 2 ranks divide them, 3 do not, and 4 do not divide those 3: two new legs.
    batch = {"size": 12, "scope": "global"}
    pipe = Pipeline(rows, batch_size=batch, seed=4, order={"live_spans": 2, "lanes": 4}, feed=FEED)
    training = Training()

    for world_size in (4, 2, 3):
        with (
            training.attempt(pipe, world_size, raise_after=2) as attempt,
            pytest.raises(RuntimeError, match=f"rank {world_size - 1} fails after 2 steps"),
        ):
            attempt.join()
    with training.attempt(pipe, 4) as attempt:
        attempt.join()

    steps = training.steps()
    assert [step.world_size for step in steps[:7]] == [4, 4, 2, 2, 3, 3, 4]
    assert frames_by_rank(steps[:2]) == [batches[:2] for batches in order_of(pipe, 4)]
    assert frames_by_rank(steps[2:4]) == [batches[2:4] for batches in order_of(pipe, 2)]
    assert [[leg["lanes"] for leg in step.state["legs"]] for step in steps[3:7]] == [[4], [4, 3], [4, 3], [4, 3, 4]]
    assert_follows_plan(steps, pipe)
    assert sorted(frames_of_steps(steps)) == frames_of_dataset(rows)


def test_rank_that_raises_changes_nothing_in_the_order_and_another_batch_size_cuts_it_differently(rows):
    before, after = (Pipeline(rows, batch_size=size, seed=5, order={"live_spans": 2}, feed=FEED) for size in (4, 10))
    training = Training()

    for num_steps in (5, 4):
        with (
            training.attempt(before, 2, raise_after=num_steps) as attempt,
            pytest.raises(RuntimeError, match=f"rank 1 fails after {num_steps} steps"),
        ):
            attempt.join()
    with training.attempt(after, 2) as attempt:
        attempt.join()

    steps = training.steps()
    assert [step.attempt for step in steps[:10]] == [0] * 5 + [1] * 4 + [2]
    assert [len(step.frames[0]) for step in steps[8:11]] == [4, 10, 10]
    planned = order_of(before, 2)
    assert frames_by_rank(steps[:9]) == [batches[:9] for batches in planned]
    for came, batches in zip(frames_by_rank(steps), planned, strict=True):
        assert list(chain(*came)) == list(chain(*batches))
    assert_follows_plan(steps, [before, before, after])
    assert sorted(frames_of_steps(steps)) == frames_of_dataset(rows)
