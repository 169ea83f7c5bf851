"""An open video: its frames by number, checked against the index of the file."""

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torchcodec.decoders import VideoDecoder
from torchcodec.transforms import Resize

from raypipe.decode.journal import unmarked
from raypipe.decode.spec import ORIGINAL_SIZE, check_device
from raypipe.errors import DecodeError
from raypipe.storage import Storage
from raypipe.video import VideoIndex, read_ranged_index, read_video_index

SeekMode = Literal["exact", "approximate", "index"]
"""``index``: by the frames that the file's own index lists, for a file that is not to be read from end to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoOptions:
    """How a video is opened."""

    resize: tuple[int, int] | Literal["original"] = ORIGINAL_SIZE
    device: str = "cpu"


class OpenVideo:
    """A video with its decoder and the index of its frames. Not for use by several threads at once.

    A file with a constant frame rate is opened without a scan (2 ms instead of 20 ms for 10,000 frames); every frame
    that comes back is compared with the index, and where one is not the frame asked for, the file is scanned after all.
    """

    def __init__(self, storage: Storage, name: str, options: VideoOptions = VideoOptions()) -> None:  # noqa: B008
        self._storage = storage
        self._name = name
        self._options = options
        # A cache keeps the file, or the parts of it in use, for as long as it is open here.
        with unmarked():
            self._held = storage.hold(name)
            self._ranged = storage.open_ranged(name) if self._held is None and storage.is_ranged(name) else None
        self.index = _read_index(storage, name)
        self._seek_mode: SeekMode = "approximate" if _has_constant_rate(self.index) else self._sure_mode
        self._decoder = self._open()
        self._check_count()

    @property
    def _sure_mode(self) -> SeekMode:
        return "index" if self._ranged is not None and self.index.timescale else "exact"

    @property
    def place(self) -> str:
        """The path of the file, for messages."""
        return self._storage.locate(self._name)

    def _open(self) -> VideoDecoder:
        source: Any = self._held.path if self._held is not None else self._ranged
        seek: dict[str, Any] = {"seek_mode": self._seek_mode}
        if self._seek_mode == "index":
            seek = {"custom_frame_mappings": _frame_mappings(self.index)}
        return _open_decoder(self._storage, self._name, seek, self._options, source)

    def need(self, frames: NDArray[np.int64]) -> None:
        """Have what decoding these frames reads on this node, of a remote file of which only parts are kept."""
        if self._ranged is not None:
            with unmarked():
                self._ranged.need(*self.index.byte_range(frames))

    def read_frames(self, frames: NDArray[np.int64]) -> torch.Tensor:
        """Return the frames with these ascending numbers: ``(n, height, width, 3)`` uint8, decoded in one pass."""
        try:
            pixels, pts_s = self._decode(frames)
        except (RuntimeError, IndexError, ValueError) as error:
            raise DecodeError(
                f"cannot decode frames {frames[0]} to {frames[-1]} of {self.place!r}: {error}. Fetch the file again, "
                f"or leave its episodes out."
            ) from error
        wanted_s = self.index.pts_s[frames]
        is_right = np.abs(pts_s - wanted_s) < 1e-4
        if is_right.all():
            return pixels
        if self._seek_mode == "approximate":
            self._seek_mode = self._sure_mode
            self._decoder = self._open()
            return self.read_frames(frames)
        wrong = int(np.argmin(is_right))
        raise DecodeError(
            f"frame {frames[wrong]} of {self.place!r} is at {wanted_s[wrong]:.4f} s by the file's index and came out "
            f"at {pts_s[wrong]:.4f} s; re-encode the file, or leave its episodes out"
        )

    def _decode(self, frames: NDArray[np.int64]) -> tuple[torch.Tensor, NDArray[np.float64]]:
        self.need(frames)
        first, last = int(frames[0]), int(frames[-1])
        if last - first + 1 == len(frames):
            decoded = self._decoder.get_frames_in_range(first, last + 1)
        else:
            decoded = self._decoder.get_frames_at(indices=frames.tolist())
        return decoded.data, decoded.pts_seconds.cpu().numpy()

    def _check_count(self) -> None:
        if len(self._decoder) != len(self.index) and self._seek_mode == "approximate":
            # Without a scan the header counts, which knows nothing of an edit list that cuts frames off.
            self._seek_mode = self._sure_mode
            self._decoder = self._open()
        if len(self._decoder) != len(self.index):
            raise DecodeError(
                f"{self.place!r} lists {len(self.index)} frames in its index and holds {len(self._decoder)}; the file "
                f"is cut off or was joined wrongly. Fetch it again, or re-encode it."
            )


def open_video(storage: Storage, name: str) -> OpenVideo:
    """Open the video `name` for frames by number.

    Raises:
        DatasetError: the file is missing, cut off, or no video.
    """
    return OpenVideo(storage, name)


class VideoCache:
    """Open videos, the least recently used closed beyond `size`. Not for use by several threads at once."""

    def __init__(self, size: int, options: VideoOptions = VideoOptions()) -> None:  # noqa: B008
        self._size = size
        self._options = options
        self._videos: OrderedDict[tuple[str, str], OpenVideo] = OrderedDict()
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    def open(self, storage: Storage, name: str) -> OpenVideo:
        """Return the video `name` of a dataset, opened now or earlier."""
        key = (storage.uri, name)
        if key in self._videos:
            self.hits += 1
            self._videos.move_to_end(key)
            return self._videos[key]
        self.misses += 1
        if len(self._videos) >= self._size:
            # Before, so that a cache of the node may give its room to the one that is opened.
            self._videos.popitem(last=False)
            self.evictions += 1
        self._videos[key] = OpenVideo(storage, name, self._options)
        return self._videos[key]

    def forget(self, storage: Storage, name: str) -> None:
        """Close the video `name` of a dataset, if it is open."""
        self._videos.pop((storage.uri, name), None)

    def clear(self) -> None:
        """Close all videos."""
        self._videos.clear()


class _Waiting:
    """A file whose bytes may have to come over the network: the decoder that reads it only waits for them."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int) -> Any:
        with unmarked():
            return self._file.read(size)

    def seek(self, offset: int, whence: int) -> Any:
        return self._file.seek(offset, whence)


