"""Why the order of frames matters: one small policy, one dataset, three orders.

    python benchmarks/gradient_noise.py [--json FILE] [--plot FILE]

The dataset's episodes differ strongly: each stays in its own corner of the state space. The same policy, from the same
first weights, is trained on it by (a) two ranks that read their half in file order, (b) raypipe, with two lanes and
whole episodes as spans, (c) a full shuffle. Of each: mean and variance of the gradient's norm and the loss over the
steps; the loss over all frames at the end; and the noise of the gradient at fixed weights, E|g_batch - g|^2. Every
figure is a mean over several seeds.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from machine import write_results
from torch import nn

import raypipe as rp
from raypipe.testing import SynthSpec, varied_lengths, write_dataset

STATE_DIM, ACTION_DIM, HIDDEN = 8, 4, 64
RANKS = 2
COLUMNS = (
    "order",
    "grad_norm_mean",
    "grad_norm_variance",
    "grad_noise",
    "loss_last_tenth",
    "final_loss",
    "distinct_episodes",
    "noise_vs_full_shuffle",
    "loss_vs_full_shuffle",
)

Samples = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""States, actions and episodes of a batch."""


@dataclass(frozen=True)
class Run:
    """One training: a figure per step, and two over all frames."""

    grad_norms: list[float]
    losses: list[float]
    distinct: list[int]
    final_loss: float
    grad_noise: float


def main() -> None:
    arguments = parse_arguments()
    ray.init(address="local", include_dashboard=False, logging_level="error", log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="raypipe-bench-") as folder:
        root = make_differing_episodes(Path(folder) / "data", arguments.episodes)
        orders = make_orders(root, arguments.batch_size)
        runs = {
            name: [train(orders[name], seed, arguments.epochs) for seed in range(arguments.seeds)] for name in orders
        }
    ray.shutdown()
    results = [summarise(name, of_order) for name, of_order in runs.items()]
    add_ratios(results)
    write_results(arguments.json, results, COLUMNS)
    if arguments.plot:
        plot(runs, arguments.plot)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64, help="frames per rank")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--plot", help="also draw them here")
    return parser.parse_args()


def make_differing_episodes(root: Path, num_episodes: int) -> Path:
    """Write a dataset whose episodes are short random walks, each around a centre of its own."""
    lengths = varied_lengths(num_episodes, 150, seed=0)
    spec = SynthSpec(lengths=lengths, cameras=(), state_dim=STATE_DIM, action_dim=ACTION_DIM, with_stats=False)
    write_dataset(root, spec)
    draw = np.random.default_rng(0)
    teacher = [draw.normal(size=(STATE_DIM, HIDDEN)) / 2, draw.normal(size=(HIDDEN, ACTION_DIM)) / 4]
    centres = draw.normal(scale=2.0, size=(num_episodes, STATE_DIM))
    for path in sorted((root / "data").rglob("*.parquet")):
        table = pq.read_table(path)
        episode = table["episode_index"].to_numpy()
        states = centres[episode] + 0.5 * draw.normal(size=(len(table), STATE_DIM))
        actions = np.tanh(states @ teacher[0]) @ teacher[1]
        for name, values in (("observation.state", states), ("action", actions)):
            flat = pa.array(values.astype(np.float32).ravel())
            column = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
            table = table.set_column(table.column_names.index(name), name, column)
        # One row group per file: nothing here depends on how rows are grouped.
        pq.write_table(table, path)
    return root


def make_orders(root: Path, batch_size: int) -> dict[str, Callable[[int, int], Iterator[Samples]]]:
    """Return, by name, what yields the global batches of an epoch, given seed and epoch."""
    dataset = rp.open_dataset(str(root))
    every = next(iter(_pipeline(dataset, len(dataset), 0, {"shuffle": False, "lanes": 1}).loader(progress=False)))
    samples = _samples(every)
    num_frames = len(dataset)

    def file_order(seed: int, epoch: int) -> Iterator[Samples]:  # noqa: ARG001
        share = num_frames // RANKS
        for step in range(share // batch_size):
            first = torch.arange(step * batch_size, (step + 1) * batch_size)
            yield _take(samples, torch.cat([first + rank * share for rank in range(RANKS)]))

    def full_shuffle(seed: int, epoch: int) -> Iterator[Samples]:
        order = torch.randperm(num_frames, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for chosen in order.split(RANKS * batch_size):
            yield _take(samples, chosen)

    def raypipe(seed: int, epoch: int) -> Iterator[Samples]:
        loader = _pipeline(dataset, RANKS * batch_size, seed, {"lanes": RANKS, "live_spans": 2 * batch_size}).loader(
            progress=False
        )
        loader.set_epoch(epoch)
        yield from map(_samples, loader)

    return {"file order": file_order, "raypipe": raypipe, "full shuffle": full_shuffle}


def _pipeline(dataset: rp.Dataset, global_batch: int, seed: int, order: dict[str, Any]) -> rp.Pipeline:
    return rp.Pipeline(dataset, batch_size={"size": global_batch, "scope": "global"}, seed=seed, order=order)


def _samples(batch: dict[str, Any]) -> Samples:
    return batch["observation.state"], batch["action"], batch["episode_index"]


def _take(samples: Samples, chosen: torch.Tensor) -> Samples:
    states, actions, episodes = samples
    return states[chosen], actions[chosen], episodes[chosen]


def train(order: Callable[[int, int], Iterator[Samples]], seed: int, num_epochs: int) -> Run:
    """Return what a training in one order looked like."""
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(STATE_DIM, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, ACTION_DIM))
    first_epoch = list(order(seed, 0))
    grad_noise = measure_noise(policy, first_epoch)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01, momentum=0.9)
    # Policies are trained with a rate that falls to zero; without it the last batches would weigh most.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs * len(first_epoch))
    norms, losses, distinct = [], [], []
    for epoch in range(num_epochs):
        for states, actions, episodes in first_epoch if not epoch else order(seed, epoch):
            loss, gradient = loss_and_gradient(policy, states, actions)
            optimizer.step()
            schedule.step()
            norms.append(float(gradient.norm()))
            losses.append(loss)
            distinct.append(len(episodes.unique()))
    final = np.average(
        [loss_and_gradient(policy, states, actions)[0] for states, actions, _ in first_epoch],
        weights=[len(states) for states, _, _ in first_epoch],
    )
    return Run(norms, losses, distinct, float(final), grad_noise)


