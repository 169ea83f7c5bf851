"""What the commands ``raypipe account`` and ``raypipe where`` do: find the account and its dataset, and ask.

Reads ``meta/`` of a dataset and the files of an account; no rows, no pixels.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raypipe.account.axis import FrameAxis, lay_out
from raypipe.account.epoch_verdict import EpochVerdict
from raypipe.account.folder import RunAccount, read_run_account
from raypipe.account.verdict import check_account
from raypipe.errors import ConfigError, DatasetError
from raypipe.metadata import read_metadata
from raypipe.plan import SINGLE_DATASET, EpisodeIndex, SelectionSpec, index_episodes


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
        root: of the dataset; empty: where the run had it.
        name: of the loader; see `read_run_account`.

    Raises:
        RaypipeError: there is nothing that can be checked.
    """
    run = read_run_account(folder, name)
    place, index, axis = open_frames(run, root)
    verdicts = check_account(index, axis, run.account, run.attempts)
    return CheckedRun(run=run, root=place, verdicts=verdicts)


def open_frames(run: RunAccount, root: str) -> tuple[str, EpisodeIndex, FrameAxis]:
    """Return the dataset of an account: its root, the frames of an epoch, and the axis."""
    header = run.account.header
    place = root or header.root
    try:
        index, axis = read_frames(place, parse_selection(header.selection))
    except DatasetError as error:
        error.add_note(f"the account {run.place!r} is of the dataset {header.root!r}; give its place now by --root")
        raise
    return place, index, axis


def read_frames(root: str, selection: SelectionSpec) -> tuple[EpisodeIndex, FrameAxis]:
    """Return the frames of an epoch of the dataset at `root`, and the axis of all its episodes; reads ``meta/``."""
    meta = read_metadata(root)
    episodes = meta.episodes
    index = index_episodes(
        SINGLE_DATASET,
        episodes.episode_index,
        episodes.length,
        fingerprint=meta.order_fingerprint,
        selection=selection,
    )
    return index, lay_out((SINGLE_DATASET,), [(episodes.episode_index, episodes.length)])


def parse_selection(saved: Mapping[str, Any]) -> SelectionSpec:
    """Return the selection of its fields.

    Raises:
        ConfigError: they are not those of a selection.
    """
    try:
        return SelectionSpec(**saved)
    except TypeError as error:
        raise ConfigError(f"the account has no selection that this raypipe knows ({error}): {dict(saved)!r}") from error
