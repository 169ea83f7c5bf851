"""Record which frames a run handed to the trainer, and check that this is every frame exactly once.

::

    runs.py            multisets of frames as runs                                Runs
    axis.py            one number for every frame of every dataset                FrameAxis
    parts.py           what ranks handed over from a start up to a state          Part, Account
    ledger.py          what a rank records, batch by batch                        Ledger, Page
    file.py            an account as a parquet file                               write_account, read_account
    keeping.py         writes such files into and beside checkpoints              AccountKeeper
    replay.py          frames, order and counts of a part according to the plan   Replay
    chain.py           which parts count: each begins where the previous ended    Chain
    seal.py            the digests that chain the parts of an account             seal_account
    gather.py          the files of a checkpoint as one account, torn or not      gather_account
    part_check.py      checks one part against the plan
    epoch_verdict.py   the result of a check for one epoch                        EpochVerdict
    verdict.py         emitted, skipped, left over, to come: each frame once?     check_account
    folder.py          the accounts of a checkpoint or of a run's folder          RunAccount

The record comes from the batches and never from the plan, so checking it against the plan can find errors. The commands
``raypipe account`` and ``raypipe where``, which also open the datasets, are in `raypipe.views`.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.account.axis import DATASET_BITS, FrameAxis, frame_numbers, lay_out
    from raypipe.account.chain import drop_later_epochs, link_parts
    from raypipe.account.epoch_verdict import EpochVerdict
    from raypipe.account.folder import RunAccount, read_run_account
    from raypipe.account.gather import HEAD
    from raypipe.account.keeping import AccountKeeper, read_rank_accounts, write_rank_account
    from raypipe.account.ledger import Handed, Hole, Ledger, Page
    from raypipe.account.parts import Account, Header, Part, Skip, merge_accounts, merge_parts
    from raypipe.account.replay import Replay
    from raypipe.account.runs import Runs, add_runs, count_values, empty_runs, subtract_runs
    from raypipe.account.seal import seal_account
    from raypipe.account.verdict import check_account
else:
    __all__, __getattr__ = lazy_names(
        __name__,
        {
            "axis": "DATASET_BITS FrameAxis frame_numbers lay_out",
            "chain": "drop_later_epochs link_parts",
            "epoch_verdict": "EpochVerdict",
            "folder": "RunAccount read_run_account",
            "gather": "HEAD",
            "keeping": "AccountKeeper read_rank_accounts write_rank_account",
            "ledger": "Handed Hole Ledger Page",
            "parts": "Account Header Part Skip merge_accounts merge_parts",
            "replay": "Replay",
            "runs": "Runs add_runs count_values empty_runs subtract_runs",
            "seal": "seal_account",
            "verdict": "check_account",
        },
    )
