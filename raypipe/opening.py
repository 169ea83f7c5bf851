"""What happens to a span between its arrival on a rank and its admission: its pixels are decoded, or probed."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from raypipe.block import BlockContext, CameraPart, SpanBlock, shown_frames, window_frames
from raypipe.packed import SpanRequest
from raypipe.shuffle import SpanPixels, find_pixels


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
        self._can_skip = context.bad_data.on_bad_episode == "skip"

    def open(self, block: SpanBlock) -> Arrived:
        """Start what there is to do before the span is admitted; nothing with one whose rows could not be read."""
        if self._can_skip and block.error[0]:
            return Arrived(block, {}, ())
        block.check()
        return Arrived(block, {**self._find_pixels(block), **self._decode(block)}, self._probe(block))

    def _decode(self, block: SpanBlock) -> dict[str, "Future[SpanPixels]"]:
        """Start decoding what did not come decoded; with ``when="exit"`` only images, whose bytes are at hand now."""
        cameras = self._context.datasets[block.request.dataset].spec.cameras
        wanted = block.stored_images if self._context.decode.when == "exit" else cameras
        return {
            camera: self._pool.submit(self._decode_camera, block, camera)
            for camera in wanted
            if camera not in block.pixels
        }

    def _probe(self, block: SpanBlock) -> "tuple[Future[None], ...]":
        """Start to decode the ends of a span whose frames are decoded as they leave, where a bad one is left out."""
        dataset = self._context.datasets[block.request.dataset]
        if not self._can_skip or self._context.decode.when != "exit":
            return ()
        videos = [camera for camera in dataset.spec.cameras if dataset.features[camera].kind == "video"]
        return tuple(self._pool.submit(self._probe_camera, block.request, camera) for camera in videos)

    def _probe_camera(self, request: SpanRequest, camera: str) -> None:
        _, row, _ = self._context.find_episode(request)
        frames = shown_frames(self._context, request, camera)
        self._context.decoders[request.dataset].decode_video(row, camera, np.unique(frames[[0, -1]]))

    def _decode_camera(self, block: SpanBlock, camera: str) -> SpanPixels:
        request = block.request
        dataset, row, length = self._context.find_episode(request)
        windows = window_frames(dataset, camera, request.anchors, length)
        decoder = self._context.decoders[request.dataset]
        if camera in block.stored_images:
            frames, stored = block.stored_images[camera]
            order = frames.argsort()
            frames, stored = frames[order], [stored[i] for i in order.tolist()]
            pieces = [decoder.decode_images(row, camera, stored, frames)]
        else:
            frames = shown_frames(self._context, request, camera)
            pieces = decoder.decode_pieces(row, camera, frames)
        ends = np.cumsum([0, *map(len, pieces)])
        parts = [
            CameraPart(frames[begin:end], piece.numpy() if piece.device.type == "cpu" else piece)
            for piece, begin, end in zip(pieces, ends[:-1], ends[1:], strict=True)
        ]
        return find_pixels(parts, windows)

    def _find_pixels(self, block: SpanBlock) -> dict[str, "Future[SpanPixels]"]:
        dataset, _, length = self._context.find_episode(block.request)
        found = {}
        for camera, parts in block.pixels.items():
            future: Future[SpanPixels] = Future()
            future.set_result(find_pixels(parts, window_frames(dataset, camera, block.request.anchors, length)))
            found[camera] = future
        return found
