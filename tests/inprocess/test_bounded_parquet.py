"""A bounded parquet file gives the same rows as pyarrow, also where it reads texts in pieces or by reference."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypipe.format import parquet
from raypipe.format.parquet import BoundedParquet

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
    monkeypatch.setattr(parquet, "FREE_BYTES", 20_000)
    encoded = {"column_encoding": {"note": encoding}, "use_dictionary": ["tasks"]} if encoding else {}
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=120, compression=compression, **encoded)
    expected = pq.read_table(tmp_path / "a.parquet", columns=columns)

    with BoundedParquet(tmp_path / "a.parquet", 1 << 20) as file:
        found = file.read(columns)

    assert found.select(expected.column_names).equals(expected)
    assert {*found.column_names} == {*expected.column_names}


def test_texts_beside_a_dictionary_are_read_too(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "FREE_BYTES", 20_000)
    texts = pa.table({"tasks": [[f"do {row}" * 5, "do"] for row in range(3000)], "n": range(3000)})
    pq.write_table(texts, tmp_path / "a.parquet", dictionary_pagesize_limit=2000, data_page_size=500)

    with BoundedParquet(tmp_path / "a.parquet", 1 << 20) as file:
        found = file.read()

    assert found.equals(texts)
