"""The same batches from local disk, the Hub and S3, bit for bit: also after a kill, and on another world size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from batches import digest_of, local_loader, varied_spec
from hub_server import HubServer
from remote_run import make_pipe
from s3_server import S3Server

from raypipe.testing import write_dataset

TESTS = Path(__file__).parents[1]


def run(folder, runs, **environment):
    """Give the name and the batches of each run when it is done."""
    words = [str(word) for name, parts in runs.items() for word in (name, *parts)]
    with (folder / "errors.txt").open("w+") as errors:
        program = subprocess.Popen(
            [sys.executable, TESTS / "remote_run.py", str(folder), *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", **environment},
        )
        try:
            for line in program.stdout:
                # Ray may have a word about the ranks that were killed.
                if line.startswith("{"):
                    yield from json.loads(line).items()
            code = program.wait(timeout=60)
        finally:
            program.kill()
            program.communicate()
        errors.seek(0)
        assert code == 0, errors.read()[-3000:]


def read_locally(pipe):
    """What a run gives, by the same plan without Ray."""
    ranks = [local_loader(pipe, rank, 2) for rank in range(2)]
    begun = [[digest_of(batch) for batch in loader.steps(3)] for loader in ranks]
    rest = local_loader(pipe)
    rest.load_state_dict(ranks[0].state_dict())
    return [*map(list, zip(*begun, strict=True)), *([digest_of(batch)] for batch in rest)]


def videos_asked_for(hub):
    return {name: hub.paths[name] for name in sorted(hub.paths) if name.endswith(".mp4")}


@pytest.mark.timeout(450)
def test_batches_are_the_same_from_disk_hub_and_s3_whole_and_by_parts_after_a_kill(tmp_path):
    local = write_dataset(tmp_path / "arm", varied_spec())
    expected = read_locally(make_pipe(str(local)))
    found, videos = {}, []
    with HubServer() as hub, S3Server() as s3:
        hub.add_repo("lab/arm", local, tags=("v3.0",))
        uri = s3.add("arm", local)
        environment = {**hub.environment(tmp_path / "hub"), **s3.environment(HOME=str(tmp_path / "home"))}
        # The first two share a cache, and the third asks the Hub for nothing: what is counted after each is its own.
        runs = {
            "hub, unbroken": ("lab/arm", "whole", "unbroken", "unbroken"),
            "hub, once more": ("lab/arm", "whole", "unbroken", "killed"),
            "disk": (local, "local", "none", "killed"),
            "hub": ("lab/arm", "whole", "hub", "killed"),
            "hub by parts": ("lab/arm", "parts", "hub by parts", "killed"),
            "s3": (uri, "whole", "s3", "killed"),
            "s3 by parts": (uri, "parts", "s3 by parts", "killed"),
        }

        for name, batches in run(tmp_path, runs, **environment):
            found[name] = batches
            videos.append(videos_asked_for(hub))

        assert hub.counts["lfs"] > 0
        assert s3.counts["get"] > 0
    assert [len(step) for step in expected] == [2, 2, 2, 1, 1, 1, 1, 1]
    assert list(found) == list(runs)
    for name, batches in found.items():
        assert batches == expected, name
    # Each once, by whichever process came first: a request to the Hub, which sends on to where it is stored.
    names = sorted(path.relative_to(local).as_posix() for path in Path(local).rglob("*.mp4"))
    assert videos[0] == dict.fromkeys(names, 2)
    assert videos[1] == videos[0]
