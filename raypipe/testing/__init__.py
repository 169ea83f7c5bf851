"""Small real LeRobot datasets for tests, demos and benchmarks, and the contract of resuming; for users too.

``write_dataset`` writes true parquet and mp4 files in format v3.0, v2.1 or v2.0. The pixels of every frame
say which (episode, frame, camera) it is, and ``read_stamp`` reads that back after coding and resizing::

    root = write_dataset("out/demo", SynthSpec(lengths=(20, 1, 35)))
"""

from raypipe.testing.resume import Resumable, assert_resumes_exactly
from raypipe.testing.spec import CameraSpec, SynthSpec, numbered_cameras, varied_lengths
from raypipe.testing.stamp import GAP_EPISODE, Stamp, draw_stamp, read_stamp
from raypipe.testing.video import encoders, has_encoder
from raypipe.testing.write import write_dataset

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
