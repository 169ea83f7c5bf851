"""The figures of a run on one rank: how fast, and what it waited for."""

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from raypipe.requests import num_requests

STAGES: Final = ("read", "decode", "transport", "assembly")
"""Where a batch may be late."""

_HARDLY: Final = 0.02
"""Below this share of its time a training loop does not wait for data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """What one rank's loader did since it was made."""

    samples: int
    batches: int
    samples_per_s: float
    """Over the time from the first request to the last batch."""
    first_batch_s: float
    """From the start of the last iteration to its first batch."""
    wait_s: float
    """Time in which the training loop waited for a batch."""
    step_s: float
    """Time in which the training loop did something else."""
    wait_share: float
    """``wait_s / (wait_s + step_s)``: 0 where data is never waited for."""
    fetch_s: float
    """Time in which a batch waited for blocks, also while others were ready for the training loop."""
    assemble_s: float
    """Time spent putting batches together, also while others were ready."""
    read_wait_s: float
    """Time in which no batch was ready and the rows of the next were being read, or waited for a CPU to be read."""
    decode_wait_s: float
    """Time in which no batch was ready and the pixels of the next were being decoded, here or in tasks."""
    transport_wait_s: float
    """Time in which no batch was ready and the blocks of the next were done and on their way to this rank."""
    assembly_wait_s: float
    """Time in which no batch was ready and the next was being put together."""
    decode_s: float
    """Time spent decoding, summed over threads or tasks."""
    decoded_frames: int
    skipped_frames: int
    """Samples that were left out as bad data, where the policy says so."""
    emitted_frames: int
    """Samples times cameras: frames that windows show besides are not counted, since they are decoded once too."""
    decoded_per_emitted: float
    """1 where each frame is decoded once; more where spans were decoded again after a resume, or for margins."""
    received_blocks: int
    received_bytes: int
    waiting_spans: int
    """Spans that have arrived ahead of their need, decoded or being decoded."""
    live_spans: int
    live_bytes: int
    peak_live_bytes: int
    cache_hits: int
    cache_misses: int
    cache_evictions: int
    requests: int
    """Sent to the Hub and other remote storage: by this process since the loader was made, whatever it was for, and by
    the tasks that read for this rank."""

    @property
    def waits_for(self) -> str:
        """The stage that the training loop waits for most, one of `STAGES`; "nothing" where it hardly waits."""
        if self.wait_share < _HARDLY:
            return "nothing"
        seconds = (self.read_wait_s, self.decode_wait_s, self.transport_wait_s, self.assembly_wait_s)
        return max(zip(seconds, STAGES, strict=True))[1]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTimes:
    """How long the task that made a block worked, and when it was done."""

    read_s: float
    decode_s: float
    finished_at: float
    """Seconds since 1970, by the clock of the task's node."""


@dataclass(frozen=True, slots=True)
class WaitParts:
    """A wait for a block, by what was going on meanwhile."""

    read_s: float
    decode_s: float
    transport_s: float


