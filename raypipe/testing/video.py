"""Writes the mp4 files of a made dataset.

torchcodec encodes colour. The `ffmpeg` command encodes depth (12-bit HEVC) and joins clips without encoding again. This
module decides codec options, but not which frames are in a file.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Final

import torch
from torchcodec.decoders import VideoDecoder

from raypipe.decode import VideoCoding, open_writer
from raypipe.errors import ConfigError
from raypipe.testing.pixels import depth_codes, iter_frames
from raypipe.testing.spec import CameraSpec, SynthSpec

_ENCODERS = {"h264": "libx264", "av1": "libsvtav1", "hevc": "libx265", "vp9": "libvpx-vp9"}
SAME_BYTES: Final = "cpu-independent=1"
"""Option of x264. Without it, its AVX-512 code reads past the last row of macroblocks if their number in a row is not a
multiple of 8: the output then depends on the earlier contents of the heap, and on the CPU."""

_PRESETS = {"h264": "veryfast", "hevc": "ultrafast"}
_COPY_OPTIONS = ["-c", "copy", "-movflags", "+faststart"]
_INSTALL = "apt-get install ffmpeg (or: conda install -c conda-forge ffmpeg; brew install ffmpeg)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRun:
    """Frames ``0..num_frames`` of one episode, consecutive in an mp4; a gap is a run of `GAP_EPISODE`."""

    episode: int
    num_frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFile:
    """One mp4 to write."""

    path: Path
    camera_number: int
    runs: tuple[FrameRun, ...]


def encoders() -> dict[str, str]:
    """Return the codecs that can be written here, each with the name of FFmpeg's encoder.

    Tries each encoder on one frame, once per process: about 20 ms each.
    """
    return {codec: name for codec, name in _ENCODERS.items() if has_encoder(codec)}


@cache
def has_encoder(codec: str) -> bool:
    """Return whether FFmpeg here can write `codec` (``h264``, ``av1``, ``hevc``, ``vp9``)."""
    if codec not in _ENCODERS:
        raise ConfigError(f"codec must be one of {', '.join(map(repr, _ENCODERS))}, got {codec!r}")
    camera = CameraSpec(name="probe", codec=codec)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        try:
            with open_writer(Path(folder) / "probe.mp4", _coding(camera, fps=10)) as stream:
                stream.add_frames(torch.zeros((1, 3, camera.height, camera.width), dtype=torch.uint8))
        except RuntimeError:
            return False
    return True


def check_tools(spec: SynthSpec) -> None:
    """Raise ConfigError if this machine cannot write the videos of `spec`."""
    for camera in spec.cameras:
        if camera.kind == "video" and not has_encoder(camera.codec):
            raise ConfigError(
                f"camera {camera.name!r}: FFmpeg here has no encoder {_ENCODERS[camera.codec]!r} for codec "
                f"{camera.codec!r}. Codecs it can write: {', '.join(encoders()) or 'none'}. Get a full "
                f"FFmpeg: {_INSTALL}"
            )
        needs_command = camera.kind == "depth" or (camera.is_video and _is_joined(spec))
        if needs_command and shutil.which("ffmpeg") is None:
            reason = "depth video" if camera.kind == "depth" else "join='concat'"
            raise ConfigError(f"camera {camera.name!r}: {reason} needs the `ffmpeg` command: {_INSTALL}")


def write_video(spec: SynthSpec, file: VideoFile) -> list[tuple[float, float]]:
    """Write an mp4 and return when each of its runs starts and stops, in seconds of that mp4.

    With ``join="encode"`` a time is a frame number over fps. With ``join="concat"`` it is the sum of the durations of
    the clips before it, with the rounding of float additions, as in LeRobot's recorder.
    """
    file.path.parent.mkdir(parents=True, exist_ok=True)
    if _is_joined(spec):
        durations = _write_joined(spec, file)
        stops = list(accumulate(durations))
    else:
        _encode(spec, file)
        stops = [frames / spec.fps for frames in accumulate(run.num_frames for run in file.runs)]
    return list(zip([0.0, *stops], stops, strict=False))


def _is_joined(spec: SynthSpec) -> bool:
    return spec.is_packed and spec.join == "concat"


def _write_joined(spec: SynthSpec, file: VideoFile) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        clips = []
        for number, run in enumerate(file.runs):
            clip = VideoFile(path=Path(folder) / f"{number}.mp4", camera_number=file.camera_number, runs=(run,))
            _encode(spec, clip)
            clips.append(clip.path)
        listing = Path(folder) / "clips.txt"
        listing.write_text("".join(f"file '{clip}'\n" for clip in clips))
        _run_ffmpeg(["-f", "concat", "-safe", "0", "-i", str(listing), *_COPY_OPTIONS, str(file.path)])
        return [_duration_s(clip) for clip in clips]


def _duration_s(path: Path) -> float:
    duration = VideoDecoder(str(path), seek_mode="approximate").metadata.duration_seconds_from_header
    assert duration is not None, f"FFmpeg wrote no duration into {path}"
    return float(duration)


def _encode(spec: SynthSpec, file: VideoFile) -> None:
    if spec.cameras[file.camera_number].is_depth:
        _encode_depth(spec, file)
        return
    with open_writer(file.path, _coding(spec.cameras[file.camera_number], fps=spec.fps)) as stream:
        for run in file.runs:
            for frames in iter_frames(spec, file.camera_number, run.episode, run.num_frames):
                stream.add_frames(torch.from_numpy(frames))


def _coding(camera: CameraSpec, *, fps: int) -> VideoCoding:
    return VideoCoding(
        height=camera.height,
        width=camera.width,
        fps=fps,
        encoder=_ENCODERS[camera.codec],
        crf=camera.crf,
        preset=_preset(camera),
        options=_codec_options(camera),
    )


def _preset(camera: CameraSpec) -> str | None:
    if camera.codec == "av1":
        # LeRobot uses 12. With longer GOPs, SVT-AV1 above 8 leaves a changed cell as it was in the frame before, in up
        # to 1 frame of 12.
        return "12" if camera.gop <= 2 else "8"
    return _PRESETS.get(camera.codec)


def _codec_options(camera: CameraSpec) -> dict[str, int | str]:
    """Return options that place keyframes exactly `gop` apart, on one thread."""
    if camera.codec == "h264":
        # b_strategy 0: B-frames wherever the spec asks for them, not only where x264 finds that they pay.
        order = {"bf": camera.b_frames, "b_strategy": 0}
        return {"g": camera.gop, "sc_threshold": 0, "threads": 1, "x264-params": SAME_BYTES, **order}
    if camera.codec == "hevc":
        return {"g": camera.gop, "x265-params": _x265_params(camera)}
    if camera.codec == "vp9":
        # deadline 1 is "realtime"; torchcodec takes numbers only. Without b=0, a bitrate limit overrides crf.
        speed = {"deadline": 1, "cpu-used": 8, "lag-in-frames": 0, "auto-alt-ref": 0}
        return {"g": camera.gop, "b": 0, "threads": 1, **speed}
    return {"g": camera.gop, "svtav1-params": "lp=1"}


def _x265_params(camera: CameraSpec) -> str:
    # Closed GOPs, since a joined clip must not refer to the one before it. Small blocks and no early skipping, since
    # x265 otherwise leaves a changed cell of a 32 x 32 frame as it was in the frame before, in 1 frame of 300.
    return (
        f"log-level=none:pools=1:frame-threads=1:scenecut=0:open-gop=0:keyint={camera.gop}:"
        f"min-keyint={camera.gop}:bframes={camera.b_frames}:b-adapt=0:"
        f"ctu=16:min-cu-size=8:early-skip=0:rskip=0"
    )


def _encode_depth(spec: SynthSpec, file: VideoFile) -> None:
    camera = spec.cameras[file.camera_number]
    size = f"{camera.width}x{camera.height}"
    source = ["-f", "rawvideo", "-pix_fmt", "gray12le", "-s", size, "-r", str(spec.fps), "-i", "-"]
    codec = ["-c:v", "libx265", "-pix_fmt", "gray12le", "-preset", "ultrafast"]
    params = ["-x265-params", f"{_x265_params(camera)}:lossless=1", "-g", str(camera.gop)]
    frames = (
        depth_codes(chunk).tobytes()  # type: ignore[arg-type]
        for run in file.runs
        for chunk in iter_frames(spec, file.camera_number, run.episode, run.num_frames)
    )
    _run_ffmpeg([*source, *codec, *params, str(file.path)], frames)


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
