"""What only all files of a dataset together show: rates, numbering, columns, duplicates, and the stored statistics.

Stored statistics are those of the dataset, and those by episode if there are any. Only those of features of rows are
compared: a camera's statistics are an estimate from a few pixels.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe.errors import DatasetError
from raypipe.format import (
    GLOBAL,
    INDEX_FEATURES,
    PER_EPISODE,
    DatasetMeta,
    one_line,
    open_parquet,
    read_json,
    split_tables,
)
from raypipe.storage import Storage
from raypipe.text import constant_text, counted, parse_json, read_lines
from raypipe.validate.data import FileResult
from raypipe.validate.findings import Finding, Place, make_finding
from raypipe.validate.outline import DAMAGE, Outline, noting_damage, on_info
from raypipe.validate.values import EpisodeSummary, Moments, join_summaries

LEROBOT_TOLERANCE_S = 1e-4
"""How far LeRobot lets a row's timestamp differ from its video frame's."""

_RATE_TOLERANCE = 0.1
"""A wall clock drifts by a few percent; confusing two usual rates gives a larger error."""

_BOUND_TOLERANCE = 1e-4
"""Share of a feature's largest value: room for float32 and for decimals in JSON."""

_MEAN_TOLERANCE = 1e-3
"""Share of a feature's range: writers add up in float32."""

_FLAT_STD = 1e-3
"""A quarter of an 8-bit step, as the standard deviation of all pixels of a camera: even pictures of one colour have
more noise."""

_BATCH_ROWS = 1000
"""How many episodes' statistics are in memory at once."""

Stored = Mapping[str, Mapping[str, Any]]


def check_whole(outline: Outline, results: Sequence[FileResult]) -> tuple[list[Finding], EpisodeSummary]:
    """Return the findings that need the results of all data files together, and the summary of all episodes."""
    summary = join_summaries([result.summary for result in results if result.summary is not None])
    findings = [
        *_check_columns(outline, results),
        *_check_timestamps(outline, summary),
        *_check_numbering(outline, summary),
        *_check_ranges(outline, summary),
        *_check_constants(outline.meta, summary),
        *_check_doubles(outline, summary),
        *_check_stats(outline, summary),
    ]
    return findings, summary


def _check_columns(outline: Outline, results: Sequence[FileResult]) -> list[Finding]:
    """Return features without a column and columns without a feature."""
    readable = [result for result in results if result.columns]
    if not readable:
        return []
    declared = [name for name, feature in outline.meta.features.items() if feature.kind != "video"]
    wanted = list(dict.fromkeys((*declared, *INDEX_FEATURES)))
    findings: list[Finding] = []
    for name in wanted:
        lacking = [result for result in readable if name not in result.columns]
        if lacking:
            findings += _missing_column(outline, name, lacking, len(lacking) == len(readable), name in declared)
    extra: dict[str, list[FileResult]] = defaultdict(list)
    for result in readable:
        for name in set(result.columns) - set(wanted):
            extra[name].append(result)
    for name, holders in sorted(extra.items()):
        message = f"in {len(holders)} of {counted(len(readable), 'data file')}, and left out of samples"
        findings.append(make_finding("feature-undeclared", message, Place(file=holders[0].unit.name, feature=name)))
    return findings


def _missing_column(
    outline: Outline, name: str, lacking: Sequence[FileResult], is_everywhere: bool, is_declared: bool
) -> list[Finding]:
    place = Place(file=lacking[0].unit.name, feature=name)
    if name in INDEX_FEATURES and (is_everywhere or not is_declared):
        if name == "episode_index" and outline.meta.is_packed:
            # Reported for each file: without the column, rows of several episodes cannot be told apart.
            return []
        return [make_finding("column-derived", f"no column {name!r} in {counted(len(lacking), 'data file')}", place)]
    if is_everywhere:
        message = "declared in info.json, and no data file has the column; samples are without it"
        return [make_finding("feature-absent", message, place)]
    more = f" and in {len(lacking) - 1} more" if len(lacking) > 1 else ""
    message = f"no column {name!r} in this file{more}; others have it"
    units = [result.unit for result in lacking]
    return [unit.finding("feature-missing", message, unit.episodes, feature=name) for unit in units]


def _place(outline: Outline, episodes: Sequence[int], feature: str = "") -> Place:
    """Return the place of episodes in the data file of the first one; in no file if there is no episode table."""
    file = ""
    if outline.has_episodes:
        row = int(np.searchsorted(outline.meta.episodes.episode_index, episodes[0]))
        file = outline.meta.data_file(row)
    return Place(file=file, episodes=tuple(episodes), feature=feature)


