"""The notebooks of ``examples/`` run from the first cell to the last, and are kept without their outputs."""

import html
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from doc_pages import load_docs

EXAMPLES = Path(__file__).parents[1] / "examples"
RUNNER = Path(__file__).with_name("notebook_run.py")
NOTEBOOKS = ("explore.ipynb", "train_with_ray_train.ipynb")


def run_notebook(name: str, folder: Path):
    """Run a notebook in `folder` and return it with its outputs."""
    done = subprocess.run(
        [sys.executable, RUNNER, EXAMPLES / name, folder / name],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HOME": str(folder)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return nbformat.read(folder / name, as_version=4)


def outputs_of(notebook) -> list:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def shown(notebook) -> str:
    """All pages and texts that the cells have given."""
    texts = [output.get("text", "") for output in outputs_of(notebook)]
    data = [output.get("data", {}) for output in outputs_of(notebook)]
    return "\n".join([*texts, *(one.get(kind, "") for one in data for kind in ("text/html", "text/plain"))])


def check_site(folder: Path, name: str, monkeypatch) -> None:
    """Check that the page of the site has what the cells have given, and no path of who built it."""
    hook = load_docs("notebooks")
    monkeypatch.setattr(hook, "RUN", folder)
    page = SimpleNamespace(meta={})

    written = hook.on_page_markdown(f"<!-- notebook: {name} -->", page=page)
    content = hook.on_page_content(written, page=page)

    assert content.count("class='raypipe-view'") == 9
    assert "'order_version'" in html.unescape(content)
    assert str(folder) not in content
    changed = json.loads((folder / name).read_text())
    changed["cells"][1]["source"] = "pass"
    (folder / name).write_text(json.dumps(changed))
    # Outputs of other cells than those of today are not shown.
    assert "class='raypipe-view'" not in "".join(map(hook.outputs_html, hook.read_cells(name)))


def test_every_notebook_is_run():
    assert sorted(path.name for path in EXAMPLES.glob("*.ipynb")) == sorted(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_without_outputs(name):
    notebook = nbformat.read(EXAMPLES / name, as_version=4)

    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]

    assert cells
    assert not [cell.id for cell in cells if cell.outputs or cell.execution_count is not None]


@pytest.mark.timeout(900)
def test_explore_goes_from_a_dataset_to_batches_and_resumes(tmp_path, monkeypatch):
    notebook = run_notebook("explore.ipynb", tmp_path)

    told = shown(notebook)
    # A card, an episode with its video, three plans, two batches, a run and a mixture.
    assert told.count("class='raypipe-view'") == 9
    assert told.count("<video ") == 1
    assert "a batch of 32 samples" in told
    assert "'order_version'" in told
    check_site(tmp_path, "explore.ipynb", monkeypatch)


@pytest.mark.timeout(900)
def test_training_goes_on_after_a_failure_and_on_more_workers(tmp_path):
    notebook = run_notebook("train_with_ray_train.ipynb", tmp_path)

    assert "exactly once" in shown(notebook)
    assert any("image/png" in output.get("data", {}) for output in outputs_of(notebook))
