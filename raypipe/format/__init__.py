"""The files of a LeRobot dataset: its ``meta/`` folder, its rows and the index of its videos. No pixels.

::

    meta/info.json            features.py       Feature       one per name; with depth codes
                              templates.py                    where its data files and videos are
                              texts.py          TextColumn    texts of frames, stored as numbers or records
    meta/episodes*            episodes.py       EpisodeTable  columns, not objects
    meta/tasks*               tasks.py          Tasks         task_index -> text
    meta/stats*, on demand    stats.py          read_stats    arrays per feature and statistic; pooling.py pools them
    a file of meta/           tables.py         read_json     with errors that name the file
    a parquet file            parquet.py                      read within limits
    all of meta/              dataset_meta.py   DatasetMeta   the sum of the above
    data/*.parquet            rows.py           RowReader     the rows of an episode
                              row_features.py                 which features come from rows
    a new dataset             writing.py                      what its writers share
    videos/*.mp4              mp4_boxes.py                    where things are in an mp4
                              mp4_index.py      VideoIndex    where every frame is
                              mp4_codec.py      VideoFormat   codec and size

Format versions v2.0, v2.1 and v3.0 give the same `DatasetMeta`. Memory is O(episodes) in numpy and Arrow columns.
`read_metadata` does not look at data files; their readers check that they keep what ``meta/`` promises.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.format.dataset_meta import VERSIONS, DatasetMeta, read_metadata
    from raypipe.format.episodes import (
        FOLDER,
        JSON_LINES,
        EpisodeTable,
        VideoColumns,
        list_tables,
        read_episode_columns,
        read_episodes,
        split_tables,
    )
    from raypipe.format.features import INDEX_FEATURES, DepthCodes, Feature, read_features, why_unfit_name
    from raypipe.format.mp4_boxes import (
        box_timescale,
        find_box,
        list_boxes,
        need_box,
        read_box,
        read_edit,
        sample_durations,
        sample_keyframes,
        sample_offsets,
        sample_pts,
        sample_sizes,
    )
    from raypipe.format.mp4_codec import VideoFormat, parse_video_format, read_video_format, same_codec
    from raypipe.format.mp4_index import (
        VideoIndex,
        episode_first_frame,
        find_video_track,
        first_frames,
        forget_indexes,
        keyframe_interval,
        parse_moov,
        read_ranged_index,
        read_video_index,
    )
    from raypipe.format.parquet import BoundedParquet
    from raypipe.format.pooling import MOMENTS, FeatureStats, Stats, is_low, is_quantile, pool_stats
    from raypipe.format.row_features import find_absent_columns, looked_at_rows, row_features_of
    from raypipe.format.rows import (
        OpenFiles,
        RowReader,
        column_values,
        one_line,
        read_row_group_layout,
        row_group_bounds,
    )
    from raypipe.format.stats import GLOBAL, PER_EPISODE, find_stats_file, read_stats
    from raypipe.format.tables import check_not_refused, open_parquet, read_json, read_json_lines, read_parquet
    from raypipe.format.tasks import PARQUET, TASK_LINES, Tasks, read_tasks
    from raypipe.format.templates import DATA_TEMPLATES, VIDEO_TEMPLATES, why_unfit
    from raypipe.format.writing import (
        EPISODES_TEMPLATE,
        FILES_PER_CHUNK,
        QUANTILES,
        describe_values,
        format_path,
        in_episodes_file,
        tasks_table,
    )
else:
    __all__, __getattr__ = lazy_names(
        __name__,
        {
            "dataset_meta": "DatasetMeta VERSIONS read_metadata",
            "episodes": (
                "EpisodeTable FOLDER JSON_LINES VideoColumns list_tables read_episode_columns read_episodes "
                "split_tables"
            ),
            "features": "DepthCodes Feature INDEX_FEATURES read_features why_unfit_name",
            "mp4_boxes": (
                "box_timescale find_box list_boxes need_box read_box read_edit sample_durations sample_keyframes "
                "sample_offsets sample_pts sample_sizes"
            ),
            "mp4_codec": "VideoFormat parse_video_format read_video_format same_codec",
            "mp4_index": (
                "VideoIndex episode_first_frame find_video_track first_frames forget_indexes keyframe_interval "
                "parse_moov read_ranged_index read_video_index"
            ),
            "parquet": "BoundedParquet",
            "pooling": "FeatureStats MOMENTS Stats is_low is_quantile pool_stats",
            "row_features": "find_absent_columns looked_at_rows row_features_of",
            "rows": "OpenFiles RowReader column_values one_line read_row_group_layout row_group_bounds",
            "stats": "GLOBAL PER_EPISODE find_stats_file read_stats",
            "tables": "check_not_refused open_parquet read_json read_json_lines read_parquet",
            "tasks": "PARQUET TASK_LINES Tasks read_tasks",
            "templates": "DATA_TEMPLATES VIDEO_TEMPLATES why_unfit",
            "writing": (
                "EPISODES_TEMPLATE FILES_PER_CHUNK QUANTILES describe_values format_path in_episodes_file tasks_table"
            ),
        },
    )
