"""The accounts that a run has left behind: in its checkpoints, and in what its ranks wrote down while running.

::

    checkpoint_000003/raypipe/account/train/rank-00000-of-00004.parquet     saved with the state: what counts
    raypipe-account/train/2026-08-01T10-00-00/rank-00000-of-00004.parquet   by start of the run, newest last
    raypipe-account/train/saved/0123456789abcdef/rank-00001-of-00004.parquet    by state: completes a checkpoint

Takes the account of the last attempt where all its ranks stopped after the same step, as they do when a run ends, and
no checkpoint of that attempt goes further. Else that of the newest checkpoint. All other attempts tell what was rolled
back.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from raypipe.account.file import load_account
from raypipe.account.gather import CheckpointFiles, Gathered, gather_account, place_of, state_of_saved
from raypipe.account.parts import Account, Part, merge_accounts
from raypipe.errors import ConfigError, DatasetError, RaypipeError, as_damage, noting, suggest
from raypipe.storage import Storage, open_storage, retry_transient
from raypipe.text import parse_json

CHECKPOINT_FOLDER: Final = "raypipe/account"
"""In a checkpoint: below it a folder for every loader, by name."""

RUN_FOLDER: Final = "raypipe-account"
"""In a run's folder: below it a folder for every loader, and in it one for every attempt."""

SAVED_FOLDER: Final = "saved"
"""Beside the attempts: what ranks that put nothing into a checkpoint wrote down for it, by `state_key`."""

BEFORE_FOLDER: Final = "before"
"""Beside the accounts of a checkpoint: those that they replaced."""

DEFAULT_NAME: Final = "train"

_FILE: Final = r"rank-(?P<rank>\d+)-of-(?P<world>\d+)\.parquet$"
_IN_CHECKPOINT: Final = re.compile(
    rf"^(?:(?P<place>.*)/)?{CHECKPOINT_FOLDER}/(?P<name>[^/]+)/(?:{BEFORE_FOLDER}/)?{_FILE}"
)
_IN_RUN: Final = re.compile(rf"^(?:(?P<place>.*)/)?{RUN_FOLDER}/(?P<name>[^/]+)/(?P<attempt>[^/]+)/{_FILE}")
_SAVED: Final = re.compile(rf"^(?:.*/)?{RUN_FOLDER}/(?P<name>[^/]+)/{SAVED_FOLDER}/(?P<state>[^/]+)/{_FILE}")


@dataclass(frozen=True, kw_only=True)
class RunAccount:
    """The account of a run, and what else is known of it."""

    account: Account
    place: str
    """The folder that it was read from."""

    attempts: tuple[Part, ...]
    """What the other attempts wrote down."""

    problem: str = ""
    """Why the account is not complete; empty if it is."""


def account_name(rank: int, world_size: int) -> str:
    """Return the file name of the account of one rank."""
    return f"rank-{rank:05d}-of-{world_size:05d}.parquet"


def state_key(state: Mapping[str, Any]) -> str:
    """Return a name for a state, the same on every rank."""
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=8).hexdigest()


def read_run_account(folder: str | os.PathLike[str], name: str = "") -> RunAccount:
    """Return the newest account in a checkpoint or in a run's folder, and the other attempts of the run.

    Args:
        folder: a path or an fsspec URI.
        name: of the loader; empty: the only one, or ``train`` where there are several.

    Raises:
        ConfigError: there is no account in the folder, or none of that name.
        DatasetError: a file is damaged.
        RaypipeError: no account is complete enough to be checked.
    """
    storage = open_storage(folder)
    if not storage.exists():
        raise ConfigError(f"there is no folder {storage.uri!r}: give that of a run or of a checkpoint")
    with noting(f"while reading the account at {storage.uri!r}"):
        return _read_newest(storage, name)


