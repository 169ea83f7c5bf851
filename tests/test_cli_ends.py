"""How the program ends: exit codes, full disks, closed pipes, names that would steer the terminal."""

import pytest
from program import run_program

import raypipe
import raypipe.info


@pytest.fixture
def broken(monkeypatch):
    def describe(_root: str) -> None:
        raise RuntimeError("no such\nluck \x1b[31m")

    monkeypatch.setattr(raypipe.info, "describe", describe)


@pytest.mark.usefixtures("broken")
def test_an_unexpected_error_has_its_own_exit_code_and_asks_for_a_report():
    done = run_program("info", "somewhere")

    assert done.returncode == 3
    assert done.stderr.startswith("raypipe: unexpected RuntimeError: no such luck \\x1b[31m. ")
    assert raypipe.__version__ in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("broken")
def test_debug_adds_the_traceback_and_keeps_the_exit_code():
    done = run_program("info", "somewhere", "--debug")

    assert done.returncode == 3
    assert "Traceback" in done.stderr
