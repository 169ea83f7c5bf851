"""Pixels of images stored inside the rows, distances of depth videos, and the size of any frame.

LeRobot's recorder writes every distance as a number of 12 bits, by default a logarithm, into lossless HEVC
(``gray12le``), and ``info.json`` gives the range. Reading returns the same numbers, from the first plane with all their
bits, and this module converts them to millimetres as LeRobot does: the rounding happened when it was recorded.

Depth videos need PyAV, the extra ``depth``, imported when one is opened: torchcodec before 0.17 gives 8 bits.
`DepthDecoder` has the methods of torchcodec's `VideoDecoder` that `OpenVideo` calls.
"""

import functools
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from raypipe.decode.spec import ORIGINAL_SIZE, Fit, Size, needs_av
from raypipe.errors import LEAVE_OUT, ConfigError, DecodeError, is_data_fault
from raypipe.format import DepthCodes, Feature, VideoIndex
from raypipe.text import MOST_PIXELS


def decode_image(stored: Any, feature: Feature, place: str) -> torch.Tensor:
    """Return the image in a row: uint8 ``(H, W, 3)``, or depth as float32 ``(H, W, 1)`` in millimetres.

    `stored` is the bytes of a PNG, JPEG or TIFF, or Hugging Face's ``{"bytes": ..., "path": ...}``.
    """
    content = stored.get("bytes") if isinstance(stored, dict) else stored
    if not isinstance(content, bytes):
        raise DecodeError(f"there are no image bytes for {feature.name!r} in {place}; {LEAVE_OUT}")
    try:
        # Other formats stay off: some start a program, as EPS does Ghostscript.
        with Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "TIFF")) as image:
            _check_size(image, feature)
            pixels = np.array(image if feature.is_depth else image.convert("RGB"))
    except Exception as error:
        # Pillow passes on what its formats raise, such as SyntaxError for a broken PNG.
        if not is_data_fault(error):
            raise
        is_other = isinstance(error, UnidentifiedImageError)
        why = "it is not a PNG, JPEG or TIFF, or its header is damaged" if is_other else error
        raise DecodeError(
            f"cannot decode the image {feature.name!r} of {place} ({len(content)} bytes): {why}; {LEAVE_OUT}"
        ) from error
    if not feature.is_depth:
        return torch.from_numpy(pixels)
    # Floats are metres and integers millimetres, as LeRobot writes them.
    in_mm = pixels.astype(np.float32) * (1000.0 if pixels.dtype.kind == "f" else 1.0)
    return torch.from_numpy(in_mm)[:, :, None]


def _check_size(image: Image.Image, feature: Feature) -> None:
    """Raise if an image claims more pixels than it may have, before they take memory."""
    declared = feature.height * feature.width
    if image.width * image.height > (declared or MOST_PIXELS):
        bound = f"info.json declares {feature.width}x{feature.height}" if declared else f"{MOST_PIXELS:,} may be"
        raise ValueError(f"it has {image.width}x{image.height} pixels, and {bound}")


def resize_frames(pixels: torch.Tensor, size: Size | Literal["original"], fit: Fit = "stretch") -> torch.Tensor:
    """Return frames ``(n, height, width, channels)`` in another size.

    Bilinear with antialias: every new pixel is the mean of the old ones under a triangle as wide as two new pixels,
    rounded to whole numbers for uint8. Works on bytes and takes a third of the time of FFmpeg's scaler. Depth, which
    is float32, takes the old pixel under the middle of the new one, so every distance is one that was measured.
    """
    if size == ORIGINAL_SIZE or tuple(size) == tuple(pixels.shape[1:3]):
        return pixels
    if fit == "crop":
        top, left, height, width = middle_of(pixels.shape[1], pixels.shape[2], size)
        pixels = pixels[:, top : top + height, left : left + width]
    if fit != "letterbox":
        return _resize(pixels, size)
    # The largest part of the new size that has the shape of the old one.
    top, left, height, width = middle_of(*size, (pixels.shape[1], pixels.shape[2]))
    boxed = pixels.new_zeros((pixels.shape[0], *size, pixels.shape[3]))
    boxed[:, top : top + height, left : left + width] = _resize(pixels, (height, width))
    return boxed


def middle_of(height: int, width: int, shape: Size) -> tuple[int, int, int, int]:
    """Return the largest central part of a frame with the shape of another: top, left, height, width."""
    part_height = min(height, max(1, round(width * shape[0] / shape[1])))
    part_width = min(width, max(1, round(height * shape[1] / shape[0])))
    return (height - part_height) // 2, (width - part_width) // 2, part_height, part_width


def _resize(pixels: torch.Tensor, size: Size) -> torch.Tensor:
    planes = pixels.permute(0, 3, 1, 2)
    if pixels.dtype == torch.float32:
        nearest = torch.nn.functional.interpolate(planes, size=list(size), mode="nearest-exact")
        return nearest.permute(0, 2, 3, 1).contiguous()
    if pixels.dtype == torch.uint8 and pixels.device.type != "cpu":
        # Other devices have no kernel for bytes.
        resized = torch.nn.functional.interpolate(planes.float(), size=list(size), mode="bilinear", antialias=True)
        return resized.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    resized = torch.nn.functional.interpolate(planes, size=list(size), mode="bilinear", antialias=True)
    return resized.permute(0, 2, 3, 1).contiguous()


CODE_BITS: Final = 12
_MAX_CODE: Final = (1 << CODE_BITS) - 1
_NUM_NUMBERS: Final = 1 << 16
_FORMAT: Final = re.compile(r"(?:gray|yuv\d{3}p)(\d+)le")
"""Formats whose first plane is one little-endian number of two bytes for each pixel."""
_SAME_S: Final = 1e-4
_KEYFRAMES_TRIED: Final = 3


