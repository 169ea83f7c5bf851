"""Which columns the rows of the copy have, and how ``info.json`` declares them.

The copy keeps all columns of the source's rows. If the source's ``info.json`` and its rows disagree, the rows win:
LeRobot reads rows by the declarations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypipe.format import INDEX_FEATURES, DatasetMeta, open_parquet, why_unfit_name
from raypipe.reshard.plan import Numbering


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of the copy's rows."""

    names: tuple[str, ...]
    """All of them in order, with the index columns."""
    derived: tuple[str, ...]
    """Index columns that the source's rows lack; reshard computes them."""
    absent: tuple[str, ...]
    """Declared features without a column; the copy does not declare them."""
    undeclared: tuple[str, ...]
    """Columns that ``info.json`` does not name."""
    dropped: tuple[str, ...]
    """Cameras to leave out."""
    added: tuple[tuple[str, dict[str, Any]], ...]
    """Declarations of the undeclared and the derived columns, as far as LeRobot's format can express them."""

    def notes(self) -> list[str]:
        """Return the differences from the source, in words."""
        notes = []
        if self.derived:
            notes.append(f"the rows had no column {', '.join(self.derived)}; derived from the episode table")
        if self.absent:
            notes.append(f"info.json declared {', '.join(self.absent)} and the rows have no such column; left out")
        declared = dict(self.added)
        named = [name for name in self.undeclared if name in declared]
        if named:
            notes.append(f"info.json did not declare the columns {', '.join(named)}; it does now, by their types")
        unnamed = [name for name in self.undeclared if name not in declared]
        if unnamed:
            notes.append(
                f"the columns {', '.join(unnamed)} stay undeclared: LeRobot has no words for their types or names"
            )
        return notes


def read_columns(meta: DatasetMeta, numbering: Numbering, drop_cameras: Sequence[str]) -> Columns:
    """Return the columns of the copy, from the file of its first episode."""
    if not len(numbering):
        names = tuple(name for name, feature in meta.features.items() if feature.kind != "video")
        return Columns(names=names, derived=(), absent=(), undeclared=(), dropped=tuple(drop_cameras), added=())
    with open_parquet(meta.storage, meta.data_file(int(numbering.rows[0]))) as parquet:
        present = [name for name in parquet.schema_arrow.names if name not in drop_cameras]
        undeclared = tuple(name for name in present if name not in meta.features and name not in INDEX_FEATURES)
        kinds = {name: _with_length(parquet, name) for name in undeclared}
    derived = tuple(name for name in INDEX_FEATURES if name not in present)
    rows = [name for name, feature in meta.features.items() if feature.kind != "video" and name not in drop_cameras]
    absent = tuple(name for name in rows if name not in present and name not in INDEX_FEATURES)
    declared = {name: _declare(kind) for name, kind in kinds.items()}
    declared |= {
        name: {"dtype": dtype, "shape": [1], "names": None}
        for name, dtype in INDEX_FEATURES.items()
        if name not in meta.features
    }
    return Columns(
        names=(*present, *derived),
        derived=derived,
        absent=absent,
        undeclared=undeclared,
        dropped=tuple(drop_cameras),
        added=tuple((name, feature) for name, feature in declared.items() if feature and not why_unfit_name(name)),
    )


def _with_length(parquet: pq.ParquetFile, name: str) -> pa.DataType:
    """Return the type of a column; for lists that all have the same length above 1, with that length."""
    kind = parquet.schema_arrow.field(name).type
    if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
        return kind
    column = parquet.read(columns=[name]).column(0)
    lengths = pc.min_max(pc.list_value_length(column)).as_py()
    is_even = not column.null_count and lengths["min"] == lengths["max"] and (lengths["min"] or 0) > 1
    return pa.list_(kind.value_type, lengths["min"]) if is_even else kind


def _declare(kind: pa.DataType) -> dict[str, Any]:
    """Return the declaration of a column by its type; empty if the format has none."""
    shape = [1]
    if pa.types.is_fixed_size_list(kind):
        shape, kind = [kind.list_size], kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return {"dtype": "string", "shape": shape, "names": None} if shape == [1] else {}
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return {"dtype": str(kind.to_pandas_dtype()().dtype), "shape": shape, "names": None}
    return {}
