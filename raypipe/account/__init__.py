"""The account of a run: which frames were handed to the trainer, and whether that is every frame exactly once.

::

    runs.py            multisets of frames as runs                                Runs
    axis.py            one number for every frame of every dataset                FrameAxis
    parts.py           what was handed over from a start up to a state            Part, Account
    ledger.py          what a rank writes down, batch by batch                    Ledger, Page
    file.py            an account as a parquet file                               write_account, read_account
    replay.py          what the plan says of a part: frames, order, counts        Replay
    chain.py           which parts count: each begins where the one before ended  Chain
    seal.py            the digests that chain the parts of an account             seal_account
    gather.py          the files of a checkpoint as one account, torn or not      gather_account
    part_check.py      one part against the plan
    epoch_verdict.py   what a check says of an epoch                              EpochVerdict
    verdict.py         emitted, skipped, left over, to come: each frame once?     check_account
    folder.py          the accounts of a checkpoint or of a run's folder          RunAccount

What is recorded comes from the batches and never from the plan, so a check by the plan can fail.
"""

from raypipe.account.axis import FrameAxis, FrameRange, frame_numbers, lay_out
from raypipe.account.ledger import Handed, Hole, Ledger, Page
from raypipe.account.parts import Account, Header, Part, RankRecord, Skip, merge_accounts, merge_parts
from raypipe.account.runs import Runs, add_runs, count_values, runs_beyond_once, subtract_runs

__all__ = [
    "Account",
    "FrameAxis",
    "FrameRange",
    "Handed",
    "Header",
    "Hole",
    "Ledger",
    "Page",
    "Part",
    "RankRecord",
    "Runs",
    "Skip",
    "add_runs",
    "count_values",
    "frame_numbers",
    "lay_out",
    "merge_accounts",
    "merge_parts",
    "runs_beyond_once",
    "subtract_runs",
]