@dataclass(frozen=True, slots=True)
class DepthFrames:
    """Frames in the form that torchcodec returns."""

    data: torch.Tensor
    """``(n, height, width, 1)`` float32 in millimetres."""
    pts_seconds: torch.Tensor


class DepthDecoder:
    """The distances of a video by frame number. Only one thread at a time may use it."""

    def __init__(self, source: Any, place: str, index: VideoIndex, codes: DepthCodes) -> None:
        """Open a video: a path, or a file with `read` and `seek`.

        Raises:
            ConfigError: PyAV is not installed.
            DecodeError: the source is not a video.
        """
        self._av = _import_av()
        self._place = place
        self._index = index
        self._codes = codes
        try:
            self._container = self._av.open(source)
            self._stream = self._container.streams.video[0]
        except (self._av.FFmpegError, IndexError) as error:
            raise DecodeError(f"cannot open the video {place!r}: {error}. Fetch the file again.") from error
        # The rank's threads already decode in parallel, each its own video.
        self._stream.codec_context.thread_count = 1
        self._keyframes = np.flatnonzero(index.is_keyframe)
        self._coming: Iterator[Any] = iter(())
        self._next = len(index)
        """The number of the next frame from `_coming`."""

    @property
    def metadata(self) -> Any:
        """An object with the `height` and `width` of the file's header, like torchcodec's."""
        return self._stream.codec_context

    def __len__(self) -> int:
        return len(self._index)

    def get_frames_in_range(self, start: int, stop: int) -> DepthFrames:
        """Return frames ``[start, stop)``."""
        return self.get_frames_at(range(start, stop))

    def get_frames_at(self, indices: Sequence[int]) -> DepthFrames:
        """Return frames by ascending numbers.

        Raises:
            RuntimeError: FFmpeg cannot decode one.
            DecodeError: the video is not a depth video.
        """
        try:
            frames = [self._find(number) for number in indices]
        except self._av.FFmpegError as error:
            raise RuntimeError(str(error)) from error
        pixels = np.stack([pixels for pixels, _ in frames])
        times = torch.tensor([time for _, time in frames], dtype=torch.float64)
        return DepthFrames(torch.from_numpy(pixels)[..., None], times)

    def _find(self, number: int) -> tuple[NDArray[np.float32], float]:
        before = self._keyframes[: int(np.searchsorted(self._keyframes, number, side="right"))]
        if len(before) and before[-1] <= self._next <= number:
            found = self._forward(number)
            if found is not None:
                return found
        # FFmpeg seeks by decoding time, so it may land too late among frames that are stored in another order.
        for keyframe in [*before[: -_KEYFRAMES_TRIED - 1 : -1].tolist(), 0]:
            ticks = round(float(self._index.pts_s[keyframe]) / float(self._stream.time_base))
            self._container.seek(ticks, stream=self._stream)
            self._coming = self._container.decode(self._stream)
            found = self._forward(number)
            if found is not None:
                return found
        raise RuntimeError(f"frame {number} does not come out")

    def _forward(self, number: int) -> tuple[NDArray[np.float32], float] | None:
        """Decode up to a frame and return it; None if it does not come, because it lies before or is missing."""
        for frame in self._coming:
            if frame.time is None:
                raise RuntimeError("a frame comes out without its time")
            at = int(np.searchsorted(self._index.pts_s, frame.time - _SAME_S))
            self._next = at + 1
            if at == number:
                return self._distances(frame), float(frame.time)
            if at > number:
                return None
        self._next = len(self._index)
        return None

    def _distances(self, frame: Any) -> NDArray[np.float32]:
        found = _FORMAT.fullmatch(frame.format.name)
        if found is None:
            raise DecodeError(
                f"{self._place!r} is declared a depth video, and its pixels are {frame.format.name}; distances have 9 "
                f"to 16 bits, as gray12le has. If it is a picture, set is_depth_map to false in info.json."
            )
        if frame.is_corrupt:
            raise RuntimeError("FFmpeg painted over damaged data")
        plane = frame.planes[0]
        rows = np.frombuffer(plane, dtype="<u2").reshape(-1, plane.line_size // 2)
        return np.take(distances_mm(self._codes, int(found[1])), rows[: frame.height, : frame.width])


@functools.lru_cache(maxsize=16)
def distances_mm(codes: DepthCodes, num_bits: int) -> NDArray[np.float32]:
    """Return in mm the distance of each number of a video of `num_bits`, by LeRobot's formula in its precision."""
    numbers = torch.arange(_NUM_NUMBERS, dtype=torch.float32)
    if not codes.is_declared and num_bits > CODE_BITS:
        # LeRobot's recorder writes no such video without declaring what its numbers mean.
        return numbers.numpy()
    low, high = codes.min_m, codes.max_m
    if codes.is_log:
        low, high = np.log(low + codes.shift_m), np.log(high + codes.shift_m)
    metres = numbers.mul_((high - low) / _MAX_CODE).add_(low)
    if codes.is_log:
        metres = metres.exp_().sub_(codes.shift_m)
    return metres.clamp_(codes.min_m, codes.max_m).mul_(1000.0).round_().clamp_(0.0, _NUM_NUMBERS - 1).numpy()


def depth_decoder_version() -> str:
    """Return the name and version of what decodes depth videos; "no av" without PyAV."""
    try:
        av = _import_av()
    except ConfigError:
        return "no av"
    return f"av {av.__version__} with libavcodec {'.'.join(map(str, av.library_versions['libavcodec']))}"


def _import_av() -> Any:
    try:
        import av
    except ImportError as error:
        raise ConfigError(f"cannot decode depth videos: {needs_av()} ({error})") from error
    return av
