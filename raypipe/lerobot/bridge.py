"""Makes the metadata and batches that LeRobot's policies expect, from what raypipe reads.

It fills LeRobot's own classes with what raypipe knows. So a policy can use datasets of format v2.x and mixtures, which
LeRobot does not open, like any other. The policy's config decides the frames of a window.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np

from raypipe.dataset import Dataset
from raypipe.decode import DecodeSpec
from raypipe.errors import ConfigError
from raypipe.format import INDEX_FEATURES, Feature, Stats
from raypipe.loader import RankLoader, Transform
from raypipe.mixture import Mixture, MixtureStats
from raypipe.pipeline import Pipeline, datasets_of, schema_for
from raypipe.plan import SelectionSpec
from raypipe.text import how_to_install, make_spec

if TYPE_CHECKING:
    import torch
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.datasets import LeRobotDatasetMetadata

DepthUnit = Literal["mm", "m"]
"""The values of LeRobot's ``depth_output_unit``."""

VERSION_TRIED: Final = "0.6.1"
"""The LeRobot version that the tests run on."""

_ACTION, _REWARD, _OBSERVATION = "action", "next.reward", "observation."
"""LeRobot's names: they decide which of a config's windows a feature has."""

_MM_PER_M: Final = 1000.0

_LEAST_STD: Final = 1e-3
"""The least plausible std of a camera's pixels in [0, 1]: a quarter of a grey level. Published datasets have cameras
with 7e-05 and less."""


def pipeline(
    dataset: Dataset | Mixture, config: "PreTrainedConfig", *, batch_size: Any, seed: int, **parts: Any
) -> Pipeline:
    """Return a pipeline with the windows of a policy's config, without the last frames that the config leaves out.

    Args:
        config: of any LeRobot policy; it need not have its features yet.
        batch_size: passed to `Pipeline`, as are ``seed`` and ``parts``.
    """
    num_dropped = getattr(config, "drop_n_last_frames", 0) or 0
    if num_dropped:
        parts["selection"] = _without_last(dataset, parts.get("selection", {}), num_dropped)
    return Pipeline(windowed(dataset, config), batch_size=batch_size, seed=seed, **parts)


def windowed(dataset: Dataset | Mixture, config: "PreTrainedConfig") -> Dataset | Mixture:
    """Return the dataset with the windows of a policy's config."""
    offsets = _offsets(dataset, config)
    return dataset.windowed(offsets=offsets) if offsets else dataset


def delta_timestamps(dataset: Dataset | Mixture, config: "PreTrainedConfig") -> dict[str, list[float]]:
    """Return the windows of a policy's config in seconds, like LeRobot's `resolve_delta_timestamps`."""
    rates = {one.meta.fps for one in datasets_of(dataset)}
    if len(rates) > 1:
        raise ConfigError(
            f"the datasets of the mixture have {', '.join(f'{rate:g}' for rate in sorted(rates))} fps, and a policy's "
            f"windows are in frames. rp.lerobot.pipeline(mixture, config, ...) takes frames of each at its own rate; "
            f"give the mixture a rate for one that holds for all."
        )
    (fps,) = rates
    return {name: [frame / fps for frame in frames] for name, frames in _offsets(dataset, config).items()}


def batches(loader: RankLoader, *, depth_unit: DepthUnit = "mm") -> RankLoader:
    """Return the loader with batches for LeRobot's policies, at the position of the given loader.

    The batches equal those of `LeRobotDataset` through a DataLoader: cameras float32 in [0, 1], vectors float32,
    ``task`` as texts, ``*_is_pad`` masks; on the loader's device. raypipe's own keys, such as ``augment_seed``, stay:
    LeRobot's pre-processors ignore them. A transform of the loader runs first.

    Args:
        depth_unit: of depth cameras; give `metadata` the same.
    """
    schema = schema_for(loader.dataset)
    _check_unit(depth_unit)
    in_metres = [name for name in schema.cameras if depth_unit == "m" and schema.features[name].is_depth]
    change = _PolicyBatch(frozenset(schema.cameras), frozenset(in_metres), loader.settings.transform)
    return loader.with_settings(transform=change)


def _check_unit(unit: str) -> None:
    if unit not in get_args(DepthUnit):
        raise ConfigError(f"depth_unit must be one of {', '.join(map(repr, get_args(DepthUnit)))}, got {unit!r}")


