"""The documentation: its code runs as printed, what it names exists, and the site builds from files alone."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from doc_pages import PAGES, README, REPOSITORY, all_pages, blocks, commands, fenced, load_docs, prose

import raypipe
from raypipe.cli import app

# `py` is run by torchrun, in tests/e2e, or where optional packages are, in tests/inprocess; blocks without a language
# are drawings and output.
LANGUAGES = {"", "python", "py", "sh", "yaml"}
# The page on LeRobot is run where lerobot is installed, by tests/inprocess/test_lerobot_page.py.
RUN = [
    page
    for page in all_pages()
    if {block.language for block in blocks(page)} & {"python", "sh", "yaml"} and page.name != "lerobot.md"
]
LINKED = [page for page in (*all_pages(), REPOSITORY / "CHANGELOG.md", REPOSITORY / "BENCHMARKS.md") if page.exists()]
MODULES = ("train", "lerobot", "testing", "validate", "reshard")


def short(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.fixture(scope="module")
def page_errors(tmp_path_factory):
    """What failed, by page: all of them are run in one process, which has one Ray."""
    folder = tmp_path_factory.mktemp("pages")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("run_pages.py"), folder, *RUN],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HOME": str(folder)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "errors.json").read_text())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; a warning would have ended the build."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", out]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, "--config-file", REPOSITORY / "docs" / "mkdocs.yml"],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return out


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", RUN, ids=short)
def test_code_of_a_page_runs_as_printed(page, page_errors):
    assert page_errors.get(str(page), "") == ""


@pytest.mark.parametrize("page", all_pages(), ids=short)
def test_page_has_no_block_that_no_test_runs(page):
    assert {block.language for block in blocks(page)} <= LANGUAGES


def test_scripts_that_other_tests_run_stand_on_these_pages():
    assert [short(page) for page in all_pages() if fenced("py", page)] == [
        "docs/pages/augmentation.md",
        "docs/pages/other-trainers.md",
        "docs/pages/ray-train.md",
    ]


@pytest.mark.parametrize("page", all_pages(), ids=short)
def test_shown_commands_have_the_arguments_and_options_that_the_program_takes(page):
    group = typer.main.get_command(app)
    shown = [words for block in blocks(page) if block.language in ("", "sh") for words in commands(block)]

    for name, *arguments in shown:
        assert name in group.commands, f"raypipe {name}"
        # Parses as the program does, and runs nothing.
        group.commands[name].make_context(f"raypipe {name}", list(arguments))


@pytest.mark.parametrize("page", [*all_pages(), REPOSITORY / "CHANGELOG.md"], ids=short)
def test_commands_within_sentences_exist_with_their_options(page):
    group = typer.main.get_command(app)

    for inline in re.findall(r"`raypipe ([a-z][^`]*)`", prose(page)):
        name, *rest = inline.split()
        assert name in group.commands, f"raypipe {inline}"
        known = {option for parameter in group.commands[name].params for option in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= known, f"raypipe {inline}"


@pytest.mark.parametrize("page", LINKED, ids=short)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{target} of {short(page)}"
        assert not anchor or anchor in anchors(found), f"{target} of {short(page)}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, by the rule that GitHub and the site share for plain words."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", LINKED, ids=short)
def test_files_that_a_page_names_exist(page):
    named = set(re.findall(r"\b((?:tests|benchmarks|examples)/[\w/.]*\w)", page.read_text()))

    assert not [name for name in named if not (REPOSITORY / name).exists()]


def test_site_loads_nothing_from_elsewhere(site):
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")

    found = {tag for page in site.rglob("*.html") for tag in loads.findall(page.read_text())}

    assert (site / "index.html").exists()
    assert not found


def test_site_has_every_page_of_the_folder(site):
    built = {path.relative_to(site).with_suffix(".md") for path in site.rglob("*.html")}

    assert {path.relative_to(PAGES) for path in PAGES.rglob("*.md")} <= built


@pytest.mark.parametrize("notebook", sorted((REPOSITORY / "examples").glob("*.ipynb")), ids=short)
def test_site_has_every_notebook_cell_by_cell(site, notebook):
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "notebooks" / f"{notebook.stem}.html").read_text()))

    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert "".join(cell["source"]) in page


def test_site_documents_every_public_name(site):
    shown = set(re.findall(r'id="(raypipe[\w.]*)"', "".join(page.read_text() for page in site.rglob("api/*.html"))))
    names = {f"raypipe.{name}" for name in raypipe.__all__}
    for module in MODULES:
        names |= {f"raypipe.{module}.{name}" for name in public_functions(module)}

    assert not names - shown


def public_functions(module: str) -> list[str]:
    """Return the functions and classes that a module offers: by ``__all__``, or those that it defines itself."""
    loaded = __import__(f"raypipe.{module}", fromlist=["_"])
    offered = getattr(loaded, "__all__", None) or [name for name in vars(loaded) if not name.startswith("_")]
    values = {name: getattr(loaded, name) for name in offered}
    # How Ray asks for loaders, and how the command line reads and prints, are no business of a user.
    inner = {"PipelineDataConfig", "parse_spec", "report_lines"}
    return [
        name
        for name, value in values.items()
        if callable(value) and value.__module__.startswith(f"raypipe.{module}") and name not in inner
    ]


def test_drawings_of_docstrings_are_drawn_without_their_colons(site):
    page = (site / "api" / "train.html").read_text()

    assert "resumes from the checkpoint" in page
    assert "<p>::</p>" not in page


def test_flow_map_is_the_same_in_the_package_the_readme_and_the_pages():
    drawn = [fenced("", page)[0] for page in (README, PAGES / "how-it-works.md")]
    documented = raypipe.__doc__.split("::\n\n")[1].split("\n\n")[0]

    assert [line.split() for line in drawn[0].splitlines()] == [line.split() for line in documented.splitlines()]
    assert drawn[0] == drawn[1]


def test_first_screen_of_the_readme_has_what_a_newcomer_looks_for_in_this_order():
    first = README.read_text().partition("\n## ")[0]

    wanted = ["# raypipe", "[start:what]", "docs/pages/assets/flow.svg", "samples/s", "pip install", "```python"]
    places = [first.find(one) for one in wanted]
    assert -1 not in places
    assert places == sorted(places)
    assert len([line for line in fenced("python")[0].splitlines() if line.strip()]) == 10


def test_figures_of_the_readme_are_those_of_the_benchmark():
    number = re.search(r"\[start:number\] -->(.*?)<!--", README.read_text(), flags=re.DOTALL)[1]
    measured = (REPOSITORY / "BENCHMARKS.md").read_text()
    realistic = measured.partition("## 640x480 AV1")[2].partition("\n## ")[0]
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in realistic.splitlines() if "|" in line}

    (speed, theirs), (cost, their_cost) = (
        re.search(rf"{pattern}", number).groups()
        for pattern in (
            r"(\d+) samples/s, where LeRobot's own loader gives (\d+)",
            r"([\d.]+) s per 1,000 samples\s+against ([\d.]+)\.",
        )
    )
    assert (rows["raypipe"][4], rows["raypipe"][1]) == (speed, cost)
    assert (rows["LeRobot map-style"][4], rows["LeRobot map-style"][1]) == (theirs, their_cost)
    assert "LeRobot map-style: lerobot 0.6.1," in measured
    assert "AMD EPYC, 2 cores" in measured


def test_pictures_are_those_that_their_program_draws_from_a_plan():
    pictures = load_docs("pictures")

    for name, draw in pictures.PICTURES.items():
        assert (pictures.ASSETS / name).read_text() == draw()


def test_readme_is_a_first_screen_and_a_list_of_pages():
    linked = set(re.findall(r"\]\((docs/pages/[\w-]+\.md)\)", README.read_text()))

    written = {short(page) for page in PAGES.glob("*.md")} - {"docs/pages/index.md"}
    assert written <= linked
