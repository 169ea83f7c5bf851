"""``meta/`` of the copy: ``info.json``, the episode table in one pass, tasks, statistics, the origin, and other files.

The driver writes it last, from the plan and from the records of the finished files.
"""

import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raypipe.errors import DatasetError, as_damage
from raypipe.format import (
    DATA_TEMPLATES,
    EPISODES_TEMPLATE,
    FILES_PER_CHUNK,
    GLOBAL,
    VIDEO_TEMPLATES,
    find_stats_file,
    format_path,
    in_episodes_file,
    one_line,
    read_json,
    tasks_table,
)
from raypipe.reshard.data import SourceEpisodes, StatsPool, computed_kinds, stats_arrays
from raypipe.reshard.plan import CopyJob, Encoding, FilePlan
from raypipe.reshard.videos import video_columns
from raypipe.reshard.workspace import ORIGIN
from raypipe.storage import Storage
from raypipe.text import counted, either

MAPPING: Final = "meta/reshard_episodes.parquet"
"""Each episode's number in the copy and in the source."""

EPISODES_PER_ROW_GROUP: Final = 500
"""LeRobot's recorder writes 10. Readers read all rows of a few columns, which favours fewer and larger groups."""


def write_meta(job: CopyJob, files: FilePlan, source: SourceEpisodes, size_of: Mapping[str, int]) -> list[str]:
    """Write all that is not rows or videos, and return notes on it; `size_of` names all files of the source."""
    workspace = job.workspace
    pool = StatsPool()
    _write_episodes(job, _episode_tables(job, files, source, pool))
    stats, notes = _dataset_stats(job, pool)
    if stats:
        workspace.write_json(GLOBAL, stats)
    if job.tasks.texts:
        workspace.write_table("meta/tasks.parquet", tasks_table(job.tasks.texts))
    workspace.write_table(MAPPING, _mapping(job))
    workspace.write_json("meta/info.json", _make_info(job))
    origin = {"fingerprint": workspace.fingerprint, "root": job.meta.root, "version": job.meta.version}
    workspace.write_json(ORIGIN, origin | {"spec": workspace.choices})
    return notes + _copy_other_files(job, size_of)


_OF_OLDER_VERSIONS: Final = ("total_videos", "total_chunks")
_OF_SOUND: Final = "audio."


def _make_info(job: CopyJob) -> dict[str, Any]:
    """Return ``info.json`` of the copy, in the form of v3.0; it keeps keys that raypipe does not know."""
    meta = job.meta
    source = read_json(meta.storage, "meta/info.json")
    features = _features(job, source["features"])
    has_videos = any(feature["dtype"] == "video" for feature in features.values())
    kept = {name: value for name, value in source.items() if name not in _OF_OLDER_VERSIONS}
    return kept | {
        "codebase_version": "v3.0",
        "total_episodes": len(job.numbering),
        "total_frames": int(job.lengths.sum()),
        "total_tasks": len(job.tasks.texts),
        "chunks_size": FILES_PER_CHUNK,
        "data_files_size_in_mb": job.spec.data_mb,
        "video_files_size_in_mb": job.spec.video_mb,
        # LeRobot stores a whole number.
        "fps": int(meta.fps) if meta.fps == int(meta.fps) else meta.fps,
        "splits": _splits(job),
        "data_path": DATA_TEMPLATES[True],
        "video_path": VIDEO_TEMPLATES[True] if has_videos else None,
        "features": features,
    }


def _splits(job: CopyJob) -> dict[str, str]:
    """Return the source's splits in the new numbers; one split of all episodes if it has none."""
    old = job.meta.episodes.episode_index[job.numbering.rows]
    bounds = {name: np.searchsorted(old, span) for name, span in job.meta.splits.items()}
    return {name: f"{start}:{stop}" for name, (start, stop) in bounds.items()} or {"train": f"0:{len(old)}"}


def _features(job: CopyJob, declared: Mapping[str, Any]) -> dict[str, Any]:
    features = {}
    for name in (name for name in declared if name not in job.dropped):
        feature = {"names": None, **deepcopy(declared[name])}
        if feature["dtype"] == "video":
            feature = _video_feature(feature, job.meta.features[name].shape, job.encodings.get(name), job.meta.fps)
        features[name] = feature
    return features | job.columns.added


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


def _mapping(job: CopyJob) -> pa.Table:
    episodes, rows = job.meta.episodes, job.numbering.rows
    return pa.table(
        {
            "episode_index": np.arange(len(rows)),
            "source_episode_index": episodes.episode_index[rows],
            "source_from_index": episodes.from_index[rows],
        }
    )


