"""The example that trains LeRobot's ACT: in one process, under torchrun and with Ray Train, on from checkpoints.

Runs where lerobot is installed: `make test-lerobot`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.testing import SynthSpec, write_dataset

pytest.importorskip("lerobot", reason="lerobot is not installed")

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_lerobot_policy.py"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
SMALL = ("--batch-size", "2", "--chunk", "4", "--epochs", "1", "--save-every", "2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("act") / "data", SynthSpec(lengths=(14, 9, 10), version="v2.1"))


def train(data, run, *options, launcher=(), returncode=0):
    command = [sys.executable, *launcher, EXAMPLE, data, run, *SMALL, *options]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == returncode, done.stderr[-3000:]
    return done.stdout


def verdict(folder):
    command = [sys.executable, "-c", "from raypipe.cli import main; main()", "account", str(folder), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=False).stdout)


def test_act_goes_on_from_one_process_to_two_of_torchrun(data, tmp_path):
    assert "step 4 loss" in train(data, tmp_path / "run", "--stop-after", "4")

    train(data, tmp_path / "run", launcher=TORCHRUN)

    (epoch,) = verdict(tmp_path / "run" / "checkpoint")["epochs"]
    assert (epoch["num_emitted"], epoch["is_exact"]) == (33, True)


LOST_WHILE_SAVING = """
import os, runpy, sys, torch

torch.save = lambda *_: os._exit(9)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.timeout(600)
def test_a_process_that_is_lost_while_it_saves_leaves_the_checkpoint_before(data, tmp_path):
    weights = tmp_path / "run/checkpoint/model.safetensors"
    train(data, tmp_path / "run", "--stop-after", "2")
    whole = weights.read_bytes()

    # The new weights are written, the optimizer and the place of the data are not.
    train(data, tmp_path / "run", launcher=("-c", LOST_WHILE_SAVING), returncode=9)

    assert weights.read_bytes() == whole
    train(data, tmp_path / "run")
    (epoch,) = verdict(tmp_path / "run/checkpoint")["epochs"]
    assert (epoch["num_emitted"], epoch["is_exact"]) == (33, True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint"]


@pytest.mark.timeout(600)
def test_act_goes_on_from_one_worker_of_ray_train_to_two(data, tmp_path):
    for workers in ("1", "2"):
        stop = ("--stop-after", "4") if workers == "1" else ()
        train(data, tmp_path / "run", "--ray-workers", workers, "--cpus-per-worker", "0.5", *stop)

    (epoch,) = verdict(tmp_path / "run")["epochs"]
    assert (epoch["num_emitted"], epoch["is_exact"]) == (33, True)
