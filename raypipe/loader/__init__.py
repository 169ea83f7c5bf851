"""The rank: from blocks of rows to torch batches, and where it is, as a small state.

::

    spec.py          what a rank does with its blocks                              LoaderSpec
    job.py           what a rank loads, and where its blocks come from             RankJob
    live_rows.py     the rows of the spans at hand                                 LiveRows
    clips.py         the clips that a batch needs, and what each is made of        BatchClips
    batch.py         a batch in the keys, dtypes and shapes of LeRobot             BatchBuilder
    assembly.py      batches from the spans at hand, also where some are bad       Assembler
    transforms.py    what users change about samples and batches
    epoch_run.py     one pass over the rest of an epoch: threads, blocks, batches  EpochRun
    position.py      a pass, and how far it is                                     Stand
    next_epoch.py    the run of the epoch that follows, started early              Ahead
    rank_loader.py   all of that                                                   RankLoader
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.loader.batch import span_columns
    from raypipe.loader.job import RankJob, with_source
    from raypipe.loader.rank_loader import RankLoader
    from raypipe.loader.spec import LoaderSettings, LoaderSpec, Transform, change_spec, check_names
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "batch": "span_columns",
            "job": "RankJob with_source",
            "rank_loader": "RankLoader",
            "spec": "LoaderSettings LoaderSpec Transform change_spec check_names",
        },
    )

__all__ = [
    "LoaderSettings",
    "LoaderSpec",
    "RankJob",
    "RankLoader",
    "Transform",
    "change_spec",
    "check_names",
    "span_columns",
    "with_source",
]
