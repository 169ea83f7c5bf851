"""Ray Train on mixtures: workers that die, other numbers of workers, and every epoch exactly once in the end."""

import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import committed
import ray.train
from committed import Journal, plan_from, read_attempts
from mixture_cases import FRAMES, MAIN, frames_of_plan, write_all
from ray import cloudpickle
from ray.train.torch import TorchTrainer
from ray_session import ensure_ray
from typer.testing import CliRunner

import raypipe as rp
from raypipe.cli import app

# The workers of Ray cannot import modules of the tests: what is defined here travels to them whole.
for module in (sys.modules[__name__], committed):
    cloudpickle.register_pickle_by_value(module)

RUN = "run"
FRAMES_PER_EPOCH = 240
NUM_EPOCHS = 2


def train_loop(config):
    """Note every step and save every third; go to the end, or to a step of the second epoch, and save there.

    In the first attempt of all, rank 1 is killed after five steps.
    """
    loader = rp.train.get_loader("train", num_epochs=NUM_EPOCHS)
    context = ray.train.get_context()
    rank = context.get_world_rank()
    journal = Journal(config["journals"], rank, context.get_world_size(), loader)
    step = 0
    while loader.epoch < NUM_EPOCHS:
        for step_of_epoch, batch in enumerate(loader, start=1):
            step += 1
            columns = [batch[key].tolist() for key in ("dataset_index", "episode_index", "frame_index", "augment_seed")]
            journal.add(batch, loader, visits=list(zip(*columns, strict=True)))
            if step == 5 and rank == 1:
                kill_once(config)
            is_last = loader.epoch == NUM_EPOCHS or (loader.epoch == 1 and step_of_epoch == config["stop_after"])
            if step % 3 == 0 or is_last:
                save(loader, rank)
            if is_last:
                return


def save(loader, rank):
    with tempfile.TemporaryDirectory() as folder:
        rp.train.report({"epoch": loader.epoch}, folder if rank == 0 else None, loader)


def kill_once(config):
    flag = Path(config["journals"]) / "killed"
    if flag.exists():
        return
    flag.touch()
    # A report returns before the controller has taken it: a checkpoint counts when it is in the run's snapshot.
    snapshot = Path(config["journals"]).parent / "storage" / RUN / "checkpoint_manager_snapshot.json"
    while not snapshot.exists():
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def fit(folder, num_workers, pipe, *, max_failures=0, stop_after=0):
    journals = folder / "journals"
    journals.mkdir(exist_ok=True)
    return TorchTrainer(
        train_loop,
        train_loop_config={"journals": str(journals), "stop_after": stop_after},
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers),
        run_config=ray.train.RunConfig(
            name=RUN,
            storage_path=str(folder / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
        ),
        **rp.train.ingest(train=pipe),
    ).fit()


def committed_visits(attempts):
    """The visits that count, by epoch, and by attempt the steps of each rank that do."""
    epochs = [[] for _ in range(NUM_EPOCHS)]
    steps = []
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        num_steps = attempt.num_steps_to(following.state) if following else len(attempt.ranks[0])
        steps.append(num_steps)
        for lines in attempt.ranks:
            # The state before a batch tells its epoch.
            states = [attempt.state, *(line["state"] for line in lines)]
            for state, line in list(zip(states, lines, strict=False))[:num_steps]:
                epochs[state["epoch"]] += [tuple(visit) for visit in line["visits"]]
    return epochs, steps


def planned_shares(pipe):
    """Of every epoch the frames that its plan has, on a single rank."""
    for epoch in range(NUM_EPOCHS):
        world = pipe.plan(epoch=epoch)
        yield sorted(frame for step in range(world.num_steps) for frame in frames_of_plan(world, step, 0))


def test_mixture_is_exactly_once_over_a_killed_worker_and_another_number_of_workers(tmp_path):
    # Three workers, and a CPU for reading.
    ensure_ray(4)
    mixture = rp.Mixture(write_all(tmp_path / "members", frames_per_epoch=FRAMES_PER_EPOCH), progress=False)
    offsets = {name: FRAMES[name] for name in ("action", "observation.state", MAIN)}
    order = {"live_spans": 4, "span_frames": 6}
    pipe = rp.Pipeline(mixture.windowed(offsets=offsets), batch_size=12, seed=3, order=order)

    fit(tmp_path, 2, pipe, max_failures=1, stop_after=4)
    result = fit(tmp_path, 3, pipe)

    killed, again, other = read_attempts(tmp_path / "journals")
    assert [attempt.world_size for attempt in (killed, again, other)] == [2, 2, 3]
    assert len(killed.ranks[1]) == 5
    epochs, steps = committed_visits([killed, again, other])
    assert steps[:2] == [3, 7 + 4]
    for visits, planned in zip(epochs, planned_shares(pipe), strict=True):
        assert len(set(visits)) == len(visits) == FRAMES_PER_EPOCH
        assert len({visit[:3] for visit in visits}) < FRAMES_PER_EPOCH, "no frame came from a second lap"
        assert sorted(visit[:3] for visit in visits) == planned
        shares = list(mixture.shares.values())
        assert Counter(visit[0] for visit in visits) == dict(enumerate(shares))
    rest = plan_from(pipe, other.state, 3)
    for rank, lines in enumerate(other.ranks):
        came = [[tuple(visit[:3]) for visit in line["visits"]] for line in lines]
        assert came == [frames_of_plan(rest, step, rank) for step in range(rest.num_steps)]
    state = rp.train.read_checkpoint(result.checkpoint)
    assert (state["epoch"], state["legs"]) == (NUM_EPOCHS, [])
    assert_account_is_exact(tmp_path)


def assert_account_is_exact(folder):
    told = CliRunner().invoke(app, ["account", str(folder / "storage" / RUN), "--json"])
    assert told.exit_code == 0, told.output
    verdicts = json.loads(told.stdout)["epochs"]
    found = [(one["epoch"], one["is_exact"], one["is_finished"], one["num_emitted"]) for one in verdicts]
    assert found == [(epoch, True, True, FRAMES_PER_EPOCH) for epoch in range(NUM_EPOCHS)]
