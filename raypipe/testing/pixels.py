"""The frames of a camera: a stamp on a background.

A frame is a pure function of (camera number, episode, frame, pixel style, seed). So frames can be drawn a few at a
time, in any order, and again for statistics.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from raypipe.testing.spec import CameraSpec, SynthSpec
from raypipe.testing.stamp import spread_cells, stamp_boards

DEPTH_MIN_M, DEPTH_MAX_M, DEPTH_SHIFT_M = 0.01, 10.0, 3.5
"""LeRobot's default range of the 12-bit depth codes."""

NEAR_MM, FAR_MM = 800, 2400
"""The two distances in a depth frame: far where a colour frame is light, near where it is dark."""

_MAX_CODE = 4095
# Dark and light luma, as far apart as the texture allows, since small frames lose contrast in coding.
_LEVELS = {"flat": (24, 208), "textured": (20, 164)}
_TINT = 16
# Texture and noise add 67 at most: dark cells end at 87, light ones start at 164. `read_stamp` cuts in the middle of
# the lightest and the darkest cell, which lies between the two.
_TEXTURE_RANGE = 56
_NOISE_RANGE = 13
_TRAVEL = 64
_CHUNK_BYTES = 8 << 20


def iter_frames(
    spec: SynthSpec, camera_number: int, episode: int, num_frames: int
) -> Iterator[NDArray[np.uint8] | NDArray[np.uint16]]:
    """Yield the frames of an episode in order, some megabytes at a time, as `draw_frames` returns them."""
    camera = spec.cameras[camera_number]
    size = max(1, _CHUNK_BYTES // (3 * camera.height * camera.width))
    for start in range(0, num_frames, size):
        frames = np.arange(start, min(start + size, num_frames))
        yield draw_frames(spec, camera_number, episode, frames)


def draw_frames(
    spec: SynthSpec, camera_number: int, episode: int, frames: NDArray[np.int64]
) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """Return frames of an episode: (N, 3, H, W) uint8, or for depth (N, H, W) uint16 in millimetres."""
    camera = spec.cameras[camera_number]
    boards = stamp_boards(episode, frames, camera_number)
    if camera.is_depth:
        distances = np.where(boards, np.uint16(FAR_MM), np.uint16(NEAR_MM))
        return spread_cells(distances, camera.height, camera.width)
    dark, light = _LEVELS[spec.pixels]
    levels = np.where(boards, np.uint8(light), np.uint8(dark))
    luma = spread_cells(levels, camera.height, camera.width)
    if spec.pixels == "textured":
        texture, noise = _texture(camera.height, camera.width, spec.seed)
        for position, frame in enumerate(frames.tolist()):
            luma[position] += _texture_view(texture, camera, frame, 9)
            luma[position] += _texture_view(noise, camera, frame * 977 + episode, 1)
    return np.stack([luma + np.uint8(_TINT), luma, luma - np.uint8(_TINT)], axis=1)


def depth_codes(millimetres: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Return the 12-bit logarithmic codes of distances, as LeRobot's recorder computes them."""
    low, high = np.log(DEPTH_MIN_M + DEPTH_SHIFT_M), np.log(DEPTH_MAX_M + DEPTH_SHIFT_M)
    logs = np.log(millimetres.astype(np.float64) / 1000 + DEPTH_SHIFT_M)
    codes: NDArray[np.uint16] = np.rint((logs - low) / (high - low) * _MAX_CODE).astype("<u2")
    return codes


def _texture_view(texture: NDArray[np.uint8], camera: CameraSpec, step: int, slowness: int) -> NDArray[np.uint8]:
    half = _TRAVEL // 2
    top = int(half + (half - 1) * np.sin(step / slowness))
    left = int(half + (half - 1) * np.cos(step / (slowness * 1.3)))
    return texture[top : top + camera.height, left : left + camera.width]


@lru_cache(maxsize=8)
def _texture(height: int, width: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    shape = (height + _TRAVEL, width + _TRAVEL)
    texture = np.zeros(shape)
    # Edges of 32, 8 and 2 pixels in equal shares: h264 of 320x240 then takes 0.4 ms a frame to decode, as a real
    # camera's video does.
    for blob in (32, 8, 2):
        coarse = rng.random((shape[0] // blob + 1, shape[1] // blob + 1))
        texture += coarse.repeat(blob, 0).repeat(blob, 1)[: shape[0], : shape[1]]
    # At full range, cells of 4 pixels would lose too much contrast.
    strength = 1.0 if min(height, width) >= 64 else 0.5
    texture = (texture - texture.min()) * (strength * (_TEXTURE_RANGE - 1) / np.ptp(texture))
    noise = rng.integers(0, _NOISE_RANGE, shape, dtype=np.uint8)
    return texture.astype(np.uint8), noise
