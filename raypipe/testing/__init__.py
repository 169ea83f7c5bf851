"""Small real LeRobot datasets for tests, demos and benchmarks, and the test of resuming; users may use both.

``write_dataset`` writes real parquet and mp4 files in format v3.0, v2.1 or v2.0. The pixels of every frame say which
(episode, frame, camera) it is, and ``read_stamp`` reads that back after coding and resizing::

    root = write_dataset("out/demo", SynthSpec(lengths=(20, 1, 35)))

The modules, from the bottom up (each may use those above it)::

    spec.py    the contents of a made dataset                           SynthSpec, CameraSpec
    checks.py  pixels that say which (episode, frame, camera) they are  Stamp, read_stamp
               a test that any iterator resumes exactly                 assert_resumes_exactly
    video.py   the frames of a camera, and mp4 files of them
    write.py   rows, videos, then meta/                                 write_dataset
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.testing.checks import GAP_EPISODE, Resumable, Stamp, assert_resumes_exactly, draw_stamp, read_stamp
    from raypipe.testing.spec import CameraSpec, SynthSpec, numbered_cameras, varied_lengths
    from raypipe.testing.video import codec_options as codec_options
    from raypipe.testing.video import encoders, has_encoder
    from raypipe.testing.video import why_unwritable as why_unwritable
    from raypipe.testing.write import write_dataset
else:
    _, __getattr__ = lazy_names(__name__)

__all__ = [
    "GAP_EPISODE",
    "CameraSpec",
    "Resumable",
    "Stamp",
    "SynthSpec",
    "assert_resumes_exactly",
    "draw_stamp",
    "encoders",
    "has_encoder",
    "numbered_cameras",
    "read_stamp",
    "varied_lengths",
    "write_dataset",
]
