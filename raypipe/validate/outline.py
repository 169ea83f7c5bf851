"""What ``meta/`` and the list of files say, before any file of rows or videos is opened, and what is wrong with it.

A sound ``meta/`` is read by `read_metadata`. Otherwise the parts are read one by one. A part that fails is a finding
and stays empty: no episodes, no tasks, a frame rate of NaN, the usual path templates. The outline goes to the tasks
that check files, which hold what is there against what is promised.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raypipe.errors import DatasetError
from raypipe.format import (
    DATA_TEMPLATES,
    FOLDER,
    JSON_LINES,
    PARQUET,
    TASK_LINES,
    VERSIONS,
    VIDEO_TEMPLATES,
    DatasetMeta,
    EpisodeTable,
    Feature,
    Tasks,
    one_line,
    read_episodes,
    read_features,
    read_fps,
    read_json,
    read_metadata,
    read_parquet,
    read_tasks,
    split_tables,
    why_unfit,
)
from raypipe.storage import Storage
from raypipe.text import counted, either
from raypipe.validate.findings import Finding, Place, Severity, make_finding

INFO = "meta/info.json"

DAMAGE = (
    *(DatasetError, pa.ArrowException, ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    RecursionError,
)
"""The errors that damage in ``meta/`` causes: text that is not UTF-8, a number in place of a list."""

_NONE = np.zeros(0, np.int64)
_NO_EPISODES = EpisodeTable(_NONE, _NONE, _NONE, _NONE, _NONE, pa.chunked_array([], pa.list_(pa.string())), {})


@contextmanager
def noting_damage(findings: list[Finding], kind: str, place: Place, severity: Severity | None = None) -> Iterator[None]:
    """Add a finding if the body raises because of damage in ``meta/``."""
    try:
        yield
    except DAMAGE as error:
        findings.append(make_finding(kind, one_line(error), place, severity=severity))


def on_info(kind: str, message: str, key: str, severity: Severity | None = None) -> Finding:
    """Return a finding on a key or a feature of ``info.json``."""
    return make_finding(kind, message, Place(file=INFO, feature=key), severity=severity)


@dataclass(frozen=True, kw_only=True, eq=False)
class Outline:
    """What a dataset says about itself, which its files must agree with, and the files that exist."""

    meta: DatasetMeta
    info: Mapping[str, Any]
    files: tuple[str, ...]
    has_episodes: bool = True
    """False if the episode table cannot be read; then nothing is promised."""
    has_tasks: bool = True
    findings: tuple[Finding, ...] = ()
    is_deep: bool = False
    """Whether pixels are decoded too."""
    stored: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Columns of the episode table that only validate reads, from `read_stored`."""

    def column(self, name: str) -> NDArray[np.float64]:
        """Return one of the columns `stored`; NaN where the table has no value."""
        return self.stored.get(name, np.full(len(self.meta.episodes), np.nan))


def read_outline(storage: Storage) -> Outline:
    """Return the outline of the dataset at `storage`; lists all files and reads ``meta/``.

    Raises:
        DatasetError: there is nothing at all at this place.
    """
    if not storage.exists():
        raise DatasetError(f"no such folder: {storage.uri!r}. Give the root of a LeRobot dataset, as a path or a URI.")
    files = tuple(storage.list_files())
    try:
        meta = read_metadata(storage)
    except DAMAGE as error:
        return _salvage(storage, files, error)
    return _fit_templates(Outline(meta=meta, info=read_json(storage, INFO), files=files))


def _fit_templates(outline: Outline) -> Outline:
    """Return the outline with path templates that fit the files, if those of ``info.json`` fit none."""
    fitting = outline.meta.find_fitting_templates(outline.files)
    given = {"data_path": outline.meta.data_template, "video_path": outline.meta.video_template}
    told = "and no file is there; the one by which all files are there is"
    findings = [
        on_info("template-mismatch", f"{key} is {given[key]!r}, {told} {template!r}", key)
        for key, template in fitting.items()
    ]
    meta = outline.meta.with_templates(fitting)
    return replace(outline, meta=meta, findings=(*outline.findings, *findings))


