"""Train LeRobot's ACT policy on raypipe's batches: in one process, under torchrun, or with Ray Train.

::

    python examples/train_lerobot_policy.py DATASET RUN
    torchrun --nproc-per-node 2 examples/train_lerobot_policy.py DATASET RUN
    python examples/train_lerobot_policy.py DATASET RUN --ray-workers 2

Each goes on from the checkpoint in the folder RUN, on as many processes as before or on others, with the very next
batch. The checkpoint is LeRobot's: `ACTPolicy.from_pretrained(RUN/checkpoint)`. DATASET may be of format v2.0, v2.1 or
v3.0. It needs LeRobot: pip install '.[lerobot]' in a clone of this repository.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import make_policy, make_pre_post_processors
from torch.nn.parallel import DistributedDataParallel

import raypipe as rp

SMALL = {"dim_model": 64, "dim_feedforward": 128, "n_heads": 4, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}
"""Of a policy that a laptop trains; leave it out for one that is worth its robot."""


def main() -> None:
    args = parse_args()
    if args.ray_workers:
        run_with_ray(args)
    else:
        if "RANK" in os.environ:
            # Of torchrun.
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        train(vars(args))
        # The ranks meet in rank 0's process: it ends last.
        barrier()


def train(args: Mapping[str, Any]) -> None:
    """Train in this process: alone, one of torchrun's, or a worker of Ray Train."""
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    pipe = make_pipeline(args, device)
    saved = find_checkpoint(args)
    loader = rp.lerobot.batches(make_loader(pipe, args, device, saved))
    policy, preprocess, optimizer = make_training(pipe, args, device, saved)
    is_shared = dist.is_initialized() and dist.get_world_size() > 1
    model = DistributedDataParallel(policy, find_unused_parameters=True) if is_shared else policy
    num_steps = 0
    while loader.epoch < args["epochs"] and num_steps != args["stop_after"]:
        for batch in loader:
            loss, _ = model(preprocess(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_steps += 1
            # After the last batch of an epoch the loader stands at the next one.
            if num_steps % args["save_every"] == 0 or loader.epoch == args["epochs"]:
                save(args, policy, preprocess, optimizer, loader)
            if loader.rank == 0:
                print(f"step {num_steps} loss {loss.item():.4f}", flush=True)
            if num_steps == args["stop_after"]:
                break
    loader.close()


def make_config(args: Mapping[str, Any], device: str) -> ACTConfig:
    size = {"chunk_size": args["chunk"], "n_action_steps": args["chunk"]}
    # The weights of the backbone come from the network where they are asked for.
    return ACTConfig(**size, **SMALL, pretrained_backbone_weights=None, device=device, optimizer_lr=1e-4)


def make_pipeline(args: Mapping[str, Any], device: str = "cpu") -> rp.Pipeline:
    """Return the pipeline; the policy's config says which frames of a window it wants."""
    dataset = rp.open_dataset(args["dataset"])
    return rp.lerobot.pipeline(dataset, make_config(args, device), batch_size=args["batch_size"], seed=0)


def make_loader(pipe: rp.Pipeline, args: Mapping[str, Any], device: str, saved: Path | None) -> rp.RankLoader:
    """Return this process's loader, standing where the checkpoint stands."""
    if args["ray_workers"]:
        return rp.train.get_loader("train", num_epochs=args["epochs"], device=device)
    settings = {"num_epochs": args["epochs"], "device": device}
    loader = rp.train.share_loader(pipe, **settings) if dist.is_initialized() else pipe.loader(**settings)
    if saved:
        rp.train.restore(saved, loader)
    return loader


def make_training(
    pipe: rp.Pipeline, args: Mapping[str, Any], device: str, saved: Path | None
) -> tuple[ACTPolicy, Any, torch.optim.Optimizer]:
    """Return policy, pre-processor and optimizer: new ones, or those of a checkpoint."""
    torch.manual_seed(0)
    config = ACTConfig.from_pretrained(saved) if saved else make_config(args, device)
    config.pretrained_path, config.device = str(saved) if saved else None, device
    # LeRobot's own class, also of datasets of format v2.x and of mixtures.
    meta = rp.lerobot.metadata(pipe)
    policy = make_policy(config, ds_meta=meta)
    preprocess, _ = make_pre_post_processors(config, dataset_stats=meta.stats)
    optimizer = config.get_optimizer_preset().build(policy.get_optim_params())
    if saved:
        optimizer.load_state_dict(torch.load(saved / "optimizer.pt", map_location=device, weights_only=True))
    return policy.train(), preprocess, optimizer


def save(args: Mapping[str, Any], policy: ACTPolicy, preprocess: Any, optimizer: Any, loader: rp.RankLoader) -> None:
    """Write a checkpoint: the policy by rank 0, and where the data stands by every rank, into a folder beside."""
    checkpoint = Path(args["run"]) / "checkpoint"
    folder = Path(tempfile.mkdtemp()) if args["ray_workers"] else checkpoint.with_name("checkpoint.new")
    if loader.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        policy.save_pretrained(folder)
        preprocess.save_pretrained(folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    if args["ray_workers"]:
        rp.train.report({}, folder if loader.rank == 0 else None, loader)
        shutil.rmtree(folder)
        return
    barrier()
    rp.train.write_states(folder, loader)
    barrier()
    if loader.rank == 0:
        publish(folder, checkpoint)


def publish(new: Path, checkpoint: Path) -> None:
    """Put a whole checkpoint in the place of the last one; whatever ends in between, one of the two is there."""
    before = folder_before(checkpoint)
    if checkpoint.exists():
        shutil.rmtree(before, ignore_errors=True)
        checkpoint.rename(before)
    new.rename(checkpoint)
    shutil.rmtree(before, ignore_errors=True)


def folder_before(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.before")


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def find_checkpoint(args: Mapping[str, Any]) -> Path | None:
    """Return a folder with the newest checkpoint; None where there is none yet."""
    if args["ray_workers"]:
        import ray.train

        checkpoint = ray.train.get_checkpoint()
        return Path(checkpoint.to_directory()) if checkpoint else None
    checkpoint = Path(args["run"]) / "checkpoint"
    return next((folder for folder in (checkpoint, folder_before(checkpoint)) if folder.exists()), None)


def run_with_ray(args: argparse.Namespace) -> None:
    import ray.train
    from ray.train.torch import TorchTrainer

    folder, has_gpu = Path(args.run).absolute(), torch.cuda.is_available()
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(args),
        scaling_config=ray.train.ScalingConfig(
            num_workers=args.ray_workers,
            use_gpu=has_gpu,
            resources_per_worker={"CPU": args.cpus_per_worker, **({"GPU": 1} if has_gpu else {})},
        ),
        run_config=ray.train.RunConfig(name=folder.name, storage_path=str(folder.parent)),
        **rp.train.ingest(train=make_pipeline(vars(args))),
    )
    print(f"done: {trainer.fit().path}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a path, a URI or a Hub id")
    parser.add_argument("run", help="a folder; training goes on from the checkpoint in it")
    parser.add_argument("--ray-workers", type=int, default=0, help="train with Ray Train, on so many workers")
    parser.add_argument("--cpus-per-worker", type=float, default=1, help="reading needs one CPU beside the workers'")
    parser.add_argument("--batch-size", type=int, default=8, help="per process")
    parser.add_argument("--chunk", type=int, default=20, help="actions that the policy predicts at once")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--stop-after", type=int, default=-1, metavar="STEPS", help="stop early, as a lost job does")
    args = parser.parse_args()
    # Workers of Ray Train run in folders of their own.
    args.dataset = os.path.abspath(args.dataset) if os.path.exists(args.dataset) else args.dataset
    return args


if __name__ == "__main__":
    main()
