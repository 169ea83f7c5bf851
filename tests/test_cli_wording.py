"""How the program speaks: numbers agree with their nouns, a range has two ends, a warning is one plain line."""

import re
from html import unescape

import pytest
from program import run_program

from raypipe.testing import CameraSpec, SynthSpec, write_dataset

NOUNS = "batches|bytes|cameras|data files|datasets|episodes|files|frames|gaps|lanes|numbers|ranks|requests|rows|samples"
MANY_OF_ONE = re.compile(rf"\b1 (?:[a-z]+ )?(?:{NOUNS}|slots|spans|steps|tasks|video files|videos)\b(?! to )")
SAME_ENDS = re.compile(r"\b(\d+) to \1\b")


@pytest.fixture(scope="module")
def one_of_each(tmp_path_factory):
    """A dataset of one frame of one episode, with one camera and one task."""
    camera = CameraSpec(name="observation.images.top", height=32, width=48)
    spec = SynthSpec(lengths=(1,), cameras=(camera,), tasks=("lift",), state_dim=1, action_dim=1)
    return write_dataset(tmp_path_factory.mktemp("one") / "dataset", spec)


@pytest.mark.parametrize(
    "arguments",
    [
        ("info", "{root}"),
        ("plan", "{root}", "--world-size", 1, "--batch-size", 1),
        ("validate", "{root}", "--deep", "--html", "{tmp}/report.html"),
        ("reshard", "{root}", "{tmp}/copy"),
        ("reshard", "{root}", "{tmp}/none", "--exclude", 0),
        ("show", "{root}", "--out", "{tmp}/card.html"),
        ("show", "{root}", "--episode", 0, "--out", "{tmp}/episode.html"),
        ("show", "{root}", "--episode", 1),
        ("where", 0, 0, "--root", "{root}", "--batch-size", 1),
        ("synth", "{tmp}/made", "--episodes", 1, "--frames", 1, "--cameras", 0),
    ],
    ids=lambda arguments: " ".join(str(one) for one in arguments if not str(one).startswith("{")),
)
def test_one_of_each_is_told_in_the_singular(one_of_each, tmp_path, arguments):
    done = run_program(*(str(one).format(root=one_of_each, tmp=tmp_path) for one in arguments))

    pages = [re.sub(r"<[^>]*>", " ", path.read_text()) for path in tmp_path.glob("*.html")]
    told = unescape("\n".join([done.stdout, done.stderr, *pages]))
    assert "1 " in told or done.returncode == 2
    assert MANY_OF_ONE.findall(told) == []
    assert SAME_ENDS.findall(told) == []


def test_info_tells_the_length_of_a_single_episode_once(one_of_each):
    assert re.search(r"^episodes\s+1 \(1 frame\)\s*$", run_program("info", one_of_each).stdout, flags=re.MULTILINE)


def test_warning_is_one_line_without_the_code_that_gave_it(tmp_path):
    spec = SynthSpec(lengths=(3,), cameras=(), drop_columns=("index",), extra_features=("note",))
    root = write_dataset(tmp_path / "dataset", spec)
    info = root / "meta/info.json"
    info.write_text(info.read_text().replace('"note"', '"lost"'))

    done = run_program("show", root, "--out", tmp_path / "card.html")

    assert done.returncode == 0
    assert done.stderr == (
        f"raypipe: warning: {root}: leaving out lost: declared in info.json, and the rows have no such column. Take it "
        f"out of info.json, if it was never recorded, to silence this.\n"
    )
