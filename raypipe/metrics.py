"""The figures of a run on one rank: how fast, and what it waited for."""

import threading
import time
from dataclasses import asdict, dataclass
from typing import Any


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
    """Time in which the next batch waited for blocks: reading and transport."""
    decode_wait_s: float
    """Time in which the next batch waited for its pixels."""
    assemble_s: float
    """Time spent putting batches together."""
    decode_s: float
    """Time spent decoding, summed over threads or tasks."""
    decoded_frames: int
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

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return asdict(self)


@dataclass(slots=True)
class _Sums:
    samples: int = 0
    batches: int = 0
    wait_s: float = 0.0
    step_s: float = 0.0
    fetch_s: float = 0.0
    decode_wait_s: float = 0.0
    assemble_s: float = 0.0
    task_decode_s: float = 0.0
    task_decoded_frames: int = 0
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
        self._asked_at = 0.0
        self._left_at = 0.0

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
        """Note that the training loop begins to iterate."""
        self._left_at = 0.0

    def ask(self) -> None:
        """Note that the training loop asks for a batch."""
        self._asked_at = time.perf_counter()
        if self._left_at:
            self.add(step_s=self._asked_at - self._left_at)

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
        seconds = sums["wait_s"] + sums["step_s"]
        return LoaderStats(
            **sums,
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
