"""The choices for a resharded copy, their checks before anything is written, and the report."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from raypipe.dataset import find_missing_cameras, why_missing
from raypipe.errors import ConfigError, DatasetError, suggest
from raypipe.format import DatasetMeta
from raypipe.text import counted, either, span_text
from raypipe.validate import read_exclude_file

SOURCE: Final = "source"
"""Keep what the source has."""

CODECS: Final = ("h264", "av1", "hevc", "vp9")
"""The codecs for re-encoding, where FFmpeg here has the encoder."""

RECORDER_GOP: Final = 2
"""A keyframe every 2 frames, as LeRobot's recorder writes: a random access then costs one extra frame."""

_LEAST_SIZE = {"h264": 32, "hevc": 32, "vp9": 32, "av1": 64}


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
    least = _LEAST_SIZE.get(codec, 32)
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
    return ReshardSpec(
        exclude=(*parse_episodes(exclude), *listed),
        drop_cameras=tuple(drop_cameras),
        gop=parse_gop(encoding["gop"]),
        size=parse_size(encoding["size"]),
        codec=encoding["codec"],
        crf=encoding["crf"],
        **limits,
    )


def parse_size(text: str) -> tuple[int, int] | Literal["source"]:
    """Return height and width from ``WIDTHxHEIGHT``, or ``source``."""
    if text == SOURCE:
        return "source"
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match:
        raise ConfigError(f"the size of a camera is WIDTHxHEIGHT, as 320x240, or 'source', got {text!r}")
    return int(match[2]), int(match[1])


def parse_gop(text: str) -> int | Literal["source"]:
    """Return a number of frames, or ``source``."""
    if text == SOURCE:
        return "source"
    if not text.isdecimal():
        raise ConfigError(f"gop is a number of frames, or 'source', got {text!r}")
    return int(text)


def parse_episodes(text: str) -> tuple[int, ...]:
    """Return the episode numbers of a list such as ``3,7``; empty for an empty text."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not part.isdecimal()]
    if wrong:
        raise ConfigError(f"episodes are given as numbers with commas, as 3,7; got {wrong[0]!r} in {text!r}")
    return tuple(int(part) for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """What a resharded copy holds, and notes on it."""

    root: str
    out: Path
    num_episodes: int
    num_frames: int
    num_excluded: int
    num_data_files: int
    num_video_files: int
    size_bytes: int
    num_kept_files: int
    """Files that an earlier, interrupted run had already finished."""
    was_complete: bool
    """True if `out` already existed, made with the same arguments; then nothing was done."""
    notes: tuple[str, ...]
    """What was computed, taken over or left out, in words."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self) | {"out": str(self.out), "notes": list(self.notes)}


def report_lines(report: ReshardReport) -> list[str]:
    """Return the report as lines for a person."""
    held = f"{counted(report.num_episodes, 'episode')}, {counted(report.num_frames, 'frame')}"
    if report.was_complete:
        return [f"{report.out} is complete already: {held}"]
    files = f"{counted(report.num_data_files, 'data file')} and {counted(report.num_video_files, 'video file')}"
    lines = [f"wrote {held} to {report.out}: {files}, {report.size_bytes / 2**20:.1f} MB"]
    if report.num_kept_files:
        lines.append(
            f"{counted(report.num_kept_files, 'file')} {either(report.num_kept_files, 'was', 'were')} there from an "
            f"earlier run"
        )
    return [*lines, *(f"note: {note}" for note in report.notes)]


def local_folder(out: str | os.PathLike[str]) -> Path:
    """Return the folder of the copy, as an absolute path.

    Raises:
        ConfigError: `out` is a URI, where a folder cannot be renamed in one step.
    """
    text = os.fspath(out)
    if not text or "://" in text:
        raise ConfigError(
            f"OUT is {text!r}; reshard writes to a local folder, which appears at once when it is complete. Write it "
            f"to disk, then copy it to the store."
        )
    return Path(os.path.abspath(os.path.expanduser(text)))


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
