"""The loaders that bench measures, raypipe and the floor, and what a process does that measures one.

The floor decodes every frame once, in file order; no loader can do with less. Times are those of ``time.monotonic``:
the process that started this one uses them to find the CPU time of an epoch.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from raypipe.dataset import Dataset, open_dataset
from raypipe.format import DatasetMeta, RowReader, read_metadata

if TYPE_CHECKING:
    from raypipe.pipeline import Pipeline

_FIGURES: Final = ("fetch_s", "decode_s", "decoded_frames", "emitted_frames", "assemble_s", "decode_wait_s")
"""raypipe's own figures that go into the result."""
_PIECE: Final = 64
"""Frames decoded together by the floor, then thrown away."""

FloorJob = Callable[[], int]
"""Reads or decodes something, and returns the number of frames."""


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
        return {**({} if self.episodes is None else {"selection": {"episodes": self.episodes}}), **self.parts}


@dataclass(frozen=True)
class Item:
    """What the bench needs to know of one batch."""

    num_samples: int
    episodes: Any = None


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
        order = pipe.config.order
        self.settings: dict[str, Any] = {
            "span_frames": order.span_frames,
            "live_spans": order.live_spans,
            "clip_frames": order.clip_frames,
            "spans_per_block": pipe.config.feed.spans_per_block,
        }

    def epoch(self) -> Iterator[Item]:
        """Yield the batches of the next epoch; start at its beginning even if the epoch before was stopped early."""
        # After an early stop, the loader is inside its epoch and would continue with the rest.
        self._loader.set_epoch(self._num_begun)
        self._num_begun += 1
        for batch in self._loader:
            yield Item(len(batch["index"]), batch["episode_index"].numpy())

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

    def epoch(self) -> Iterator[Item]:
        """Yield all samples as one item."""
        jobs = self._jobs()
        total = sum(map(_run, jobs) if self._pool is None else self._pool.map(_run, jobs))
        self._num_decoded += total if self._cameras else 0
        yield Item(self._num_samples)

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
        return jobs + (self._image_jobs(images) if images else [])

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

    def _image_jobs(self, cameras: tuple[str, ...]) -> list[FloorJob]:
        """Return the jobs that decode images in rows; all frames of all episodes are cut into one run per process."""
        lengths = self._meta.episodes.length[self._rows].astype(int)
        starts = (np.cumsum(lengths) - lengths).tolist()
        jobs: list[FloorJob] = []
        for begin, end in self._cut(self._num_samples):
            episodes = zip(self._rows, starts, lengths.tolist(), strict=True)
            pieces = [(row, max(0, begin - start), min(length, end - start)) for row, start, length in episodes]
            jobs.append(
                partial(_decode_images, self._root, cameras, [piece for piece in pieces if piece[1] < piece[2]])
            )
        return jobs

    def _cut(self, count: int) -> list[tuple[int, int]]:
        ends = np.linspace(0, count, self._num_processes + 1).astype(int).tolist()
        return [(begin, end) for begin, end in pairwise(ends) if begin < end]


def _run(job: FloorJob) -> int:
    return job()


def _decode_video(path: str, begin: int, end: int) -> int:
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(path, seek_mode="approximate", dimension_order="NHWC", num_ffmpeg_threads=1)
    count = 0
    for first in range(begin, end, _PIECE):
        count += len(decoder.get_frames_in_range(first, min(first + _PIECE, end)).data)
    return count


def _decode_images(root: str, cameras: tuple[str, ...], pieces: list[tuple[int, int, int]]) -> int:
    """Decode the images of frames ``[start, stop)`` for some rows of the episode table."""
    from raypipe.decode import decode_image

    meta, reader = _open_rows(root, cameras)
    count = 0
    for row, start, stop in pieces:
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


def measure_loader(request: Request) -> dict[str, Any]:
    """Return times, batch times and figures of two epochs."""
    floor, root = request.num_floor, request.root
    loader = FloorLoader(root, request.episodes, floor) if floor else RaypipeLoader(request)
    epochs = [measure_epoch(loader, request) for _ in range(2)]
    loader.close()
    return {"epochs": epochs, "settings": loader.settings}


def measure_epoch(loader: RaypipeLoader | FloorLoader, request: Request) -> dict[str, Any]:
    """Return the times and figures of an epoch, or of the part that fits in `max_s` after its first batch.

    A stopped epoch counts up to its last batch, with all the work that filled the live spans before the first. So a
    whole epoch is at least as fast.
    """
    before = loader.figures()
    begin = time.monotonic()
    times, num_samples, distinct = [begin], 0, []
    is_partial = False
    for item in loader.epoch():
        times.append(time.monotonic())
        num_samples += item.num_samples
        if item.episodes is not None and item.num_samples == request.batch_size:
            distinct.append(len(np.unique(item.episodes)))
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
    """Measure what the first file of the command line asks for, and write the result to the second."""
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(measure_loader(request)))