def _write_episodes(job: CopyJob, tables: Iterator[pa.Table]) -> None:
    """Write the episode table with one row group per table, in files that close when they reach their largest size."""
    for number, first in enumerate(tables):

        def write(stream: IO[bytes], number: int = number, first: pa.Table = first) -> None:
            schema = in_episodes_file(first, number).schema
            with pq.ParquetWriter(stream, schema, compression="snappy") as writer:
                for table in chain([first], tables):
                    writer.write_table(in_episodes_file(table, number), row_group_size=len(table))
                    if stream.tell() >= job.spec.data_mb << 20:
                        break

        job.workspace.write_file(job.workspace.dataset / format_path(EPISODES_TEMPLATE, number), write)


def _episode_tables(job: CopyJob, files: FilePlan, source: SourceEpisodes, pool: StatsPool) -> Iterator[pa.Table]:
    """Yield the episode table in blocks, and add the statistics of each block to `pool`."""
    places = _place_columns(job, files) | video_columns(job, files.videos)
    read = job.workspace.read_stats
    computed = (stats for unit in files.data if job.described for stats in read(unit.path))
    kinds = computed_kinds(job.meta.features, job.described)
    replaced = tuple(f"stats/{name}/" for name in job.described)
    for start in range(0, len(job.numbering), EPISODES_PER_ROW_GROUP):
        part = slice(start, min(start + EPISODES_PER_ROW_GROUP, len(job.numbering)))
        rows = job.numbering.rows[part]
        with as_damage(partial(_damaged_columns, job.meta.root)):
            carried = source.block(rows)
            if replaced:
                carried = {name: values for name, values in carried.items() if not name.startswith(replaced)}
                carried |= stats_arrays(list(islice(computed, len(rows))), kinds)
            pool.add(carried)
        yield pa.table(
            {"episode_index": np.arange(part.start, part.stop), "tasks": job.meta.episodes.tasks.take(rows)}
            | {name: values[part] for name, values in places.items()}
            | carried
        )


def _damaged_columns(root: str, error: Exception) -> DatasetError:
    return DatasetError(
        f"the statistics or further columns of the episodes in meta/ of {root!r} cannot be copied: {one_line(error)}. "
        f"Fetch meta/ again, or take them out."
    )


def _place_columns(job: CopyJob, files: FilePlan) -> dict[str, NDArray[Any]]:
    number = np.repeat([unit.number for unit in files.data], [unit.stop - unit.start for unit in files.data])
    return {
        "length": job.lengths,
        "data/chunk_index": number // FILES_PER_CHUNK,
        "data/file_index": number % FILES_PER_CHUNK,
        "dataset_from_index": job.numbering.from_index,
        "dataset_to_index": job.numbering.from_index + job.lengths,
    }


def _dataset_stats(job: CopyJob, pool: StatsPool) -> tuple[dict[str, Any], list[str]]:
    """Return the statistics of the whole copy, and notes on what is less exact than it could be."""
    stored = read_json(job.meta.storage, GLOBAL) if find_stats_file(job.meta.storage) == GLOBAL else {}
    stored = {name: values for name, values in stored.items() if name not in job.dropped}
    pooled = pool.result()
    if job.numbering.is_same(job.meta) and job.tasks.is_same:
        return pooled | stored, []
    carried = sorted(stored.keys() - pooled.keys())
    notes = []
    if carried and len(job.numbering) < len(job.meta.episodes):
        notes.append(
            f"meta/stats.json of {', '.join(carried)} still counts the excluded episodes: the source has no statistics "
            f"by episode for them"
        )
    return stored | pooled, notes


_WRITTEN = ("meta/info.json", "meta/stats.json", "meta/tasks", "meta/episodes", "meta/reshard")
"""The parts of meta/, in any version, that reshard writes itself."""


def _copy_other_files(job: CopyJob, size_of: Mapping[str, int]) -> list[str]:
    """Copy the dataset's other files, further files of meta/ and the README; return notes on what was left out."""
    meta, workspace = job.meta, job.workspace
    used = {name for camera in ("", *meta.episodes.videos) for name in meta.rows_by_file(camera)}
    left, outside = [], []
    for name in sorted(size_of.keys() - used):
        if name.startswith(_WRITTEN):
            continue
        if not name.startswith(("meta/", "README", "LICENSE")):
            left.append(name)
        elif _leads_out(meta.storage, name):
            outside.append(name)
        else:
            workspace.write_bytes(workspace.dataset / name, meta.storage.read_bytes(name))
    return [
        f"{counted(len(names), 'file')} {which} {either(len(names), 'was', 'were')} {done}: {', '.join(names[:5])}"
        + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        for names, which, done in (
            (left, "that no episode uses", "left out"),
            (outside, "to which links lead out of the dataset", "not copied"),
        )
        if names
    ]


def _leads_out(storage: Storage, name: str) -> bool:
    """Return whether a file is a link to a place outside the dataset, perhaps to somebody else's file."""
    if not storage.is_local:
        return False
    place, root = Path(os.path.realpath(storage.locate(name))), Path(os.path.realpath(storage.path))
    # The Hub's cache stores files as links to its own blobs.
    own = [root, *(folder.parent / "blobs" for folder in root.parents if folder.name == "snapshots")]
    return not any(place.is_relative_to(folder) for folder in own)
