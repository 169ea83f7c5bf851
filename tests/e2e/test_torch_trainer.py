"""Ray Train: every start of the workers goes on from the checkpoint, exactly once and in the order of the plan."""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import committed
import pytest
import ray.train
import torch
from batches import frames_of_dataset, planned_epoch, rows_spec
from committed import Journal, committed_frames, flatten, plan_from, read_attempts
from ray import cloudpickle
from ray.train.torch import TorchTrainer, prepare_model
from ray_session import ensure_ray
from typer.testing import CliRunner

import raypipe as rp
from raypipe.cli import app
from raypipe.errors import ConfigError, ResumeError
from raypipe.testing import write_dataset

# The workers of Ray cannot import modules of the tests: what is defined here travels to them whole.
for module in (sys.modules[__name__], committed):
    cloudpickle.register_pickle_by_value(module)

RUN = "run"


@pytest.fixture(autouse=True)
def _ray():
    # Three workers, and a CPU for reading.
    ensure_ray(4)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """57 frames without cameras: 5 steps of 6 frames on two ranks."""
    return rp.open_dataset(str(write_dataset(tmp_path_factory.mktemp("rows") / "dataset", rows_spec())))


@pytest.fixture(scope="module")
def pipe(rows):
    return rp.Pipeline(rows, batch_size=6, seed=3, order={"live_spans": 3})


def fit(loop, folder, num_workers, pipelines, max_failures=0, **config):
    """Train with storage and journals in `folder`."""
    journals = Path(folder) / "journals"
    journals.mkdir(exist_ok=True)
    return TorchTrainer(
        loop,
        train_loop_config={"journals": str(journals), **config},
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers),
        run_config=ray.train.RunConfig(
            name=RUN,
            storage_path=str(Path(folder) / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
        ),
        **rp.train.ingest(**pipelines),
    ).fit()


def train_loop(config):
    """Note every step of one or two epochs, and save after some; up to the end of this attempt.

    `ends` has a kind and a step for each of the first attempts. All ranks stop at such a step, or rank 1 fails.
    """
    num_epochs = config.get("num_epochs", 1)
    loader = rp.train.get_loader("train", num_epochs=num_epochs)
    context = ray.train.get_context()
    rank = context.get_world_rank()
    journal = Journal(config["journals"], rank, context.get_world_size(), loader)
    attempt = len(list(Path(config["journals"]).glob(f"rank-{rank}-*"))) - 1
    kind, last_step = dict(enumerate(config.get("ends", ()))).get(attempt, ("", 0))
    saved, step = read_snapshot(config), 0
    while loader.epoch < num_epochs:
        for batch in loader:
            step += 1
            journal.add(batch, loader)
            if rank == 1 and step == last_step and kind != "stop":
                fail(config, kind, step, saved)
            if step in config.get("save_after", ()):
                save(loader, rank)
            if step == last_step and kind == "stop":
                return


def save(loader, rank):
    with tempfile.TemporaryDirectory() as folder:
        rp.train.report({"epoch": loader.epoch}, folder if rank == 0 else None, loader)


def fail(config, kind, step, saved):
    # A report returns before the controller has taken it: a checkpoint counts when it is in the run's snapshot.
    while step > min(config["save_after"]) and read_snapshot(config) == saved:
        time.sleep(0.1)
    if kind == "raise":
        raise RuntimeError("a worker fails")
    os.kill(os.getpid(), signal.SIGKILL)


def read_snapshot(config):
    path = Path(config["journals"]).parent / "storage" / RUN / "checkpoint_manager_snapshot.json"
    return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, pipe):
    """A run of two ranks that fails three times, ends its first epoch, and stops after 3 of the 5 steps of its second.

    Rank 1 fails before anything was saved; two steps after a checkpoint; a step after the next one, without a word.
    """
    ensure_ray(4)
    folder = tmp_path_factory.mktemp("stopped")
    ends = [("raise", 2), ("raise", 4), ("SIGKILL", 3), ("stop", 4)]
    fit(train_loop, folder, 2, {"train": pipe}, 3, num_epochs=2, save_after=(2, 4), ends=ends)
    return folder


