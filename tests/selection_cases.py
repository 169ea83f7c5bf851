"""Datasets whose episode table and rows have columns of their own, for the tests of filters and weights."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.testing import SynthSpec, write_dataset

LENGTHS = (7, 1, 12, 5, 9, 3, 10, 4, 6)
TASKS = ("pick up the cube", "open the drawer")
"""Of even and of odd episodes."""


def write_rows(folder: Path, version="v3.0", lengths=LENGTHS, *, episode_columns=None, row_columns=None) -> Path:
    """Write a dataset without cameras.

    Args:
        episode_columns: values by name, one for each episode, for the episode table.
        row_columns: functions of (episode, frame) by name, for the rows; they become features.
    """
    root = write_dataset(folder, SynthSpec(version=version, lengths=lengths, cameras=(), state_dim=2, action_dim=2))
    _add_episode_columns(root, episode_columns or {})
    for name, value_of in (row_columns or {}).items():
        _add_row_column(root, name, value_of)
    return root


def _add_episode_columns(root: Path, columns) -> None:
    lines = root / "meta/episodes.jsonl"
    if lines.exists():
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        rows = [{**row, **{name: values[row["episode_index"]] for name, values in columns.items()}} for row in rows]
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    for path in root.glob("meta/episodes/*/*.parquet"):
        table = pq.read_table(path)
        for name, values in columns.items():
            mine = [values[episode] for episode in table.column("episode_index").to_pylist()]
            table = table.append_column(name, pa.array(mine))
        pq.write_table(table, path)


def _add_row_column(root: Path, name: str, value_of) -> None:
    dtype = ""
    for path in root.glob("data/*/*.parquet"):
        table = pq.ParquetFile(path).read()
        places = zip(table.column("episode_index").to_pylist(), table.column("frame_index").to_pylist(), strict=True)
        values = pa.array([value_of(episode, frame) for episode, frame in places])
        dtype = "bool" if pa.types.is_boolean(values.type) else "float32"
        pq.write_table(table.append_column(name, values), path)
    info = json.loads((root / "meta/info.json").read_text())
    info["features"][name] = {"dtype": dtype, "shape": [1], "names": None}
    (root / "meta/info.json").write_text(json.dumps(info))
