"""The README's code runs as printed, and the tests and commands that it names exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from program import run_program
from readme_blocks import README, fenced

from raypipe.testing import SynthSpec, numbered_cameras, varied_lengths, write_dataset

ROOT = Path(__file__).parents[1]
# The others are run beside what they need: a cluster with a token, and torchrun.
LANGUAGES = {"", "python", "py", "sh", "yaml"}


@pytest.mark.timeout(600)
def test_readme_python_runs_as_printed(tmp_path):
    spec = SynthSpec(lengths=varied_lengths(20, 30, seed=0), cameras=numbered_cameras(2, "96x96", "h264", gop=2))
    write_dataset(tmp_path / "demo-data", spec)
    (options,) = re.findall(r"`raypipe synth demo-arm ([^`]*)`", README)
    made = run_program("synth", tmp_path / "demo-arm", *options.split())
    assert made.returncode == 0, made.stderr
    (mixture,) = fenced("yaml")
    (tmp_path / "mixture.yaml").write_text(mixture)
    blocks = [block.replace("/tmp/runs", str(tmp_path / "runs")) for block in fenced("python")]
    code = "import ray; ray.init(address='local', num_cpus=4, include_dashboard=False)\n" + "\n".join(blocks)
    check = "\nassert result.metrics['train/num_ranks'] == 2"
    check += "\n(last,) = again.steps(1)\nassert last['action'].shape == (32, 16, 6)"
    check += "\nassert last['observation.images.camera_0'].shape == (32, 3, 96, 96)"
    check += "\nassert scaled['action'].shape == (32, 16, 6) and set(scaled['robot_type'])"
    check += "\nassert mixture.shares['arm'] * 3 in range(len(mixture) - 2, len(mixture) + 3)"
    check += "\nassert not checked.skipped and checked.account().parts[0].emitted.num_values == len(ds)"

    done = subprocess.run(
        [sys.executable, "-c", code + check],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HOME": str(tmp_path)},
    )

    assert blocks
    assert done.returncode == 0, done.stderr[-3000:]


def test_readme_has_no_block_that_no_test_runs():
    found = set(re.findall(r"^```(\w+)$", README, flags=re.MULTILINE))

    assert found <= LANGUAGES


def test_readme_names_tests_that_exist():
    named = set(re.findall(r"`(tests/[\w/.]+)`", README))

    assert named
    assert not [name for name in named if not (ROOT / name).exists()]


def test_readme_names_commands_that_exist():
    commands = set(re.findall(r"^raypipe (\w+)", "\n".join(fenced("")), flags=re.MULTILINE))

    helped = subprocess.run(
        [Path(sys.executable).parent / "raypipe", "--help"], capture_output=True, text=True, check=True
    ).stdout

    assert commands
    assert not [command for command in commands if f"\n  {command} " not in helped]
