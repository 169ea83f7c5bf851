"""Decides which episodes go into which file of the copy: pure, from sizes and descriptions.

Fills files in the order of the episodes and closes each before it reaches the limit, as LeRobot's recorder does. Every
unit names one file to write; nothing here touches storage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raypipe.format import DatasetMeta
from raypipe.reshard.pieces import Piece
from raypipe.reshard.spec import FILES_PER_CHUNK

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Numbering:
    """The kept episodes in their new order; episode ``i`` of the copy is row ``rows[i]`` of the source."""

    rows: NDArray[np.int64]
    from_index: NDArray[np.int64]
    """The copy's ``index`` of each episode's first frame."""
    new_number: NDArray[np.int64]
    """By row of the source's table; -1 if the episode is excluded."""

    def __len__(self) -> int:
        return len(self.rows)

    def is_same(self, meta: DatasetMeta) -> bool:
        """Return whether every episode and every row keeps its number."""
        episodes = meta.episodes
        return bool(
            np.array_equal(episodes.episode_index[self.rows], np.arange(len(episodes)))
            and np.array_equal(episodes.from_index[self.rows], self.from_index)
        )

    @property
    def is_kept(self) -> NDArray[np.bool_]:
        """Whether each row of the source's table is kept."""
        return self.new_number >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCopy:
    """One data file, with the new episodes ``[start, stop)``."""

    number: int
    start: int
    stop: int

    @property
    def path(self) -> str:
        """The file's path in the copy."""
        return format_path(DATA_PATH, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoCopy:
    """One video file of one camera, made of pieces."""

    camera: str
    number: int
    pieces: tuple[Piece, ...]

    @property
    def path(self) -> str:
        """The file's path in the copy."""
        return format_path(VIDEO_PATH, self.number, self.camera)


def format_path(template: str, number: int, camera: str = "") -> str:
    """Return the path of file `number`, counted over all chunks."""
    chunk, file = divmod(number, FILES_PER_CHUNK)
    return template.format(chunk_index=chunk, file_index=file, video_key=camera)


def plan_numbering(meta: DatasetMeta, exclude: Sequence[int]) -> Numbering:
    """Return the new numbers of the kept episodes: from 0 without gaps, in the order of the source."""
    is_kept = ~np.isin(meta.episodes.episode_index, np.array(exclude, dtype=np.int64))
    rows = np.flatnonzero(is_kept)
    length = meta.episodes.length[rows]
    new_number = np.full(len(is_kept), -1, dtype=np.int64)
    new_number[rows] = np.arange(len(rows))
    return Numbering(rows=rows, from_index=np.cumsum(length) - length, new_number=new_number)


def plan_data_files(size_bytes: NDArray[np.float64], limit_bytes: int) -> list[DataCopy]:
    """Return the data files of the copy, given the estimated size of each of its episodes."""
    starts = _starts([float(size) for size in size_bytes], [None] * len(size_bytes), limit_bytes)
    stops = [*starts[1:], len(size_bytes)]
    return [
        DataCopy(number=number, start=start, stop=stop)
        for number, (start, stop) in enumerate(zip(starts, stops, strict=False))
    ]


def plan_video_files(camera: str, pieces: Sequence[Piece], limit_bytes: int) -> list[VideoCopy]:
    """Return the video files of one camera; pieces with different descriptions never share a file."""
    ordered = sorted(pieces, key=lambda piece: min(piece.rows))
    # A file that is copied as it is stays alone: its own number serves as its description.
    kinds = [number if piece.description is None else piece.description for number, piece in enumerate(ordered)]
    starts = _starts([float(piece.size_bytes) for piece in ordered], kinds, limit_bytes)
    stops = [*starts[1:], len(ordered)]
    return [
        VideoCopy(camera=camera, number=number, pieces=tuple(ordered[start:stop]))
        for number, (start, stop) in enumerate(zip(starts, stops, strict=False))
    ]


def _starts(sizes: Sequence[float], kinds: Sequence[object], limit: int) -> list[int]:
    """Return the items at which a new file starts: before the limit is reached, and where the kind changes."""
    starts: list[int] = []
    filled = 0.0
    for item, size in enumerate(sizes):
        if not starts or filled + size >= limit or kinds[item] != kinds[item - 1]:
            starts.append(item)
            filled = 0.0
        filled += size
    return starts


def estimate_data_sizes(meta: DatasetMeta, numbering: Numbering, size_of: dict[str, int]) -> NDArray[np.float64]:
    """Return about how many bytes the rows of each kept episode take: their share of the source file.

    Args:
        size_of: the sizes of the source's data files by name.
    """
    length = meta.episodes.length
    places = np.stack([meta.episodes.chunk_index, meta.episodes.file_index], axis=1)
    files, number = np.unique(places, axis=0, return_inverse=True)
    number = number.reshape(-1)
    first_row = np.full(len(files), len(length), dtype=np.int64)
    np.minimum.at(first_row, number, np.arange(len(length)))
    size = np.array([size_of.get(meta.data_file(int(row)), 0) for row in first_row], dtype=np.float64)
    frames = np.bincount(number, weights=length, minlength=len(files))
    share = size[number] * length / frames[number]
    return np.asarray(share[numbering.rows])
