"""What a bench measures: a small grid of settings of raypipe's loader, and the floor, each in its own process.

The floor decodes every frame once, in file order; no loader can do with less. Times are those of ``time.monotonic``:
the process that started this one uses them to find the CPU time of an epoch.
"""

import json
import math
import operator
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from raypipe.dataset import Dataset, open_dataset
from raypipe.decode import DecodeSpec
from raypipe.errors import ConfigError
from raypipe.format import DatasetMeta, RowReader, read_metadata
from raypipe.plan import DEFAULT_LIVE_BYTES, MOST_LIVE_SPANS, WHOLE_EPISODE, WHOLE_SPAN, OrderSpec
from raypipe.text import check_keys, counted

if TYPE_CHECKING:
    from raypipe.pipeline import Pipeline

_CLIP_LENGTHS: Final = (1, 2, 4, 8)
"""Tried besides one keyframe interval. Longer clips decode no cheaper, and put neighbouring frames in near batches."""
_MIXING_LIVE_SPANS: Final = 32
"""Fewer live spans mix too badly to be worth trying."""

_DECODE_FIELDS: Final = ("where", "threads", "clip_frames")
_ORDER_FIELDS: Final = ("span_frames", "live_spans")
_FIELDS: Final = (*_DECODE_FIELDS, *_ORDER_FIELDS)
_WORDS: Final = {"span_frames": WHOLE_EPISODE, "clip_frames": WHOLE_SPAN}
"""The words that may stand in place of a length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpec:
    """What is the same for all settings."""

    root: str
    batch_size: int = 64
    action_frames: int = 16
    """Length of the action chunk; not used without a feature ``action``."""
    observation_frames: int = 1
    """Frames of every camera in a sample."""
    seconds: float = 20.0
    """Time of a setting's two epochs at the floor's speed: an epoch has the episodes that the floor decodes in half of
    it. A setting takes about three times as long. An epoch stops twice this time after its first batch."""
    live_bytes: int = DEFAULT_LIVE_BYTES
    gpu_samples_per_s: float = 0.0
    """How many samples a GPU takes per second. The table then shows for every setting how many cores feed it; 0: it
    does not."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "action_frames", "observation_frames", "live_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.seconds < math.inf:
            raise ConfigError(f"seconds must be more than 0, and not endless, got {self.seconds}")
        if not 0 <= self.gpu_samples_per_s < math.inf:
            raise ConfigError(f"gpu_samples_per_s must be a number from 0 on, got {self.gpu_samples_per_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to run a pipeline. Settings differ only in the order of what they yield."""

    where: Literal["rank", "cluster", "none"]
    """``none``: there is nothing to decode."""
    threads: int = 1
    """Decoding threads of a rank; not used on the cluster."""
    clip_frames: int | Literal["span"] = WHOLE_SPAN
    """Frames that are decoded together; not used if there is nothing to decode."""
    span_frames: int | Literal["episode"] = WHOLE_EPISODE
    live_spans: int = 128

    def __post_init__(self) -> None:
        OrderSpec(seed=0, span_frames=self.span_frames, live_spans=self.live_spans, clip_frames=self.clip_frames)
        if self.where != "none":
            DecodeSpec(where=self.where, num_threads=self.threads)

    @property
    def name(self) -> str:
        """The setting's name in the table."""
        span = "whole episodes" if self.span_frames == WHOLE_EPISODE else f"spans of {self.span_frames}"
        order = f"{span}, {self.live_spans} live"
        if self.where == "none":
            return order
        threads = f", {counted(self.threads, 'thread')}" if self.where == "rank" else ""
        clips = "no clips" if self.clip_frames == WHOLE_SPAN else f"clips of {self.clip_frames}"
        return f"{self.where}{threads}, {clips}, {order}"

    def parts(self) -> dict[str, Any]:
        """Return the parts of a `Pipeline` that make this setting."""
        parts: dict[str, Any] = {"order": {"span_frames": self.span_frames, "live_spans": self.live_spans}}
        if self.where != "none":
            parts["order"]["clip_frames"] = self.clip_frames
            parts["decode"] = {"where": self.where}
            if self.where == "rank":
                parts["decode"]["num_threads"] = self.threads
        return parts

    def advice(self) -> str:
        """Return the parts as the arguments to paste into ``Pipeline(...)``."""
        return ", ".join(f"{name}={value!r}" for name, value in sorted(self.parts().items()))


def grid(
    default: Setting,
    fits: Callable[[Setting], bool],
    *,
    num_cpus: int,
    keyframe_interval: int = 1,
    is_quick: bool = False,
) -> list[Setting]:
    """Return the settings to try: the default first, then one thing changed at a time.

    A full product would give some hundred settings, most of which show nothing new.

    Args:
        default: what a `Pipeline` chooses for its memory; it decodes in the rank, or nothing.
        fits: returns whether a setting fits in memory; others are left out.
        num_cpus: CPUs of this machine.
        keyframe_interval: of the videos, in frames; also tried as a clip length.
        is_quick: only the other executor and one other clip length.
    """
    tried: list[Setting] = []
    if default.where == "rank":
        tried.append(replace(default, where="cluster"))
        # First longer clips, then shorter ones, each from the nearest on. The default is the shortest that should
        # decode cheaply: so the first question is whether longer ones are cheaper.
        own = 0 if default.clip_frames == WHOLE_SPAN else default.clip_frames
        lengths = {*_CLIP_LENGTHS, keyframe_interval} - {own}
        near = sorted(lengths, key=lambda length: (length < own, abs(length - own)))
        clips = [each for each in (replace(default, clip_frames=length) for length in near) if fits(each)]
        tried += clips[:1] if is_quick else clips
    if not is_quick:
        if default.where == "rank":
            counts = {1, max(1, num_cpus // 2), num_cpus, min(2 * num_cpus, 16)}
            tried += [replace(default, threads=count) for count in sorted(counts)]
        # Half the live spans, if those still mix, and up to twice as many.
        fewer, more = default.live_spans // 2, min(2 * default.live_spans, MOST_LIVE_SPANS)
        live = [*([fewer] if fewer >= _MIXING_LIVE_SPANS else []), more]
        tried += [replace(default, live_spans=count) for count in live]
    return [default, *(each for each in dict.fromkeys(tried) if each != default and fits(each))]


def differing(settings: Iterable[Setting], lengths: Sequence[int]) -> list[Setting]:
    """Return the settings that really differ on episodes of these lengths; among equal ones, the first.

    Live spans beyond the number of spans change nothing, nor do spans or clips longer than the longest episode.
    """
    first: dict[Setting, Setting] = {}
    longest = max(lengths)
    for setting in settings:
        span, clip = setting.span_frames, setting.clip_frames
        size = longest if span == WHOLE_EPISODE else min(span, longest)
        num_spans = sum(-(-length // size) for length in lengths)
        effective = replace(
            setting,
            span_frames=size,
            live_spans=min(setting.live_spans, num_spans),
            clip_frames=clip if clip == WHOLE_SPAN else min(clip, longest),
        )
        first.setdefault(effective, setting)
    return list(first.values())


def parse_setting(text: str, default: Setting) -> Setting:
    """Return the setting that a person typed as ``where=rank,threads=2``; missing fields come from the default."""
    changes: dict[str, Any] = {}
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        check_keys([name], _FIELDS, f"setting {text!r} has no field")
        if not value:
            raise ConfigError(f"setting {text!r} has {word.strip()!r} without a value; write {name}=VALUE")
        if name == "where" or value == _WORDS.get(name):
            changes[name] = value
        elif value.isdecimal():
            changes[name] = int(value)
        else:
            choice = f" or {_WORDS[name]!r}" if name in _WORDS else ""
            raise ConfigError(f"setting {text!r}: {name} must be a whole number{choice}, got {value!r}")
    if default.where == "none" and set(changes) & set(_DECODE_FIELDS):
        raise ConfigError(f"setting {text!r} is of decoding, and there are no cameras: use {', '.join(_ORDER_FIELDS)}")
    if changes.get("where") == "none":
        raise ConfigError(f"setting {text!r}: where is 'rank' or 'cluster'")
    return replace(default, **changes)


_FIGURES: Final = ("fetch_s", "decode_s", "decoded_frames", "emitted_frames", "assemble_s", "decode_wait_s")
"""raypipe's own figures that go into the result."""
_PIECE: Final = 64
"""Frames decoded together by the floor, then thrown away."""

FloorJob = Callable[[], int]
"""Reads or decodes something, and returns the number of frames."""

Seen = tuple[int, Any]
"""The number of samples in a batch, and the episode of each; None for the floor."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure: raypipe's pipeline, or the floor."""

    root: str
    """A local folder."""
    batch_size: int
    num_cpus: int
    windows: dict[str, list[float]] = field(default_factory=dict)
    """The action chunk and the last observation frames, in seconds; see `sample_windows`."""
    episodes: list[int] | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    """Further parts of the pipeline."""
    num_floor: int = 0
    """Processes of the floor; 0: measure raypipe."""
    starts_ray: bool = False
    """Whether raypipe reads by Ray Data even if it does not decode on the cluster."""
    max_s: float = 0.0
    """An epoch stops this many seconds after its first batch; 0: never."""

    @property
    def needs_ray(self) -> bool:
        """Whether the loader reads or decodes with Ray."""
        return self.starts_ray or self.parts.get("decode", {}).get("where") == "cluster"

    def pipeline_parts(self) -> dict[str, Any]:
        """Return the parts of the pipeline besides batch, seed and windows."""
        return ({} if self.episodes is None else {"selection": {"episodes": self.episodes}}) | self.parts


def sample_windows(dataset: Dataset, *, action_frames: int, observation_frames: int) -> dict[str, list[float]]:
    """Return the time offsets of the action chunk and of each camera's last observation frames, in seconds."""
    fps = dataset.meta.fps
    windows = {"action": [i / fps for i in range(action_frames)]} if "action" in dataset.row_features else {}
    if observation_frames > 1:
        windows |= {name: [i / fps for i in range(1 - observation_frames, 1)] for name in dataset.spec.cameras}
    return windows


def make_pipeline(dataset: Dataset, request: Request) -> "Pipeline":
    """Return raypipe's pipeline with its defaults, except for what the request sets."""
    # Imported here: the processes of the floor do without.
    from raypipe.pipeline import Pipeline

    return Pipeline(
        dataset,
        batch_size=request.batch_size,
        seed=0,
        delta_timestamps=request.windows,
        **request.pipeline_parts(),
    )


class RaypipeLoader:
    """raypipe's loader of one rank."""

    def __init__(self, request: Request) -> None:
        if request.needs_ray:
            start_ray(request.num_cpus)
        pipe = make_pipeline(open_dataset(request.root), request)
        self._loader = pipe.loader(num_epochs=3, progress=False)
        self._num_begun = 0
        self.settings: dict[str, Any] = {
            **{name: getattr(pipe.config.order, name) for name in ("span_frames", "live_spans", "clip_frames")},
            "spans_per_block": pipe.config.feed.spans_per_block,
        }

    def epoch(self) -> Iterator[Seen]:
        """Yield the batches of the next epoch; start at its beginning even if the epoch before was stopped early."""
        # After an early stop, the loader is inside its epoch and would continue with the rest.
        self._loader.set_epoch(self._num_begun)
        self._num_begun += 1
        for batch in self._loader:
            yield len(batch["index"]), batch["episode_index"].numpy()

    def figures(self) -> dict[str, float]:
        """Return the loader's own figures, summed since its start."""
        stats = self._loader.stats().to_dict()
        return {name: float(stats[name]) for name in _FIGURES}

    def close(self) -> None:
        """End its threads and processes."""
        self._loader.close()


def start_ray(num_cpus: int) -> None:
    """Start a Ray of this process's own."""
    import ray

    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, logging_level="error", log_to_driver=False)


class FloorLoader:
    """Decodes every frame of the cameras once, in file order, in several processes.

    This is the least that any loader must do: it does not shuffle, join rows or make batches. Without cameras it reads
    only rows.
    """

    def __init__(self, root: str, episodes: Sequence[int] | None, num_processes: int) -> None:
        dataset = open_dataset(root)
        self._root, self._meta, self._cameras = root, dataset.meta, dataset.spec.cameras
        self._num_processes = num_processes
        self._pool = ProcessPoolExecutor(num_processes, get_context("spawn")) if num_processes > 1 else None
        numbers = self._meta.episodes.episode_index
        rows = np.arange(len(numbers)) if episodes is None else np.flatnonzero(np.isin(numbers, episodes))
        self._rows: list[int] = rows.tolist()
        self._num_samples = int(self._meta.episodes.length[rows].sum())
        self._num_decoded = 0
        self.settings: dict[str, Any] = {}

    def epoch(self) -> Iterator[Seen]:
        """Yield all samples as one batch."""
        jobs = self._jobs()
        total = sum(map(operator.call, jobs) if self._pool is None else self._pool.map(operator.call, jobs))
        self._num_decoded += total if self._cameras else 0
        yield self._num_samples, None

    def figures(self) -> dict[str, float]:
        """Return the number of frames decoded since the start."""
        return {"decoded_frames": self._num_decoded}

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown()

    def _jobs(self) -> list[FloorJob]:
        if not self._cameras:
            return self._file_jobs(_read_rows, [self._meta.data_file(row) for row in self._rows])
        jobs: list[FloorJob] = []
        for camera in self._cameras:
            if self._meta.features[camera].kind == "video":
                files = [self._meta.video_file(row, camera) for row in self._rows]
                jobs += self._file_jobs(_decode_video, files)
        images = tuple(name for name in self._cameras if self._meta.features[name].kind == "image")
        if images:
            cuts = self._cut(self._num_samples)
            jobs += [partial(_decode_images, self._root, images, self._rows, begin, end) for begin, end in cuts]
        return jobs

    def _file_jobs(self, read: Callable[[str, int, int], int], files: list[str]) -> list[FloorJob]:
        """Return the jobs that read the files of the episodes; each file is cut into one run per process."""
        num_frames: Counter[str] = Counter()
        for name, row in zip(files, self._rows, strict=True):
            num_frames[name] += int(self._meta.episodes.length[row])
        return [
            partial(read, self._meta.storage.locate(name), begin, end)
            for name, count in num_frames.items()
            for begin, end in self._cut(count)
        ]

    def _cut(self, count: int) -> list[tuple[int, int]]:
        ends = np.linspace(0, count, self._num_processes + 1).astype(int).tolist()
        return [(begin, end) for begin, end in pairwise(ends) if begin < end]


def _decode_video(path: str, begin: int, end: int) -> int:
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(path, seek_mode="approximate", dimension_order="NHWC", num_ffmpeg_threads=1)
    count = 0
    for first in range(begin, end, _PIECE):
        count += len(decoder.get_frames_in_range(first, min(first + _PIECE, end)).data)
    return count


def _decode_images(root: str, cameras: tuple[str, ...], rows: list[int], begin: int, end: int) -> int:
    """Decode images in rows: of the frames ``[begin, end)``, counted over the episodes in these rows of their table."""
    from raypipe.decode import decode_image

    meta, reader = _open_rows(root, cameras)
    count = first = 0
    for row in rows:
        length = int(meta.episodes.length[row])
        start, stop = max(0, begin - first), min(length, end - first)
        first += length
        if start >= stop:
            continue
        table = reader.read_frames(row, start, stop)
        for camera in cameras:
            for stored in table.column(camera):
                decode_image(stored.as_py(), meta.features[camera], f"row {row} of the episodes of {root!r}")
                count += 1
    return count


@cache
def _open_rows(root: str, cameras: tuple[str, ...]) -> tuple[DatasetMeta, RowReader]:
    meta = read_metadata(root)
    return meta, RowReader(meta, cameras)


def _read_rows(path: str, begin: int, end: int) -> int:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    first = count = 0
    for group in range(file.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if begin <= first < end:
            count += len(file.read_row_group(group, use_threads=False))
        first += num_rows
    return count


def measure_epoch(loader: RaypipeLoader | FloorLoader, request: Request) -> dict[str, Any]:
    """Return the times and figures of an epoch, or of the part that fits in `max_s` after its first batch.

    A stopped epoch counts up to its last batch, with all the work that filled the live spans before the first. So a
    whole epoch is at least as fast.
    """
    before = loader.figures()
    begin = time.monotonic()
    times, num_samples, distinct, is_partial = [begin], 0, [], False
    for size, episodes in loader.epoch():
        times.append(time.monotonic())
        num_samples += size
        if episodes is not None and size == request.batch_size:
            distinct.append(len(np.unique(episodes)))
        is_partial = bool(request.max_s) and times[-1] - times[1] > request.max_s
        if is_partial:
            break
    # Stopping a loader inside an epoch is not part of its work.
    end = times[-1] if is_partial else time.monotonic()
    after = loader.figures()
    return {
        "begin_s": begin,
        "end_s": end,
        "first_batch_s": times[1] - begin,
        "num_samples": num_samples,
        "is_partial": is_partial,
        "batch_ms": (1000 * np.diff(times)).tolist(),
        "distinct_episodes": float(np.mean(distinct)) if distinct else None,
        "figures": {name: after[name] - before[name] for name in after},
    }


def main() -> None:
    """Measure two epochs of what the first file of the command line asks for, and write the result to the second."""
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    floor, root = request.num_floor, request.root
    loader = FloorLoader(root, request.episodes, floor) if floor else RaypipeLoader(request)
    epochs = [measure_epoch(loader, request) for _ in range(2)]
    loader.close()
    Path(sys.argv[2]).write_text(json.dumps({"epochs": epochs, "settings": loader.settings}))
