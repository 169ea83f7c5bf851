"""The account files of a checkpoint: what ranks write, and which of the files lead to the state beside them.

::

    raypipe/train.json                                      the state, with the head of rank 0's account
    raypipe/account/train/rank-00000-of-00004.parquet       the newest file of a rank
    raypipe/account/train/before/rank-00000-of-00004.parquet    the file that it replaced

**Torn checkpoints.** A checkpoint written over an earlier one may be torn: a rank died before it wrote its file, or
rank 0 died before it wrote the state. Every rank keeps the file that leads to the state in the folder, so a state that
was not overwritten has all its files. If the state is new, but the newest file of a rank leads to an earlier state of
the same run, that rank has no record of the last steps. The account notes this: only those steps cannot be proved. A
death never makes a rank lose its newest file, or leaves a file of another run, of a later state or of another rank.
Those are problems.

::

    state     step 10                        step 20
    rank 0    before: 10    now: 20          before: 10    now: 20
    rank 1                  now: 10                        now: 10
              all of step 10 is there        rank 1 has no record of steps 10 to 19: torn
"""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pyarrow.fs

from raypipe.account.file import read_account, read_state, write_account
from raypipe.account.parts import HEAD, Account, Part, merge_accounts, merge_parts
from raypipe.errors import RaypipeError, is_data_fault
from raypipe.storage import retry_transient
from raypipe.text import parse_json

ACCOUNTS: Final = "account"
"""The folder for accounts inside raypipe's folder of a checkpoint."""

BEFORE_FOLDER: Final = "before"
"""The folder beside the accounts of a checkpoint for those that they replaced."""

RUN_FOLDER: Final = "raypipe-account"
"""The folder in a run's folder with a subfolder per loader name, each with one per attempt."""

FILE_PATTERN: Final = r"rank-(?P<rank>\d+)-of-(?P<world>\d+)\.parquet$"
"""The names of `account_name`. Readers pass over all other files, such as the ``._`` files that macOS leaves."""


def account_name(rank: int, world_size: int) -> str:
    """Return the file name of the account of one rank."""
    return f"rank-{rank:05d}-of-{world_size:05d}.parquet"


def saved_folder(name: str, state: Mapping[str, Any]) -> str:
    """Return the folder in a run's for accounts that lead to a state, of ranks that put nothing into a checkpoint."""
    key = hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=8).hexdigest()
    return f"{RUN_FOLDER}/{name}/saved/{key}"


def write_rank_account(folder: Path, account: Account, rank: int, world_size: int) -> None:
    """Write the account of one rank into raypipe's folder of a checkpoint.

    The previous account stays beside it, in `BEFORE_FOLDER`: until rank 0 writes the new state, the state in the folder
    belongs to that one. The rank copies it and does not move it: a rank that dies here must leave a newest file.
    Rank 0 moves files of another number of ranks there, and removes them when the state has moved on.
    """
    accounts = folder / ACCOUNTS / account.header.name
    path, before = accounts / account_name(rank, world_size), accounts / BEFORE_FOLDER
    state = state_of_saved(_read_saved(pyarrow.fs.LocalFileSystem(), str(folder / f"{account.header.name}.json")))
    if rank == 0:
        _put_aside(accounts, before, path.name.partition("-of-")[2], state)
    if path.exists() and not _is_needed(before / path.name, state):
        before.mkdir(exist_ok=True)
        copied = before / f"{path.name}.new"
        shutil.copyfile(path, copied)
        copied.replace(before / path.name)
    write_account(path, account)


def _put_aside(accounts: Path, before: Path, ending: str, state: Mapping[str, Any]) -> None:
    """Move the files of another number of ranks aside, and remove those moved earlier unless they lead to `state`."""
    for old in before.glob("rank-*.parquet"):
        if not old.name.endswith(ending) and not _is_needed(old, state):
            old.unlink(missing_ok=True)
    for old in accounts.glob("rank-*.parquet"):
        if old.name.endswith(ending):
            continue
        if _is_needed(before / old.name, state):
            old.unlink(missing_ok=True)
        else:
            before.mkdir(exist_ok=True)
            old.replace(before / old.name)


