"""Decides what the copy is: the choices and whether they are possible, the new numbers, which episodes share a file.

Fills files in the order of the episodes and closes each before it reaches the limit, as LeRobot's recorder does. Every
unit names one file to write; nothing here reads or writes rows or videos.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import find_missing_cameras, parse_episodes, why_missing
from raypipe.errors import ConfigError, DatasetError, suggest
from raypipe.format import DATA_TEMPLATES, VIDEO_TEMPLATES, DatasetMeta, Tasks, format_path
from raypipe.reshard.mp4 import Description
from raypipe.reshard.workspace import Workspace
from raypipe.storage import Storage
from raypipe.text import counted, either, span_text
from raypipe.validate import read_exclude_file

SOURCE: Final = "source"
"""Keep what the source has."""

CODECS: Final = ("h264", "av1", "hevc", "vp9")
"""The codecs for re-encoding, where FFmpeg here has the encoder."""

RECORDER_GOP: Final = 2
"""A keyframe every 2 frames, as LeRobot's recorder writes: a random access then costs one extra frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardSpec:
    """How the copy differs from its source. By default it keeps everything: rows, packets, numbers."""

    exclude: tuple[int, ...] = ()
    """Episodes to leave out, by their number in the source. The others get new numbers from 0: LeRobot finds an episode
    by its position."""
    drop_cameras: tuple[str, ...] = ()
    data_mb: int = 100
    video_mb: int = 200
    """A file closes before it reaches this many megabytes (2**20 bytes); the defaults are LeRobot's limits. Reshard
    never cuts an episode, so a larger one has a larger file."""
    gop: int | Literal["source"] = SOURCE
    """Frames from one keyframe to the next. ``source`` keeps the packets, or means 2 if videos are re-encoded."""
    size: tuple[int, int] | Literal["source"] = SOURCE
    """Height and width of every camera."""
    codec: str = SOURCE
    crf: int = 24
    """Quality of re-encoded videos, lower is better. Finer than the recorder's 30, since the source has lost some."""

    def __post_init__(self) -> None:
        for name in ("data_mb", "video_mb"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1 megabyte, got {getattr(self, name)}")
        if self.codec != SOURCE and self.codec not in CODECS:
            raise ConfigError(f"codec must be one of {', '.join(map(repr, (SOURCE, *CODECS)))}, got {self.codec!r}")
        if self.gop != SOURCE and self.gop < 1:
            raise ConfigError(f"gop must be at least 1 frame, got {self.gop}")
        if self.crf < 0:
            raise ConfigError(f"crf must be at least 0, got {self.crf}")
        if self.size != SOURCE:
            check_size(self.size, self.codec, "size")
        negative = [episode for episode in self.exclude if episode < 0]
        if negative:
            raise ConfigError(f"exclude has the episodes {negative[:10]}; an episode's number is at least 0")

    @property
    def is_reencoded(self) -> bool:
        """Whether pixels are encoded again; if not, every packet is copied."""
        return (self.gop, self.size, self.codec) != (SOURCE, SOURCE, SOURCE)

    def to_json(self) -> dict[str, Any]:
        """Return the spec as plain values; specs with the same meaning give the same values, whatever their order."""
        return asdict(self) | {
            "exclude": sorted(set(self.exclude)),
            "drop_cameras": sorted(set(self.drop_cameras)),
            "size": self.size if isinstance(self.size, str) else list(self.size),
        }


def check_size(size: Sequence[int], codec: str, name: str) -> None:
    """Raise a `ConfigError` if no encoder of `codec` takes this height and width."""
    least = 64 if codec == "av1" else 32
    shown = "x".join(map(str, size))
    if len(size) != 2 or min(size) < least:
        raise ConfigError(f"{name} is {shown} (height x width); it needs at least {least}x{least}")
    # yuv420p halves the chroma planes.
    if size[0] % 2 or size[1] % 2:
        raise ConfigError(f"{name} is {shown} (height x width); a video needs an even height and width")


def parse_spec(
    *,
    exclude: str,
    exclude_file: Path | None,
    drop_cameras: Sequence[str],
    encoding: Mapping[str, Any],
    limits: Mapping[str, int],
) -> ReshardSpec:
    """Return the spec for the words of a command line."""
    listed = read_exclude_file(exclude_file) if exclude_file is not None else ()
    episodes = ",".join(part for part in exclude.split(",") if part.strip())
    gop, size = encoding["gop"], encoding["size"]
    if gop != SOURCE and not re.fullmatch(r"\d{1,18}", gop):
        raise ConfigError(f"gop is a number of frames, or 'source', got {gop!r}")
    sides = re.fullmatch(r"(\d{1,9})x(\d{1,9})", size)
    if size != SOURCE and sides is None:
        raise ConfigError(f"the size of a camera is WIDTHxHEIGHT, as 320x240, or 'source', got {size!r}")
    return ReshardSpec(
        exclude=(*(parse_episodes(episodes) if episodes else ()), *listed),
        drop_cameras=tuple(drop_cameras),
        gop=SOURCE if gop == SOURCE else int(gop),
        size=SOURCE if sides is None else (int(sides[2]), int(sides[1])),
        codec=encoding["codec"],
        crf=encoding["crf"],
        **limits,
    )


def check_choices(meta: DatasetMeta, spec: ReshardSpec) -> None:
    """Raise if the spec names episodes or cameras that do not exist, or leaves nothing."""
    known = set(meta.episodes.episode_index.tolist())
    unknown = sorted(set(spec.exclude) - known)
    if unknown:
        span = span_text(min(known), max(known)) if known else "none"
        raise ConfigError(
            f"exclude names the episodes {unknown[:10]}, and {meta.root!r} has {counted(len(known), 'episode')}, "
            f"numbered {span}"
        )
    if known and known <= set(spec.exclude):
        raise ConfigError(
            f"exclude names {either(len(known), 'the only episode', f'all {len(known):,} episodes')} of "
            f"{meta.root!r}; nothing would be left"
        )
    if not known:
        raise ConfigError(f"{meta.root!r} has no episodes; there is nothing to write")
    for camera in spec.drop_cameras:
        if camera not in meta.cameras:
            raise ConfigError(f"{meta.root!r} has no camera {camera!r} to drop{suggest(camera, meta.cameras)}")


def video_cameras(meta: DatasetMeta, spec: ReshardSpec) -> tuple[str, ...]:
    """Return the cameras whose videos are copied.

    Raises:
        DatasetError: a declared camera has no files, so LeRobot could not open the copy.
    """
    missing = [camera for camera in find_missing_cameras(meta) if camera not in spec.drop_cameras]
    if missing:
        options = " ".join(f"--drop-camera {camera}" for camera in missing)
        raise DatasetError(
            f"{meta.root!r} declares {', '.join(missing)}, and {why_missing(meta, missing[0])}. Fetch the files, or "
            f"leave {'them' if len(missing) > 1 else 'it'} out: {options}"
        )
    return tuple(name for name in meta.cameras if meta.features[name].kind == "video" and name not in spec.drop_cameras)


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
class TaskNumbers:
    """The tasks of the copy: each text once, numbered by position."""

    texts: tuple[str, ...]
    numbers: Mapping[int, int]
    """The number in the copy by that in the source, ascending."""

    @property
    def is_same(self) -> bool:
        """Whether every task keeps its number."""
        return all(old == new for old, new in self.numbers.items())

    def renumber(self, task_index: NDArray[np.int64], place: str) -> NDArray[np.int64]:
        """Return the new numbers; unchanged if the dataset has no tasks."""
        if not self.numbers:
            return task_index
        old, new = np.array(list(self.numbers.items())).T
        position = np.searchsorted(old, task_index).clip(0, len(old) - 1)
        unknown = task_index[old[position] != task_index]
        if len(unknown):
            raise DatasetError(
                f"a row of {place} has task_index {unknown[0]}, which is none of the dataset's "
                f"{counted(len(old), 'task')}. Add the task to meta/tasks, or leave the episode out with --exclude."
            )
        return np.asarray(new[position])


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of the copy's rows."""

    names: tuple[str, ...]
    """All of them in order, with the index columns."""
    derived: tuple[str, ...] = ()
    """Index columns that the source's rows lack; reshard computes them."""
    absent: tuple[str, ...] = ()
    """Declared features without a column; the copy does not declare them."""
    undeclared: tuple[str, ...] = ()
    """Columns that ``info.json`` does not name."""
    added: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Declarations of the undeclared and the derived columns, as far as LeRobot's format can express them."""

    def notes(self) -> list[str]:
        """Return the differences from the source, in words."""
        notes = []
        if self.derived:
            notes.append(f"the rows had no column {', '.join(self.derived)}; derived from the episode table")
        if self.absent:
            notes.append(f"info.json declared {', '.join(self.absent)} and the rows have no such column; left out")
        named = [name for name in self.undeclared if name in self.added]
        if named:
            notes.append(f"info.json did not declare the columns {', '.join(named)}; it does now, by their types")
        unnamed = [name for name in self.undeclared if name not in self.added]
        if unnamed:
            notes.append(
                f"the columns {', '.join(unnamed)} stay undeclared: LeRobot has no words for their types or names"
            )
        return notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How a camera is re-encoded."""

    codec: str
    height: int
    width: int
    gop: int
    crf: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CopyJob:
    """What all files of a copy have in common; sent once to all tasks."""

    meta: DatasetMeta
    spec: ReshardSpec
    workspace: Workspace
    cameras: tuple[str, ...]
    """Those whose videos are copied."""
    numbering: Numbering
    columns: Columns
    tasks: TaskNumbers
    encodings: dict[str, Encoding]
    """By camera; empty if packets are copied."""
    described: tuple[str, ...]
    """Features whose statistics the tasks compute, since the source's do not exist or no longer apply."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The frames of each episode of the copy."""
        return self.meta.episodes.length[self.numbering.rows]

    @property
    def dropped(self) -> tuple[str, ...]:
        """Features of the source that the copy does not have."""
        return (*self.spec.drop_cameras, *self.columns.absent)

    def place(self, number: int) -> str:
        """Return the words for an episode of the copy in a message."""
        episode = self.meta.episodes.episode_index[self.numbering.rows[number]]
        return f"episode {episode} of {self.meta.root!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCopy:
    """One data file, with the new episodes ``[start, stop)``."""

    number: int
    start: int
    stop: int

    @property
    def path(self) -> str:
        """The file's path in the copy."""
        return format_path(DATA_TEMPLATES[True], self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Packets of one source file that are copied together, and the kept episodes in them."""

    storage: Storage
    name: str
    rows: tuple[int, ...]
    first_frame: tuple[int, ...]
    """Each episode's first frame, counted from the piece's own first frame."""
    start: int
    stop: int
    """Range of packets; all of them for a whole file."""
    size_bytes: int
    description: Description | None
    """None for a file that is copied as it is."""
    num_lead_in: int
    """Frames of excluded episodes that stay, since kept episodes cannot be decoded without them."""
    has_other_tracks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoCopy:
    """One video file of one camera, made of pieces."""

    camera: str
    number: int
    pieces: tuple[Piece, ...]

    @property
    def path(self) -> str:
        """The file's path in the copy."""
        return format_path(VIDEO_TEMPLATES[True], self.number, self.camera)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """All files of rows and videos of the copy."""

    data: tuple[DataCopy, ...]
    videos: tuple[VideoCopy, ...]

    @property
    def all(self) -> tuple[DataCopy | VideoCopy, ...]:
        """All of them; each is a unit of work."""
        return (*self.data, *self.videos)


def plan_numbering(meta: DatasetMeta, exclude: Sequence[int]) -> Numbering:
    """Return the new numbers of the kept episodes: from 0 without gaps, in the order of the source."""
    is_kept = ~np.isin(meta.episodes.episode_index, np.array(exclude, dtype=np.int64))
    rows = np.flatnonzero(is_kept)
    length = meta.episodes.length[rows]
    new_number = np.full(len(is_kept), -1, dtype=np.int64)
    new_number[rows] = np.arange(len(rows))
    return Numbering(rows=rows, from_index=np.cumsum(length) - length, new_number=new_number)


def number_tasks(tasks: Tasks) -> TaskNumbers:
    """Return the tasks numbered from 0 without gaps; equal texts share a number."""
    texts: dict[str, int] = {}
    numbers = {number: texts.setdefault(text, len(texts)) for number, text in sorted(tasks.texts.items())}
    return TaskNumbers(texts=tuple(texts), numbers=numbers)


def plan_data_files(size_bytes: NDArray[np.float64], limit_bytes: int) -> list[DataCopy]:
    """Return the data files of the copy, given the estimated size of each of its episodes."""
    cuts = _cut(size_bytes.tolist(), [None] * len(size_bytes), limit_bytes)
    return [DataCopy(number=number, start=start, stop=stop) for number, (start, stop) in enumerate(cuts)]


def plan_video_files(camera: str, pieces: Sequence[Piece], limit_bytes: int) -> list[VideoCopy]:
    """Return the video files of one camera; pieces with different descriptions never share a file."""
    ordered = sorted(pieces, key=lambda piece: min(piece.rows))
    # A file that is copied as it is stays alone: its own number serves as its description.
    kinds = [number if piece.description is None else piece.description for number, piece in enumerate(ordered)]
    cuts = _cut([float(piece.size_bytes) for piece in ordered], kinds, limit_bytes)
    return [
        VideoCopy(camera=camera, number=number, pieces=tuple(ordered[start:stop]))
        for number, (start, stop) in enumerate(cuts)
    ]


def _cut(sizes: Sequence[float], kinds: Sequence[object], limit: int) -> list[tuple[int, int]]:
    """Return the items of each file: a new one starts before the limit is reached, and where the kind changes."""
    starts: list[int] = []
    filled = 0.0
    for item, size in enumerate(sizes):
        if not starts or filled + size >= limit or kinds[item] != kinds[item - 1]:
            starts.append(item)
            filled = 0.0
        filled += size
    return list(zip(starts, [*starts[1:], len(sizes)], strict=False))


def estimate_data_sizes(meta: DatasetMeta, numbering: Numbering, size_of: dict[str, int]) -> NDArray[np.float64]:
    """Return about how many bytes the rows of each kept episode take: their share of the size of the source file."""
    length = meta.episodes.length
    size = np.zeros(len(length))
    for name, rows in meta.rows_by_file().items():
        size[rows] = size_of.get(name, 0) * length[rows] / length[rows].sum()
    return size[numbering.rows]
