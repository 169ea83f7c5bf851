"""What tests check with: stamps in pixels, and the contract of resumable iterators as a function.

A stamp says which (episode, frame, camera) an image is. It is a board of 8 x 8 light and dark cells over the whole
frame, 64 bits in reading order::

    episode 22 | frame 22 | camera 4 | checksum 16

Cells scale with the frame. `read_stamp` reads them at their centres, in luma, and splits at the middle of the lightest
and the darkest cell. So a stamp survives lossy coding, chroma subsampling, resizing and a change of value range. It
does not survive a crop or a flip, which the checksum detects.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError, DecodeError
from raypipe.text import counted

GAP_EPISODE = 2**22 - 1
"""The episode number in the stamp of a frame between two episodes of an mp4."""

_Scalar = TypeVar("_Scalar", bound=np.generic)

_CELLS = 8
_EPISODE_BITS = 22
_FRAME_BITS = 22
_CAMERA_BITS = 4
_CHECKSUM_BITS = 16
# From splitmix64: odd, and without a structure that matches a counter.
_MULTIPLIER = 0xBF58476D1CE4E5B9
# Keeps the checksum of payload 0 from being 0, so that a black frame has no valid stamp.
_SALT = 0x9E3779B97F4A7C15
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
_DARK, _LIGHT = 32, 208
# Red is above blue, so that swapped channels show.
_TINT = np.array([16, 0, -16], dtype=np.int16)


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which frame an image is."""

    episode: int
    frame: int
    camera: int
    """Position of the camera in `SynthSpec.cameras`."""

    def __post_init__(self) -> None:
        limits = {"episode": _EPISODE_BITS, "frame": _FRAME_BITS, "camera": _CAMERA_BITS}
        for name, bits in limits.items():
            value = getattr(self, name)
            if not 0 <= value < 2**bits:
                raise ConfigError(f"a stamp's {name} must be in 0..{2**bits - 1}, got {value}")


def draw_stamp(stamp: Stamp, height: int, width: int) -> NDArray[np.uint8]:
    """Return a frame that shows `stamp`, (H, W, 3) uint8, with more red than blue."""
    board = stamp_boards(stamp.episode, np.array([stamp.frame]), stamp.camera)
    luma = spread_cells(np.where(board, np.int16(_LIGHT), np.int16(_DARK)), height, width)[0]
    frame: NDArray[np.uint8] = (luma[..., None] + _TINT).astype(np.uint8)
    return frame


def read_stamp(frame: Any) -> Stamp:
    """Return the stamp that `frame` shows.

    Args:
        frame: a torch tensor on the CPU or an array, (3, H, W), (H, W, 3), (1, H, W), (H, W, 1) or (H, W),
            of any number type and range.

    Raises:
        DecodeError: the checksum is wrong: the frame has no stamp, or is damaged.
    """
    luma = _luma_of(np.asarray(frame))
    rows, columns = (_cell_weights(size) for size in luma.shape)
    cells = rows @ luma @ columns.T
    bits = cells > (cells.min() + cells.max()) / 2
    word = int.from_bytes(np.packbits(bits.ravel()).tobytes(), "big")
    payload, checksum = word >> _CHECKSUM_BITS, word % 2**_CHECKSUM_BITS
    if checksum != int(_checksums(np.array([payload], dtype=np.uint64))[0]):
        raise DecodeError(
            f"no stamp in this {luma.shape[0]}x{luma.shape[1]} frame: the checksum of its 8 x 8 cells is "
            f"wrong. It was not made by raypipe.testing, or it is cropped, flipped or damaged."
        )
    camera = payload % 2**_CAMERA_BITS
    frame_index = (payload >> _CAMERA_BITS) % 2**_FRAME_BITS
    return Stamp(episode=payload >> (_CAMERA_BITS + _FRAME_BITS), frame=frame_index, camera=camera)


