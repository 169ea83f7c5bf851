"""What the commands ``raypipe account`` and ``raypipe where`` do: an account and its datasets, brought together.

::

    frames.py   the frames of a run and their axis, of a dataset or a mixture    RunFrames
    check.py    what ``raypipe account`` does                                    check_run
    where.py    what ``raypipe where`` does                                      LocatedStep
    report.py   verdicts and frames as tables
"""
