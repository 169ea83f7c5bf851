"""The house keeps its plan: few rooms, in layers, each entered through its door; heavy libraries have their homes."""

import ast
import compileall
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import raypipe

PACKAGE = Path(raypipe.__file__).parent

LAYERS = [
    {"errors"},
    {"text"},
    {"storage", "plan"},
    {"format"},
    {"decode", "account"},
    {"dataset", "testing"},
    {"mixture", "feed"},
    {"loader", "validate"},
    {"pipeline", "reshard"},
    {"train", "views", "bench"},
    {"lerobot"},
    {"cli"},
]
MOST_LAYERS, MOST_ENTRIES = 12, 21
MOST_LINES = 500

# `bench` measures the library itself: the floor is torchcodec alone.
HOMES = {
    "torch": {
        "decode",
        "dataset.dataset",
        "mixture.normaliser",
        "loader",
        "train",
        "lerobot",
        "testing.video",
        "views.pixels",
    },
    "torchcodec": {"decode.spec", "decode.videos", "testing.video", "bench"},
    "matplotlib": {"text.figures", "text.pages", "views"},
    "PIL": {"decode.pixels", "testing.write"},
    "ray": {
        "storage.request_budget",
        # The executor whose clips are Ray tasks.
        "decode.executors",
        "feed",
        "pipeline.pipeline",
        "train",
        "validate.run",
        "bench.loaders",
    },
    "huggingface_hub": {"storage.hub"},
    "rerun": {"views.episode"},
    "lerobot": {"lerobot"},
}


