"""Which features come from rows: declared ones that have a column, texts derived from them, and the index columns.

A few footers decide. The reader of each file checks that the file has the columns.
"""

from collections.abc import Sequence
from dataclasses import replace

from raypipe.errors import DatasetError
from raypipe.format.dataset_meta import DatasetMeta
from raypipe.format.features import INDEX_FEATURES, Feature
from raypipe.format.rows import RowReader
from raypipe.format.texts import text_feature


def row_features_of(meta: DatasetMeta, cameras: Sequence[str], absent: Sequence[str]) -> dict[str, Feature]:
    """Return the features to read from rows: declared ones without the `absent` ones, their texts, the index columns.

    Images stored in rows are included only for `cameras`.
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
    """Return the declared features that the first, middle and last data files all lack.

    A column missing from only some files is damage to those files, as is a file that cannot be opened; their readers
    raise the error. If none of the three opens, try the others in turn.
    """
    # Cameras do not count: reading a selected camera without images is an error.
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
    """Return the rows of the first, a middle and the last episode, whose files show what a dataset lacks."""
    count = len(meta.episodes)
    return (0, count // 2, count - 1) if count else ()
