"""One dataset, opened: samples one at a time, and what a user says of its frames.

::

    dataset.py        the reference path: a dataset, one sample at a time                 Dataset
    windows.py        offsets to row numbers and padding, inside one episode              WindowSpec
    actions.py        actions relative to the state, or to the action before              ActionSpec, ActionMap
    action_stats.py   statistics of such actions
    selection.py      the frames of an epoch: a `SelectionSpec` against the tables        index_dataset
    schema.py         what a batch is made of, whichever datasets its samples are from    Schema
    download.py       a dataset of the Hub on disk, or the episodes that are needed       download_dataset
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
    __getattr__ = lazy_names(
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

__all__ = [
    "ABSOLUTE",
    "DIM_IS_PAD",
    "IS_MISSING",
    "REPRESENTATION",
    "TOLERANCE_S",
    "ActionMap",
    "ActionSpec",
    "Dataset",
    "DownloadReport",
    "DownloadSpec",
    "MemberMap",
    "RepresentedStats",
    "SampleSpec",
    "Schema",
    "Timestamps",
    "WindowSpec",
    "check_cameras",
    "check_window",
    "download_dataset",
    "find_dims",
    "find_missing_cameras",
    "index_dataset",
    "is_pattern",
    "kept_features",
    "knowing_rows",
    "map_actions",
    "open_dataset",
    "parse_episodes",
    "report_lines",
    "schema_of",
    "settle_selection",
    "unreadable_cameras",
    "why_missing",
    "window_from_offsets",
    "window_rows",
]
