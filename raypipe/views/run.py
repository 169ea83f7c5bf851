"""A run: how fast its data comes over time, and what it waits for. Recorded beside the training loop, or up to now.

`record` wraps a loader and notes its figures every quarter of a second; it changes neither batches nor order.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError
from raypipe.feed import STAGES, LoaderStats, RecentStats, sum_up
from raypipe.text import counted, new_figure, page_part
from raypipe.views.view import View, duration, html_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from raypipe.loader import RankLoader

_OTHER: Final = "none of these"
"""Waiting that no stage accounts for, such as for Ray to start an epoch."""
_COLOURS: Final = dict(zip((*STAGES, _OTHER), ("#3367d6", "#e8710a", "#188038", "#9334e6", "#9aa0a6"), strict=True))
_INTERVALS: Final = 120
"""The most intervals drawn; for a long run one interval covers several notes."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunView(View):
    """What a rank's loader did, from snapshots of its figures, and the figures of the other ranks."""

    rank: int
    snapshots: tuple[LoaderStats, ...]
    """Ascending in time; at least one."""
    ranks: Mapping[int, LoaderStats]
    """The last figures of every rank that reported them."""

    def __post_init__(self) -> None:
        if not self.snapshots or not self.snapshots[-1].batches:
            raise ConfigError("the loader has given no batch yet: iterate it first, then look at the run")

    @property
    def title(self) -> str:
        """The rank, and the numbers of its batches and samples."""
        last = self.snapshots[-1]
        return (
            f"rank {self.rank} of {len(self.ranks)}: {counted(last.batches, 'batch')}, "
            f"{counted(last.samples, 'sample')}"
        )

    def figure(self) -> "Figure":
        """Return a figure of samples/s and waiting over time, and with several ranks the waiting of each."""
        figure = self._draw()
        figure.suptitle(self.title, fontsize=11)
        return figure

    def _draw(self) -> "Figure":
        heights = (1.5, 1.5, 1.5) if len(self.ranks) > 1 else (1.5, 1.5)
        figure = new_figure(10.0, 1.6 * sum(heights))
        axes = figure.subplots(len(heights), 1, height_ratios=heights)
        edges, speed, shares = measure_intervals(self.snapshots)
        _draw_speed(axes[0], edges, speed)
        _draw_waiting(axes[1], edges, shares)
        axes[1].set_xlabel("seconds of the loop" + " since the first batch" * (len(self.snapshots) > 1))
        if len(self.ranks) > 1:
            _draw_ranks(axes[2], self.ranks)
        return figure

    def parts(self) -> list[str]:
        """Return the view as pieces of HTML."""
        return [page_part("lines", self._lines()), html_plot(self._draw(), self.title)]

    def _lines(self) -> list[tuple[str, str]]:
        last, world = self.snapshots[-1], sum_up(self.ranks)
        now, took = last.recent, duration(last.wait_s + last.step_s)
        decoded = counted(last.decoded_frames, "frame")
        skipped = [("skipped", counted(last.skipped_frames, "frame"))] if last.skipped_frames else []
        worst = f"rank {world.worst_rank} waits {world.worst_wait_share:.1%} of the time, most for {world.waits_for}"
        together = f"all together {world.samples_per_s:,.1f} samples a second"
        return [
            ("samples", f"{last.samples:,} in {took}: {last.samples_per_s:,.1f} a second"),
            (f"last {counted(now.steps, 'step')}", f"{now.samples_per_s:,.1f} samples a second, waiting {_waits(now)}"),
            ("first batch", f"after {last.first_batch_s:.2f} s"),
            ("waits", _waits(last)),
            ("decoded", f"{decoded}, {last.decoded_per_emitted:.2f} for each that was handed over"),
            ("memory", f"up to {last.peak_clip_bytes / 1e6:,.1f} MB of decoded frames"),
            *skipped,
            *([("worst rank", f"{worst}; {together}")] if len(self.ranks) > 1 else []),
        ]


def _waits(figures: LoaderStats | RecentStats) -> str:
    most = f", most for {figures.waits_for}" * (figures.waits_for != "nothing")
    return f"{figures.wait_share:.1%} of the time{most}"


