"""Rewrites a dataset of any version as v3.0 with one row group per episode; never in place.

The modules, from the bottom up (each may use those above it)::

    workspace.py  the unfinished copy, `OUT.partial-...`: resumed, and renamed when complete  Workspace
    mp4.py        packets of an mp4, and an mp4 of packets
    plan.py       the choices and whether they are possible, new numbers, episodes -> files   ReshardSpec
    videos.py     re-encodes episodes if asked, cuts videos into pieces of packets,           units of work
                  joins one video file
    data.py       columns, one data file, statistics of its rows                              a unit of work
    meta.py       meta/ of the copy: what the source's says of episodes, statistics, all files
    run.py        all steps in order, in this process or on Ray                reshard_dataset, ReshardReport

Rows keep their values and videos their packets, unless the spec changes pixels. Episodes keep their numbers, unless the
spec leaves some out: then the others get new numbers from 0, and ``meta/reshard_episodes.parquet`` maps new to old.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.reshard.plan import ReshardSpec, parse_spec
    from raypipe.reshard.run import ReshardReport, report_lines, reshard_dataset
else:
    __all__, __getattr__ = lazy_names(__name__)
