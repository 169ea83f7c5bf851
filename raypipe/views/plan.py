"""An epoch's plan as a table and as a picture, before it runs.

It reads ``meta/`` of a dataset and plans; it reads no rows and no pixels, and never affects a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import Dataset
from raypipe.decode import DecodeSpec
from raypipe.errors import ConfigError
from raypipe.mixture import Mixture
from raypipe.pipeline import datasets_of, index_frames, measure_members, open_with_order
from raypipe.plan import (
    DEFAULT_LIVE_BYTES,
    WHOLE_SPAN,
    BatchSpec,
    MemberCost,
    NearRepeats,
    PlanReport,
    RankPlan,
    SelectionSpec,
    WorldPlan,
    emitted_frames,
    plan_epoch,
    plan_world,
    report_plan,
    start,
)
from raypipe.storage import check_writable, save_figure
from raypipe.text import (
    count_whole,
    counted,
    lines_table,
    make_spec,
    new_figure,
    page_part,
    page_table,
    parse_bytes,
    plural,
    rows_table,
)
from raypipe.views.view import View, html_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group

    from raypipe.pipeline import Pipeline

_LISTED_MEMBERS: Final = 40
_SAMPLE_RATES: Final = (100, 1_000, 10_000)
_MEMBER_TITLES: Final = ("dataset", "frames", "in an epoch", "share", "passes an epoch", "spans", "off by at most")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PlanView(View):
    """The plan of an epoch of a dataset, and what it costs and gives."""

    world: WorldPlan
    report: PlanReport
    row_bytes: int
    """The bytes of a row with its windows; 0 if unknown: then memory counts in frames."""
    rank: int = 0

    @property
    def title(self) -> str:
        """The epoch, the number of ranks, and what decides its order."""
        plan = self.world.plan
        clips = "" if plan.spec.clip_frames == WHOLE_SPAN else f", clips of {plan.spec.clip_frames}"
        return (
            f"epoch {plan.epoch}, rank {self.rank} of {self.world.world_size}, {counted(plan.leg.lanes, 'lane')}, "
            f"{counted(plan.leg.live_spans, 'live span')}{clips}, seed {plan.spec.seed}"
        )

    def figure(self) -> "Figure":
        """Return the lives of a rank's spans with the frames of some batches, their episodes, and the memory in use."""
        figure = _draw_plan(self)
        figure.suptitle(self.title, fontsize=11)
        return figure

    def parts(self) -> list[str]:
        """Return the view as pieces of HTML."""
        members = [page_table(_MEMBER_TITLES, _member_rows(self.report))] if self.report.members else []
        return [page_part("lines", plan_lines(self.report)), html_plot(_draw_plan(self), self.title), *members]


def view_world(
    world: WorldPlan,
    members: Sequence[MemberCost] = (),
    *,
    live_bytes: int = DEFAULT_LIVE_BYTES,
    near_frames: Sequence[int] = (),
    rank: int = 0,
) -> PlanView:
    """Return the view of a plan; without the sizes of its `members`, memory counts in frames.

    Args:
        live_bytes: memory of a rank for decoded frames; the advice assumes it.
        near_frames: the frames in half a second, for every dataset in turn; a plan alone does not know it.
    """
    if not 0 <= rank < world.world_size:
        raise ConfigError(f"there is no rank {rank}: the world has {counted(world.world_size, 'rank')}, counted from 0")
    members = members or [MemberCost(row_bytes=0)] * len(world.plan.index.dataset_names)
    report = report_plan(world, members, live_bytes=live_bytes, near_frames=near_frames)
    return PlanView(world=world, report=report, row_bytes=max(member.row_bytes for member in members), rank=rank)


def view_pipeline(pipe: "Pipeline", *, world_size: int = 1, epoch: int = 0) -> PlanView:
    """Return the view of what a pipeline would do in an epoch on `world_size` ranks; reads nothing."""
    config = pipe.config
    world = pipe.plan(world_size=world_size, epoch=epoch)
    return _view_costed(world, config.dataset, config.decode, config.budget.live_bytes)


def view_plan(
    root: str,
    order: Mapping[str, Any],
    batch: BatchSpec,
    *,
    world_size: int,
    epoch: int = 0,
    live_bytes: int | str = DEFAULT_LIVE_BYTES,
    selection: Mapping[str, Any] | None = None,
) -> PlanView:
    """Return the plan of one epoch of the dataset or mixture at `root`; reads ``meta/``.

    Args:
        order: fields of an `OrderSpec`; the others are as `raypipe.Pipeline` chooses them.
        selection: fields of a `SelectionSpec`, for a single dataset.
        live_bytes: memory of a rank for decoded frames, as a number or ``"2GB"``.
    """
    live_bytes = parse_bytes(live_bytes, "live_bytes")
    chosen = make_spec(SelectionSpec, selection or {}, "selection")
    dataset, spec, decode = open_with_order(root, batch, order, live_bytes=live_bytes, selection=chosen)
    todo = start(spec, world_size=world_size, epoch=epoch)
    plan = plan_epoch(index_frames(dataset, chosen), todo.spec, epoch=epoch, legs=todo.legs)
    world = plan_world(plan, world_size=world_size, batch=batch)
    return _view_costed(world, dataset, decode, live_bytes)


