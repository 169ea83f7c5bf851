"""Writes a made dataset to disk: rows, videos, then meta/ in the layout of each version.

A row's values are a pure function of (episode, frame, seed): ``state[0]`` and ``action[0]`` are the episode,
``state[1]`` and ``action[1]`` the frame, the rest smooth curves. So every row shows its episode and frame. Statistics
of rows are exact; those of cameras come from at most 4 frames an episode, drawn again, before coding loss.
"""

import io
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from raypipe.errors import ConfigError
from raypipe.format import (
    DATA_TEMPLATES,
    EPISODES_TEMPLATE,
    INDEX_FEATURES,
    QUANTILES,
    VIDEO_TEMPLATES,
    describe_values,
    format_path,
    in_episodes_file,
    pool_stats,
    tasks_table,
)
from raypipe.storage import inside
from raypipe.testing.checks import GAP_EPISODE
from raypipe.testing.spec import GRID_SHAPE, CameraSpec, SynthSpec
from raypipe.testing.video import (
    DEPTH_MAX_M,
    DEPTH_MIN_M,
    DEPTH_SHIFT_M,
    FrameRun,
    check_tools,
    draw_frames,
    iter_frames,
    write_video,
)
from raypipe.text import count_bar

MadeStats = Mapping[str, NDArray[Any]]

# Drawing and encoding keep one core busy per file; more threads would only take cores from other work.
_NUM_THREADS = 2
# LeRobot's recorder flushes its buffer of episodes every 10.
_EPISODES_PER_ROW_GROUP = 10
_STATS_FRAMES = 4
_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_LEFT_OUT = {"v3.0": (), "v2.1": tuple(QUANTILES), "v2.0": (*QUANTILES, "count")}
"""The statistics that a version does not store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoPlace:
    """Where one episode is in the videos of one camera."""

    file_number: int
    from_timestamp: float
    to_timestamp: float


def write_dataset(root: str | os.PathLike[str], spec: SynthSpec, *, progress: bool = False) -> Path:
    """Write the dataset that `spec` describes to the folder `root`, and return it as a path.

    meta/ is written last, so a folder without it is unfinished. The same spec gives the same rows, metadata and stamps.

    Args:
        progress: show a bar, at a terminal or in a notebook.

    Raises:
        ConfigError: `root` is not empty, or FFmpeg here lacks what `spec` needs; then nothing was written.
    """
    folder = Path(root)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{str(folder)!r} is not an empty folder, and write_dataset changes no files. Choose another folder."
        )
    check_tools(spec)
    folder.mkdir(parents=True, exist_ok=True)
    for number, episodes in enumerate(episode_ranges(spec, spec.episodes_per_data_file)):
        path = format_path(DATA_TEMPLATES[spec.is_packed], number, chunks_size=spec.chunks_size)
        write_rows(spec, episodes, inside(folder, path))
    write_meta(folder, spec, _write_videos(folder, spec, progress=progress))
    return folder


def _write_videos(root: Path, spec: SynthSpec, *, progress: bool) -> dict[str, list[VideoPlace]]:
    runs = [_runs(spec, episodes) for episodes in episode_ranges(spec, spec.episodes_per_video_file)]
    cameras = {number: camera.name for number, camera in enumerate(spec.cameras) if camera.is_video}
    files = list(product(cameras, range(len(runs))))

    def write(file: tuple[int, int]) -> list[tuple[float, float]]:
        camera, number = file
        path = format_path(VIDEO_TEMPLATES[spec.is_packed], number, cameras[camera], spec.chunks_size)
        return write_video(spec, camera, inside(root, path), runs[number])

    places: dict[str, list[VideoPlace]] = {name: [] for name in cameras.values()}
    with ThreadPoolExecutor(_NUM_THREADS) as pool, count_bar("writing videos", len(files), is_on=progress) as advance:
        for (camera, number), times in zip(files, pool.map(write, files), strict=True):
            advance(1)
            for (episode, _), (start, stop) in zip(runs[number], times, strict=True):
                if episode != GAP_EPISODE:
                    place = VideoPlace(file_number=number, from_timestamp=start, to_timestamp=stop)
                    places[cameras[camera]].append(place)
    return places


def _runs(spec: SynthSpec, episodes: range) -> list[FrameRun]:
    runs: list[FrameRun] = []
    for episode in episodes:
        if runs and spec.gap_frames:
            runs.append((GAP_EPISODE, spec.gap_frames))
        runs.append((episode, spec.lengths[episode]))
    return runs


def episode_ranges(spec: SynthSpec, per_file: int) -> list[range]:
    """Return the episodes of each file, with `per_file` in a file (in v2.x always 1)."""
    step, count = per_file if spec.is_packed else 1, len(spec.lengths)
    return [range(start, min(start + step, count)) for start in range(0, count, step)]


def row_columns(spec: SynthSpec, episodes: range) -> dict[str, NDArray[Any]]:
    """Return the columns of some episodes by feature, without images, in the order of info.json."""
    lengths = np.array(spec.lengths[episodes.start : episodes.stop])
    episode = np.repeat(episodes, lengths)
    frame = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    length = np.repeat(lengths, lengths)
    columns: dict[str, NDArray[Any]] = {
        "observation.state": _curves(spec, spec.state_dim, episode, frame),
        "action": _curves(spec, spec.action_dim, episode, frame + 0.5),
        **{name: _extra_column(name, episode, frame, length) for name in spec.extra_features},
        "timestamp": (frame / spec.fps).astype(np.float32),
        "frame_index": frame,
        "episode_index": episode,
        "index": sum(spec.lengths[: episodes.start]) + np.arange(len(frame)),
        "task_index": task_numbers(spec, episode, frame, length),
    }
    return {name: values for name, values in columns.items() if name not in spec.drop_columns}


def task_numbers(
    spec: SynthSpec, episode: NDArray[np.int64], frame: NDArray[np.int64], length: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the task of each row."""
    is_second_half = frame >= (length + 1) // 2 if spec.two_tasks else 0
    return (episode + is_second_half) % len(spec.tasks)