@dataclass(frozen=True)
class _PolicyBatch:
    """The transform of a batch that LeRobot's policies need; it runs where the loader's transforms run."""

    cameras: frozenset[str]
    in_metres: frozenset[str]
    before: Transform | None

    def __call__(self, batch: dict[str, Any], augment_seed: "torch.Tensor") -> dict[str, Any]:
        import torch

        if self.before is not None:
            batch = self.before(batch, augment_seed)
        changed = dict(batch)
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor):
                continue
            # LeRobot's collated cameras are contiguous; in another layout a convolution rounds differently.
            if name in self.cameras and value.dtype == torch.uint8:
                # Convert straight to the wanted layout: else the floats would be copied again.
                changed[name] = value.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
            elif name in self.cameras:
                changed[name] = (value / _MM_PER_M if name in self.in_metres else value).contiguous()
            elif value.dtype == torch.float64:
                # LeRobot reads rows as Python floats, and torch makes float32 of them.
                changed[name] = value.to(torch.float32)
        return changed


def metadata(source: Dataset | Mixture | Pipeline, *, depth_unit: DepthUnit = "mm") -> "LeRobotDatasetMetadata":
    """Return LeRobot's metadata for the batches: for `make_policy`, with ``stats`` for the processors.

    It comes from what raypipe reads, so it also works for datasets of format v2.x and for mixtures, with statistics of
    all members together. For a pipeline, cameras have the size that it gives them, and statistics of relative actions
    cover the frames that it selects.

    Args:
        depth_unit: of the statistics of depth cameras; give `batches` the same.
    """
    _check_unit(depth_unit)
    module = import_lerobot("lerobot.datasets.dataset_metadata")
    dataset, decode = (source.config.dataset, source.config.decode) if isinstance(source, Pipeline) else (source, None)
    features = {
        name: _lerobot_feature(feature, decode or DecodeSpec())
        for name, feature in schema_for(dataset).features.items()
    }
    # Its constructor reads files of format v3.0, and asks the Hub where there are none.
    made: LeRobotDatasetMetadata = module.LeRobotDatasetMetadata.__new__(module.LeRobotDatasetMetadata)
    stats = source.stats
    made.__dict__.update(_fields(dataset, features, stats.pooled if isinstance(stats, MixtureStats) else stats))
    made.rescale_depth_stats(depth_unit)
    return made


def import_lerobot(name: str) -> ModuleType:
    """Return a module of lerobot.

    Raises:
        ConfigError: lerobot, or what this module of it needs, is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"rp.lerobot needs LeRobot, and {name} cannot be imported: {error}. Install both in one environment: "
            f"{how_to_install('lerobot')} (Python 3.12 or newer)."
        ) from error


def _offsets(dataset: Dataset | Mixture, config: "PreTrainedConfig") -> dict[str, list[int]]:
    """Return the windows of a policy's config in frames, by feature."""
    windows = {}
    for name in schema_for(dataset).features:
        frames = None
        if name == _REWARD:
            frames = config.reward_delta_indices
        elif name == _ACTION:
            frames = config.action_delta_indices
        elif name.startswith(_OBSERVATION):
            frames = config.observation_delta_indices
        if frames is not None:
            windows[name] = [int(frame) for frame in frames]
    return windows


def _without_last(dataset: Dataset | Mixture, selection: Any, num_frames: int) -> SelectionSpec:
    if isinstance(dataset, Mixture):
        raise ConfigError(
            f"the policy leaves out the last {num_frames} frames of every episode (drop_n_last_frames), and in a "
            f"mixture every member says so itself: give each selection={{'drop_last_frames': {num_frames}}}, and set "
            f"drop_n_last_frames=0 in the config."
        )
    spec = make_spec(SelectionSpec, selection, "selection")
    return replace(spec, drop_last_frames=max(num_frames, spec.drop_last_frames))


