"""Why the order of frames matters: one small policy, one dataset, several orders.

    python benchmarks/gradient_noise.py [ROOT] [--ranks 1] [--json-file FILE] [--plot FILE]

ROOT is a LeRobot dataset with ``observation.state`` and ``action``. Without it a dataset is made, whose episodes differ
strongly: each walks about in its own corner of the state space. The same policy, from the same first weights, is
trained on it by ranks that read their part in file order, by raypipe with several live windows and clips, and by a full
shuffle. Rows are taken from memory in the order of the plan, which is the order of a loader (``tests/contracts``).

Of each order, as means over several seeds:

- *grad_noise* is E|g_batch - g|^2 at the first weights, where g is the gradient of all frames;
- *long_run_noise* is E|g_64 - g|^2, of the average over 64 following batches, relative to independent batches. What
  batches near each other have in common does not average out, and raises it. A full shuffle has less than 1: it draws
  without replacement, and 64 of S batches leave a noise of 1 - 64 / S;
- *final_loss* is that of all frames after the epochs;
- *percent* is how much more than the full shuffle's it is, and *error* the standard error of that over the seeds.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from machine import write_results
from numpy.typing import NDArray
from torch import nn

import raypipe as rp
from raypipe.plan import WorldPlan, measure_mixing
from raypipe.plan.mixing import count_distinct
from raypipe.testing import SynthSpec, varied_lengths, write_dataset

STATE_DIM, ACTION_DIM, HIDDEN = 8, 4, 32
LIVE_SPANS: Final = (128, 512, 1024)
CLIPS: Final = (1, 2, 4, 8, "span")
FOLLOWING: Final = 64
"""Batches that the long-run noise averages over."""

FULL_SHUFFLE: Final = "full shuffle"
FILE_ORDER: Final = "file order"
COLUMNS = (
    "order",
    "distinct_episodes",
    "near_repeats",
    "grad_noise",
    "noise_percent",
    "long_run_noise",
    "final_loss",
    "loss_percent",
    "loss_error_percent",
)

Order = Callable[[int, int], torch.Tensor]
"""Gives the (S, B) rows of the global batches of an epoch, given seed and epoch."""


@dataclass(frozen=True)
class Samples:
    """All frames of a dataset, in file order."""

    dataset: rp.Dataset
    states: torch.Tensor
    actions: torch.Tensor
    episode: torch.Tensor
    first_row: NDArray[np.int64]
    """By the number of the episode."""

    def __len__(self) -> int:
        return len(self.states)


@dataclass(frozen=True)
class Run:
    """One training: a figure per step, and some of the whole."""

    grad_norms: list[float]
    losses: list[float]
    final_loss: float
    distinct: float
    grad_noise: float
    long_run_noise: float


def main() -> None:
    arguments = parse_arguments()
    # The policy is so small that more threads wait for each other.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="raypipe-bench-") as folder:
        root = arguments.root or make_differing_episodes(Path(folder) / "data", arguments.episodes)
        samples = read_samples(str(root))
        orders, near_repeats = make_orders(samples, arguments.ranks, arguments.batch_size)
        runs: dict[str, list[Run]] = {name: [] for name in orders}
        for seed in range(arguments.seeds):
            epochs = [torch.stack([order(seed, i) for order in orders.values()]) for i in range(arguments.epochs)]
            for name, run in zip(orders, train(samples, epochs, seed), strict=True):
                runs[name].append(run)
    results = [{**summarise(name, of_order), **near_repeats.get(name, {})} for name, of_order in runs.items()]
    add_ratios(results, runs)
    write_results(arguments.json, results, COLUMNS)
    if arguments.plot:
        plot(runs, arguments.plot)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", help="a LeRobot dataset; without it one is made")
    parser.add_argument("--episodes", type=int, default=3000, help="of the dataset that is made")
    parser.add_argument("--ranks", type=int, default=2, help="each with a lane of its own")
    parser.add_argument("--batch-size", type=int, default=64, help="frames per rank")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json-file", dest="json", help="also write the figures here")
    parser.add_argument("--plot", help="also draw them here")
    return parser.parse_args()


def make_differing_episodes(root: Path, num_episodes: int) -> Path:
    """Write a dataset whose episodes are short random walks, each around a centre of its own."""
    lengths = varied_lengths(num_episodes, 80, seed=0)
    spec = SynthSpec(lengths=lengths, cameras=(), state_dim=STATE_DIM, action_dim=ACTION_DIM, with_stats=False)
    write_dataset(root, spec)
    draw = np.random.default_rng(0)
    teacher = [draw.normal(size=(STATE_DIM, HIDDEN)) / 2, draw.normal(size=(HIDDEN, ACTION_DIM)) / 4]
    centres = draw.normal(scale=2.0, size=(num_episodes, STATE_DIM))
    for path in sorted((root / "data").rglob("*.parquet")):
        table = pq.read_table(path)
        states = centres[table["episode_index"].to_numpy()] + _walk(draw, len(table))
        actions = np.tanh(states @ teacher[0]) @ teacher[1]
        for name, values in (("observation.state", states), ("action", actions)):
            flat = pa.array(values.astype(np.float32).ravel())
            column = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
            table = table.set_column(table.column_names.index(name), name, column)
        # One row group per file: nothing here depends on how rows are grouped.
        pq.write_table(table, path)
    return root


def _walk(draw: np.random.Generator, num_frames: int, memory: float = 0.95) -> Any:
    """Return a walk about 0: a frame and the next are nearly the same, frames two seconds apart are not."""
    steps = draw.normal(scale=np.sqrt(1 - memory**2), size=(num_frames, STATE_DIM))
    walk = np.zeros_like(steps)
    for i in range(1, num_frames):
        walk[i] = memory * walk[i - 1] + steps[i]
    return walk


def read_samples(root: str) -> Samples:
    """Return the rows of a dataset, each value scaled to mean 0 and variance 1."""
    files = sorted((Path(root) / "data").rglob("*.parquet"))
    columns = ["observation.state", "action", "episode_index", "index"]
    table = pa.concat_tables([pq.read_table(path, columns=columns) for path in files]).sort_by("index")
    episode = table["episode_index"].to_numpy()
    numbers, rows = np.unique(episode, return_index=True)
    first_row = np.zeros(numbers.max() + 1, dtype=np.int64)
    first_row[numbers] = rows
    states, actions = (_scaled(table[name]) for name in ("observation.state", "action"))
    return Samples(rp.open_dataset(root, cameras=[]), states, actions, torch.from_numpy(episode.copy()), first_row)


def _scaled(column: Any) -> torch.Tensor:
    values = torch.tensor(np.stack(column.to_numpy()), dtype=torch.float32)
    return (values - values.mean(dim=0)) / values.std(dim=0)


def make_orders(samples: Samples, ranks: int, batch_size: int) -> tuple[dict[str, Order], dict[str, dict[str, float]]]:
    """Return the orders by name, and the near repeats of those that are planned."""
    num_frames, size = len(samples), ranks * batch_size
    num_steps = num_frames // ranks // batch_size

    def file_order(seed: int, epoch: int) -> torch.Tensor:  # noqa: ARG001
        starts = torch.arange(ranks) * (num_frames // ranks)
        rows = torch.arange(num_steps * batch_size).reshape(num_steps, 1, batch_size) + starts[:, None]
        return rows.reshape(num_steps, size)

    def full_shuffle(seed: int, epoch: int) -> torch.Tensor:
        order = torch.randperm(num_frames, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        return order[: num_steps * size].reshape(num_steps, size)

    orders: dict[str, Order] = {FULL_SHUFFLE: full_shuffle, FILE_ORDER: file_order}
    near_repeats = {}
    most = len(samples.episode.unique()) // ranks
    for live_spans in dict.fromkeys(min(live_spans, most) for live_spans in LIVE_SPANS):
        for clip_frames in CLIPS:
            planner = Planner(samples, ranks, batch_size, {"live_spans": live_spans, "clip_frames": clip_frames})
            name = f"{live_spans} live, {'whole spans' if clip_frames == 'span' else f'clips of {clip_frames}'}"
            orders[name] = planner.rows
            half_second = round(samples.dataset.meta.fps / 2)
            near = measure_mixing(planner.world(0, 0), near_frames=[half_second]).near_repeats
            assert near is not None, "the frame rate is given"
            near_repeats[name] = {"near_repeats": near.share}
            near_repeats[FULL_SHUFFLE] = {"near_repeats": near.full_shuffle}
    return orders, near_repeats


@dataclass(frozen=True)
class Planner:
    """raypipe's batches by an order, as rows."""

    samples: Samples
    ranks: int
    batch_size: int
    order: dict[str, Any]

    def world(self, seed: int, epoch: int) -> WorldPlan:
        """Return the plan of an epoch."""
        order = {"span_frames": "episode", "tail": "drop", **self.order}
        pipe = rp.Pipeline(self.samples.dataset, batch_size=self.batch_size, seed=seed, order=order)
        return pipe.plan(epoch=epoch, world_size=self.ranks)

    def rows(self, seed: int, epoch: int) -> torch.Tensor:
        """Return the (S, B) rows of an epoch."""
        world = self.world(seed, epoch)
        parts = []
        for rank in range(self.ranks):
            (lane,) = world.lanes_of(rank)
            frames = world.lane_frames(world.plan.lane(lane), 0, world.num_steps * self.batch_size)
            rows = self.samples.first_row[frames.episode] + frames.frame
            parts.append(rows.reshape(world.num_steps, self.batch_size))
        return torch.from_numpy(np.concatenate(parts, axis=1))


