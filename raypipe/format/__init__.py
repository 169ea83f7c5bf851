"""The files of a LeRobot dataset: its ``meta/`` folder, its rows and the index of its videos. No pixels.

The modules, from the bottom up (each may use those above it)::

    a file                  tables.py        read_json     JSON, JSON lines and parquet, read within limits
    meta/info.json, tasks*  features.py      Feature       one per name; Tasks: task_index -> text
    meta/episodes*          episodes.py      EpisodeTable  columns, not objects
    all of meta/            dataset_meta.py  DatasetMeta   all of it as one value; tells v2.x from v3.0; paths of files
    meta/stats*, on demand  stats.py         read_stats    arrays per feature and statistic; made and pooled
    data/*.parquet          rows.py          RowReader     the rows of an episode
    videos/*.mp4            mp4.py           VideoIndex    where every frame is; codec and size

Format versions v2.0, v2.1 and v3.0 give the same `DatasetMeta`. Memory is O(episodes) in numpy and Arrow columns.
`read_metadata` does not look at data files; whoever reads data files checks them against ``meta/``.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.format.dataset_meta import (
        DATA_TEMPLATES,
        VERSIONS,
        VIDEO_TEMPLATES,
        DatasetMeta,
        format_path,
        read_fps,
        read_metadata,
        why_unfit,
    )
    from raypipe.format.episodes import (
        EPISODES_TEMPLATE,
        FILES_PER_CHUNK,
        FOLDER,
        JSON_LINES,
        EpisodeTable,
        VideoColumns,
        in_episodes_file,
        list_tables,
        read_episode_columns,
        read_episodes,
        split_tables,
    )
    from raypipe.format.features import (
        INDEX_COLUMNS,
        INDEX_FEATURES,
        PARQUET,
        TASK_LINES,
        DepthCodes,
        Feature,
        Tasks,
        read_features,
        read_tasks,
        tasks_table,
        why_unfit_name,
    )
    from raypipe.format.mp4 import (
        VideoFormat,
        VideoIndex,
        episode_first_frame,
        find_box,
        find_video_track,
        first_frames,
        forget_indexes,
        keyframe_interval,
        list_boxes,
        need_box,
        parse_moov,
        parse_times,
        parse_video_format,
        read_box,
        read_moov,
        read_ranged_index,
        read_video_format,
        read_video_index,
        same_codec,
        sample_durations,
        sample_keyframes,
        sample_places,
        sample_pts,
    )
    from raypipe.format.rows import (
        OpenFiles,
        RowReader,
        column_values,
        find_absent_columns,
        looked_at_rows,
        one_line,
        read_row_group_layout,
        row_features_of,
    )
    from raypipe.format.stats import (
        GLOBAL,
        MOMENTS,
        PER_EPISODE,
        QUANTILES,
        FeatureStats,
        Stats,
        describe_values,
        find_stats_file,
        is_low,
        is_quantile,
        pool_stats,
        read_stats,
    )
    from raypipe.format.tables import (
        BoundedParquet,
        check_not_refused,
        open_parquet,
        read_json,
        read_json_lines,
        read_parquet,
    )
else:
    __all__, __getattr__ = lazy_names(__name__)
