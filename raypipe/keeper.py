"""Accounts as files: in a checkpoint, and beside checkpoints while a run goes on.

::

    run/checkpoint_.../raypipe/account/train/rank-00000-of-00004.parquet           what led to this checkpoint
    run/raypipe-account/train/20260105T101500.000000/rank-00000-of-00004.parquet   what an attempt has done so far
    run/raypipe-account/train/saved/0123456789abcdef/rank-00001-of-00004.parquet   what led to a state

The first are carried on when a run goes on from the checkpoint. The second tell what was handed over after it and is
handed over again. The last are of ranks that put nothing into the checkpoint: all there is to tell them of it is that
they stand at the same state.
"""

import json
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import fsspec
import pyarrow as pa
import pyarrow.fs

from raypipe.account import Account, Part
from raypipe.account.file import read_account, write_account
from raypipe.account.folder import BEFORE_FOLDER, RUN_FOLDER, SAVED_FOLDER, account_name, state_key
from raypipe.account.gather import HEAD, gather_account, state_of_saved
from raypipe.errors import RaypipeError
from raypipe.storage import retry_transient

ACCOUNTS: Final = "account"
"""The folder with accounts inside raypipe's folder of a checkpoint."""

_SAVED_KEPT: Final = 4
"""Accounts beside checkpoints: as many as Ray Train may have under way, and some."""

_WRITE_EVERY_S: Final = 2.0
_MOST_OF_TIME: Final = 0.01
"""Of a training loop's time, at most so much goes into writing."""


class AccountKeeper:
    """Writes the account of one rank to a folder of the run, again and again."""

    def __init__(self, folder: str, filesystem: pyarrow.fs.FileSystem | None, name: str) -> None:
        if filesystem is None:
            filesystem, folder = open_filesystem(folder)
        self._filesystem = filesystem
        self._folder = f"{folder}/{RUN_FOLDER}/{name}"
        self._due_at = 0.0
        self._has_warned = False
        self._saved: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        # Clocks are of one machine.
        return {**self.__dict__, "_due_at": 0.0}

    @property
    def is_due(self) -> bool:
        """Whether it is time to write: every 2 s, or less often where that would cost a hundredth of the time."""
        return time.monotonic() > self._due_at

    def write(self, attempt: str, account: Callable[[], Account], rank: int, world_size: int) -> None:
        """Write the account of an attempt as it is now."""
        started = time.monotonic()
        self._write(f"{self._folder}/{attempt}/{account_name(rank, world_size)}", account())
        now = time.monotonic()
        self._due_at = now + max(_WRITE_EVERY_S, (now - started) / _MOST_OF_TIME)

    def save(self, account: Account, rank: int, world_size: int) -> None:
        """Write the account that leads to a state; the last few are kept."""
        folder = f"{self._folder}/{SAVED_FOLDER}/{state_key(account.header.state)}"
        self._write(f"{folder}/{account_name(rank, world_size)}", account)
        self._saved.append(f"{folder}/{account_name(rank, world_size)}")
        if len(self._saved) > _SAVED_KEPT:
            with suppress(Exception):
                self._filesystem.delete_file(self._saved.pop(0))

    def _write(self, path: str, account: Account) -> None:
        """Write a file; a storage that fails is warned of once, and the run goes on."""
        try:
            write_account(path, account, self._filesystem)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(f"an account was not written to {path!r}: {type(error).__name__}: {error}", stacklevel=2)


