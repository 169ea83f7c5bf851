"""A bounded parquet file gives the same rows as pyarrow, also where it reads texts in pieces or by reference."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypipe.format import tables
from raypipe.format.tables import BoundedParquet

TABLE = pa.table(
    {
        "the.number": pa.array(range(500), pa.int64()),
        "image": [{"bytes": b"%d" % (row % 7) * 50, "path": None} for row in range(500)],
        "tasks": [["do"] * (row % 4) if row % 9 else None for row in range(500)],
        "note": ["a" * (row % 5) if row % 3 else None for row in range(500)],
        "records": [[{"style": "subtask", "at": 0.5}] * (row % 3) for row in range(500)],
    }
)


@pytest.mark.parametrize("encoding", [None, "DELTA_BYTE_ARRAY"])
@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
@pytest.mark.parametrize("columns", [None, ["tasks", "the.number"], ["note", "image"], ["records"]])
def test_rows_are_those_of_pyarrow(encoding, compression, columns, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "FREE_BYTES", 20_000)
    encoded = {"column_encoding": {"note": encoding}, "use_dictionary": ["tasks"]} if encoding else {}
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=120, compression=compression, **encoded)
    expected = pq.read_table(tmp_path / "a.parquet", columns=columns)

    with BoundedParquet(tmp_path / "a.parquet", 1 << 20) as file:
        found = file.read(columns)

    assert found.select(expected.column_names).equals(expected)
    assert {*found.column_names} == {*expected.column_names}


def test_texts_beside_a_dictionary_are_read_too(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "FREE_BYTES", 20_000)
    texts = pa.table({"tasks": [[f"do {row}" * 5, "do"] for row in range(3000)], "n": range(3000)})
    pq.write_table(texts, tmp_path / "a.parquet", dictionary_pagesize_limit=2000, data_page_size=500)

    with BoundedParquet(tmp_path / "a.parquet", 1 << 20) as file:
        found = file.read()

    assert found.equals(texts)


def _lists(rows, size, kind):
    """Rows of lists of which the first tenth is data and the rest is padding."""
    numbers = np.zeros((rows, size), kind)
    numbers[:, : size // 10] = np.random.default_rng(0).integers(0, 99, (rows, size // 10))
    values = pa.array(numbers.ravel())
    return pa.ListArray.from_arrays(pa.array(range(0, rows * size + 1, size), pa.int32()), values)


@pytest.mark.parametrize("times", [10, 40])
def test_padded_rows_may_be_many_times_as_large_as_their_file(times, tmp_path, monkeypatch):
    table = pa.table({name: _lists(300, 64, np.float64) for name in ("action", "observation.state")})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    monkeypatch.setattr(tables, "FREE_BYTES", 1)
    size_bytes = 300 * 128 * 8

    with BoundedParquet(tmp_path / "a.parquet", size_bytes // times) as file:
        assert file.read().equals(table)

    with BoundedParquet(tmp_path / "a.parquet", size_bytes // 65) as file, pytest.raises(pa.ArrowInvalid):
        file.read()


def test_files_that_are_let_go_are_closed(tmp_path):
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), path)
    open_files = len(os.listdir("/proc/self/fd"))

    for _ in range(20):
        BoundedParquet(str(path), path.stat().st_size).read()

    assert len(os.listdir("/proc/self/fd")) == open_files
