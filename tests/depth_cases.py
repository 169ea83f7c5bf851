"""Datasets with a depth camera: a scene that grows deeper from frame to frame, and videos of given numbers."""

import io
import json
import subprocess
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


def write_numbers(root, numbers, *, codec=("-c:v", "libx265", "-x265-params", "lossless=1:log-level=none"), **info):
    """Write a dataset of one depth video that holds these numbers ``(frames, height, width)``, exactly.

    Args:
        codec: options of `ffmpeg`.
        info: what info.json says of the camera; None takes a key out.
    """
    num_frames, height, width = numbers.shape
    camera = CameraSpec(name=DEPTH, height=height, width=width, kind="depth")
    root = write_dataset(root, SynthSpec(lengths=(5, num_frames - 5), cameras=(camera,), with_stats=False))
    path = root / "meta/info.json"
    content = json.loads(path.read_text())
    about = content["features"][DEPTH]["info"]
    about.update({f"video.{key}": value for key, value in info.items()})
    content["features"][DEPTH]["info"] = {key: value for key, value in about.items() if value is not None}
    path.write_text(json.dumps(content))
    video, pix_fmt = root / f"videos/{DEPTH}/chunk-000/file-000.mp4", about["video.pix_fmt"]
    source = ["-f", "rawvideo", "-pix_fmt", pix_fmt, "-s", f"{width}x{height}", "-r", "10", "-i", "-"]
    command = ["ffmpeg", "-v", "error", "-y", *source, *codec, "-pix_fmt", pix_fmt, "-f", "mov", video]
    subprocess.run(command, input=numbers.astype("<u2").tobytes(), check=True)
    return root


def random_numbers(num_bits, num_frames=26, height=64, width=100):
    """Return noise over the whole range, in which no two frames are alike."""
    numbers = np.random.default_rng(0).integers(0, 1 << num_bits, (num_frames, height, width))
    # The ends, wherever else they fall.
    numbers[:, 0, :2] = 0, (1 << num_bits) - 1
    return numbers.astype(np.uint16)


def documented_mm(numbers, codes):
    """Return the millimetres of LeRobot's numbers of 12 bits, by its documentation and in double precision."""
    share, low, high = numbers.astype(np.float64) / 4095, codes.min_m, codes.max_m
    if not codes.is_log:
        return np.rint(1000 * (low + share * (high - low)))
    first, last = np.log(low + codes.shift_m), np.log(high + codes.shift_m)
    return np.rint(1000 * (np.exp(first + share * (last - first)) - codes.shift_m).clip(low, high))
