"""Reads as much as possible of a ``meta/`` that may be damaged, and reports the rest.

A sound dataset gives the same result as `read_metadata`. Otherwise the parts are read one by one. A part that fails is
a finding and stays empty: no episodes, no tasks, a frame rate of NaN, the usual path templates. What ``meta/`` promises
goes to the tasks that check files as `Promises`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
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
    read_json,
    read_metadata,
    read_parquet,
    read_tasks,
    split_tables,
    why_unfit,
)
from raypipe.storage import Storage
from raypipe.validate.findings import Finding, Place, Severity, make_finding

INFO = "meta/info.json"

DAMAGE = (
    *(DatasetError, pa.ArrowException, ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    RecursionError,
)
"""The errors that damage in ``meta/`` causes: text that is not UTF-8, a number in place of a list."""


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
    """What a dataset says about itself, and the files that exist."""

    meta: DatasetMeta
    info: Mapping[str, Any]
    files: tuple[str, ...]
    has_episodes: bool
    """False if the episode table cannot be read; then nothing is promised."""
    has_tasks: bool
    findings: tuple[Finding, ...]


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
    info = read_json(storage, INFO)
    return _fit_templates(Outline(meta=meta, info=info, files=files, has_episodes=True, has_tasks=True, findings=()))


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
    info = _salvage_info(storage, findings)
    version, is_packed = _salvage_version(info, files, findings)
    features = _salvage_features(info, findings)
    videos = [name for name, feature in features.items() if feature.kind == "video"]
    episodes, has_episodes = _salvage_episodes(storage, info, videos, is_packed, findings)
    tasks, has_tasks = _salvage_tasks(storage, info, findings)
    meta = DatasetMeta(
        storage=storage,
        version=version,
        fps=_salvage_fps(info, findings),
        robot_type=str(info.get("robot_type") or "unknown"),
        features=features,
        episodes=episodes,
        tasks=tasks,
        splits={},
        data_template=_salvage_template(info, "data_path", DATA_TEMPLATES[is_packed], findings),
        video_template=_salvage_template(info, "video_path", VIDEO_TEMPLATES[is_packed], findings) if videos else "",
        is_packed=is_packed,
        notes=(),
    )
    if has_episodes:
        findings += _missing_episodes(info, len(episodes))
    if not any(finding.severity == "error" for finding in findings):
        findings.append(make_finding("metadata-unreadable", one_line(failure), Place(file="meta")))
    outline = Outline(
        meta=meta, info=info, files=files, has_episodes=has_episodes, has_tasks=has_tasks, findings=tuple(findings)
    )
    return _fit_templates(outline)


def _salvage_info(storage: Storage, findings: list[Finding]) -> dict[str, Any]:
    with noting_damage(findings, "info-unreadable", Place(file=INFO)):
        return read_json(storage, INFO)
    return {}


def _salvage_version(info: Mapping[str, Any], files: tuple[str, ...], findings: list[Finding]) -> tuple[str, bool]:
    """Return the version, and whether files hold several episodes; judged by the files if ``info.json`` is silent."""
    looks_packed = any(name.startswith(f"{FOLDER}/") for name in files)
    version = str(info.get("codebase_version", "missing"))
    if version not in VERSIONS:
        version = "v3.0" if looks_packed else "v2.1"
        told = f"raypipe reads {', '.join(VERSIONS)}. By its files it is {version}"
        if info:
            message = f"codebase_version is {info.get('codebase_version')!r}; {told}"
            findings.append(on_info("version-unknown", message, ""))
    template = info.get("data_path")
    if isinstance(template, str):
        return version, "{episode_index" not in template
    return version, version == "v3.0"


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
) -> tuple[EpisodeTable, bool]:
    counts = {
        key: info[key]
        for key in ("total_episodes", "chunks_size")
        if isinstance(info.get(key), int) and not isinstance(info[key], bool) and info[key] > 0
    }
    # Without a count, a missing table would pass for a dataset without episodes.
    with noting_damage(findings, "episodes-unreadable", Place(file=FOLDER if is_packed else JSON_LINES)):
        return read_episodes(storage, {"total_episodes": 1, **counts}, videos, is_packed=is_packed), True
    none = np.zeros(0, np.int64)
    tasks = pa.chunked_array([], pa.list_(pa.string()))
    return EpisodeTable(none, none, none, none, none, tasks, {}), False


def _salvage_tasks(storage: Storage, info: Mapping[str, Any], findings: list[Finding]) -> tuple[Tasks, bool]:
    total = info.get("total_tasks")
    is_parquet = storage.exists(PARQUET) or not storage.exists(JSON_LINES)
    with noting_damage(findings, "tasks-unreadable", Place(file=PARQUET if is_parquet else TASK_LINES)):
        return read_tasks(storage, total if isinstance(total, int) and total >= 0 else 1), True
    return Tasks({}), False


def _salvage_fps(info: Mapping[str, Any], findings: list[Finding]) -> float:
    fps = info.get("fps")
    if isinstance(fps, int | float) and not isinstance(fps, bool) and 0 < fps < float("inf"):
        return float(fps)
    if info:
        message = f"fps is {_shown(fps)}; expected a positive number of frames per second"
        findings.append(on_info("info-key", message, "fps"))
    return float("nan")


def _salvage_template(info: Mapping[str, Any], key: str, usual: str, findings: list[Finding]) -> str:
    template = str(info.get(key) or usual)
    why = why_unfit(template)
    if why:
        message = f"{key} is {template!r}, which {why}; checked with {usual!r}"
        findings.append(on_info("template-invalid", message, key))
    return usual if why else template


def _missing_episodes(info: Mapping[str, Any], num_episodes: int) -> list[Finding]:
    promised = info.get("total_episodes")
    if not isinstance(promised, int) or num_episodes >= promised:
        return []
    message = f"total_episodes is {promised}, and the episode table lists {num_episodes}: a file of meta/ is cut off"
    return [on_info("count-mismatch", message, "total_episodes", "error")]


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)


@dataclass(frozen=True, kw_only=True, eq=False)
class Promises:
    """What the files of a dataset must agree with."""

    meta: DatasetMeta
    has_episodes: bool
    """False if the episode table cannot be read."""
    has_tasks: bool
    is_deep: bool
    stored: Mapping[str, NDArray[np.float64]]
    """Columns of the episode table that only validate reads."""
    findings: tuple[Finding, ...] = ()
    """On these columns."""

    def column(self, name: str) -> NDArray[np.float64]:
        """Return one of the columns `stored`; NaN where the table has no value."""
        return self.stored.get(name, np.full(len(self.meta.episodes), np.nan))


def read_promises(outline: Outline, *, is_deep: bool) -> Promises:
    """Return the promises of a dataset; reads the columns of the episode table that the pipeline does not use."""
    findings: list[Finding] = []
    stored = _read_stored(outline, findings) if outline.has_episodes and outline.meta.is_packed else {}
    return Promises(
        meta=outline.meta,
        has_episodes=outline.has_episodes,
        has_tasks=outline.has_tasks,
        is_deep=is_deep,
        stored=stored,
        findings=tuple(findings),
    )


def _read_stored(outline: Outline, findings: list[Finding]) -> dict[str, NDArray[np.float64]]:
    """Return columns of the episode table in row order, as floats; NaN where a file lacks a column."""
    meta = outline.meta
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
    return columns
