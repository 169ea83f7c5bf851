"""Frames into an mp4: the only place where raypipe encodes.

From version 0.13 on, torchcodec writes frames as they come. Before that, as in an environment with LeRobot 0.6, it
takes all frames of a video at once, so the writer holds up to `MOST_HELD_BYTES` of them. The caller chooses codec and
options.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from raypipe.errors import ConfigError

if TYPE_CHECKING:
    import torch

MOST_HELD_BYTES: Final = 2 << 30
"""Most bytes of frames to hold for a torchcodec that takes them all at once: 2,300 frames of 640x480."""

STREAMS_FROM: Final = "0.13"
"""The first torchcodec that writes frames as they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoCoding:
    """How to write a video: 8 bits, yuv420p."""

    height: int
    width: int
    fps: float
    encoder: str
    """FFmpeg's name, such as ``libx264``."""
    crf: int
    preset: str | None
    options: Mapping[str, int | str] = field(default_factory=dict)
    """FFmpeg's options, by name."""


class FrameSink(Protocol):
    """What takes the frames of a video."""

    def add_frames(self, frames: "torch.Tensor") -> None:
        """Take frames ``(n, 3, height, width)`` of uint8."""


@contextmanager
def open_writer(path: Path, coding: VideoCoding) -> Iterator[FrameSink]:
    """Open an mp4 for frames; it is complete when the block ends. Restore the priority of this thread.

    SVT-AV1 (1.4), run by root as in most containers, gives the thread that opens it the highest real-time priority. All
    threads and processes that this thread starts later inherit it, and two busy ones stop a machine of two cores.

    Raises:
        RuntimeError: FFmpeg here cannot write such a video; raised at the start or at the end of the block.
        ConfigError: this torchcodec would have to hold too many frames.
    """
    from torchcodec import encoders

    # SVT-AV1 prints 15 lines for each file, and only this variable turns them off.
    os.environ.setdefault("SVT_LOG", "1")
    before = (os.sched_getscheduler(0), os.sched_getparam(0)) if hasattr(os, "sched_setscheduler") else None
    opened = _open_stream if hasattr(encoders, "Encoder") else _hold_frames
    try:
        with opened(path, coding) as sink:
            _set_priority(before)
            yield sink
    finally:
        _set_priority(before)


def _set_priority(wanted: tuple[int, Any] | None) -> None:
    if wanted is not None:
        os.sched_setscheduler(0, *wanted)


@contextmanager
def _open_stream(path: Path, coding: VideoCoding) -> Iterator[FrameSink]:
    from torchcodec.encoders import Encoder

    encoder = Encoder()
    stream = encoder.add_video(
        height=coding.height, width=coding.width, frame_rate=coding.fps, codec=coding.encoder, **_settings(coding)
    )
    with encoder.open_file(path):
        yield stream


@contextmanager
def _hold_frames(path: Path, coding: VideoCoding) -> Iterator[FrameSink]:
    import torch
    from torchcodec.encoders import VideoEncoder

    held = _HeldFrames(path)
    yield held
    encoder = VideoEncoder(torch.cat(held.frames), frame_rate=coding.fps)
    encoder.to_file(path, codec=coding.encoder, **_settings(coding))


class _HeldFrames:
    def __init__(self, path: Path) -> None:
        self.frames: list[torch.Tensor] = []
        self._path = path
        self._bytes = 0

    def add_frames(self, frames: "torch.Tensor") -> None:
        self._bytes += frames.nbytes
        if self._bytes > MOST_HELD_BYTES:
            raise ConfigError(
                f"{str(self._path)!r} has more than {MOST_HELD_BYTES >> 30} GiB of frames, and torchcodec "
                f"{version('torchcodec')} takes all frames of a video at once. torchcodec {STREAMS_FROM} writes them "
                f"as they come: pip install 'torchcodec>={STREAMS_FROM}', in an environment without LeRobot 0.6, which "
                f"wants an older one."
            )
        self.frames.append(frames)


def _settings(coding: VideoCoding) -> dict[str, Any]:
    return {
        "pixel_format": "yuv420p",
        "crf": coding.crf,
        "preset": coding.preset,
        "extra_options": dict(coding.options),
    }