def find_modules():
    """Return the file of every module of the package by its dotted name, without ``raypipe``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = find_modules()
ROOMS = sorted(name for name, path in MODULES.items() if path.parent.parent == PACKAGE and path.name == "__init__.py")
DOORS = sorted(name for name, path in MODULES.items() if name and path.name == "__init__.py")
IN_ROOMS = [name for name in MODULES if name not in ("", "__main__")]


def entry_of(module):
    return module.partition(".")[0]


@cache
def parsed(path):
    return ast.parse(path.read_text())


def imports(path, also_for_types=False):
    """Yield what a file imports, also inside functions, as (module, name); the name is "" for a whole module."""
    tree = parsed(path)
    only_types = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for child in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in only_types and not also_for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from ((node.module, alias.name) for alias in node.names)


def own_imports(module):
    """Yield what a module imports of the package, without ``raypipe.``, also what is for type checkers only."""
    for imported, name in imports(MODULES[module], also_for_types=True):
        inner = f"{imported}.{name}".removeprefix("raypipe.").rstrip(".")
        if inner and imported.startswith("raypipe") and inner in MODULES:
            yield inner, ""
        elif imported.startswith("raypipe."):
            yield imported.removeprefix("raypipe."), name


def layer_of(entry):
    found = [number for number, layer in enumerate(LAYERS) if entry in layer]
    assert found, f"{entry!r} has no layer: put its modules into a room, or add it to LAYERS"
    return found[0]


def test_every_entry_has_its_layer_and_there_are_few():
    entries = {entry_of(module) for module in IN_ROOMS}

    assert set.union(*LAYERS) == entries
    assert len(entries) <= MOST_ENTRIES
    assert len(LAYERS) <= MOST_LAYERS


@pytest.mark.parametrize("module", IN_ROOMS)
def test_a_module_imports_only_from_lower_layers(module):
    entry = entry_of(module)
    for imported, name in own_imports(module):
        other = entry_of(imported)
        assert other == entry or layer_of(other) < layer_of(entry), f"{module} imports {imported}.{name}"


@pytest.mark.parametrize("module", IN_ROOMS)
def test_a_module_is_no_lump(module):
    assert len(MODULES[module].read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("module", IN_ROOMS)
def test_a_room_is_entered_through_its_door(module):
    for imported, name in own_imports(module):
        if entry_of(imported) != entry_of(module):
            assert "." not in imported, f"{module} imports {name or 'all'} of {imported}, past its door"


@pytest.mark.parametrize("module", IN_ROOMS)
def test_a_module_does_not_use_the_door_of_its_own_room(module):
    assert entry_of(module) not in {imported for imported, _ in own_imports(module) if "." in module}


@pytest.mark.parametrize("module", MODULES)
def test_heavy_libraries_are_imported_in_their_homes_only(module):
    for imported, _ in imports(MODULES[module]):
        homes = HOMES.get(imported.partition(".")[0], {""})
        assert any(f"{module}.".startswith(f"{home}." if home else "") for home in homes), f"{module}: {imported}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_door_gives_what_it_says(room):
    door = import_module(f"raypipe.{room}")
    tree = parsed(MODULES[room])
    for_types = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("raypipe.")
        for alias in node.names
    }

    assert set(door.__all__) <= set(for_types)
    assert {name: getattr(door, name) for name in for_types} == {
        name: getattr(import_module(module), name) for name, module in for_types.items()
    }
    assert not {name for name in for_types if f"{room}.{name}" in MODULES}, "a name of the door hides a module"
    with pytest.raises(AttributeError, match=f"'raypipe.{room}' has no attribute 'nothing'"):
        _ = door.nothing


@pytest.mark.parametrize("room", DOORS)
def test_a_door_says_what_is_in_the_room(room):
    told = import_module(f"raypipe.{room}").__doc__
    folder = MODULES[room].parent
    named = set(re.findall(r"[\w/]+\.py\b", told))
    inside = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    rooms_inside = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}

    assert not inside - named
    assert not {name for name in rooms_inside if name not in told}
    assert not {name for name in named if not (folder / name).is_file()}


def test_a_name_means_one_thing():
    homes = defaultdict(set)
    for module, path in MODULES.items():
        for node in parsed(path).body:
            name = ""
            if isinstance(node, ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
            plain = name.lstrip("_")
            if plain[:1].isupper() and not name.isupper():
                homes[plain].add(module)

    assert {name: sorted(found) for name, found in homes.items() if len(found) > 1} == {}


@pytest.mark.parametrize("code", ["", "import raypipe.cli", "raypipe.open_dataset", "raypipe.Pipeline"])
def test_importing_loads_neither_torch_nor_ray_nor_plots(code):
    heavy = ("torch", "ray", "matplotlib", "torchcodec", "huggingface_hub", "pyarrow.dataset")
    if code.startswith("raypipe."):
        heavy = heavy[:4]
    check = f"import raypipe; {code}\nimport sys; print([m for m in {heavy} if m in sys.modules])"

    printed = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"


def test_doors_open_where_a_program_comes_without_its_sources(tmp_path):
    copy = shutil.copytree(PACKAGE, tmp_path / "raypipe", ignore=shutil.ignore_patterns("__pycache__"))
    assert compileall.compile_dir(copy, quiet=1, legacy=True)
    for source in copy.rglob("*.py"):
        source.unlink()
    check = "import raypipe; print(raypipe.__file__, raypipe.Pipeline.__name__, raypipe.ResumeError.__name__)"

    printed = subprocess.run(
        [sys.executable, "-c", check],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert printed.split() == [str(copy / "__init__.pyc"), "Pipeline", "ResumeError"]


def test_entering_rooms_loads_none_of_their_modules():
    doors = ", ".join(f"raypipe.{room}" for room in ROOMS)
    check = f"import {doors}, sys; print([m for m in sys.modules if m.startswith('raypipe.') and m.count('.') > 1])"

    printed = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"


@pytest.mark.parametrize("code", ["raypipe.train", "import raypipe.reshard.run"])
def test_what_decodes_nothing_loads_no_codec(code):
    # Ray Train's controller and its keeper of datasets have the pipeline too; copies of packets need no decoder.
    check = f"import raypipe; {code}; import sys; print('torchcodec' in sys.modules)"

    printed = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "False"
