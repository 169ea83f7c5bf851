"""raypipe feeds robot-policy training on a Ray cluster from LeRobot datasets.

::

    dataset on disk, object store or Hub
      | metadata.read_metadata    DatasetMeta     what exists; no pixels, O(episodes)          pure values
      | plan.plan_epoch           EpochPlan       spans, order, per-rank queues, frame order   pure
      | dataset.open_dataset      Dataset         one sample at a time: the reference path
      v

Importing this package imports neither torch nor Ray: each name is loaded when it is first used.
"""

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypipe.dataset import Dataset, open_dataset
    from raypipe.errors import (
        ConfigError,
        DatasetError,
        DecodeError,
        DownloadError,
        RaypipeError,
        ResumeError,
    )
    from raypipe.metadata import DatasetMeta, read_metadata

_HOMES = {
    "ConfigError": "errors",
    "Dataset": "dataset",
    "DatasetError": "errors",
    "DatasetMeta": "metadata",
    "DecodeError": "errors",
    "DownloadError": "errors",
    "RaypipeError": "errors",
    "ResumeError": "errors",
    "open_dataset": "dataset",
    "read_metadata": "metadata",
}

__all__ = [
    "ConfigError",
    "Dataset",
    "DatasetError",
    "DatasetMeta",
    "DecodeError",
    "DownloadError",
    "RaypipeError",
    "ResumeError",
    "open_dataset",
    "read_metadata",
]

__version__ = _version("raypipe")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raypipe' has no attribute {name!r}")
    return getattr(import_module(f"raypipe.{_HOMES[name]}"), name)
