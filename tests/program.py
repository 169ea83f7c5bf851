"""The ``raypipe`` program, run in this process: a new one takes a second to import what a command needs."""

import io
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from raypipe.cli import main

PROGRAM = Path(sys.executable).parent / "raypipe"
"""The installed one, for tests that want a process of its own."""


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def run_program(*arguments) -> Done:
    """Run the program with these arguments; an error that it does not handle is raised here."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["raypipe", *map(str, arguments)]
    code = 0
    with patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        # As in a process of its own: a warning is printed.
        warnings.simplefilter("default")
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Done(code, out.getvalue(), err.getvalue())
