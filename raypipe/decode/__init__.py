"""Pixels: the frames of a span from its video, or from images stored in its rows.

::

    spec.py     where, when and how a frame is decoded              DecodeSpec
    videos.py   an open video and its frames by number; the cache   OpenVideo, VideoCache
    images.py   images stored inside the rows                       decode_image
    span.py     the frames of a span of one camera, in one pass     SpanDecoder

A frame is asked for by a whole number, never by time, and what a decoder returns is checked against the index of the
file. In memory a frame is uint8 ``(height, width, channels)``, as FFmpeg writes it; users see ``(channels, height,
width)``.
"""

from raypipe.decode.images import decode_image
from raypipe.decode.span import SpanDecoder
from raypipe.decode.spec import DecodeSpec, check_decodable
from raypipe.decode.videos import OpenVideo, VideoCache, open_video

__all__ = [
    "DecodeSpec",
    "OpenVideo",
    "SpanDecoder",
    "VideoCache",
    "check_decodable",
    "decode_image",
    "open_video",
]