def write_rows(spec: SynthSpec, episodes: range, path: Path) -> None:
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


def _table(spec: SynthSpec, episodes: range) -> pa.Table:
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
    if values.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    # 2-d features are plain nested lists, the storage type of Hugging Face's Array2D.
    return pa.array(values.tolist(), pa.list_(pa.list_(pa.float32())))


def _images(spec: SynthSpec, camera_number: int, episodes: range) -> pa.Array:
    is_depth = spec.cameras[camera_number].is_depth
    suffix = "tiff" if is_depth else "png"
    cells: list[dict[str, Any]] = []
    for episode in episodes:
        for chunk in iter_frames(spec, camera_number, episode, spec.lengths[episode]):
            for image in chunk:
                buffer = io.BytesIO()
                drawn = Image.fromarray(image if is_depth else image.transpose(1, 2, 0))
                drawn.save(buffer, suffix, **({} if is_depth else {"compress_level": 1}))
                cells.append({"bytes": buffer.getvalue(), "path": f"frame-{len(cells):06d}.{suffix}"})
    return pa.array(cells, _IMAGE_TYPE)


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


def _plain(spec: SynthSpec, stats: Mapping[str, MadeStats]) -> dict[str, Any]:
    """Return statistics as nested lists for JSON and parquet, as far as the version stores them."""
    return {
        feature: {name: value.tolist() for name, value in found.items() if name not in _LEFT_OUT[spec.version]}
        for feature, found in stats.items()
    }


def _episode_stats(spec: SynthSpec, episodes: range) -> list[dict[str, MadeStats]]:
    """Return the statistics of each of the episodes, by feature; strings have none."""
    columns = row_columns(spec, episodes)
    stats = []
    start = 0
    for episode in episodes:
        rows = slice(start, start + spec.lengths[episode])
        found: dict[str, MadeStats] = {
            name: describe_values(values[rows]) for name, values in columns.items() if values.dtype != object
        }
        for number, camera in enumerate(spec.cameras):
            found[camera.name] = _describe_camera(spec, number, episode)
        stats.append(found)
        start = rows.stop
    return stats


