"""The frames of one span of one camera, decoded in one pass in file order."""

import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from raypipe.decode.images import decode_image
from raypipe.decode.isolated import IsolatedRequest, decode_isolated
from raypipe.decode.journal import process_journal, unmarked, video_key
from raypipe.decode.spec import ORIGINAL_SIZE, DecodeSpec
from raypipe.decode.videos import OpenVideo, VideoCache, VideoOptions
from raypipe.errors import DecodeError, DownloadError, RaypipeError
from raypipe.metadata import DatasetMeta
from raypipe.storage import is_transient, retry_transient
from raypipe.video import episode_first_frame, read_ranged_index

_PIECE_BYTES: Final = 16 << 20
"""Below the 32 MB at which the C library stops keeping freed memory."""

_MAX_DEATHS: Final = 2
"""Processes that may die over an episode before it is decoded in a subprocess. One may have been killed for a reason of
its own."""


@dataclass(slots=True)
class DecodeCounts:
    """What was decoded, since the start."""

    frames: int = 0
    seconds: float = 0.0
    """Summed over threads."""
    hits: int = 0
    misses: int = 0
    evictions: int = 0


class SpanDecoder:
    """Decodes frames of episodes of one dataset; every thread that uses it has its own open videos."""

    def __init__(self, meta: DatasetMeta, spec: DecodeSpec, local: threading.local | None = None) -> None:
        """Prepare to decode; opens nothing yet.

        Args:
            local: where threads keep their open videos; decoders of a mixture share one, and `spec.open_videos`.
        """
        self._meta = meta
        self._spec = spec
        # A thread's open videos end with the thread: only their counts are kept here.
        self._local = local or threading.local()
        self._lock = threading.Lock()
        self._counts = DecodeCounts()
        self._isolated: set[int] = set()

    def counts(self) -> DecodeCounts:
        """Return what was decoded so far, over all threads."""
        with self._lock:
            return replace(self._counts)

    def decode_video(
        self, row: int, camera: str, frames: NDArray[np.int64], *, span: NDArray[np.int64] | None = None
    ) -> torch.Tensor:
        """Return frames of the episode in row `row` of the episode table: ``(n, height, width, 3)`` uint8.

        Args:
            frames: ascending positions in the episode.
            span: all frames that are decoded one piece after the other; where they are remote they come at once.

        Raises:
            DatasetError: the video is missing, damaged, or lacks a frame.
        """
        started = time.perf_counter()
        name = self._meta.video_file(row, camera)
        try:
            pixels = self._read_guarded(row, camera, frames, frames if span is None else span)
        except (RaypipeError, OSError) as error:
            episode = int(self._meta.episodes.episode_index[row])
            error.add_note(f"while decoding camera {camera!r} of episode {episode} of {self._meta.root}")
            place = f"{self._meta.storage.locate(name)!r} of {self._meta.root!r}"
            if is_transient(error):
                raise DownloadError(f"cannot read {place}: {error}") from error
            if isinstance(error, OSError):
                raise DecodeError(f"cannot read {place}: {error}") from error
            raise
        where = f"episode {self._meta.episodes.episode_index[row]} of {self._meta.root!r}"
        self._check_size(pixels, camera, f"{where}, in {self._meta.storage.locate(name)!r},")
        self._count(len(frames), started)
        return pixels

    def _check_size(self, pixels: torch.Tensor, camera: str, place: str) -> None:
        wanted = self._spec.frame_shape(self._meta.features[camera])
        if tuple(pixels.shape[-3:]) != wanted:
            raise DecodeError(
                f"camera {camera!r} of {place} has frames of {tuple(pixels.shape[-3:])}, and info.json declares "
                f"{wanted} (height, width, channels). Correct info.json, leave the episode out, or choose a size by "
                f"decode={{'resize': (height, width)}}"
            )

    def read_video(self, row: int, camera: str, frames: NDArray[np.int64]) -> torch.Tensor:
        """Return what `decode_video` does, in this process, however many have died over it: for the subprocess."""
        return retry_transient(lambda: self._read(row, camera, frames, frames), _sleep_unmarked)

    def _read_guarded(self, row: int, camera: str, frames: NDArray[np.int64], span: NDArray[np.int64]) -> torch.Tensor:
        name, episode = self._meta.video_file(row, camera), int(self._meta.episodes.episode_index[row])
        key, journal = video_key(self._meta.storage, name, episode, camera), process_journal()
        num_deaths = journal.count_deaths(key)
        if num_deaths < _MAX_DEATHS:
            return retry_transient(lambda: self._read_marked(key, row, camera, frames, span))
        if key not in self._isolated:
            self._isolated.add(key)
            warnings.warn(
                f"decoding camera {camera!r} of episode {episode} of {self._meta.root!r} in a subprocess, which is "
                f"slower: {num_deaths} processes on this machine died while they decoded it from "
                f"{self._meta.storage.locate(name)!r}",
                stacklevel=2,
            )
        request = IsolatedRequest(meta=self._meta, spec=self._spec, row=row, camera=camera, frames=frames)
        # Here, so that it passes the gate of this process, and the subprocess finds it on the node.
        with retry_transient(lambda: self._fetch(row, camera, frames)):
            return decode_isolated(request)

    def _read_marked(
        self, key: int, row: int, camera: str, frames: NDArray[np.int64], span: NDArray[np.int64]
    ) -> torch.Tensor:
        with process_journal().marking(key):
            return self._read(row, camera, frames, span)

    def _fetch(self, row: int, camera: str, frames: NDArray[np.int64]) -> AbstractContextManager[Any]:
        """Have what decoding these frames reads on this node, and give what keeps it there; nothing without a cache."""
        storage, name = self._meta.storage, self._meta.video_file(row, camera)
        try:
            held = storage.hold(name)
            if held is not None:
                return held
            if not storage.is_ranged(name):
                return nullcontext()
            index = read_ranged_index(storage, name)
            parts = storage.open_ranged(name)
            parts.need(*index.byte_range(episode_first_frame(self._meta, row, camera, index) + frames))
            return parts
        except NotImplementedError:
            # Of a file without a plain index nobody knows what decoding reads.
            return nullcontext()
        except DownloadError:
            # As in `_read`.
            self._clear()
            raise

    def _read(self, row: int, camera: str, frames: NDArray[np.int64], span: NDArray[np.int64]) -> torch.Tensor:
        name = self._meta.video_file(row, camera)
        try:
            video = self._open(name)
            first = episode_first_frame(self._meta, row, camera, video.index)
            video.need(first + span)
            return video.read_frames(first + frames)
        except DownloadError:
            # Where a cache has no room, that is because of open videos: what is tried again shall find some.
            self._clear()
            raise
        except (RaypipeError, OSError):
            # A decoder that has failed once is not asked again.
            self._local.cache.forget(self._meta.storage, name)
            raise

    def _clear(self) -> None:
        if hasattr(self._local, "cache"):
            self._local.cache.clear()

    def prefetch(self, row: int, camera: str, frames: NDArray[np.int64]) -> "Future[bool] | None":
        """Start to fetch what decoding these frames reads, where it is remote; may read the index of a video first."""
        storage, name = self._meta.storage, self._meta.video_file(row, camera)
        if not storage.is_ranged(name):
            return storage.prefetch(name)
        index = read_ranged_index(storage, name)
        start, stop = index.byte_range(episode_first_frame(self._meta, row, camera, index) + frames)
        return storage.prefetch_part(name, start, stop) if start < stop else None

    def decode_pieces(self, row: int, camera: str, frames: NDArray[np.int64]) -> list[torch.Tensor]:
        """Return what `decode_video` does, cut into pieces of up to 16 MB, still decoded in one pass.

        A piece that is let go is used again by the allocator; larger ones go back to the system, and a third of the
        decoding time goes into the page faults of the next.
        """
        height, width, channels = self._spec.frame_shape(self._meta.features[camera])
        size = max(1, _PIECE_BYTES // max(1, height * width * channels))
        starts = range(0, len(frames), size)
        return [self.decode_video(row, camera, frames[i : i + size], span=frames) for i in starts]

    def decode_images(self, row: int, camera: str, stored: Sequence[Any], frames: NDArray[np.int64]) -> torch.Tensor:
        """Return images stored in rows: ``(n, height, width, channels)``.

        Args:
            stored: what the rows hold, one per frame.
            frames: positions in the episode, for messages.
        """
        started = time.perf_counter()
        feature = self._meta.features[camera]
        where = f"episode {self._meta.episodes.episode_index[row]} of {self._meta.root!r}"
        images = []
        for content, frame in zip(stored, frames.tolist(), strict=True):
            image = self._resized(decode_image(content, feature, f"{where}, frame {frame}")[None])[0]
            self._check_size(image, camera, f"{where}, frame {frame},")
            images.append(image)
        pixels = torch.stack(images)
        self._count(len(frames), started)
        return pixels

    def _resized(self, pixels: torch.Tensor) -> torch.Tensor:
        if self._spec.resize == ORIGINAL_SIZE:
            return pixels
        resized = torch.nn.functional.interpolate(
            pixels.permute(0, 3, 1, 2).float(), size=list(self._spec.resize), mode="bilinear", antialias=True
        ).permute(0, 2, 3, 1)
        return resized.round().clamp(0, 255).to(torch.uint8) if pixels.dtype == torch.uint8 else resized

    def _open(self, name: str) -> OpenVideo:
        if not hasattr(self._local, "cache"):
            options = VideoOptions(resize=self._spec.resize, device=self._spec.device)
            self._local.cache = VideoCache(self._spec.open_videos, options)
        cache: VideoCache = self._local.cache
        hits, misses, evictions = cache.hits, cache.misses, cache.evictions
        video = cache.open(self._meta.storage, name)
        with self._lock:
            self._counts.hits += cache.hits - hits
            self._counts.misses += cache.misses - misses
            self._counts.evictions += cache.evictions - evictions
        return video

    def _count(self, num_frames: int, started: float) -> None:
        with self._lock:
            self._counts.frames += num_frames
            self._counts.seconds += time.perf_counter() - started


def _sleep_unmarked(wait_s: float) -> None:
    with unmarked():
        time.sleep(wait_s)
