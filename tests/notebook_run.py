"""Runs a notebook in a process of its own, ``python notebook_run.py IN OUT``: what a kernel leaves ends with it."""

import json
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

CELL_TIMEOUT_S = 400


def run_notebook(source: Path, target: Path) -> None:
    """Write `source` with its outputs to `target`, run by this interpreter in the folder of `target`."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = Path(folder) / "here"
        kernel.mkdir()
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "here", "language": "python"}))
        # Of the folder alone: no kernel that the user has installed.
        specs = KernelSpecManager(kernel_dirs=[folder], ensure_native_kernel=False)
        notebook = nbformat.read(source, as_version=4)
        # Sockets in a folder of its own: no port that another process could reach.
        manager = AsyncKernelManager(
            kernel_name="here", kernel_spec_manager=specs, transport="ipc", ip=f"{folder}/socket"
        )
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=CELL_TIMEOUT_S,
            startup_timeout=CELL_TIMEOUT_S,
            resources={"metadata": {"path": str(target.parent)}},
        )
        try:
            client.execute()
        finally:
            nbformat.write(notebook, target)


if __name__ == "__main__":
    run_notebook(Path(sys.argv[1]), Path(sys.argv[2]))
