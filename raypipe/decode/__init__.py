"""Pixels: the frames of a span from its video, or from images stored in its rows.

::

    spec.py          where, when and how a frame is decoded              DecodeSpec
    keep_spec.py     where decoded frames are kept                       KeepSpec
    videos.py        an open video and its frames by number; the cache   OpenVideo, VideoPool
    depth.py         distances from a depth video                        DepthDecoder
    images.py        images stored inside the rows                       decode_image
    kept.py          decoded frames on the node's disk, between epochs   KeepFolder, KeptDataset
    frames.py        the frames of a span of one camera, in one pass     FrameDecoder
    clips.py         clips, decoded ahead of need, held until used       ClipStore
    tasks.py         clips decoded by Ray tasks                          TaskExecutor
    buffers.py       reusable memory for frames, and for batches         FramePool, BatchBuffers
    journal.py       what a process was decoding when it died            Journal
    isolated.py      decoding in a subprocess                            decode_isolated
    video_writer.py  frames into an mp4                                  open_writer

Callers ask for a frame by its whole number, never by time, and raypipe checks each frame that a decoder returns against
the index of the file. In memory a frame is ``(height, width, channels)``: uint8, as FFmpeg writes it, or float32
millimetres of depth. Users see ``(channels, height, width)``.

Importing this package imports no codec. torch and torchcodec cost a process 2.8 s of CPU and 300 MB, and Ray starts
several processes that decode nothing (the feeder, a coordinator per epoch, tasks that read rows).
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.decode.buffers import BatchBuffers, FramePool
    from raypipe.decode.clips import (
        ClipExecutor,
        ClipKey,
        ClipRequest,
        ClipStore,
        OpenedClip,
        ThreadExecutor,
        use_one_core,
    )
    from raypipe.decode.frames import FrameDecoder
    from raypipe.decode.images import decode_image, resize_frames
    from raypipe.decode.journal import journal_scope
    from raypipe.decode.keep_spec import KeepSpec, make_keep
    from raypipe.decode.kept import KeepFolder, clear_kept, frames_folder, survey_kept
    from raypipe.decode.spec import (
        ASSIGNED_CPUS,
        ORIGINAL_SIZE,
        CameraDtype,
        DecodeSpec,
        Fit,
        Resize,
        check_decodable,
        check_device,
        check_fit,
        check_resize,
        size_of,
        why_undecodable,
    )
    from raypipe.decode.tasks import TaskExecutor
    from raypipe.decode.video_writer import FrameSink, VideoCoding, open_writer
    from raypipe.decode.videos import OpenVideo, VideoPool, open_video
else:
    __all__, __getattr__ = lazy_names(
        __name__,
        {
            "buffers": "BatchBuffers FramePool",
            "clips": "ClipExecutor ClipKey ClipRequest ClipStore OpenedClip ThreadExecutor use_one_core",
            "frames": "FrameDecoder",
            "images": "decode_image resize_frames",
            "journal": "journal_scope",
            "keep_spec": "KeepSpec make_keep",
            "kept": "KeepFolder clear_kept frames_folder survey_kept",
            "spec": (
                "ASSIGNED_CPUS CameraDtype DecodeSpec Fit ORIGINAL_SIZE Resize check_decodable check_device "
                "check_fit check_resize size_of why_undecodable"
            ),
            "tasks": "TaskExecutor",
            "video_writer": "FrameSink VideoCoding open_writer",
            "videos": "OpenVideo VideoPool open_video",
        },
    )
