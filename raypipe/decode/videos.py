"""Frames of a video by number, checked against the index of the file; and frames into an mp4.

`open_writer` is the only place where raypipe encodes. The caller chooses codec and options.
"""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from raypipe.decode.journal import unmarked
from raypipe.decode.pixels import DepthDecoder, depth_decoder_version
from raypipe.decode.spec import check_device, load_torchcodec
from raypipe.errors import ConfigError, DecodeError, RaypipeError, is_data_fault
from raypipe.format import (
    DatasetMeta,
    DepthCodes,
    VideoIndex,
    episode_first_frame,
    one_line,
    read_ranged_index,
    read_video_index,
)
from raypipe.storage import Storage, check_file
from raypipe.text import MOST_PIXELS, frames_text

if TYPE_CHECKING:
    from torchcodec.decoders import VideoDecoder

SeekMode = Literal["exact", "approximate", "index"]
"""``index``: seek by the frames in the file's own index, for a file that should not be read from end to end."""

_SAME_S: Final = 1e-4
"""Two frames of a video are further apart than this."""

_VideoKey = tuple[str, str, str, str, DepthCodes | None]
"""The storage, the file name, the device that decodes, the version of the file, and what its numbers mean."""


class OpenVideo:
    """A video with its decoder and the index of its frames. Only one thread at a time may use it.

    It opens a file with a constant frame rate without a scan (2 ms instead of 20 ms for 10,000 frames). It compares
    every frame that comes back with the index; if one is not the frame asked for, it scans the file after all.
    """

    def __init__(self, storage: Storage, name: str, device: str = "cpu", codes: DepthCodes | None = None) -> None:
        """Open a video; without the `codes` of a depth video it gives a picture of 8 bits, like any other.

        Raises:
            DatasetError: the file is missing, cut off, or not a video.
        """
        self._storage = storage
        self._name = name
        self._device = device
        self._codes = codes
        # A cache keeps the file, or its parts in use, while it is open here.
        with unmarked():
            self._held = storage.hold(name)
            self._ranged = storage.open_ranged(name) if self._held is None and storage.is_ranged(name) else None
        self._first_frames: dict[int, int] = {}
        with blaming(f"cannot open the video {self.place!r}", self._check_bytes):
            self.index = _read_index(storage, name)
            is_plain = codes is None and _has_constant_rate(self.index)
            self._seek_mode: SeekMode = "approximate" if is_plain else self._sure_mode
            self._decoder = self._open()
            self._check_count()
            check_pixels(*self.size, self.place)

    @property
    def _sure_mode(self) -> SeekMode:
        return "index" if self._ranged is not None and self.index.timescale else "exact"

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of a frame by the file's header, before any is decoded; 0 if the header lacks them."""
        told = self._decoder.metadata
        return told.height or 0, told.width or 0

    @property
    def place(self) -> str:
        """The path of the file, for messages."""
        return self._storage.locate(self._name)

    def _open(self) -> "VideoDecoder | DepthDecoder":
        source: Any = self._held.path if self._held is not None else self._ranged
        if self._codes is not None:
            # torchcodec from 0.17 has planes of 16 bits: a VideoDecoder of those may replace this one.
            return DepthDecoder(_source_of(self._storage, self._name, source), self.place, self.index, self._codes)
        seek: dict[str, Any] = {"seek_mode": self._seek_mode}
        if self._seek_mode == "index":
            seek = {"custom_frame_mappings": _frame_mappings(self.index)}
        return _open_decoder(self._storage, self._name, seek, self._device, source)

    def first_frame(self, meta: DatasetMeta, row: int, camera: str) -> int:
        """Return the number of an episode's first frame in this file; see `episode_first_frame`."""
        if row not in self._first_frames:
            self._first_frames[row] = episode_first_frame(meta, row, camera, self.index)
        return self._first_frames[row]

    def need(self, start: int, stop: int) -> None:
        """Fetch to this node what decoding these frames reads, if the node keeps only parts of a remote file."""
        if self._ranged is not None:
            with unmarked():
                self._ranged.need(*self.index.byte_range(np.arange(start, stop)))

    def read_frames(self, frames: NDArray[np.int64]) -> torch.Tensor:
        """Return the frames with these ascending numbers, decoded in one pass.

        ``(n, height, width, 3)`` uint8; for depth ``(n, height, width, 1)`` float32 in millimetres.
        """
        first, stop = int(frames[0]), int(frames[-1]) + 1
        self.need(first, stop)
        what = f"cannot decode {frames_text(first, stop)} of {self.place!r}"
        with blaming(what, lambda: self._check_bytes(*self.index.byte_range(frames))):
            return self._decode(frames, first, stop)

    def _check_bytes(self, start: int = 0, end: int = 0) -> None:
        """Raise if bytes of the file, or of its copies on this node, cannot be read from disk; an `end` of 0 is all."""
        stop = end or None
        if self._held is not None:
            check_file(self._held.path, start, stop)
        elif self._ranged is not None:
            for path in self._ranged.paths():
                check_file(path)
        else:
            self._storage.check_readable(self._name, start, stop)

    def _decode(self, frames: NDArray[np.int64], first: int, stop: int) -> torch.Tensor:
        is_range = stop - first == len(frames)
        if is_range:
            decoded = self._decoder.get_frames_in_range(first, stop)
        else:
            decoded = self._decoder.get_frames_at(indices=frames.tolist())
        pts_s = decoded.pts_seconds.cpu().numpy()
        wanted_s = self.index.pts_s[first:stop] if is_range else self.index.pts_s[frames]
        errors_s = np.abs(pts_s - wanted_s)
        if errors_s.max() < _SAME_S:
            pixels: torch.Tensor = decoded.data
            return pixels
        if self._seek_mode == "approximate":
            self._seek_mode = self._sure_mode
            self._decoder = self._open()
            return self._decode(frames, first, stop)
        wrong = int(np.argmin(errors_s < _SAME_S))
        raise DecodeError(
            f"frame {frames[wrong]} of {self.place!r} is at {wanted_s[wrong]:.4f} s by the file's index and came out "
            f"at {pts_s[wrong]:.4f} s; fetch the file again, or re-encode it."
        )

    def _check_count(self) -> None:
        if len(self._decoder) != len(self.index) and self._seek_mode == "approximate":
            # Without a scan the count is the header's, which ignores an edit list that cuts frames off.
            self._seek_mode = self._sure_mode
            self._decoder = self._open()
        if len(self._decoder) != len(self.index):
            raise DecodeError(
                f"{self.place!r} lists {len(self.index)} frames in its index and holds {len(self._decoder)}; the file "
                f"is cut off or was joined wrongly. Fetch it again, or re-encode it."
            )


