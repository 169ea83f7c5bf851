"""Plurals, ranges and cuts in all that raypipe says."""

import io
import json

import pytest
from rich.console import Console

from raypipe.text import (
    constant_text,
    counted,
    cut_inside,
    either,
    frames_text,
    how_to_install,
    plural,
    rows_table,
    span_text,
    terminal,
)


@pytest.mark.parametrize(
    ("number", "noun", "told"),
    [
        (0, "episode", "0 episodes"),
        (1, "episode", "1 episode"),
        (1200, "bad span", "1,200 bad spans"),
        (1, "batch", "1 batch"),
        (2, "batch", "2 batches"),
        (3, "pass", "3 passes"),
    ],
)
def test_noun_agrees_with_its_number(number, noun, told):
    assert counted(number, noun) == told


def test_word_agrees_with_its_number():
    assert [either(number, "is", "are") for number in (0, 1, 2)] == ["are", "is", "are"]
    assert [plural(number, "pass") for number in (0.5, 1, 1.5)] == ["passes", "pass", "passes"]


def test_range_of_one_number_is_that_number():
    assert (span_text(461, 461), span_text(3, 461)) == ("461", "3 to 461")
    assert (frames_text(4, 5), frames_text(4, 9)) == ("frame 4", "frames 4 to 8")


def test_cut_text_keeps_its_end_and_its_bound():
    text = "cannot read it: " + "x" * 500 + ". Fetch the file again."

    cut = cut_inside(text, 100)

    assert len(cut) <= 100
    assert cut.startswith("cannot read it: x")
    assert cut.endswith("x. Fetch the file again.")
    assert cut_inside(text, len(text)) == text


@pytest.mark.parametrize(
    ("constant", "total", "told"),
    [
        (["number 0"], 6, "1 of its 6 numbers never changes: number 0"),
        (["x", "y"], 6, "2 of its 6 numbers never change: x, y"),
        (["x"], 1, "its number never changes"),
        (["x", "y"], 2, "none of its 2 numbers ever changes"),
        ([str(n) for n in range(10)], 12, "10 of its 12 numbers never change: 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"),
    ],
)
def test_numbers_that_never_change_are_counted_and_named(constant, total, told):
    assert constant_text(constant, total) == told


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        (None, "pip install 'raypipe[depth]'"),
        ({"url": "file:///src/raypipe", "dir_info": {}}, "pip install 'raypipe[depth] @ file:///src/raypipe'"),
        (
            {"url": "https://host/raypipe", "vcs_info": {"vcs": "git", "commit_id": "1a2b"}},
            "pip install 'raypipe[depth] @ git+https://host/raypipe@1a2b'",
        ),
    ],
    ids=["index", "folder", "git"],
)
def test_an_extra_comes_from_where_raypipe_came(tmp_path, monkeypatch, origin, told):
    about = tmp_path / "raypipe-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: raypipe\nVersion: 0.1.0\n")
    if origin:
        (about / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr(terminal, "__file__", str(tmp_path / "raypipe/text/terminal.py"))

    assert how_to_install("depth") == told


def test_an_extra_of_a_clone_is_installed_from_the_clone():
    command = how_to_install("depth")

    assert command.startswith("pip install --editable '/")
    assert command.endswith("[depth]'")


def test_a_number_that_does_not_fit_into_a_table_is_not_another_number():
    rows = [["0", *["1,200,000"] * 5, "NOT exactly once"]]
    table = rows_table(["epoch", "frames", "emitted", "skipped", "repeated", "left over", "verdict"], rows, ["verdict"])
    console = Console(width=50, file=io.StringIO())

    console.print(table)

    told = console.file.getvalue()
    assert "NOT" in told
    numbers = [word for word in told.split() if word[0].isdigit()]
    assert len(numbers) == 6
    assert all(number in ("0", "1,200,000") or number.endswith("…") for number in numbers)
