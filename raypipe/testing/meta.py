"""Writes the meta/ folder of a made dataset: info, tasks, episodes, statistics, in the layout of each version.

The caller says where the episodes are in the videos; this module decides none of it.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.testing.pixels import DEPTH_MAX_M, DEPTH_MIN_M, DEPTH_SHIFT_M
from raypipe.testing.rows import INDEX_FEATURES, episode_ranges, task_numbers
from raypipe.testing.spec import GRID_SHAPE, CameraSpec, SynthSpec
from raypipe.testing.stats import MadeStats, combine_stats, episode_stats, plain_stats

EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA_PATHS = {
    "v3.0": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "v2.1": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "v2.0": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
}
VIDEO_PATHS = {
    "v3.0": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    "v2.1": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    "v2.0": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
# LeRobot's recorder flushes its buffer of episodes every 10.
_EPISODES_PER_ROW_GROUP = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoPlace:
    """Where one episode is in the videos of one camera."""

    file_number: int
    from_timestamp: float
    to_timestamp: float


def format_path(template: str, number: int, chunks_size: int, video_key: str = "") -> str:
    """Return the path of file `number`, counted over all chunks (in v2.x: of episode `number`)."""
    chunk, within = divmod(number, chunks_size)
    return template.format(
        chunk_index=chunk, file_index=within, episode_chunk=chunk, episode_index=number, video_key=video_key
    )


def write_meta(root: Path, spec: SynthSpec, places: dict[str, list[VideoPlace]]) -> None:
    """Write meta/ of a dataset; `places` lists, for each camera, the place of every episode in order."""
    _write_json(root / "meta/info.json", _info(spec))
    stats = list(_all_episode_stats(spec)) if spec.with_stats else []
    if spec.is_packed:
        _write_tasks_parquet(root / "meta/tasks.parquet", spec.tasks)
        _write_episodes_parquet(root, spec, places, stats)
    else:
        _write_jsonl(root / "meta/tasks.jsonl", _task_lines(spec))
        _write_jsonl(root / "meta/episodes.jsonl", _episode_lines(spec))
    if stats and spec.version == "v2.1":
        _write_jsonl(root / "meta/episodes_stats.jsonl", _stats_lines(stats))
    elif stats:
        combined = combine_stats(stats)
        found = plain_stats(combined, with_quantiles=spec.is_packed, with_count=spec.is_packed)
        _write_json(root / "meta/stats.json", found)


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
        "data_path": DATA_PATHS[spec.version],
        "video_path": VIDEO_PATHS[spec.version] if videos else None,
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
    return features | {name: _feature("float32" if name == "timestamp" else "int64", [1]) for name in index_names}


def _feature(dtype: str, shape: list[int], names: list[str] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "names": names}


def _camera_feature(camera: CameraSpec, spec: SynthSpec) -> dict[str, Any]:
    sizes = {"height": camera.height, "width": camera.width, "channels": 1 if camera.is_depth else 3}
    names = ["channels", "height", "width"] if camera.shape_order == "chw" else list(sizes)
    feature = _feature("video" if camera.is_video else "image", [sizes[name] for name in names], names)
    info: dict[str, Any] = {}
    if camera.is_video:
        info = _video_info(camera, spec.fps)
    if camera.is_depth:
        info |= {"is_depth_map": True, "depth_unit": "mm"}
    if not info:
        return feature
    if spec.version == "v2.0":
        # As v2.0 writers stored it: under another key, and without the size.
        info = {name: value for name, value in info.items() if name not in ("video.height", "video.width")}
        return feature | {"video_info": info}
    return feature | {"info": info}


def _video_info(camera: CameraSpec, fps: int) -> dict[str, Any]:
    info: dict[str, Any] = {
        "video.height": camera.height,
        "video.width": camera.width,
        "video.codec": "hevc" if camera.is_depth else camera.codec,
        "video.pix_fmt": "gray12le" if camera.is_depth else "yuv420p",
        "video.g": camera.gop,
        "video.is_depth_map": camera.is_depth,
        "video.fps": fps,
        "video.channels": 1 if camera.is_depth else 3,
        "has_audio": False,
    }
    if camera.is_depth:
        info |= {"video.depth_min": DEPTH_MIN_M, "video.depth_max": DEPTH_MAX_M}
        info |= {"video.shift": DEPTH_SHIFT_M, "video.use_log": True}
    return info


def _all_episode_stats(spec: SynthSpec) -> Iterable[dict[str, MadeStats]]:
    for episodes in episode_ranges(spec, spec.episodes_per_data_file):
        yield from episode_stats(spec, episodes)


def _task_lines(spec: SynthSpec) -> Iterable[dict[str, Any]]:
    return ({"task_index": number, "task": task} for number, task in enumerate(spec.tasks))


def _episode_lines(spec: SynthSpec) -> Iterable[dict[str, Any]]:
    for episode, length in enumerate(spec.lengths):
        yield {"episode_index": episode, "tasks": _episode_tasks(spec, episode), "length": length}


def _stats_lines(stats: list[dict[str, MadeStats]]) -> Iterable[dict[str, Any]]:
    for episode, found in enumerate(stats):
        plain = plain_stats(found, with_quantiles=False, with_count=True)
        yield {"episode_index": episode, "stats": plain}


def _episode_tasks(spec: SynthSpec, episode: int) -> list[str]:
    length = spec.lengths[episode]
    ends = np.array([0, length - 1])
    numbers = task_numbers(spec, np.full(2, episode), ends, np.full(2, length)).tolist()
    return [spec.tasks[number] for number in dict.fromkeys(numbers)]


def _write_tasks_parquet(path: Path, tasks: tuple[str, ...]) -> None:
    # What pandas stores for a frame with an index named `task`, so that pandas reads the index back.
    columns = [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
        {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object"},
    ]
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [column | {"metadata": None} for column in columns],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.2.0",
    }
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), path)


def _write_episodes_parquet(
    root: Path, spec: SynthSpec, places: dict[str, list[VideoPlace]], stats: list[dict[str, MadeStats]]
) -> None:
    columns = _episode_columns(spec) | _video_columns(spec, places)
    plain = [plain_stats(found, with_quantiles=True, with_count=True) for found in stats]
    for feature, found in (plain[0] if plain else {}).items():
        columns |= {f"stats/{feature}/{name}": [row[feature][name] for row in plain] for name in found}
    for number, episodes in enumerate(episode_ranges(spec, spec.episodes_per_meta_file)):
        rows = slice(episodes.start, episodes.stop)
        chunk, file = divmod(number, spec.chunks_size)
        table = pa.table({name: values[rows] for name, values in columns.items()})
        for name, value in {"meta/episodes/chunk_index": chunk, "meta/episodes/file_index": file}.items():
            table = table.append_column(name, pa.array(np.full(len(table), value)))
        path = root / format_path(EPISODES_PATH, number, spec.chunks_size)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=_EPISODES_PER_ROW_GROUP)


def _episode_columns(spec: SynthSpec) -> dict[str, Any]:
    episodes = np.arange(len(spec.lengths))
    lengths = np.array(spec.lengths)
    stops = np.cumsum(lengths)
    files = episodes // spec.episodes_per_data_file
    return {
        "episode_index": episodes,
        "tasks": [_episode_tasks(spec, episode) for episode in range(len(episodes))],
        "length": lengths,
        "data/chunk_index": files // spec.chunks_size,
        "data/file_index": files % spec.chunks_size,
        "dataset_from_index": stops - lengths,
        "dataset_to_index": stops,
    }


def _video_columns(spec: SynthSpec, places: dict[str, list[VideoPlace]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for camera, found in places.items():
        files = np.array([place.file_number for place in found])
        columns[f"videos/{camera}/chunk_index"] = files // spec.chunks_size
        columns[f"videos/{camera}/file_index"] = files % spec.chunks_size
        columns[f"videos/{camera}/from_timestamp"] = np.array([place.from_timestamp for place in found])
        columns[f"videos/{camera}/to_timestamp"] = np.array([place.to_timestamp for place in found])
    return columns


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=4) + "\n")


def _write_jsonl(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