def _read_newest(storage: Storage, name: str) -> RunAccount:
    sets = _pick_run(storage, _pick_name(storage, _find_sets(storage), name))
    attempts = sorted((one for one in sets if one.attempt), key=lambda one: one.attempt)
    last = [one for one in attempts if one.attempt == attempts[-1].attempt]
    newest = sorted((one for one in sets if not one.attempt), key=lambda one: _position(storage, one), reverse=True)
    further = [one for one in newest if last and _goes_further(storage, one, last[0])]
    chosen, account, problem = _choose(storage, list(dict.fromkeys([*further, *last, *newest])))
    others = [one for one in attempts if one.folder != chosen.folder]
    parts = tuple(part for one in others for account in _read_files(storage, one) for part in account.parts)
    return RunAccount(account=account, place=storage.locate(chosen.folder), attempts=parts, problem=problem)


@dataclass(frozen=True, kw_only=True)
class _FileSet:
    """The files of the ranks of one world in one folder of an attempt, or all of a checkpoint."""

    name: str
    place: str
    """The checkpoint, or the run's folder of an attempt; relative."""

    folder: str
    attempt: str
    """Empty in a checkpoint."""

    world_size: int
    """0 in a checkpoint, which may hold files of two."""

    files: tuple[str, ...]
    """Ascending; in a checkpoint those that were replaced come last."""


def _goes_further(storage: Storage, checkpoint: _FileSet, attempt: _FileSet) -> bool:
    """Whether a checkpoint of an attempt is newer than what its ranks wrote down last."""
    parts = _read_file(storage, checkpoint.files[0]).parts
    is_of_attempt = any(part.attempt == attempt.attempt for part in parts)
    return is_of_attempt and _position(storage, checkpoint) > _position(storage, attempt)


def _find_sets(storage: Storage) -> list[_FileSet]:
    groups: dict[tuple[str, str, str, str, int], list[str]] = {}
    for path in storage.list_files():
        folder = path.rpartition("/")[0]
        if match := _IN_RUN.match(path):
            key = (match["name"], match["place"] or "", folder, match["attempt"], int(match["world"]))
        elif match := _IN_CHECKPOINT.match(path):
            key = (match["name"], match["place"] or "", folder.removesuffix(f"/{BEFORE_FOLDER}"), "", 0)
        else:
            continue
        groups.setdefault(key, []).append(path)
    return [
        _FileSet(
            name=name,
            place=place,
            folder=folder,
            attempt=attempt,
            world_size=world,
            files=tuple(sorted(files, key=lambda path: (path.count("/"), path))),
        )
        for (name, place, folder, attempt, world), files in groups.items()
    ]


def _pick_name(storage: Storage, sets: list[_FileSet], name: str) -> list[_FileSet]:
    names = sorted({one.name for one in sets})
    if not names:
        raise ConfigError(
            f"there is no account in {storage.uri!r}; give a checkpoint (a folder with {CHECKPOINT_FOLDER}/NAME/) or a "
            f"run's folder (with checkpoints, or with {RUN_FOLDER}/NAME/ATTEMPT/)"
        )
    wanted = name or (names[0] if len(names) == 1 else DEFAULT_NAME)
    if wanted not in names:
        raise ConfigError(f"{storage.uri!r} has no account of a loader {wanted!r}{suggest(wanted, names)} Use --name.")
    return [one for one in sets if one.name == wanted]


def _pick_run(storage: Storage, sets: list[_FileSet]) -> list[_FileSet]:
    """Return the files of the one run in the folder; attempts of two runs must not be taken for one."""
    runs = sorted({one.place for one in sets if one.attempt})
    if len(runs) > 1:
        raise ConfigError(f"{storage.uri!r} holds {len(runs)} runs; give the folder of one: {', '.join(runs[:5])}")
    below = f"{runs[0]}/" if runs and runs[0] else ""
    return [one for one in sets if f"{one.place}/".startswith(below)]


def _choose(storage: Storage, candidates: list[_FileSet]) -> tuple[_FileSet, Account, str]:
    """Return the first complete account, else the first that can be checked at all, with what it lacks.

    A complete one does not stand in for a checkpoint that goes further and has lost a file: that must be told.
    """
    incomplete: list[tuple[_FileSet, Account, str]] = []
    problems = []
    for one in candidates:
        try:
            found = _read_checkpoint(storage, one) if not one.attempt else _read_attempt(storage, one)
        except DatasetError:
            raise
        except RaypipeError as error:
            # Ranks of an attempt that died stopped after different steps.
            problems.append(f"{storage.locate(one.folder)}: {error}")
            continue
        problem = _find_problem(one, found)
        if problem:
            incomplete.append((one, found.account, problem))
        elif not any(_is_behind(found.account, lost) for files, lost, _ in incomplete if not files.attempt):
            return one, found.account, ""
    if incomplete:
        # One that lost a file can be checked all the same: the frames of that rank are missing. Checkpoints first.
        return min(incomplete, key=lambda item: bool(item[0].attempt))
    raise RaypipeError(f"no account in {storage.uri!r} can be checked: {'; '.join(problems[:3])}")


