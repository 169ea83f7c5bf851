"""Keep accounts as files: in checkpoints, and beside them while a run goes on.

::

    run/checkpoint_.../raypipe/account/train/rank-00000-of-00004.parquet           what led to this checkpoint
    run/raypipe-account/train/20260105T101500.000000/rank-00000-of-00004.parquet   what an attempt has done so far
    run/raypipe-account/train/saved/0123456789abcdef/rank-00001-of-00004.parquet   what led to a state
    run/raypipe-account/train/saved/0123456789abcdef/checkpoint                    marks the state of a checkpoint

A run that resumes from a checkpoint carries on the first. The second show what it handed over after the checkpoint and
hands over again. The third are of ranks that put nothing into the checkpoint. Such a rank knows about the checkpoint
only because it has the same state, and because rank 0 left a mark there.
"""

import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs

from raypipe.account.file import read_account, read_state, write_account
from raypipe.account.folder import BEFORE_FOLDER, RUN_FOLDER, SAVED_FOLDER, account_name, state_key
from raypipe.account.gather import HEAD, CheckpointFiles, gather_account, state_of_saved
from raypipe.account.parts import Account, Part
from raypipe.errors import RaypipeError
from raypipe.storage import check_root, login_of, open_filesystem_of, retry_transient, take_login
from raypipe.text import parse_json

ACCOUNTS: Final = "account"
"""The folder for accounts inside raypipe's folder of a checkpoint."""

_SAVED_KEPT: Final = 4
"""Accounts to keep beside checkpoints, and as many of other states: more than Ray Train has under way at once."""

_CHECKPOINT_MARK: Final = "checkpoint"

_OF_PYARROW: Final = ("hdfs", "viewfs")
"""Schemes that pyarrow itself reads and writes; clusters that have them often keep checkpoints there."""

_WRITE_EVERY_S: Final = 2.0
_MOST_OF_TIME: Final = 0.01
"""The largest share of a training loop's time to spend on writing."""


class AccountKeeper:
    """Writes the account of one rank to a folder of the run, repeatedly."""

    def __init__(self, folder: str, filesystem: pyarrow.fs.FileSystem | None, name: str) -> None:
        if filesystem is None:
            filesystem, folder = open_filesystem(folder)
        self._filesystem = filesystem
        self._folder = f"{folder}/{RUN_FOLDER}/{name}"
        self._due_at = 0.0
        self._has_warned = False
        self._saved: dict[str, None] = {}
        self._of_checkpoints: dict[str, None] = {}
        self._marks: dict[str, None] = {}
        """Files, the oldest first."""

    def __getstate__(self) -> dict[str, Any]:
        # A clock is valid only on this machine.
        return {**self.__dict__, "_due_at": 0.0}

    @property
    def is_due(self) -> bool:
        """Whether it is time to write: every 2 s, or less often if writing would take over 1% of the time."""
        return time.monotonic() > self._due_at

    def write(self, attempt: str, account: Callable[[], Account], rank: int, world_size: int) -> None:
        """Write the current account of an attempt."""
        started = time.monotonic()
        self._write(f"{self._folder}/{attempt}/{account_name(rank, world_size)}", account())
        now = time.monotonic()
        self._due_at = now + max(_WRITE_EVERY_S, (now - started) / _MOST_OF_TIME)

    def save(self, account: Account, rank: int, world_size: int) -> None:
        """Write the account that leads to a state. Keeps the last few, and the last few of checkpoints."""
        path = f"{self._saved_folder(account.header.state)}/{account_name(rank, world_size)}"
        if not account.parts and self._is_there(path):
            # The rank has handed over nothing since it restarted from this state, and the account that led here exists.
            return
        self._write(path, account)
        self._of_checkpoints.pop(path, None)
        for old in _add_last(self._saved, path, _SAVED_KEPT):
            # If it belongs to a checkpoint, rank 0 has marked it by now, because ranks report in step.
            is_of_checkpoint = self._is_there(f"{old.rpartition('/')[0]}/{_CHECKPOINT_MARK}")
            for gone in _add_last(self._of_checkpoints, old, _SAVED_KEPT) if is_of_checkpoint else [old]:
                self._delete(gone)

    def mark(self, state: Mapping[str, Any]) -> None:
        """Mark this state as that of a checkpoint, so that other ranks keep their accounts for it."""
        path = f"{self._saved_folder(state)}/{_CHECKPOINT_MARK}"
        with self._warning_once(path):
            self._filesystem.create_dir(path.rpartition("/")[0], recursive=True)
            with self._filesystem.open_output_stream(path) as file:
                file.write(b"")
        # Keep twice as many marks as other ranks keep accounts: no rank asks for an older one.
        for old in _add_last(self._marks, path, 2 * _SAVED_KEPT):
            self._delete(old)

    def _saved_folder(self, state: Mapping[str, Any]) -> str:
        return f"{self._folder}/{SAVED_FOLDER}/{state_key(state)}"

    def _is_there(self, path: str) -> bool:
        try:
            return bool(self._filesystem.get_file_info(path).type != pyarrow.fs.FileType.NotFound)
        except Exception:
            # If in doubt assume that it exists: an extra file is better than a lost account.
            return True

    def _delete(self, path: str) -> None:
        with suppress(Exception):
            self._filesystem.delete_file(path)

    def _write(self, path: str, account: Account) -> None:
        with self._warning_once(path):
            write_account(path, account, self._filesystem)

    @contextmanager
    def _warning_once(self, path: str) -> Iterator[None]:
        """Warn once if the storage fails, and let the run continue."""
        try:
            yield
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(f"an account was not written to {path!r}: {type(error).__name__}: {error}", stacklevel=4)


