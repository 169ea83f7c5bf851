"""A module imports only from lower layers, and heavy libraries stay in their homes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import raypipe

PACKAGE = Path(raypipe.__file__).parent

LAYERS = [
    {"errors", "limits", "requests", "wording"},
    {"boxes"},
    {"hub", "filecache", "writable", "terminal", "specs", "video_writer"},
    {"storage"},
    {"metadata"},
    {"plan", "window", "rows", "video", "metrics", "skips"},
    {"actions"},
    {"decode", "account", "progress", "row_features", "cluster_gate", "video_format", "selection"},
    {"action_stats"},
    {"dataset", "packed", "download"},
    {"schema"},
    {"normalise"},
    {"mixture"},
    {"block", "sizes"},
    {"liverows", "source"},
    {"batch", "clipping", "meeting", "gauges", "loader_spec"},
    {"transforms", "remote_meeting"},
    {"assembly"},
    {"run"},
    {"keeper", "rank_job"},
    {"stand"},
    {"ahead"},
    {"loader", "feeder", "local"},
    {"config"},
    {"pipeline"},
    {"train", "testing", "info", "mixture_info", "stats_report", "audit"},
    {"validate", "lerobot"},
    {"reshard"},
    {"views", "bench"},
    {"cli"},
    {"__main__"},
]

# `bench` measures the libraries themselves: the floor is torchcodec alone, and the peers are theirs.
HOMES = {
    "torch": {
        "decode",
        "dataset",
        "normalise",
        "batch",
        "assembly",
        "transforms",
        "loader",
        "loader_spec",
        "train",
        "lerobot",
        "testing",
        "video_writer",
        "views",
        "bench",
    },
    "torchcodec": {"decode", "testing", "video_writer", "bench"},
    "matplotlib": {"validate", "views", "bench"},
    "PIL": {"decode", "testing"},
    # decode has the executor whose clips are Ray tasks.
    "ray": {
        "decode",
        "source",
        "cluster_gate",
        "gauges",
        "feeder",
        "pipeline",
        "train",
        "reshard",
        "validate",
        "bench",
    },
    "huggingface_hub": {"hub"},
    "rerun": {"views"},
    "lerobot": {"lerobot", "bench"},
}


def modules():
    """Yield every module of the package: its stage (top-level name) and its file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        stage = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if stage != "__init__":
            yield stage, path


def imports(path):
    """Yield the dotted names that a file imports, also inside functions, but not those for type checkers only."""
    tree = ast.parse(path.read_text())
    only_types = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in only_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module


def layer_of(stage):
    found = [number for number, layer in enumerate(LAYERS) if stage in layer]
    assert found, f"{stage!r} has no layer: add it to LAYERS"
    return found[0]


@pytest.mark.parametrize(("stage", "path"), list(modules()), ids=lambda value: str(getattr(value, "name", value)))
def test_a_module_imports_only_from_lower_layers(stage, path):
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "raypipe" and len(parts) > 1 and parts[1] != stage:
            assert layer_of(parts[1]) < layer_of(stage), f"{path.name} imports {name}"


@pytest.mark.parametrize(("stage", "path"), list(modules()), ids=lambda value: str(getattr(value, "name", value)))
def test_heavy_libraries_are_imported_in_their_homes_only(stage, path):
    for name in imports(path):
        library = name.split(".")[0]
        assert stage in HOMES.get(library, {stage}), f"{path.name} imports {library}"


def test_every_listed_layer_exists():
    stages = {stage for stage, _ in modules()}

    assert set.union(*LAYERS) == stages


@pytest.mark.parametrize("code", ["import raypipe", "import raypipe.cli", "import raypipe; raypipe.open_dataset"])
def test_importing_loads_neither_torch_nor_ray_nor_plots(code):
    check = f"{code}; import sys; print([m for m in ('torch', 'ray', 'matplotlib', 'torchcodec') if m in sys.modules])"

    printed = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"


@pytest.mark.parametrize("code", ["raypipe.Pipeline", "raypipe.train"])
def test_making_a_pipeline_loads_no_codec(code):
    # Ray Train's controller and its keeper of datasets have the pipeline too, and decode nothing.
    check = f"import raypipe; {code}; import sys; print('torchcodec' in sys.modules)"

    printed = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "False"
