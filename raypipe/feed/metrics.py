"""Measure a run on one rank: its speed, and what it waited for.

`RankGauges` publishes the figures as Prometheus metrics, on the metrics port of the rank's Ray node. Ray has one metric
per process and name, however many loaders there are, so pipeline and rank are tags.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final

from raypipe.storage import num_requests

STAGES: Final = ("read", "decode", "transport", "assembly")
"""The stages that can make a batch late."""

_HARDLY: Final = 0.02
"""If a training loop waits for less than this share of its time, the figures say that it waits for nothing."""

RECENT_STEPS: Final = 100
"""Steps that the recent figures cover: some seconds to minutes of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentStats:
    """The figures of the last steps, at most `RECENT_STEPS`, so that a slow start drops out."""

    steps: int = 0
    samples_per_s: float = 0.0
    wait_share: float = 0.0
    waits_for: str = "nothing"
    """One of `STAGES`, or "nothing"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What a rank holds at one moment, and what it has decoded so far."""

    live_spans: int = 0
    waiting_spans: int = 0
    """Spans whose rows have arrived ahead of their need."""
    live_bytes: int = 0
    """Memory of the rows and the decoded frames at hand."""
    held_bytes: int = 0
    """Decoded frames that have not left yet."""
    in_flight_bytes: int = 0
    """Frames that were requested and not taken yet."""
    peak_clip_bytes: int = 0
    """Maximum of held plus in-flight bytes in the current epoch."""
    decode_s: float = 0.0
    """Time spent decoding, summed over threads or tasks."""
    decoded_frames: int = 0
    kept_frames: int = 0
    """Frames read from those that ``keep_frames`` keeps on the node, instead of decoded."""
    decoder_opens: int = 0
    """Videos that this process opened for decoding."""
    decoder_reuses: int = 0
    """Clips decoded by a decoder that was already open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats(Live):
    """The figures of one rank's loader since it was created; `recent` has those of the last steps."""

    samples: int
    batches: int
    samples_per_s: float
    """Over the time from the first request to the last batch."""
    first_batch_s: float
    """From the start of the last iteration to its first batch."""
    wait_s: float
    """Time that the training loop waited for batches."""
    step_s: float
    """Time that the training loop spent on anything else."""
    wait_share: float
    """``wait_s / (wait_s + step_s)``; 0 if the training loop never waits for data."""
    fetch_s: float
    """Time that batches waited for blocks, even while others were ready for the training loop."""
    assemble_s: float
    """Time spent assembling batches, even while others were ready."""
    read_wait_s: float
    """The part of `wait_s` in which the rows of the batch were being read, or waited for a CPU."""
    decode_wait_s: float
    """The part of `wait_s` in which its pixels were being decoded, here or in tasks."""
    transport_wait_s: float
    """The part of `wait_s` in which its rows or pixels were finished and in transit to this rank."""
    assembly_wait_s: float
    """The part of `wait_s` in which it was being assembled."""
    skipped_frames: int
    """Samples left out as bad data, under ``on_bad_episode="skip"``."""
    emitted_frames: int
    """Samples times cameras. The other frames of a window do not count, because they, too, are decoded once."""
    decoded_per_emitted: float
    """1 if each frame is decoded once; more if windows reach out of a clip, or after a resume within one; less if
    frames are kept."""
    received_blocks: int
    received_bytes: int
    requests: int
    """Requests to the Hub and other remote storage: all by this process since the loader was created, and those by
    tasks that read for this rank."""
    recent: RecentStats = RecentStats()
    """The figures of the last steps."""

    @property
    def waits_for(self) -> str:
        """The stage that the training loop waits for most, one of `STAGES`; "nothing" if it hardly waits."""
        seconds = (self.read_wait_s, self.decode_wait_s, self.transport_wait_s, self.assembly_wait_s)
        return _name_wait(self.wait_share, seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return asdict(self)


def _name_wait(wait_share: float, seconds: Iterable[float]) -> str:
    return "nothing" if wait_share < _HARDLY else max(zip(seconds, STAGES, strict=True))[1]


@dataclass(frozen=True, slots=True)
class Interval:
    """What the assembling thread did between two times of `time.perf_counter`."""

    stage: str
    """One of `STAGES`."""
    begin: float
    end: float


def split_wait(stage: str, begin: float, end: float, done: float) -> list[Interval]:
    """Return the intervals of a wait: for the stage until it was `done`, then for the transport to this rank.

    A stage that ran here is done at infinity.
    """
    arrived = min(max(done, begin), end)
    return [Interval(stage, begin, arrived), Interval("transport", arrived, end)]


def share_wait(begin: float, end: float, intervals: Sequence[Interval], rest: str) -> dict[str, float]:
    """Return, by stage, how much of a training loop's wait went to it; stage `rest` gets what no interval covers."""
    parts = dict.fromkeys(STAGES, 0.0)
    for interval in intervals:
        parts[interval.stage] += max(0.0, min(end, interval.end) - max(begin, interval.begin))
    parts[rest] += max(0.0, end - begin - sum(parts.values()))
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldStats:
    """The figures of all ranks of a run that have published theirs."""

    num_ranks: int
    samples_per_s: float
    """Of all ranks together."""
    wait_share: float
    """The mean over the ranks."""
    worst_rank: int
    """The rank that waits most; with collectives all others wait for it."""
    worst_wait_share: float
    waits_for: str
    """What the worst rank waits for: one of `STAGES`, or "nothing"."""
    skipped_frames: int
    """Samples that all ranks together left out as bad data."""
    requests: int
    """Requests to remote storage by all ranks and the tasks that read for them."""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return asdict(self)


def sum_up(ranks: Mapping[int, LoaderStats], *, recent: bool = False) -> WorldStats:
    """Return the figures of a world from those of its ranks, at least one; if `recent`, of the last steps."""
    told = {rank: stats.recent if recent else stats for rank, stats in ranks.items()}
    worst = max(told, key=lambda rank: (told[rank].wait_share, -rank))
    return WorldStats(
        num_ranks=len(ranks),
        samples_per_s=sum(stats.samples_per_s for stats in told.values()),
        wait_share=sum(stats.wait_share for stats in told.values()) / len(ranks),
        worst_rank=worst,
        worst_wait_share=told[worst].wait_share,
        waits_for=told[worst].waits_for,
        skipped_frames=sum(stats.skipped_frames for stats in ranks.values()),
        requests=sum(stats.requests for stats in ranks.values()),
    )


_SECONDS: Final = (
    *("wait_s", "step_s", "fetch_s", "assemble_s", "task_decode_s"),
    *(f"{stage}_wait_s" for stage in STAGES),
)
_COUNTS: Final = (
    *("samples", "batches", "skipped_frames", "emitted_frames", "received_blocks", "received_bytes"),
    *("task_decoded_frames", "task_kept_frames", "task_requests"),
)
"""What a `Meter` adds up. Those of tasks join what this process has done itself."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a training loop: its times, its samples, and its wait by stage."""

    step_s: float
    wait_s: float
    samples: int
    parts: Mapping[str, float]


def _sum_recent(steps: Sequence[_Step]) -> RecentStats:
    wait_s = sum(step.wait_s for step in steps)
    seconds = wait_s + sum(step.step_s for step in steps) or math.inf
    return RecentStats(
        steps=len(steps),
        samples_per_s=sum(step.samples for step in steps) / seconds,
        wait_share=wait_s / seconds,
        waits_for=_name_wait(wait_s / seconds, [sum(step.parts[stage] for step in steps) for stage in STAGES]),
    )


class Meter:
    """Adds up what happens on a rank. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, Any] = dict.fromkeys(_SECONDS, 0.0) | dict.fromkeys(_COUNTS, 0)
        self._first_batch_s = 0.0
        self._started_at = 0.0
        self._asked_at = 0.0
        self._left_at = 0.0
        self._step_s = 0.0
        self._recent: deque[_Step] = deque(maxlen=RECENT_STEPS)
        self._intervals: list[Interval] = []
        self._requests_before = num_requests()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, _: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def add(self, **amounts: float) -> None:
        """Add to sums by name."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    def note(self, intervals: Sequence[Interval]) -> None:
        """Take in what the assembling thread did. Call it before that batch is handed over."""
        with self._lock:
            self._intervals.extend(intervals)
            for interval in intervals:
                self._sums["assemble_s" if interval.stage == "assembly" else "fetch_s"] += interval.end - interval.begin

    def start_iteration(self) -> None:
        """Note that the training loop begins to iterate and waits from now on."""
        self._left_at = 0.0
        self._started_at = time.perf_counter()

    def ask(self) -> None:
        """Note that the training loop asks for a batch."""
        self._asked_at = time.perf_counter() if self._left_at else self._started_at
        self._step_s = self._asked_at - self._left_at if self._left_at else 0.0
        self.add(step_s=self._step_s)

    def hand_over(self, num_samples: int) -> None:
        """Note that the training loop gets its batch."""
        now = time.perf_counter()
        waited = now - self._asked_at
        if not self._left_at:
            self._first_batch_s = waited
        # Before the first batch, the rest of the wait is the start-up of the readers.
        rest = "assembly" if self._left_at else "read"
        with self._lock:
            intervals, self._intervals = self._intervals, []
        parts = share_wait(self._asked_at, now, intervals, rest)
        self._left_at = now
        self.add(wait_s=waited, samples=num_samples, batches=1, **{f"{stage}_wait_s": s for stage, s in parts.items()})
        with self._lock:
            self._recent.append(_Step(self._step_s, waited, num_samples, parts))

    def read(self, live: Live) -> LoaderStats:
        """Return the figures so far."""
        with self._lock:
            sums, recent = dict(self._sums), _sum_recent(self._recent)
        held = asdict(live)
        for name in ("decode_s", "decoded_frames", "kept_frames"):
            held[name] += sums.pop(f"task_{name}")
        requests = sums.pop("task_requests") + num_requests() - self._requests_before
        seconds = sums["wait_s"] + sums["step_s"] or math.inf
        return LoaderStats(
            **sums,
            **held,
            requests=requests,
            samples_per_s=sums["samples"] / seconds,
            first_batch_s=self._first_batch_s,
            wait_share=sums["wait_s"] / seconds,
            decoded_per_emitted=held["decoded_frames"] / sums["emitted_frames"] if sums["emitted_frames"] else 0.0,
            recent=recent,
        )


TAGS: Final = ("pipeline", "rank")

COUNTERS: Final = {
    "raypipe_samples": ("samples", "Samples handed to the training loop."),
    "raypipe_wait_seconds": ("wait_s", "Time in which the training loop waited for a batch."),
    "raypipe_step_seconds": ("step_s", "Time in which the training loop did something else."),
    "raypipe_read_wait_seconds": ("read_wait_s", "Time in which a batch waited for rows to be read."),
    "raypipe_decode_wait_seconds": ("decode_wait_s", "Time in which a batch waited for its pixels."),
    "raypipe_transport_wait_seconds": ("transport_wait_s", "Time in which a batch waited for blocks on their way."),
    "raypipe_assembly_wait_seconds": (
        "assembly_wait_s",
        "Time in which a batch was waited for while it was assembled.",
    ),
    "raypipe_skipped_frames": ("skipped_frames", "Samples that were left out as bad data."),
    "raypipe_requests": ("requests", "Requests to remote storage, of the rank and of the tasks that read for it."),
    "raypipe_decode_seconds": ("decode_s", "Time spent decoding, summed over threads and tasks."),
}
"""For each metric, the field of `LoaderStats` and the description. Prometheus adds ``_total``."""

GAUGES: Final = {
    "raypipe_live_bytes": ("live_bytes", "Memory of the rows and decoded frames at hand."),
    "raypipe_live_spans": ("live_spans", "Spans at hand."),
}


class RankGauges:
    """The metrics of one rank of one pipeline."""

    def __init__(self, pipeline: str, rank: int) -> None:
        self._tags = dict(zip(TAGS, (pipeline, str(rank)), strict=True))
        self._told = dict.fromkeys(COUNTERS, 0.0)

    def show(self, stats: LoaderStats) -> None:
        """Publish the current figures."""
        if stats.samples < self._told["raypipe_samples"]:
            # Lower than before: another loader of the rank, whose figures started from 0.
            self._told = dict.fromkeys(COUNTERS, 0.0)
        for name, (field, text) in COUNTERS.items():
            value = float(getattr(stats, field))
            if value > self._told[name]:
                _metric("Counter", name, text).inc(value - self._told[name], tags=self._tags)
                self._told[name] = value
        for name, (field, text) in GAUGES.items():
            _metric("Gauge", name, text).set(float(getattr(stats, field)), tags=self._tags)


@cache
def _metric(kind: str, name: str, text: str) -> Any:
    """Return the only metric of a name in this process: a "Counter" or a "Gauge"."""
    from ray.util import metrics

    return getattr(metrics, kind)(name, description=text, tag_keys=TAGS)
