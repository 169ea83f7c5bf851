"""Small files that claim much, and what a process that reads one does about it.

found = read_claim("from raypipe.format import read_metadata; read_metadata(place)", root)
assert found.error == "DatasetError" and found.peak_mb < 300
"""

import json
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MOST_ADDRESS_BYTES = 4 << 30
"""Of the process that reads: what asks for more gets a MemoryError, and the machine keeps its memory."""

_RUN = """
import json, resource, sys
code, place, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
names = {"place": place}
head, _, body = code.partition("; ")
exec(head, names)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before, error, text = peak(), "", ""
try:
    exec(body, names)
except BaseException as raised:
    error, text = type(raised).__name__, str(raised)
print(json.dumps({"error": error, "text": text, "peak_mb": peak() - before}))
"""


@dataclass(frozen=True)
class Found:
    error: str
    text: str
    peak_mb: int
    """What reading took beyond what the process had."""


def read_claim(code: str, place: Path | str) -> Found:
    """Run ``import; statements`` on a place in a process of its own, whose memory is bounded and measured."""
    command = [sys.executable, "-c", _RUN, code, str(place), str(MOST_ADDRESS_BYTES)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def box(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I4s", 8 + len(body), kind) + body


def numbers(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def write_mp4(path: Path, *, count: int, size: int = 0, run: int | None = None, per_chunk: int | None = None) -> Path:
    """Write an mp4 whose index claims `count` samples of one `size`, one run of times, and one chunk of them all."""
    tables = box(
        b"stbl",
        box(b"stsd", numbers(0, 1), numbers(86), b"avc1", bytes(24), struct.pack(">HH", 48, 32), bytes(50)),
        box(b"stts", numbers(0, 1, count if run is None else run, 1)),
        box(b"stsz", numbers(0, size, count)),
        box(b"stsc", numbers(0, 1, 1, count if per_chunk is None else per_chunk, 1)),
        box(b"stco", numbers(0, 1, 8)),
    )
    media = box(b"mdia", box(b"mdhd", bytes(12), numbers(30, 0)), box(b"hdlr", bytes(8), b"vide"), box(b"minf", tables))
    movie = box(b"moov", box(b"mvhd", bytes(12), numbers(30, 0)), box(b"trak", box(b"tkhd", bytes(92)), media))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(box(b"mdat", bytes(3000)) + movie)
    return path


def write_dataset_of(root: Path, *, tasks: int = 1, episodes: int = 1, **info: object) -> Path:
    """Write ``meta/`` of a v3.0 dataset of one episode, without tables."""
    declared = {
        "codebase_version": "v3.0",
        "fps": 30,
        "total_episodes": episodes,
        "total_tasks": tasks,
        "features": {"action": {"dtype": "float32", "shape": [2]}},
        **info,
    }
    (root / "meta").mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(declared))
    write_table(root, "meta/tasks.parquet", {"task_index": [0], "task": ["do"]})
    columns = {"episode_index": [0], "length": [3], "data/chunk_index": [0], "data/file_index": [0]}
    write_table(root, "meta/episodes/chunk-000/file-000.parquet", {**columns, "tasks": [["do"]]})
    return root


def write_table(root: Path, name: str, columns: dict) -> Path:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), root / name, compression="zstd")
    return root / name


def repeated(value: object, kind: pa.DataType, times: int) -> pa.DictionaryArray:
    """Return a column of one value `times` over, which takes a few bytes in a file."""
    return pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int8()), times), pa.array([value], kind))
