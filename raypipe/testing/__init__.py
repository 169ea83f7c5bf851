"""Small real LeRobot datasets for tests, demos and benchmarks, and the test of resuming; users may use both.

``write_dataset`` writes real parquet and mp4 files in format v3.0, v2.1 or v2.0. The pixels of every frame say which
(episode, frame, camera) it is, and ``read_stamp`` reads that back after coding and resizing::

    root = write_dataset("out/demo", SynthSpec(lengths=(20, 1, 35)))

::

    spec.py     the contents of a made dataset                              SynthSpec, CameraSpec
    write.py    rows, videos, then meta/                                    write_dataset
    rows.py, video.py, meta.py, stats.py                                    its parts
    pixels.py   the frames of a camera: a stamp on a background
    stamp.py    pixels that say which (episode, frame, camera) they are     Stamp, read_stamp
    resume.py   the contract of every resumable iterator, as a function     assert_resumes_exactly
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.testing.resume import Resumable, assert_resumes_exactly
    from raypipe.testing.spec import CameraSpec, SynthSpec, numbered_cameras, varied_lengths
    from raypipe.testing.stamp import GAP_EPISODE, Stamp, draw_stamp, read_stamp
    from raypipe.testing.video import SAME_BYTES as SAME_BYTES
    from raypipe.testing.video import encoders, has_encoder
    from raypipe.testing.write import write_dataset
else:
    _, __getattr__ = lazy_names(
        __name__,
        {
            "resume": "Resumable assert_resumes_exactly",
            "spec": "CameraSpec SynthSpec numbered_cameras varied_lengths",
            "stamp": "GAP_EPISODE Stamp draw_stamp read_stamp",
            "video": "SAME_BYTES encoders has_encoder",
            "write": "write_dataset",
        },
    )

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
