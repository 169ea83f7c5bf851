"""Views of what raypipe decides: an epoch's plan as a table and as a picture.

Reads ``meta/`` of a dataset and plans; reads no rows and no pixels. Decides nothing that a run depends on.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raypipe.dataset import Dataset
from raypipe.errors import ConfigError
from raypipe.mixture import Mixture, open_dataset
from raypipe.plan import (
    SINGLE_DATASET,
    BatchSpec,
    EpisodeIndex,
    FrameSizes,
    OrderSpec,
    PlanReport,
    SelectionSpec,
    WorldPlan,
    emitted_frames,
    index_episodes,
    plan_epoch,
    plan_world,
    report_plan,
    start,
)

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_DRAWN_SPANS = 1500
_DRAWN_BATCHES = 80
_DRAWN_MEMBERS = 10
_LISTED_MEMBERS = 40
_SAMPLE_RATES = (100, 1_000, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """The plan of an epoch of a dataset, and what it costs and gives."""

    world: WorldPlan
    report: PlanReport


def view_plan(root: str, spec: OrderSpec, batch: BatchSpec, *, world_size: int, epoch: int = 0) -> PlanView:
    """Return the plan of one epoch of the dataset or mixture at `root`; reads ``meta/``."""
    with warnings.catch_warnings():
        # Which cameras and datasets are left out is what `raypipe info` tells.
        warnings.simplefilter("ignore", UserWarning)
        dataset = open_dataset(root)
    index = dataset.index() if isinstance(dataset, Mixture) else _index(dataset)
    todo = start(spec, world_size=world_size, epoch=epoch)
    plan = plan_epoch(index, todo.spec, epoch=epoch, legs=todo.legs)
    world = plan_world(plan, world_size=world_size, batch=batch)
    return PlanView(world=world, report=report_plan(world, measure_frame(dataset)))


def measure_frame(dataset: Dataset | Mixture) -> FrameSizes:
    """Return the bytes of one frame of a dataset: its row, and the decoded cameras that are there."""
    features = dataset.features
    cameras = dataset.schema.cameras if isinstance(dataset, Mixture) else dataset.spec.cameras
    return FrameSizes(
        row_bytes=sum(feature.frame_bytes for feature in features.values() if not feature.is_camera),
        pixel_bytes=sum(features[name].frame_bytes for name in cameras),
    )


def _index(dataset: Dataset) -> EpisodeIndex:
    meta, episodes = dataset.meta, dataset.meta.episodes
    return index_episodes(
        SINGLE_DATASET,
        episodes.episode_index,
        episodes.length,
        fingerprint=meta.order_fingerprint,
        selection=SelectionSpec(),
    )


def plan_table(report: PlanReport) -> "Group":
    """Return a report as a table for a terminal, and below it one with a row per dataset of a mixture."""
    from rich.console import Group
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _lines(report):
        table.add_row(name, text)
    return Group(table, "", _members_table(report)) if report.members else Group(table)


def _members_table(report: PlanReport) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("dataset", overflow="fold")
    for name in ("frames", "in an epoch", "share", "passes an epoch", "spans", "off by at most"):
        table.add_column(name, justify="right")
    for one in report.members[:_LISTED_MEMBERS]:
        passes = f"{one.laps:,.2f}" if one.laps >= 0.01 else f"{one.laps:.2g}"
        table.add_row(
            one.name,
            f"{one.frames:,}",
            f"{one.epoch_frames:,}",
            f"{one.share:.2%}",
            passes,
            f"{one.spans:,}",
            f"{one.deviation:,.0f} frames",
        )
    more = report.members[_LISTED_MEMBERS:]
    if more:
        share = sum(one.share for one in more)
        taken = sum(one.epoch_frames for one in more)
        frames = sum(one.frames for one in more)
        table.add_row(f"and {len(more)} more, see --json", f"{frames:,}", f"{taken:,}", f"{share:.2%}", "", "", "")
    return table


def plot_plan(world: WorldPlan, path: Path, *, rank: int = 0) -> None:
    """Draw the lives of a rank's spans, the frames of some of its batches, and their distinct episodes.

    A span is a line from admission to retirement, at its place in the queue. Draws at most 1,500 of them.
    """
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"cannot draw to {str(path)!r}; give a file that ends in .png, .pdf or .svg")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    is_mixture = len(world.plan.index.dataset_names) > 1
    axes = figure.subplots(2 + is_mixture, 1, sharex=True, height_ratios=(3, 1, 1) if is_mixture else (3, 1))
    steps = np.unique(np.linspace(0, world.num_steps - 1, _DRAWN_BATCHES).astype(int)).tolist()
    _draw_lives(axes[0], world, rank, steps)
    _draw_distinct(axes[1], world, rank, steps)
    if is_mixture:
        _draw_shares(axes[2], world, steps)
    axes[-1].set_xlabel("step")
    plan = world.plan
    figure.suptitle(
        f"epoch {plan.epoch}, rank {rank} of {world.world_size}, {plan.leg.lanes} lanes, "
        f"{plan.leg.live_spans} live spans, seed {plan.spec.seed}"
    )
    figure.savefig(path, dpi=120)


def _draw_lives(axes: Any, world: WorldPlan, rank: int, steps: list[int]) -> None:
    plan = world.rank(rank)
    admitted, retired = ((position - world.steps.position) / world.steps.per_lane for position in plan.lives())
    drawn = np.unique(np.linspace(0, len(plan.queue) - 1, _DRAWN_SPANS).astype(int))
    axes.hlines(
        drawn, admitted[drawn], retired[drawn], color="tab:blue", alpha=0.35, linewidth=0.8, label="span is live"
    )
    wanted = set(steps)
    batches = [batch for batch in plan.batches() if batch.step in wanted]
    step = np.concatenate([np.full(len(batch.span), batch.step + 0.5) for batch in batches])
    axes.plot(
        step,
        np.concatenate([batch.span for batch in batches]),
        ".",
        color="tab:orange",
        markersize=2,
        label="frame of a batch",
    )
    axes.set_ylabel("span, by arrival")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)


def _draw_distinct(axes: Any, world: WorldPlan, rank: int, steps: list[int]) -> None:
    frames = [world.frames_at(step, rank) for step in steps]
    ids = [(found.dataset.astype(np.int64) << 40) | found.episode for found in frames]
    axes.plot(np.array(steps) + 0.5, [len(np.unique(found)) for found in ids], ".-", color="tab:orange", linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("distinct episodes\nin a batch")


def _draw_shares(axes: Any, world: WorldPlan, steps: list[int]) -> None:
    """Draw the part of the largest datasets in what all ranks have emitted up to each of these steps."""
    names, ends = world.plan.index.dataset_names, np.array(steps) + 1
    emitted = emitted_frames(world, ends)
    realised = emitted / emitted.sum(axis=1, keepdims=True)
    for number in np.argsort(-emitted[-1], kind="stable")[:_DRAWN_MEMBERS].tolist():
        axes.plot(ends, realised[:, number], linewidth=1, label=names[number])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of all\nframes so far")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)


def _lines(report: PlanReport) -> list[tuple[str, str]]:
    local, everywhere = report.mixing.local_batch, report.mixing.global_batch
    overlap = ", ".join(f"{shared:.1f} after {lag}" for lag, shared in report.mixing.overlap.items())
    blocks = ", ".join(f"{report.spans_per_1000_frames * rate / 1000:.1f} at {rate:,}" for rate in _SAMPLE_RATES)
    return [
        ("steps", f"{report.steps:,} of {report.batch_size} frames on each of {report.world_size} ranks"),
        ("frames", f"{report.frames:,} in {report.spans:,} spans on {report.lanes} lanes"),
        ("tail", f"{report.tail}; {report.left_over} frames left over"),
        ("fingerprint", report.fingerprint),
        (
            "live",
            f"up to {report.live_frames:,} frames a rank: {_size(report.live_row_bytes)} of rows, "
            f"{_size(report.live_pixel_bytes)} of pixels if decoded per span",
        ),
        (
            "before batch 1",
            f"{report.first_batch_frames:,} frames a rank ({_size(report.first_batch_bytes)}); "
            f"{report.resume_frames:,} after a resume in the middle",
        ),
        ("distinct episodes", f"{_distinct(local)} in a rank's batch"),
        ("", f"{_distinct(everywhere)} in a global batch"),
        (
            "shared episodes",
            f"{overlap or 'one step only'} steps; a full shuffle {report.mixing.overlap_full_shuffle:.1f}",
        ),
        ("blocks/s", f"{blocks} frames/s over all ranks, a span a block"),
        *_mixture_lines(report),
        *(("advice", text) for text in report.advice),
    ]


def _mixture_lines(report: PlanReport) -> list[tuple[str, str]]:
    if not report.members:
        return []
    worst = max(report.members, key=lambda one: one.deviation)
    return [
        ("distinct datasets", f"{_distinct(report.mixing.datasets)} in a rank's batch, of {len(report.members)}"),
        (
            "shares",
            f"exact over the epoch; off by at most {worst.deviation:,.0f} frames at the steps looked at ({worst.name})",
        ),
    ]


def _distinct(batch: Any) -> str:
    return (
        f"{batch.mean:.1f} (min {batch.min}, first batches {batch.first:.1f}, last {batch.last:.1f}; "
        f"a full shuffle {batch.full_shuffle:.1f})"
    )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.2f} MB"
