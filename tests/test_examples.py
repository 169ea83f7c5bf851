"""Every example runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.timeout(300)
def test_demo_ends_with_every_frame_exactly_once(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HOME": str(tmp_path)},
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "0 are missing and 0 came twice: exactly once" in done.stdout
    assert done.stdout.count("0 wrong pictures") == 2
