"""The clip store: frames that a rank needs soon, decoded once, ahead of need, and held until they have left.

A clip is a few consecutive frames of an episode: the unit of decoding. The loader that assembles batches says which
clips the next batches need, in that order. An executor decodes each, and the store gives out its frames one by one.

::

    ask(clips of batch 7)    not there yet: their requests go to the executor      bytes in flight
    wait(clips of batch 4)   decoded by now, or waited for                         bytes held
    leave(frames of batch 4) a frame that has left is free, and a clip when all of its frames have

Decides when to decode a clip and how long to hold it. Does not know plans or Ray: the caller opens clips by their key,
and the executor decides where to decode them. The memory of frames and of batches is here too, and is used again.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError, RaypipeError

if TYPE_CHECKING:
    from raypipe.decode.executors import ClipExecutor, PendingClip

Pixels = NDArray[Any]
"""``(height, width, channels)`` of one frame."""

ClipKey = tuple[int, int]
"""The span of a clip, by its arrival number on the rank, and the number of the clip in its episode."""

_AHEAD_SHARE: Final = 4
"""A quarter of the memory may be in flight: enough that decoding never waits, little enough that the rest is held."""

_AGAIN_SHARE: Final = 64
"""The store may decode one byte in this many again, on top of half its memory once. It needs this when all live spans
of an epoch begin their first clips: 0.1% of an epoch of 80,000 frames. A bound that is always too small cannot hold."""

_BATCHES: Final = 2
"""Batches in memory at once: one in training, and one that is ready or being assembled."""

_SLAB_BYTES: Final = 64 << 20
"""glibc maps each allocation above 32 MB separately, so frames that stay do not lie between those that come and go.
Pages that nothing has written to take no memory."""

_MOST_IN_SLAB: Final = 1024
"""Most frames of a slab: each is a Python object from the start."""

_WAIT_S: Final = 1.0
_LOOK_S: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRequest:
    """The frames of one camera that the samples of a clip show."""

    dataset: int
    row: int
    """Of the episode table."""
    camera: str
    """By the dataset's own name."""
    frames: NDArray[np.int64]
    """Ascending positions in the episode."""
    span: tuple[int, int]
    """Frames of the episode that the store will need soon; the bytes of a remote file are fetched together."""
    frame_bytes: int
    stored: tuple[Any, ...] | None = None
    """What the rows hold, if they store the camera's images."""

    @property
    def num_bytes(self) -> int:
        """Memory of the decoded frames."""
        return len(self.frames) * self.frame_bytes

    def only(self, frames: Container[int]) -> "ClipRequest":
        """Return the request for only these frames."""
        kept = [i for i, frame in enumerate(self.frames.tolist()) if frame in frames]
        stored = tuple(self.stored[i] for i in kept) if self.stored is not None else None
        return replace(self, frames=self.frames[kept], stored=stored)


@dataclass(frozen=True, slots=True)
class OpenedClip:
    """What the store must know about a clip."""

    requests: Mapping[str, ClipRequest]
    """By camera of a batch."""
    num_uses: int
    """Samples of this clip that have yet to leave."""
    has_windows: bool
    """Whether samples show frames other than their own; then a frame stays until the last sample has left."""

    @property
    def num_bytes(self) -> int:
        """Memory of the decoded frames of all cameras."""
        return sum(request.num_bytes for request in self.requests.values())


@dataclass(slots=True)
class _HeldClip:
    opened: OpenedClip
    pending: dict[str, "PendingClip"]
    num_left: int
    frames: dict[str, dict[int, Pixels]] = field(default_factory=dict)
    """By camera and position in the episode, once they are there."""
    error: DatasetError | None = None
    is_ready: bool = False
    is_pooled: bool = False
    """Whether its frames lie in memory of the pool."""

    def left(self) -> OpenedClip:
        """Return the part of a decoded clip that has yet to leave."""
        requests = {camera: one.only(self.frames[camera]) for camera, one in self.opened.requests.items()}
        return OpenedClip(requests, self.num_left, self.opened.has_windows)


