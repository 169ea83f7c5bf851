"""Rewrites a dataset of any version as v3.0 with one row group per episode; never in place.

::

    spec.py         the choices, and the report               ReshardSpec, ReshardReport
    request.py      whether the choices are possible
    workspace.py    OUT.partial-...: resuming, renaming       Workspace
    plan.py         episodes -> files                         pure
    mp4.py, mux.py  packets of an mp4, and an mp4 of packets
    pieces.py       where a video can be cut                  pure, but for reading the index
    encode.py       episodes -> clips, if pixels change
    data.py, videos.py                                        one file of the copy: a unit of work
    columns.py, info.py, stats.py, source_meta.py, meta.py    meta/ of the copy
    tasks.py        units in this process or on Ray
    finish.py, run.py                                         the steps in order

Rows keep their values and videos their packets, unless the spec changes pixels. Episodes keep their numbers, unless the
spec leaves some out: then the others get new numbers from 0, and ``meta/reshard_episodes.parquet`` maps new to old.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.reshard.run import reshard_dataset
    from raypipe.reshard.spec import ReshardReport, ReshardSpec, parse_spec, report_lines
else:
    __all__, __getattr__ = lazy_names(
        __name__,
        {
            "run": "reshard_dataset",
            "spec": "ReshardReport ReshardSpec parse_spec report_lines",
        },
    )
