"""A dataset of the Hub on Ray: the batches of the local files, also on another world size; videos are fetched once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from batches import local_loader, varied_spec
from hub_run import digest_of, make_pipe
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
def test_batches_from_the_hub_are_those_of_the_local_files(tmp_path):
    local = write_dataset(tmp_path / "arm", varied_spec())
    expected = read_locally(make_pipe(str(local)))
    with HubServer() as hub:
        hub.add_repo("lab/arm", local, tags=("v3.0",))
        environment = hub.environment(tmp_path / "hub", HF_HOME=str(tmp_path / "home"))

        first = run("lab/arm", tmp_path / "cache", **environment)
        videos = videos_asked_for(hub)
        second = run("lab/arm", tmp_path / "cache", **environment)

        assert first == expected
        assert second == expected
        # Each once, by whichever process came first: a request to the Hub, which sends on to where it is stored.
        names = sorted(path.relative_to(local).as_posix() for path in Path(local).rglob("*.mp4"))
        assert videos == dict.fromkeys(names, 2)
        assert videos_asked_for(hub) == videos


def read_locally(pipe):
    """What `hub_run.py` gives, by the same plan without Ray."""
    ranks = [local_loader(pipe, rank, 2) for rank in range(2)]
    begun = [[digest_of(batch) for batch in loader.steps(3)] for loader in ranks]
    rest = local_loader(pipe)
    rest.load_state_dict(ranks[0].state_dict())
    return [*map(list, zip(*begun, strict=True)), *([digest_of(batch)] for batch in rest)]


def videos_asked_for(hub):
    return {name: hub.paths[name] for name in sorted(hub.paths) if name.endswith(".mp4")}
