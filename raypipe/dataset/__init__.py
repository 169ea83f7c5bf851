"""One open dataset: its samples one at a time, and the choices a user makes about its frames.

::

    dataset.py        the reference path: reads one sample at a time                 Dataset
    windows.py        turns offsets into row numbers and padding, in one episode     WindowSpec
    actions.py        makes actions relative to the state, or to the action before   ActionSpec, ActionMap
    action_stats.py   computes statistics of such actions
    selection.py      finds the frames of an epoch from a `SelectionSpec`            index_dataset
    schema.py         lists the features of a batch, and which dataset gives which   Schema
    download.py       downloads a dataset from the Hub, or only some episodes        download_dataset
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.dataset.action_stats import RepresentedStats
    from raypipe.dataset.actions import (
        ABSOLUTE,
        REPRESENTATION,
        ActionMap,
        ActionSpec,
        check_window,
        find_dims,
        is_pattern,
        map_actions,
    )
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
    from raypipe.dataset.schema import DIM_IS_PAD, IS_MISSING, MemberMap, Schema, schema_of
    from raypipe.dataset.selection import index_dataset, settle_selection
    from raypipe.dataset.windows import TOLERANCE_S, WindowSpec, window_from_offsets, window_rows
else:
    __all__, __getattr__ = lazy_names(
        __name__,
        {
            "action_stats": "RepresentedStats",
            "actions": "ABSOLUTE ActionMap ActionSpec REPRESENTATION check_window find_dims is_pattern map_actions",
            "dataset": (
                "Dataset SampleSpec Timestamps check_cameras find_missing_cameras kept_features knowing_rows "
                "open_dataset unreadable_cameras why_missing"
            ),
            "download": "DownloadReport DownloadSpec download_dataset parse_episodes report_lines",
            "schema": "DIM_IS_PAD IS_MISSING MemberMap Schema schema_of",
            "selection": "index_dataset settle_selection",
            "windows": "TOLERANCE_S WindowSpec window_from_offsets window_rows",
        },
    )
