"""The rows of a made dataset: numpy columns, Arrow tables, parquet files.

A row's values are a pure function of (episode, frame, seed): ``state[0]`` and ``action[0]`` are the episode,
``state[1]`` and ``action[1]`` the frame, the rest smooth curves. So every row shows its episode and frame.
"""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from raypipe.testing.pixels import iter_frames
from raypipe.testing.spec import GRID_SHAPE, SynthSpec

INDEX_FEATURES = ("timestamp", "frame_index", "episode_index", "index", "task_index")

_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@dataclass(frozen=True, slots=True)
class EpisodeRange:
    """Episodes ``start..stop`` of a dataset, and the dataset's row number at which the first one starts."""

    start: int
    stop: int
    first_row: int


def episode_ranges(spec: SynthSpec, per_file: int) -> list[EpisodeRange]:
    """Return the episodes of each file, with `per_file` in a file (in v2.x always 1)."""
    step = per_file if spec.is_packed else 1
    first_rows = np.concatenate([[0], np.cumsum(spec.lengths)])
    starts = range(0, len(spec.lengths), step)
    return [EpisodeRange(start, min(start + step, len(spec.lengths)), int(first_rows[start])) for start in starts]


def row_columns(spec: SynthSpec, episodes: EpisodeRange) -> dict[str, NDArray[Any]]:
    """Return the columns of some episodes by feature, without images, in the order of info.json."""
    lengths = np.array(spec.lengths[episodes.start : episodes.stop])
    episode = np.repeat(np.arange(episodes.start, episodes.stop), lengths)
    frame = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    length = np.repeat(lengths, lengths)
    columns: dict[str, NDArray[Any]] = {
        "observation.state": _curves(spec, spec.state_dim, episode, frame),
        "action": _curves(spec, spec.action_dim, episode, frame + 0.5),
        **{name: _extra_column(name, episode, frame, length) for name in spec.extra_features},
        "timestamp": (frame / spec.fps).astype(np.float32),
        "frame_index": frame,
        "episode_index": episode,
        "index": episodes.first_row + np.arange(len(frame)),
        "task_index": task_numbers(spec, episode, frame, length),
    }
    return {name: values for name, values in columns.items() if name not in spec.drop_columns}


def task_numbers(
    spec: SynthSpec, episode: NDArray[np.int64], frame: NDArray[np.int64], length: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the task of each row."""
    is_second_half = frame >= (length + 1) // 2 if spec.two_tasks else 0
    return (episode + is_second_half) % len(spec.tasks)


def write_rows(spec: SynthSpec, episodes: EpisodeRange, path: Path) -> None:
    """Write the parquet file of some episodes, with row groups as `spec.row_groups` says."""
    table = _table(spec, episodes)
    lengths = spec.lengths[episodes.start : episodes.stop]
    if spec.row_groups == "per-episode":
        sizes = list(lengths)
    elif spec.row_groups == "per-file":
        sizes = [len(table)]
    else:
        sizes = [spec.row_groups] * -(-len(table) // spec.row_groups)
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, table.schema, compression="snappy") as writer:
        start = 0
        for size in sizes:
            writer.write_table(table.slice(start, size), row_group_size=size)
            start += size


def _curves(spec: SynthSpec, dim: int, episode: NDArray[np.int64], frame: NDArray[Any]) -> NDArray[np.float32]:
    number = np.arange(dim)
    phase = episode[:, None] + number + spec.seed
    values: NDArray[Any] = np.sin(frame[:, None] * (0.05 * number) + phase)
    values[:, 0] = episode
    # Round down: the action's curves run half a frame ahead, but its frame number does not.
    values[:, 1:2] = np.floor(frame[:, None])[:, : dim - 1]
    curves: NDArray[np.float32] = values.astype(np.float32)
    return curves


def _extra_column(
    name: str, episode: NDArray[np.int64], frame: NDArray[np.int64], length: NDArray[np.int64]
) -> NDArray[Any]:
    if name == "next.done":
        return np.asarray(frame == length - 1)
    if name == "observation.grid":
        cells = np.arange(np.prod(GRID_SHAPE)).reshape(GRID_SHAPE)
        return (cells + frame[:, None, None]).astype(np.float32)
    notes = [f"episode {e} frame {f}" for e, f in zip(episode.tolist(), frame.tolist(), strict=True)]
    return np.array(notes, dtype=object)


def _table(spec: SynthSpec, episodes: EpisodeRange) -> pa.Table:
    arrays = {name: _array(values) for name, values in row_columns(spec, episodes).items()}
    images = {
        camera.name: _images(spec, number, episodes)
        for number, camera in enumerate(spec.cameras)
        if not camera.is_video
    }
    table = pa.table({**images, **arrays})
    kinds = {name: _hugging_face_type(table.schema.field(name).type, spec) for name in table.column_names}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": kinds}})})


def _array(values: NDArray[Any]) -> pa.Array:
    if values.dtype == object:
        return pa.array(values.tolist(), pa.string())
    if values.ndim == 1:
        return pa.array(values)
    flat = pa.array(values.ravel())
    if values.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    # 2-d features are plain nested lists, the storage type of Hugging Face's Array2D.
    inner = pa.ListArray.from_arrays(np.arange(0, values.size + 1, values.shape[2], dtype=np.int32), flat)
    return pa.ListArray.from_arrays(np.arange(0, len(inner) + 1, values.shape[1], dtype=np.int32), inner)


def _images(spec: SynthSpec, camera_number: int, episodes: EpisodeRange) -> pa.Array:
    is_depth = spec.cameras[camera_number].is_depth
    suffix = "tiff" if is_depth else "png"
    cells: list[dict[str, Any]] = []
    for episode in range(episodes.start, episodes.stop):
        for chunk in iter_frames(spec, camera_number, episode, spec.lengths[episode]):
            for image in chunk:
                data = _file_bytes(image if is_depth else image.transpose(1, 2, 0), suffix)
                cells.append({"bytes": data, "path": f"frame-{len(cells):06d}.{suffix}"})
    return pa.array(cells, _IMAGE_TYPE)


def _file_bytes(image: NDArray[Any], suffix: str) -> bytes:
    buffer = io.BytesIO()
    picture = Image.fromarray(image)
    if suffix == "png":
        picture.save(buffer, "PNG", compress_level=1)
    else:
        picture.save(buffer, "TIFF")
    return buffer.getvalue()


def _hugging_face_type(kind: pa.DataType, spec: SynthSpec) -> dict[str, Any]:
    if pa.types.is_struct(kind):
        return {"_type": "Image"}
    if pa.types.is_fixed_size_list(kind):
        value = {"dtype": "float32", "_type": "Value"}
        name = "List" if spec.is_packed else "Sequence"
        return {"feature": value, "length": kind.list_size, "_type": name}
    if pa.types.is_list(kind):
        return {"shape": list(GRID_SHAPE), "dtype": "float32", "_type": "Array2D"}
    return {"dtype": "float32" if pa.types.is_floating(kind) else str(kind), "_type": "Value"}