def _check_timestamps(outline: Outline, summary: EpisodeSummary) -> list[Finding]:
    fps = outline.meta.fps
    steps = summary.step_s[summary.is_sound & np.isfinite(summary.step_s)]
    if not np.isfinite(fps) or not len(summary):
        return []
    step = float(np.median(steps)) if len(steps) else 1 / fps
    if step > 0 and abs(step * fps - 1) > _RATE_TOLERANCE:
        message = f"fps is {fps:g}, and the median step of the timestamps is {step:.6g} s, which is {1 / step:.4g} fps"
        return [on_info("fps-mismatch", message, "fps")]
    findings = []
    for position in np.flatnonzero(summary.is_sound & np.isfinite(summary.drift_s)).tolist():
        offset, drift = float(summary.offset_s[position]), float(summary.drift_s[position])
        kind, message = _judge_timestamps(offset, drift, fps, int(summary.num_frames[position]))
        if kind:
            place = _place(outline, [int(summary.episode_index[position])], "timestamp")
            findings.append(make_finding(kind, message, place))
    return findings


def _judge_timestamps(offset: float, drift: float, fps: float, num_frames: int) -> tuple[str, str]:
    if abs(drift) > 0.5 / fps:
        return (
            "timestamp-drift",
            f"up to {drift:+.4f} s from first + frame / fps at {fps:g} fps, in {counted(num_frames, 'frame')}",
        )
    if abs(offset) > 0.5 / fps:
        return "timestamp-offset", f"the first timestamp is {offset:.4f} s, {offset * fps:.2f} frames from 0"
    # Timestamps are float32: after an hour they are 0.2 ms apart.
    rounding = float(np.spacing(np.float32(num_frames / fps)))
    off = max(abs(drift), abs(offset), abs(offset + drift))
    if off > LEROBOT_TOLERANCE_S + rounding:
        return "timestamp-jitter", f"up to {off * 1000:.2f} ms from frame / fps"
    return "", ""


def _check_numbering(outline: Outline, summary: EpisodeSummary) -> list[Finding]:
    """Return the episodes whose ``index`` does not continue from the end of the episode before.

    If rows and table disagree on a length, it may continue by either.
    """
    if not outline.has_episodes or not len(summary):
        return []
    episodes = outline.meta.episodes
    rows = np.searchsorted(episodes.episode_index, summary.episode_index)
    # An imaginary empty episode at index 0 comes before the first one.
    first = np.concatenate([[0], summary.first_index])
    start = np.concatenate([[0], (np.cumsum(episodes.length) - episodes.length)[rows]])
    extra = np.concatenate([[0], summary.num_frames - episodes.length[rows]])
    step, by_table = np.diff(first), np.diff(start)
    is_wrong = (step != by_table) & (step != by_table + extra[:-1]) & (first[1:] >= 0) & (first[:-1] >= 0)
    findings = []
    for position in np.flatnonzero(is_wrong & summary.is_sound).tolist():
        expected = int(first[position] + by_table[position])
        message = f"index starts at {summary.first_index[position]}; {expected} would go on from the episode before"
        place = _place(outline, [int(summary.episode_index[position])], "index")
        findings.append(make_finding("index-mismatch", message, place))
    return findings


def _check_ranges(outline: Outline, summary: EpisodeSummary) -> list[Finding]:
    """Return the episodes whose stored range of ``index`` does not match their rows."""
    # Without the column, raypipe counts from the lengths.
    if not outline.has_episodes or not np.isfinite(outline.column("dataset_from_index")).all():
        return []
    episodes = outline.meta.episodes
    start, stop = episodes.from_index, outline.column("dataset_to_index")
    first = np.full(len(episodes), -1, np.int64)
    first[np.searchsorted(episodes.episode_index, summary.episode_index)] = summary.first_index
    is_wrong = ((first >= 0) & (first != start)) | (np.isfinite(stop) & (stop - start != episodes.length))
    findings = []
    for row in np.flatnonzero(is_wrong).tolist():
        rows = f"its rows start at index {first[row]}" if first[row] >= 0 else "its rows tell no index"
        message = f"{start[row]} to {stop[row]:.0f} for {counted(episodes.length[row], 'frame')}; {rows}"
        place = Place(file="meta/episodes", episodes=(int(episodes.episode_index[row]),))
        findings.append(make_finding("index-range", message, place))
    return findings