def _view_costed(world: WorldPlan, dataset: Dataset | Mixture, decode: DecodeSpec, live_bytes: int) -> PlanView:
    near_frames = [round(one.meta.fps / 2) for one in datasets_of(dataset)]
    return view_world(world, measure_members(dataset, decode), live_bytes=live_bytes, near_frames=near_frames)


def plan_table(report: PlanReport) -> "Group":
    """Return a report as a table for a terminal; for a mixture, a second table has a row per dataset."""
    from rich.console import Group

    parts: list[Any] = [lines_table(plan_lines(report))]
    if report.members:
        parts += ["", rows_table(_MEMBER_TITLES, _member_rows(report), texts=_MEMBER_TITLES[:1])]
    return Group(*parts)


def _member_rows(report: PlanReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            one.name,
            f"{one.frames:,}",
            f"{one.epoch_frames:,}",
            f"{one.share:.2%}",
            f"{one.laps:,.2f}" if one.laps >= 0.01 else f"{one.laps:.2g}",
            f"{one.spans:,}",
            counted(round(one.deviation), "frame"),
        )
        for one in report.members[:_LISTED_MEMBERS]
    ]
    more = report.members[_LISTED_MEMBERS:]
    if more:
        share = sum(one.share for one in more)
        taken = sum(one.epoch_frames for one in more)
        frames = sum(one.frames for one in more)
        name = f"and {len(more)} more, see --json"
        rows.append((name, f"{frames:,}", f"{taken:,}", f"{share:.2%}", "", "", ""))
    return rows


def plot_plan(view: PlanView, path: Path) -> None:
    """Write the figure of a plan to a .png, .pdf or .svg file."""
    check_picture(path)
    save_figure(view.figure(), path, dpi=120)


