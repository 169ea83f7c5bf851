"""The command behind `make test`: all tests, in two processes side by side.

The tests of the first process wait most of their time for processes of Ray to start; the second uses that time. Each
takes about as long as the other.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

FIRST = ("contracts", "e2e", "fuzz")
LAST = "faults"
"""They begin when the first process is nearly done: two Rays are in each other's way."""


def main() -> int:
    """Run both, print the output of the second at the end, and return an exit code other than 0 if one failed."""
    tests, pytest = Path(__file__).parent, [sys.executable, "-m", "pytest"]
    first = [tests / name for name in FIRST]
    # Everything that the first does not name: no test is left out.
    second = [path for path in tests.iterdir() if path not in first and (path.is_dir() or path.name[:5] == "test_")]
    second = [path for path in sorted(second) if path.name != LAST and path.name[0] not in "._"] + [tests / LAST]
    with tempfile.TemporaryFile() as output:
        with (
            subprocess.Popen([*pytest, *first], cwd=tests.parent) as one,
            subprocess.Popen([*pytest, *second], cwd=tests.parent, stdout=output, stderr=subprocess.STDOUT) as other,
        ):
            codes = (one.wait(), other.wait())
        output.seek(0)
        sys.stdout.buffer.write(output.read())
    sys.stdout.flush()
    return max(abs(code) for code in codes)


if __name__ == "__main__":
    sys.exit(main())