def _is_behind(account: Account, other: Account) -> bool:
    return place_of(account.header.order_state) < place_of(other.header.order_state)


def _find_problem(files: _FileSet, found: Gathered) -> str:
    if found.num_files > found.world_size:
        return f"{files.folder or 'the folder'} has {found.num_files} files of {found.world_size} ranks"
    if found.num_files < found.world_size:
        return (
            f"{files.folder or 'the folder'} has {found.num_files} of {found.world_size} files; ranks that gave "
            f"report() no folder left theirs in the run's folder: give that"
        )
    if found.account.header.name != files.name:
        return f"the account in {files.folder!r} is of a loader {found.account.header.name!r}"
    ranks = found.account.missing_ranks
    return f"rank {', '.join(map(str, ranks))} has no record in some part" if ranks else ""


def _read_attempt(storage: Storage, files: _FileSet) -> Gathered:
    account = merge_accounts(_read_files(storage, files))
    return Gathered(account=account, world_size=files.world_size, num_files=len(files.files))


def _read_checkpoint(storage: Storage, files: _FileSet) -> Gathered:
    """Return the account that leads to the state of a checkpoint.

    Raises:
        DatasetError: the checkpoint has a state with another account.
    """
    folder = files.folder.removesuffix(f"/{files.name}").removesuffix("account")
    path = f"{folder}{files.name}.json"
    saved = _read_saved(storage, path) if path in storage.list_files() else {}
    state = state_of_saved(saved) or _read_file(storage, files.files[0]).header.state
    newest = [path for path in files.files if path.rpartition("/")[0] == files.folder]
    before = [path for path in files.files if path not in newest]
    beside = _find_beside(storage, files.name, state_key(state))
    found = CheckpointFiles(
        **{
            kind: {path.rpartition("/")[2]: _read_file(storage, path) for path in paths}
            for kind, paths in (("newest", newest), ("before", before), ("beside", beside))
        }
    )
    try:
        gathered = gather_account(found, saved)
    except RaypipeError as error:
        raise DatasetError(f"{storage.locate(files.folder)}: {error}") from error
    if gathered.problem:
        raise DatasetError(f"{storage.locate(files.folder)}: {gathered.problem}")
    return gathered


def _read_saved(storage: Storage, path: str) -> dict[str, Any]:
    """Return the state of a checkpoint, with the head of its account."""
    content = retry_transient(lambda: storage.read_bytes(path))

    def describe(error: Exception) -> DatasetError:
        return DatasetError(
            f"damaged state {storage.locate(path)!r}: {error}. Nothing else says how far the account beside it must "
            f"lead: put the file back as it was saved, or check an earlier checkpoint."
        )

    with as_damage(describe):
        saved = parse_json(content)
        if isinstance(saved, dict) and saved:
            return saved
        raise ValueError(f"{saved!r} is no JSON object of a state")


def _find_beside(storage: Storage, name: str, state: str) -> list[str]:
    """Return what ranks that put nothing into the checkpoint left for a state."""
    matches = ((path, _SAVED.match(path)) for path in storage.list_files())
    return [path for path, match in matches if match and (match["name"], match["state"]) == (name, state)]


def _position(storage: Storage, files: _FileSet) -> tuple[int, int]:
    """Return how far an account goes."""
    return place_of(_read_file(storage, files.files[0]).header.order_state)


def _read_files(storage: Storage, files: _FileSet) -> list[Account]:
    return [_read_file(storage, name) for name in files.files]


def _read_file(storage: Storage, name: str) -> Account:
    return load_account(retry_transient(lambda: storage.read_bytes(name)), storage.locate(name))
