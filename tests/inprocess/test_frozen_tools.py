"""What the commands print as JSON, their options, and the names that the site documents: as they were frozen.

There may be more keys, options and names; none goes away. Run with ``PYTHONPATH=tests``, this file writes the frozen
ones that are not there yet.
"""

import json
import re
import shutil
import tempfile
from importlib import import_module
from pathlib import Path

import pytest
import typer
from ray import cloudpickle
from test_frozen import FROZEN, assert_kept, freeze, load, print_json, write_sources

from raypipe import cli

PAGES = Path(__file__).parents[2] / "docs/pages/api"

TOLD = {
    "info of a dataset": ("info", "camera"),
    "info of a mixture": ("info", "mixture.yaml"),
    "stats of a dataset": ("stats", "rows"),
    "stats of a mixture": ("stats", "mixture.yaml"),
    "validate a dataset": ("validate", "camera"),
    "validate a damaged dataset": ("validate", "damaged"),
    "validate a mixture": ("validate", "mixture.yaml"),
    "reshard": ("reshard", "rows", "copy"),
}
MOVING = {"root", "out", "mixture", "elapsed_s", "size_bytes", "place"}
"""Places of files, times, and sizes that the version of pyarrow decides."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return write_damaged(write_sources(tmp_path_factory.mktemp("frozen")))


def write_damaged(sources):
    shutil.copytree(sources / "rows", sources / "damaged")
    path = sources / "damaged/meta/info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "total_frames": 5}))
    return sources


def print_told(sources, name):
    command, root, *out = TOLD[name]
    arguments = [command, sources / root, *(Path(tempfile.mkdtemp(dir=sources)) / one for one in out)]
    expected = (1,) if root == "damaged" else (0,)
    return without_moving(print_json(*arguments, "--json", codes=expected))


def without_moving(told):
    if isinstance(told, dict):
        return {key: without_moving(value) for key, value in told.items() if key not in MOVING}
    return [without_moving(value) for value in told] if isinstance(told, list) else told


def read_options():
    """Return the options of every command, and how many arguments it takes."""
    commands = typer.main.get_command(cli.app).commands
    return {
        name: sorted(option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))
        for name, command in commands.items()
    }


def read_documented():
    pages = "\n".join(path.read_text() for path in PAGES.glob("*.md"))
    return sorted(set(re.findall(r"^::: (raypipe[\w.]*)", pages, flags=re.MULTILINE)))


@pytest.mark.parametrize("name", TOLD)
def test_a_command_prints_what_it_printed(sources, name):
    assert_kept(load("told.json")[name], print_told(sources, name))


def test_commands_have_the_options_that_they_had():
    now = read_options()

    assert {name: set(options) - set(now.get(name, ())) for name, options in load("options.json").items()} == {
        name: set() for name in load("options.json")
    }


@pytest.mark.parametrize("path", load("documented.json") if (FROZEN / "documented.json").exists() else ())
def test_a_documented_name_is_where_it_was(path):
    module, _, name = path.rpartition(".")

    found = getattr(import_module(module), name) if module else import_module(name)

    assert found.__doc__


def write_frozen(sources):
    """Write the files that are not there yet."""
    freeze("told.json", lambda: {name: print_told(sources, name) for name in TOLD})
    freeze("options.json", read_options)
    freeze("documented.json", read_documented)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_frozen(write_damaged(write_sources(Path(folder) / "sources")))


@pytest.mark.parametrize("name", ["actions", "config", "download", "metrics", "skips"])
def test_documented_modules_of_before_travel_to_the_workers_of_ray(name):
    module = import_module(f"raypipe.{name}")

    assert cloudpickle.loads(cloudpickle.dumps(module)) is module
