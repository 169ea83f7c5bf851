"""`raypipe reshard` killed at random moments: no half-written copy, and a later run loses and repeats nothing."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from reshard_checks import digests

from raypipe.reshard import ReshardSpec, reshard_dataset
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

# So much that a run goes on for a while after the last moment of a kill: the kill may come late on a busy machine.
SPEC = SynthSpec(
    version="v2.1",
    lengths=(12,) * 40,
    cameras=(CameraSpec(name="observation.images.top", height=256, width=256, gop=12),),
    pixels="textured",
)
OPTIONS = ("--gop", "2", "--exclude", "3,7")
CHOICES = ReshardSpec(gop=2, exclude=(3, 7))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("source") / "dataset", SPEC)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The copy of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "copy"
    reshard_dataset(str(source), out, CHOICES, where="process")
    return digests(out)


def start(source, out, where, *options):
    # A Ray of its own: never one that is there.
    environment = os.environ | {"RAY_ADDRESS": "local"}
    command = [sys.executable, "-c", "from raypipe.cli import main; main()", "reshard", str(source), str(out)]
    return subprocess.Popen(
        [*command, *(options or OPTIONS), "--where", where],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished_files(out: Path) -> int:
    """Files of the unfinished copy that are whole: clips, dataset files and records."""
    # `walk` passes over folders that go while it looks.
    return sum(
        len(files)
        for partial in out.parent.glob(f"{out.name}.partial-*")
        for folder, _, files in os.walk(partial)
        if "parts" not in Path(folder).parts
    )


def kill_at(process, out, num_files, jitter_s) -> bool:
    """Kill a run a moment after it has finished so many files; return whether it was still running."""
    while process.poll() is None and finished_files(out) < num_files:
        time.sleep(0.002)
    time.sleep(jitter_s)
    was_running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    return was_running


def finish(source, out, where, *options):
    process = start(source, out, where, *options)
    told, _ = process.communicate(timeout=120)
    return process.returncode, told


def test_a_run_killed_at_random_moments_is_finished_by_the_next(source, whole, tmp_path):
    draw = random.Random(7)
    out = tmp_path / "copy"
    moments = sorted(draw.sample(range(1, 33), 5))
    num_killed = 0

    for moment in moments:
        num_killed += kill_at(start(source, out, "process"), out, moment, draw.uniform(0, 0.05))
        assert not out.exists()

    code, told = finish(source, out, "process")
    assert (code, num_killed) == (0, 5), told
    assert digests(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_other_arguments_are_refused_while_an_unfinished_copy_stands(source, tmp_path):
    out = tmp_path / "copy"
    assert kill_at(start(source, out, "process"), out, 3, 0.0)

    code, told = finish(source, out, "process", "--gop", "4")

    assert code == 2
    assert "gop was 2 and is 4" in told
    assert "rm -r" in told
    assert not out.exists()


def test_a_run_on_ray_killed_with_its_driver_is_finished_by_the_next(source, whole, tmp_path):
    out = tmp_path / "copy"
    assert kill_at(start(source, out, "ray"), out, 4, 0.02)
    assert not out.exists()

    # Where a run goes on is not where it began: what is finished is finished.
    code, told = finish(source, out, "process")

    assert code == 0, told
    assert digests(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
