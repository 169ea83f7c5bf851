"""Pages: every text is escaped, parts of a page are not escaped twice, and a wheel has the templates."""

import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from raypipe.text import make_page, page_part, page_table

EVIL = "<script>alert('x')</script> & \"more\""
SHOWN = "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &#34;more&#34;"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("heading", (EVIL,)),
        ("text", (EVIL,)),
        ("lines", ([(EVIL, EVIL)],)),
        ("image", (b"png", EVIL)),
        ("picture", (b"png", EVIL)),
        ("video", (b"mp4", EVIL)),
        ("share", (EVIL, 3)),
        ("names", ([EVIL],)),
        ("view", (EVIL, "")),
    ],
)
def test_a_text_is_never_markup(name, values):
    part = page_part(name, *values)

    assert "<script>" not in part
    assert "'x'" not in part
    assert SHOWN in part


def test_parts_are_not_escaped_again_in_a_table_and_a_page():
    share = page_part("share", "5%", 3)

    table = page_table(("dataset", "share"), [(EVIL, share)])
    page = make_page(EVIL, page_part("view", "title", table))

    assert f"<td>{SHOWN}</td><td>5%<div class='bar'" in table
    assert f"<title>{SHOWN}</title>" in page
    assert table in page


def test_columns_of_numbers_are_aligned_right():
    table = page_table(("name", "count", "share"), [("a", "1,200", "5.0%"), ("b", "", "95.0%")])

    assert table.count("class='number'") == 6
    assert "<td>a</td><td class='number'>1,200</td>" in table


@pytest.mark.parametrize("room", ["text", "validate"])
def test_the_templates_are_part_of_the_package(room):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())

    assert project["tool"]["setuptools"]["package-data"][f"raypipe.{room}"] == ["templates/*"]
    assert all(one.is_file() for one in files(f"raypipe.{room}").joinpath("templates").iterdir())