def check_picture(path: Path) -> None:
    """Raise a `ConfigError` if the figure of a plan cannot be written to `path`."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"cannot draw to {str(path)!r}; give a file that ends in .png, .pdf or .svg")
    check_writable(path)


def plan_lines(report: PlanReport) -> list[tuple[str, str]]:
    """Return a report as names and texts."""
    local, everywhere = report.mixing.local_batch, report.mixing.global_batch
    overlap = ", ".join(f"{shared:.1f} after {lag}" for lag, shared in report.mixing.overlap.items())
    lags = list(report.mixing.overlap)
    shared = f"{overlap} {plural(lags[-1], 'step')}" if lags else "there are too few full batches to tell"
    blocks = ", ".join(f"{report.spans_per_1000_frames * rate / 1000:.1f} at {rate:,}" for rate in _SAMPLE_RATES)
    ranks = "one rank" if report.world_size == 1 else f"each of {report.world_size:,} ranks"
    kept = "keep_frames=True keeps them on disk, and later epochs copy them at about a tenth of the CPU of decoding"
    decoded = [("decoded", f"{_size(report.decoded_bytes)}, all frames of all videos: {kept}")]
    weights = [one.describe() for one in report.rates] if len(report.rates) > 1 else []
    return [
        ("steps", f"{report.steps:,} of {counted(report.batch_size, 'frame')} on {ranks}"),
        ("frames", f"{report.frames:,} in {counted(report.spans, 'span')} on {counted(report.lanes, 'lane')}"),
        *(("" if number else "selection", text) for number, text in enumerate(report.selection)),
        *(("" if number else "weights", one) for number, one in enumerate(weights)),
        ("tail", f"{report.tail}; {counted(report.left_over, 'frame')} left over"),
        (
            "order",
            f"live_spans={report.live_spans}, span_frames={report.span_frames!r}, clip_frames={report.clip_frames!r}",
        ),
        ("plan fingerprint", report.fingerprint),
        ("live", _live(report)),
        *(decoded if report.decoded_bytes else []),
        (
            "before batch 1",
            f"{counted(report.first_batch_frames, 'frame')} a rank ({_size(report.first_batch_bytes)}); "
            f"{report.resume_frames:,} after a resume in the middle",
        ),
        ("distinct episodes", f"{_distinct(local)} in a rank's batch"),
        ("", f"{_distinct(everywhere)} in a global batch"),
        ("shared episodes", f"{shared}; a full shuffle {report.mixing.overlap_full_shuffle:.1f}"),
        ("near repeats", _near_repeats(report.mixing.near_repeats)),
        ("blocks/s", f"{blocks} frames/s over all ranks, a span a block"),
        *_mixture_lines(report),
        *(("advice", text) for text in report.advice),
    ]


def _live(report: PlanReport) -> str:
    rows = f"up to {counted(report.live_frames, 'row')} a rank: {_size(report.live_row_bytes)}"
    if not report.live_pixel_bytes:
        return rows
    return (
        f"{rows}; up to {_size(report.live_pixel_bytes)} of decoded frames, at {report.decode_cost:.2f} times the CPU "
        f"of decoding in file order"
    )


def _mixture_lines(report: PlanReport) -> list[tuple[str, str]]:
    if not report.members:
        return []
    worst = max(report.members, key=lambda one: one.deviation)
    return [
        ("distinct datasets", f"{_distinct(report.mixing.datasets)} in a rank's batch, of {len(report.members)}"),
        (
            "shares",
            f"exact over the epoch; off by at most {counted(round(worst.deviation), 'frame')} at the steps looked at "
            f"({worst.name})",
        ),
    ]


def _distinct(batch: Any) -> str:
    return (
        f"{batch.mean:.1f} (min {batch.min}, first batches {batch.first:.1f}, last {batch.last:.1f}; "
        f"a full shuffle {batch.full_shuffle:.1f})"
    )


def _near_repeats(near: NearRepeats | None) -> str:
    if near is None:
        return "not known: a plan alone does not know the frame rate"
    if not near.num_batches:
        return "there are too few full batches to tell"
    return (
        f"of {near.share:.1%} of a rank's frames one of the same episode within half a second comes in its next "
        f"{counted(near.num_batches, 'batch')}; a full shuffle {near.full_shuffle:.1%}"
    )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.2f} MB"


_DRAWN_SPANS: Final = 1500
_DRAWN_BATCHES: Final = 80
_DRAWN_MEMBERS: Final = 10


def _draw_plan(view: PlanView) -> "Figure":
    """Return the plan of a rank over the steps of the epoch.

    From top to bottom: the lives of its spans, each a line from admission to retirement at its place in the queue, with
    the frames of some batches; the distinct episodes in a batch, with the near repeats in words; what is in memory; for
    a mixture, the shares. It draws at most 1,500 spans.
    """
    world = view.world
    is_mixture = len(world.plan.index.dataset_names) > 1
    heights = (3, 1.1, 1.1, 1.2) if is_mixture else (3, 1.1, 1.1)
    figure = new_figure(11.0, 1.5 * sum(heights) + 0.4)
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    steps = np.unique(np.linspace(0, world.num_steps - 1, _DRAWN_BATCHES).astype(int)).tolist()
    plan = world.rank(view.rank)
    admitted, retired = (_in_steps(world, position) for position in plan.lives())
    middles = {step: _middle(world, step) for step in steps}
    _draw_lives(axes[0], plan, (admitted, retired), middles)
    _draw_distinct(axes[1], view, middles)
    _draw_memory(axes[2], _live_frames(plan, admitted, retired, world.num_steps), view)
    if is_mixture:
        _draw_shares(axes[3], world, steps)
    axes[-1].set_xlabel("step")
    axes[-1].set_xlim(0, max(1.0, _in_steps(world, world.steps.position_after(world.num_steps))))
    count_whole(axes[0].yaxis, axes[1].yaxis, axes[-1].xaxis)
    return figure


def _in_steps(world: WorldPlan, position: Any) -> Any:
    """Return positions in a lane as steps; a short last batch ends before its step would."""
    return (position - world.steps.position) / world.steps.per_lane


def _middle(world: WorldPlan, step: int) -> float:
    begin, end = (_in_steps(world, world.steps.position_after(count)) for count in (step, step + 1))
    return float(begin + end) / 2


def _live_frames(
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


def _draw_distinct(axes: Any, view: PlanView, middles: Mapping[int, float]) -> None:
    frames = [view.world.frames_at(step, view.rank) for step in middles]
    ids = [(found.dataset.astype(np.int64) << 40) | found.episode for found in frames]
    counts = [len(np.unique(found)) for found in ids]
    axes.plot(list(middles.values()), counts, ".-", color="tab:orange", linewidth=0.8, label="this plan")
    expected = view.report.mixing.local_batch.full_shuffle
    axes.set_ylim(0, 1.15 * max(*counts, expected))
    axes.axhline(expected, color="black", linewidth=0.8, linestyle="--", label=f"a full shuffle: {expected:.1f}")
    axes.set_ylabel("distinct episodes\nin a batch")
    near = view.report.mixing.near_repeats
    if near is not None and near.num_batches:
        text = f"near repeats in the next {counted(near.num_batches, 'batch')}: {near.share:.1%} of frames"
        axes.set_title(f"{text}, a full shuffle {near.full_shuffle:.1%}", loc="right", fontsize="small")
    axes.legend(loc="best", fontsize="small", framealpha=0.85)


def _draw_memory(axes: Any, frames: NDArray[np.int64], view: PlanView) -> None:
    row_bytes = view.row_bytes
    largest = max(1, view.report.live_frames) * (row_bytes or 1)
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