def _lerobot_feature(feature: Feature, decode: DecodeSpec) -> dict[str, Any]:
    """Return a feature as LeRobot's ``info.json`` has it."""
    if feature.is_camera:
        axes = ["height", "width", "channels"]
        # raypipe gives pixels and statistics of depth in millimetres, whatever the dataset recorded.
        info = {"is_depth_map": feature.is_depth, **({"depth_unit": "mm"} if feature.is_depth else {})}
        return {"dtype": feature.kind, "shape": decode.frame_shape(feature), "names": axes, "info": info}
    return {"dtype": feature.dtype, "shape": feature.shape, "names": list(feature.names) or None}


def _fields(dataset: Dataset | Mixture, features: dict[str, dict[str, Any]], stored: Stats) -> dict[str, Any]:
    """Return all attributes that the constructor of LeRobot's metadata sets."""
    utils, frames = import_lerobot("lerobot.datasets.utils"), import_lerobot("pandas")
    episodes, tasks = _episodes(dataset), _tasks(dataset)
    root = "mixture" if isinstance(dataset, Mixture) else dataset.meta.root
    robots = dataset.robot_types if isinstance(dataset, Mixture) else (dataset.meta.robot_type,)
    # Of a mixture with several rates LeRobot shows that of the first member.
    fps = datasets_of(dataset)[0].meta.fps
    info = utils.DatasetInfo(
        codebase_version="v3.0",
        fps=int(fps) if fps == int(fps) else fps,
        features=features,
        total_episodes=len(episodes),
        total_frames=sum(episodes["length"]),
        total_tasks=len(tasks),
        robot_type=", ".join(dict.fromkeys(robots)),
    )
    return {
        "repo_id": Path(root).name,
        "repo_type": "dataset",
        "revision": info.codebase_version,
        "root": Path(root),
        "info": info,
        "tasks": frames.DataFrame({"task_index": range(len(tasks))}, index=frames.Index(tasks, name="task")),
        "episodes": episodes,
        "stats": _stats(stored, features),
        "latest_episode": None,
        # It writes nothing.
        **{"_requested_root": Path(root), "_pq_writer": None, "_metadata_buffer": [], "_metadata_buffer_size": 1},
        "_finalized": True,
    }


def _tasks(dataset: Dataset | Mixture) -> list[str]:
    """Return the texts of all tasks, once each; for a single dataset in the order of its ``task_index``."""
    texts = (one.meta.tasks.texts for one in datasets_of(dataset))
    return list(dict.fromkeys(text for member in texts for _, text in sorted(member.items())))


def _episodes(dataset: Dataset | Mixture) -> Any:
    """Return the episode table in LeRobot's form, with its columns about the rows; members follow one another."""
    tables = [one.meta.episodes for one in datasets_of(dataset)]
    length = np.concatenate([table.length for table in tables])
    stop = np.cumsum(length)
    columns = {
        "episode_index": np.concatenate([table.episode_index for table in tables]),
        "tasks": [tasks for table in tables for tasks in table.tasks.to_pylist()],
        "length": length,
        "dataset_from_index": stop - length,
        "dataset_to_index": stop,
    }
    return import_lerobot("datasets").Dataset.from_dict(columns)


def _stats(stored: Stats, features: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the statistics of the features in batches.

    Warn of missing ones, which LeRobot silently ignores, and of a std so small that it would scale pixels far outside
    a network's range.
    """
    stats = {name: dict(stored[name]) for name in features if name in stored}
    lacking = [
        name
        for name, feature in features.items()
        if name not in (*stats, *INDEX_FEATURES)
        and (name.startswith(_OBSERVATION) or name == _ACTION)
        and feature["dtype"] not in ("string", "language")
    ]
    if lacking:
        warnings.warn(
            f"there are no statistics of {', '.join(lacking)}, and LeRobot leaves such values as they are. "
            f"`raypipe reshard ROOT OUT` computes those of rows; for cameras LeRobot's IMAGENET_STATS will do.",
            stacklevel=4,
        )
    cameras = [name for name in stats if features[name]["dtype"] in ("video", "image") and "std" in stats[name]]
    narrow = [name for name in cameras if np.min(stats[name]["std"]) < _LEAST_STD]
    if narrow:
        warnings.warn(
            f"the stored std of {', '.join(narrow)} is below {_LEAST_STD:g}: LeRobot would scale its pixels to "
            f"thousands and more. Put LeRobot's IMAGENET_STATS in its place, as lerobot-train does, or "
            f"compute the statistics again.",
            stacklevel=4,
        )
    return stats
