"""A dataset of the Hub on Ray: its videos are fetched once, and not again by the next program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from batches import varied_spec
from hub_server import HubServer

from raypipe.testing import write_dataset

TESTS = Path(__file__).parents[1]


def run(root, folder, **environment):
    done = subprocess.run(
        [sys.executable, TESTS / "hub_run.py", str(root), str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
def test_videos_of_the_hub_are_fetched_once_for_all_ranks_and_programs(tmp_path):
    local = write_dataset(tmp_path / "arm", varied_spec())
    with HubServer() as hub:
        hub.add_repo("lab/arm", local, tags=("v3.0",))
        environment = hub.environment(tmp_path / "hub", HF_HOME=str(tmp_path / "home"))

        first = run("lab/arm", tmp_path / "cache", **environment)
        videos = videos_asked_for(hub)
        second = run("lab/arm", tmp_path / "cache", **environment)

        # That they are those of the local files is what test_remote_equal.py asks.
        assert len(first) == 8
        assert second == first
        # Each once, by whichever process came first: a request to the Hub, which sends on to where it is stored.
        names = sorted(path.relative_to(local).as_posix() for path in Path(local).rglob("*.mp4"))
        assert videos == dict.fromkeys(names, 2)
        assert videos_asked_for(hub) == videos


def videos_asked_for(hub):
    return {name: hub.paths[name] for name in sorted(hub.paths) if name.endswith(".mp4")}