def decoder_version(device: str, *, has_depth: bool = False) -> str:
    """Return the name of everything except file and size that decides the pixels of videos, some of depth or none."""
    torchcodec = load_torchcodec()
    try:
        from torchcodec._core import get_ffmpeg_library_versions

        versions = get_ffmpeg_library_versions()
    except ImportError:
        versions = {"ffmpeg_version": torchcodec.ffmpeg_major_version}
    libraries = " ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    # torch resizes with the instructions of the machine.
    machine = device if device != "cpu" else torch.backends.cpu.get_cpu_capability()
    depth = f", {depth_decoder_version()}" if has_depth else ""
    return f"torchcodec {torchcodec.__version__}, torch {torch.__version__} on {machine}, {libraries}{depth}"


@contextmanager
def blaming(what: str, check_readable: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turn every error that a library raises over the content of a video into a `DecodeError` that starts with `what`.

    Args:
        check_readable: raises if the bytes cannot be read. FFmpeg reports a failing disk like bad data, or goes on
            without the bytes.
    """
    try:
        yield
    except DecodeError:
        check_readable()
        raise
    except (RaypipeError, OSError):
        raise
    except Exception as error:
        if not is_data_fault(error):
            raise
        check_readable()
        raise DecodeError(f"{what}: {one_line(error)}. Fetch the file again.") from error


class VideoPool:
    """Open videos that threads borrow; beyond `size` it closes one of the file that was used least recently.

    Only one thread at a time has a video. Two threads that want the same file get a decoder each: a file may hold
    hundreds of episodes, and all threads work on them.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._idle: OrderedDict[_VideoKey, list[OpenVideo]] = OrderedDict()
        self._num_lent = 0
        self._process = os.getpid()
        self._of_parent: list[Any] = []
        self.hits = 0
        self.misses = 0

    @contextmanager
    def lend(
        self, storage: Storage, name: str, device: str = "cpu", version: str = "", codes: DepthCodes | None = None
    ) -> Iterator[OpenVideo]:
        """Lend the video `name` of a dataset, opened now or earlier, to this thread while the context lasts.

        A decoder that fails is closed and not used again, and one of another `version` of the file is not lent.
        """
        key = (storage.uri, name, device, version, codes)
        video = self._take(key)
        try:
            video = video or OpenVideo(storage, name, device, codes)
            yield video
        except BaseException:
            with self._lock:
                self._num_lent -= 1
            raise
        with self._lock:
            self._num_lent -= 1
            self._idle.setdefault(key, []).append(video)
            self._idle.move_to_end(key)

    def clear(self) -> None:
        """Close all videos that no thread has borrowed."""
        with self._lock:
            self._idle.clear()

    def _take(self, key: _VideoKey) -> OpenVideo | None:
        with self._lock:
            if self._process != os.getpid():
                # After a fork the parent reads the same open files, and a read moves the place in the file for both.
                # Kept, not closed: what a decoder may wait for when it is closed is left in the parent.
                self._of_parent.append(self._idle)
                self._idle, self._num_lent, self._process = OrderedDict(), 0, os.getpid()
            self._num_lent += 1
            if key in self._idle:
                self.hits += 1
                return self._pop(key, -1)
            self.misses += 1
            # Before the file is opened, so that a cache of the node can give it the freed room.
            while self._idle and sum(map(len, self._idle.values())) + self._num_lent > self._size:
                self._pop(next(iter(self._idle)), 0)
            return None

    def _pop(self, key: _VideoKey, place: int) -> OpenVideo:
        videos = self._idle[key]
        video = videos.pop(place)
        if not videos:
            del self._idle[key]
        return video


class _Waiting:
    """A file that may come over the network: while it reads, the decoder only waits and is not marked as decoding."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int) -> Any:
        with unmarked():
            return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> Any:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return int(self._file.tell())


def _read_index(storage: Storage, name: str) -> VideoIndex:
    try:
        with unmarked():
            return read_ranged_index(storage, name) if storage.is_ranged(name) else read_video_index(storage, name)
    except NotImplementedError:
        return _scan_index(_open_decoder(storage, name, {"seek_mode": "exact"}), storage.locate(name))


def check_pixels(height: int, width: int, place: str) -> None:
    """Raise if a video claims frames larger than any camera's."""
    if height * width > MOST_PIXELS:
        raise DecodeError(
            f"{place!r} claims frames of {width}x{height}, and a frame may have {MOST_PIXELS:,} pixels. Fetch the file "
            f"again, or re-encode it."
        )


def _scan_index(decoder: "VideoDecoder", place: str) -> VideoIndex:
    """Return the index of a video without a plain one in its container, by decoding all of it in pieces."""
    height, width = decoder.metadata.height or 0, decoder.metadata.width or 0
    check_pixels(height, width, place)
    step = max(1, min(64, MOST_PIXELS // max(1, height * width)))
    pieces = [
        decoder.get_frames_in_range(start, min(start + step, len(decoder))).pts_seconds.numpy()
        for start in range(0, len(decoder), step)
    ]
    # The keyframes are unknown. Marking every frame as one makes no reader start at the wrong place, since torchcodec
    # seeks by its own index.
    pts_s = np.concatenate(pieces) if pieces else np.zeros(0)
    return VideoIndex(pts_s.astype(np.float64), np.ones(len(pts_s), dtype=np.bool_))


def _frame_mappings(index: VideoIndex) -> str:
    """Return the index in the form that torchcodec takes."""
    ticks = np.rint(index.pts_s * index.timescale).astype(np.int64)
    last = ticks[-1] - ticks[-2] if len(ticks) > 1 else 1
    columns = zip(ticks.tolist(), np.append(np.diff(ticks), last).tolist(), index.is_keyframe.tolist(), strict=True)
    frames = [{"pts": pts, "duration": duration, "key_frame": int(is_key)} for pts, duration, is_key in columns]
    return json.dumps({"frames": frames})


def _has_constant_rate(index: VideoIndex) -> bool:
    return len(index) > 1 and bool(np.abs(index.pts_s - np.linspace(0.0, index.pts_s[-1], len(index))).max() < 1e-6)


def _open_decoder(
    storage: Storage, name: str, seek: dict[str, Any], device: str = "cpu", source: Any = None
) -> "VideoDecoder":
    """Open a video for decoding; `source` is a path or file in a cache."""
    source = _source_of(storage, name, source)
    if device != "cpu":
        check_device(device)
    decoders = load_torchcodec().decoders
    return decoders.VideoDecoder(source, dimension_order="NHWC", num_ffmpeg_threads=1, device=device, **seek)


def _source_of(storage: Storage, name: str, source: Any) -> Any:
    """Return the path or file of a video: `source` if a cache has it."""
    if source is None:
        with unmarked():
            source = storage.locate(name) if storage.is_local else storage.open_file(name)
    return source if isinstance(source, str) else _Waiting(source)


MOST_HELD_BYTES: Final = 2 << 30
"""Most bytes of frames to hold for a torchcodec that takes them all at once: 2,300 frames of 640x480."""

STREAMS_FROM: Final = "0.13"
"""The first torchcodec that writes frames as they come; LeRobot 0.6 wants an older one."""


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

    def add_frames(self, frames: torch.Tensor) -> None:
        """Take frames ``(n, 3, height, width)`` of uint8."""


_SVT_AV1: Final = "libsvtav1"
_one_svt = threading.Lock()
"""SVT-AV1 (1.4) crashes the process if two of its encoders are opened or freed at once."""


@contextmanager
def open_writer(path: Path, coding: VideoCoding) -> Iterator[FrameSink]:
    """Open an mp4 for frames; it is complete when the block ends. Restore the priority of this thread.

    SVT-AV1 (1.4), run by root as in most containers, gives the thread that opens it the highest real-time priority. All
    threads and processes that this thread starts later inherit it, and two busy ones stop a machine of two cores. Of
    several threads that write with it, one writes at a time.

    Raises:
        RuntimeError: FFmpeg here cannot write such a video; raised at the start or at the end of the block.
        ConfigError: this torchcodec would have to hold too many frames.
    """
    encoders = load_torchcodec().encoders
    # SVT-AV1 prints 15 lines for each file, and only this variable turns them off.
    os.environ.setdefault("SVT_LOG", "1")
    before = (os.sched_getscheduler(0), os.sched_getparam(0)) if hasattr(os, "sched_setscheduler") else None
    opened = _open_stream if hasattr(encoders, "Encoder") else _hold_frames
    with _one_svt if coding.encoder == _SVT_AV1 else nullcontext():
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
    stream = encoder.add_video(height=coding.height, width=coding.width, frame_rate=coding.fps, **_settings(coding))
    sink: Any = SimpleNamespace(add_frames=stream.add_frames)
    try:
        with encoder.open_file(path):
            yield sink
    finally:
        # The encoder is freed here and not when the caller lets go of the sink.
        del sink.add_frames, stream


@contextmanager
def _hold_frames(path: Path, coding: VideoCoding) -> Iterator[FrameSink]:
    from torchcodec.encoders import VideoEncoder

    held: list[torch.Tensor] = []

    def hold(frames: torch.Tensor) -> None:
        held.append(frames)
        if sum(one.nbytes for one in held) > MOST_HELD_BYTES:
            raise ConfigError(
                f"{str(path)!r} has more than {MOST_HELD_BYTES >> 30} GiB of frames, and torchcodec "
                f"{metadata.version('torchcodec')} takes all frames of a video at once. torchcodec {STREAMS_FROM} "
                f"writes them as they come: pip install 'torchcodec>={STREAMS_FROM}', in an environment without "
                f"LeRobot 0.6, which wants an older one."
            )

    sink: Any = SimpleNamespace(add_frames=hold)
    yield sink
    encoder = VideoEncoder(torch.cat(held), frame_rate=coding.fps)
    encoder.to_file(path, **_settings(coding))


def _settings(coding: VideoCoding) -> dict[str, Any]:
    return {
        "codec": coding.encoder,
        "pixel_format": "yuv420p",
        "crf": coding.crf,
        "preset": coding.preset,
        "extra_options": dict(coding.options),
    }
