"""``info.json`` of the copy: that of the source, in the form of v3.0."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from raypipe.format import DatasetMeta, read_json
from raypipe.reshard.columns import Columns
from raypipe.reshard.plan import DATA_PATH, VIDEO_PATH, Numbering
from raypipe.reshard.spec import FILES_PER_CHUNK, RECORDER_GOP, SOURCE, ReshardSpec

_OF_OLDER_VERSIONS: Final = ("total_videos", "total_chunks")
_OF_SOUND: Final = "audio."


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How a camera is re-encoded."""

    codec: str
    height: int
    width: int
    gop: int
    crf: int


def make_info(
    meta: DatasetMeta,
    spec: ReshardSpec,
    numbering: Numbering,
    columns: Columns,
    encodings: Mapping[str, Encoding],
    num_tasks: int,
) -> dict[str, Any]:
    """Return ``info.json`` of the copy; it keeps keys that raypipe does not know."""
    source = read_json(meta.storage, "meta/info.json")
    features = _features(meta, source["features"], columns, encodings)
    has_videos = any(feature["dtype"] == "video" for feature in features.values())
    kept = {name: value for name, value in source.items() if name not in _OF_OLDER_VERSIONS}
    return kept | {
        "codebase_version": "v3.0",
        "total_episodes": len(numbering),
        "total_frames": int(meta.episodes.length[numbering.rows].sum()),
        "total_tasks": num_tasks,
        "chunks_size": FILES_PER_CHUNK,
        "data_files_size_in_mb": spec.data_mb,
        "video_files_size_in_mb": spec.video_mb,
        # LeRobot stores a whole number.
        "fps": int(meta.fps) if meta.fps == int(meta.fps) else meta.fps,
        "splits": _splits(meta, numbering),
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if has_videos else None,
        "features": features,
    }


def _splits(meta: DatasetMeta, numbering: Numbering) -> dict[str, str]:
    """Return the source's splits in the new numbers; one split of all episodes if it has none."""
    old = meta.episodes.episode_index[numbering.rows]
    bounds = {name: np.searchsorted(old, span) for name, span in meta.splits.items()}
    return {name: f"{start}:{stop}" for name, (start, stop) in bounds.items()} or {"train": f"0:{len(numbering)}"}


def _features(
    meta: DatasetMeta, declared: Mapping[str, Any], columns: Columns, encodings: Mapping[str, Encoding]
) -> dict[str, Any]:
    features = {}
    for name, found in declared.items():
        if name in columns.absent or name in columns.dropped:
            continue
        feature = {"names": None, **deepcopy(found)}
        if feature["dtype"] == "video":
            feature = _video_feature(feature, meta.features[name].shape, encodings.get(name), meta.fps)
        features[name] = feature
    return features | dict(columns.added)


def _video_feature(
    feature: dict[str, Any], shape: tuple[int, ...], encoding: Encoding | None, fps: float
) -> dict[str, Any]:
    """Return the declaration of a camera: its record under v3.0's name, without sound, which is not copied."""
    older = feature.pop("video_info", None) or {}
    record = {**older, **(feature.get("info") or {})}
    if record.get("has_audio"):
        record = {key: value for key, value in record.items() if not key.startswith(_OF_SOUND)} | {"has_audio": False}
    if encoding is not None:
        feature["shape"] = _resized(feature, shape, encoding)
        record |= {
            "video.height": encoding.height,
            "video.width": encoding.width,
            "video.codec": encoding.codec,
            "video.pix_fmt": "yuv420p",
            "video.fps": int(fps) if fps == int(fps) else fps,
            "video.channels": 3,
            "has_audio": False,
            "video.g": encoding.gop,
            "video.crf": encoding.crf,
        }
        # The options of the first encoder do not describe these packets.
        record = {key: value for key, value in record.items() if key not in _OF_FIRST_ENCODER}
    return {**feature, "info": record} if record else feature


_OF_FIRST_ENCODER: Final = ("video.preset", "video.fast_decode", "video.video_backend", "video.extra_options")


def _resized(feature: Mapping[str, Any], shape: tuple[int, ...], encoding: Encoding) -> list[int]:
    """Return the shape with the new height and width, in the source's order of axes."""
    sizes = {"c": shape[0], "h": encoding.height, "w": encoding.width}
    names = feature.get("names")
    axes = [str(name)[:1] for name in names] if isinstance(names, list) else []
    if sorted(axes) == ["c", "h", "w"]:
        return [sizes[axis] for axis in axes]
    is_channels_first = list(feature["shape"])[:1] == [shape[0]] and list(feature["shape"])[-1:] != [shape[0]]
    return [sizes[axis] for axis in ("chw" if is_channels_first else "hwc")]


def plan_encodings(spec: ReshardSpec, sources: Mapping[str, tuple[str, int, int]]) -> dict[str, Encoding]:
    """Return how each camera is re-encoded.

    Args:
        sources: codec, height and width of each camera, read from its files.
    """
    gop = RECORDER_GOP if isinstance(spec.gop, str) else spec.gop
    encodings = {}
    for camera, (codec, *size) in sources.items():
        height, width = size if isinstance(spec.size, str) else spec.size
        chosen = codec if spec.codec == SOURCE else spec.codec
        encodings[camera] = Encoding(codec=chosen, height=height, width=width, gop=gop, crf=spec.crf)
    return encodings
