"""Pixels: the frames of a span from its video, or from images stored in its rows.

::

    spec.py     where, when and how a frame is decoded              DecodeSpec
    videos.py   an open video and its frames by number; the cache   OpenVideo, VideoCache
    depth.py    distances from a depth video                        DepthDecoder
    images.py   images stored inside the rows                       decode_image
    kept.py     decoded frames on the node's disk, between epochs   KeepFolder, KeptDataset
    span.py     the frames of a span of one camera, in one pass     FrameDecoder
    journal.py  what was being decoded when a process died          Journal
    isolated.py decoding in a subprocess                            decode_isolated

A frame is asked for by a whole number, never by time, and what a decoder returns is checked against the index of the
file. In memory a frame is ``(height, width, channels)``: uint8, as FFmpeg writes it, or float32 millimetres of depth.
Users see ``(channels, height, width)``.

Importing this package imports no codec: torch and torchcodec cost a process 2.8 s of CPU and 300 MB, and Ray starts
several that decode nothing (the feeder, a coordinator per epoch, tasks that read rows).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raypipe.decode.spec import DecodeSpec, check_decodable

if TYPE_CHECKING:
    from raypipe.decode.frames import FrameDecoder
    from raypipe.decode.images import decode_image
    from raypipe.decode.videos import OpenVideo, VideoPool, open_video

_HOMES = {
    "OpenVideo": "videos",
    "FrameDecoder": "frames",
    "VideoPool": "videos",
    "decode_image": "images",
    "open_video": "videos",
}

__all__ = [
    "DecodeSpec",
    "FrameDecoder",
    "OpenVideo",
    "VideoPool",
    "check_decodable",
    "decode_image",
    "open_video",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