def stamp_boards(episode: int, frames: NDArray[np.int64], camera: int) -> NDArray[np.bool_]:
    """Return the cells of frames of one episode and camera, (N, 8, 8), true for light."""
    payload = (
        (np.uint64(episode) << np.uint64(_CAMERA_BITS + _FRAME_BITS))
        | (frames.astype(np.uint64) << np.uint64(_CAMERA_BITS))
        | np.uint64(camera)
    )
    words = (payload << np.uint64(_CHECKSUM_BITS)) | _checksums(payload)
    octets = words.astype(">u8").view(np.uint8).reshape(-1, _CELLS)
    return np.unpackbits(octets, axis=1).reshape(-1, _CELLS, _CELLS).astype(np.bool_)


def spread_cells(boards: NDArray[_Scalar], height: int, width: int) -> NDArray[_Scalar]:
    """Return `boards` at full size, (N, 8, 8) to (N, H, W)."""
    rows, columns = ((2 * np.arange(size) + 1) * _CELLS // (2 * size) for size in (height, width))
    # Spread columns first: only 8 rows are then gathered pixel by pixel, and whole rows are copied after that.
    return boards[:, :, columns][:, rows]


def _checksums(payloads: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = (payloads ^ np.uint64(_SALT)) * np.uint64(_MULTIPLIER)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(_MULTIPLIER)
    return mixed >> np.uint64(64 - _CHECKSUM_BITS)


def _luma_of(image: NDArray[Any]) -> NDArray[np.float32]:
    if image.ndim == 2:
        image = image[..., None]
    elif image.ndim == 3 and image.shape[0] in (1, 3):
        image = image.transpose(1, 2, 0)
    if image.ndim != 3 or image.shape[2] not in (1, 3) or min(image.shape[:2]) < _CELLS:
        raise ConfigError(
            f"read_stamp takes one frame, (3, H, W) or (H, W, 3) of at least {_CELLS} x {_CELLS} pixels (or "
            f"with 1 channel), got shape {image.shape}"
        )
    pixels = image.astype(np.float32)
    luma: NDArray[np.float32] = pixels[..., 0] if pixels.shape[2] == 1 else pixels @ _LUMA
    return luma


@lru_cache(maxsize=64)
def _cell_weights(size: int) -> NDArray[np.float32]:
    """Return the (8, size) weights that average the middle half of each cell."""
    pixels = np.arange(size)
    cells = np.arange(_CELLS)[:, None]
    starts, stops = (cells + 0.25) * size / _CELLS, (cells + 0.75) * size / _CELLS
    # Weight pixels by their overlap, so that a frame of 20 pixels is read as well as one of 32.
    overlaps = np.minimum(pixels + 1, stops) - np.maximum(pixels, starts)
    weights: NDArray[np.float32] = overlaps.clip(0).astype(np.float32)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


class Resumable(Protocol):
    """An iterator over batches that can save and restore its position."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the current position on."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch, as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a saved position."""
        ...


def assert_resumes_exactly(make: Callable[[], Resumable]) -> None:
    """Stop after every batch in turn, restore into a fresh iterator, and require the same rest.

    The state passes through JSON on the way, as it does in a checkpoint. Batches may be dicts, lists and tuples of
    tensors, arrays and plain values; arrays are equal if their dtype, shape and values are.

    Args:
        make: returns a fresh iterator at its start; called once for the whole, then twice per stop.

    Raises:
        AssertionError: a rest differs; names the batch that it stopped after, and the first one that differs.
    """
    whole = list(make())
    for stop in range(len(whole) + 1):
        stopped = make()
        list(islice(iter(stopped), stop))
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        _check_rest(list(resumed), whole[stop:], stop)


def _check_rest(rest: list[Any], wanted: list[Any], stop: int) -> None:
    for number, (found, batch) in enumerate(zip(rest, wanted, strict=False), start=stop):
        if not _is_same(found, batch):
            raise AssertionError(f"stopped after {counted(stop, 'batch')}: batch {number} is {found!r}, not {batch!r}")
    if len(rest) != len(wanted):
        raise AssertionError(f"stopped after {counted(stop, 'batch')}: {len(rest)} follow, not {len(wanted)}")


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(_is_same, left, right))
    if hasattr(left, "dtype") and hasattr(right, "dtype"):
        return bool(left.dtype == right.dtype) and _has_same_values(np.asarray(left), np.asarray(right))
    return bool(left == right)


def _has_same_values(left: Any, right: Any) -> bool:
    return np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
