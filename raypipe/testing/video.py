"""The frames of a camera, and the mp4 files of a made dataset.

A frame is a stamp on a background, a pure function of (camera number, episode, frame, pixel style, seed). So frames can
be drawn a few at a time, in any order, and again for statistics. torchcodec encodes colour. The `ffmpeg` command
encodes depth (12-bit HEVC) and joins clips without encoding again.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from raypipe.decode import VideoCoding, open_writer
from raypipe.errors import ConfigError
from raypipe.format import one_line
from raypipe.testing.checks import spread_cells, stamp_boards
from raypipe.testing.spec import CameraSpec, SynthSpec
from raypipe.text import check_choice

_ENCODERS = {"h264": "libx264", "av1": "libsvtav1", "hevc": "libx265", "vp9": "libvpx-vp9"}
_SAME_BYTES: Final = "cpu-independent=1"
"""Option of x264. Without it, its AVX-512 code reads past the last row of macroblocks if their number in a row is not a
multiple of 8: the output then depends on the earlier contents of the heap, and on the CPU."""

_PRESETS = {"h264": "veryfast", "hevc": "ultrafast"}
_COPY_OPTIONS = ["-c", "copy", "-movflags", "+faststart"]
_INSTALL = "apt-get install ffmpeg (or: conda install -c conda-forge ffmpeg; brew install ffmpeg)"


FrameRun = tuple[int, int]
"""Frames ``0..n`` of one episode, consecutive in an mp4: (episode, n); a gap is a run of `GAP_EPISODE`."""


def encoders() -> dict[str, str]:
    """Return the codecs that can be written here, each with the name of FFmpeg's encoder.

    Tries each encoder on one frame, once per process: about 20 ms each.
    """
    return {codec: name for codec, name in _ENCODERS.items() if has_encoder(codec)}


def has_encoder(codec: str) -> bool:
    """Return whether FFmpeg here can write `codec` (``h264``, ``av1``, ``hevc``, ``vp9``)."""
    check_choice("codec", codec, list(_ENCODERS))
    return not _try_camera(CameraSpec(name="probe", codec=codec), fps=10)  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def _try_camera(camera: CameraSpec, fps: int) -> str:
    """Return why the videos of a camera cannot be written here; empty if they can."""
    return why_unwritable(_coding(camera, fps=fps))


def why_unwritable(coding: VideoCoding) -> str:
    """Return why FFmpeg here cannot write such a video; empty if it can. Tries it on one frame."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with open_writer(Path(folder) / "probe.mp4", coding) as stream:
                stream.add_frames(torch.zeros((1, 3, coding.height, coding.width), dtype=torch.uint8))
        except RuntimeError as error:
            return one_line(error)
    return ""


def check_tools(spec: SynthSpec) -> None:
    """Raise ConfigError if this machine cannot write the videos of `spec`."""
    for camera in spec.cameras:
        if camera.kind == "video" and not has_encoder(camera.codec):
            raise ConfigError(
                f"camera {camera.name!r}: FFmpeg here has no encoder {_ENCODERS[camera.codec]!r} for codec "
                f"{camera.codec!r}. Codecs it can write: {', '.join(encoders()) or 'none'}. Get a full "
                f"FFmpeg: {_INSTALL}"
            )
        if camera.kind == "video" and (why := _try_camera(replace(camera, name="probe"), spec.fps)):
            raise ConfigError(
                f"camera {camera.name!r}: {camera.codec} of {camera.width}x{camera.height} with gop {camera.gop}, "
                f"b_frames {camera.b_frames} and crf {camera.crf} at {spec.fps} fps cannot be encoded: {why}. Choose "
                f"other values."
            )
        needs_command = camera.kind == "depth" or (camera.is_video and _is_joined(spec))
        if needs_command and shutil.which("ffmpeg") is None:
            reason = "depth video" if camera.kind == "depth" else "join='concat'"
            raise ConfigError(f"camera {camera.name!r}: {reason} needs the `ffmpeg` command: {_INSTALL}")