def split_wait(begin: float, end: float, task: TaskTimes) -> WaitParts:
    """Return what a rank that waited from `begin` to `end`, in seconds since 1970, waited for.

    ::

        begin                                                   end
          |---- before the task ----|-- read --|-- decode --|----|
                                                        finished_at  transport

    The time before the task began, when no CPU was free for it, is shared out as the task's own work is: that is what
    the CPUs were busy with.
    """
    done = min(max(task.finished_at, begin), end)
    decoding = min(task.decode_s, done - begin)
    reading = min(task.read_s, done - begin - decoding)
    before = done - begin - decoding - reading
    work_s = task.read_s + task.decode_s
    decode_share = task.decode_s / work_s if work_s else 0.0
    return WaitParts(
        read_s=reading + before * (1 - decode_share),
        decode_s=decoding + before * decode_share,
        transport_s=end - done,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldStats:
    """The figures of all ranks of a run, as far as they have told them."""

    num_ranks: int
    samples_per_s: float
    """Of all ranks together."""
    wait_share: float
    """The mean over the ranks."""
    worst_rank: int
    """The one that waits most; with collectives all others wait for it."""
    worst_wait_share: float
    waits_for: str
    """What the worst rank waits for: one of `STAGES`, or "nothing"."""
    skipped_frames: int
    """Samples that all ranks together have left out as bad data."""
    requests: int
    """Sent to remote storage by all ranks and the tasks that read for them."""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return asdict(self)


def sum_up(ranks: Mapping[int, LoaderStats]) -> WorldStats:
    """Return the figures of a world from those of its ranks, of which there is at least one."""
    worst = max(ranks, key=lambda rank: (ranks[rank].wait_share, -rank))
    return WorldStats(
        num_ranks=len(ranks),
        samples_per_s=sum(stats.samples_per_s for stats in ranks.values()),
        wait_share=sum(stats.wait_share for stats in ranks.values()) / len(ranks),
        worst_rank=worst,
        worst_wait_share=ranks[worst].wait_share,
        waits_for=ranks[worst].waits_for,
        skipped_frames=sum(stats.skipped_frames for stats in ranks.values()),
        requests=sum(stats.requests for stats in ranks.values()),
    )


@dataclass(slots=True)
class _Sums:
    samples: int = 0
    batches: int = 0
    wait_s: float = 0.0
    step_s: float = 0.0
    fetch_s: float = 0.0
    assemble_s: float = 0.0
    read_wait_s: float = 0.0
    decode_wait_s: float = 0.0
    transport_wait_s: float = 0.0
    assembly_wait_s: float = 0.0
    task_decode_s: float = 0.0
    task_decoded_frames: int = 0
    task_requests: int = 0
    skipped_frames: int = 0
    emitted_frames: int = 0
    received_blocks: int = 0
    received_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What a rank holds and has decoded at one moment."""

    spans: int = 0
    waiting_spans: int = 0
    num_bytes: int = 0
    peak_bytes: int = 0
    decode_s: float = 0.0
    decoded_frames: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_evictions: int = 0


class Meter:
    """Adds up what happens on a rank; its threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = _Sums()
        self._first_batch_s = 0.0
        self._started_at = 0.0
        self._asked_at = 0.0
        self._left_at = 0.0
        self._requests_before = num_requests()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, _: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def add(self, **amounts: float) -> None:
        """Add to sums by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._sums, name, getattr(self._sums, name) + amount)

    def start_iteration(self) -> None:
        """Note that the training loop begins to iterate: it waits from now on."""
        self._left_at = 0.0
        self._started_at = time.perf_counter()

    def ask(self) -> None:
        """Note that the training loop asks for a batch."""
        if self._left_at:
            self._asked_at = time.perf_counter()
            self.add(step_s=self._asked_at - self._left_at)
        else:
            self._asked_at = self._started_at

    def hand_over(self, num_samples: int) -> None:
        """Note that the training loop gets its batch."""
        now = time.perf_counter()
        waited = now - self._asked_at
        if not self._left_at:
            self._first_batch_s = waited
        self._left_at = now
        self.add(wait_s=waited, samples=num_samples, batches=1)

    def read(self, live: Live) -> LoaderStats:
        """Return the figures so far."""
        with self._lock:
            sums = asdict(self._sums)
        decode_s = sums.pop("task_decode_s") + live.decode_s
        decoded = sums.pop("task_decoded_frames") + live.decoded_frames
        requests = sums.pop("task_requests") + num_requests() - self._requests_before
        seconds = sums["wait_s"] + sums["step_s"]
        return LoaderStats(
            **sums,
            requests=requests,
            samples_per_s=sums["samples"] / seconds if seconds else 0.0,
            first_batch_s=self._first_batch_s,
            wait_share=sums["wait_s"] / seconds if seconds else 0.0,
            decode_s=decode_s,
            decoded_frames=decoded,
            decoded_per_emitted=decoded / sums["emitted_frames"] if sums["emitted_frames"] else 0.0,
            waiting_spans=live.waiting_spans,
            live_spans=live.spans,
            live_bytes=live.num_bytes,
            peak_live_bytes=live.peak_bytes,
            cache_hits=live.cache_hits,
            cache_misses=live.cache_misses,
            cache_evictions=live.cache_evictions,
        )
