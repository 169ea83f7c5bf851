"""The values of the features in one data file: types, shapes, empty and non-finite values, and what is kept of them.

Validate keeps only a few numbers of every episode: `EpisodeSummary`. Pure.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe.errors import DatasetError
from raypipe.format import INDEX_FEATURES, Feature, column_values
from raypipe.text import counted, either
from raypipe.validate.findings import Finding, Place, make_finding
from raypipe.validate.outline import DataUnit

MAX_FRAMES = 8
"""How many frames a finding names at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The episodes of one data file, as runs of its rows after sorting."""

    numbers: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    order: NDArray[np.int64]
    """The file's row at each position of the sorted rows."""
    num_frames: NDArray[np.int64]
    """Distinct frames of every episode."""
    is_sound: NDArray[np.bool_]
    """Whether they count 0, 1, 2, ... each once."""

    @property
    def is_in_order(self) -> bool:
        """Whether the file already has its rows in this order."""
        return bool(np.array_equal(self.order, np.arange(len(self.order))))

    def of(self, values: NDArray[Any], position: int | np.integer[Any]) -> NDArray[Any]:
        """Return the values of one episode."""
        start = self.starts[position]
        return np.asarray(values[start : start + self.counts[position]])


class Moments(NamedTuple):
    """Minimum, maximum and mean of a feature in each episode: ``(episodes, numbers)`` float32.

    NaN if an episode has no values, or values that are not finite.
    """

    minimum: NDArray[np.float32]
    maximum: NDArray[np.float32]
    mean: NDArray[np.float32]

    def take(self, chosen: NDArray[Any] | int) -> "Moments":
        """Return those of the chosen episodes."""
        return Moments(*(part[chosen] for part in self))


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeSummary:
    """The measurements of the episodes whose rows can be read, as columns of equal length."""

    episode_index: NDArray[np.int64]
    num_frames: NDArray[np.int64]
    """Distinct frames in the rows."""
    first_index: NDArray[np.int64]
    """``index`` of the first frame; -1 if the rows have none."""
    is_sound: NDArray[np.bool_]
    """Whether frames count 0, 1, 2, ... each once. The columns below are meaningful only then."""
    offset_s: NDArray[np.float64]
    """The first timestamp; NaN if there is none."""
    drift_s: NDArray[np.float64]
    """By how much timestamps differ from ``first + frame / fps`` at most, signed."""
    step_s: NDArray[np.float64]
    """The median step of timestamps; NaN with fewer than two frames."""
    digest: NDArray[np.uint64]
    """A hash of the values of all features, frame by frame; 0 if they never change."""
    moments: Mapping[str, Moments]
    """By feature of rows, without the index columns."""

    def __len__(self) -> int:
        return len(self.episode_index)

    def take(self, chosen: NDArray[Any]) -> "EpisodeSummary":
        """Return the summary of the chosen episodes."""
        columns = {name: getattr(self, name)[chosen] for name in _COLUMNS}
        return EpisodeSummary(**columns, moments={name: part.take(chosen) for name, part in self.moments.items()})


