"""The same batches from local disk, the Hub and S3, bit for bit: also after a kill, and on another world size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from batches import varied_spec
from hub_server import HubServer
from s3_server import S3Server

from raypipe.testing import write_dataset

TESTS = Path(__file__).parents[1]


def run(folder, roots, **environment):
    arguments = [str(one) for name, root in roots.items() for one in (name, *root)]
    done = subprocess.run(
        [sys.executable, TESTS / "remote_run.py", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Ray may have a word about the ranks that were killed.
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@pytest.mark.timeout(450)
def test_batches_are_the_same_from_disk_hub_and_s3_whole_and_by_parts_after_a_kill(tmp_path):
    local = write_dataset(tmp_path / "arm", varied_spec())
    with HubServer() as hub, S3Server() as s3:
        hub.add_repo("lab/arm", local, tags=("v3.0",))
        uri = s3.add("arm", local)
        environment = {**hub.environment(tmp_path / "hub"), **s3.environment(HOME=str(tmp_path / "home"))}
        roots = {
            "disk": (local, "local"),
            "hub": ("lab/arm", "whole"),
            "hub by parts": ("lab/arm", "parts"),
            "s3": (uri, "whole"),
            "s3 by parts": (uri, "parts"),
        }

        found = run(tmp_path, roots, **environment)

        assert hub.counts["lfs"] > 0
        assert s3.counts["get"] > 0
    expected = found.pop("disk")
    assert len(expected) == 8
    assert [len(step) for step in expected] == [2, 2, 2, 1, 1, 1, 1, 1]
    for name, batches in found.items():
        assert batches == expected, name
