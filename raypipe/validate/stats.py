"""Compares the stored statistics with the values: those of the dataset, and those by episode if there are any.

Compares only features of rows. A camera's statistics are an estimate from a few pixels.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe.errors import DatasetError
from raypipe.format import GLOBAL, PER_EPISODE, one_line, open_parquet, read_json, split_tables
from raypipe.storage import Storage
from raypipe.text import counted, parse_json, read_lines
from raypipe.validate.findings import Finding, Place, make_finding
from raypipe.validate.outline import DAMAGE
from raypipe.validate.promises import Promises
from raypipe.validate.summary import EpisodeSummary

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


def check_stats(promises: Promises, files: Sequence[str], summary: EpisodeSummary) -> list[Finding]:
    """Return where stored statistics are missing, cannot be read, or do not match the values.

    Episodes without their promised rows are not compared: another finding reports them.
    """
    storage = promises.meta.storage
    if not summary.moments:
        return []
    is_whole = _whole_episodes(promises, summary)
    findings: list[Finding] = []
    if GLOBAL in files:
        is_all = bool(is_whole.all()) and (len(summary) == len(promises.meta.episodes) or not promises.has_episodes)
        findings += _check_global(storage, summary, promises.meta.cameras, is_all=is_all)
    if PER_EPISODE in files:
        findings += _check_episodes(_read_lines(storage), summary, is_whole, PER_EPISODE)
    if GLOBAL not in files and PER_EPISODE not in files:
        message = f"neither {GLOBAL} nor {PER_EPISODE} is there"
        findings.append(make_finding("stats-missing", message, Place(file=GLOBAL)))
    for name in split_tables(files)[0] if promises.has_episodes else ():
        stored = _read_columns(storage, name, list(summary.moments))
        findings += _check_episodes(stored, summary, is_whole, name)
    return findings


def _whole_episodes(promises: Promises, summary: EpisodeSummary) -> NDArray[np.bool_]:
    if not promises.has_episodes:
        return summary.is_sound
    rows = np.searchsorted(promises.meta.episodes.episode_index, summary.episode_index)
    return np.asarray(summary.is_sound & (summary.num_frames == promises.meta.episodes.length[rows]))


def _check_global(storage: Storage, summary: EpisodeSummary, cameras: Sequence[str], *, is_all: bool) -> list[Finding]:
    try:
        stored = read_json(storage, GLOBAL)
    except DAMAGE as error:
        return [make_finding("stats-unreadable", one_line(error), Place(file=GLOBAL))]
    findings = _check_flat(stored, cameras)
    for name, part in summary.moments.items():
        if name not in stored:
            findings.append(make_finding("stats-missing", "none for this feature", Place(file=GLOBAL, feature=name)))
            continue
        if not is_all or np.isnan(part.mean).any():
            continue
        weights = summary.num_frames / summary.num_frames.sum()
        true = {
            "min": part.minimum.min(axis=0),
            "max": part.maximum.max(axis=0),
            "mean": (part.mean * weights[:, None]).sum(axis=0),
            "count": np.array([summary.num_frames.sum()]),
        }
        findings += _compare(stored[name], true, Place(file=GLOBAL, feature=name))
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
    try:
        for episode, stats in stored:
            position = int(np.searchsorted(numbers, episode))
            if position < len(numbers) and numbers[position] == episode:
                seen[position] = True
                if is_whole[position]:
                    findings += _check_episode(stats, summary, position, file)
    except DAMAGE as error:
        findings.append(make_finding("stats-unreadable", one_line(error), Place(file=file)))
        return findings
    # In v3.0, a file has the columns for all its episodes or for none.
    if not seen.all() and file == PER_EPISODE:
        lost = tuple(numbers[~seen].tolist())
        findings.append(
            make_finding("stats-missing", f"none for {counted(len(lost), 'episode')}", Place(file=file, episodes=lost))
        )
    return findings


def _check_episode(stats: Stored, summary: EpisodeSummary, position: int, file: str) -> list[Finding]:
    findings: list[Finding] = []
    for name, part in summary.moments.items():
        mean = part.mean[position]
        if name not in stats or np.isnan(mean).any():
            continue
        true = {
            "min": part.minimum[position],
            "max": part.maximum[position],
            "mean": mean,
            "count": np.array([summary.num_frames[position]]),
        }
        place = Place(file=file, episodes=(int(summary.episode_index[position]),), feature=name)
        findings += _compare(stats[name], true, place)
    return findings


def _compare(stored: Any, true: Mapping[str, NDArray[Any]], place: Place) -> list[Finding]:
    """Return one finding with every statistic that differs."""
    if not isinstance(stored, Mapping):
        return [make_finding("stats-unreadable", f"{stored!r} is no object of statistics", place)]
    bound = bound_room(true["min"], true["max"])
    extent = true["max"].astype(np.float64) - true["min"]
    room = {
        "min": bound,
        "max": bound,
        "mean": _MEAN_TOLERANCE * extent + bound,
        "count": np.array([0.5]),
    }
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
