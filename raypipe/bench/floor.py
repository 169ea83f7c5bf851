"""The floor: every frame decoded once, in file order; no loader can do with less."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import pairwise
from multiprocessing import get_context
from typing import Any, Final

import numpy as np

from raypipe.bench.one_loader import Item
from raypipe.dataset import open_dataset
from raypipe.format import DatasetMeta, RowReader, read_metadata

_PIECE: Final = 64
"""Frames decoded together, then thrown away."""

FloorJob = Callable[[], int]
"""Reads or decodes something, and returns the number of frames."""


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

    def epoch(self) -> Iterator[Item]:  # noqa: D102
        jobs = self._jobs()
        total = sum(map(_run, jobs) if self._pool is None else self._pool.map(_run, jobs))
        self._num_decoded += total if self._cameras else 0
        yield Item(self._num_samples)

    def figures(self) -> dict[str, float]:  # noqa: D102
        return {"decoded_frames": self._num_decoded}

    def close(self) -> None:  # noqa: D102
        if self._pool is not None:
            self._pool.shutdown()

    def _jobs(self) -> list[FloorJob]:
        if not self._cameras:
            return self._file_jobs(_read_rows, [self._meta.data_file(row) for row in self._rows], self._rows)
        jobs: list[FloorJob] = []
        for camera in self._cameras:
            if self._meta.features[camera].kind == "video":
                files = [self._meta.video_file(row, camera) for row in self._rows]
                jobs += self._file_jobs(_decode_video, files, self._rows)
        images = tuple(name for name in self._cameras if self._meta.features[name].kind == "image")
        return jobs + (self._image_jobs(images) if images else [])

    def _file_jobs(self, read: Callable[[str, int, int], int], files: list[str], rows: list[int]) -> list[FloorJob]:
        """Return the jobs that read the files of these episodes; each file is cut into one run per process."""
        num_frames: dict[str, int] = {}
        for name, row in zip(files, rows, strict=True):
            num_frames[name] = num_frames.get(name, 0) + int(self._meta.episodes.length[row])
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


def start_processes(num_processes: int) -> ProcessPoolExecutor | None:
    """Return the floor's processes, with all imports done and nothing decoded; None if it runs in this process."""
    _import_decoder()
    if num_processes == 1:
        return None
    pool = ProcessPoolExecutor(num_processes, get_context("spawn"))
    # Submit all at once, so that each process takes one job: processes start more slowly than this loop runs.
    for job in [pool.submit(_import_decoder) for _ in range(num_processes)]:
        job.result()
    return pool


def _import_decoder() -> None:
    import torchcodec.decoders  # noqa: F401


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
