"""The whole story in two minutes: write a dataset, train, lose a worker, go on with another number of workers, account.

Run by ``make demo``. The training is a stand-in that takes seconds; ``train_policy.py`` beside it is a real one.
"""

import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer, prepare_model
from rich.console import Console

import raypipe as rp
from raypipe.testing import SynthSpec, numbered_cameras, read_stamp, varied_lengths, write_dataset
from raypipe.views import describe, info_table
from raypipe.views.account import check_run, verdict_table

ROOT, RUN = Path("demo-data"), Path("demo-run")
CAMERA, STATE = "observation.images.camera_0", "observation.state"
BATCH, CHUNK = 32, 16
SAVE_EVERY, KILLED_AFTER = 10, 27


def main() -> None:
    console = Console(width=120)
    for folder in (ROOT, RUN):
        shutil.rmtree(folder, ignore_errors=True)
    spec = SynthSpec(lengths=varied_lengths(60, 60, seed=0), cameras=numbered_cameras(2, "96x96", "h264", gop=2))
    write_dataset(ROOT, spec)
    console.print(f"Wrote a LeRobot dataset to {ROOT}/:\n")
    console.print(info_table(describe(str(ROOT))))

    # Training workers take a CPU each, and data tasks need some too.
    ray.init(address="local", num_cpus=6, include_dashboard=False, logging_level="error", log_to_driver=False)
    dataset = rp.open_dataset(str(ROOT.resolve()))
    windows = {"action": [i / dataset.meta.fps for i in range(CHUNK)]}
    pipe = rp.Pipeline(dataset, batch_size=BATCH, seed=0, delta_timestamps=windows)

    console.print(
        f"\nTraining on 2 workers with Ray Train, {BATCH} samples a batch, chunks of {CHUNK} actions. One of them is "
        f"killed (SIGKILL) after batch {KILLED_AFTER} ..."
    )
    first = fit(pipe, attempt=1, num_workers=2)
    console.print(f"  Ray Train says: {first}\n\nGoing on with 3 workers, from the checkpoint ...")
    second = fit(pipe, attempt=2, num_workers=3)
    console.print(f"  Ray Train says: {second}\n")
    tell(console, dataset, read_logs())
    ray.shutdown()


def fit(pipe: rp.Pipeline, *, attempt: int, num_workers: int) -> str:
    """Train until the epoch ends or a worker is lost; return which of them it was."""
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"attempt": attempt, "logs": str(RUN.resolve())},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name="demo", storage_path=str(RUN.resolve())),
        **rp.train.ingest(train=pipe),
    )
    try:
        result = trainer.fit()
    except TrainingFailedError as error:
        return f"{type(error).__name__}, a worker died"
    assert result.metrics is not None
    return f"done, loss {result.metrics['loss']:.3f}"


def train_loop(config: dict[str, Any]) -> None:
    """Train on one worker; note what every batch held."""
    loader = rp.train.get_loader("train")
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    features = loader.dataset.features
    scale = rp.Normaliser(loader.dataset.stats, {STATE: "mean_std", "action": "mean_std"})
    policy = prepare_model(torch.nn.Linear(features[STATE].shape[0], CHUNK * features["action"].shape[0]))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    step, epoch = restore(policy, optimizer), loader.epoch
    for batch in map(scale.normalise, loader):
        loss = (policy(batch[STATE]) - batch["action"].flatten(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        note(config, rank, step, batch, loader)
        if config["attempt"] == 1 and rank == 1 and step == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        # After the last batch the loader stands at the next epoch.
        if step % SAVE_EVERY == 0 or loader.epoch > epoch:
            save(policy, optimizer, step, loader, loss.item())


def save(policy: Any, optimizer: Any, step: int, loader: rp.RankLoader, loss: float) -> None:
    """Report a checkpoint with the weights and with where the data stands."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/weights.pt")
        Path(folder, "step.txt").write_text(str(step))
        rp.train.report({"step": step, "loss": loss}, folder, loader)


def restore(policy: Any, optimizer: Any) -> int:
    """Load the run's checkpoint, if it has one; return its step."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        saved = torch.load(f"{folder}/weights.pt", weights_only=True)
        policy.load_state_dict(saved["policy"])
        optimizer.load_state_dict(saved["optimizer"])
        return int(Path(folder, "step.txt").read_text())


def note(config: dict[str, Any], rank: int, step: int, batch: dict[str, Any], loader: rp.RankLoader) -> None:
    """Write down what a batch held: a file per worker and attempt, a line per batch."""
    # The pixels of a made dataset say which frame they are: compare the first of each batch with its row.
    stamp = read_stamp(batch[CAMERA][0])
    line = {
        "attempt": config["attempt"],
        "rank": rank,
        "step": step,
        "index": batch["index"].tolist(),
        "episodes": sorted(set(batch["episode_index"].tolist())),
        "is_right": (stamp.episode, stamp.frame) == (int(batch["episode_index"][0]), int(batch["frame_index"][0])),
        "samples_per_s": loader.stats().samples_per_s,
        "first_batch_s": loader.stats().first_batch_s,
    }
    with Path(config["logs"], f"attempt-{config['attempt']}-rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_logs() -> list[dict[str, Any]]:
    """Return the lines of all workers and attempts."""
    return [json.loads(line) for path in sorted(RUN.glob("*.jsonl")) for line in path.read_text().splitlines()]


def tell(console: Console, dataset: rp.Dataset, lines: list[dict[str, Any]]) -> None:
    """Print throughput, mixing, and the account of every frame."""
    resumed_at = min(line["step"] for line in lines if line["attempt"] == 2) - 1
    for attempt in (1, 2):
        of_attempt = [line for line in lines if line["attempt"] == attempt]
        last = {line["rank"]: line for line in of_attempt}
        steps = sorted({line["step"] for line in of_attempt})
        # The last batches are shorter.
        distinct = [len({e for line in of_attempt if line["step"] == step for e in line["episodes"]}) for step in steps]
        rate = sum(line["samples_per_s"] for line in last.values())
        console.print(
            f"  attempt {attempt}: {len(last)} workers, steps {steps[0]} to {steps[-1]}, first batch after "
            f"{last[0]['first_batch_s']:.1f} s, {rate:,.0f} samples/s\n             at least {min(distinct[:-2])} of "
            f"the {len(dataset.meta.episodes)} episodes in every batch of all workers together"
        )
    kept = [line for line in lines if line["attempt"] == 2 or line["step"] <= resumed_at]
    times = Counter(index for line in kept for index in line["index"])
    rolled_back = sum(len(line["index"]) for line in lines) - times.total()
    missing, repeated = len(dataset) - len(times), sum(count > 1 for count in times.values())
    wrong = sum(not line["is_right"] for line in lines)
    console.print(
        f"\n  The checkpoint was of step {resumed_at}: {rolled_back} samples that the lost workers saw after it were "
        f"trained again.\n  {wrong} wrong pictures. Of {len(dataset)} frames {missing} are missing and {repeated} came "
        f"twice in what the model is made of: ",
        end="",
    )
    console.print("exactly once" if not missing and not repeated else "NOT exactly once", style="bold")
    console.print(
        f"\n  The workers' own account says, as `raypipe account {RUN}/demo` does (of what is rolled back it knows "
        f"what a killed\n  worker had written down, which it does every 2 s):\n"
    )
    console.print(verdict_table(check_run(RUN / "demo")))


if __name__ == "__main__":
    main()
