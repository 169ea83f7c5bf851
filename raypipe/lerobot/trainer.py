"""`raypipe lerobot-train`: LeRobot's own training script, fed by a pipeline.

This module runs the script unchanged, with its command line. While the script runs, it replaces some of its names::

    make_train_eval_datasets    its source of features and statistics: returns a `FedDataset`, also of format v2.x
    torch.utils.data.DataLoader its only source of batches: returns the loader of a `FedDataset`
    save_checkpoint             also writes the position of the data, in the folder ``raypipe`` beside LeRobot's files
    should_save_checkpoint      lets the other processes write there what they have delivered

Other versions of LeRobot may have other names: then it raises an error before any training.
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch.distributed as dist

from raypipe.dataset import Dataset
from raypipe.errors import ConfigError
from raypipe.format import DatasetMeta
from raypipe.lerobot.bridge import VERSION_TRIED, batches, import_lerobot, metadata, pipeline, windowed
from raypipe.loader import RankLoader
from raypipe.mixture import Mixture, open_dataset
from raypipe.pipeline import Pipeline
from raypipe.train import STATE_FOLDER, restore, share_loader, write_states

if TYPE_CHECKING:
    import torch
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.datasets import LeRobotDatasetMetadata

_SCRIPT: Final = "lerobot.scripts.lerobot_train"
_REPLACED: Final = ("make_train_eval_datasets", "torch", "save_checkpoint", "should_save_checkpoint", "submit_to_hf")


def run_lerobot_train(arguments: Sequence[str]) -> None:
    """Run ``lerobot-train`` with these arguments of its command line, on raypipe's batches.

    Raises:
        ConfigError: lerobot is not installed, or its version has another script.
    """
    script = import_lerobot(_SCRIPT)
    check_script(script)
    before = sys.argv
    # LeRobot reads its command line from sys.argv.
    sys.argv = ["lerobot-train", *arguments]
    try:
        with _fed(script, TrainerFeed()):
            script.main()
    finally:
        sys.argv = before


def check_script(script: ModuleType) -> None:
    """Raise if the script lacks a name to replace; warn of an untested version."""
    found = version("lerobot")
    missing = [name for name in _REPLACED if not hasattr(script, name)]
    if missing:
        raise ConfigError(
            f"LeRobot {found} has no {', '.join(missing)} in {_SCRIPT}, where raypipe gives its batches. Install the "
            f"version that this raypipe was tried with: pip install lerobot=={VERSION_TRIED}; or train with a loop of "
            f"your own, as examples/train_lerobot_policy.py does."
        )
    if found != VERSION_TRIED:
        warnings.warn(f"raypipe lerobot-train was tried with LeRobot {VERSION_TRIED}; this is {found}", stacklevel=3)


@dataclass(frozen=True, kw_only=True, eq=False)
class FedDataset:
    """A dataset as LeRobot's script needs it; its samples come from a pipeline."""

    pipe: Pipeline
    meta: "LeRobotDatasetMetadata"
    name: str
    """``train`` or ``eval``: the name of its loader, and of the file with its state."""
    image_transforms: "Callable[[torch.Tensor], torch.Tensor] | None" = None
    episodes: list[int] | None = None
    """For LeRobot's own sampler, which the script creates but which has no effect here; None means all."""
    absolute_to_relative_idx: None = None

    @property
    def num_frames(self) -> int:
        """Frames of an epoch."""
        return int(self.pipe.config.index().num_frames)

    @property
    def num_episodes(self) -> int:
        """Episodes that give frames."""
        return len(np.unique(self.pipe.config.index().episode))