def measure_noise(policy: nn.Module, batches: list[Samples]) -> float:
    """Return the mean squared distance of a batch's gradient from the mean gradient, at the weights as they are."""
    full = [batch for batch in batches if len(batch[0]) == len(batches[0][0])]
    gradients = torch.stack([loss_and_gradient(policy, states, actions)[1] for states, actions, _ in full])
    return float((gradients - gradients.mean(dim=0)).square().sum(dim=1).mean())


def loss_and_gradient(policy: nn.Module, states: torch.Tensor, actions: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of a batch; the gradient is left on the weights."""
    policy.zero_grad()
    loss = nn.functional.mse_loss(policy(states), actions)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def summarise(name: str, runs: list[Run]) -> dict[str, Any]:
    """Return the figures of one order, averaged over its runs."""
    tails = [run.losses[-len(run.losses) // 10 :] for run in runs]
    figures = {
        "grad_norm_mean": np.mean([np.mean(run.grad_norms) for run in runs]),
        "grad_norm_variance": np.mean([np.var(run.grad_norms) for run in runs]),
        "grad_noise": np.mean([run.grad_noise for run in runs]),
        "loss_last_tenth": np.mean([np.mean(tail) for tail in tails]),
        "final_loss": np.mean([run.final_loss for run in runs]),
        "distinct_episodes": np.mean([np.mean(run.distinct) for run in runs]),
    }
    curves = {"losses": runs[0].losses, "grad_norms": runs[0].grad_norms}
    return {"order": name, **{key: float(value) for key, value in figures.items()}, **curves}


def add_ratios(results: list[dict[str, Any]]) -> None:
    """Add how each order compares with the full shuffle."""
    full = next(result for result in results if result["order"] == "full shuffle")
    for result in results:
        result["noise_vs_full_shuffle"] = result["grad_noise"] / full["grad_noise"]
        result["loss_vs_full_shuffle"] = result["final_loss"] / full["final_loss"]
        for key in ("grad_norm_mean", "grad_norm_variance"):
            result[f"{key}_vs_full_shuffle"] = result[key] / full[key]


def plot(runs: dict[str, list[Run]], path: str) -> None:
    """Draw loss and gradient norm over the steps of the first seed, and the noise of all."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    colours = {"file order": "tab:red", "raypipe": "tab:blue", "full shuffle": "tab:gray"}
    for name, of_order in runs.items():
        for axis, values in ((axes[0], of_order[0].losses), (axes[1], of_order[0].grad_norms)):
            axis.plot(values, color=colours[name], alpha=0.25, linewidth=0.6)
            axis.plot(_smoothed(values), color=colours[name], label=name, linewidth=1.6)
    for axis, title in ((axes[0], "loss of the batch"), (axes[1], "norm of the gradient")):
        axis.set(title=title, xlabel="step", yscale="log")
        axis.legend()
    noise = [np.mean([run.grad_noise for run in of_order]) for of_order in runs.values()]
    bars = axes[2].bar(list(runs), noise, color=[colours[name] for name in runs])
    axes[2].bar_label(bars, fmt="%.3g")
    axes[2].set(title="noise of the gradient at fixed weights, E|g_batch - g|²", yscale="log")
    figure.savefig(path, dpi=120)
    print(f"drawn to {path}")


def _smoothed(values: list[float], width: int = 25) -> Any:
    kernel = np.ones(width) / width
    padded = np.pad(values, (width // 2, width - 1 - width // 2), mode="edge")
    return np.convolve(padded, kernel, mode="valid")


if __name__ == "__main__":
    main()