def _is_needed(path: Path, state: Mapping[str, Any]) -> bool:
    """Return whether a file leads to the state in the folder, which rank 0 has not overwritten yet."""
    if not state:
        return False
    try:
        return bool(read_state(path) == state)
    except Exception as error:
        if not is_data_fault(error):
            raise
        return False


def read_rank_accounts(filesystem: pyarrow.fs.FileSystem, folder: str, name: str) -> tuple[Part, ...]:
    """Return what all ranks had handed over when they wrote a checkpoint; empty if they wrote no account.

    Also reads the accounts beside the checkpoint, of ranks that put nothing into it. If an account is damaged, this
    warns and returns nothing, and the run continues without it.

    Args:
        filesystem: file system of the checkpoint.
        folder: raypipe's folder in the checkpoint.
        name: the loader's name.
    """
    try:
        saved = retry_transient(lambda: _read_saved(filesystem, f"{folder}/{name}.json"))
        files = retry_transient(lambda: _read_files(filesystem, folder, name, saved))
        if not files.names and not state_of_saved(saved):
            return ()
        found = files.gather(saved)
    except (RaypipeError, OSError) as error:
        warnings.warn(f"the account of this run begins anew: {error}", stacklevel=2)
        return ()
    if found.problem:
        warnings.warn(f"the account of this run begins anew: {found.problem}", stacklevel=2)
        return ()
    if state_of_saved(saved) and found.account.missing_ranks:
        ranks = ", ".join(map(str, found.account.missing_ranks))
        warnings.warn(f"the account of this run lacks what rank {ranks} did: the file is lost", stacklevel=2)
    return found.account.parts


def _read_saved(filesystem: pyarrow.fs.FileSystem, path: str) -> dict[str, Any]:
    """Return a state with the head of its account; empty if the file is missing or damaged, which others report."""
    try:
        with filesystem.open_input_file(path) as file:
            saved = parse_json(file.read())
    except (FileNotFoundError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}


def _read_files(filesystem: pyarrow.fs.FileSystem, folder: str, name: str, saved: dict[str, Any]) -> "CheckpointFiles":
    here, run = f"{folder}/{ACCOUNTS}/{name}", folder.rsplit("/", 2)[0]
    newest, before = (_read_folder(filesystem, place) for place in (here, f"{here}/{BEFORE_FOLDER}"))
    told = state_of_saved(saved)
    states = [told] if told else [account.header.state for account in (newest or before).values()]
    beside = sorted({f"{run}/{saved_folder(name, state)}" for state in states})
    found = [_read_folder(filesystem, place) for place in beside]
    return CheckpointFiles(newest, before, {file: one for accounts in found for file, one in accounts.items()})


def _read_folder(filesystem: pyarrow.fs.FileSystem, folder: str) -> dict[str, Account]:
    selector = pyarrow.fs.FileSelector(folder, allow_not_found=True)
    infos = sorted(filesystem.get_file_info(selector), key=lambda info: str(info.path))
    names = {str(info.base_name): info.path for info in infos}
    return {name: read_account(path, filesystem) for name, path in names.items() if re.match(FILE_PATTERN, name)}


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """An account, and the problem with its files, if any."""

    account: Account
    world_size: int
    num_files: int
    """Ranks that have a file. A rank whose newest file is lost does not count, even if an earlier one is left."""

    problem: str = ""


