"""The code of the page on LeRobot runs as printed. Runs where lerobot is installed: `make test-lerobot`."""

from contextlib import chdir

import pytest
from doc_pages import PAGES

from raypipe.testing import SynthSpec, numbered_cameras, write_dataset

pytest.importorskip("lerobot", reason="lerobot is not installed")


@pytest.mark.filterwarnings("default")
def test_code_of_the_page_on_lerobot_runs_as_printed(tmp_path):
    from run_pages import run_page

    cameras = numbered_cameras(1, "96x96", "h264", gop=2)
    write_dataset(tmp_path / "demo-data", SynthSpec(lengths=(12, 9), cameras=cameras))

    with chdir(tmp_path):
        run_page(PAGES / "lerobot.md", tmp_path)

    assert (tmp_path / "run/checkpoints/000004/raypipe/train.json").exists()