def new_policy(samples: Samples, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(samples.states.shape[1], HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, samples.actions.shape[1])
    )


def frame_gradients(policy: nn.Module, samples: Samples) -> torch.Tensor:
    """Return (N, P) gradients, of every frame alone, less their mean: a batch's is the mean of its frames'."""
    weights = {name: value.detach() for name, value in policy.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(policy, weights, (state,)), action)

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), chunk_size=8192)
    found = each(weights, samples.states, samples.actions)
    gradients = torch.cat([value.flatten(start_dim=1) for value in found.values()], dim=1)
    return gradients.sub_(gradients.mean(dim=0))


def train(samples: Samples, epochs: Sequence[torch.Tensor], seed: int) -> list[Run]:
    """Return what a training in each order looked like; all are trained at once, which is many times faster.

    Args:
        epochs: (K, S, B) rows of the batches of K orders.
    """
    policy = new_policy(samples, seed)
    gradients = frame_gradients(policy, samples)
    weights = [value.detach().repeat(len(epochs[0]), *[1] * value.dim()) for value in policy.parameters()]
    for value in weights:
        value.requires_grad_()
    optimizer = torch.optim.SGD(weights, lr=0.01, momentum=0.9)
    # Policies are trained with a rate that falls to zero; without it the last batches would weigh most.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, sum(epoch.shape[1] for epoch in epochs))
    norms, losses = [], []
    for chosen in (batch for epoch in epochs for batch in epoch.unbind(dim=1)):
        optimizer.zero_grad()
        loss = order_losses(weights, samples.states[chosen], samples.actions[chosen])
        loss.sum().backward()  # type: ignore[no-untyped-call]
        parts = [value.grad.flatten(start_dim=1) for value in weights if value.grad is not None]
        norms.append(torch.cat(parts, dim=1).norm(dim=1))
        losses.append(loss.detach())
        optimizer.step()
        schedule.step()
    of_steps = zip(torch.stack(norms, dim=1).tolist(), torch.stack(losses, dim=1).tolist(), strict=True)
    return [
        describe_run(samples, of_order, [value[order].detach() for value in weights], gradients, curves)
        for order, (of_order, curves) in enumerate(
            zip(zip(*(epoch.unbind() for epoch in epochs), strict=True), of_steps, strict=True)
        )
    ]


