"""Images stored inside the rows, and the size of any frame."""

import io
from typing import Any, Final, Literal

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from raypipe.decode.spec import ORIGINAL_SIZE, Fit, Size
from raypipe.errors import LEAVE_OUT, DecodeError, is_data_fault
from raypipe.format import Feature
from raypipe.text import MOST_PIXELS

_FORMATS: Final = ("PNG", "JPEG", "TIFF")


def decode_image(stored: Any, feature: Feature, place: str) -> torch.Tensor:
    """Return the image in a row: uint8 ``(H, W, 3)``, or depth as float32 ``(H, W, 1)`` in millimetres.

    Args:
        stored: the bytes of a PNG, JPEG or TIFF, or Hugging Face's ``{"bytes": ..., "path": ...}``.
        place: the dataset, episode and frame, for messages.
    """
    content = stored.get("bytes") if isinstance(stored, dict) else stored
    if not isinstance(content, bytes):
        raise DecodeError(f"there are no image bytes for {feature.name!r} in {place}; {LEAVE_OUT}")
    try:
        with _open_image(content) as image:
            _check_size(image, feature)
            pixels = np.array(image if feature.is_depth else image.convert("RGB"))
    except Exception as error:
        # Pillow passes on what its formats raise, such as SyntaxError for a broken PNG.
        if not is_data_fault(error):
            raise
        raise DecodeError(
            f"cannot decode the image {feature.name!r} of {place} ({len(content)} bytes): {error}; {LEAVE_OUT}"
        ) from error
    if not feature.is_depth:
        return torch.from_numpy(pixels)
    # Floats are metres and integers millimetres, as LeRobot writes them.
    in_mm = pixels.astype(np.float32) * (1000.0 if pixels.dtype.kind == "f" else 1.0)
    return torch.from_numpy(in_mm)[:, :, None]


def _open_image(content: bytes) -> Image.Image:
    """Return an image with its header read. Other formats stay off: some start a program, as EPS does Ghostscript."""
    try:
        return Image.open(io.BytesIO(content), formats=_FORMATS)
    except UnidentifiedImageError:
        raise ValueError("it is not a PNG, JPEG or TIFF, or its header is damaged") from None


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
