"""The index of an mp4: where every frame is, its codec and its size. No decoding.

The frame of a row is a whole number: its position in the episode plus the episode's first frame in the file. Float
timestamps decide only the first frame of each episode in a packed file.

::

    file      | 0 1 2 3 4 | 5 6 7 | . . | 8 9 10 11 |      episodes of 5, 3 and 4 frames, two unused frames
    first       0           5             10

First what the pipeline asks for, then the boxes of an mp4 and the tables of samples in them.
"""

import functools
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError, DecodeError, RaypipeError, as_damage, without_episode
from raypipe.format.dataset_meta import DatasetMeta
from raypipe.storage import Storage
from raypipe.text import MOST_ALIKE_FRAMES, MOST_INDEX_BYTES, MOST_VIDEO_FRAMES, counted, frames_text

_LEROBOT_GOP: Final = 2
"""The interval of LeRobot's recorder."""

_READ_AHEAD_BYTES: Final = 1 << 16
"""FFmpeg reads this much at a time, even past the last frame."""

_CODECS: Final = {
    alias: codec
    for codec, aliases in {
        "h264": "avc avc1 avc3 x264 libx264 h.264",
        "hevc": "h265 h.265 hvc1 hev1 libx265",
        "av1": "av01 libsvtav1 libaom-av1 libdav1d",
        "vp9": "vp09 libvpx-vp9",
        "vp8": "vp08",
        "mpeg4": "mp4v",
        "mjpeg": "mjpg jpeg",
        "ffv1": "FFV1",
    }.items()
    for alias in aliases.split()
}
"""FFmpeg's names by the four letters in files, and by the names that datasets use in addition."""


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
        if self.packets is None or not len(frames):
            return 0, 0
        offset, size, keyframes = self.packets.offset, self.packets.size, self.packets.keyframes
        places = self.packets.place[frames]
        before = int(np.searchsorted(keyframes, places.min(), side="right")) - 1
        first = int(keyframes[before]) if before >= 0 else 0
        read = slice(first, int(places.max()) + 1)
        return int(offset[read].min()), int((offset[read] + size[read]).max()) + _READ_AHEAD_BYTES


@dataclass(frozen=True, slots=True)
class Packets:
    """Where the frames of a video are in its file, in decoding order."""

    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    keyframes: NDArray[np.int64]
    """Positions of keyframes, ascending."""
    place: NDArray[np.int64]
    """The position of each frame in decoding order, by presentation order."""


@dataclass(frozen=True, slots=True)
class FirstFrames:
    """The first frame of each episode in one file."""

    frame: NDArray[np.int64]
    drift_s: NDArray[np.float64]
    """Distance of the frame's time from the ``from_timestamp`` of the episode table; infinite if that is no number."""
    is_counted: bool
    """True if the lengths add up to all frames of the file, and so give the first frames exactly."""


def first_frames(
    from_timestamp: NDArray[np.float64], length: NDArray[np.int64], pts_s: NDArray[np.float64]
) -> FirstFrames:
    """Return the first frame of each episode of one file that has at least one frame.

    It is the frame nearest to ``from_timestamp``. If the lengths add up to all frames of the file, the lengths decide
    instead: ``from_timestamp`` is a running sum of rounded durations and drifts.
    """
    # Without a time, the place of an episode among the others is unknown.
    is_counted = int(length.sum()) == len(pts_s) and bool(np.isfinite(from_timestamp).all())
    if is_counted:
        order = np.argsort(from_timestamp, kind="stable")
        frame = np.empty(len(length), dtype=np.int64)
        frame[order] = np.cumsum(length[order]) - length[order]
    else:
        after = np.searchsorted(pts_s, from_timestamp).clip(0, len(pts_s) - 1)
        before = np.maximum(after - 1, 0)
        is_before = np.abs(pts_s[before] - from_timestamp) <= np.abs(pts_s[after] - from_timestamp)
        frame = np.where(is_before, before, after).astype(np.int64)
    drift_s = np.abs(pts_s[frame] - from_timestamp)
    return FirstFrames(frame, np.where(np.isnan(drift_s), np.inf, drift_s), is_counted)


