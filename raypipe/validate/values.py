"""Checks the values of the features in one data file: types, shapes, empty and non-finite values, moments. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe.errors import DatasetError
from raypipe.format import INDEX_FEATURES, Feature, column_values
from raypipe.text import counted, either
from raypipe.validate.findings import Finding, Place, make_finding
from raypipe.validate.summary import Moments

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

    @property
    def is_in_order(self) -> bool:
        """Whether the file already has its rows in this order."""
        return bool(np.array_equal(self.order, np.arange(len(self.order))))


def stored_kind(kind: pa.DataType) -> str:
    """Return numpy's letter for the numbers inside a column of any nesting: ``f``, ``i``, ``b``, or ``""``."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
        else:
            break
    if pa.types.is_floating(kind):
        return "f"
    if pa.types.is_integer(kind):
        return "i"
    return "b" if pa.types.is_boolean(kind) else ""


def read_column(table: pa.Table, feature: Feature, name: str) -> NDArray[Any] | Finding:
    """Return the values of a feature as the pipeline gives them, or a finding if the pipeline cannot read them.

    The finding names no episode; `blame` adds the episodes.
    """
    kind = stored_kind(table.schema.field(feature.name).type)
    if not kind:
        stored = table.schema.field(feature.name).type
        message = f"column of type {stored}; info.json declares {feature.dtype}"
        return make_finding("dtype-mismatch", message, Place(file=name, feature=feature.name))
    try:
        return np.asarray(column_values(table, feature, repr(name)))
    except DatasetError:
        return make_finding(*_reason(table, feature, kind), Place(file=name, feature=feature.name))


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


def blame(finding: Finding, table: pa.Table, feature: Feature, episode: NDArray[np.int64]) -> Finding:
    """Return the finding with the episodes whose own rows cause it."""
    bad = [
        int(number)
        for number in np.unique(episode)
        if isinstance(read_column(table.filter(pa.array(episode == number)), feature, finding.place.file), Finding)
    ]
    place = Place(file=finding.place.file, episodes=tuple(bad), feature=finding.place.feature)
    return make_finding(finding.kind, finding.message, place)


def check_stored_kind(table: pa.Table, feature: Feature, name: str) -> list[Finding]:
    """Return a note if a column is stored as another kind than declared, though its values can be read as declared."""
    stored = table.schema.field(feature.name).type
    kind, wanted = stored_kind(stored), np.dtype(feature.dtype).kind.replace("u", "i")
    if kind == wanted or feature.name in INDEX_FEATURES:
        return []
    message = f"stored as {stored}, and info.json declares {feature.dtype}; every value can be read as that"
    return [make_finding("dtype-mismatch", message, Place(file=name, feature=feature.name), severity="note")]


def measure_feature(
    values: NDArray[Any], feature: Feature, segments: Segments, name: str
) -> tuple[Moments, list[Finding]]:
    """Return the moments of a feature in each episode, and findings on values that are not finite.

    Args:
        values: in the order of the segments.
    """
    flat = values.reshape(len(values), -1).astype(np.float64)
    is_finite = np.isfinite(flat)
    findings = []
    if not is_finite.all():
        findings = _check_finite(flat, feature, segments, name)
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.add.reduceat(flat, segments.starts, axis=0)
        moments = Moments(
            np.minimum.reduceat(flat, segments.starts, axis=0).astype(np.float32),
            np.maximum.reduceat(flat, segments.starts, axis=0).astype(np.float32),
            (total / segments.counts[:, None]).astype(np.float32),
        )
    return _without_unfinite(moments), findings


def _without_unfinite(moments: Moments) -> Moments:
    is_good = np.isfinite(moments.mean) & np.isfinite(moments.minimum) & np.isfinite(moments.maximum)
    return Moments(*(np.where(is_good, part, np.nan) for part in (moments.minimum, moments.maximum, moments.mean)))


def _check_finite(flat: NDArray[np.float64], feature: Feature, segments: Segments, name: str) -> list[Finding]:
    findings = []
    tests: dict[str, NDArray[np.bool_]] = {"nan-values": np.isnan(flat), "inf-values": np.isinf(flat)}
    for kind, is_bad in tests.items():
        bad_rows: NDArray[np.bool_] = np.asarray(is_bad.any(axis=1))
        for position in np.flatnonzero(np.logical_or.reduceat(bad_rows, segments.starts)):
            start, count = int(segments.starts[position]), int(segments.counts[position])
            frames = np.flatnonzero(bad_rows[start : start + count])
            number = int(np.flatnonzero(is_bad[start + frames[0]])[0])
            message = (
                f"{len(frames)} of {counted(count, 'frame')}; the first is frame {frames[0]}, where "
                f"{_named(feature, number)} is {flat[start + frames[0], number]:g}"
            )
            place = Place(
                file=name,
                episodes=(int(segments.numbers[position]),),
                feature=feature.name,
                frames=tuple(frames[:MAX_FRAMES].tolist()),
            )
            findings.append(make_finding(kind, message, place))
    return findings


def _named(feature: Feature, number: int) -> str:
    names = feature.names
    return f"number {number} ({names[number]})" if number < len(names) else f"number {number}"


def digest_episodes(
    values: Mapping[str, NDArray[Any]], moments: Mapping[str, Moments], segments: Segments
) -> NDArray[np.uint64]:
    """Return a hash of the values of every episode; 0 if they never change, since such values tell nothing."""
    digests = np.zeros(len(segments.numbers), np.uint64)
    changes = np.zeros(len(segments.numbers), np.bool_)
    for part in moments.values():
        changes |= (part.minimum != part.maximum).any(axis=1)
    names = sorted(name for name in moments)
    for position in np.flatnonzero(changes & (segments.counts > 1)):
        rows = slice(segments.starts[position], segments.starts[position] + segments.counts[position])
        digests[position] = _digest([values[name][rows] for name in names])
    return digests


def _digest(parts: Sequence[NDArray[Any]]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(np.ascontiguousarray(part).view(np.uint8).reshape(-1).data)
    # 0 means no hash.
    return int.from_bytes(digest.digest(), "little") or 1