@dataclass(eq=False)
class TrainerFeed:
    """The replacements for the script's names, and their shared state."""

    config: "TrainPipelineConfig | None" = None
    loaders: list[RankLoader] = field(default_factory=list)

    def make_datasets(self, config: "TrainPipelineConfig") -> tuple[FedDataset, FedDataset | None]:
        """Return the dataset to train on, and the one held out for evaluation, if any."""
        self.config = config
        source = open_source(config)
        train, held_out = split_episodes(source, config)
        fed = _fed_dataset(source, config, "train", selection=train)
        return fed, _fed_dataset(source, config, "eval", selection=held_out) if held_out else None

    def make_loader(self, dataset: Any, **settings: Any) -> Any:
        """Return the loader of a dataset: raypipe's for a `FedDataset`, torch's for any other."""
        import torch.utils.data

        if not isinstance(dataset, FedDataset):
            return torch.utils.data.DataLoader(dataset, **settings)
        assert self.config is not None, "the script makes its datasets before its loaders"
        loader = _open_loader(dataset, self.config)
        if dataset.name == "train":
            checkpoint = Path(self.config.checkpoint_path or "")
            if self.config.resume and not restore(checkpoint, loader) and loader.rank == 0:
                warnings.warn(
                    f"{str(checkpoint)!r} has no folder {STATE_FOLDER!r}: it was saved by lerobot-train without "
                    f"raypipe, whose order of frames is another. The data starts at the first batch of epoch 0.",
                    stacklevel=3,
                )
            self.loaders.append(loader)
        return FedLoader(loader, dataset)

    def save_states(self, checkpoint_dir: Path) -> None:
        """Write the position of the data, and what this process has delivered, into a checkpoint."""
        write_states(checkpoint_dir, *self.loaders)

    def close(self) -> None:
        """Stop the running work of the loaders."""
        for loader in self.loaders:
            loader.close()


@dataclass(frozen=True, eq=False)
class FedLoader:
    """A loader for the script: it iterates one epoch after another, with LeRobot's image transforms."""

    loader: RankLoader
    dataset: FedDataset

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        transform = self.dataset.image_transforms
        for batch in self.loader:
            # Transform in the training thread: torchvision draws from torch's global generator, and LeRobot saves its
            # state.
            yield batch if transform is None else _transformed(batch, self.dataset.meta, transform)


def open_source(config: "TrainPipelineConfig") -> Dataset | Mixture:
    """Open the dataset or mixture that the command line names, where LeRobot looks: root, LeRobot's home, the Hub."""
    wanted = config.dataset
    if wanted.repo_type != "dataset":
        raise ConfigError(
            f"--dataset.repo_type={wanted.repo_type} is for LeRobot's streaming alone; give --dataset.root"
        )
    if wanted.root is not None:
        return open_dataset(str(wanted.root))
    home = import_lerobot("lerobot.utils.constants").HF_LEROBOT_HOME / wanted.repo_id
    if (home / "meta" / "info.json").exists():
        return open_dataset(str(home))
    return open_dataset(wanted.repo_id, revision=wanted.revision or "")