def describe_run(
    samples: Samples,
    epochs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    gradients: torch.Tensor,
    curves: tuple[list[float], list[float]],
) -> Run:
    """Return the figures of a training in one order, of (S, B) rows an epoch."""
    noise = [measure_noise(gradients, epoch) for epoch in epochs]
    one = [value[None] for value in weights]
    return Run(
        grad_norms=curves[0],
        losses=curves[1],
        final_loss=float(order_losses(one, samples.states[None], samples.actions[None])[0]),
        distinct=float(np.mean([count_distinct(samples.episode[epoch].numpy()).mean() for epoch in epochs])),
        grad_noise=float(np.mean([of_batch for of_batch, _ in noise])),
        long_run_noise=float(np.mean([of_many for _, of_many in noise])),
    )


def order_losses(weights: Sequence[torch.Tensor], states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Return the (K,) losses of K policies, whose weights are stacked, on a batch each."""
    hidden, hidden_bias, out, out_bias = weights
    seen = torch.tanh(torch.baddbmm(hidden_bias[:, None], states, hidden.transpose(1, 2)))
    return (torch.baddbmm(out_bias[:, None], seen, out.transpose(1, 2)) - actions).square().mean(dim=(1, 2))


def measure_noise(gradients: torch.Tensor, batches: torch.Tensor) -> tuple[float, float]:
    """Return the noise of a batch's gradient, and that of an average over 64 batches against independent ones."""
    found = nn.functional.embedding_bag(batches, gradients, mode="mean").double()
    sums = torch.cat([torch.zeros_like(found[:1]), found.cumsum(dim=0)])
    following = min(FOLLOWING, len(found))
    averages = (sums[following:] - sums[:-following]) / following
    independent = float(gradients.square().sum(dim=1).mean()) / batches.shape[1] / following
    of_batch, of_many = (float(value.square().sum(dim=1).mean()) for value in (found, averages))
    return of_batch, of_many / independent


def summarise(name: str, runs: list[Run]) -> dict[str, Any]:
    """Return the figures of one order, averaged over its runs."""
    tails = [run.losses[-len(run.losses) // 10 :] for run in runs]
    figures = {
        "grad_norm_mean": np.mean([np.mean(run.grad_norms) for run in runs]),
        "grad_norm_variance": np.mean([np.var(run.grad_norms) for run in runs]),
        "grad_noise": np.mean([run.grad_noise for run in runs]),
        "long_run_noise": np.mean([run.long_run_noise for run in runs]),
        "loss_last_tenth": np.mean([np.mean(tail) for tail in tails]),
        "final_loss": np.mean([run.final_loss for run in runs]),
        "distinct_episodes": np.mean([run.distinct for run in runs]),
    }
    curves = {"losses": runs[0].losses, "grad_norms": runs[0].grad_norms}
    return {"order": name, **{key: float(value) for key, value in figures.items()}, **curves}


def add_ratios(results: list[dict[str, Any]], runs: dict[str, list[Run]]) -> None:
    """Add how each order compares with the full shuffle, from the same first weights."""
    full = next(result for result in results if result["order"] == FULL_SHUFFLE)
    for result in results:
        pairs = zip(runs[result["order"]], runs[FULL_SHUFFLE], strict=True)
        losses = [100 * (one.final_loss / other.final_loss - 1) for one, other in pairs]
        result["loss_percent"] = float(np.mean(losses))
        result["loss_error_percent"] = float(np.std(losses, ddof=1) / np.sqrt(len(losses))) if len(losses) > 1 else None
        result["noise_percent"] = 100 * (result["grad_noise"] / full["grad_noise"] - 1)


def plot(runs: dict[str, list[Run]], path: str) -> None:
    """Draw the loss over the steps of the first seed, and the noise of all orders."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    figure, axes = plt.subplots(1, 3, figsize=(16, 5), layout="constrained")
    # Of the planned orders the one with clips of 2 and the most live spans.
    clips = next(name for name in reversed(runs) if name.endswith("clips of 2"))
    colours = {FILE_ORDER: "tab:red", clips: "tab:blue", FULL_SHUFFLE: "tab:gray"}
    for name, colour in colours.items():
        values = runs[name][0].losses
        axes[0].plot(values, color=colour, alpha=0.25, linewidth=0.6)
        axes[0].plot(_smoothed(values), color=colour, label=name, linewidth=1.6)
    axes[0].set(title="loss of the batch", xlabel="step", yscale="log")
    axes[0].legend()
    bars = ((axes[1], "grad_noise", "noise of a batch's gradient"), (axes[2], "long_run_noise", "long-run noise"))
    for axis, name, title in bars:
        noise = [np.mean([getattr(run, name) for run in of_order]) for of_order in runs.values()]
        drawn = axis.barh(list(runs), noise, color=[colours.get(order, "tab:cyan") for order in runs])
        axis.bar_label(drawn, fmt="%.3g")
        axis.set(title=title, xscale="log")
        axis.set_xlim(min(noise) / 2, max(noise) * 2)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.invert_yaxis()
    figure.savefig(path, dpi=120)
    print(f"drawn to {path}")


def _smoothed(values: list[float], width: int = 25) -> Any:
    kernel = np.ones(width) / width
    padded = np.pad(values, (width // 2, width - 1 - width // 2), mode="edge")
    return np.convolve(padded, kernel, mode="valid")


if __name__ == "__main__":
    main()
