"""The boxes of an mp4: how to find them, and the tables of samples in them.

Pure functions on bytes, except `read_box`, which reads one box of a file and seeks over the others.
"""

import struct
from collections.abc import Iterator
from typing import IO

import numpy as np
from numpy.typing import NDArray

from raypipe.text import MOST_ALIKE_FRAMES, MOST_INDEX_BYTES, MOST_VIDEO_FRAMES


def read_box(stream: IO[bytes], wanted: bytes) -> bytes | None:
    """Return the content of the first top-level box `wanted`; seek over the others. None if there is none."""
    end = stream.seek(0, 2)
    position = 0
    while position + 8 <= end:
        stream.seek(position)
        size, kind = struct.unpack(">I4s", stream.read(8))
        header = 8
        if size == 1:
            (size,) = struct.unpack(">Q", stream.read(8))
            header = 16
        size = end - position if size == 0 else size
        if size < header:
            raise EOFError(f"a box {kind!r} of {size} bytes at byte {position}")
        if position + size > end:
            raise EOFError(
                f"the box {kind!r} at byte {position} needs {size} bytes, the file has {end - position} left"
            )
        if kind == wanted:
            if size > MOST_INDEX_BYTES:
                raise EOFError(f"the box {kind!r} has {size} bytes, and an index may have {MOST_INDEX_BYTES}")
            return stream.read(size - header)
        position += size
    return None


def list_boxes(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield kind and content of the boxes inside a box."""
    position = 0
    while position + 8 <= len(content):
        size, kind = struct.unpack_from(">I4s", content, position)
        header = 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", content, position + 8)
            header = 16
        size = len(content) - position if size == 0 else size
        if size < header:
            raise ValueError(f"a box {kind!r} of {size} bytes")
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


def sample_sizes(table: bytes) -> NDArray[np.int64]:
    """Return the bytes of every sample, in decoding order."""
    body = find_box(table, b"stsz")
    if body is None:
        raise NotImplementedError("an mp4 with packed packet sizes")
    common, count = struct.unpack_from(">I", body, 4)[0], _count_samples(table)
    if common:
        return np.full(count, common, dtype=np.int64)
    return np.frombuffer(body, dtype=">u4", count=count, offset=12).astype(np.int64)


def sample_offsets(table: bytes, size: NDArray[np.int64]) -> NDArray[np.int64]:
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
