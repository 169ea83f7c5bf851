"""``raypipe stats``: what a person sees, what a program reads, and what is told where options do not fit."""

import numpy as np
import pytest
from program import run_program

from raypipe.dataset import open_dataset
from raypipe.mixture import MixtureStats, Normaliser
from raypipe.testing import SynthSpec, write_dataset


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    spec = SynthSpec(lengths=(7, 9), cameras=(), state_dim=3, action_dim=3)
    return str(write_dataset(tmp_path_factory.mktemp("stats") / "arm", spec))


def run(*arguments):
    done = run_program("stats", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_statistics_of_relative_actions_are_printed_and_written(root, tmp_path):
    printed = run(
        root, "--actions", "relative", "--absolute", "2", "--frames", "4", "--json-file", f"{tmp_path}/stats.json"
    )

    assert "action is relative to observation.state; absolute 2; as stored: joint_2" in printed
    stats = MixtureStats.load(tmp_path / "stats.json")
    represented = open_dataset(root).windowed(offsets={"action": range(4)})
    represented = represented.with_actions({"mode": "relative", "absolute": [2]})
    for name, value in represented.stats["action"].items():
        np.testing.assert_array_equal(stats.datasets["arm"]["action"][name], value)
    assert Normaliser(stats, {"action": "quantiles"}).normalise(
        {"action": represented[3]["action"], "action_representation": represented[3]["action_representation"]}
    )


def test_stored_statistics_are_printed_as_they_are(root):
    printed = run(root)

    assert "arm" in printed
    assert "is relative" not in printed
    (row,) = [line for line in printed.splitlines() if line.startswith("action ")]
    assert row.split()[-1] == "16"


def test_statistics_of_a_mixture_are_by_dataset(root, tmp_path):
    other = write_dataset(tmp_path / "hand", SynthSpec(lengths=(5,), cameras=(), state_dim=2, action_dim=2))
    file = tmp_path / "mixture.yaml"
    file.write_text(f"datasets:\n  arm: {{root: {root}}}\n  hand: {{root: {other}}}\n")

    printed = run(str(file), "--actions", "delta", "--match", "0=0", "--wrap", "1=360", "--frames", "2")

    assert printed.count("action is delta to observation.state; wrap 1 at 360; match 0 to 0") == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--actions", "relative"], "as --frames 50"),
        (["--frames", "4", "--absolute", "1"], "--absolute, --frames is about --actions"),
        (["--to", "observation.stat"], "--to is about --actions"),
        (["--actions", "relativ", "--frames", "4"], "did you mean 'relative'"),
        (["--actions", "delta", "--frames", "4", "--wrap", "1"], "NAME=PERIOD"),
        (["--actions", "delta", "--frames", "4", "--match", "1"], "NAME=NAME"),
        (["--actions", "delta", "--frames", "4", "--to", "observation.pose"], "observation.pose"),
    ],
)
def test_options_that_do_not_fit_are_told(root, options, words):
    done = run_program("stats", root, *options)

    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
