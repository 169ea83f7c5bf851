"""Every example runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.timeout(600)
def test_demo_loses_a_worker_and_ends_with_every_frame_exactly_once(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HOME": str(tmp_path)},
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "Ray Train says: WorkerGroupError, a worker died" in done.stdout
    assert "attempt 2: 3 workers" in done.stdout
    assert "0 wrong pictures" in done.stdout
    assert "0 are missing and 0 came twice" in done.stdout.replace("\n", " ")
    assert "made of: exactly once" in done.stdout.replace("\n", " ")
    # The workers' own account agrees.
    assert re.search(r"0 +3,695 +3,695 +0 +0 +0 +0 +\d+ +exactly once$", done.stdout.rstrip())
