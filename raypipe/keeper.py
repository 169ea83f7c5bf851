"""Accounts as files: in a checkpoint, and beside checkpoints while a run goes on.

::

    run/checkpoint_.../raypipe/account/train/rank-00000-of-00004.parquet           what led to this checkpoint
    run/raypipe-account/train/20260105T101500.000000/rank-00000-of-00004.parquet   what an attempt has done so far

The first are carried on when a run goes on from the checkpoint. The second tell what was handed over after it and is
handed over again.
"""

import time
import warnings
from pathlib import Path
from typing import Final

import pyarrow.fs

from raypipe.account import Account, Part, merge_parts
from raypipe.account.file import read_account, write_account
from raypipe.account.folder import RUN_FOLDER, account_name
from raypipe.errors import RaypipeError

ACCOUNTS: Final = "account"
"""The folder with accounts inside raypipe's folder of a checkpoint."""

_WRITE_EVERY_S: Final = 2.0
_MOST_OF_TIME: Final = 0.01
"""Of a training loop's time, at most so much goes into writing."""


class AccountKeeper:
    """Writes the account of one rank of one attempt, again and again, to a folder of the run."""

    def __init__(self, folder: str, filesystem: pyarrow.fs.FileSystem | None, name: str, attempt: str) -> None:
        if filesystem is None:
            place = folder if "://" in folder else str(Path(folder).absolute())
            filesystem, folder = pyarrow.fs.FileSystem.from_uri(place)
        self._filesystem = filesystem
        self._folder = f"{folder}/{RUN_FOLDER}/{name}/{attempt}"
        self._due_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to write: every 2 s, or less often where that would cost a hundredth of the time."""
        return time.monotonic() > self._due_at

    def write(self, account: Account, rank: int, world_size: int) -> None:
        """Write the account as it is now; a storage that fails is warned of, and the run goes on."""
        started = time.monotonic()
        path = f"{self._folder}/{account_name(rank, world_size)}"
        try:
            write_account(path, account, self._filesystem)
        except OSError as error:
            warnings.warn(f"the account of rank {rank} was not written to {path!r}: {error}", stacklevel=2)
        now = time.monotonic()
        self._due_at = now + max(_WRITE_EVERY_S, (now - started) / _MOST_OF_TIME)


def write_rank_account(folder: Path, account: Account, rank: int, world_size: int) -> None:
    """Write the account of one rank into raypipe's folder of a checkpoint.

    Rank 0 removes those that another number of ranks wrote to the same folder before.
    """
    accounts = folder / ACCOUNTS / account.header.name
    write_account(accounts / account_name(rank, world_size), account)
    if rank == 0:
        for path in accounts.glob("rank-*.parquet"):
            if not path.name.endswith(account_name(0, world_size).removeprefix("rank-00000")):
                path.unlink(missing_ok=True)


def read_rank_accounts(filesystem: pyarrow.fs.FileSystem, folder: str, name: str) -> tuple[Part, ...]:
    """Return what all ranks had handed over when they wrote a checkpoint; nothing where they wrote no account.

    An account that is damaged is warned of: a run goes on without it.
    """
    selector = pyarrow.fs.FileSelector(f"{folder}/{ACCOUNTS}/{name}", allow_not_found=True)
    paths = sorted(info.path for info in filesystem.get_file_info(selector) if info.path.endswith(".parquet"))
    try:
        return merge_parts(part for path in paths for part in read_account(path, filesystem).parts)
    except RaypipeError as error:
        warnings.warn(f"the account of this run begins anew: {error}", stacklevel=2)
        return ()