def write_video(spec: SynthSpec, camera_number: int, path: Path, runs: Sequence[FrameRun]) -> list[tuple[float, float]]:
    """Write an mp4 and return when each of its runs starts and stops, in seconds of that mp4.

    With ``join="encode"`` a time is a frame number over fps. With ``join="concat"`` it is the sum of the durations of
    the clips before it, with the rounding of float additions, as in LeRobot's recorder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if _is_joined(spec):
        stops = list(accumulate(_write_joined(spec, camera_number, path, runs)))
    else:
        _encode(spec, camera_number, path, runs)
        stops = [frames / spec.fps for frames in accumulate(num_frames for _, num_frames in runs)]
    return list(zip([0.0, *stops], stops, strict=False))


def _is_joined(spec: SynthSpec) -> bool:
    return spec.is_packed and spec.join == "concat"


def _write_joined(spec: SynthSpec, camera_number: int, path: Path, runs: Sequence[FrameRun]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        clips = [Path(folder) / f"{number}.mp4" for number in range(len(runs))]
        for clip, run in zip(clips, runs, strict=True):
            _encode(spec, camera_number, clip, [run])
        listing = Path(folder) / "clips.txt"
        listing.write_text("".join(f"file '{clip}'\n" for clip in clips))
        _run_ffmpeg(["-f", "concat", "-safe", "0", "-i", str(listing), *_COPY_OPTIONS, str(path)])
        return [_duration_s(clip) for clip in clips]


def _duration_s(path: Path) -> float:
    from torchcodec.decoders import VideoDecoder

    duration = VideoDecoder(str(path), seek_mode="approximate").metadata.duration_seconds_from_header
    assert duration is not None, f"FFmpeg wrote no duration into {path}"
    return float(duration)


def _encode(spec: SynthSpec, camera_number: int, path: Path, runs: Sequence[FrameRun]) -> None:
    camera = spec.cameras[camera_number]
    chunks = (chunk for run in runs for chunk in iter_frames(spec, camera_number, *run))
    if camera.is_depth:
        _encode_depth(camera, spec.fps, path, chunks)
        return
    with open_writer(path, _coding(camera, fps=spec.fps)) as stream:
        for frames in chunks:
            stream.add_frames(torch.from_numpy(frames))


def _coding(camera: CameraSpec, *, fps: int) -> VideoCoding:
    return VideoCoding(
        height=camera.height,
        width=camera.width,
        fps=fps,
        encoder=_ENCODERS[camera.codec],
        crf=camera.crf,
        preset=_preset(camera),
        options=codec_options(camera.codec, camera.gop, camera.b_frames, x265=_SMALL_BLOCKS),
    )


def _preset(camera: CameraSpec) -> str | None:
    if camera.codec == "av1":
        # LeRobot uses 12. With longer GOPs, SVT-AV1 above 8 leaves a changed cell as it was in the frame before, in up
        # to 1 frame of 12.
        return "12" if camera.gop <= 2 else "8"
    return _PRESETS.get(camera.codec)


def codec_options(codec: str, gop: int, b_frames: int = 0, x265: str = "") -> dict[str, int | str]:
    """Return options that place keyframes exactly `gop` apart, on one thread: the same frames give the same bytes.

    Args:
        x265: further parameters of x265, each after a colon.
    """
    if codec == "h264":
        # b_strategy 0: B-frames wherever the caller asks for them, not only where x264 finds that they pay.
        order = {"bf": b_frames, "b_strategy": 0}
        return {"g": gop, "sc_threshold": 0, "threads": 1, "x264-params": _SAME_BYTES, **order}
    if codec == "hevc":
        return {"g": gop, "x265-params": _x265_params(gop, b_frames) + x265}
    if codec == "vp9":
        # deadline 1 is "realtime"; torchcodec takes numbers only. Without b=0, a bitrate limit overrides crf.
        return {"g": gop, "b": 0, "threads": 1, "deadline": 1, "cpu-used": 8, "lag-in-frames": 0, "auto-alt-ref": 0}
    return {"g": gop, "svtav1-params": "lp=1"}


def _x265_params(gop: int, b_frames: int) -> str:
    # Closed GOPs, since a joined clip must not refer to the one before it.
    shape = f"scenecut=0:open-gop=0:keyint={gop}:min-keyint={gop}:bframes={b_frames}"
    return f"log-level=none:pools=1:frame-threads=1:{shape}"


_SMALL_BLOCKS: Final = ":b-adapt=0:ctu=16:min-cu-size=8:early-skip=0:rskip=0"
"""Small blocks and no early skipping, since x265 otherwise leaves a changed cell of a 32 x 32 frame as it was in the
frame before, in 1 frame of 300."""


def _encode_depth(camera: CameraSpec, fps: int, path: Path, chunks: Iterable[NDArray[Any]]) -> None:
    size = f"{camera.width}x{camera.height}"
    source = ["-f", "rawvideo", "-pix_fmt", "gray12le", "-s", size, "-r", str(fps), "-i", "-"]
    codec = ["-c:v", "libx265", "-pix_fmt", "gray12le", "-preset", "ultrafast"]
    x265 = _x265_params(camera.gop, camera.b_frames) + _SMALL_BLOCKS
    params = ["-x265-params", f"{x265}:lossless=1", "-g", str(camera.gop)]
    _run_ffmpeg([*source, *codec, *params, str(path)], (depth_codes(chunk).tobytes() for chunk in chunks))


def _run_ffmpeg(arguments: list[str], stdin: Iterable[bytes] = ()) -> None:
    command = ["ffmpeg", "-v", "error", "-y", *arguments]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors)
        assert process.stdin is not None
        try:
            for data in stdin:
                process.stdin.write(data)
            process.stdin.close()
        except BrokenPipeError:
            pass
        if process.wait() != 0:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()
            raise ConfigError(f"`{' '.join(command)}` failed: {said}. Is it a full FFmpeg? {_INSTALL}")


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