def stored_kind(kind: pa.DataType) -> str:
    """Return numpy's letter for the numbers inside a column of any nesting: ``f``, ``i``, ``b``, or ``""``."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
        else:
            break
    letters = {"f": pa.types.is_floating, "i": pa.types.is_integer, "b": pa.types.is_boolean}
    return next((letter for letter, is_such in letters.items() if is_such(kind)), "")


def read_column(table: pa.Table, feature: Feature, unit: DataUnit) -> NDArray[Any] | Finding:
    """Return the values of a feature as the pipeline gives them, or a finding if the pipeline cannot read them.

    The finding names no episode; `blame` adds the episodes.
    """
    stored = table.schema.field(feature.name).type
    kind = stored_kind(stored)
    if not kind:
        message = f"column of type {stored}; info.json declares {feature.dtype}"
        return unit.finding("dtype-mismatch", message, feature=feature.name)
    try:
        return np.asarray(column_values(table, feature, repr(unit.name)))
    except DatasetError:
        return unit.finding(*_reason(table, feature, kind), feature=feature.name)


def _reason(table: pa.Table, feature: Feature, kind: str) -> tuple[str, str]:
    """Return kind and message of the finding on a column that the pipeline refuses."""
    column = table.column(feature.name)
    if column.null_count or _inner_nulls(column):
        return (
            "null-values",
            f"{column.null_count or 'some'} of {counted(len(table), 'row')} "
            f"{either(column.null_count, 'has', 'have')} empty values",
        )
    wanted = np.dtype(feature.dtype).kind.replace("u", "i")
    lengths = sorted({len(value) for value in column.to_pylist() if isinstance(value, list)})
    size = int(np.prod(feature.shape))
    if wanted == kind or (lengths and len(feature.shape) == 1 and lengths != [size]):
        found = f"lists of {', '.join(map(str, lengths))}" if lengths else "single numbers"
        return "shape-mismatch", f"{found} of type {column.type}; info.json declares the shape {list(feature.shape)}"
    return "dtype-mismatch", f"stored as {column.type} with values that are no {feature.dtype}, as info.json declares"


def _inner_nulls(column: pa.ChunkedArray) -> bool:
    while pa.types.is_nested(column.type) and not pa.types.is_struct(column.type):
        column = pa.chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type)
        if column.null_count:
            return True
    return False


def blame(finding: Finding, table: pa.Table, feature: Feature, unit: DataUnit, episode: NDArray[np.int64]) -> Finding:
    """Return the finding with the episodes whose own rows cause it."""
    bad = [
        int(number)
        for number in np.unique(episode)
        if isinstance(read_column(table.filter(pa.array(episode == number)), feature, unit), Finding)
    ]
    return unit.finding(finding.kind, finding.message, bad, feature=feature.name)


def check_stored_kind(table: pa.Table, feature: Feature, name: str) -> list[Finding]:
    """Return a note if a column is stored as another kind than declared, though its values can be read as declared."""
    stored = table.schema.field(feature.name).type
    if feature.name in INDEX_FEATURES or stored_kind(stored) == np.dtype(feature.dtype).kind.replace("u", "i"):
        return []
    message = f"stored as {stored}, and info.json declares {feature.dtype}; every value can be read as that"
    return [make_finding("dtype-mismatch", message, Place(file=name, feature=feature.name), severity="note")]


def measure_feature(
    values: NDArray[Any], feature: Feature, segments: Segments, unit: DataUnit
) -> tuple[Moments, list[Finding]]:
    """Return the moments of a feature in each episode, and findings on values that are not finite.

    The values are in the order of the segments.
    """
    flat = values.reshape(len(values), -1).astype(np.float64)
    findings = [] if np.isfinite(flat).all() else _check_finite(flat, feature, segments, unit)
    with np.errstate(invalid="ignore", over="ignore"):
        low, high, total = (act.reduceat(flat, segments.starts, axis=0) for act in (np.minimum, np.maximum, np.add))
        parts = [part.astype(np.float32) for part in (low, high, total / segments.counts[:, None])]
    is_good = np.logical_and.reduce([np.isfinite(part) for part in parts])
    return Moments(*(np.where(is_good, part, np.nan) for part in parts)), findings


def _check_finite(flat: NDArray[np.float64], feature: Feature, segments: Segments, unit: DataUnit) -> list[Finding]:
    findings = []
    for kind, is_bad in (("nan-values", np.isnan(flat)), ("inf-values", np.isinf(flat))):
        bad_rows: NDArray[np.bool_] = np.asarray(is_bad.any(axis=1))
        for position in np.flatnonzero(np.logical_or.reduceat(bad_rows, segments.starts)):
            frames = np.flatnonzero(segments.of(bad_rows, position))
            row = int(segments.starts[position] + frames[0])
            number = int(np.flatnonzero(is_bad[row])[0])
            named = f" ({feature.names[number]})" if number < len(feature.names) else ""
            message = (
                f"{len(frames)} of {counted(int(segments.counts[position]), 'frame')}; the first is frame {frames[0]}, "
                f"where number {number}{named} is {flat[row, number]:g}"
            )
            episodes, shown = (int(segments.numbers[position]),), frames[:MAX_FRAMES].tolist()
            findings.append(unit.finding(kind, message, episodes, shown, feature.name))
    return findings


def digest_episodes(
    values: Mapping[str, NDArray[Any]], moments: Mapping[str, Moments], segments: Segments
) -> NDArray[np.uint64]:
    """Return a hash of the values of every episode; 0 if they never change, since such values tell nothing."""
    digests = np.zeros(len(segments.numbers), np.uint64)
    changes = np.zeros(len(segments.numbers), np.bool_)
    for part in moments.values():
        changes |= (part.minimum != part.maximum).any(axis=1)
    for position in np.flatnonzero(changes & (segments.counts > 1)):
        digest = hashlib.blake2b(digest_size=8)
        for name in sorted(moments):
            digest.update(np.ascontiguousarray(segments.of(values[name], position)).view(np.uint8).reshape(-1).data)
        digests[position] = int.from_bytes(digest.digest(), "little") or 1
    return digests


_COLUMNS: Final[Mapping[str, type[np.generic]]] = {
    **dict.fromkeys(("episode_index", "num_frames", "first_index"), np.int64),
    "is_sound": np.bool_,
    **dict.fromkeys(("offset_s", "drift_s", "step_s"), np.float64),
    "digest": np.uint64,
}


def join_summaries(parts: Sequence[EpisodeSummary]) -> EpisodeSummary:
    """Return one summary of all episodes, ascending by number."""
    columns = {
        name: np.concatenate([np.zeros(0, kind), *(getattr(part, name) for part in parts)])
        for name, kind in _COLUMNS.items()
    }
    features = dict.fromkeys(name for part in parts for name in part.moments)
    joined = EpisodeSummary(**columns, moments={name: _join_moments(parts, name) for name in features})
    return joined.take(np.argsort(joined.episode_index, kind="stable"))


def _join_moments(parts: Sequence[EpisodeSummary], name: str) -> Moments:
    width = max(part.moments[name].mean.shape[1] for part in parts if name in part.moments)
    blanks = (Moments(*[np.full((len(part), width), np.nan, np.float32)] * 3) for part in parts)
    pieces = [part.moments.get(name, blank) for part, blank in zip(parts, blanks, strict=True)]
    return Moments(*map(np.concatenate, zip(*pieces, strict=True)))
