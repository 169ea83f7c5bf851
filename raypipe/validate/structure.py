"""What ``meta/`` and the list of files show, before any file is opened. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow.compute as pc

from raypipe.format import DatasetMeta, split_tables
from raypipe.text import counted, either
from raypipe.validate.findings import Finding, Place, make_finding
from raypipe.validate.outline import INFO, Outline, on_info

_KEYS = ("total_episodes", "total_frames", "total_tasks", "chunks_size", "data_path", "robot_type")
"""Keys that every writer stores and that raypipe can do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileUnit:
    """One file, and the episodes that it should hold."""

    name: str
    rows: tuple[int, ...]
    """Of the episode table."""
    episodes: tuple[int, ...]
    """The numbers of the episodes in these rows."""
    camera: str = ""
    """Of a video, if there is an episode table."""

    def finding(
        self, kind: str, message: str, episodes: Iterable[int] = (), frames: Iterable[int] = (), feature: str = ""
    ) -> Finding:
        """Return a finding on this file, and on its camera if it has one."""
        place = Place(file=self.name, episodes=tuple(episodes), feature=feature or self.camera, frames=tuple(frames))
        return make_finding(kind, message, place)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataUnit(_FileUnit):
    """A data file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoUnit(_FileUnit):
    """A video file of a camera."""


Unit = DataUnit | VideoUnit


def plan_units(outline: Outline) -> tuple[list[Unit], list[Finding]]:
    """Return the files to check, and findings on files that are missing or that nothing names."""
    meta, there = outline.meta, set(outline.files)
    units: list[Unit] = []
    if not outline.has_episodes:
        # Nothing is promised: check every file on its own.
        alone: dict[str, Any] = {"rows": (), "episodes": ()}
        units += [DataUnit(name=name, **alone) for name in outline.files if _is_below(name, "data", ".parquet")]
        videos = (name for name in outline.files if _is_below(name, "videos", ".mp4"))
        return [*units, *(VideoUnit(name=name, **alone) for name in videos)], []
    for name, rows in _by_file(meta, meta.data_file).items():
        units.append(DataUnit(name=name, rows=rows, episodes=_numbers(meta, rows)))
    findings, named = [], {unit.name for unit in units}
    for camera in (name for name in meta.cameras if meta.features[name].kind == "video"):
        files = _by_file(meta, partial(meta.video_file, camera=camera)) if camera in meta.episodes.videos else {}
        named |= files.keys()
        if there.isdisjoint(files):
            findings += _missing_camera(meta, camera, list(files))
            continue
        for name, rows in files.items():
            units.append(VideoUnit(name=name, rows=rows, episodes=_numbers(meta, rows), camera=camera))
    findings += [_missing(unit) for unit in units if unit.name not in there]
    return [unit for unit in units if unit.name in there], [*findings, *_extra_files(outline.files, named)]


def check_structure(outline: Outline) -> list[Finding]:
    """Return the findings on ``info.json`` and on the episode table."""
    findings = [*outline.findings, *_check_keys(outline.info), *_check_layout(outline)]
    findings += [on_info("feature-unknown", why, name) for name, why in outline.meta.opaque.items()]
    if outline.has_episodes:
        findings += [*_check_counts(outline), *_check_splits(outline), *_check_numbers(outline.meta)]
        if outline.has_tasks:
            findings += _check_task_texts(outline.meta)
    return findings


def _by_file(meta: DatasetMeta, file_of: Callable[[int], str]) -> dict[str, tuple[int, ...]]:
    """Return the rows of the episode table by the name of their file."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row in range(len(meta.episodes)):
        rows[file_of(row)].append(row)
    return {name: tuple(numbers) for name, numbers in rows.items()}


def _numbers(meta: DatasetMeta, rows: Sequence[int]) -> tuple[int, ...]:
    return tuple(meta.episodes.episode_index[list(rows)].tolist())


def _missing(unit: Unit) -> Finding:
    message = f"{unit.name!r} is not there; {counted(len(unit.rows), 'episode')} should be in it"
    return unit.finding("data-missing" if isinstance(unit, DataUnit) else "video-missing", message, unit.episodes)


def _missing_camera(meta: DatasetMeta, camera: str, videos: Sequence[str]) -> list[Finding]:
    if not len(meta.episodes):
        return []
    message = "the episode table says for no episode, or not for all, where it is"
    if videos:
        many = f"none of its {len(videos):,} files is there, the first is {videos[0]!r}"
        message = either(len(videos), f"its only file {videos[0]!r} is not there", many)
    return [make_finding("camera-missing", message, Place(file=[*videos, INFO][0], feature=camera))]


