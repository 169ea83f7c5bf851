"""Processes that torchrun starts: each gets its loader, exactly once, and others go on from what was written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from batches import frames_of_dataset, planned_epoch, rows_spec
from committed import committed_frames, flatten, plan_from, read_attempts
from doc_pages import PAGES, fenced
from program import run_program
from ray_session import ensure_ray
from torchrun_ranks import open_pipe

import raypipe as rp
from raypipe.errors import ConfigError
from raypipe.testing import SynthSpec, write_dataset

RANKS = Path(__file__).parent / "torchrun_ranks.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_torchrun.py"

REFUSE_RAY = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ImportError("there is no Ray here")

sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture
def root(tmp_path):
    return write_dataset(tmp_path / "dataset", rows_spec())


@pytest.fixture
def without_ray(tmp_path):
    """What the environment of a process must hold so that neither it nor its children can import Ray."""
    folder = tmp_path / "refuse-ray"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(REFUSE_RAY)
    env = {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", "import ray"]
    refused = subprocess.run(command, env={**os.environ, **env}, capture_output=True, check=False)
    assert b"there is no Ray here" in refused.stderr
    return env


def launch(num_processes, *command, **env):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    run([*torchrun, *command], **env)


def run(command, cwd=None, **env):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def assert_epoch_is_shared(root, folder, shares, launch_ranks):
    """Let numbers of processes take so many steps of an epoch each, the last ones all that is left, as planned."""
    pipe = open_pipe(root)

    for number, num_steps in shares:
        launch_ranks(number, str(num_steps))

    attempts = read_attempts(folder)
    assert [attempt.world_size for attempt in attempts] == [number for number, _ in shares]
    states = [rp.train.read_state(folder / f"state-{i}") for i in range(len(shares))]
    assert [attempt.state for attempt in attempts[1:]] == states[:-1]
    steps = committed_frames(attempts)
    for attempt, done, (number, num_steps) in zip(attempts, steps, shares, strict=True):
        planned = plan_from(pipe, attempt.state, number)
        assert done == [planned_epoch(planned, rank)[:num_steps] for rank in range(number)]
    number, num_steps = shares[0]
    assert steps[0] == [planned_epoch(pipe.plan(world_size=number), rank)[:num_steps] for rank in range(number)]
    assert all(len(done[0]) == num_steps for done, (_, num_steps) in zip(steps[:-1], shares, strict=False))
    assert sorted(flatten(steps)) == frames_of_dataset(pipe.config.dataset)


def test_processes_without_ray_share_an_epoch_and_others_go_on(tmp_path, root, without_ray):
    def launch_ranks(number, stop_after):
        launch(number, RANKS, root, tmp_path, stop_after, "auto", **without_ray)

    # On one, which divides the lanes of the first, and on three, which do not.
    assert_epoch_is_shared(root, tmp_path, [(2, 3), (1, 2), (3, 100)], launch_ranks)


def test_processes_on_one_ray_share_an_epoch_and_others_go_on(tmp_path, root):
    ensure_ray(4)
    address = ray.get_runtime_context().gcs_address

    def launch_ranks(number, stop_after):
        launch(number, RANKS, root, tmp_path, stop_after, "ray", RAY_ADDRESS=address)

    assert_epoch_is_shared(root, tmp_path, [(2, 3), (3, 100)], launch_ranks)


def test_example_trains_without_ray_and_goes_on_with_other_numbers_of_processes(tmp_path, without_ray):
    root = write_dataset(tmp_path / "dataset", SynthSpec(lengths=(40, 30, 50, 20, 35)))
    common = [EXAMPLE, root, tmp_path / "checkpoint", "--batch-size", "4", "--epochs", "2"]

    launch(2, *common, "--stop-after", "5", **without_ray)
    launch(1, *common, "--stop-after", "7", **without_ray)
    launch(3, *common, **without_ray)

    state = rp.train.read_state(tmp_path / "checkpoint")
    assert (state["epoch"], state["legs"]) == (2, [])
    account = run_program("account", tmp_path / "checkpoint")
    assert account.returncode == 0, account.stdout
    for epoch in (0, 1):
        assert f"epoch {epoch}: exactly once: 175 of 175 frames emitted" in account.stdout


LOST_WHILE_SAVING = """
import os, runpy, sys
import raypipe as rp

rp.train.write_states = lambda *_: os._exit(9)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_example_that_is_lost_while_it_saves_leaves_the_checkpoint_before(tmp_path):
    root, checkpoint = write_dataset(tmp_path / "dataset", SynthSpec(lengths=(40, 30))), tmp_path / "checkpoint"
    common = [EXAMPLE, root, checkpoint, "--batch-size", "4", "--epochs", "1"]
    launch(1, *common, "--stop-after", "5")
    whole = (checkpoint / "model.pt").read_bytes()

    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    lost = [sys.executable, "-c", LOST_WHILE_SAVING, *common]
    done = subprocess.run(lost, env={**os.environ, "OMP_NUM_THREADS": "1", **alone}, capture_output=True, check=False)

    assert done.returncode == 9, done.stderr[-3000:]
    assert (checkpoint / "model.pt").read_bytes() == whole
    launch(1, *common)
    account = run_program("account", checkpoint)
    assert "epoch 0: exactly once: 70 of 70 frames emitted" in account.stdout


def test_script_of_the_documentation_trains_two_epochs_and_saves_where_it_stands(tmp_path, without_ray):
    (block,) = fenced("py", PAGES / "ray-train.md")
    (tmp_path / "train.py").write_text(block)
    write_dataset(tmp_path / "demo-data", SynthSpec(lengths=(40, 30, 50, 20)))
    shown = "\n".join(fenced("sh", PAGES / "ray-train.md"))
    (command,) = [line for line in shown.splitlines() if "torchrun" in line]

    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run(["bash", "-c", command], cwd=tmp_path, PATH=path, **without_ray)

    state = rp.train.read_state(tmp_path / "checkpoint")
    assert (state["epoch"], state["legs"]) == (2, [])


def test_process_without_a_group_is_told_to_make_one(root):
    with pytest.raises(ConfigError, match=r"call torch.distributed.init_process_group.*In a single process use"):
        rp.train.share_loader(open_pipe(root))
