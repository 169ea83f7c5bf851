"""The picture of a plan: when each span is live, what batches contain, and how much is in memory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.plan import PlanReport, RankPlan, WorldPlan, emitted_frames
from raypipe.text import counted, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DRAWN_SPANS: Final = 1500
_DRAWN_BATCHES: Final = 80
_DRAWN_MEMBERS: Final = 10
_WIDTH: Final = 11.0


def draw_plan(world: WorldPlan, report: PlanReport, row_bytes: int, *, rank: int) -> "Figure":
    """Return the plan of a rank over the steps of the epoch.

    From top to bottom: the lives of its spans, each a line from admission to retirement at its place in the queue, with
    the frames of some batches; the distinct episodes in a batch, with the near repeats in words; what is in memory; for
    a mixture, the shares. It draws at most 1,500 spans.
    """
    from matplotlib.ticker import MaxNLocator

    is_mixture = len(world.plan.index.dataset_names) > 1
    heights = (3, 1.1, 1.1, 1.2) if is_mixture else (3, 1.1, 1.1)
    figure = new_figure(_WIDTH, 1.5 * sum(heights) + 0.4)
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    steps = np.unique(np.linspace(0, world.num_steps - 1, _DRAWN_BATCHES).astype(int)).tolist()
    plan = world.rank(rank)
    admitted, retired = (_in_steps(world, position) for position in plan.lives())
    middles = {step: _middle(world, step) for step in steps}
    _draw_lives(axes[0], plan, (admitted, retired), middles)
    _draw_distinct(axes[1], world, report, rank, middles)
    _draw_memory(axes[2], live_frames(plan, admitted, retired, world.num_steps), report, row_bytes)
    if is_mixture:
        _draw_shares(axes[3], world, steps)
    axes[-1].set_xlabel("step")
    axes[-1].set_xlim(0, max(1.0, _in_steps(world, world.steps.position_after(world.num_steps))))
    for scale in (axes[0].yaxis, axes[1].yaxis, axes[-1].xaxis):
        scale.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def _in_steps(world: WorldPlan, position: Any) -> Any:
    """Return positions in a lane as steps; a short last batch ends before its step would."""
    return (position - world.steps.position) / world.steps.per_lane


def _middle(world: WorldPlan, step: int) -> float:
    begin, end = (_in_steps(world, world.steps.position_after(count)) for count in (step, step + 1))
    return float(begin + end) / 2


def live_frames(
    plan: RankPlan, admitted: NDArray[np.float64], retired: NDArray[np.float64], num_steps: int
) -> NDArray[np.int64]:
    """Return how many frames a rank's live spans hold at the start of every step, counting each span in full."""
    changes = np.zeros(num_steps + 1, dtype=np.int64)
    first = np.clip(np.ceil(admitted).astype(int), 0, num_steps)
    stop = np.clip(np.ceil(retired).astype(int), 0, num_steps)
    np.add.at(changes, first, plan.queue.num_rows)
    np.add.at(changes, stop, -plan.queue.num_rows)
    return np.cumsum(changes)[:-1]


def _draw_lives(
    axes: Any, plan: RankPlan, lives: tuple[NDArray[np.float64], NDArray[np.float64]], middles: Mapping[int, float]
) -> None:
    admitted, retired = lives
    drawn = np.unique(np.linspace(0, len(plan.queue) - 1, _DRAWN_SPANS).astype(int))
    axes.hlines(
        drawn, admitted[drawn], retired[drawn], color="tab:blue", alpha=0.35, linewidth=0.8, label="span is live"
    )
    batches = [batch for batch in plan.batches() if batch.step in middles]
    if batches:
        places = np.concatenate([np.full(len(batch.span), middles[batch.step]) for batch in batches])
        spans = np.concatenate([batch.span for batch in batches])
        axes.plot(places, spans, ".", color="tab:orange", markersize=2, label="frame of a batch")
    axes.set(ylabel="span, by arrival", ylim=(-0.5, max(1, len(plan.queue)) - 0.5))
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)


def _draw_distinct(axes: Any, world: WorldPlan, report: PlanReport, rank: int, middles: Mapping[int, float]) -> None:
    frames = [world.frames_at(step, rank) for step in middles]
    ids = [(found.dataset.astype(np.int64) << 40) | found.episode for found in frames]
    counts = [len(np.unique(found)) for found in ids]
    axes.plot(list(middles.values()), counts, ".-", color="tab:orange", linewidth=0.8, label="this plan")
    expected = report.mixing.local_batch.full_shuffle
    axes.set_ylim(0, 1.15 * max(*counts, expected))
    axes.axhline(expected, color="black", linewidth=0.8, linestyle="--", label=f"a full shuffle: {expected:.1f}")
    axes.set_ylabel("distinct episodes\nin a batch")
    near = report.mixing.near_repeats
    if near is not None and near.num_batches:
        text = f"near repeats in the next {counted(near.num_batches, 'batch')}: {near.share:.1%} of frames"
        axes.set_title(f"{text}, a full shuffle {near.full_shuffle:.1%}", loc="right", fontsize="small")
    axes.legend(loc="best", fontsize="small", framealpha=0.85)


def _draw_memory(axes: Any, frames: NDArray[np.int64], report: PlanReport, row_bytes: int) -> None:
    largest = max(1, report.live_frames) * (row_bytes or 1)
    unit, name = (1.0, "rows") if not row_bytes else (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    values = frames * (row_bytes or 1) / unit
    places, held = np.arange(len(values) + 1), np.append(values, values[-1:])
    axes.fill_between(places, held, step="post", color="tab:blue", alpha=0.3)
    most = largest / unit
    axes.axhline(most, color="black", linewidth=0.8, linestyle=":", label=f"at most {most:,.4g} {name} on any rank")
    axes.set_ylim(0, 1.15 * most)
    axes.set_ylabel("rows at hand" if name == "rows" else f"{name} of\nrows at hand")
    axes.legend(loc="lower right", fontsize="small", framealpha=0.85)


def _draw_shares(axes: Any, world: WorldPlan, steps: list[int]) -> None:
    """Draw the share of the largest datasets in the frames that all ranks have emitted up to each of these steps."""
    names, ends = world.plan.index.dataset_names, np.array(steps) + 1
    emitted = emitted_frames(world, ends)
    realised = emitted / emitted.sum(axis=1, keepdims=True)
    for number in np.argsort(-emitted[-1], kind="stable")[:_DRAWN_MEMBERS].tolist():
        axes.plot(ends, realised[:, number], linewidth=1, label=names[number])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of all\nframes so far")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)
