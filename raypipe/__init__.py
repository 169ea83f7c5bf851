"""raypipe feeds robot-policy training on a Ray cluster from LeRobot datasets.

::

    dataset on disk, object store or Hub
      | metadata.read_metadata    DatasetMeta     what exists; no pixels, O(episodes)             pure values
      | plan.plan_epoch           EpochPlan       spans, clips, per-rank queues, frame order      pure
      | block.read_rows           block           the rows of some spans                          the rank, or Ray Data
      | block.add_windows         block -> block  windows and pad masks of the rows               the rank, or Ray Data
      | streaming_split(world)    per-rank iters  ordered, steered to the planned rank            Ray Data only
      | liverows.LiveRows         rows at hand    the rows of the live spans                      rank
      | decode.clips.ClipStore    pixels at hand  clips, decoded ahead of need, held until used   rank, or Ray tasks
      | loader.RankLoader         torch batches   resumable iterator, one per rank                rank
      v train.get_loader          Ray Train       a loader per training worker

A rank reads its own rows (`local`), or gets them from Ray Data (`feeder`): the batches are the same. Pixels do not
travel with rows: a rank knows from the plan which clips it needs next, and has them decoded.

Beside the flow stand `dataset.Dataset`, the reference path: one sample at a time; and `mixture.Mixture`, many unlike
datasets as one. Importing this package imports neither torch nor Ray: each name is loaded when it is first used.
"""

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypipe.actions import ActionSpec
    from raypipe.dataset import Dataset
    from raypipe.decode.spec import DecodeSpec
    from raypipe.errors import (
        ConfigError,
        DatasetError,
        DecodeError,
        DownloadError,
        RaypipeError,
        ResumeError,
    )
    from raypipe.loader import RankLoader
    from raypipe.loader_spec import LoaderSpec
    from raypipe.metadata import DatasetMeta, read_metadata
    from raypipe.mixture import MemberSpec, Mixture, MixtureSpec, open_dataset
    from raypipe.normalise import MixtureStats, Normaliser
    from raypipe.pipeline import Pipeline
    from raypipe.plan import BatchSpec, OrderSpec, SelectionSpec
    from raypipe.source import FeedSpec
    from raypipe.storage import CacheSpec
    from raypipe.views import show
    from raypipe.window import WindowSpec

_HOMES = {
    "ActionSpec": "actions",
    "BatchSpec": "plan",
    "CacheSpec": "storage",
    "ConfigError": "errors",
    "Dataset": "dataset",
    "DatasetError": "errors",
    "DatasetMeta": "metadata",
    "DecodeError": "errors",
    "DecodeSpec": "decode.spec",
    "DownloadError": "errors",
    "FeedSpec": "source",
    "LoaderSpec": "loader_spec",
    "MemberSpec": "mixture",
    "Mixture": "mixture",
    "MixtureSpec": "mixture",
    "MixtureStats": "normalise",
    "Normaliser": "normalise",
    "OrderSpec": "plan",
    "Pipeline": "pipeline",
    "RankLoader": "loader",
    "RaypipeError": "errors",
    "ResumeError": "errors",
    "SelectionSpec": "plan",
    "WindowSpec": "window",
    "open_dataset": "mixture",
    "read_metadata": "metadata",
    "show": "views",
}

__all__ = [
    "ActionSpec",
    "BatchSpec",
    "CacheSpec",
    "ConfigError",
    "Dataset",
    "DatasetError",
    "DatasetMeta",
    "DecodeError",
    "DecodeSpec",
    "DownloadError",
    "FeedSpec",
    "LoaderSpec",
    "MemberSpec",
    "Mixture",
    "MixtureSpec",
    "MixtureStats",
    "Normaliser",
    "OrderSpec",
    "Pipeline",
    "RankLoader",
    "RaypipeError",
    "ResumeError",
    "SelectionSpec",
    "WindowSpec",
    "open_dataset",
    "read_metadata",
    "show",
]

__version__ = _version("raypipe")


def __getattr__(name: str) -> Any:
    if name in ("lerobot", "testing", "train", "validate", "views"):
        return import_module(f"raypipe.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'raypipe' has no attribute {name!r}")
    return getattr(import_module(f"raypipe.{_HOMES[name]}"), name)