def open_filesystem(folder: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the file system of a path or URI, of those that pyarrow or fsspec know, and the path on it."""
    if "://" not in folder:
        return pyarrow.fs.LocalFileSystem(), str(Path(folder).expanduser().absolute())
    try:
        return pyarrow.fs.FileSystem.from_uri(folder)  # type: ignore[no-any-return]
    except pa.ArrowException:
        filesystem, path = fsspec.core.url_to_fs(folder)
        return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(filesystem)), str(path)


def write_rank_account(folder: Path, account: Account, rank: int, world_size: int) -> None:
    """Write the account of one rank into raypipe's folder of a checkpoint.

    The one before stays beside it: until rank 0 has written the state, that is what the state of the folder belongs to.
    Rank 0 does the same with those of another number of ranks, and removes them at its next call.
    """
    accounts = folder / ACCOUNTS / account.header.name
    path, before = accounts / account_name(rank, world_size), accounts / BEFORE_FOLDER
    ending = path.name.partition("-of-")[2]
    for old in before.glob("rank-*.parquet") if rank == 0 else ():
        if not old.name.endswith(ending):
            old.unlink(missing_ok=True)
    for old in accounts.glob("rank-*.parquet"):
        if old == path or (rank == 0 and not old.name.endswith(ending)):
            before.mkdir(exist_ok=True)
            old.replace(before / old.name)
    write_account(path, account)


def read_rank_accounts(filesystem: pyarrow.fs.FileSystem, folder: str, name: str) -> tuple[Part, ...]:
    """Return what all ranks had handed over when they wrote a checkpoint; nothing where they wrote no account.

    Ranks that put nothing into the checkpoint have left theirs beside it. An account that is damaged is warned of: a
    run goes on without it.

    Args:
        filesystem: of the checkpoint.
        folder: raypipe's folder in the checkpoint.
        name: of the loader.
    """
    try:
        saved = retry_transient(lambda: _read_saved(filesystem, f"{folder}/{name}.json"))
        files = retry_transient(lambda: _read_files(filesystem, folder, name, saved))
        if not files and not saved.get(HEAD):
            return ()
        found = gather_account(files, saved)
    except (RaypipeError, OSError) as error:
        warnings.warn(f"the account of this run begins anew: {error}", stacklevel=2)
        return ()
    if found.problem:
        warnings.warn(f"the account of this run begins anew: {found.problem}", stacklevel=2)
        return ()
    if saved.get(HEAD) and found.account.missing_ranks:
        ranks = ", ".join(map(str, found.account.missing_ranks))
        warnings.warn(f"the account of this run lacks what rank {ranks} did: the file is lost", stacklevel=2)
    return found.account.parts


def _read_saved(filesystem: pyarrow.fs.FileSystem, path: str) -> dict[str, Any]:
    """Return a state with the head of its account; nothing where there is none, which is for others to tell."""
    try:
        with filesystem.open_input_file(path) as file:
            saved = json.loads(file.read())
    except (FileNotFoundError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}


def _read_files(
    filesystem: pyarrow.fs.FileSystem, folder: str, name: str, saved: dict[str, Any]
) -> dict[str, list[Account]]:
    """Return what the ranks of a checkpoint wrote, newest first, by file name."""
    here, beside = f"{folder}/{ACCOUNTS}/{name}", f"{folder.rsplit('/', 2)[0]}/{RUN_FOLDER}/{name}/{SAVED_FOLDER}"
    newest, before = (_read_folder(filesystem, place) for place in (here, f"{here}/{BEFORE_FOLDER}"))
    files = {
        file: [accounts[file] for accounts in (newest, before) if file in accounts] for file in {**before, **newest}
    }
    told = state_of_saved(saved)
    states = [told] if told else [account.header.state for accounts in files.values() for account in accounts[:1]]
    for key in {state_key(state) for state in states}:
        for file, account in _read_folder(filesystem, f"{beside}/{key}").items():
            files.setdefault(file, []).append(account)
    return files


def _read_folder(filesystem: pyarrow.fs.FileSystem, folder: str) -> dict[str, Account]:
    selector = pyarrow.fs.FileSelector(folder, allow_not_found=True)
    infos = sorted(filesystem.get_file_info(selector), key=lambda info: str(info.path))
    return {
        str(info.base_name): read_account(info.path, filesystem) for info in infos if info.path.endswith(".parquet")
    }