def episode_first_frame(meta: DatasetMeta, row: int, camera: str, index: VideoIndex) -> int:
    """Return the number of the episode's first frame in its file.

    Raises:
        DecodeError: the file has no frame at the promised time, or ends before the episode does.
    """
    if len(index) == 0:
        raise _broken(meta, row, camera, "holds no frame")
    columns, length = meta.episodes.videos[camera], meta.episodes.length
    same = columns.rows_of_file(row)
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
    unread = f"damaged video {place!r}: its index cannot be read"
    with as_damage(lambda error: DatasetError(f"{unread} ({error}). Fetch the file again.")):
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
    samples, timescale, pts = parse_times(moov)
    order = np.argsort(pts, kind="stable")
    is_keyframe = sample_keyframes(samples, len(pts))
    packets = None
    # A file can be decoded without knowing its packets; of a remote file more bytes are read then.
    with suppress(NotImplementedError, ValueError, IndexError, OverflowError, struct.error):
        packets = Packets(*sample_places(samples, len(pts)), np.flatnonzero(is_keyframe), order)
    return VideoIndex(pts[order] / timescale, is_keyframe[order], timescale, packets)


def parse_times(moov: bytes) -> tuple[bytes, int, NDArray[np.int64]]:
    """Return the tables of samples in a ``moov`` box, the ticks per second, and when each sample is shown.

    The times are ticks after the edit list, in decoding order.
    """
    if find_box(moov, b"mvex") is not None:
        raise NotImplementedError("a fragmented mp4")
    track = find_video_track(moov)
    samples = need_box(track, b"mdia", b"minf", b"stbl")
    timescale = box_timescale(need_box(track, b"mdia", b"mdhd"))
    pts = sample_pts(samples)
    shift, stop = read_edit(find_box(track, b"edts", b"elst"), timescale, box_timescale(need_box(moov, b"mvhd")))
    # FFmpeg leaves out frames that an edit list cuts off, by rules that are not copied here.
    if len(pts) and (pts.min() + shift < 0 or pts.max() + shift >= stop):
        raise NotImplementedError("an mp4 whose edit list cuts frames off")
    return samples, timescale, pts + shift


def find_video_track(moov: bytes) -> bytes:
    """Return the first video track in a ``moov`` box."""
    tracks = [body for kind, body in list_boxes(moov) if kind == b"trak"]
    track = next((body for body in tracks if (find_box(body, b"mdia", b"hdlr") or b"")[8:12] == b"vide"), None)
    if track is None:
        raise ValueError("no video track")
    return track


@dataclass(frozen=True, slots=True)
class VideoFormat:
    """Codec and size of a video."""

    codec: str
    """FFmpeg's name, or the four letters in the file if `_CODECS` lacks them."""
    height: int
    width: int
    """Size of a frame as shown, rotated if the file says so."""


def same_codec(declared: str, found: str) -> bool:
    """Return whether a declared name means the codec of a file."""
    name = declared.lower()
    return _CODECS.get(name, name) == found


def read_video_format(storage: Storage, name: str) -> VideoFormat:
    """Return the format of the mp4 `name`; also works for files without a plain index, such as fragmented ones."""
    with read_moov(storage, name) as moov:
        return parse_video_format(moov)


def parse_video_format(moov: bytes) -> VideoFormat:
    """Return the format that a ``moov`` box gives.

    Raises:
        ValueError, struct.error: it gives none.
    """
    track = find_video_track(moov)
    body = need_box(track, b"mdia", b"minf", b"stbl", b"stsd")
    # A full box with a count, then the entry: size, four letters, 24 bytes, width, height.
    (letters,) = struct.unpack_from(">4s", body, 12)
    width, height = struct.unpack_from(">HH", body, 8 + 32)
    header = find_box(track, b"tkhd")
    if header is not None:
        # The matrix comes before the two 32-bit sizes at the end of the box.
        a, b, _, c, d = struct.unpack_from(">5i", header, len(header) - 8 - 36)
        is_quarter_turn = a == 0 and d == 0 and b != 0 and c != 0
        width, height = (height, width) if is_quarter_turn else (width, height)
    name = letters.decode("latin-1")
    return VideoFormat(_CODECS.get(name, name), int(height), int(width))


