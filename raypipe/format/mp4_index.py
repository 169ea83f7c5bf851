"""Where the frames of an episode are in its mp4: the container's index and the first frame. No decoding.

The frame of a row is a whole number: its position in the episode plus the episode's first frame in the file. Float
timestamps decide only the first frame of each episode in a packed file.

::

    file      | 0 1 2 3 4 | 5 6 7 | . . | 8 9 10 11 |      episodes of 5, 3 and 4 frames, two unused frames
    first       0           5             10
"""

import functools
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError, DecodeError, RaypipeError, as_damage, without_episode
from raypipe.format.dataset_meta import DatasetMeta
from raypipe.format.mp4_boxes import (
    box_timescale,
    find_box,
    list_boxes,
    read_box,
    read_edit,
    sample_keyframes,
    sample_offsets,
    sample_pts,
    sample_sizes,
)
from raypipe.storage import Storage
from raypipe.text import counted, frames_text

_LEROBOT_GOP: Final = 2
"""The interval of LeRobot's recorder."""

_READ_AHEAD_BYTES: Final = 1 << 16
"""FFmpeg reads this much at a time, even past the last frame."""


@dataclass(frozen=True, slots=True)
class VideoIndex:
    """The frames of a video in presentation order."""

    pts_s: NDArray[np.float64]
    """When each frame is shown, in seconds, as FFmpeg counts."""
    is_keyframe: NDArray[np.bool_]
    timescale: int = 0
    """Ticks per second of the file; 0 if its index does not say."""
    packets: "Packets | None" = None
    """Where the frames are in the file; None if its index does not say."""

    def __len__(self) -> int:
        return len(self.pts_s)

    def byte_range(self, frames: NDArray[np.int64]) -> tuple[int, int]:
        """Return the byte range that decoding these frames reads, from the keyframe before them; empty if unknown."""
        return self.packets.byte_range(frames) if self.packets is not None and len(frames) else (0, 0)


@dataclass(frozen=True, slots=True)
class Packets:
    """Where the frames of a video are in its file, in decoding order."""

    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    keyframes: NDArray[np.int64]
    """Positions of keyframes, ascending."""
    place: NDArray[np.int64]
    """The position of each frame in decoding order, by presentation order."""

    def byte_range(self, frames: NDArray[np.int64]) -> tuple[int, int]:
        """Return start and stop of the bytes that decoding these frames reads."""
        places = self.place[frames]
        before = int(np.searchsorted(self.keyframes, places.min(), side="right")) - 1
        first = int(self.keyframes[before]) if before >= 0 else 0
        read = slice(first, int(places.max()) + 1)
        return int(self.offset[read].min()), int((self.offset[read] + self.size[read]).max()) + _READ_AHEAD_BYTES


@dataclass(frozen=True, slots=True)
class FirstFrames:
    """The first frame of each episode in one file."""

    frame: NDArray[np.int64]
    drift_s: NDArray[np.float64]
    """Distance of the frame's time from the ``from_timestamp`` of the episode table."""
    is_counted: bool
    """True if the lengths add up to all frames of the file, and so give the first frames exactly."""


def first_frames(
    from_timestamp: NDArray[np.float64], length: NDArray[np.int64], pts_s: NDArray[np.float64]
) -> FirstFrames:
    """Return the first frame of each episode of one file that has at least one frame.

    It is the frame nearest to ``from_timestamp``. If the lengths add up to all frames of the file, the lengths decide
    instead: ``from_timestamp`` is a running sum of rounded durations and drifts.
    """
    is_counted = int(length.sum()) == len(pts_s)
    if is_counted:
        order = np.argsort(from_timestamp, kind="stable")
        frame = np.empty(len(length), dtype=np.int64)
        frame[order] = np.cumsum(length[order]) - length[order]
    else:
        after = np.searchsorted(pts_s, from_timestamp).clip(0, len(pts_s) - 1)
        before = np.maximum(after - 1, 0)
        is_before = np.abs(pts_s[before] - from_timestamp) <= np.abs(pts_s[after] - from_timestamp)
        frame = np.where(is_before, before, after).astype(np.int64)
    return FirstFrames(frame, np.abs(pts_s[frame] - from_timestamp), is_counted)


def episode_first_frame(meta: DatasetMeta, row: int, camera: str, index: VideoIndex) -> int:
    """Return the number of the episode's first frame in its file.

    Raises:
        DecodeError: the file has no frame at the promised time, or ends before the episode does.
    """
    if len(index) == 0:
        raise _broken(meta, row, camera, "holds no frame")
    columns, length = meta.episodes.videos[camera], meta.episodes.length
    same = np.flatnonzero(
        (columns.chunk_index == columns.chunk_index[row]) & (columns.file_index == columns.file_index[row])
    )
    firsts = first_frames(columns.from_timestamp[same], length[same], index.pts_s)
    here = int(np.searchsorted(same, row))
    first = int(firsts.frame[here])
    if not firsts.is_counted and firsts.drift_s[here] > 0.5 / meta.fps:
        raise _broken(
            meta,
            row,
            camera,
            f"has no frame within half a frame of {columns.from_timestamp[row]:.4f} s, where the episode should "
            f"start; the nearest is at {index.pts_s[first]:.4f} s, and the file has {counted(len(index), 'frame')}",
        )
    if first + length[row] > len(index):
        needed = frames_text(first, first + int(length[row]))
        raise _broken(meta, row, camera, f"has {counted(len(index), 'frame')}, and the episode needs {needed}")
    return first


def _broken(meta: DatasetMeta, row: int, camera: str, what: str) -> DecodeError:
    episode, path = int(meta.episodes.episode_index[row]), meta.storage.locate(meta.video_file(row, camera))
    return DecodeError(
        f"episode {episode} of {meta.root!r}, camera {camera!r}: {path!r} {what}. Fetch the file again; "
        f"`ffprobe {path}` shows what it holds. {without_episode(episode, meta.root)}"
    )


