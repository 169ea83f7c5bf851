"""Train in processes that torchrun starts, without Ray, and go on where the last checkpoint stands.

    torchrun --nproc-per-node 2 examples/train_torchrun.py DATASET CHECKPOINT [--epochs 2] [--stop-after 7]

Start it again with another number of processes, and it goes on exactly there: each frame of the epoch still comes once.
`raypipe account CHECKPOINT` proves it. The model is a line through the state; put yours in its place.
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import raypipe as rp

CHUNK = 16


def main() -> None:
    arguments = parse_arguments()
    has_gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if has_gpu else "cpu"
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    ds = rp.open_dataset(arguments.dataset)
    windows = {"action": [i / ds.meta.fps for i in range(CHUNK)]}
    pipe = rp.Pipeline(ds, batch_size=arguments.batch_size, seed=0, delta_timestamps=windows)
    # The same line in every process: each gets its own part of every batch.
    loader = rp.train.share_loader(pipe, num_epochs=arguments.epochs, device=device)
    model, optimizer = make_model(ds, device)
    saved = arguments.checkpoint if arguments.checkpoint.exists() else folder_before(arguments.checkpoint)
    if rp.train.restore(saved, loader):
        model.load_state_dict(torch.load(saved / "model.pt", map_location=device))
    num_steps = 0
    while loader.epoch < arguments.epochs:
        for batch in loader:
            loss = train_step(model, optimizer, batch)
            num_steps += 1
            if num_steps == arguments.stop_after:
                break
            if num_steps % arguments.save_every == 0:
                save(arguments.checkpoint, model, loader)
        save(arguments.checkpoint, model, loader)
        if num_steps == arguments.stop_after:
            break
        if dist.get_rank() == 0:
            print(f"epoch {loader.epoch - 1}: loss {loss:.4f}, {loader.stats().samples_per_s:,.0f} samples/s a rank")
    loader.close()
    # The ranks meet in rank 0's process: it ends last.
    dist.barrier()
    dist.destroy_process_group()


def make_model(ds: rp.Dataset, device: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Return a model that predicts the next actions from the state."""
    state, action = (ds.features[name].shape[0] for name in ("observation.state", "action"))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(state, CHUNK * action).to(device))
    return model, torch.optim.AdamW(model.parameters())


def train_step(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> float:
    loss = (model(batch["observation.state"].float()) - batch["action"].float().flatten(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def save(checkpoint: Path, model: DistributedDataParallel, loader: rp.RankLoader) -> None:
    """Write the model, by rank 0, then the data's place and account, by every rank: all into a folder beside."""
    new = checkpoint.with_name(f"{checkpoint.name}.new")
    if dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        torch.save(model.state_dict(), new / "model.pt")
    dist.barrier()
    rp.train.write_states(new, loader)
    dist.barrier()
    if dist.get_rank() == 0:
        publish(new, checkpoint)


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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a path, a URI or a Hub id")
    parser.add_argument("checkpoint", type=Path, help="a folder; training goes on from it where it has a checkpoint")
    parser.add_argument("--batch-size", type=int, default=64, help="frames of a batch on each rank")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--stop-after", type=int, default=0, help="steps after which to save and end; 0: never")
    return parser.parse_args()


if __name__ == "__main__":
    main()
