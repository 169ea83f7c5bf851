"""Ray Train resizes a running group of workers: one more node, one node less, and the epoch goes on exactly."""

import json
import sys
import tempfile
import threading
from pathlib import Path

import committed
import pytest
import ray.train
from attempts import FEED, LENGTHS, alive_nodes, kill_node, local_nodes
from batches import frames_of_dataset, planned_epoch, rows_spec
from committed import Journal, committed_frames, flatten, plan_from, read_attempts
from ray import cloudpickle
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator
from ray.train.torch import TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typer.testing import CliRunner
from waiting import wait_until

import raypipe as rp
from raypipe.cli import app
from raypipe.testing import write_dataset

# The workers of Ray cannot import modules of the tests: what is defined here travels to them whole.
for module in (sys.modules[__name__], committed):
    cloudpickle.register_pickle_by_value(module)

RUN = "run"

TRAINER = {"num_cpus": 0, "resources": {"trainer": 1}}
"""A node with room for one worker, and for no read task."""

SAVE_EVERY, HOLD_AFTER = 2, 5
"""Steps of an attempt. The workers are held one step after a checkpoint: a resize throws that step away."""

PATIENCE_S = 240.0
"""How long a resize may take. Ray Train starts all workers anew: in 10 s, or in minutes where much else runs."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """121 frames without cameras: two ranks cannot share them equally."""
    spec = rows_spec((*LENGTHS, 1))
    return rp.open_dataset(str(write_dataset(tmp_path_factory.mktemp("rows") / "dataset", spec)))


@pytest.fixture
def nodes(monkeypatch):
    """A node for read tasks, and one for a worker."""
    # Where Ray Train still counts on a node that is gone, it waits for it: a minute if nothing else is said.
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "5")
    with local_nodes({"num_cpus": 1}, TRAINER) as cluster:
        yield cluster


def elastic_loop(config):
    """Note every step, and save after some; the first attempt on each number of workers never gets to its end."""
    loader = rp.train.get_loader("train")
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    journal = Journal(config["journals"], rank, world_size, loader)
    for step, batch in enumerate(loader, start=1):
        journal.add(batch, loader)
        if step % SAVE_EVERY == 0:
            save(loader, rank)
        if step == HOLD_AFTER:
            hold_once(config["journals"], f"{rank}-of-{world_size}")
    save(loader, rank)


def save(loader, rank):
    with tempfile.TemporaryDirectory() as folder:
        rp.train.report({"epoch": loader.epoch}, folder if rank == 0 else None, loader)


def hold_once(folder, name):
    """Stand still until this worker is ended, if it is the first of that name."""
    held = held_file(folder, name)
    if held.exists():
        return
    # A report returns before the controller has taken it, and a resize goes back to what it has taken.
    ray.train.get_all_reported_checkpoints(consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED)
    held.touch()
    threading.Event().wait()


def held_file(folder, name):
    return Path(folder) / f"held-{name}"


def wait_until_held(running, folder, world_size):
    """Return when all of so many workers stand still.

    Raises:
        the error of the training, if it fails before.
    """
    held = [held_file(folder, f"{rank}-of-{world_size}") for rank in range(world_size)]

    def are_held():
        ended, _ = ray.wait([running], timeout=0)
        ray.get(ended)
        assert not ended, f"the training ended before {world_size} workers were held"
        return all(path.exists() for path in held)

    wait_until(are_held, f"{world_size} workers are held", PATIENCE_S)


def let_ray_see_nodes():
    """Let Ray Train know which nodes there are. It learns that by itself too, every 20 s."""
    coordinator = get_or_create_autoscaling_coordinator()
    ray.get(coordinator.get_reserved_resources.remote("nobody", recompute=True), timeout=PATIENCE_S)


# A process of its own: Ray Train wants the main thread, and so does whoever adds a node.
@ray.remote(num_cpus=0, max_retries=0)
def fit_elastic(pipe, folder):
    """Train on one or two workers, as there is room for, with storage and journals in `folder`; return the metrics."""
    # A worker may be lost once. To let workers go so that there can be more of them counts as no failure.
    failures = ray.train.FailureConfig(max_failures=1)
    result = TorchTrainer(
        elastic_loop,
        train_loop_config={"journals": str(folder / "journals")},
        scaling_config=ray.train.ScalingConfig(
            num_workers=(1, 2), resources_per_worker={"trainer": 1}, elastic_resize_monitor_interval_s=1
        ),
        run_config=ray.train.RunConfig(name=RUN, storage_path=str(folder / "storage"), failure_config=failures),
        **rp.train.ingest(train=pipe),
    ).fit()
    return result.metrics


def verdict_of(folder):
    """What ``raypipe account`` says of the run's only epoch."""
    told = CliRunner().invoke(app, ["account", str(folder / "storage" / RUN), "--json"])
    assert told.exit_code in (0, 1), told.output
    (verdict,) = json.loads(told.stdout)["epochs"]
    return verdict


def test_running_group_grows_and_shrinks_and_every_frame_comes_exactly_once(nodes, rows, tmp_path):
    pipe = rp.Pipeline(rows, batch_size=4, seed=5, order={"live_spans": 3}, feed=FEED)
    journals = tmp_path / "journals"
    journals.mkdir()
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)

    running = fit_elastic.options(scheduling_strategy=here).remote(pipe, tmp_path)
    wait_until_held(running, journals, 1)
    added = nodes.add_node(**TRAINER)
    let_ray_see_nodes()
    wait_until_held(running, journals, 2)
    kill_node(nodes, added)
    wait_until(lambda: added.node_id not in alive_nodes(), "Ray knows that the node is gone")
    let_ray_see_nodes()
    metrics = ray.get(running, timeout=PATIENCE_S)

    attempts = read_attempts(journals)
    steps = committed_frames(attempts)
    assert [attempt.world_size for attempt in attempts] == [1, 2, 1]
    # The workers were in the midst of the epoch when there came to be more and fewer of them.
    assert [[len(rank) for rank in attempt.ranks] for attempt in attempts[:2]] == [[5], [5, 5]]
    assert [len(attempt[0]) for attempt in steps[:2]] == [4, 4]
    legs = [(leg["lanes"], leg["frames_per_lane"]) for leg in attempts[2].state["legs"]]
    assert legs == [(1, 16), (2, 16)]
    for attempt, done in zip(attempts, steps, strict=True):
        planned = plan_from(pipe, attempt.state, attempt.world_size)
        assert done == [planned_epoch(planned, rank)[: len(done[rank])] for rank in range(attempt.world_size)]
    assert sorted(flatten(steps)) == frames_of_dataset(rows)
    assert metrics == {"epoch": 1}
    verdict = verdict_of(tmp_path)
    assert (verdict["is_exact"], verdict["is_finished"]) == (True, True)
    assert verdict["num_emitted"] == len(frames_of_dataset(rows))
