"""One open dataset: its samples one at a time, and the choices a user makes about its frames.

The modules, from the bottom up (each may use those above it)::

    windows.py       the frames around a frame, and actions relative to a state  WindowSpec, ActionSpec
    action_stats.py  computes statistics of such actions
    dataset.py       the reference path: reads one sample at a time              Dataset
    selection.py     which frames an epoch takes, and the features of a batch    index_dataset, Schema
    download.py      downloads a dataset from the Hub, or only some episodes     download_dataset
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.dataset.action_stats import RepresentedStats
    from raypipe.dataset.dataset import (
        Dataset,
        SampleSpec,
        Timestamps,
        check_cameras,
        find_missing_cameras,
        kept_features,
        knowing_rows,
        open_dataset,
        unreadable_cameras,
        why_missing,
    )
    from raypipe.dataset.download import DownloadReport, DownloadSpec, download_dataset, parse_episodes, report_lines
    from raypipe.dataset.selection import (
        DIM_IS_PAD,
        IS_MISSING,
        MemberMap,
        Schema,
        index_dataset,
        schema_of,
        settle_selection,
    )
    from raypipe.dataset.windows import (
        ABSOLUTE,
        REPRESENTATION,
        TOLERANCE_S,
        ActionMap,
        ActionSpec,
        WindowSpec,
        as_seconds,
        between_frames,
        check_window,
        find_dims,
        is_pattern,
        map_actions,
        off_frame_s,
        window_from_offsets,
        window_rows,
    )
else:
    __all__, __getattr__ = lazy_names(__name__)
