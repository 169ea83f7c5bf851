"""The answers of ``raypipe info`` and ``raypipe stats``, as values and as tables.

Statistics are those of a normaliser. Those of actions in another representation are computed once, and kept for
training on this machine.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from raypipe.dataset import ActionSpec, Dataset, open_dataset, schema_of, why_missing
from raypipe.errors import ConfigError, DatasetError, RaypipeError
from raypipe.format import (
    DatasetMeta,
    Feature,
    FeatureStats,
    RowReader,
    VideoFormat,
    episode_first_frame,
    looked_at_rows,
    read_row_group_layout,
    read_video_format,
    read_video_index,
    same_codec,
)
from raypipe.mixture import MemberStats, Mixture, MixtureStats, mixture_stats
from raypipe.mixture import open_dataset as open_either
from raypipe.text import lines_table, plural, rows_table, span_text
from raypipe.views.view import spread

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_EPISODES_LOOKED_AT = 8
_SEE_VALIDATE = "`raypipe validate {root}` looks at all files, and lists what is wrong with them."
_SHOWN_TASKS = 5
_MOST_MISSING = 20
"""The most missing files that the table names; JSON has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """The contents of a dataset, in plain values."""

    root: str
    version: str
    layout: str
    robot_type: str
    fps: float
    episodes: int
    frames: int
    hours: float
    min_length: int
    max_length: int
    cameras: dict[str, str]
    """The cameras with files, and the ``WIDTHxHEIGHT codec`` of these files."""
    missing_cameras: tuple[str, ...]
    features: dict[str, str]
    """Features read from rows, with dtype and shape."""
    tasks: tuple[str, ...]
    splits: dict[str, tuple[int, int]]
    stats: tuple[str, ...]
    """The names of the stored statistics; empty if there are none."""
    row_groups: str
    """``per-episode``: each episode can be read alone. ``other``: reading it costs all row groups that it touches."""
    timestamp_drift_s: float
    """The largest distance of a stored timestamp from frame / fps, in the episodes looked at."""
    fingerprint: str
    missing_files: tuple[str, ...]
    """Files that ``meta/`` names but that do not exist; on a web server, only among those of a few episodes."""
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the description as a JSON object; there ``cameras`` is the list of names."""
        return {**asdict(self), "cameras": list(self.cameras), "camera_sizes": self.cameras}


def describe(root: str) -> DatasetInfo:
    """Return the contents of the dataset at `root`; lists its files, and reads ``meta/`` and a few episodes.

    Raises:
        DatasetError: one of the files that it reads is damaged.
    """
    with warnings.catch_warnings():
        # The value itself lists what is left out: missing_cameras and notes.
        warnings.simplefilter("ignore", UserWarning)
        dataset = open_dataset(root)
        try:
            return _describe(dataset, _find_missing(dataset))
        except DatasetError as error:
            error.add_note(_SEE_VALIDATE.format(root=root))
            raise


def _describe(dataset: Dataset, missing: tuple[str, ...]) -> DatasetInfo:
    meta = dataset.meta
    lengths = meta.episodes.length
    looked_at = _with_data(dataset, missing)
    _check_videos(looked_at, missing)
    present = [name for name in meta.cameras if name not in dataset.missing_cameras]
    fitting = meta.find_fitting_templates(meta.storage.list_files()) if meta.storage.is_listable else {}
    templates = [f"{key} in info.json gives no file; {template!r} gives all" for key, template in fitting.items()]
    return DatasetInfo(
        root=meta.root,
        version=meta.version,
        layout=meta.source.layout,
        robot_type=meta.robot_type,
        fps=meta.fps,
        episodes=len(meta.episodes),
        frames=meta.num_frames,
        hours=round(meta.num_frames / meta.fps / 3600, 3),
        min_length=int(lengths.min()) if len(lengths) else 0,
        max_length=int(lengths.max()) if len(lengths) else 0,
        cameras={name: camera_text(dataset, name) for name in present},
        missing_cameras=dataset.missing_cameras,
        features={
            name: f"{feature.dtype} {list(feature.shape)}"
            for name, feature in looked_at.row_features.items()
            if not feature.is_camera
        },
        tasks=tuple(text for _, text in sorted(meta.tasks.texts.items())),
        splits=dict(meta.splits),
        stats=tuple(sorted({name for values in dataset.stats.values() for name in values})),
        row_groups=read_row_group_layout(looked_at.meta),
        timestamp_drift_s=round(largest_drift(looked_at), 4),
        fingerprint=meta.order_fingerprint,
        missing_files=missing,
        notes=(*meta.notes, *templates, *missing_notes(dataset), *column_notes(looked_at)),
    )


def lacking_error(info: DatasetInfo) -> DatasetError:
    """Return the error for a dataset with missing files."""
    names = info.missing_files
    files = "a file that meta/ names is" if len(names) == 1 else f"{len(names):,} files that meta/ names are"
    error = DatasetError(f"{files} missing at {info.root!r}, the first is {names[0]!r}. Fetch what is missing.")
    error.add_note(_SEE_VALIDATE.format(root=info.root))
    return error


def info_table(info: DatasetInfo) -> "Table":
    """Return the description as a table for a terminal."""
    lengths = f"{span_text(info.min_length, info.max_length)} {plural(info.max_length, 'frame')}"
    lengths += " each" * (info.episodes > 1)
    tasks = "; ".join(info.tasks[:_SHOWN_TASKS])
    tasks += f"; and {len(info.tasks) - _SHOWN_TASKS} more" if len(info.tasks) > _SHOWN_TASKS else ""
    lines = [
        ("root", info.root),
        ("format", info.layout),
        ("robot", info.robot_type),
        ("episodes", f"{info.episodes:,} ({lengths})"),
        ("frames", f"{info.frames:,} at {info.fps:g} fps ({info.hours:g} hours)"),
        *(("camera", f"{name}  {text}") for name, text in info.cameras.items()),
        *(("camera", f"{name}  declared, and no file is found") for name in info.missing_cameras),
        *(("feature", f"{name}  {text}") for name, text in info.features.items()),
        ("tasks", f"{len(info.tasks)}: {tasks}"),
        ("splits", ", ".join(f"{name} {start}:{stop}" for name, (start, stop) in info.splits.items()) or "none"),
        ("statistics", ", ".join(info.stats) or "none found"),
        ("row groups", info.row_groups),
        ("timestamps", f"up to {info.timestamp_drift_s:g} s from frame / fps"),
        ("fingerprint", info.fingerprint),
        *(("missing", name) for name in info.missing_files[:_MOST_MISSING]),
        *([("missing", f"and {more} more")] if (more := len(info.missing_files) - _MOST_MISSING) > 0 else []),
        *(("note", note) for note in info.notes),
    ]
    return lines_table(lines)


def camera_text(dataset: Dataset, camera: str) -> str:
    """Return a camera's size and codec in words: those of its files, and those of ``info.json`` if they differ.

    It reads the index of the first, a middle and the last video. If it can read none, it uses ``info.json``.
    """
    feature = dataset.meta.features[camera]
    depth = " depth" * feature.is_depth
    size = f"{feature.width}x{feature.height}"
    if feature.kind == "image":
        return f"{size} images in the rows{depth}"
    declared = VideoFormat(feature.codec, feature.height, feature.width)
    found = _read_formats(dataset.meta, camera) or [declared]
    told = " and ".join(f"{one.width}x{one.height} {one.codec or 'video'}" for one in found) + depth
    is_declared = all(_is_declared(feature, one) for one in found)
    return told if is_declared else f"{told} (info.json says {size} {feature.codec or 'video'})"


def _read_formats(meta: DatasetMeta, camera: str) -> list[VideoFormat]:
    """Return the formats of a few videos of a camera, each once; none if no index can be read."""
    formats: dict[VideoFormat, None] = {}
    rows = looked_at_rows(meta) if camera in meta.episodes.videos else ()
    for name in dict.fromkeys(meta.video_file(row, camera) for row in rows):
        # Other checks report missing and damaged files.
        with suppress(RaypipeError, OSError):
            formats[read_video_format(meta.storage.for_a_look(), name)] = None
    return list(formats)


def _is_declared(feature: Feature, found: VideoFormat) -> bool:
    is_codec = not feature.codec or same_codec(feature.codec, found.codec)
    size = (feature.height, feature.width)
    return is_codec and (not all(size) or size == (found.height, found.width))


def _find_missing(dataset: Dataset) -> tuple[str, ...]:
    """Return the files that ``meta/`` names but that do not exist, except for cameras without any file.

    On a web server it checks only the files of a few episodes, because each file costs a request.
    """
    meta = dataset.meta
    videos = [name for name in dataset.spec.cameras if name in meta.episodes.videos]
    rows = range(len(meta.episodes)) if meta.storage.is_listable else _some_rows(meta)
    named = {meta.data_file(row) for row in rows} | {meta.video_file(row, name) for name in videos for row in rows}
    if meta.storage.is_listable:
        return tuple(sorted(named - set(meta.storage.list_files())))
    return tuple(sorted(name for name in named if not meta.storage.exists(name)))


def _with_data(dataset: Dataset, missing: tuple[str, ...]) -> Dataset:
    """Return the dataset with only the episodes that have their data files."""
    meta, lost = dataset.meta, set(missing)
    rows = [row for row in range(len(meta.episodes)) if meta.data_file(row) not in lost]
    if len(rows) == len(meta.episodes):
        return dataset
    return replace(dataset, meta=replace(meta, episodes=meta.episodes.take(rows)))


def _check_videos(dataset: Dataset, missing: tuple[str, ...]) -> None:
    """Raise if the index of one of a few existing videos cannot be read."""
    meta = dataset.meta
    videos = [name for name in dataset.spec.cameras if name in meta.episodes.videos]
    for row in _some_rows(meta):
        for name in (camera for camera in videos if meta.video_file(row, camera) not in missing):
            with suppress(NotImplementedError):
                index = read_video_index(meta.storage.for_a_look(), meta.video_file(row, name))
                episode_first_frame(meta, row, name, index)


def _some_rows(meta: DatasetMeta) -> list[int]:
    return spread(len(meta.episodes), _EPISODES_LOOKED_AT)


def largest_drift(dataset: Dataset) -> float:
    """Return the largest distance of a timestamp from ``frame / fps``, in seconds, in some episodes."""
    episodes = dataset.meta.episodes.episode_index
    drifts = [dataset.timestamp_drift(int(episodes[row])) for row in _some_rows(dataset.meta)]
    return max((float(np.abs(drift).max()) for drift in drifts), default=0.0)


def missing_notes(dataset: Dataset) -> list[str]:
    """Return why cameras of a web server are left out: it may hide files that exist."""
    if dataset.meta.storage.is_listable:
        return []
    return [f"camera {name!r}: {why_missing(dataset.meta, name)}" for name in dataset.missing_cameras]


def column_notes(dataset: Dataset) -> list[str]:
    """Return notes on columns that the rows have or lack, compared with ``info.json``."""
    meta = dataset.meta
    if not len(meta.episodes):
        return []
    declared = [name for name, feature in meta.features.items() if feature.kind != "video"]
    reader = RowReader(meta, declared)
    absent, undeclared = reader.missing_columns(0), reader.undeclared_columns(0)
    derived = [name for name in absent if name not in declared or name in ("index", "frame_index", "task_index")]
    blind = [name for name in absent if name in meta.cameras]
    lost = [name for name in absent if name not in derived and name not in blind]
    told = {
        "columns that the rows lack are derived": derived,
        "declared features without a column are left out of samples": lost,
        "cameras whose images have no column, and which cameras=[...] is to leave out": blind,
        "columns that info.json does not declare are left out of samples": undeclared,
    }
    opaque = [f"feature {name!r} is left out of samples: {why}" for name, why in meta.opaque.items()]
    return [*opaque, *(f"{text}: {', '.join(names)}" for text, names in told.items() if names)]


_SHOWN: Final = ("min", "q01", "mean", "std", "q99", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsReport:
    """Statistics, and the names of their numbers."""

    stats: MixtureStats
    names: Mapping[str, Mapping[str, tuple[str, ...]]]
    """By dataset and feature, the names of its numbers, if the dataset gives them."""
    stay: Mapping[str, tuple[str, ...]]
    """By dataset, the numbers of the action that stay as they are."""


def parse_actions(
    mode: str, *, to: str, numbers: Mapping[str, Sequence[str] | None], frames: int
) -> tuple[ActionSpec | None, int]:
    """Return how actions are represented and the length of their window, from the options of a command line.

    Args:
        numbers: ``absolute``, ``wrap`` as NAME=PERIOD and ``match`` as NAME=NAME.
    """
    absolute, wrap, match = (numbers.get(name) or () for name in ("absolute", "wrap", "match"))
    if not mode:
        options = {**numbers, "frames": frames, "to": to != ActionSpec(mode="relative").to}
        given = [f"--{name}" for name, value in options.items() if value]
        if given:
            raise ConfigError(f"{', '.join(given)} is about --actions relative or --actions delta, which is not given")
        return None, 0
    if frames < 1:
        raise ConfigError(
            f"--actions {mode} needs the length of the window, as --frames 50: statistics are of all its slots"
        )
    spec = ActionSpec(
        mode=mode,  # type: ignore[arg-type]
        to=to,
        absolute=tuple(map(_number, absolute)),
        wrap=dict(map(_period, wrap)),
        match=dict(map(_pair, match)),
    )
    return spec, frames


def _period(text: str) -> tuple[str | int, float]:
    name, equals, period = text.rpartition("=")
    try:
        return _number(name), float(period if equals else "")
    except ValueError as error:
        raise ConfigError(f"--wrap {text!r} is not NAME=PERIOD, as wrist_roll=360") from error


def _pair(text: str) -> tuple[str | int, str | int]:
    name, equals, other = text.partition("=")
    if not (name and equals and other):
        raise ConfigError(f"--match {text!r} is not NAME=NAME: a number of the action, and that of the state")
    return _number(name), _number(other)


def _number(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def report_stats(root: str, actions: ActionSpec | None, frames: int) -> StatsReport:
    """Return the statistics of the dataset or mixture at `root`; actions have windows of `frames` frames, from 0 on."""
    dataset = open_either(root)
    if actions is not None:
        dataset = dataset.windowed(offsets={actions.feature: range(frames)}).with_actions(actions)
    if isinstance(dataset, Mixture):
        stats, names, parts = dataset.stats, list(dataset.names), list(dataset.datasets)
        rows: list[Mapping[str, str]] = [member.rows for member in dataset.schema.members]
    else:
        meta = dataset.meta
        name = meta.root.rstrip("/").rpartition("/")[2]
        alone = MemberStats(name=name, robot_type=meta.robot_type, stats=dataset.stats, num_frames=meta.num_frames)
        stats, names, parts = mixture_stats(schema_of(dataset), [alone]), [name], [dataset]
        rows = [{feature: feature for feature in dataset.row_features}]
    numbers = [
        {feature: _numbers(one.row_features[own]) for feature, own in given.items()}
        for one, given in zip(parts, rows, strict=True)
    ]
    return StatsReport(
        stats=stats,
        names=dict(zip(names, numbers, strict=True)),
        stay=dict(zip(names, map(_staying, parts), strict=True)),
    )


def _numbers(feature: Feature) -> tuple[str, ...]:
    is_named = len(feature.shape) == 1 and len(feature.names) == feature.shape[0]
    return feature.names if is_named else ()


def _staying(dataset: Dataset) -> tuple[str, ...]:
    if dataset.actions is None:
        return ()
    feature = dataset.row_features[dataset.actions.action]
    names = _numbers(feature) or tuple(map(str, range(feature.shape[0])))
    return tuple(name for dim, name in enumerate(names) if dim not in dataset.actions.dims)


def stats_tables(report: StatsReport) -> "Group":
    """Return a table per dataset for a terminal, with a row for each number of a vector and channel of a camera."""
    from rich.console import Group

    shown: list[Any] = []
    for dataset, entry in report.stats.datasets.items():
        names = report.names[dataset]
        rows = [row for feature, values in entry.items() for row in _rows(feature, values, names.get(feature, ()))]
        table = rows_table(("feature", "number", *_SHOWN, "count"), rows, texts=("feature", "number"))
        table.title, table.title_justify = dataset, "left"
        missing = "no statistics are stored: `raypipe reshard ROOT OUT` computes those of rows"
        shown += [table if entry else f"{dataset}: {missing}", *_told(report, dataset), ""]
    return Group(*shown)


def _rows(feature: str, values: FeatureStats, names: Sequence[str]) -> Iterable[list[str]]:
    flat = {name: value.reshape(-1) for name, value in values.items()}
    width = max(len(flat[name]) for name in _SHOWN if name in flat)
    for i in range(width):
        numbers = [f"{flat[name][i]:.4g}" if name in flat else "-" for name in _SHOWN]
        counts = flat.get("count")
        count = "-" if counts is None else f"{int(counts[i if len(counts) == width else 0]):,}"
        yield [feature if i == 0 else "", names[i] if i < len(names) else str(i), *numbers, count]


def _told(report: StatsReport, dataset: str) -> list[str]:
    stay = f"; as stored: {', '.join(report.stay[dataset])}" if report.stay[dataset] else ""
    return [f"{feature} is {text}{stay}" for feature, text in report.stats.representations.items()]