def _read_index(storage: Storage, name: str) -> VideoIndex:
    try:
        with unmarked():
            return read_ranged_index(storage, name) if storage.is_ranged(name) else read_video_index(storage, name)
    except NotImplementedError:
        return _scan_index(_open_decoder(storage, name, {"seek_mode": "exact"}, VideoOptions()))


def _scan_index(decoder: VideoDecoder) -> VideoIndex:
    """Return the index of a video whose container has no plain one, by decoding all of it in pieces."""
    pieces = [
        decoder.get_frames_in_range(start, min(start + 64, len(decoder))).pts_seconds.numpy()
        for start in range(0, len(decoder), 64)
    ]
    # Where keyframes are is not known: calling every frame one makes no reader start at the wrong place,
    # since torchcodec seeks by its own index.
    pts_s = np.concatenate(pieces) if pieces else np.zeros(0)
    return VideoIndex(pts_s.astype(np.float64), np.ones(len(pts_s), dtype=np.bool_))


def _frame_mappings(index: VideoIndex) -> str:
    """Return the index in the form in which torchcodec takes it."""
    ticks = np.rint(index.pts_s * index.timescale).astype(np.int64)
    last = ticks[-1] - ticks[-2] if len(ticks) > 1 else 1
    columns = zip(ticks.tolist(), np.append(np.diff(ticks), last).tolist(), index.is_keyframe.tolist(), strict=True)
    frames = [{"pts": pts, "duration": duration, "key_frame": int(is_key)} for pts, duration, is_key in columns]
    return json.dumps({"frames": frames})


def _has_constant_rate(index: VideoIndex) -> bool:
    if len(index) < 2:
        return False
    even = np.linspace(0.0, index.pts_s[-1], len(index))
    return bool(np.abs(index.pts_s - even).max() < 1e-6)


def _open_decoder(
    storage: Storage, name: str, seek: dict[str, Any], options: VideoOptions, source: Any = None
) -> VideoDecoder:
    """Open a video for decoding; `source` is where a cache has it, a path or a file."""
    if source is None:
        with unmarked():
            source = storage.locate(name) if storage.is_local else storage.open_file(name)
    if not isinstance(source, str):
        source = _Waiting(source)
    arguments: dict[str, Any] = {"dimension_order": "NHWC", **seek, "num_ffmpeg_threads": 1}
    if options.resize != ORIGINAL_SIZE:
        arguments["transforms"] = [Resize(options.resize)]
    if options.device != "cpu":
        check_device(options.device)
        arguments["device"] = options.device
    try:
        return VideoDecoder(source, **arguments)
    except (RuntimeError, ValueError) as error:
        raise DecodeError(f"cannot open the video {storage.locate(name)!r}: {error}. Fetch the file again.") from error
