"""Train a small policy by behaviour cloning with Ray Train: cameras and state in, a chunk of actions out.

::

    python examples/train_policy.py                              writes a small dataset and trains on it
    python examples/train_policy.py --data ROOT --num-workers 8 --use-gpu --storage /mnt/runs --name first
    python examples/train_policy.py --data ROOT --num-workers 6 --use-gpu --storage /mnt/runs --name first --resume
    ray job submit --working-dir . -- python examples/train_policy.py --storage /mnt/runs --name second

A run that is resumed goes on with the very next batch, on as many workers as before or on others. On several nodes
``--data`` and ``--storage`` must be places that all of them reach.
"""

import argparse
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import Tensor, nn

import raypipe as rp
from raypipe.testing import SynthSpec, varied_lengths, write_dataset

STATE, ACTION = "observation.state", "action"
CHUNK = 16
"""Actions that the policy predicts at once."""
LOG_EVERY = 10
"""Steps between two lines of figures."""


class Policy(nn.Module):
    """A convolutional encoder per camera, and an MLP from what they see and the state to a chunk of actions."""

    def __init__(self, dataset: rp.Dataset) -> None:
        super().__init__()
        self.cameras = dataset.spec.cameras
        self.encoders = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3, 16, kernel_size=5, stride=4), nn.ReLU(),
                nn.Conv2d(16, 32, kernel_size=3, stride=2), nn.ReLU(),
                nn.AdaptiveAvgPool2d(4), nn.Flatten(),
            )
            for _ in self.cameras
        )  # fmt: skip
        state_dim, action_dim = dataset.features[STATE].shape[0], dataset.features[ACTION].shape[0]
        self.head = nn.Sequential(
            nn.Linear(512 * len(self.cameras) + state_dim, 256), nn.ReLU(),
            nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, CHUNK * action_dim), nn.Unflatten(1, (CHUNK, action_dim)),
        )  # fmt: skip

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the chunks, (B, CHUNK, action_dim), of a batch in normalised units, in the same units."""
        seen = [encode(batch[camera]) for camera, encode in zip(self.cameras, self.encoders, strict=True)]
        chunks: Tensor = self.head(torch.cat([batch[STATE], *seen], dim=1))
        return chunks


def train_loop(config: Mapping[str, Any]) -> None:
    """Run on every training worker, at every start: the first, after a failure, and on other numbers of workers."""
    loader = rp.train.get_loader("train", num_epochs=config["epochs"])
    torch.manual_seed(0)
    # Cameras, states and actions, on the device; the way back to the robot is scale.unnormalise.
    scale = rp.Normaliser(config["dataset"].stats)
    policy = Policy(config["dataset"])
    model = prepare_model(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = restore(policy, optimizer)
    say(f"at step {step}: epoch {loader.epoch} of {config['epochs']}, {loader.steps_left} batches of it left")
    for _ in range(loader.epoch, config["epochs"]):
        for batch in map(scale.normalise, loader):
            # Steps of a chunk that lie beyond the end of the episode teach nothing.
            is_real = ~batch[f"{ACTION}_is_pad"]
            loss = nn.functional.mse_loss(model(batch)[is_real], batch[ACTION][is_real])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            if step % LOG_EVERY == 0:
                say(f"step {step} loss {loss.item():.4f} {describe(loader)}")
            # After the last batch of an epoch the loader stands at the next one.
            if step % config["checkpoint_every"] == 0 or loader.epoch == config["epochs"]:
                save(policy, optimizer, step, loader, loss.item())


def dummy_loop(config: Mapping[str, Any]) -> None:
    """Take every batch and do nothing with it: how fast the data alone is."""
    loader = rp.train.get_loader("train", num_epochs=config["epochs"])
    for batches, _ in enumerate(loader.steps(config["epochs"] * len(loader)), start=1):
        if batches % LOG_EVERY == 0:
            say(f"batch {batches} {describe(loader)}")
    say(f"done {describe(loader)}")


def save(policy: nn.Module, optimizer: torch.optim.Optimizer, step: int, loader: rp.RankLoader, loss: float) -> None:
    """Report a checkpoint: model and optimizer from rank 0, and where the data stands."""
    metrics = {"step": step, "loss": loss, **rp.train.loader_metrics(loader)}
    # Every worker must report, at the same steps; the weights are the same on all.
    if ray.train.get_context().get_world_rank() > 0:
        rp.train.report(metrics, None, loader)
        return
    with tempfile.TemporaryDirectory() as folder:
        saved = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(saved, Path(folder) / "policy.pt")
        rp.train.report(metrics, folder, loader)


def restore(policy: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the run's newest checkpoint, and return its step; 0 where there is none yet."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        saved = torch.load(Path(folder) / "policy.pt", map_location=get_device(), weights_only=True)
    policy.load_state_dict(saved["policy"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def describe(loader: rp.RankLoader) -> str:
    figures = {key.removeprefix("train/"): value for key, value in rp.train.loader_metrics(loader).items()}
    return (
        f"| {figures['samples_per_s']:,.0f} samples/s, waiting {figures['wait_share']:.0%} of the time, most on rank "
        f"{figures['worst_rank']} ({figures['worst_wait_share']:.0%}), for {figures['waits_for']}"
    )


def say(text: str) -> None:
    if ray.train.get_context().get_world_rank() == 0:
        # Ray Train shows the log of its workers once, and what they print twice.
        logging.info(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small policy by behaviour cloning.")
    parser.add_argument("--data", help="a LeRobot dataset, path or URI; by default a small one is made in --storage")
    parser.add_argument("--storage", default="~/ray_results", help="where runs are kept, a folder or URI")
    parser.add_argument("--name", default="policy", help="of the run, in --storage")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of that run, if any")
    parser.add_argument("--num-workers", default="1", metavar="N or MIN:MAX", help="MIN:MAX follows the cluster's size")
    parser.add_argument("--cpus-per-worker", type=float, default=1, help="reading needs one CPU beside the workers'")
    parser.add_argument("--use-gpu", action="store_true", help="one GPU per worker")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--max-failures", type=int, default=3, help="restarts after lost workers; -1: no limit")
    parser.add_argument("--dummy", action="store_true", help="only take the batches, and tell how fast they come")
    args = parser.parse_args()
    if "://" not in args.storage:
        # Workers run in folders of their own.
        args.storage = os.path.abspath(os.path.expanduser(args.storage))
    filesystem, folder = fsspec.core.url_to_fs(args.storage)
    # Ray Train goes on from the newest checkpoint of a run of that name without being asked.
    if not args.resume and not args.dummy and filesystem.exists(f"{folder}/{args.name}"):
        parser.error(f"there is a run {args.name!r} in {args.storage}: go on with --resume, or choose another --name")
    return args


def make_data(storage: str) -> str:
    """Write a small dataset, once: 30 episodes in which the actions follow from the state."""
    root = Path(storage) / "made-dataset"
    if not (root / "meta").exists():
        write_dataset(root, SynthSpec(lengths=varied_lengths(30, 32, seed=0)))
    return str(root)


def main() -> None:
    args = parse_args()
    # Joins the cluster of the job or of RAY_ADDRESS; starts Ray on this machine where there is none.
    ray.init()
    dataset = rp.open_dataset(args.data or make_data(args.storage))
    chunk = [i / dataset.meta.fps for i in range(CHUNK)]
    pipe = rp.Pipeline(dataset, batch_size=args.batch_size, seed=0, delta_timestamps={ACTION: chunk})
    least, _, most = args.num_workers.partition(":")
    trainer = TorchTrainer(
        dummy_loop if args.dummy else train_loop,
        train_loop_config={
            "dataset": dataset,
            "epochs": args.epochs,
            "checkpoint_every": args.checkpoint_every,
        },
        scaling_config=ray.train.ScalingConfig(
            num_workers=(int(least), int(most)) if most else int(least),
            use_gpu=args.use_gpu,
            resources_per_worker={"CPU": args.cpus_per_worker, **({"GPU": 1} if args.use_gpu else {})},
        ),
        run_config=ray.train.RunConfig(
            # Ray finds a name of its own for a run that saves nothing.
            name=None if args.dummy else args.name,
            storage_path=args.storage,
            failure_config=ray.train.FailureConfig(max_failures=args.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
        **rp.train.ingest(train=pipe),
    )
    result = trainer.fit()
    print(f"done: {result.path}", flush=True)


if __name__ == "__main__":
    main()