class Recording:
    """A loader that notes its figures while you iterate it: iterate this instead of the loader, then view it."""

    def __init__(self, loader: "RankLoader", *, every_s: float = 0.25) -> None:
        self.loader = loader
        self._every_s = every_s
        self._snapshots: list[LoaderStats] = []
        self._noted_at = -np.inf

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the remaining batches of the current epoch."""
        return self._watch(self.loader)

    def steps(self, num_steps: int) -> Iterator[dict[str, Any]]:
        """Yield the next `num_steps` batches, across the ends of epochs."""
        return self._watch(self.loader.steps(num_steps))

    def view(self) -> RunView:
        """Return the view of all notes so far; asks other ranks, if there are any, for their figures."""
        loader, last = self.loader, self.loader.stats()
        noted = [one for one in self._snapshots if one.batches < last.batches]
        # A single rank has no other to ask, so its view works even after Ray has ended.
        ranks = loader.rank_stats() if loader.world_size > 1 else {loader.rank: last}
        return RunView(rank=loader.rank, snapshots=(*noted, last), ranks=ranks)

    def _watch(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for batch in batches:
            if time.monotonic() >= self._noted_at + self._every_s:
                self._noted_at = time.monotonic()
                self._snapshots.append(self.loader.stats())
            yield batch


def record(loader: "RankLoader", *, every_s: float = 0.25) -> Recording:
    """Return a recording of the loader: iterate it instead of the loader, and `show` it afterwards.

    ::

        run = rp.views.record(pipe.loader())
        for batch in run.steps(100): ...
        rp.show(run)
    """
    return Recording(loader, every_s=every_s)


def view_run(loader: "RankLoader") -> RunView:
    """Return the total figures of a loader so far; `record` keeps them over time."""
    return Recording(loader).view()


def measure_intervals(
    snapshots: Sequence[LoaderStats],
) -> tuple[NDArray[np.float64], NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Return the ends of the intervals between snapshots in seconds, the samples/s in each, and the share of waiting.

    Time is loop time, waiting and steps. It starts at the first snapshot, because the start of a run may take longer
    than the rest; with a single snapshot it starts at the loop's start. The waiting of an interval is divided among the
    stages by what ran while no batch was ready.
    """
    times = _column(snapshots, "wait_s") + _column(snapshots, "step_s")
    times = times - times[0]
    # Two notes without a step between them count as one.
    kept = np.flatnonzero(np.diff(times, prepend=-1.0) > 1e-9)
    if len(kept) > _INTERVALS + 1:
        kept = kept[np.linspace(0, len(kept) - 1, _INTERVALS + 1).round().astype(int)]
    edges = times[kept]
    seconds = np.diff(edges)
    speed = np.diff(_column(snapshots, "samples")[kept]) / seconds
    waiting = np.diff(_column(snapshots, "wait_s")[kept]) / seconds
    parts = {stage: np.diff(_column(snapshots, f"{stage}_wait_s")[kept]) for stage in STAGES}
    total = np.sum(list(parts.values()), axis=0)
    shares = {stage: waiting * part / np.where(total > 0, total, 1.0) for stage, part in parts.items()}
    return edges, speed, {**shares, _OTHER: np.where(total > 0, 0.0, waiting)}


def _column(snapshots: Sequence[LoaderStats], name: str) -> NDArray[np.float64]:
    values = [float(getattr(one, name)) for one in snapshots]
    return np.array(values if len(values) > 1 else [0.0, *values])


def _draw_speed(axes: Any, edges: NDArray[np.float64], speed: NDArray[np.float64]) -> None:
    axes.stairs(speed, edges, color="#3367d6", linewidth=1.4)
    mean = float((speed * np.diff(edges)).sum() / edges[-1])
    axes.axhline(mean, color="black", linewidth=0.8, linestyle="--", label=f"mean {mean:,.0f}")
    axes.set(ylabel="samples a second", xlim=(0, edges[-1]))
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", fontsize=8, framealpha=0.85)


def _draw_waiting(axes: Any, edges: NDArray[np.float64], shares: Mapping[str, NDArray[np.float64]]) -> None:
    base = np.zeros(len(edges) - 1)
    for stage, share in shares.items():
        if stage != _OTHER or share.any():
            axes.stairs(base + share, edges, baseline=base, fill=True, color=_COLOURS[stage], label=stage)
        base = base + share
    axes.set(ylabel="share of time\nspent waiting, for", xlim=(0, edges[-1]), ylim=(0, 1))
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8, ncols=len(shares), frameon=False)


def _draw_ranks(axes: Any, ranks: Mapping[int, LoaderStats]) -> None:
    numbers, worst = sorted(ranks), sum_up(ranks).worst_rank
    base = np.zeros(len(numbers))
    each = [measure_intervals((ranks[number],))[2] for number in numbers]
    for stage in (*STAGES, _OTHER):
        share = np.array([float(shares[stage].sum()) for shares in each])
        axes.bar(np.arange(len(numbers)), share, bottom=base, color=_COLOURS[stage], width=0.7)
        base = base + share
    labels = [f"{number}\nworst" if number == worst else str(number) for number in numbers]
    axes.set_xticks(np.arange(len(numbers)), labels, fontsize=8)
    axes.set(xlabel="rank", ylabel="share of time\nspent waiting", ylim=(0, 1))