def read_box(stream: IO[bytes], wanted: bytes) -> bytes | None:
    """Return the content of the first top-level box `wanted`; seek over the others. None if there is none."""
    end = stream.seek(0, 2)
    position = 0
    while position + 8 <= end:
        stream.seek(position)
        kind, header, size = _box_header(stream.read(16), position, end)
        if position + size > end:
            raise EOFError(
                f"the box {kind!r} at byte {position} needs {size} bytes, the file has {end - position} left"
            )
        if kind == wanted:
            if size > MOST_INDEX_BYTES:
                raise EOFError(f"the box {kind!r} has {size} bytes, and an index may have {MOST_INDEX_BYTES}")
            stream.seek(position + header)
            return stream.read(size - header)
        position += size
    return None


def _box_header(head: bytes, position: int, end: int) -> tuple[bytes, int, int]:
    """Return the kind of the box at `position`, the bytes of its header, and its size with the header."""
    size, kind = struct.unpack_from(">I4s", head)
    header = 8
    if size == 1:
        (size,) = struct.unpack_from(">Q", head, 8)
        header = 16
    size = end - position if size == 0 else size
    if size < header:
        raise ValueError(f"a box {kind!r} of {size} bytes at byte {position}")
    return kind, header, size


def list_boxes(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield kind and content of the boxes inside a box."""
    position = 0
    while position + 8 <= len(content):
        kind, header, size = _box_header(content[position : position + 16], position, len(content))
        yield kind, content[position + header : position + size]
        position += size


def find_box(content: bytes, *path: bytes) -> bytes | None:
    """Return the content of the box at a path of kinds; None if there is none."""
    for wanted in path:
        found = next((body for kind, body in list_boxes(content) if kind == wanted), None)
        if found is None:
            return None
        content = found
    return content


def need_box(content: bytes, *path: bytes) -> bytes:
    """Return the content of the box at a path of kinds."""
    found = find_box(content, *path)
    if found is None:
        raise ValueError(f"no box {b'/'.join(path).decode('latin-1')!r}")
    return found


def box_timescale(header: bytes) -> int:
    """Return the ticks per second in a header box."""
    (timescale,) = struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)
    if timescale == 0:
        raise ValueError("a time scale of 0")
    return int(timescale)


def box_numbers(body: bytes | None, width: int, *, signed: bool = False) -> NDArray[np.int64]:
    """Return the table of a full box whose entries are `width` 32-bit numbers."""
    if body is None:
        return np.zeros((0, width), dtype=np.int64)
    (count,) = struct.unpack_from(">I", body, 4)
    table = np.frombuffer(body, dtype=">i4" if signed else ">u4", count=count * width, offset=8)
    return table.reshape(count, width).astype(np.int64)


def sample_pts(samples: bytes) -> NDArray[np.int64]:
    """Return the presentation time of every sample, in decoding order, in ticks, before any edit."""
    steps = sample_durations(samples)
    pts = np.cumsum(steps) - steps
    offsets = box_numbers(find_box(samples, b"ctts"), 2, signed=True)
    if len(offsets):
        pts = pts + _spread(offsets, samples)[: len(pts)]
    return pts


def sample_durations(samples: bytes) -> NDArray[np.int64]:
    """Return how long every sample is shown, in decoding order, in ticks."""
    return _spread(box_numbers(find_box(samples, b"stts"), 2), samples)


def _spread(table: NDArray[np.int64], samples: bytes) -> NDArray[np.int64]:
    """Return the second number of every entry, repeated as often as the first one says."""
    count, most = int(table[:, 0].sum()), _count_samples(samples)
    if count > most or table[:, 0].min(initial=0) < 0:
        raise ValueError(f"times of {count} frames, and sizes of {most}")
    return np.repeat(table[:, 1], table[:, 0])


def _count_samples(samples: bytes) -> int:
    """Return the number of samples from the table of sizes, which lists each; the other tables have runs."""
    body = find_box(samples, b"stsz")
    packed = need_box(samples, b"stz2") if body is None else b""
    common, count = struct.unpack_from(">II", body or packed, 4)
    listed = MOST_ALIKE_FRAMES if common else (len(body or b"") - 12) // 4
    if body is None:
        listed = (len(packed) - 12) * 8 // max(common & 255, 4)
    if count > min(listed, MOST_VIDEO_FRAMES):
        raise ValueError(f"a table of {count} sizes, and there may be {min(listed, MOST_VIDEO_FRAMES)}")
    return int(count)


def sample_keyframes(samples: bytes, count: int) -> NDArray[np.bool_]:
    """Return which samples are keyframes, in decoding order; all of them if the file lists none."""
    body = find_box(samples, b"stss")
    if body is None:
        return np.ones(count, dtype=np.bool_)
    is_keyframe = np.zeros(count, dtype=np.bool_)
    is_keyframe[box_numbers(body, 1)[:, 0] - 1] = True
    return is_keyframe


def sample_places(table: bytes, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each of `count` packets starts in the file, and its bytes, in decoding order."""
    size = _sample_sizes(table)
    if len(size) != count:
        raise ValueError(f"{count} times for {len(size)} frames")
    return _sample_offsets(table, size), size


def _sample_sizes(table: bytes) -> NDArray[np.int64]:
    """Return the bytes of every sample, in decoding order."""
    body = find_box(table, b"stsz")
    if body is None:
        raise NotImplementedError("an mp4 with packed packet sizes")
    common, count = struct.unpack_from(">I", body, 4)[0], _count_samples(table)
    if common:
        return np.full(count, common, dtype=np.int64)
    return np.frombuffer(body, dtype=">u4", count=count, offset=12).astype(np.int64)


def _sample_offsets(table: bytes, size: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each packet starts: packets are contiguous inside a chunk, and the file lists chunks."""
    wide = find_box(table, b"co64")
    dtype, body = (">u8", wide) if wide is not None else (">u4", need_box(table, b"stco"))
    (num_chunks,) = struct.unpack_from(">I", body, 4)
    chunk_offset = np.frombuffer(body, dtype=dtype, count=num_chunks, offset=8).astype(np.int64)
    runs = box_numbers(need_box(table, b"stsc"), 3)
    if len(runs) and runs[:, 2].max() > 1:
        raise NotImplementedError("an mp4 with several sample descriptions")
    repeats = np.diff(np.append(runs[:, 0], num_chunks + 1))
    per_chunk = np.repeat(runs[:, 1], repeats)
    if len(per_chunk) != num_chunks or per_chunk.sum() != len(size):
        raise ValueError(f"its chunks hold {int(per_chunk.sum())} packets, and it lists {len(size)}")
    before = np.cumsum(size) - size
    first = np.cumsum(per_chunk) - per_chunk
    start_of_chunk = np.where(per_chunk > 0, before[np.minimum(first, max(len(size) - 1, 0))], 0)
    return np.repeat(chunk_offset - start_of_chunk, per_chunk) + before


def read_edit(body: bytes | None, timescale: int, movie_timescale: int) -> tuple[int, float]:
    """Return the ticks that the edit list adds to every presentation time, and the tick at which it ends."""
    if body is None:
        return 0, float("inf")
    version, count = body[0], struct.unpack_from(">I", body, 4)[0]
    entry = ">QqI" if version == 1 else ">IiI"
    edits = [struct.unpack_from(entry, body, 8 + i * struct.calcsize(entry)) for i in range(count)]
    delay = 0
    if edits and edits[0][1] == -1:
        delay = edits.pop(0)[0] * timescale // movie_timescale
    if not edits:
        return delay, float("inf")
    if len(edits) > 1:
        raise NotImplementedError("an mp4 with several edits")
    duration, media_time, _ = edits[0]
    # A duration of 0 means all; a movie's clock is coarser than the video's, so allow one tick of it.
    stop = float("inf") if duration == 0 else delay + (duration + 1) * timescale / movie_timescale
    return delay - media_time, stop
