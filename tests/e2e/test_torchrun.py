"""Processes that torchrun starts: each gets its loader, exactly once, and others go on from what rank 0 has written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from batches import frames_of_dataset, planned_epoch, rows_spec
from committed import committed_frames, flatten, plan_from, read_attempts
from doc_pages import PAGES, fenced
from ray_session import ensure_ray
from torchrun_ranks import open_pipe

import raypipe as rp
from raypipe.errors import ConfigError
from raypipe.testing import SynthSpec, write_dataset

RANKS = Path(__file__).parent / "torchrun_ranks.py"


@pytest.fixture
def root(tmp_path):
    return write_dataset(tmp_path / "dataset", rows_spec())


def launch(num_processes, *command):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    run([*torchrun, *command], RAY_ADDRESS=ray.get_runtime_context().gcs_address)


def run(command, cwd=None, **env):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_processes_share_an_epoch_and_others_go_on_from_the_written_state(tmp_path, root):
    ensure_ray(4)
    then = 3
    pipe = open_pipe(root)

    launch(2, RANKS, root, tmp_path, "3")
    launch(then, RANKS, root, tmp_path, "100")

    first, second = read_attempts(tmp_path)
    assert second.state == rp.train.read_state(tmp_path / "first")
    steps = committed_frames([first, second])
    assert steps[0] == [planned_epoch(pipe.plan(world_size=2), rank)[:3] for rank in range(2)]
    rest = plan_from(pipe, second.state, then)
    assert steps[1] == [planned_epoch(rest, rank) for rank in range(then)]
    assert sorted(flatten(steps)) == frames_of_dataset(pipe.config.dataset)


def test_script_of_the_documentation_trains_two_epochs_and_saves_where_it_stands(tmp_path):
    ensure_ray(4)
    (block,) = fenced("py", PAGES / "ray-train.md")
    (tmp_path / "train.py").write_text(block)
    write_dataset(tmp_path / "demo-data", SynthSpec(lengths=(40, 30, 50, 20)))
    shown = "\n".join(fenced("sh", PAGES / "ray-train.md"))
    (line,) = [line for line in shown.splitlines() if "torchrun" in line]
    # The head is there already, at another address.
    command = line.replace("127.0.0.1:6379", ray.get_runtime_context().gcs_address)

    run(["bash", "-c", command], cwd=tmp_path, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    state = rp.train.read_state(tmp_path / "checkpoint")
    assert (state["epoch"], state["legs"]) == (2, [])


def test_process_without_a_group_is_told_to_make_one(root):
    with pytest.raises(ConfigError, match=r"call torch.distributed.init_process_group.*In a single process use"):
        rp.train.share_loader(open_pipe(root))