def _check_constants(meta: DatasetMeta, summary: EpisodeSummary) -> list[Finding]:
    """Return the features with numbers that are the same in every frame of the dataset."""
    findings = []
    if summary.num_frames.sum() < 2:
        return []
    for name, part in summary.moments.items():
        low, high = np.fmin.reduce(part.minimum, axis=0), np.fmax.reduce(part.maximum, axis=0)
        numbers = np.flatnonzero(low == high)
        if len(numbers):
            names = meta.features[name].names
            listed = [names[n] if n < len(names) else f"number {n}" for n in numbers.tolist()]
            kind = "action-constant" if name.partition(".")[0] == "action" else "constant"
            findings.append(make_finding(kind, constant_text(listed, len(low)), Place(feature=name)))
    return findings


def _check_doubles(outline: Outline, summary: EpisodeSummary) -> list[Finding]:
    alike: Mapping[tuple[int, int], list[int]] = defaultdict(list)
    columns = (summary.digest, summary.num_frames, summary.episode_index)
    for digest, num_frames, number in zip(*(column.tolist() for column in columns), strict=True):
        if digest:
            alike[digest, num_frames].append(number)
    findings = []
    for (_, num_frames), numbers in alike.items():
        if len(numbers) > 1:
            message = f"{len(numbers)} episodes of {counted(num_frames, 'frame')} have the same values in all features"
            findings.append(make_finding("episode-duplicate", message, _place(outline, numbers)))
    return findings


def _check_stats(outline: Outline, summary: EpisodeSummary) -> list[Finding]:
    """Return where stored statistics are missing, cannot be read, or do not match the values."""
    storage, files = outline.meta.storage, outline.files
    if not summary.moments:
        return []
    is_whole = summary.is_sound
    if outline.has_episodes:
        # Another finding reports episodes without their promised rows.
        rows = np.searchsorted(outline.meta.episodes.episode_index, summary.episode_index)
        is_whole = is_whole & (summary.num_frames == outline.meta.episodes.length[rows])
    findings: list[Finding] = []
    if GLOBAL in files:
        is_all = bool(is_whole.all()) and (len(summary) == len(outline.meta.episodes) or not outline.has_episodes)
        findings += _check_global(storage, summary, outline.meta.cameras, is_all=is_all)
    if PER_EPISODE in files:
        findings += _check_episodes(_read_lines(storage), summary, is_whole, PER_EPISODE)
    if GLOBAL not in files and PER_EPISODE not in files:
        message = f"neither {GLOBAL} nor {PER_EPISODE} is there"
        findings.append(make_finding("stats-missing", message, Place(file=GLOBAL)))
    for name in split_tables(files)[0] if outline.has_episodes else ():
        stored = _read_columns(storage, name, list(summary.moments))
        findings += _check_episodes(stored, summary, is_whole, name)
    return findings


def _check_global(storage: Storage, summary: EpisodeSummary, cameras: Sequence[str], *, is_all: bool) -> list[Finding]:
    findings: list[Finding] = []
    place = Place(file=GLOBAL)
    stored: Stored = {}
    with noting_damage(findings, "stats-unreadable", place):
        stored = read_json(storage, GLOBAL)
    if findings:
        return findings
    lacking = [name for name in summary.moments if name not in stored]
    findings = [
        make_finding("stats-missing", "none for this feature", replace(place, feature=name)) for name in lacking
    ]
    findings += _check_flat(stored, cameras)
    if is_all:
        weights = (summary.num_frames / summary.num_frames.sum())[:, None]
        true = {
            name: Moments(part.minimum.min(axis=0), part.maximum.max(axis=0), (part.mean * weights).sum(axis=0))
            for name, part in summary.moments.items()
        }
        findings += _check_moments(stored, true, int(summary.num_frames.sum()), place)
    return findings


def _check_flat(stored: Stored, cameras: Sequence[str]) -> list[Finding]:
    """Return the cameras whose deviation is too small for pictures: pixels divided by it would be in the thousands."""
    findings = []
    for name in cameras:
        try:
            std = np.asarray(stored.get(name, {}).get("std", np.inf), dtype=np.float64).reshape(-1)
        except DAMAGE:
            continue
        if len(std) and not std.min() >= _FLAT_STD:
            reach = 1 / (std.min() + 1e-8)
            message = f"std is {std.min():.3g} of pixels in [0, 1]: values normalised by it reach {reach:,.0f}"
            findings.append(make_finding("stats-flat", message, Place(file=GLOBAL, feature=name)))
    return findings


