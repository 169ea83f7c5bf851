"""Small wrong changes of raypipe, each of which the tests of a promise must find: ``make mutants`` runs them.

A test that passes whatever the code does holds nothing. Copies the package and the tests to a temporary folder, makes
one change there at a time, and runs the tests that README.md names for the promise. They must fail: the change is
*killed*. One that *survived* is a hole in the tests. The work tree is never touched.

::

    python tests/mutants.py                      all of them
    python tests/mutants.py --only TEXT          those whose name or promise has the text in it
    python tests/mutants.py --list
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mutant_cases import MUTANTS, Mutant

ROOT: Final = Path(__file__).resolve().parent.parent
_COPIED: Final = ("raypipe", "tests", "examples", "pyproject.toml", "README.md")
_MOST_S: Final = 600
_WIDTH: Final = 200
_PASSED, _FAILED = 0, 1
"""What pytest's exit code says; all others are of tests that could not run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the tests ended on a tree."""

    exit_code: int
    told: str
    """The test that failed, or the last words of pytest."""


def promises_of_readme() -> dict[str, tuple[str, ...]]:
    """Return the promises of the README's table, and the test files and folders that hold each."""
    table = (ROOT / "README.md").read_text().partition("[start:promises]")[2].partition("[end:promises]")[0]
    rows = re.findall(r"^\| \*\*(.+?)\*\*.* \| (.+) \|$", table, flags=re.MULTILINE)
    return {name: tuple(re.findall(r"`(tests/[^`]+)`", held)) for name, held in rows}


def mutated_text(mutant: Mutant, root: Path = ROOT) -> str:
    """Return the file of a mutant with its change.

    Raises:
        LookupError: the text that it replaces is not there exactly once.
    """
    text = (root / "raypipe" / mutant.file).read_text()
    if (times := text.count(mutant.old)) != 1:
        raise LookupError(f"{mutant.name}: raypipe/{mutant.file} has {mutant.old!r} {times} times, expected once")
    return text.replace(mutant.old, mutant.new)


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Give a copy of the package and its tests, beside the same data."""
    with tempfile.TemporaryDirectory(prefix="raypipe-mutants-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        for name in _COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, tree / name)
        shared = ROOT.parent / "shared"
        if shared.exists():
            (Path(folder) / "shared").symlink_to(shared)
        yield tree


@contextmanager
def mutated(tree: Path, mutant: Mutant) -> Iterator[None]:
    """Make one change in a tree for as long as the context lasts."""
    path = tree / "raypipe" / mutant.file
    original, changed = path.read_text(), mutated_text(mutant, tree)
    path.write_text(changed)
    try:
        yield
    finally:
        path.write_text(original)


def run_tests(tree: Path, tests: Sequence[str]) -> Outcome:
    """Run tests on a tree until one fails; one that takes too long has failed."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--durations=0", "--hypothesis-seed=0"]
    command = [sys.executable, "-m", "pytest", *options, "--hypothesis-profile=mutants", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=_MOST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(_FAILED, f"nothing ended within {_MOST_S} s")
    lines = (done.stdout + done.stderr).strip().splitlines() or [""]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return Outcome(done.returncode, (failed or lines[-1:])[0])


def check_unchanged(tree: Path, mutants: Sequence[Mutant]) -> None:
    """Raise unless all tests of the mutants pass where nothing is changed."""
    outcome = run_tests(tree, sorted({test for mutant in mutants for test in mutant.tests}))
    if outcome.exit_code != _PASSED:
        raise RuntimeError(f"the tests do not pass without any change: {outcome.told}")


def try_mutant(tree: Path, mutant: Mutant) -> bool:
    """Print how the tests of a mutant end with its change, and return whether it is killed."""
    started = time.monotonic()
    with mutated(tree, mutant):
        outcome = run_tests(tree, mutant.tests)
    verdict = {_PASSED: "SURVIVED", _FAILED: "killed"}.get(outcome.exit_code, "ERROR")
    took_s = time.monotonic() - started
    print(f"{verdict:8} {mutant.promise}: {mutant.name} ({took_s:.0f} s): {outcome.told}"[:_WIDTH], flush=True)
    return outcome.exit_code == _FAILED


def main() -> int:
    """Run the mutants that the command line names; return 0 where all of them are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose name or promise has the text in it")
    parser.add_argument("--list", action="store_true", help="print them and run nothing")
    given = parser.parse_args()
    chosen = [one for one in MUTANTS if given.only in one.name or given.only in one.promise]
    if given.list:
        print("\n".join(f"{one.promise}: {one.name} (raypipe/{one.file})" for one in chosen))
        return 0
    if not chosen:
        parser.error(f"no mutant has {given.only!r} in its name or promise; see --list")
    with copied_tree() as tree:
        check_unchanged(tree, chosen)
        alive = [one.name for one in chosen if not try_mutant(tree, one)]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} killed")
    return bool(alive)


if __name__ == "__main__":
    sys.exit(main())