def _is_below(name: str, folder: str, suffix: str) -> bool:
    return name.startswith(f"{folder}/") and name.endswith(suffix)


def _extra_files(files: Sequence[str], named: set[str]) -> list[Finding]:
    findings = [
        make_finding("file-extra", "neither LeRobot nor raypipe reads tables there", Place(file=name), severity="note")
        for name in split_tables(files)[1]
    ]
    for name in (name for name in files if name not in named):
        if _is_below(name, "data", ".parquet"):
            message = "the episode table and data_path do not name it; LeRobot reads every parquet file below data/"
            findings.append(make_finding("file-extra", message, Place(file=name)))
        elif name.split("/")[0] in ("data", "videos", "video"):
            message = "the episode table and the paths of info.json do not name it"
            findings.append(make_finding("file-extra", message, Place(file=name), severity="note"))
    return findings


def _check_keys(info: Mapping[str, Any]) -> list[Finding]:
    """Return findings on missing keys that have a default; the outline reports those without one."""
    return [on_info("info-key", f"{key} is missing", key, "warning") for key in _KEYS if info and key not in info]


def _check_layout(outline: Outline) -> list[Finding]:
    meta = outline.meta
    if not outline.info or meta.is_packed == (meta.version == "v3.0"):
        return []
    layout = "several episodes" if meta.is_packed else "one episode"
    message = f"codebase_version is {meta.version}, and data_path {meta.data_template!r} has {layout} per file"
    return [on_info("layout-mismatch", message, "data_path")]


def _check_counts(outline: Outline) -> list[Finding]:
    meta, info = outline.meta, outline.info
    videos = len(meta.episodes.videos) * len(meta.episodes)
    counts = {
        "total_episodes": (len(meta.episodes), "the episode table lists"),
        "total_frames": (meta.num_frames, "the lengths in the episode table add up to"),
        "total_tasks": (len(meta.tasks), "meta/tasks lists"),
        "total_videos": (videos, "episodes times cameras make"),
        "total_chunks": (len(np.unique(meta.episodes.chunk_index)), "the number of chunk folders is"),
    }
    findings = []
    for key, (count, how) in counts.items():
        is_told = any(f.kind == "count-mismatch" and f.place.feature == key for f in outline.findings)
        if key not in info or info[key] == count or is_told or (key == "total_tasks" and not outline.has_tasks):
            continue
        # Only v2.x datasets have these two, and no program reads them.
        is_unused = key in ("total_videos", "total_chunks")
        if is_unused and meta.is_packed:
            continue
        message = f"{key} is {info[key]!r}, and {how} {count}"
        findings.append(on_info("count-mismatch", message, key, "note" if is_unused else "warning"))
    return findings


def _check_splits(outline: Outline) -> list[Finding]:
    notes = (note for note in outline.meta.notes if note.startswith("split"))
    return [on_info("split-invalid", note, "splits") for note in notes]


def _check_numbers(meta: DatasetMeta) -> list[Finding]:
    numbers = meta.episodes.episode_index
    wrong = np.flatnonzero(numbers != np.arange(len(numbers)))
    if not len(wrong):
        return []
    first = int(wrong[0])
    message = f"the episode at position {first} of {len(numbers)} has the number {numbers[first]}"
    return [make_finding("episode-numbers", message, Place(file="meta", episodes=(int(numbers[first]),)))]


def _check_task_texts(meta: DatasetMeta) -> list[Finding]:
    """Return findings on texts in the episode table that are not tasks; some datasets have task numbers, which pass."""
    if not len(meta.tasks):
        return []
    texts = pc.unique(pc.list_flatten(meta.episodes.tasks.combine_chunks())).to_pylist()
    known = set(meta.tasks.texts.values()) | {str(number) for number in meta.tasks.texts}
    unknown = sorted(text for text in texts if text and text not in known)
    if not unknown:
        return []
    listed = meta.episodes.tasks.to_pylist()
    rows = [row for row, tasks in enumerate(listed) if set(tasks or ()) & set(unknown)]
    message = f"the episode table has the task {unknown[0]!r}, and meta/tasks lists {counted(len(meta.tasks), 'other')}"
    if len(unknown) > 1:
        message += f"; {counted(len(unknown), 'such task')} in all"
    return [make_finding("task-unlisted", message, Place(file="meta", episodes=_numbers(meta, rows)))]
