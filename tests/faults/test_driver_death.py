"""A driver that is killed in the middle of an epoch and started again, on the same cluster, from what is on disk.

This file is the driver too, run as a script.
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from attempts import (
    FEED,
    LENGTHS,
    Training,
    actors_of_attempts,
    assert_follows_plan,
    frames_by_rank,
    frames_of_steps,
    is_gone,
    local_nodes,
    read_steps,
)
from batches import frames_of_dataset, planned_epoch, rows_spec
from waiting import PATIENCE_S, wait_until

from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline
from raypipe.testing import write_dataset


@pytest.fixture(scope="module")
def address():
    with local_nodes({"num_cpus": 1}, {"num_cpus": 0, "num_gpus": 2}) as cluster:
        yield cluster.address


def pipeline(root) -> Pipeline:
    return Pipeline(open_dataset(str(root)), batch_size=6, seed=1, order={"live_spans": 2}, feed=FEED)


def drive(address: str, root: str, ledger: str, hold_after: str) -> None:
    """Train on two ranks, from the last step in the file `ledger`; keeps the ranks at a step, so as to be killed."""
    ray.init(address=address, logging_level="warning", log_to_driver=False)
    with Training(ledger).attempt(pipeline(root), 2, hold_after=int(hold_after)) as attempt:
        attempt.join()


@pytest.fixture
def start_driver(address, tmp_path):
    """Start drivers, with their output in a file; none outlives the test."""
    drivers = []
    path = ":".join(str(folder) for folder in (Path(__file__).parents[1], *sys.path))

    def start(*args) -> subprocess.Popen:
        command = ["env", f"PYTHONPATH={path}", sys.executable, __file__, address, *map(str, args)]
        with open(tmp_path / "driver.log", "ab") as log:
            drivers.append(subprocess.Popen(command, stdout=log, stderr=log))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.kill()
        driver.wait()


@pytest.mark.timeout(300)
def test_driver_that_is_killed_goes_on_from_disk_when_started_again(start_driver, tmp_path):
    root = write_dataset(tmp_path / "dataset", rows_spec(LENGTHS))
    ledger = tmp_path / "ledger.jsonl"

    first = start_driver(root, ledger, 4)
    wait_until(lambda: len(read_steps(ledger)) == 4 or first.poll() is not None, "the driver has trained 4 steps")
    lived = actors_of_attempts()
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    pids = read_steps(ledger)[0].pids
    wait_until(lambda: not actors_of_attempts(), "all actors of the dead driver are gone")
    wait_until(lambda: all(is_gone(pid) for pid in pids), "all ranks of the dead driver are gone")
    second = start_driver(root, ledger, -1)

    assert second.wait(timeout=2 * PATIENCE_S) == 0, (tmp_path / "driver.log").read_text()
    steps, pipe = read_steps(ledger), pipeline(root)
    assert set(lived) == {"Rank", "Feeder", "SplitCoordinator"}
    assert [step.attempt for step in steps] == [0] * 4 + [1] * (len(steps) - 4)
    assert not set(pids) & set(steps[-1].pids)
    assert frames_by_rank(steps) == [planned_epoch(pipe.plan(world_size=2), rank) for rank in range(2)]
    assert_follows_plan(steps, pipe)
    assert sorted(frames_of_steps(steps)) == frames_of_dataset(open_dataset(str(root)))


if __name__ == "__main__":
    drive(*sys.argv[1:])
