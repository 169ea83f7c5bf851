"""Pixels: the frames of a span from its video, or from images stored in its rows.

The modules, from the bottom up (each may use those above it)::

    spec.py       settings of decoding: where it runs, sizes, what is kept    DecodeSpec, KeepSpec
    journal.py    what a process was decoding when it died                    Journal
    pixels.py     images stored in rows; decodes depth videos; sizes          decode_image, DepthDecoder, resize_frames
    videos.py     an open video and its frames by number; frames into an mp4  OpenVideo, VideoPool, open_writer
    clips.py      clips, decoded ahead of need, held until used               ClipStore, FramePool, BatchBuffers
    kept.py       decoded frames on the node's disk, between epochs           KeepFolder, KeptDataset
    frames.py     the frames of a span of one camera; a subprocess for poison  FrameDecoder
    executors.py  where clips are decoded: threads here, or Ray tasks         ThreadExecutor, TaskExecutor

Callers ask for a frame by its whole number, never by time, and raypipe checks each frame that a decoder returns against
the index of the file. In memory a frame is ``(height, width, channels)``: uint8, as FFmpeg writes it, or float32
millimetres of depth. Users see ``(channels, height, width)``.

Importing this package imports no codec. torch and torchcodec cost a process 2.8 s of CPU and 300 MB, and Ray starts
several processes that decode nothing (the feeder, a coordinator per epoch, tasks that read rows).
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.decode.clips import BatchBuffers, ClipKey, ClipRequest, ClipStore, FramePool, OpenedClip
    from raypipe.decode.executors import ClipExecutor, TaskExecutor, ThreadExecutor, decode_clip, use_one_core
    from raypipe.decode.frames import FrameDecoder
    from raypipe.decode.journal import journal_scope
    from raypipe.decode.kept import KeepFolder, clear_kept, frames_folder, survey_kept
    from raypipe.decode.pixels import decode_image, resize_frames
    from raypipe.decode.spec import (
        ASSIGNED_CPUS,
        ORIGINAL_SIZE,
        CameraDtype,
        DecodeSpec,
        Fit,
        KeepSpec,
        Resize,
        check_decodable,
        check_device,
        check_fit,
        check_resize,
        device_name,
        load_torchcodec,
        make_keep,
        size_of,
        why_undecodable,
    )
    from raypipe.decode.videos import FrameSink, OpenVideo, VideoCoding, VideoPool, open_writer
else:
    __all__, __getattr__ = lazy_names(__name__)
