"""What happens to a span between its arrival on a rank and its admission: its pixels are decoded, or probed."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from raypipe.block import BlockContext, CameraPart, SpanBlock, shown_frames, window_frames
from raypipe.errors import RaypipeError
from raypipe.packed import SpanRequest, span_request
from raypipe.plan import RankPlan
from raypipe.shuffle import SpanPixels, find_pixels

_AHEAD_THREADS: Final = 8
"""They ask for what comes next; the bytes themselves come in threads of the cache. Of a video that is kept by parts
they read the index first, one request after the other, and mostly wait: so there are more than cores."""

_MOST_FETCHES: Final = 4096
"""Older ones are done by then."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A span on a rank, and its pixels on their way."""

    block: SpanBlock
    pixels: dict[str, "Future[SpanPixels]"]
    probes: "tuple[Future[None], ...]"
    """Of videos that are decoded as frames leave: whether the span's first and last frame can be."""


class SpanOpener:
    """Starts decoding what did not come decoded, in the threads of a pool."""

    def __init__(self, context: BlockContext, pool: ThreadPoolExecutor) -> None:
        self._context = context
        self._pool = pool
        self._ahead = ThreadPoolExecutor(_AHEAD_THREADS, thread_name_prefix="raypipe-ahead")
        self._fetches: deque[Future[bool]] = deque(maxlen=_MOST_FETCHES)
        """Ahead, and perhaps not begun."""
        self._can_skip = context.bad_data.on_bad_episode == "skip"

    def open(self, block: SpanBlock) -> Arrived:
        """Start what there is to do before the span is admitted; nothing with one whose rows could not be read."""
        if self._can_skip and block.error[0]:
            return Arrived(block, {}, ())
        block.check()
        return Arrived(block, {**self._find_pixels(block), **self._decode(block)}, self._probe(block))

    def look_ahead(self, plan: RankPlan, arrivals: range) -> None:
        """Start to fetch the videos of spans that come next, where they are remote and decoded here.

        The plan says which they are long before they come.
        """
        if self._context.decode.where == "cluster":
            return
        for arrival in arrivals:
            storage = self._context.datasets[int(plan.queue.dataset[arrival])].meta.storage
            if storage.cache is not None and storage.cache.prefetch and not storage.is_local:
                # On a thread of its own: which bytes a span needs may be known only after a look at its video.
                self._ahead.submit(self._prefetch, span_request(plan, arrival))

    def close(self) -> None:
        """Fetch nothing more ahead; what has begun ends."""
        self._ahead.shutdown(wait=False, cancel_futures=True)
        while self._fetches:
            self._fetches.popleft().cancel()

    def _prefetch(self, request: SpanRequest) -> None:
        _, row, length = self._context.find_episode(request)
        for own in self._context.member_of(request).cameras.values():
            if not self._context.stores_images(request.dataset, own):
                # What fails here is met again, and told, by whoever decodes the span.
                with suppress(RaypipeError, OSError, NotImplementedError):
                    is_exit = self._context.decode.when == "exit"
                    frames = np.arange(length) if is_exit else shown_frames(self._context, request, own)
                    fetch = self._context.decoders[request.dataset].prefetch(row, own, frames)
                    if fetch is not None and not fetch.done():
                        self._fetches.append(fetch)

    def _decode(self, block: SpanBlock) -> dict[str, "Future[SpanPixels]"]:
        """Start decoding what did not come decoded; with ``when="exit"`` only images, whose bytes are at hand now."""
        cameras = self._context.member_of(block.request).cameras
        wanted = block.stored_images if self._context.decode.when == "exit" else cameras
        return {
            camera: self._pool.submit(self._decode_camera, block, camera)
            for camera in wanted
            if camera not in block.pixels
        }

    def _probe(self, block: SpanBlock) -> "tuple[Future[None], ...]":
        """Start to decode the ends of a span whose frames are decoded as they leave, where a bad one is left out."""
        if not self._can_skip or self._context.decode.when != "exit":
            return ()
        cameras = self._context.member_of(block.request).cameras
        videos = [own for camera, own in cameras.items() if camera not in block.stored_images]
        return tuple(self._pool.submit(self._probe_camera, block.request, own) for own in videos)

    def _probe_camera(self, request: SpanRequest, own: str) -> None:
        _, row, _ = self._context.find_episode(request)
        frames = shown_frames(self._context, request, own)
        self._context.decoders[request.dataset].decode_video(row, own, np.unique(frames[[0, -1]]))

    def _decode_camera(self, block: SpanBlock, camera: str) -> SpanPixels:
        request = block.request
        dataset, row, length = self._context.find_episode(request)
        own = self._context.member_of(request).cameras[camera]
        windows = window_frames(dataset, own, request.anchors, length)
        decoder = self._context.decoders[request.dataset]
        if camera in block.stored_images:
            frames, stored = block.stored_images[camera]
            order = frames.argsort()
            frames, stored = frames[order], [stored[i] for i in order.tolist()]
            pieces = [decoder.decode_images(row, own, stored, frames)]
        else:
            frames = shown_frames(self._context, request, own)
            pieces = decoder.decode_pieces(row, own, frames)
        ends = np.cumsum([0, *map(len, pieces)])
        parts = [
            CameraPart(frames[begin:end], piece.cpu().numpy())
            for piece, begin, end in zip(pieces, ends[:-1], ends[1:], strict=True)
        ]
        return find_pixels(parts, windows)

    def _find_pixels(self, block: SpanBlock) -> dict[str, "Future[SpanPixels]"]:
        dataset, _, length = self._context.find_episode(block.request)
        cameras, found = self._context.member_of(block.request).cameras, {}
        for camera, parts in block.pixels.items():
            future: Future[SpanPixels] = Future()
            windows = window_frames(dataset, cameras[camera], block.request.anchors, length)
            future.set_result(find_pixels(parts, windows))
            found[camera] = future
        return found