def _salvage(storage: Storage, files: tuple[str, ...], failure: Exception) -> Outline:
    """Return the outline, read part by part, of a ``meta/`` that cannot be read as a whole."""
    findings: list[Finding] = []
    info: dict[str, Any] = {}
    with noting_damage(findings, "info-unreadable", Place(file=INFO)):
        info = read_json(storage, INFO)
    version = _salvage_version(info, files, findings)
    data_template = _salvage_template(info, "data_path", DATA_TEMPLATES[version == "v3.0"], findings)
    is_packed = "{episode_index" not in data_template
    features = _salvage_features(info, findings)
    videos = [name for name, feature in features.items() if feature.kind == "video"]
    episodes = _salvage_episodes(storage, info, videos, is_packed, findings)
    tasks = _salvage_tasks(storage, info, findings)
    meta = DatasetMeta(
        storage=storage,
        version=version,
        fps=_salvage_fps(info, findings),
        robot_type=str(info.get("robot_type") or "unknown"),
        features=features,
        episodes=_NO_EPISODES if episodes is None else episodes,
        tasks=Tasks({}) if tasks is None else tasks,
        splits={},
        data_template=data_template,
        video_template=_salvage_template(info, "video_path", VIDEO_TEMPLATES[is_packed], findings) if videos else "",
        is_packed=is_packed,
        notes=(),
    )
    promised = info.get("total_episodes")
    if episodes is not None and isinstance(promised, int) and len(episodes) < promised:
        cut = f"total_episodes is {promised}, and the episode table lists {len(episodes)}: a file of meta/ is cut off"
        findings.append(on_info("count-mismatch", cut, "total_episodes", "error"))
    if not any(finding.severity == "error" for finding in findings):
        findings.append(make_finding("metadata-unreadable", one_line(failure), Place(file="meta")))
    outline = Outline(
        meta=meta,
        info=info,
        files=files,
        has_episodes=episodes is not None,
        has_tasks=tasks is not None,
        findings=tuple(findings),
    )
    return _fit_templates(outline)


def _salvage_version(info: Mapping[str, Any], files: tuple[str, ...], findings: list[Finding]) -> str:
    """Return the version; judged by the files if ``info.json`` names none that raypipe reads."""
    version = str(info.get("codebase_version", "missing"))
    if version not in VERSIONS:
        version = "v3.0" if any(name.startswith(f"{FOLDER}/") for name in files) else "v2.1"
        told = f"raypipe reads {', '.join(VERSIONS)}. By its files it is {version}"
        if info:
            message = f"codebase_version is {info.get('codebase_version')!r}; {told}"
            findings.append(on_info("version-unknown", message, ""))
    return version


def _salvage_features(info: Mapping[str, Any], findings: list[Finding]) -> dict[str, Feature]:
    declared = info.get("features")
    if not isinstance(declared, dict) or not declared:
        if info:
            message = f"features is {_shown(declared)}; expected an object with a feature per name"
            findings.append(on_info("info-key", message, "features"))
        return {}
    features = {}
    for name, spec in declared.items():
        with noting_damage(findings, "feature-invalid", Place(file=INFO, feature=name)):
            features.update(read_features({"features": {name: spec}}, INFO))
    return features


def _salvage_episodes(
    storage: Storage, info: Mapping[str, Any], videos: list[str], is_packed: bool, findings: list[Finding]
) -> EpisodeTable | None:
    counts = {
        key: info[key]
        for key in ("total_episodes", "chunks_size")
        if isinstance(info.get(key), int) and not isinstance(info[key], bool) and info[key] > 0
    }
    place = Place(file=FOLDER if is_packed else JSON_LINES)
    if "total_episodes" not in counts and not storage.exists(place.file):
        findings.append(make_finding("episodes-unreadable", f"there is no {place.file}", place))
        return None
    # Without a count, a missing table would pass for a dataset without episodes.
    with noting_damage(findings, "episodes-unreadable", place):
        return read_episodes(storage, {"total_episodes": 1, **counts}, videos, is_packed=is_packed)
    return None


def _salvage_tasks(storage: Storage, info: Mapping[str, Any], findings: list[Finding]) -> Tasks | None:
    total = info.get("total_tasks")
    is_parquet = storage.exists(PARQUET) or not storage.exists(JSON_LINES)
    place = Place(file=PARQUET if is_parquet else TASK_LINES)
    if total is None and not storage.exists(PARQUET) and not storage.exists(TASK_LINES):
        findings.append(make_finding("tasks-unreadable", f"there is no {place.file}", place))
        return None
    with noting_damage(findings, "tasks-unreadable", place):
        return read_tasks(storage, total if isinstance(total, int) and total >= 0 else 1)
    return None