def test_committed_steps_are_exactly_once_and_in_plan_order_however_often_a_rank_fails(rows, pipe, stopped):
    attempts = read_attempts(stopped / "journals")
    steps = committed_frames(attempts)

    assert [len(attempt.frames(1)) for attempt in attempts] == [2, 4, 3, 4]
    assert [len(attempt[0]) for attempt in steps] == [0, 2, 2, 4]
    assert (attempts[1].state["epoch"], attempts[1].state["legs"]) == (0, [])
    came = [[step for attempt in steps for step in attempt[rank]] for rank in range(2)]
    assert sorted(frame for steps in came for step in steps[:5] for frame in step) == frames_of_dataset(rows)
    for rank in range(2):
        assert came[rank][:5] == planned_epoch(pipe.plan(world_size=2), rank)
        assert came[rank][5:] == planned_epoch(pipe.plan(epoch=1, world_size=2), rank)[:3]
    verdict, _ = account_of(stopped)
    assert verdict["is_exact"]
    assert verdict["num_emitted"] == len(frames_of_dataset(rows))
    # Of those that raised; what a killed process had handed over since it wrote its account last is not known.
    assert verdict["num_rolled_back"] >= 2 * 12


def account_of(folder):
    """The verdicts of ``raypipe account`` over the run's epochs."""
    told = CliRunner().invoke(app, ["account", str(Path(folder) / "storage" / RUN), "--json"])
    assert told.exit_code in (0, 1), told.output
    return json.loads(told.stdout)["epochs"]


def test_second_fit_on_other_ranks_goes_on_as_the_plan_says(tmp_path, rows, pipe, stopped):
    # 3 ranks do not divide the 2 lanes of the run: the rest is a new leg.
    num_workers = 3
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)

    fit(train_loop, tmp_path, num_workers, {"train": pipe}, num_epochs=2)

    *_, first, second = read_attempts(tmp_path / "journals")
    begun, rest = committed_frames([first, second])
    # The first of them ended the epoch before.
    begun = [steps[1:] for steps in begun]
    assert len(begun[0]) == 3
    planned = plan_from(pipe, second.state, num_workers)
    assert rest == [planned_epoch(planned, rank) for rank in range(num_workers)]
    assert sorted(flatten([begun, rest])) == frames_of_dataset(rows)
    _, verdict = account_of(tmp_path)
    assert (verdict["epoch"], verdict["is_exact"], verdict["is_finished"]) == (1, True, True)
    assert verdict["num_emitted"] + verdict["num_left_over"] == len(frames_of_dataset(rows))


def wrong_name_loop(config):
    rp.train.get_loader("training")


NO_SUCH_LOADER = r"the trainer has no pipeline 'training'; pass it as rp.train.ingest\(training=...\)"


def test_wrong_name_of_a_loader_is_an_error_that_says_how_to_give_it(tmp_path, pipe):
    with pytest.raises(ConfigError, match=NO_SUCH_LOADER):
        fit(wrong_name_loop, tmp_path, 0, {"train": pipe})


def twice_wrong_loop(config):
    """Ask for a loader that there is not, and then for one whose state is damaged: a start of Ray Train for both."""
    try:
        wrong_name_loop(config)
    except ConfigError as wrong:
        try:
            train_loop(config)
        except ResumeError as damaged:
            damaged.add_note(f"{type(wrong).__name__}: {wrong}")
            raise


def test_errors_of_workers_name_the_damaged_state_of_a_checkpoint_and_the_loader_that_is_not_given(
    tmp_path, pipe, stopped
):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    state = max((tmp_path / "storage" / RUN).glob("checkpoint_*/raypipe/train.json"))
    state.write_bytes(state.read_bytes()[:40])

    with pytest.raises(ray.train.TrainingFailedError) as error:
        fit(twice_wrong_loop, tmp_path, 2, {"train": pipe})

    assert error.match(r"ResumeError: damaged state '.*raypipe/train\.json'")
    assert error.match(f"ConfigError: {NO_SUCH_LOADER}")