def _open_nothing(key: ClipKey) -> OpenedClip:
    raise RaypipeError(f"clip {key} is asked for, and the store was cleared")


class ClipStore:
    """The clips of one rank. One thread uses it; others may read the figures."""

    def __init__(
        self, open_clip: Callable[[ClipKey], OpenedClip], executor: "ClipExecutor", most_bytes: int, pool: "FramePool"
    ) -> None:
        """Start empty. `most_bytes` bounds the bytes in flight and held.

        The store always decodes what the next batch needs. To make room it drops frames of later batches, as long as
        few frames are decoded twice.
        """
        self._open_clip = open_clip
        self._executor = executor
        self._most_bytes = most_bytes
        self._clips: dict[ClipKey, _HeldClip] = {}
        self._opened: dict[ClipKey, OpenedClip] = {}
        self._by_span: dict[int, set[int]] = {}
        self._pool = pool
        self._again_bytes = most_bytes // 2
        """Bytes that the store may still decode again to keep the bound."""
        self._is_cleared = False
        pool.enter()
        self.held_bytes = 0
        self.in_flight_bytes = 0
        self.peak_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes in flight and held."""
        return self.held_bytes + self.in_flight_bytes

    def ask(self, keys: Iterable[ClipKey], *, is_next: bool) -> bool:
        """Start to decode the clips that are not there yet; return whether all have started.

        Stops at the first clip without room, unless the next batch waits for them.
        """
        wanted, is_done = dict.fromkeys(keys), True
        if is_next:
            self._make_room(wanted)
        num_before = len(self._clips)
        for key in wanted:
            if key in self._clips:
                continue
            opened = self._open(key)
            if not self._has_room(opened.num_bytes) and not is_next:
                is_done = False
                break
            pending = {camera: self._executor.submit(request) for camera, request in opened.requests.items()}
            self._clips[key] = _HeldClip(self._opened.pop(key), pending, opened.num_uses)
            self.in_flight_bytes += opened.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        if len(self._clips) > num_before:
            self._executor.flush()
        return is_done

    def _open(self, key: ClipKey) -> OpenedClip:
        if key not in self._opened:
            self._opened[key] = self._open_clip(key)
            self._by_span.setdefault(key[0], set()).add(key[1])
        return self._opened[key]

    def _has_room(self, wanted: int) -> bool:
        return (
            self.num_bytes + wanted <= self._most_bytes
            and self.in_flight_bytes + wanted <= self._most_bytes // _AHEAD_SHARE
        )

    def _make_room(self, wanted: Collection[ClipKey]) -> None:
        """Drop frames of later batches, which then decode them again, until the clips of this batch fit."""
        missing = sum(self._open(key).num_bytes for key in wanted if key not in self._clips)
        self._again_bytes += missing // _AGAIN_SHARE
        # The clips that began last go first: they would stay longest.
        for key in [key for key in reversed(self._clips) if key not in wanted and self._clips[key].frames]:
            if self.num_bytes + missing <= self._most_bytes:
                return
            left = self._clips[key].left()
            if self._again_bytes < left.num_bytes:
                return
            self._again_bytes -= left.num_bytes
            self._opened[key] = left
            self._free(self._clips.pop(key))

    def wait(self, keys: Iterable[ClipKey]) -> dict[ClipKey, DatasetError]:
        """Wait for clips; return the errors of those that turn out to be bad."""
        errors = {}
        for key in dict.fromkeys(keys):
            clip = self._clips[key]
            if not clip.is_ready:
                self._receive(clip)
                if clip.error is not None:
                    errors[key] = clip.error
        return errors

    def frames(self, key: ClipKey, camera: str) -> Mapping[int, Pixels] | None:
        """Return the frames of a camera by their position in the episode; None if the dataset lacks the camera."""
        return self._clips[key].frames.get(camera)

    def leave(self, samples: Iterable[tuple[ClipKey, int]]) -> None:
        """Note that samples (clip and frame) have left, and free the frames that no other sample shows."""
        for key, frame in samples:
            clip = self._clips.get(key)
            if clip is None:
                continue
            clip.num_left -= 1
            if clip.num_left <= 0:
                self._drop(key)
                continue
            for camera, frames in clip.frames.items() if not clip.opened.has_windows else ():
                pixels = frames.pop(frame, None)
                if pixels is not None and clip.is_pooled:
                    self._let_go(clip, camera, [pixels])
            if clip.is_ready and not clip.is_pooled:
                self._copy(clip)

    def _copy(self, clip: _HeldClip) -> None:
        """Copy the frames of a clip that have yet to leave, to free the memory that it shares with other clips."""
        clip.is_pooled = True
        for camera, frames in clip.frames.items():
            request = clip.opened.requests[camera]
            self.held_bytes -= (len(request.frames) - len(frames)) * request.frame_bytes
            for number, pixels in frames.items():
                frames[number] = self._pool.keep(pixels)

    def clear(self) -> None:
        """Release everything; no more requests may follow."""
        for key in list(self._clips):
            self._drop(key)
        self._opened = {}
        self.held_bytes = self.in_flight_bytes = 0
        if not self._is_cleared:
            self._is_cleared = True
            self._pool.leave()
        # It belongs to the object that holds this store: as a cycle, the two would wait for the garbage collector.
        self._open_clip = _open_nothing

    def drop_spans(self, arrivals: Iterable[int]) -> None:
        """Release all clips of these spans."""
        for arrival in arrivals:
            for clip in list(self._by_span.get(arrival, ())):
                self._drop((arrival, clip))

    def _receive(self, clip: _HeldClip) -> None:
        clip.is_ready, clip.is_pooled = True, not self._executor.is_shared
        # Of every camera, also behind a bad one: memory of frames that nobody receives is not used again.
        for camera in list(clip.pending):
            request = clip.opened.requests[camera]
            try:
                frames = clip.pending.pop(camera).result()
                clip.frames[camera] = dict(zip(request.frames.tolist(), frames, strict=True))
                self.held_bytes += request.num_bytes
            except DatasetError as error:
                clip.error = clip.error or error
            finally:
                self.in_flight_bytes -= request.num_bytes
        if clip.error is not None:
            self._free(clip)

    def _drop(self, key: ClipKey) -> None:
        left = self._by_span.get(key[0], set())
        left.discard(key[1])
        if not left:
            self._by_span.pop(key[0], None)
        self._opened.pop(key, None)
        clip = self._clips.pop(key, None)
        # Another thread may close the store at the same time.
        if clip is not None:
            self._free(clip)

    def _free(self, clip: _HeldClip) -> None:
        pending, clip.pending = clip.pending, {}
        for camera, one in pending.items():
            self.in_flight_bytes -= clip.opened.requests[camera].num_bytes
            one.drop(self._pool)
        # Remove them from the clip first: memory given back twice would hold two frames at once.
        by_camera, clip.frames = clip.frames, {}
        for camera, frames in by_camera.items():
            if clip.is_pooled:
                self._let_go(clip, camera, list(frames.values()))
            else:
                self.held_bytes -= clip.opened.requests[camera].num_bytes

    def _let_go(self, clip: _HeldClip, camera: str, frames: list[Pixels]) -> None:
        self.held_bytes -= len(frames) * clip.opened.requests[camera].frame_bytes
        self._pool.give_back(frames)


class BatchBuffers:
    """Arrays for the pixels of batches, reused once no one holds them.

    The reference count of an array shows this: a tensor made from an array, and every view of that tensor, holds it.
    Threads may share the buffers: while one epoch follows another, both assemble batches.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[tuple[Any, ...], list[NDArray[Any]]] = {}
        self.is_asked = False
        """Whether the training loop waits for a batch: it releases what it holds only after it has that batch."""

    def take(self, camera: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return an array for a camera of a batch that no one else holds.

        A loop releases a batch when it has the next one; this waits for that before it makes a third array.
        """
        with self._lock:
            # Batches differ in length if bad data is left out: a shorter one is a view of a longer buffer.
            buffers = self._buffers.setdefault((camera, *shape[1:], np.dtype(dtype).num), [])
            free = self._wait_for_free(buffers, shape[0])
            if free is not None:
                # Extra buffers were made while a user held several at once.
                for i in reversed(range(len(buffers))):
                    if len(buffers) > _BATCHES and buffers[i] is not free and sys.getrefcount(buffers[i]) <= 2:
                        del buffers[i]
            else:
                longest = max([shape[0], *map(len, buffers)])
                buffers[:] = [buffer for buffer in buffers if len(buffer) == longest]
                free = np.empty((longest, *shape[1:]), dtype=dtype)
                buffers.append(free)
            return free[: shape[0]]

    def _wait_for_free(self, buffers: list[NDArray[Any]], length: int) -> NDArray[Any] | None:
        until = time.monotonic() + _WAIT_S
        while True:
            # In this order: a loop that asks has released its batch before.
            num_fitting = sum(len(buffer) >= length for buffer in buffers)
            is_last = self.is_asked or num_fitting < _BATCHES or time.monotonic() > until
            free = _find_free(buffers, length)
            if free is not None or is_last:
                return free
            time.sleep(_LOOK_S)


def _find_free(buffers: list[NDArray[Any]], length: int) -> NDArray[Any] | None:
    for i in range(len(buffers)):
        # The list and the argument of the call hold it; any further reference is a user's.
        if len(buffers[i]) >= length and sys.getrefcount(buffers[i]) <= 2:
            return buffers[i]
    return None


class FramePool:
    """Memory for frames that wait until they leave; the threads and epochs of a rank share it.

    The pool copies what a decoder or a task gives, and the original is released at once. Held for as long as frames
    wait, it would fragment the C library's pools (2.3 GB instead of 1.3 while 0.7 GB of frames wait), and an object of
    the object store would stay for its last frame. The copy costs 2% of decoding.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[tuple[int, ...], Any], list[Pixels]] = {}
        self.num_stores = 0
        """Stores that use the pool; without any, it keeps nothing."""

    def take(self, shape: tuple[int, ...], dtype: Any) -> Pixels:
        """Return memory for a frame that no one else has."""
        with self._lock:
            free = self._free.setdefault((shape, np.dtype(dtype)), [])
            if not free:
                frame_bytes = math.prod(shape) * np.dtype(dtype).itemsize
                num_in_slab = min(_MOST_IN_SLAB, max(1, _SLAB_BYTES // max(1, frame_bytes)))
                # Without a store nothing uses the rest of a slab.
                num_frames = num_in_slab if self.num_stores > 0 else 1
                free.extend(np.empty((num_frames, *shape), dtype))
            return free.pop()

    def keep(self, pixels: Pixels) -> Pixels:
        """Return a copy of `pixels` in memory of the pool."""
        kept = self.take(pixels.shape, pixels.dtype)
        kept[...] = pixels
        return kept

    def enter(self) -> None:
        """Note that a store uses the pool."""
        with self._lock:
            self.num_stores += 1

    def leave(self) -> None:
        """Note that a store is done; after the last one the pool releases its memory."""
        with self._lock:
            self.num_stores -= 1
            if self.num_stores <= 0:
                self._free = {}

    def give_back(self, frames: Iterable[Pixels]) -> None:
        """Take back the memory of frames for reuse; the caller must not read them any more."""
        with self._lock:
            # Frames of clips that were in flight come after the last store has left.
            for pixels in frames if self.num_stores > 0 else ():
                self._free.setdefault((pixels.shape, pixels.dtype), []).append(pixels)