def _salvage_fps(info: Mapping[str, Any], findings: list[Finding]) -> float:
    try:
        return read_fps(info, INFO)
    except DatasetError:
        if info:
            told = "expected a positive number of frames per second, at least 1e-6 and at most 1e6"
            findings.append(on_info("info-key", f"fps is {_shown(info.get('fps'))}; {told}", "fps"))
        return float("nan")


def _salvage_template(info: Mapping[str, Any], key: str, usual: str, findings: list[Finding]) -> str:
    template = str(info.get(key) or usual)
    why = why_unfit(template)
    if why:
        message = f"{key} is {template!r}, which {why}; checked with {usual!r}"
        findings.append(on_info("template-invalid", message, key))
    return usual if why else template


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)


def read_stored(outline: Outline) -> tuple[dict[str, NDArray[np.float64]], list[Finding]]:
    """Return columns of the episode table that the pipeline does not use, in row order, and findings on them.

    They are floats, NaN where a file lacks a column; no columns if the episode table has none or cannot be read.
    """
    findings: list[Finding] = []
    meta = outline.meta
    if not outline.has_episodes or not meta.is_packed:
        return {}, findings
    names = [
        "dataset_from_index",
        "dataset_to_index",
        *(f"videos/{name}/to_timestamp" for name in meta.episodes.videos),
    ]
    columns = {name: np.full(len(meta.episodes), np.nan) for name in names}
    for file in split_tables(outline.files)[0]:
        # Only a warning: the columns that the pipeline needs were read.
        with noting_damage(findings, "episodes-unreadable", Place(file=file), severity="warning"):
            table = read_parquet(meta.storage, file, ("episode_index",), optional=names)
            rows = np.searchsorted(meta.episodes.episode_index, table.column("episode_index").to_numpy())
            for name in table.column_names:
                if name in columns:
                    columns[name][rows] = table.column(name).cast("float64").to_numpy()
    return columns, findings


_KEYS = ("total_episodes", "total_frames", "total_tasks", "chunks_size", "data_path", "robot_type")
"""Keys that every writer stores and that raypipe can do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileUnit:
    """One file, and the episodes that it should hold."""

    name: str
    rows: tuple[int, ...] = ()
    """Of the episode table."""
    episodes: tuple[int, ...] = ()
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
    if not outline.has_episodes:
        # Nothing is promised: check every file on its own.
        data = [DataUnit(name=name) for name in outline.files if _is_below(name, "data", ".parquet")]
        return [*data, *(VideoUnit(name=name) for name in outline.files if _is_below(name, "videos", ".mp4"))], []
    units: list[Unit] = [
        DataUnit(name=name, rows=tuple(rows), episodes=_numbers(meta, rows))
        for name, rows in meta.rows_by_file().items()
    ]
    findings, named = [], {unit.name for unit in units}
    for camera in (name for name in meta.cameras if meta.features[name].kind == "video"):
        files = meta.rows_by_file(camera) if camera in meta.episodes.videos else {}
        named |= files.keys()
        if there.isdisjoint(files):
            findings += _missing_camera(meta, camera, list(files))
            continue
        for name, rows in files.items():
            units.append(VideoUnit(name=name, rows=tuple(rows), episodes=_numbers(meta, rows), camera=camera))
    findings += [_missing(unit) for unit in units if unit.name not in there]
    return [unit for unit in units if unit.name in there], [*findings, *_extra_files(outline.files, named)]


def check_structure(outline: Outline) -> list[Finding]:
    """Return the findings on ``info.json`` and on the episode table."""
    meta, info = outline.meta, outline.info
    findings = [*outline.findings, *_check_layout(outline)]
    # The outline reports missing keys that have no default.
    findings += [on_info("info-key", f"{key} is missing", key, "warning") for key in _KEYS if info and key not in info]
    findings += [on_info("feature-unknown", why, name) for name, why in meta.opaque.items()]
    if outline.has_episodes:
        findings += [*_check_counts(outline), *_check_numbers(meta)]
        findings += [on_info("split-invalid", note, "splits") for note in meta.notes if note.startswith("split")]
        if outline.has_tasks:
            findings += _check_task_texts(meta)
    return findings


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