@dataclass(frozen=True)
class CheckpointFiles:
    """The accounts that ranks wrote for a checkpoint, by file name."""

    newest: Mapping[str, Account]
    before: Mapping[str, Account]
    """Those that the newest replaced, and those of another number of ranks that rank 0 put aside."""

    beside: Mapping[str, Account]
    """Those for its state by ranks that put nothing into the checkpoint."""

    @property
    def names(self) -> list[str]:
        """All file names, ascending."""
        return sorted({*self.newest, *self.before, *self.beside})

    def of(self, name: str) -> list[Account]:
        """Return the accounts with this file name, the newest first."""
        return [found[name] for found in (self.newest, self.before, self.beside) if name in found]

    def gather(self, saved: Mapping[str, Any]) -> Gathered:
        """Return the account of all ranks that leads to a state.

        `saved` is the checkpoint's state with its head. Without a head the newest file decides the state.

        Raises:
            RaypipeError: no file of rank 0 leads to the state, or two files have the record of the same rank.
        """
        first = self._find_first(state_of_saved(saved))
        if first is None:
            raise RaypipeError(
                "no file of rank 0 leads to the state of the checkpoint: it is lost, or one of the two was changed"
            )
        name, account = first
        mine = [other for other in self.names if _world_of(other) == _world_of(name)]
        state, head = account.header.state, account.header.head
        leading = {other: one for other in mine for one in self.of(other)[::-1] if one.header.state == state}
        left = [other for other in mine if other in self.newest] or mine
        torn = {other: self.of(other)[0] for other in left if other not in leading}
        problems = [
            _find_other_head(saved, head) if _rank_of(name) == 0 else "",
            *(_find_other_rank(other, one) for other, one in leading.items()),
            *(_find_other_rank(other, one) or _find_untorn(other, one, account) for other, one in torn.items()),
        ]
        return Gathered(
            account=_add_torn(merge_accounts(leading.values()), torn.values()),
            world_size=_world_of(name),
            num_files=len(leading) + len(torn),
            problem=next(filter(None, problems), ""),
        )

    def _find_first(self, state: Mapping[str, Any]) -> tuple[str, Account] | None:
        """Return the file of the first rank; of two world sizes, the one that carries more earlier records."""
        firsts = {_world_of(name): name for name in reversed(self.names)}
        found = [
            (name, account)
            for name in firsts.values()
            for account in (self.of(name) if state else self.of(name)[:1])
            if account.header.state == (state or account.header.state)
        ]
        return max(found, key=lambda item: sum(len(part.ranks) for part in item[1].parts), default=None)


def state_of_saved(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a checkpoint without the head of its account; empty if it has no head."""
    return {key: value for key, value in saved.items() if key != HEAD} if saved.get(HEAD) else {}


def _world_of(name: str) -> int:
    return int(name.rpartition("-of-")[2].removesuffix(".parquet"))


def _rank_of(name: str) -> int:
    return int(name.partition("-of-")[0].removeprefix("rank-"))


def _find_other_head(saved: Mapping[str, Any], head: str) -> str:
    """Return the problem if the checkpoint's head is missing or not that of its files; else an empty string."""
    told = saved.get(HEAD, "")
    if not saved or told == head:
        return ""
    if not told:
        return f"the state of the checkpoint lacks the head of its account, which is {head}: it was changed"
    return f"the checkpoint was saved with an account whose head is {told}, and that of its files is {head!r}"


def _find_other_rank(name: str, account: Account) -> str:
    """Return the problem if a rank's file has the record of another rank, which only rank 0's may; else empty."""
    mine = _rank_of(name)
    others = {record.rank for part in account.parts for record in part.ranks} - {mine} if mine else set()
    return f"{name} holds the record of rank {min(others)}: it is the file of another rank" if others else ""


def _find_untorn(name: str, account: Account, first: Account) -> str:
    """Return why a file that does not lead to the state cannot come from a dead rank; `first` leads to it."""
    mine, theirs = account.header, first.header
    # A mixture may change between epochs, which changes its fingerprint.
    for key in ("seed",) if "mixture" in theirs.state else ("seed", "fingerprint"):
        if mine.state.get(key) != theirs.state.get(key):
            return f"{name} is of another run: its {key} is {mine.state.get(key)!r}, not {theirs.state.get(key)!r}"
    if mine.name != theirs.name:
        return f"{name} is of a loader {mine.name!r}, not {theirs.name!r}"
    here, there = account.place, first.place
    if here > there:
        return f"{name} leads to a later state than that of the checkpoint"
    lasts = [{part.key for part in one.parts[-1:]} for one in (account, first)]
    if here < there and lasts[0] & lasts[1]:
        return f"{name} has all steps up to the state, and the header of an earlier one: it was changed"
    return ""


def _add_torn(account: Account, torn: Iterable[Account]) -> Account:
    """Return the account with the records of the same parts from torn files; those ranks have no record of the rest."""
    known = {part.key for part in account.parts}
    theirs = [part for one in torn for part in one.parts]
    ranks = {record.rank for part in theirs for record in part.ranks if len(part.ranks) == 1}
    parts = merge_parts([*account.parts, *(part for part in theirs if part.key in known)])
    return replace(
        account,
        parts=tuple(
            replace(part, torn=(*part.torn, *(rank for rank in part.missing_ranks if rank in ranks))) for part in parts
        ),
    )
