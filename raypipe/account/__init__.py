"""Record which frames a run handed to the trainer, and check that this is every frame exactly once.

The modules, from the bottom up (each may use those above it)::

    frames.py      numbers every frame of all datasets; sets of such numbers that count repeats   FrameAxis, Runs
    parts.py       what ranks handed over from a start to a saved state, with a chain of digests  Part, Account
    ledger.py      what a rank records, batch by batch                                            Ledger, Page
    file.py        an account as a parquet file                                                   write_account
    checkpoint.py  the files of a checkpoint, and which of them lead to its state                 CheckpointFiles
    folder.py      the accounts of a run's folder and of its checkpoints                          AccountKeeper
    replay.py      what a part must have by the plan, and which parts count                       Replay, Chain
    verdict.py     the check: is every frame exactly one of these, once?                          check_account
                   emitted, skipped, left over, to come

The record comes from the batches and never from the plan, so checking it against the plan can find errors. The commands
``raypipe account`` and ``raypipe where``, which also open the datasets, are in `raypipe.views`.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.account.checkpoint import read_rank_accounts, write_rank_account
    from raypipe.account.folder import AccountKeeper, RunAccount, read_run_account
    from raypipe.account.frames import (
        DATASET_BITS,
        FrameAxis,
        Runs,
        add_runs,
        count_values,
        empty_runs,
        frame_numbers,
        lay_out,
        subtract_runs,
    )
    from raypipe.account.ledger import Handed, Ledger, Page
    from raypipe.account.parts import HEAD, Account, Header, Part, Skip, merge_accounts, merge_parts, seal_account
    from raypipe.account.replay import Replay, drop_later_epochs, link_parts
    from raypipe.account.verdict import EpochVerdict, check_account
else:
    __all__, __getattr__ = lazy_names(__name__)
