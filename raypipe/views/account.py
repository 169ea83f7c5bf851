"""``raypipe account``: the account of a run with its datasets, checked; and the frames that the account counts.

It reads ``meta/`` of the datasets and the files of an account; no rows, no pixels.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from raypipe.account import EpochVerdict, FrameAxis, Header, RunAccount, check_account, lay_out, read_run_account
from raypipe.dataset import index_dataset
from raypipe.errors import ConfigError, DatasetError, as_damage
from raypipe.format import DatasetMeta, read_metadata
from raypipe.mixture import Mixture, is_mixture_file
from raypipe.plan import SINGLE_DATASET, EpisodeIndex, SelectionSpec, describe_changes, follow_state, mix_indexes
from raypipe.storage import is_plain_path, take_login
from raypipe.text import counted, rows_table

if TYPE_CHECKING:
    from rich.table import Table


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


_COLUMNS = ("frames", "emitted", "skipped", "left_over", "to_come", "repeated", "rolled_back")


def verdict_table(checked: CheckedRun) -> "Table":
    """Return a row per epoch."""
    rows = []
    for verdict in checked.verdicts:
        counts = [f"{getattr(verdict, f'num_{name}'):,}" for name in _COLUMNS]
        word = "NOT exactly once" if verdict.is_wrong else "not checked" if verdict.unchecked else "exactly once"
        rows.append((str(verdict.epoch), *counts, word))
    titles = ("epoch", *(name.replace("_", " ") for name in _COLUMNS), "verdict")
    return rows_table(titles, rows, texts=("verdict",))


_NUM_THREADS: Final = 32
_SHOWN: Final = 3


def open_frames(run: RunAccount, root: str) -> tuple[str, EpisodeIndex, FrameAxis]:
    """Return what an account covers: its root, or its members in words; the frames of an epoch; and the axis."""
    header = run.account.header
    if not (root or header.root or header.members):
        raise ConfigError(f"the account {run.place!r} names no dataset: give it, or the mixture file, by --root")
    root = take_login(root)
    _check_named(run, root)
    place = root or header.root or counted(len(header.members), "dataset")
    try:
        if header.members and not root:
            index, axis = _read_members(header)
        elif bool(header.members) != is_mixture_file(root or header.root):
            raise ConfigError(_other_kind(run.place, place, is_mixture=bool(header.members)))
        else:
            index, axis = read_frames(place, parse_selection(header.selection))
    except DatasetError as error:
        error.add_note(f"the account {run.place!r} is of {_described(header)}; give its place now by --root")
        raise
    return place, _at_state(index, header, place), axis


def _check_named(run: RunAccount, root: str) -> None:
    """Raise for a place that only the account names, unless it is a path on this machine.

    An account may come from a stranger: it must not send this machine to servers that the user has not named.
    """
    header = run.account.header
    places = [] if root else [str(one["root"]) for one in header.members] or [header.root]
    unknown = [place for place in places if not is_plain_path(place)]
    if unknown:
        remedy = "a mixture file that lists its datasets, by --root" if header.members else f"--root {unknown[0]}"
        raise ConfigError(
            f"the account {run.place!r} is of {', '.join(map(repr, unknown[:_SHOWN]))}, and of what an account names "
            f"only paths of this machine are opened. If you trust it, name the dataset too: give {remedy}"
        )
    selections = [header.selection] if not header.members else [] if root else [o["selection"] for o in header.members]
    for weights in (str(selection.get("weights", "")) for selection in selections):
        if "://" in weights and not _is_below(weights, root):
            raise ConfigError(
                f"the account {run.place!r} takes weights from {weights!r}, which you have not named: only weights on "
                f"this machine, or below the folder of --root, are read"
            )


def _is_below(place: str, root: str) -> bool:
    return bool(root) and place.startswith(f"{root.rstrip('/')}/") and ".." not in place.split("/")


def read_frames(root: str, selection: SelectionSpec) -> tuple[EpisodeIndex, FrameAxis]:
    """Return the frames of an epoch of the dataset or mixture at `root`, and the axis of all its episodes."""
    if is_mixture_file(root):
        mixture = Mixture(root)
        return mixture.index(), _lay_out(mixture.names, [dataset.meta for dataset in mixture.datasets])
    meta = read_metadata(root)
    episodes = meta.episodes
    index = index_dataset(SINGLE_DATASET, meta, selection)
    lengths = [(episodes.episode_index, episodes.length)]
    return index, lay_out((SINGLE_DATASET,), lengths, has_laps=index.rates is not None)


def parse_selection(saved: Mapping[str, Any]) -> SelectionSpec:
    """Return the selection with these saved fields.

    Raises:
        ConfigError: they are not the fields of a selection.
    """
    with as_damage(
        lambda error: ConfigError(f"the account has no selection that this raypipe knows ({error}): {dict(saved)!r}")
    ):
        return SelectionSpec(**saved)


def _read_members(header: Header) -> tuple[EpisodeIndex, FrameAxis]:
    shares = header.order_state.shares
    names = [str(member["name"]) for member in header.members]
    if shares is None or list(shares.names) != names:
        raise ConfigError(f"the account lists the members {', '.join(names)}, and its state is of another mixture")
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        metas = list(pool.map(read_metadata, [str(member["root"]) for member in header.members]))
    indexes = [
        index_dataset(name, meta, parse_selection(member["selection"]))
        for name, meta, member in zip(names, metas, header.members, strict=True)
    ]
    revisions = [one.revision for one in shares.members]
    return mix_indexes(indexes, shares.frames, revisions=revisions), _lay_out(names, metas)


def _at_state(index: EpisodeIndex, header: Header, place: str) -> EpisodeIndex:
    """Return the index with each dataset of a mixture at its position in the account's saved state."""
    state = header.order_state
    if (state.shares is None) != (index.shares is None):
        kinds = ("a single dataset", "a mixture")
        raise ConfigError(
            f"the state of the account is of {kinds[state.shares is not None]}, and the account of "
            f"{kinds[index.shares is not None]}: one of the two was changed"
        )
    changes = describe_changes(state.shares, index.shares) if state.shares and index.shares else ()
    if changes:
        listed = "\n".join(f"  {line}" for line in changes)
        raise ConfigError(
            f"the account is of another mixture than {place!r} is:\n{listed}\nGive the mixture file as it was then, or "
            f"none: the account knows where its datasets were."
        )
    return follow_state(state, index)[1]


def _lay_out(names: Sequence[str], metas: Sequence[DatasetMeta]) -> FrameAxis:
    return lay_out(names, [(meta.episodes.episode_index, meta.episodes.length) for meta in metas], has_laps=True)


def _described(header: Header) -> str:
    return (
        f"a mixture of {counted(len(header.members), 'dataset')}" if header.members else f"the dataset {header.root!r}"
    )


def _other_kind(place: str, root: str, *, is_mixture: bool) -> str:
    kinds = ("a single dataset", "a mixture: give a mixture file")
    return f"the account {place!r} is of {kinds[is_mixture]}, and {root!r} is none"