def read_video_index(storage: Storage, name: str) -> VideoIndex:
    """Return the index of the mp4 `name`; reads only its ``moov`` box.

    raypipe parses it itself because no library in use gives it: torchcodec gives a frame's time only with its pixels,
    and FFmpeg's own index has decoding times, which differ from presentation times if there are B-frames.

    Raises:
        DatasetError: the file is missing, is not an mp4, or is cut off.
        NotImplementedError: the file is sound, but of a kind without a plain index (fragmented, or edited in
            several pieces); decode it to know its frames.
    """
    with read_moov(storage, name) as moov:
        return parse_moov(moov)


@contextmanager
def read_moov(storage: Storage, name: str) -> Iterator[bytes]:
    """Yield the ``moov`` box of the mp4 `name`, its index, to a body that parses it.

    Raises:
        DatasetError: the file is missing, is not an mp4, is cut off, or the body cannot parse it.
    """
    place = storage.locate(name)
    with storage.open_file(name) as stream, as_damage(lambda error: _damaged_video(storage, name, error)):
        moov = read_box(stream, b"moov")
    if moov is None:
        raise DatasetError(
            f"damaged video {place!r}: no index ('moov' box) in {storage.size_bytes(name)} bytes; the file is cut off, "
            f"or no mp4. Fetch the file again."
        )
    with as_damage(
        lambda error: DatasetError(
            f"damaged video {place!r}: its index cannot be read ({error}). Fetch the file again."
        )
    ):
        yield moov


def _damaged_video(storage: Storage, name: str, error: Exception) -> DatasetError:
    storage.check_no_pointer(name)
    return DatasetError(f"damaged video {storage.locate(name)!r}: {error}. Fetch the file again.")


def keyframe_interval(meta: DatasetMeta, camera: str) -> int:
    """Return the frames from one keyframe of a camera to the next, judged by its first video; 1 for images.

    Only the cost of decoding depends on it. So for a remote video the value in ``info.json`` is good enough; without
    one, and for a local video, read the index. If that cannot be read, return the value in ``info.json`` or LeRobot's
    default: the decoder raises the error.
    """
    feature = meta.features[camera]
    if feature.kind == "image" or not len(meta.episodes):
        return 1
    storage, name = meta.storage, meta.video_file(0, camera)
    if feature.gop and not storage.is_local:
        return feature.gop
    with suppress(RaypipeError, OSError, NotImplementedError):
        index = read_ranged_index(storage, name) if storage.is_ranged(name) else read_video_index(storage, name)
        keyframes = np.flatnonzero(index.is_keyframe)
        # A file with one keyframe gives no interval but its own length.
        gaps = np.diff(keyframes) if len(keyframes) > 1 else np.array([int(meta.episodes.length[0])])
        return max(1, int(np.median(gaps)))
    return feature.gop or _LEROBOT_GOP


def read_ranged_index(storage: Storage, name: str) -> VideoIndex:
    """Return the index of a remote mp4 that the node keeps by parts; cached, since reading it takes requests."""
    return _kept_index(storage, name, storage.version(name))


def forget_indexes() -> None:
    """Drop the cached indexes: the copy of a file was damaged."""
    _kept_index.cache_clear()


@functools.lru_cache(maxsize=256)
def _kept_index(storage: Storage, name: str, _: str) -> VideoIndex:
    # Cached by version: the file may have changed when a dataset is opened again.
    return read_video_index(storage, name)


def parse_moov(moov: bytes) -> VideoIndex:
    """Return the index in a ``moov`` box; see `read_video_index` for the kinds that it does not know."""
    if find_box(moov, b"mvex") is not None:
        raise NotImplementedError("a fragmented mp4")
    track = find_video_track(moov)
    samples = find_box(track, b"mdia", b"minf", b"stbl")
    header = find_box(track, b"mdia", b"mdhd")
    movie = find_box(moov, b"mvhd")
    if samples is None or header is None or movie is None:
        raise ValueError("no sample table")
    timescale = box_timescale(header)
    pts = sample_pts(samples)
    shift, stop = read_edit(find_box(track, b"edts", b"elst"), timescale, box_timescale(movie))
    # FFmpeg leaves out frames that an edit list cuts off, by rules that are not copied here.
    if len(pts) and (pts.min() + shift < 0 or pts.max() + shift >= stop):
        raise NotImplementedError("an mp4 whose edit list cuts frames off")
    order = np.argsort(pts, kind="stable")
    is_keyframe = sample_keyframes(samples, len(pts))
    packets = _packets(samples, is_keyframe, order)
    return VideoIndex((pts[order] + shift) / timescale, is_keyframe[order], timescale, packets)


def find_video_track(moov: bytes) -> bytes:
    """Return the first video track in a ``moov`` box."""
    tracks = [body for kind, body in list_boxes(moov) if kind == b"trak"]
    track = next((body for body in tracks if (find_box(body, b"mdia", b"hdlr") or b"")[8:12] == b"vide"), None)
    if track is None:
        raise ValueError("no video track")
    return track


def _packets(samples: bytes, is_keyframe: NDArray[np.bool_], order: NDArray[np.int64]) -> Packets | None:
    try:
        size = sample_sizes(samples)
        offset = sample_offsets(samples, size)
    except (NotImplementedError, ValueError, IndexError, OverflowError, struct.error):
        # The file can be decoded without knowing its packets; for a remote file more bytes are read then.
        return None
    return Packets(offset, size, np.flatnonzero(is_keyframe), order) if len(size) == len(order) else None
