"""What the machine does to files that are sound: cut under a reader, unreadable, too many of them open."""

import subprocess
import sys

from raypipe.testing import SynthSpec, write_dataset

CUT_UNDER_A_READER = """
import os, sys
from raypipe.errors import DatasetError
from raypipe.metadata import read_metadata
from raypipe.rows import RowReader
meta = read_metadata(sys.argv[1])
reader = RowReader(meta, ["action"])
assert len(reader.read_episode(0)) == 300
os.truncate(meta.storage.locate(meta.data_file(0)), 4096)
try:
    reader.read_episode(7)
except DatasetError as error:
    print("told", error)
"""


def test_a_data_file_that_is_cut_under_its_reader_is_an_error_and_the_process_lives(tmp_path):
    root = write_dataset(tmp_path / "rows", SynthSpec(lengths=(300,) * 8, cameras=(), episodes_per_data_file=8))

    done = subprocess.run(
        [sys.executable, "-c", CUT_UNDER_A_READER, root], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("told episode 7 of")
    assert "file-000.parquet" in done.stdout
