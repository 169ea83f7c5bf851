"""The accounts of a run: its ranks write them while it goes on, and a reader takes the newest that is complete.

::

    checkpoint_000003/raypipe/account/train/rank-00000-of-00004.parquet        what led to this checkpoint
    raypipe-account/train/20260105T101500.000000/rank-00000-of-00004.parquet   what an attempt has done so far
    raypipe-account/train/saved/0123456789abcdef/rank-00001-of-00004.parquet   what led to a state
    raypipe-account/train/saved/0123456789abcdef/checkpoint                    marks the state of a checkpoint

A run that resumes from a checkpoint carries on the first. The second show what it handed over after the checkpoint and
hands over again. The third are of ranks that put nothing into the checkpoint. Such a rank knows about the checkpoint
only because it has the same state, and because rank 0 left a mark there.

`read_run_account` takes the account of the last attempt if all its ranks stopped after the same step, as they do when a
run ends, and no checkpoint of that attempt goes further; else the account of the newest checkpoint. All other attempts
show which frames were rolled back.
"""

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs

from raypipe.account.checkpoint import (
    ACCOUNTS,
    BEFORE_FOLDER,
    FILE_PATTERN,
    RUN_FOLDER,
    CheckpointFiles,
    Gathered,
    account_name,
    saved_folder,
    state_of_saved,
)
from raypipe.account.file import load_account, write_account
from raypipe.account.parts import Account, Part, merge_accounts
from raypipe.errors import ConfigError, DatasetError, RaypipeError, as_damage, noting, suggest
from raypipe.storage import Storage, check_root, login_of, open_filesystem_of, open_storage, retry_transient, take_login
from raypipe.text import parse_json

CHECKPOINT_FOLDER: Final = f"raypipe/{ACCOUNTS}"
"""The folder in a checkpoint with a subfolder per loader name."""

DEFAULT_NAME: Final = "train"

_IN_CHECKPOINT: Final = re.compile(
    rf"^(?:(?P<place>.*)/)?{CHECKPOINT_FOLDER}/(?P<name>[^/]+)/(?:{BEFORE_FOLDER}/)?{FILE_PATTERN}"
)
_IN_RUN: Final = re.compile(rf"^(?:(?P<place>.*)/)?{RUN_FOLDER}/(?P<name>[^/]+)/(?P<attempt>[^/]+)/{FILE_PATTERN}")

_SAVED_KEPT: Final = 4
"""Accounts to keep beside checkpoints, and as many of other states: more than Ray Train has under way at once."""

_CHECKPOINT_MARK: Final = "checkpoint"

_OF_PYARROW: Final = ("hdfs", "viewfs")
"""Schemes that pyarrow itself reads and writes; clusters that have them often keep checkpoints there."""

_WRITE_EVERY_S: Final = 2.0

_MOST_OF_TIME: Final = 0.01
"""The largest share of a training loop's time to spend on writing."""


@dataclass(frozen=True, kw_only=True)
class RunAccount:
    """The account of a run, and what else its folder says."""

    account: Account
    place: str
    """The folder from which the account was read."""

    attempts: tuple[Part, ...]
    """The parts that the other attempts recorded."""

    problem: str = ""
    """Why the account is not complete; empty if it is."""


class AccountKeeper:
    """Writes the account of one rank to a folder of the run, repeatedly."""

    def __init__(self, folder: str, filesystem: pyarrow.fs.FileSystem | None, name: str) -> None:
        if filesystem is None:
            filesystem, folder = open_filesystem(folder)
        self._filesystem = filesystem
        self._run, self._name = folder, name
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
        self._write(f"{self._run}/{RUN_FOLDER}/{self._name}/{attempt}/{account_name(rank, world_size)}", account())
        now = time.monotonic()
        self._due_at = now + max(_WRITE_EVERY_S, (now - started) / _MOST_OF_TIME)

    def save(self, account: Account, rank: int, world_size: int) -> None:
        """Write the account that leads to a state. Keeps the last few, and the last few of checkpoints."""
        path = f"{self._run}/{saved_folder(self._name, account.header.state)}/{account_name(rank, world_size)}"
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
        path = f"{self._run}/{saved_folder(self._name, state)}/{_CHECKPOINT_MARK}"
        with self._warning_once(path):
            self._filesystem.create_dir(path.rpartition("/")[0], recursive=True)
            with self._filesystem.open_output_stream(path) as file:
                file.write(b"")
        # Keep twice as many marks as other ranks keep accounts: no rank asks for an older one.
        for old in _add_last(self._marks, path, 2 * _SAVED_KEPT):
            self._delete(old)

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


