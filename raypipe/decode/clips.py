"""The clip store: frames that a rank needs soon, decoded once, ahead of need, and held until they have left.

A clip is a few consecutive frames of an episode: the unit of decoding. The loader that assembles batches says which
clips the next batches need, in that order. An executor decodes each, and the store gives out its frames one by one.

::

    ask(clips of batch 7)    not there yet: their requests go to the executor      bytes in flight
    wait(clips of batch 4)   decoded by now, or waited for                         bytes held
    leave(frames of batch 4) a frame that has left is free, and a clip when all of its frames have

Decides when to decode a clip and how long to hold it. Does not know plans or Ray: the caller opens clips by their key,
and the executor decides where to decode them.
"""

import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from raypipe.decode.buffers import FramePool, Pixels
from raypipe.decode.journal import process_journal, unmarked
from raypipe.errors import DatasetError, RaypipeError

if TYPE_CHECKING:
    from raypipe.decode.frames import FrameDecoder

ClipKey = tuple[int, int]
"""The span of a clip, by its arrival number on the rank, and the number of the clip in its episode."""

_AHEAD_SHARE: Final = 4
"""A quarter of the memory may be in flight: enough that decoding never waits, little enough that the rest is held."""

_AGAIN_SHARE: Final = 64
"""The store may decode one byte in this many again, on top of half its memory once. It needs this when all live spans
of an epoch begin their first clips: 0.1% of an epoch of 80,000 frames. A bound that is always too small cannot hold."""

_MOST_IN_JOB: Final = 8
"""Clips that a thread decodes before it hands them over."""

_SETTING_CORES: Final = threading.Lock()

DecodedClip = list[Pixels] | Exception
"""Frames of a clip, or why there are none."""


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


class Pending(Protocol):
    """A request on its way."""

    def result(self) -> Sequence[Pixels]:
        """Wait for the frames and return them; raise what decoding raised."""
        ...

    def drop(self, pool: FramePool) -> None:
        """Ask for the frames no more: those in memory of `pool` go back to it once they are there."""
        ...


class ClipExecutor(Protocol):
    """Where clips are decoded. It starts the requests in their order."""

    @property
    def finished_at(self) -> float:
        """When the clip taken last was decoded, in seconds since 1970; 0 if this process decoded it."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether clips share memory, which stays as long as any frame in it is held.

        Otherwise the frames lie in the pool of the store.
        """
        ...

    def warm_up(self) -> None:
        """Import the codec while rows are still being read."""
        ...

    def submit(self, request: ClipRequest) -> Pending:
        """Queue a clip of one camera for decoding."""
        ...

    def flush(self) -> None:
        """Start the submitted requests: no more come for now."""
        ...

    def close(self) -> None:
        """Decode nothing more; requests that have begun finish."""
        ...


def decode_clip(
    decoders: "Sequence[FrameDecoder]", request: ClipRequest, pool: FramePool | None = None
) -> list[Pixels]:
    """Return the frames of a request, in memory of `pool` if there is one.

    Raises:
        DatasetError: the data is bad.
    """
    decoder = decoders[request.dataset]
    if request.stored is not None:
        with unmarked():
            images = decoder.decode_images(request.row, request.camera, request.stored, request.frames).cpu().numpy()
        return [pool.keep(image) for image in images] if pool else list(images)
    if pool is not None:
        return decoder.read_clip(request.row, request.camera, request.frames, pool, span=request.span)
    return list(decoder.decode_video(request.row, request.camera, request.frames, span=request.span).cpu().numpy())


def try_clip(decoders: "Sequence[FrameDecoder]", request: ClipRequest, pool: FramePool | None = None) -> DecodedClip:
    """Return the frames of a request or the error, so that a bad clip does not stop the others of its group."""
    try:
        return decode_clip(decoders, request, pool)
    except (RaypipeError, OSError) as error:
        return error


def decode_job(decoders: "Sequence[FrameDecoder]") -> AbstractContextManager[None]:
    """Return a context in which a thread decodes clips one after the other."""
    # A decoder that looks for kept frames may wait for a disk or a network between two clips.
    return nullcontext() if any(decoder.keeps_frames for decoder in decoders) else process_journal().job()