def split_episodes(source: Dataset | Mixture, config: "TrainPipelineConfig") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the selections to train on and to evaluate on; the second is empty if nothing is held out.

    It splits like LeRobot: it holds out the last episodes of every task, and an episode counts for its first task.
    """
    wanted = config.dataset
    if isinstance(source, Mixture):
        if wanted.episodes is not None or wanted.eval_split:
            raise ConfigError(
                "--dataset.episodes and --dataset.eval_split are of one dataset, and this is a mixture: give its "
                "members a selection, and leave the options out"
            )
        return {}, {}
    table = source.meta.episodes
    episodes = table.episode_index.tolist() if wanted.episodes is None else list(wanted.episodes)
    if not wanted.eval_split:
        return ({} if wanted.episodes is None else {"episodes": episodes}), {}
    by_task = _by_first_task(source.meta, episodes)
    num_held = {task: math.ceil(len(those) * wanted.eval_split) for task, those in by_task.items()}
    train = [one for task, those in by_task.items() for one in those[: len(those) - num_held[task]]]
    if not train:
        raise ConfigError(
            f"--dataset.eval_split={wanted.eval_split} leaves no episode to train on, of {len(episodes)}; make it less"
        )
    held_out = {task: those[len(those) - num_held[task] :] for task, those in by_task.items()}
    return {"episodes": train}, _eval_selection(source.meta, held_out, config.max_eval_samples)


def _by_first_task(meta: DatasetMeta, episodes: Sequence[int]) -> dict[str, list[int]]:
    tasks, by_task = meta.episodes.tasks.to_pylist(), dict[str, list[int]]()
    for episode in episodes:
        listed = tasks[meta.episodes.find_row(episode)] or [""]
        by_task.setdefault(listed[0], []).append(episode)
    return by_task


def _eval_selection(meta: DatasetMeta, by_task: dict[str, list[int]], most_samples: int) -> dict[str, Any]:
    """Return the selection of the held-out episodes; with a limit, only the first frames of each task."""
    episodes = [one for those in by_task.values() for one in those]
    if most_samples <= 0:
        return {"episodes": episodes}
    segments = []
    for those in by_task.values():
        left = max(1, most_samples // len(by_task))
        for episode in sorted(those):
            frames = min(left, int(meta.episodes.length[meta.episodes.find_row(episode)]))
            segments += [(episode, 0, frames)] if frames else []
            left -= frames
    return {"segments": segments}


def _fed_dataset(source: Dataset | Mixture, config: "TrainPipelineConfig", name: str, **parts: Any) -> FedDataset:
    settings = {"batch_size": config.batch_size, "seed": config.seed if config.seed is not None else 0, **parts}
    if name == "train":
        pipe = pipeline(source, config.trainable_config, **settings)
    else:
        # LeRobot evaluates on all held-out frames in order.
        pipe = Pipeline(windowed(source, config.trainable_config), **settings, order={"shuffle": False})
    meta = metadata(pipe, depth_unit=config.dataset.depth_output_unit)
    if config.dataset.use_imagenet_stats:
        _use_imagenet_stats(meta)
    wanted, transforms = config.dataset.image_transforms, None
    if name == "train" and wanted.enable:
        transforms = import_lerobot("lerobot.transforms").ImageTransforms(wanted)
    return FedDataset(pipe=pipe, meta=meta, name=name, image_transforms=transforms)


def _use_imagenet_stats(meta: "LeRobotDatasetMetadata") -> None:
    import torch

    constants = import_lerobot("lerobot.utils.constants")
    for camera in set(meta.camera_keys) - set(meta.depth_keys):
        found = {name: torch.tensor(values, dtype=torch.float32) for name, values in constants.IMAGENET_STATS.items()}
        meta.stats.setdefault(camera, {}).update(found)


def _transformed(batch: dict[str, Any], meta: "LeRobotDatasetMetadata", transform: Any) -> dict[str, Any]:
    import torch

    cameras = [name for name in meta.camera_keys if name not in meta.depth_keys]
    return {**batch, **{name: torch.stack([transform(sample) for sample in batch[name]]) for name in cameras}}


def _open_loader(dataset: FedDataset, config: "TrainPipelineConfig") -> RankLoader:
    """Return this process's loader; the processes of `accelerate launch` or torchrun share the batches."""
    import torch

    world_size = dist.get_world_size() if dist.is_initialized() else 1
    num_steps = dataset.pipe.plan(world_size=world_size).num_steps
    device = str(config.trainable_config.device)
    settings: dict[str, Any] = {
        # The device that Accelerate gave this process.
        "device": f"cuda:{torch.cuda.current_device()}" if device.startswith("cuda") else device,
        "num_epochs": math.ceil(config.steps / num_steps),
        # The script has its own bar.
        "progress": False,
    }
    if dist.is_initialized():
        loader = share_loader(dataset.pipe, dataset.name, transport="local", **settings)
    else:
        (loader,) = dataset.pipe.loaders(1, name=dataset.name, transport="local", **settings)
    return batches(loader, depth_unit=config.dataset.depth_output_unit)


class _Changed:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def _fed(script: ModuleType, feed: TrainerFeed) -> Iterator[None]:
    """Replace the script's names while the block runs."""
    before = {name: getattr(script, name) for name in _REPLACED}
    torch_module = before["torch"]
    data = _Changed(torch_module.utils.data, DataLoader=feed.make_loader)

    def save_checkpoint(checkpoint_dir: Path, *args: Any, **settings: Any) -> None:
        before["save_checkpoint"](checkpoint_dir, *args, **settings)
        feed.save_states(Path(checkpoint_dir))

    def should_save_checkpoint(step: int, save_freq: int, total_steps: int) -> bool:
        is_due: bool = before["should_save_checkpoint"](step, save_freq, total_steps)
        config = feed.config
        # The script saves only in the main process; all processes pass here, at the same step.
        if is_due and config is not None and config.save_checkpoint and dist.is_initialized() and dist.get_rank():
            feed.save_states(script.get_step_checkpoint_dir(config.output_dir, total_steps, step))
        return is_due

    try:
        script.__dict__.update(
            make_train_eval_datasets=feed.make_datasets,
            torch=_Changed(torch_module, utils=_Changed(torch_module.utils, data=data)),
            save_checkpoint=save_checkpoint,
            should_save_checkpoint=should_save_checkpoint,
            submit_to_hf=_refuse_remote,
        )
        yield
    finally:
        script.__dict__.update(before)
        feed.close()


def _refuse_remote(_: Any) -> None:
    raise ConfigError("--job.target runs LeRobot on Hugging Face's machines, where raypipe is not; run lerobot-train")