def read_run_account(folder: str | os.PathLike[str], name: str = "") -> RunAccount:
    """Return the newest account in a checkpoint or in a run's folder, and the other attempts of the run.

    Args:
        folder: a path or an fsspec URI.
        name: the loader's name; if empty, the only loader, or ``train`` if there are several.

    Raises:
        ConfigError: the folder has no account, or none of that name.
        DatasetError: a file is damaged.
        RaypipeError: no account is complete enough to check.
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
    others = [path for one in attempts if one.folder != chosen.folder for path in one.files]
    parts = tuple(part for path in others for part in _read_file(storage, path).parts)
    return RunAccount(account=account, place=storage.locate(chosen.folder), attempts=parts, problem=problem)


@dataclass(frozen=True)
class _FileSet:
    """The files of one attempt and world size, or all files of a checkpoint."""

    name: str
    place: str
    """The checkpoint, or for an attempt the run's folder; relative."""

    folder: str
    attempt: str
    """Empty for a checkpoint."""

    world_size: int
    """0 for a checkpoint, which may have files of two world sizes."""

    files: tuple[str, ...]
    """Ascending; in a checkpoint the replaced files come last."""


def _goes_further(storage: Storage, checkpoint: _FileSet, attempt: _FileSet) -> bool:
    """Return whether a checkpoint is newer than the last record of its attempt's ranks."""
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
        _FileSet(*key, files=tuple(sorted(files, key=lambda path: (path.count("/"), path))))
        for key, files in groups.items()
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
    """Return the files of the only run in the folder; attempts of two runs must not be mixed."""
    runs = sorted({one.place for one in sets if one.attempt})
    if len(runs) > 1:
        raise ConfigError(f"{storage.uri!r} holds {len(runs)} runs; give the folder of one: {', '.join(runs[:5])}")
    below = f"{runs[0]}/" if runs and runs[0] else ""
    return [one for one in sets if f"{one.place}/".startswith(below)]


def _choose(storage: Storage, candidates: list[_FileSet]) -> tuple[_FileSet, Account, str]:
    """Return the first complete account, else the first that can be checked at all, with its problem.

    A complete account does not replace a checkpoint that goes further but lost a file: we must report that.
    """
    incomplete: list[tuple[_FileSet, Account, str]] = []
    problems = []
    for one in candidates:
        try:
            found = (_read_attempt if one.attempt else _read_checkpoint)(storage, one)
        except DatasetError:
            raise
        except RaypipeError as error:
            # The ranks of an attempt that died stopped after different steps.
            problems.append(f"{storage.locate(one.folder)}: {error}")
            continue
        problem = _find_problem(one, found)
        if problem:
            incomplete.append((one, found.account, problem))
        elif not any(found.account.place < lost.place for files, lost, _ in incomplete if not files.attempt):
            return one, found.account, ""
    if incomplete:
        # An account that lost a file can still be checked: the frames of that rank are missing. Prefer checkpoints.
        return min(incomplete, key=lambda item: bool(item[0].attempt))
    raise RaypipeError(f"no account in {storage.uri!r} can be checked: {'; '.join(problems[:3])}")


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
    account = merge_accounts(_read_file(storage, path) for path in files.files)
    return Gathered(account=account, world_size=files.world_size, num_files=len(files.files))


def _read_checkpoint(storage: Storage, files: _FileSet) -> Gathered:
    """Return the account that leads to the state of a checkpoint.

    Raises:
        DatasetError: the state and the account files of the checkpoint do not belong together.
    """
    folder = files.folder.removesuffix(f"/{files.name}").removesuffix(ACCOUNTS)
    path = f"{folder}{files.name}.json"
    saved = _read_saved(storage, path) if path in storage.list_files() else {}
    state = state_of_saved(saved) or _read_file(storage, files.files[0]).header.state
    newest = [path for path in files.files if path.rpartition("/")[0] == files.folder]
    before = [path for path in files.files if path not in newest]
    saved_at = re.compile(f"^(?:.*/)?{re.escape(saved_folder(files.name, state))}/{FILE_PATTERN}")
    beside = [path for path in storage.list_files() if saved_at.match(path)]
    found = CheckpointFiles(
        *({path.rpartition("/")[2]: _read_file(storage, path) for path in paths} for paths in (newest, before, beside))
    )
    try:
        gathered = found.gather(saved)
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


def _position(storage: Storage, files: _FileSet) -> tuple[int, int]:
    return _read_file(storage, files.files[0]).place


def _read_file(storage: Storage, name: str) -> Account:
    return load_account(retry_transient(lambda: storage.read_bytes(name)), storage.locate(name))
