"""What ``meta/`` promises, in a form that can be sent to the task that checks a file."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raypipe.format import DatasetMeta, one_line, read_parquet, split_tables
from raypipe.validate.findings import Finding, Place, make_finding
from raypipe.validate.outline import DAMAGE, Outline


@dataclass(frozen=True, kw_only=True, eq=False)
class Promises:
    """What the files of a dataset must agree with."""

    meta: DatasetMeta
    has_episodes: bool
    """False if the episode table cannot be read."""
    has_tasks: bool
    to_timestamp: Mapping[str, NDArray[np.float64]]
    """By camera, for every row of the episode table; NaN where the table has no value."""
    to_index: NDArray[np.float64]
    """``dataset_to_index`` for every row of the episode table; NaN where the table has no value."""
    has_from_index: bool
    """True if the episode table stores ``from_index``, false if raypipe counted it from the lengths."""
    is_deep: bool
    findings: tuple[Finding, ...] = ()
    """On those parts of the episode table that only validate reads."""

    def numbers(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Return the episode numbers of these rows of the table."""
        return tuple(self.meta.episodes.episode_index[list(rows)].tolist())


def read_promises(outline: Outline, *, is_deep: bool) -> Promises:
    """Return the promises of a dataset; reads the columns of the episode table that the pipeline does not use."""
    meta = outline.meta
    count = len(meta.episodes)
    findings: list[Finding] = []
    stored = _read_stored(outline, findings) if outline.has_episodes and meta.is_packed else {}
    nothing = np.full(count, np.nan)
    return Promises(
        meta=meta,
        has_episodes=outline.has_episodes,
        has_tasks=outline.has_tasks,
        to_timestamp={name: stored.get(_end_column(name), nothing) for name in meta.episodes.videos},
        to_index=stored.get("dataset_to_index", nothing),
        has_from_index=bool(np.isfinite(stored.get("dataset_from_index", nothing)).all()) and count > 0,
        is_deep=is_deep,
        findings=tuple(findings),
    )


def _end_column(camera: str) -> str:
    return f"videos/{camera}/to_timestamp"


def _read_stored(outline: Outline, findings: list[Finding]) -> dict[str, NDArray[np.float64]]:
    """Return columns of the episode table in row order, as floats; NaN where a file lacks a column."""
    meta = outline.meta
    names = ["dataset_from_index", "dataset_to_index", *(_end_column(name) for name in meta.episodes.videos)]
    columns = {name: np.full(len(meta.episodes), np.nan) for name in names}
    for file in split_tables(outline.files)[0]:
        try:
            table = read_parquet(meta.storage, file, ("episode_index",), optional=names)
            rows = np.searchsorted(meta.episodes.episode_index, table.column("episode_index").to_numpy())
            for name in table.column_names:
                if name in columns:
                    columns[name][rows] = table.column(name).cast("float64").to_numpy()
        except DAMAGE as error:
            # Only a warning: the columns that the pipeline needs were read.
            findings.append(make_finding("episodes-unreadable", one_line(error), Place(file=file), severity="warning"))
    return columns
