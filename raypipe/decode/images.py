"""Images stored inside the rows."""

import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from raypipe.errors import DecodeError
from raypipe.metadata import Feature


def decode_image(stored: Any, feature: Feature, place: str) -> torch.Tensor:
    """Return an image as a row holds it: uint8 ``(H, W, 3)``, or depth as float32 ``(H, W, 1)`` in millimetres.

    Args:
        stored: the bytes of a PNG or TIFF, or Hugging Face's ``{"bytes": ..., "path": ...}``.
        place: the dataset, episode and frame, for messages.
    """
    content = stored.get("bytes") if isinstance(stored, dict) else stored
    if not isinstance(content, bytes):
        raise DecodeError(f"there are no image bytes for {feature.name!r} in {place}; leave the episode out")
    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.array(image if feature.is_depth else image.convert("RGB"))
    except Exception as error:
        # Pillow raises what its many formats raise: SyntaxError for a broken PNG.
        raise DecodeError(
            f"cannot decode the image {feature.name!r} of {place} ({len(content)} bytes): {error}. Leave the episode "
            f"out."
        ) from error
    if not feature.is_depth:
        return torch.from_numpy(pixels)
    # Floats are metres and integers millimetres, as LeRobot writes them.
    in_mm = pixels.astype(np.float32) * (1000.0 if pixels.dtype.kind == "f" else 1.0)
    return torch.from_numpy(in_mm)[:, :, None]
