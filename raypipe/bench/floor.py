"""The floor: every frame decoded once, in file order; what no loader can do without."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from typing import Any, Final

import numpy as np

from raypipe.bench.one_loader import Item
from raypipe.dataset import open_dataset

_PIECE: Final = 64
"""Frames that are decoded at once, and thrown away."""


class FloorLoader:
    """Decodes every frame of every camera once, in file order, in some processes; rows alone where there is no video.

    The least that any loader must do: nothing is shuffled, joined to rows or put into batches.
    """

    def __init__(self, root: str, episodes: Sequence[int] | None, num_processes: int) -> None:
        self._meta = open_dataset(root).meta
        self._num_processes = num_processes
        self._pool = ProcessPoolExecutor(num_processes, get_context("spawn")) if num_processes > 1 else None
        numbers = self._meta.episodes.episode_index
        rows = np.arange(len(numbers)) if episodes is None else np.flatnonzero(np.isin(numbers, episodes))
        self._rows = rows
        self._num_samples = int(self._meta.episodes.length[rows].sum())
        self._num_decoded = 0
        self.settings: dict[str, Any] = {}

    def epoch(self) -> Iterator[Item]:  # noqa: D102
        jobs = self._jobs()
        mapped = map(_run_floor, jobs) if self._pool is None else self._pool.map(_run_floor, jobs)
        total = sum(mapped)
        self._num_decoded += total if self._meta.cameras else 0
        yield Item(self._num_samples)

    def figures(self) -> dict[str, float]:  # noqa: D102
        return {"decoded_frames": self._num_decoded}

    def close(self) -> None:  # noqa: D102
        if self._pool is not None:
            self._pool.shutdown()

    def _jobs(self) -> list[tuple[str, int, int]]:
        """Return (file, first frame, end) of every run to decode; a file is cut into one run per process."""
        meta, jobs = self._meta, []
        cameras = [name for name in meta.cameras if meta.features[name].kind == "video"]
        files: dict[str, int] = {}
        for row in self._rows.tolist():
            for name in [meta.video_file(row, camera) for camera in cameras] or [meta.data_file(row)]:
                files[name] = files.get(name, 0) + int(meta.episodes.length[row])
        for name, num_frames in files.items():
            ends = np.linspace(0, num_frames, self._num_processes + 1).astype(int).tolist()
            path = meta.storage.locate(name)
            jobs += [(path, begin, end) for begin, end in pairwise(ends) if begin < end]
        return jobs


def _run_floor(job: tuple[str, int, int]) -> int:
    path, begin, end = job
    if path.endswith(".parquet"):
        return _read_floor(path, begin, end)
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(path, seek_mode="approximate", dimension_order="NHWC", num_ffmpeg_threads=1)
    count = 0
    for first in range(begin, end, _PIECE):
        count += len(decoder.get_frames_in_range(first, min(first + _PIECE, end)).data)
    return count


def _read_floor(path: str, begin: int, end: int) -> int:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    first = count = 0
    for group in range(file.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if begin <= first < end:
            count += len(file.read_row_group(group, use_threads=False))
        first += num_rows
    return count