def take_clip(clips: list[DecodedClip | None], number: int) -> list[Pixels]:
    """Return one clip of a group and remove it from the group; raise what decoding raised."""
    clip, clips[number] = clips[number], None
    assert clip is not None, "a clip is taken once"
    if isinstance(clip, Exception):
        raise clip
    return clip


def use_one_core() -> None:
    """Let torch use one core in the calling thread, as torch's DataLoader does in its workers.

    OpenMP gives every thread that splits its work over the cores its own helper threads. If a process then has more of
    them than cores, OpenMP puts all helpers to sleep after every operation, including those of the training thread,
    and training steps take a fifth longer. raypipe's threads already share the work among themselves.
    """
    import torch

    # torch also uses the last number for threads that start later, so a short-lived thread puts the old one back.
    # One thread at a time: the next would take the 1 for the old number.
    with _SETTING_CORES, ThreadPoolExecutor(1) as other:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        other.submit(torch.set_num_threads, before).result()


@dataclass(slots=True)
class _ThreadClip:
    request: ClipRequest
    job: "Future[list[DecodedClip | None]] | None" = None
    number: int = 0
    """In its job."""

    def result(self) -> list[Pixels]:
        assert self.job is not None, "what was submitted is flushed before it is waited for"
        return take_clip(self.job.result(), self.number)

    def drop(self, pool: FramePool) -> None:
        # A loop that is left closes the store in its own thread, maybe between `submit` and `flush` of another: then
        # the executor is closed, and decodes it no more.
        if self.job is not None:
            self.job.add_done_callback(lambda _: self._give_back(pool))

    def _give_back(self, pool: FramePool) -> None:
        # A bad clip has no frames, nor has one that was not begun when the executor was closed.
        with suppress(RaypipeError, OSError, CancelledError, IndexError):
            pool.give_back(self.result())


class ThreadExecutor:
    """Decodes in threads of this process."""

    finished_at = 0.0
    is_shared = False

    def __init__(self, decoders: "Callable[[], Sequence[FrameDecoder]]", num_threads: int, pool: FramePool) -> None:
        self._decoders = decoders
        self._pixels = pool
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "raypipe-decode", initializer=use_one_core)
        self._asked: list[_ThreadClip] = []
        self._is_closed = False

    def warm_up(self) -> None:
        """Import the codec in a thread."""
        self._pool.submit(self._decoders)

    def submit(self, request: ClipRequest) -> _ThreadClip:
        """Queue a clip of one camera; decoding starts at the next `flush`."""
        self._asked.append(_ThreadClip(request))
        return self._asked[-1]

    def flush(self) -> None:
        """Start the submitted clips, several to a job, since every job that ends wakes the thread that waits for it."""
        asked, self._asked = self._asked, []
        size = max(1, min(_MOST_IN_JOB, len(asked) // (2 * self._num_threads)))
        for first in range(0, len(asked), size):
            clips = asked[first : first + size]
            job = self._pool.submit(self._decode, [clip.request for clip in clips])
            for number, clip in enumerate(clips):
                clip.job, clip.number = job, number

    def close(self) -> None:
        """Decode nothing more; the clip that has begun finishes."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _decode(self, requests: Sequence[ClipRequest]) -> list[DecodedClip | None]:
        decoders = self._decoders()
        with decode_job(decoders):
            return [try_clip(decoders, request, self._pixels) for request in requests if not self._is_closed]


@dataclass(slots=True)
class _HeldClip:
    opened: OpenedClip
    pending: dict[str, Pending]
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
        self, open_clip: Callable[[ClipKey], OpenedClip], executor: ClipExecutor, most_bytes: int, pool: FramePool
    ) -> None:
        """Start empty.

        Args:
            open_clip: returns what a clip is made of.
            executor: decodes clips.
            most_bytes: bound on bytes in flight and held. The store always decodes what the next batch needs. To make
                room it drops frames of later batches, as long as few frames are decoded twice.
            pool: memory for frames.
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

    def is_bad(self, key: ClipKey) -> bool:
        """Return whether decoding a clip failed; call `wait` first."""
        clip = self._clips.get(key)
        return clip is not None and clip.error is not None

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
