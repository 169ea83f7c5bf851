"""A Hub that answers 429 beyond so many requests: a run on Ray waits as asked, in all processes, and ends."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from batches import TOP, frames_of_dataset
from hub_server import Fault, HubServer

from raypipe.dataset import open_dataset
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

TESTS = Path(__file__).parents[1]
PAUSE_S = 4
IN_FLIGHT_S = 2.0
"""A process that was let through before another met the 429 may send within this: the machine may be busy."""


class StrictHub(HubServer):
    """Answers 429 with Retry-After to requests beyond `most` in `period_s` seconds; notes who came in a pause."""

    def __init__(self, most, period_s):
        super().__init__()
        self.most, self.period_s = most, period_s
        self.granted, self.refused, self.early = [], [], []

    def take_fault(self, path, kind):
        # The storage that the Hub sends on to has no such limit.
        if kind == "lfs":
            return Fault("")
        now = time.monotonic()
        with self._lock:
            if self.refused and self.refused[-1] + IN_FLIGHT_S < now < self.refused[-1] + PAUSE_S:
                self.early.append(now - self.refused[-1])
            if sum(at > now - self.period_s for at in self.granted) >= self.most:
                self.refused.append(now)
                return Fault("", status=429, headers={"Retry-After": str(PAUSE_S)})
            self.granted.append(now)
        return Fault("")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A file per episode: many requests."""
    spec = SynthSpec(
        lengths=(4,) * 8,
        cameras=(CameraSpec(name=TOP, height=32, width=32),),
        state_dim=2,
        episodes_per_video_file=1,
        episodes_per_data_file=1,
    )
    return write_dataset(tmp_path_factory.mktemp("storm") / "arm", spec)


def run(hub, tmp_path, limit, period_s):
    environment = hub.environment(tmp_path / "hub", HF_HOME=str(tmp_path / "hf"), HOME=str(tmp_path / "home"))
    done = subprocess.run(
        [sys.executable, TESTS / "hub_storm.py", str(limit), str(period_s)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("[["))


def frames_in(printed):
    return sorted(tuple(frame) for rank in json.loads(printed) for frame in rank)


@pytest.mark.timeout(240)
def test_a_storm_of_429_is_waited_out_by_all_processes(root, tmp_path):
    with StrictHub(most=8, period_s=6.0) as hub:
        hub.add_repo("lab/arm", root, tags=("v3.0",))

        # The budget of the cluster lets more through than this Hub: it is met with 429.
        frames = frames_in(run(hub, tmp_path, 1000, 1.0))

    assert frames == frames_of_dataset(open_dataset(str(root)))
    assert hub.refused, "the Hub was never asked for too much"
    assert hub.early == []


@pytest.mark.timeout(240)
def test_a_budget_within_the_limit_meets_no_429(root, tmp_path):
    # The opening comes before the budget of the cluster.
    with StrictHub(most=40, period_s=4.0) as hub:
        hub.add_repo("lab/arm", root, tags=("v3.0",))

        frames = frames_in(run(hub, tmp_path, 24, 4.0))

    assert frames == frames_of_dataset(open_dataset(str(root)))
    assert hub.refused == []
    assert len(hub.granted) > 16