def _add_last(paths: dict[str, None], path: str, most: int) -> list[str]:
    """Move or add a path to the end; remove and return the first ones beyond `most`."""
    paths.pop(path, None)
    paths[path] = None
    gone = list(paths)[:-most]
    for old in gone:
        del paths[old]
    return gone


def open_filesystem(folder: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the file system of a path or URI, from pyarrow or fsspec, and the path on it."""
    if "://" not in folder:
        return pyarrow.fs.LocalFileSystem(), str(Path(folder).expanduser().absolute())
    # Check before pyarrow sees the URI: pyarrow passes unknown schemes to fsspec.
    check_root(folder, also=_OF_PYARROW)
    try:
        return pyarrow.fs.FileSystem.from_uri(folder)  # type: ignore[no-any-return]
    except pa.ArrowException:
        folder = take_login(folder)
        filesystem, path = open_filesystem_of(folder, login_of(folder))
        return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(filesystem)), path


def write_rank_account(folder: Path, account: Account, rank: int, world_size: int) -> None:
    """Write the account of one rank into raypipe's folder of a checkpoint.

    The previous account stays beside it, in `BEFORE_FOLDER`: until rank 0 writes the new state, the state in the folder
    belongs to that one, and however often ranks die, the file that leads to this state stays. The rank copies it and
    does not move it, so that it leaves a newest file even if it dies here; without one, the file would count as lost.
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
    return bool(state) and read_state(path) == state


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
        if not files.names and not saved.get(HEAD):
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
    """Return a state with the head of its account; empty if the file is missing or damaged, which others report."""
    try:
        with filesystem.open_input_file(path) as file:
            saved = parse_json(file.read())
    except (FileNotFoundError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}


def _read_files(filesystem: pyarrow.fs.FileSystem, folder: str, name: str, saved: dict[str, Any]) -> CheckpointFiles:
    here, beside = f"{folder}/{ACCOUNTS}/{name}", f"{folder.rsplit('/', 2)[0]}/{RUN_FOLDER}/{name}/{SAVED_FOLDER}"
    newest, before = (_read_folder(filesystem, place) for place in (here, f"{here}/{BEFORE_FOLDER}"))
    told = state_of_saved(saved)
    states = [told] if told else [account.header.state for account in (newest or before).values()]
    keys = sorted({state_key(state) for state in states})
    found = [_read_folder(filesystem, f"{beside}/{key}") for key in keys]
    return CheckpointFiles(
        newest=newest, before=before, beside={file: one for accounts in found for file, one in accounts.items()}
    )


def _read_folder(filesystem: pyarrow.fs.FileSystem, folder: str) -> dict[str, Account]:
    selector = pyarrow.fs.FileSelector(folder, allow_not_found=True)
    infos = sorted(filesystem.get_file_info(selector), key=lambda info: str(info.path))
    return {
        str(info.base_name): read_account(info.path, filesystem) for info in infos if info.path.endswith(".parquet")
    }
