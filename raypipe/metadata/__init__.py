"""What a LeRobot dataset holds, from its ``meta/`` folder: values, no rows, no pixels.

::

    meta/info.json            -> features.read_features     Feature     one per name
    meta/episodes*            -> episodes.read_episodes     EpisodeTable columns, not objects
    meta/tasks*               -> tasks.read_tasks           Tasks       task_index -> text
    meta/stats*, on demand    -> stats.read_stats           arrays per feature and statistic

Format versions v2.0, v2.1 and v3.0 come out as the same `DatasetMeta`. Memory is O(episodes) in numpy and
Arrow columns. It does not look at data files: that they keep what ``meta/`` promises is checked by whoever
reads them.
"""

from raypipe.metadata.dataset_meta import DatasetMeta, Source, read_metadata
from raypipe.metadata.episodes import EpisodeTable, VideoColumns, read_episode_columns
from raypipe.metadata.features import INDEX_FEATURES, DepthCodes, Feature
from raypipe.metadata.stats import read_stats
from raypipe.metadata.tasks import Tasks

__all__ = [
    "INDEX_FEATURES",
    "DatasetMeta",
    "DepthCodes",
    "EpisodeTable",
    "Feature",
    "Source",
    "Tasks",
    "VideoColumns",
    "read_episode_columns",
    "read_metadata",
    "read_stats",
]
