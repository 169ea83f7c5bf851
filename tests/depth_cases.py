"""A dataset with a depth camera whose scene grows deeper from frame to frame."""

import io
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from raypipe.testing import CameraSpec, SynthSpec, write_dataset

DEPTH = "observation.images.depth"
NEAR_MM, MIDDLE_MM = 100, 1500


def write_deepening(root, spec=None):
    """Write it. Left in a frame the nearest, in the middle a wall that stands still, right what moves away."""
    camera = CameraSpec(name=DEPTH, height=48, width=96, kind="depth-image")
    root = write_dataset(root, replace(spec or SynthSpec(lengths=(70,)), cameras=(camera,), with_stats=False))
    for path in sorted((root / "data").rglob("*.parquet")):
        table = pq.read_table(path)
        frames = [_tiff(frame) for frame in table.column("frame_index").to_pylist()]
        place = table.schema.get_field_index(DEPTH)
        column = pa.array([{"bytes": data, "path": None} for data in frames], table.schema.field(DEPTH).type)
        pq.write_table(table.set_column(place, table.schema.field(DEPTH), column), path)
    return root


def _tiff(frame):
    millimetres = np.full((48, 96), NEAR_MM, dtype=np.uint16)
    millimetres[:, 32:64] = MIDDLE_MM
    millimetres[:, 64:] = MIDDLE_MM + 100 * frame
    buffer = io.BytesIO()
    Image.fromarray(millimetres).save(buffer, format="tiff")
    return buffer.getvalue()


def wall_of(pixels):
    """How bright the wall is."""
    return float(pixels[8:40, 40:56].mean())
