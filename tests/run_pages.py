"""Runs the code of pages as a reader would: ``python tests/run_pages.py FOLDER PAGE...`` writes FOLDER/errors.json.

Each page has a folder and names of its own; all share one demo dataset. A page that imports Ray has one while it runs,
and the others have none. Python runs as printed, lines of ``raypipe`` through the program's own entry, and a mixture
file is written and read.
"""

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
from doc_pages import PAGES, README, Block, blocks, commands, has_placeholder
from hub_server import HubServer
from ray_session import end_ray
from s3_server import S3Server

CHECKS = {
    README: """
(last,) = again.steps(1)
assert last["action"].shape == (32, 16, 6) and last["observation.images.camera_0"].shape == (32, 3, 96, 96)
""",
    PAGES / "ray-train.md": "assert result.metrics['train/num_ranks'] == 1",
    PAGES / "mixtures.md": """
assert scaled["action"].shape == (32, 16, 6) and set(scaled["robot_type"]) == {"raypipe_synth", "arm"}
assert set(batch["action_dim_is_pad"].sum(1).tolist()) == {0, 2}
assert mixture.shares["arm"] * 3 in range(len(mixture) - 2, len(mixture) + 3)
""",
    PAGES / "bad-data.md": """
assert not checked.skipped and checked.account().parts[0].emitted.num_values == len(ds)
""",
    PAGES / "actions-and-language.md": """
assert batch["observation.language.tokens"].shape == (32, 48)
assert scaled["action"].shape == (32, 16, 6) and commands.shape == (32, 16, 6)
""",
    PAGES / "resume.md": """
uninterrupted = pipe.loader()
assert [batch["index"].tolist() for batch in uninterrupted.steps(6)][-1] == following["index"].tolist()
""",
    PAGES / "choosing-settings.md": """
assert batch["observation.images.camera_0"].shape == (32, 3, 48, 48)
assert len({same.plan(world_size=ranks).num_steps for ranks in (24, 8, 2)}) == 1
""",
    PAGES / "faq.md": """
assert batch["observation.images.camera_0"].shape == (32, 2, 3, 96, 96)
assert [batch["action"].equal(other["action"]) for other in same.loader().steps(1)] == [True]
""",
}
"""What must hold after a page, in its own names: what its comments say."""


def run_page(page: Path, folder: Path) -> None:
    """Run all blocks of a page in order, in a folder with the demo dataset.

    Raises:
        whatever a block does; the traceback has the page and its line.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            _run_python(block, page, folder, names)
        elif block.language == "sh":
            _run_commands(block, folder)
        elif block.language == "yaml":
            _read_mixture(block)
    exec(compile(CHECKS.get(page, ""), f"check of {page.name}", "exec"), names)


def _run_python(block: Block, page: Path, folder: Path, names: dict[str, Any]) -> None:
    # Empty lines before it: a traceback has the line of the page.
    code = "\n" * (block.line - 1) + block.code.replace("/tmp/runs", str(folder / "runs"))
    exec(compile(code, str(page), "exec"), names)


def _run_commands(block: Block, folder: Path) -> None:
    from raypipe.cli import main

    for arguments in commands(block):
        if has_placeholder(arguments):
            continue
        argv = ["raypipe", *(argument.replace("/tmp/runs", str(folder / "runs")) for argument in arguments)]
        try:
            with patch.object(sys, "argv", argv):
                main()
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"{' '.join(argv)} ended with {ended.code}") from ended


def _read_mixture(block: Block) -> None:
    from raypipe.mixture import read_mixture_file

    Path("mixture.yaml").write_text(block.code)
    read_mixture_file("mixture.yaml")


def main() -> None:
    """Run the pages; the file has the error of every page that has one."""
    from raypipe.testing import SynthSpec, numbered_cameras, varied_lengths, write_dataset

    folder = Path(sys.argv[1]).resolve()
    spec = SynthSpec(lengths=varied_lengths(20, 30, seed=0), cameras=numbered_cameras(2, "96x96", "h264", gop=2))
    write_dataset(folder / "demo-data", spec)
    with remote_datasets(folder):
        errors = run_pages(folder)
    (folder / "errors.json").write_text(json.dumps(errors))


def run_pages(folder: Path) -> dict[str, str]:
    """Return the error of every page that has one."""
    errors = {}
    for page in [Path(page).resolve() for page in sys.argv[2:]]:
        own = folder / f"{page.parent.name}-{page.stem}"
        own.mkdir()
        began = time.monotonic()
        (own / "demo-data").symlink_to(folder / "demo-data")
        try:
            with chdir(own), ray_for(page):
                run_page(page, own)
        except Exception:
            errors[str(page)] = traceback.format_exc()
        print(f"{page.name} took {time.monotonic() - began:.1f} s", flush=True)
    return errors


@contextmanager
def ray_for(page: Path) -> Iterator[None]:
    """Have a Ray while a page that imports it runs."""
    if not any(re.search(r"^(import|from) ray\b", block.code, flags=re.MULTILINE) for block in blocks(page)):
        yield
        return
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        yield
    finally:
        end_ray()


@contextmanager
def remote_datasets(folder: Path) -> Iterator[None]:
    """Let the names of the page on remote data lead to servers on loopback that have the demo dataset."""
    with HubServer() as hub, S3Server("bucket") as s3:
        hub.add_repo("lerobot/pusht", folder / "demo-data", tags=("v3.0",))
        s3.add("pusht", folder / "demo-data")
        os.environ.update({**hub.environment(folder / "hub"), **s3.environment()})
        with hub.as_hub(folder / "hub"):
            yield


if __name__ == "__main__":
    main()
