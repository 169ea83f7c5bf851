"""Which features are read from rows: those that are declared and have a column, texts of them, and the index columns.

A few footers tell. That every file has the columns is not checked here: whoever reads a file does.
"""

from collections.abc import Sequence
from dataclasses import replace

from raypipe.errors import DatasetError
from raypipe.format.dataset_meta import DatasetMeta
from raypipe.format.features import INDEX_FEATURES, Feature
from raypipe.format.rows import RowReader
from raypipe.format.texts import text_feature


def row_features_of(meta: DatasetMeta, cameras: Sequence[str], absent: Sequence[str]) -> dict[str, Feature]:
    """Return what is read from rows: declared features without the `absent` ones, and the index columns.

    Of images stored in rows only those of `cameras`.
    """
    rows = {
        name: feature
        for name, feature in meta.features.items()
        if feature.kind not in ("video", "opaque") and name not in absent and (not feature.is_camera or name in cameras)
    }
    for name, text in meta.texts.items():
        if text.source in rows:
            rows[name] = text_feature(name)
    for name, dtype in INDEX_FEATURES.items():
        rows[name] = Feature(name=name, kind="vector", dtype=dtype, shape=(1,))
    return rows


def find_absent_columns(meta: DatasetMeta) -> tuple[str, ...]:
    """Return the declared features that the rows do not have, by the first, middle and last data file.

    One that only some files lack is damage of those, and so are files that cannot be opened: reading them tells.
    Where none of the three opens, the others are tried in turn.
    """
    # A camera that was chosen is not taken away: its images are missed where they are read.
    names = [name for name, feature in meta.features.items() if not feature.is_camera]
    reader, looked_at = RowReader(replace(meta, storage=meta.storage.for_a_look()), names), looked_at_rows(meta)
    absent: set[str] | None = None
    errors: dict[str, DatasetError] = {}
    for tried, row in enumerate((*looked_at, *range(len(meta.episodes)))):
        if tried >= len(looked_at) and absent is not None:
            break
        name = meta.data_file(row)
        try:
            missing = set(reader.missing_columns(row)) if name not in errors else None
        except DatasetError as error:
            errors[name], missing = error, None
        if missing is not None:
            absent = missing if absent is None else absent & missing
    if absent is None and errors:
        raise next(iter(errors.values()))
    return tuple(name for name in names if absent and name in absent)


def looked_at_rows(meta: DatasetMeta) -> tuple[int, ...]:
    """Return the rows of the first, a middle and the last episode, whose files tell what a dataset lacks."""
    count = len(meta.episodes)
    return (0, count // 2, count - 1) if count else ()
