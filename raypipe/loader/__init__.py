"""Turn a rank's blocks of rows into torch batches, and keep its position as a small state.

::

    spec.py          what a rank does with its blocks                              LoaderSpec
    job.py           what a rank loads, and who supplies its blocks                RankJob
    live_rows.py     the rows of the spans at hand                                 LiveRows
    clips.py         the clips that a batch needs, and the frames of each          BatchClips
    batch.py         a batch in the keys, dtypes and shapes of LeRobot             BatchBuilder
    assembly.py      batches from the spans at hand, without the bad ones          Assembler
    transforms.py    users' transforms of samples and batches
    epoch_run.py     one pass over the rest of an epoch: threads, blocks, batches  EpochRun
    position.py      a pass, and how far it is                                     Stand
    next_epoch.py    the run of the next epoch, started early                      Ahead
    rank_loader.py   the loader that users iterate, composed of the above          RankLoader
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.loader.batch import span_columns
    from raypipe.loader.job import RankJob, with_source
    from raypipe.loader.rank_loader import RankLoader
    from raypipe.loader.spec import LoaderSettings, LoaderSpec, Transform, change_spec, check_names
else:
    __all__, __getattr__ = lazy_names(
        __name__,
        {
            "batch": "span_columns",
            "job": "RankJob with_source",
            "rank_loader": "RankLoader",
            "spec": "LoaderSettings LoaderSpec Transform change_spec check_names",
        },
    )
