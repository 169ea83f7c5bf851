"""Turn a rank's blocks of rows into torch batches, and keep its position as a small state.

The modules, from the bottom up (each may use those above it)::

    job.py          what a rank loads, its settings, and where a pass begins          RankJob, LoaderSpec, Stand
    at_hand.py      the rows of the spans at hand, and the clips of the next batches  LiveRows, BatchClips
    transforms.py   users' transforms of samples and batches
    assembly.py     joins rows and clips into batches with LeRobot's keys;            Assembler
                    leaves out bad spans, or raises
    epoch_run.py    one pass over the rest of an epoch: threads, blocks, batches;     EpochRun
                    the next epoch's run, started early                               Ahead
    rank_loader.py  the loader that users iterate, composed of the above              RankLoader
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.loader.assembly import span_columns
    from raypipe.loader.job import LoaderSettings, LoaderSpec, RankJob, Transform, change_spec, check_names, with_source
    from raypipe.loader.rank_loader import RankLoader
else:
    __all__, __getattr__ = lazy_names(__name__)
