"""The command ``raypipe account``: finds the account and its datasets, and checks the run.

It reads ``meta/`` of the datasets and the files of an account; no rows, no pixels.
"""

import os
from dataclasses import dataclass
from typing import Any

from raypipe.account import EpochVerdict, RunAccount, check_account, read_run_account
from raypipe.views.info.run_frames import open_frames


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """The account of a run with its verdicts."""

    run: RunAccount
    root: str
    verdicts: tuple[EpochVerdict, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every epoch is exact."""
        return all(verdict.is_exact for verdict in self.verdicts) and not self.run.problem

    @property
    def exit_code(self) -> int:
        """0 if every epoch is exact, 1 if one is not or the account has a problem, 2 if some cannot be checked."""
        if self.is_exact:
            return 0
        return 1 if self.run.problem or any(one.is_wrong for one in self.verdicts) else 2

    def describe(self) -> tuple[str, ...]:
        """Return all verdicts as lines."""
        lines = [line for verdict in self.verdicts for line in verdict.describe()]
        problem = [f"incomplete: {self.run.problem}"] if self.run.problem else []
        return (*problem, *(lines or ["nothing was handed over yet"]))

    def to_json(self) -> dict[str, Any]:
        """Return the verdicts as a JSON object."""
        return {
            "is_exact": self.is_exact,
            "place": self.run.place,
            "root": self.root,
            "name": self.run.account.header.name,
            "state": self.run.account.header.state,
            "problem": self.run.problem,
            "epochs": [verdict.to_json() for verdict in self.verdicts],
        }


def check_run(folder: str | os.PathLike[str], *, root: str = "", name: str = "") -> CheckedRun:
    """Return the verdicts on the newest account in a checkpoint or a run's folder.

    Args:
        folder: see `read_run_account`.
        root: of the dataset, or the mixture file; empty: the place that the run used.
        name: of the loader; see `read_run_account`.

    Raises:
        RaypipeError: there is nothing that can be checked.
    """
    run = read_run_account(folder, name)
    place, index, axis = open_frames(run, root)
    verdicts = check_account(index, axis, run.account, run.attempts)
    return CheckedRun(run=run, root=place, verdicts=verdicts)
