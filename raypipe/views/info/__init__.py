"""The answers of ``raypipe info``, ``stats``, ``account`` and ``where``, as values and as tables.

::

    dataset.py          ``raypipe info`` of a dataset                                      DatasetInfo
    mixture.py          ``raypipe info`` of a mixture file                                 MixtureInfo
    stats.py            ``raypipe stats``                                                  StatsReport
    run_frames.py       the frames of a run and their axis, of a dataset or a mixture      RunFrames
    account.py          ``raypipe account``: the account and its datasets, checked         check_run
    where.py            ``raypipe where``: the frames that a step gave to a rank           LocatedStep
    account_tables.py   verdicts and frames as tables
"""