def ddp_loop(config):
    """Train an epoch with gradients that are averaged over ranks, then read the evaluation data."""
    loader, val = rp.train.get_loader("train"), rp.train.get_loader("val")
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    assert isinstance(ray.train.get_dataset_shard("train"), rp.RankLoader)
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    journal = Journal(config["journals"] + "/train", rank, world_size, loader)
    for batch in loader:
        loss = torch.nn.functional.mse_loss(model(batch["observation.state"]), batch["action"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        gradients = [parameter.grad.tolist() for parameter in model.parameters()]
        journal.add(batch, loader, loss=loss.item(), gradients=gradients)
    journal = Journal(config["journals"] + "/val", rank, world_size, val)
    for batch in val:
        journal.add(batch, val)
    # The other rank tells its figures when it is done with the epoch too.
    while val.world_stats().num_ranks < world_size:
        time.sleep(0.05)
    with tempfile.TemporaryDirectory() as folder:
        metrics = {**rp.train.loader_metrics(loader), **rp.train.loader_metrics(val)}
        rp.train.report(metrics, folder if rank == 0 else None, loader, val)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, rows, pipe):
    """What came of an epoch on two ranks: the result, and the attempts of both loaders."""
    ensure_ray(4)
    folder = tmp_path_factory.mktemp("trained")
    for name in ("train", "val"):
        (folder / "journals" / name).mkdir(parents=True)
    val = rp.Pipeline(rows, batch_size=8, seed=0, order={"shuffle": False})
    result = fit(ddp_loop, folder, 2, {"train": pipe, "val": val})
    return result, *(read_attempts(folder / "journals" / name) for name in ("train", "val"))


def test_ranks_train_an_epoch_exactly_once_with_the_same_gradients(trained, rows, pipe):
    (attempt,) = trained[1]

    assert sorted(flatten(committed_frames([attempt]))) == frames_of_dataset(rows)
    assert attempt.frames(0) == planned_epoch(pipe.plan(world_size=2), 0)
    zero, one = attempt.ranks
    assert [line["gradients"] for line in zero] == [line["gradients"] for line in one]
    assert all(a["loss"] != b["loss"] for a, b in zip(zero, one, strict=True))


def test_val_loader_stands_beside_the_train_loader(trained, rows):
    result, _, (attempt,) = trained

    assert sorted(flatten(committed_frames([attempt]))) == frames_of_dataset(rows)
    # In file order: the first rank has the first half.
    assert [frame for step in attempt.frames(0) for frame in step] == frames_of_dataset(rows)[:29]
    states = {name: rp.train.read_checkpoint(result.checkpoint, name) for name in ("train", "val")}
    assert [(state["epoch"], state["legs"]) for state in states.values()] == [(1, []), (1, [])]


def test_reported_figures_are_those_of_all_ranks(trained):
    metrics = trained[0].metrics

    assert metrics["train/num_ranks"] == metrics["val/num_ranks"] == 2
    assert metrics["train/samples_per_s"] > 0
    assert metrics["train/worst_rank"] in (0, 1)
    assert 0 <= metrics["train/wait_share"] <= metrics["train/worst_wait_share"] <= 1


def test_local_mode_trains_in_this_process(tmp_path, rows, pipe):
    result = fit(train_loop, tmp_path, 0, {"train": pipe}, save_after=(10,))

    assert result.metrics == {"epoch": 1}
    (attempt,) = read_attempts(tmp_path / "journals")
    assert attempt.frames(0) == planned_epoch(pipe.plan(world_size=1), 0)
    assert sorted(flatten(committed_frames([attempt]))) == frames_of_dataset(rows)