def _check_episodes(
    stored: Iterator[tuple[int, Stored]], summary: EpisodeSummary, is_whole: NDArray[np.bool_], file: str
) -> list[Finding]:
    findings: list[Finding] = []
    numbers = summary.episode_index
    seen = np.zeros(len(summary), np.bool_)
    with noting_damage(findings, "stats-unreadable", Place(file=file)):
        for episode, stats in stored:
            position = int(np.searchsorted(numbers, episode))
            if position < len(numbers) and numbers[position] == episode:
                seen[position] = True
                if is_whole[position]:
                    true = {name: part.take(position) for name, part in summary.moments.items()}
                    place = Place(file=file, episodes=(episode,))
                    findings += _check_moments(stats, true, int(summary.num_frames[position]), place)
        # In v3.0, a file has the columns for all its episodes or for none.
        if not seen.all() and file == PER_EPISODE:
            lost = tuple(numbers[~seen].tolist())
            message = f"none for {counted(len(lost), 'episode')}"
            findings.append(make_finding("stats-missing", message, Place(file=file, episodes=lost)))
    return findings


def _check_moments(stats: Stored, true: Mapping[str, Moments], count: int, place: Place) -> list[Finding]:
    findings: list[Finding] = []
    for name, part in true.items():
        if name in stats and not np.isnan(part.mean).any():
            values = {"min": part.minimum, "max": part.maximum, "mean": part.mean, "count": np.array([count])}
            findings += _compare(stats[name], values, replace(place, feature=name))
    return findings


def _compare(stored: Any, true: Mapping[str, NDArray[Any]], place: Place) -> list[Finding]:
    """Return one finding with every statistic that differs."""
    if not isinstance(stored, Mapping):
        return [make_finding("stats-unreadable", f"{stored!r} is no object of statistics", place)]
    bound = bound_room(true["min"], true["max"])
    extent = true["max"].astype(np.float64) - true["min"]
    room = {"min": bound, "max": bound, "mean": _MEAN_TOLERANCE * extent + bound, "count": np.array([0.5])}
    differences = []
    for statistic, values in true.items():
        if stored.get(statistic) is None:
            continue
        try:
            found = np.asarray(stored[statistic], dtype=np.float64).reshape(-1)
        except DAMAGE:
            return [make_finding("stats-unreadable", f"{statistic} is {stored[statistic]!r}", place)]
        if len(found) != len(values):
            differences.append(f"{statistic} has {counted(len(found), 'number')}, the feature {len(values)}")
            continue
        off = np.abs(found - values)
        if not np.all(off <= room[statistic]):
            worst = int(np.argmax(np.where(np.isnan(off), np.inf, off - room[statistic])))
            differences.append(f"{statistic}[{worst}] is {found[worst]:.6g}, the values' is {float(values[worst]):.6g}")
    return [make_finding("stats-mismatch", "; ".join(differences), place)] if differences else []


def bound_room(low: NDArray[Any], high: NDArray[Any]) -> NDArray[np.float64]:
    """Return by how much a stored minimum or maximum may differ from that of the values."""
    scale = np.maximum(np.abs(low), np.abs(high)).astype(np.float64)
    return np.asarray(_BOUND_TOLERANCE * scale + 1e-6)


def _read_lines(storage: Storage) -> Iterator[tuple[int, Stored]]:
    """Yield the statistics of v2.1, one episode at a time."""
    with storage.open_file(PER_EPISODE) as stream:
        for number, line in enumerate(read_lines(stream), start=1):
            if not line.strip():
                continue
            try:
                content = parse_json(line)
                episode, stats = int(content["episode_index"]), dict(content["stats"])
            except DAMAGE as error:
                raise DatasetError(f"line {number} has no 'episode_index' and 'stats': {error!r}") from error
            yield episode, stats


def _read_columns(storage: Storage, name: str, features: Sequence[str]) -> Iterator[tuple[int, Stored]]:
    """Yield the statistics of v3.0, one episode at a time; reads by row group."""
    wanted = {f"stats/{f}/{s}": (f, s) for f in features for s in ("min", "max", "mean", "count")}
    try:
        with open_parquet(storage, name) as parquet:
            chosen = [column for column in parquet.schema_arrow.names if column in wanted]
            if not chosen or "episode_index" not in parquet.schema_arrow.names:
                return
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=["episode_index", *chosen], use_threads=False):
                columns = {column: batch.column(column).to_pylist() for column in chosen}
                for row, episode in enumerate(batch.column("episode_index").to_pylist()):
                    stats: dict[str, dict[str, Any]] = {}
                    for column in chosen:
                        feature, statistic = wanted[column]
                        stats.setdefault(feature, {})[statistic] = columns[column][row]
                    yield int(episode), stats
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(one_line(error)) from error
