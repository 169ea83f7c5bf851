"""The command behind `make test`: all tests, in two processes side by side.

The tests of the first process wait most of their time for processes of Ray to start; the second uses that time. Each
takes about as long as the other.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

FIRST = ("tests/contracts", "tests/e2e")


def main() -> int:
    """Run both, print the output of the second at the end, and return an exit code other than 0 if one failed."""
    root, pytest = Path(__file__).parents[1], [sys.executable, "-m", "pytest"]
    # Everything that the first does not name: no test is left out.
    others = ["tests", *(f"--ignore={folder}" for folder in FIRST)]
    with tempfile.TemporaryFile() as output:
        with (
            subprocess.Popen([*pytest, *FIRST], cwd=root) as first,
            subprocess.Popen([*pytest, *others], cwd=root, stdout=output, stderr=subprocess.STDOUT) as second,
        ):
            codes = (first.wait(), second.wait())
        output.seek(0)
        sys.stdout.buffer.write(output.read())
    sys.stdout.flush()
    return max(abs(code) for code in codes)


if __name__ == "__main__":
    sys.exit(main())
