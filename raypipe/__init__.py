"""raypipe feeds robot-policy training on a Ray cluster from LeRobot datasets.

::

    dataset on disk, object store or Hub
      | format.read_metadata      DatasetMeta     what exists; no pixels, O(episodes)             pure values
      | plan.plan_epoch           EpochPlan       spans, clips, per-rank queues, frame order      pure
      | feed.read_block           block           the rows of some spans, windows and pad masks   the rank, or Ray Data
      | feed.ray_data             per-rank iters  streaming_split, steered to the planned rank    Ray Data only
      | loader.LiveRows           rows at hand    the rows of the live spans                      rank
      | decode.ClipStore          pixels at hand  clips, decoded ahead of need, held until used   rank, or Ray tasks
      | loader.RankLoader         torch batches   resumable iterator, one per rank                rank
      v train.get_loader          Ray Train       a loader per training worker

A rank reads its own rows (`feed.local`) or gets them from Ray Data (`feed.feeder`); the batches are the same. Pixels
do not travel with rows: the plan tells a rank which clips it needs next, and the rank has them decoded.

The rooms, from the lowest layer to the highest. Import each through its door, its ``__init__.py``::

    errors     one class per person who must act
    text       text in and out: settings, limits, messages, progress bars
    storage    names to bytes: local, fsspec, Hub, the node's cache, the budget of requests
    plan       the order of an epoch; no files, no Ray
    format     the files of a LeRobot dataset: meta/ of v2.0, v2.1 and v3.0, rows, the index of an mp4
    decode     frames by number, and frames into an mp4
    account    the record of what was handed over, and the check that every frame was handed over once
    dataset    one dataset, opened: samples one at a time, windows, actions, selections
    testing    small real datasets for tests, and the test of resuming
    mixture    many unlike datasets as one, their statistics, and the normaliser
    feed       rows to a rank: blocks, the local feed, Ray Data, agreement of ranks, bad data, figures
    loader     the rank: rows at hand, batches, the state
    validate   checks a dataset before training
    pipeline   the settings of all stages, composed
    reshard    rewrites a dataset of any version as v3.0
    train      Ray Train, torchrun, checkpoints
    views      pages and tables for people: `raypipe show`, `info`, `stats`, `account`, `where`
    bench      finds the best settings of a pipeline
    lerobot    LeRobot's policies and its trainer on raypipe's batches
    cli        the command line

Importing this package imports neither torch nor Ray: each name is loaded on first use.
"""

import sys
from collections.abc import Callable
from dis import get_instructions
from functools import partial
from importlib import import_module
from importlib.metadata import version as _version
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from raypipe.dataset import ActionSpec, Dataset, WindowSpec
    from raypipe.decode import DecodeSpec
    from raypipe.errors import ConfigError, DatasetError, DecodeError, DownloadError, RaypipeError, ResumeError
    from raypipe.feed import FeedSpec
    from raypipe.format import DatasetMeta, read_metadata
    from raypipe.loader import LoaderSpec, RankLoader
    from raypipe.mixture import MemberSpec, Mixture, MixtureSpec, MixtureStats, Normaliser, open_dataset
    from raypipe.pipeline import Pipeline
    from raypipe.plan import BatchSpec, OrderSpec, SelectionSpec
    from raypipe.storage import CacheSpec
    from raypipe.views import show

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


def lazy_names(door: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return ``__all__`` and ``__getattr__`` of a room's door, which imports a name when it is first used.

    A door states its names once, as imports below ``if TYPE_CHECKING``, and this reads them from the door's code.
    Callers import from the door, yet a process imports only the modules it uses.
    """
    modules, module = {}, ""
    # The bytecode, not the source: programs may come without sources.
    for step in get_instructions(cast(Any, sys.modules[door].__spec__).loader.get_code(door)):
        if step.opname == "IMPORT_NAME":
            module = step.argval
        elif step.opname == "IMPORT_FROM" and module.startswith(f"{door}."):
            modules[step.argval] = module

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {door!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return sorted(modules), load


_, _load = lazy_names(__name__)

_MOVED = {"actions": "dataset", "config": "pipeline", "download": "dataset", "metrics": "feed", "skips": "feed"}
"""Documented modules of before the rooms: each gives the names of the room that has them now."""


def _load_moved(room: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'raypipe' has no attribute {name!r}")
    return getattr(import_module(f"raypipe.{room}"), name)


for _name, _room in _MOVED.items():
    # Plain modules: Ray sends those that a function's names may mean to its workers.
    sys.modules[f"raypipe.{_name}"] = ModuleType(f"raypipe.{_name}")
    vars(sys.modules[f"raypipe.{_name}"])["__getattr__"] = partial(_load_moved, _room)


def __getattr__(name: str) -> Any:
    if name in ("lerobot", "testing", "train", "validate", "views") or name in _MOVED:
        return import_module(f"raypipe.{name}")
    return _load(name)
