"""Re-encodes episodes, each as a small video of its own, which is then joined like any other.

So every episode starts at a keyframe, whatever the distance between keyframes, and a killed run keeps the episodes that
it had finished. Each episode is encoded by one thread: the same frames give the same bytes.
"""

import os
from dataclasses import dataclass
from typing import Final

import numpy as np

from raypipe.decode import FrameSink, OpenVideo, VideoCoding, VideoPool, open_writer, resize_frames
from raypipe.errors import ConfigError
from raypipe.format import DatasetMeta, episode_first_frame
from raypipe.reshard.info import Encoding
from raypipe.reshard.workspace import Workspace
from raypipe.storage import inside
from raypipe.testing import SAME_BYTES, encoders

_FRAMES_AT_ONCE: Final = 32
_LEAST_HEVC_WIDTH: Final = 64
_PRESETS: Final = {"h264": "veryfast", "hevc": "veryfast", "av1": "8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeUnit:
    """Some episodes of one camera."""

    camera: str
    encoding: Encoding
    rows: tuple[int, ...]


def clip_name(camera: str, row: int) -> str:
    """Return the name of a re-encoded episode in the clips folder."""
    return f"{camera}/{row:08d}.mp4"


def check_encoder(encoding: Encoding, camera: str) -> None:
    """Raise a `ConfigError` if FFmpeg here cannot write such a video."""
    known = encoders()
    if encoding.codec not in known:
        raise ConfigError(
            f"camera {camera!r} would be re-encoded to {encoding.codec!r}, and FFmpeg here can write "
            f"{', '.join(known) or 'none'}. Choose one of these with --codec, or get a full FFmpeg."
        )
    if encoding.codec == "hevc" and encoding.width < _LEAST_HEVC_WIDTH:
        raise ConfigError(
            f"camera {camera!r} would be re-encoded to hevc with a width of {encoding.width}, and the encoder x265 "
            f"damages its process's memory below {_LEAST_HEVC_WIDTH}. Choose another codec with --codec, such as h264."
        )


def encode_episodes(shared: tuple[DatasetMeta, Workspace], unit: EncodeUnit) -> None:
    """Write the clips of some episodes, except those that already exist."""
    meta, workspace = shared
    videos = VideoPool(1)
    for row in unit.rows:
        target = inside(workspace.clips, clip_name(unit.camera, row))
        if target.exists():
            continue
        part = workspace.part_path(".mp4")
        part.parent.mkdir(parents=True, exist_ok=True)
        name = meta.video_file(row, unit.camera)
        with (
            videos.lend(meta.storage, name) as video,
            open_writer(part, _coding(unit.encoding, meta.fps)) as stream,
        ):
            _encode(meta, video, unit, row, stream)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, target)


def _encode(meta: DatasetMeta, video: OpenVideo, unit: EncodeUnit, row: int, stream: FrameSink) -> None:
    first = episode_first_frame(meta, row, unit.camera, video.index)
    stop = first + int(meta.episodes.length[row])
    for start in range(first, stop, _FRAMES_AT_ONCE):
        frames = video.read_frames(np.arange(start, min(start + _FRAMES_AT_ONCE, stop)))
        frames = resize_frames(frames, (unit.encoding.height, unit.encoding.width))
        stream.add_frames(frames.permute(0, 3, 1, 2).contiguous())


def _coding(encoding: Encoding, fps: float) -> VideoCoding:
    return VideoCoding(
        height=encoding.height,
        width=encoding.width,
        fps=fps,
        encoder=encoders()[encoding.codec],
        crf=encoding.crf,
        preset=_PRESETS.get(encoding.codec),
        options=_codec_options(encoding),
    )


def _codec_options(encoding: Encoding) -> dict[str, int | str]:
    """Return options that put keyframes `gop` apart, without B-frames, on one thread."""
    gop = encoding.gop
    if encoding.codec == "h264":
        return {"g": gop, "sc_threshold": 0, "threads": 1, "bf": 0, "x264-params": SAME_BYTES}
    if encoding.codec == "hevc":
        shape = f"scenecut=0:open-gop=0:keyint={gop}:min-keyint={gop}:bframes=0"
        return {"g": gop, "x265-params": f"log-level=none:pools=1:frame-threads=1:{shape}"}
    if encoding.codec == "vp9":
        # deadline 1 is "realtime"; torchcodec takes numbers only. Without b=0, a bitrate limit overrides crf.
        return {"g": gop, "b": 0, "threads": 1, "deadline": 1, "cpu-used": 8, "lag-in-frames": 0, "auto-alt-ref": 0}
    return {"g": gop, "svtav1-params": "lp=1"}