def _describe_camera(spec: SynthSpec, camera_number: int, episode: int) -> MadeStats:
    length = spec.lengths[episode]
    chosen = np.unique(np.linspace(0, length - 1, min(length, _STATS_FRAMES)).astype(np.int64))
    camera = spec.cameras[camera_number]
    # As in LeRobot, take every n-th pixel: here about 75 x 75 of them.
    step = max(1, min(camera.height, camera.width) // 75)
    frames = draw_frames(spec, camera_number, episode, chosen)[..., ::step, ::step]
    is_depth = camera.is_depth
    channels = 1 if is_depth else 3
    pixels = frames.reshape(len(chosen), channels, -1).transpose(0, 2, 1).reshape(-1, channels)
    found = describe_values(pixels if is_depth else pixels / 255)
    shaped = {name: values.reshape(channels, 1, 1) for name, values in found.items() if name != "count"}
    return shaped | {"count": np.array([len(chosen)])}


def write_meta(root: Path, spec: SynthSpec, places: dict[str, list[VideoPlace]]) -> None:
    """Write meta/ of a dataset; `places` lists, for each camera, the place of every episode in order."""
    _write_json(root / "meta/info.json", _info(spec))
    ranges = episode_ranges(spec, spec.episodes_per_data_file) if spec.with_stats else []
    stats = [found for episodes in ranges for found in _episode_stats(spec, episodes)]
    if spec.is_packed:
        pq.write_table(tasks_table(spec.tasks), root / "meta/tasks.parquet")
        _write_episodes_parquet(root, spec, places, [_plain(spec, found) for found in stats])
    else:
        tasks = ({"task_index": number, "task": task} for number, task in enumerate(spec.tasks))
        _write_jsonl(root / "meta/tasks.jsonl", tasks)
        names = ("episode_index", "tasks", "length")
        rows = zip(range(len(spec.lengths)), _episode_tasks(spec), spec.lengths, strict=True)
        _write_jsonl(root / "meta/episodes.jsonl", (dict(zip(names, row, strict=True)) for row in rows))
    if stats and spec.version == "v2.1":
        lines = ({"episode_index": episode, "stats": _plain(spec, found)} for episode, found in enumerate(stats))
        _write_jsonl(root / "meta/episodes_stats.jsonl", lines)
    elif stats:
        pooled = {
            feature: {name: value.astype(stats[0][feature][name].dtype) for name, value in found.items()}
            for feature, found in pool_stats(stats).items()
        }
        _write_json(root / "meta/stats.json", _plain(spec, pooled))


def _info(spec: SynthSpec) -> dict[str, Any]:
    videos = [camera for camera in spec.cameras if camera.is_video]
    num_episodes = len(spec.lengths)
    if spec.is_packed:
        extra = {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}
    else:
        num_chunks = -(-num_episodes // spec.chunks_size)
        extra = {"total_videos": len(videos) * num_episodes, "total_chunks": num_chunks}
    return {
        "codebase_version": spec.version,
        "robot_type": spec.robot_type,
        "total_episodes": num_episodes,
        "total_frames": sum(spec.lengths),
        "total_tasks": len(spec.tasks),
        "chunks_size": spec.chunks_size,
        **extra,
        "fps": spec.fps,
        "splits": {"train": f"0:{num_episodes}"},
        "data_path": DATA_TEMPLATES[spec.is_packed],
        "video_path": VIDEO_TEMPLATES[spec.is_packed] if videos else None,
        "features": _features(spec),
    }


def _features(spec: SynthSpec) -> dict[str, Any]:
    vectors = {"observation.state": spec.state_dim, "action": spec.action_dim}
    features: dict[str, Any] = {
        name: _feature("float32", [dim], [f"joint_{number}" for number in range(dim)]) for name, dim in vectors.items()
    }
    features |= {camera.name: _camera_feature(camera, spec) for camera in spec.cameras}
    extras = {
        "next.done": _feature("bool", [1]),
        "observation.grid": _feature("float32", list(GRID_SHAPE)),
        "note": _feature("string", [1]),
    }
    features |= {name: feature for name, feature in extras.items() if name in spec.extra_features}
    index_names = [name for name in INDEX_FEATURES if name not in spec.drop_columns]
    return features | {name: _feature(INDEX_FEATURES[name], [1]) for name in index_names}


def _feature(dtype: str, shape: list[int], names: list[str] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "names": names}


def _camera_feature(camera: CameraSpec, spec: SynthSpec) -> dict[str, Any]:
    sizes = {"height": camera.height, "width": camera.width, "channels": 1 if camera.is_depth else 3}
    names = ["channels", "height", "width"] if camera.shape_order == "chw" else list(sizes)
    feature = _feature("video" if camera.is_video else "image", [sizes[name] for name in names], names)
    info: dict[str, Any] = {}
    if camera.is_video:
        info = {
            "video.height": camera.height,
            "video.width": camera.width,
            "video.codec": "hevc" if camera.is_depth else camera.codec,
            "video.pix_fmt": "gray12le" if camera.is_depth else "yuv420p",
            "video.g": camera.gop,
            "video.is_depth_map": camera.is_depth,
            "video.fps": spec.fps,
            "video.channels": sizes["channels"],
            "has_audio": False,
        }
        if camera.is_depth:
            info |= {"video.depth_min": DEPTH_MIN_M, "video.depth_max": DEPTH_MAX_M}
            info |= {"video.shift": DEPTH_SHIFT_M, "video.use_log": True}
    if camera.is_depth:
        info |= {"is_depth_map": True, "depth_unit": "mm"}
    if not info:
        return feature
    if spec.version == "v2.0":
        # As v2.0 writers stored it: under another key, and without the size.
        info = {name: value for name, value in info.items() if name not in ("video.height", "video.width")}
        return feature | {"video_info": info}
    return feature | {"info": info}


def _episode_tasks(spec: SynthSpec) -> list[list[str]]:
    """Return the tasks of each episode, in the order in which they come."""
    tasks = []
    for episode, length in enumerate(spec.lengths):
        numbers = task_numbers(spec, np.full(2, episode), np.array([0, length - 1]), np.full(2, length)).tolist()
        tasks.append([spec.tasks[number] for number in dict.fromkeys(numbers)])
    return tasks


def _write_episodes_parquet(
    root: Path, spec: SynthSpec, places: dict[str, list[VideoPlace]], stats: list[dict[str, Any]]
) -> None:
    columns = _episode_columns(spec, places)
    for feature, found in (stats[0] if stats else {}).items():
        columns |= {f"stats/{feature}/{name}": [row[feature][name] for row in stats] for name in found}
    for number, episodes in enumerate(episode_ranges(spec, spec.episodes_per_meta_file)):
        rows = slice(episodes.start, episodes.stop)
        table = pa.table({name: values[rows] for name, values in columns.items()})
        path = root / format_path(EPISODES_TEMPLATE, number, chunks_size=spec.chunks_size)
        path.parent.mkdir(parents=True, exist_ok=True)
        table = in_episodes_file(table, number, spec.chunks_size)
        pq.write_table(table, path, row_group_size=_EPISODES_PER_ROW_GROUP)


def _episode_columns(spec: SynthSpec, places: dict[str, list[VideoPlace]]) -> dict[str, Any]:
    episodes = np.arange(len(spec.lengths))
    stops = np.cumsum(spec.lengths)
    columns: dict[str, Any] = {
        "episode_index": episodes,
        "tasks": _episode_tasks(spec),
        "length": np.array(spec.lengths),
        **_file_columns("data", episodes // spec.episodes_per_data_file, spec),
        "dataset_from_index": stops - spec.lengths,
        "dataset_to_index": stops,
    }
    for camera, found in places.items():
        columns |= _file_columns(f"videos/{camera}", np.array([place.file_number for place in found]), spec)
        for name in ("from_timestamp", "to_timestamp"):
            columns[f"videos/{camera}/{name}"] = np.array([getattr(place, name) for place in found])
    return columns


def _file_columns(folder: str, number: NDArray[np.int64], spec: SynthSpec) -> dict[str, Any]:
    chunk, file = np.divmod(number, spec.chunks_size)
    return {f"{folder}/chunk_index": chunk, f"{folder}/file_index": file}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=4) + "\n")


def _write_jsonl(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
