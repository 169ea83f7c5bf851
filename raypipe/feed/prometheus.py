"""Publish the figures of a rank as Prometheus metrics, on the metrics port of its Ray node.

Ray has one metric per process and name, however many loaders there are, so pipeline and rank are tags.
"""

from functools import cache
from typing import Final

from ray.util.metrics import Counter, Gauge

from raypipe.feed.metrics import LoaderStats

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
                _counter(name, text).inc(value - self._told[name], tags=self._tags)
                self._told[name] = value
        for name, (field, text) in GAUGES.items():
            _gauge(name, text).set(float(getattr(stats, field)), tags=self._tags)


@cache
def _counter(name: str, text: str) -> Counter:
    return Counter(name, description=text, tag_keys=TAGS)


@cache
def _gauge(name: str, text: str) -> Gauge:
    return Gauge(name, description=text, tag_keys=TAGS)
