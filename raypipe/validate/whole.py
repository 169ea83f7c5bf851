"""What only all files of a dataset together show: rates, numbering, columns, duplicates. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from raypipe.format import INDEX_FEATURES, DatasetMeta
from raypipe.text import constant_text, counted
from raypipe.validate.data import DataResult
from raypipe.validate.findings import Finding, Place, make_finding
from raypipe.validate.outline import INFO
from raypipe.validate.promises import Promises
from raypipe.validate.summary import EpisodeSummary

LEROBOT_TOLERANCE_S = 1e-4
"""How far LeRobot lets a row's timestamp differ from its video frame's."""

_RATE_TOLERANCE = 0.1
"""A wall clock drifts by a few percent; confusing two usual rates gives a larger error."""


def check_whole(promises: Promises, results: Sequence[DataResult], summary: EpisodeSummary) -> list[Finding]:
    """Return the findings that need the results of all data files."""
    files = _data_files(promises, summary)
    return [
        *_check_columns(promises, results),
        *_check_timestamps(promises.meta.fps, summary, files),
        *_check_numbering(promises, summary, files),
        *_check_ranges(promises, summary),
        *_check_constants(promises.meta, summary),
        *_check_doubles(summary, files),
    ]


def _data_files(promises: Promises, summary: EpisodeSummary) -> list[str]:
    """Return the data file of every episode of the summary; empty names if there is no episode table."""
    if not promises.has_episodes:
        return [""] * len(summary)
    rows = np.searchsorted(promises.meta.episodes.episode_index, summary.episode_index)
    return [promises.meta.data_file(int(row)) for row in rows]


def _check_columns(promises: Promises, results: Sequence[DataResult]) -> list[Finding]:
    """Return features without a column and columns without a feature."""
    readable = [result for result in results if result.columns]
    if not readable:
        return []
    declared = [name for name, feature in promises.meta.features.items() if feature.kind != "video"]
    wanted = list(dict.fromkeys((*declared, *INDEX_FEATURES)))
    findings: list[Finding] = []
    for name in wanted:
        lacking = [result for result in readable if name not in result.columns]
        if lacking:
            findings += _missing_column(promises, name, lacking, len(lacking) == len(readable), name in declared)
    extra: dict[str, list[DataResult]] = defaultdict(list)
    for result in readable:
        for name in set(result.columns) - set(wanted):
            extra[name].append(result)
    for name, holders in sorted(extra.items()):
        message = f"in {len(holders)} of {counted(len(readable), 'data file')}, and left out of samples"
        findings.append(make_finding("feature-undeclared", message, Place(file=holders[0].unit.name, feature=name)))
    return findings


def _missing_column(
    promises: Promises, name: str, lacking: Sequence[DataResult], is_everywhere: bool, is_declared: bool
) -> list[Finding]:
    place = Place(file=lacking[0].unit.name, feature=name)
    if name in INDEX_FEATURES and (is_everywhere or not is_declared):
        if name == "episode_index" and promises.meta.is_packed:
            # Reported for each file: without the column, rows of several episodes cannot be told apart.
            return []
        return [make_finding("column-derived", f"no column {name!r} in {counted(len(lacking), 'data file')}", place)]
    if is_everywhere:
        message = "declared in info.json, and no data file has the column; samples are without it"
        return [make_finding("feature-absent", message, place)]
    more = f" and in {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return [
        make_finding(
            "feature-missing",
            f"no column {name!r} in this file{more}; others have it",
            Place(file=result.unit.name, episodes=promises.numbers(result.unit.rows), feature=name),
        )
        for result in lacking
    ]


def _check_timestamps(fps: float, summary: EpisodeSummary, files: Sequence[str]) -> list[Finding]:
    steps = summary.step_s[summary.is_sound & np.isfinite(summary.step_s)]
    if not np.isfinite(fps) or not len(summary):
        return []
    step = float(np.median(steps)) if len(steps) else 1 / fps
    if step > 0 and abs(step * fps - 1) > _RATE_TOLERANCE:
        message = f"fps is {fps:g}, and the median step of the timestamps is {step:.6g} s, which is {1 / step:.4g} fps"
        return [make_finding("fps-mismatch", message, Place(file=INFO, feature="fps"))]
    findings = []
    for position in np.flatnonzero(summary.is_sound & np.isfinite(summary.drift_s)).tolist():
        offset, drift = float(summary.offset_s[position]), float(summary.drift_s[position])
        kind, message = _judge_timestamps(offset, drift, fps, int(summary.num_frames[position]))
        if kind:
            number = int(summary.episode_index[position])
            place = Place(file=files[position], episodes=(number,), feature="timestamp")
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


def _check_numbering(promises: Promises, summary: EpisodeSummary, files: Sequence[str]) -> list[Finding]:
    """Return the episodes whose ``index`` does not continue from the end of the episode before.

    If rows and table disagree on a length, it may continue by either.
    """
    if not promises.has_episodes or not len(summary):
        return []
    episodes = promises.meta.episodes
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
        place = Place(file=files[position], episodes=(int(summary.episode_index[position]),), feature="index")
        findings.append(make_finding("index-mismatch", message, place))
    return findings


def _check_ranges(promises: Promises, summary: EpisodeSummary) -> list[Finding]:
    """Return the episodes whose stored range of ``index`` does not match their rows."""
    if not promises.has_from_index or not promises.has_episodes:
        return []
    episodes = promises.meta.episodes
    start, stop = episodes.from_index, promises.to_index
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
        low, high = _pooled(np.fmin, part.minimum), _pooled(np.fmax, part.maximum)
        numbers = np.flatnonzero(low == high)
        if len(numbers):
            names = meta.features[name].names
            listed = [names[n] if n < len(names) else f"number {n}" for n in numbers.tolist()]
            kind = "action-constant" if name.partition(".")[0] == "action" else "constant"
            findings.append(make_finding(kind, constant_text(listed, len(low)), Place(feature=name)))
    return findings


def _pooled(pool: np.ufunc, values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(pool.reduce(values, axis=0))


def _check_doubles(summary: EpisodeSummary, files: Sequence[str]) -> list[Finding]:
    by_digest: Mapping[tuple[int, int], list[int]] = defaultdict(list)
    for position in np.flatnonzero(summary.digest):
        key = (int(summary.digest[position]), int(summary.num_frames[position]))
        by_digest[key].append(int(position))
    findings = []
    for (_, num_frames), positions in by_digest.items():
        if len(positions) > 1:
            numbers = tuple(int(summary.episode_index[position]) for position in positions)
            message = f"{len(numbers)} episodes of {counted(num_frames, 'frame')} have the same values in all features"
            findings.append(
                make_finding("episode-duplicate", message, Place(file=files[positions[0]], episodes=numbers))
            )
    return findings
