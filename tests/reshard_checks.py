"""What must hold between a dataset and its resharded copy, read with plain pyarrow and by packets."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.format import read_metadata, read_video_index
from raypipe.reshard.mp4 import read_track
from raypipe.storage import open_storage

RENUMBERED = ("frame_index", "episode_index", "index", "task_index")


def digests(root):
    """The content of every file below a folder, as a hash by name."""
    files = (path for path in sorted(Path(root).rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def info_of(root):
    return json.loads((Path(root) / "meta/info.json").read_text())


def packets(path):
    """The packets of an mp4 in decoding order."""
    track = read_track(open_storage(path.parent), path.name)
    content = path.read_bytes()
    return [content[o : o + s] for o, s in zip(track.offset.tolist(), track.size.tolist(), strict=True)]


def camera_packets(root, camera):
    """All packets of a camera, file after file."""
    paths = [path for path in sorted(Path(root).rglob("*.mp4")) if camera in path.parts]
    return [packet for path in paths for packet in packets(path)]


def source_rows(root):
    """The rows of each episode of any version, by its number, in the order of frames."""
    tables = [pq.read_table(path) for path in sorted(Path(root).glob("data/*/*.parquet"))]
    table = pa.concat_tables(tables)
    number = table.column("episode_index").to_numpy()
    return {episode: table.filter(pa.array(number == episode)) for episode in np.unique(number).tolist()}


def copied_rows(root):
    """The rows of each episode of a copy, by position: one row group each, in the file that meta/ names."""
    meta = read_metadata(str(root))
    rows, groups = [], {}
    for row in range(len(meta.episodes)):
        name = meta.data_file(row)
        group = groups.get(name, 0)
        groups[name] = group + 1
        rows.append(pq.ParquetFile(Path(root) / name).read_row_group(group))
    for name, count in groups.items():
        assert pq.ParquetFile(Path(root) / name).num_row_groups == count
    return rows


def assert_rows_kept(source, copy, kept, dropped_columns=()):
    """Every value of every kept episode is there, with its type; the index columns are numbered anew."""
    before, after = source_rows(source), copied_rows(copy)
    assert len(after) == len(kept)
    first_index = 0
    for number, (episode, table) in enumerate(zip(kept, after, strict=True)):
        old = before[episode]
        for name in old.column_names:
            if name not in RENUMBERED and name not in dropped_columns:
                assert table.schema.field(name).type == old.schema.field(name).type, name
                assert table.column(name).to_pylist() == old.column(name).to_pylist(), (episode, name)
        frames = np.arange(len(old))
        assert table.column("episode_index").to_pylist() == [number] * len(old)
        assert table.column("frame_index").to_pylist() == frames.tolist()
        assert table.column("index").to_pylist() == (first_index + frames).tolist()
        first_index += len(old)
        assert set(table.column_names) == (set(old.column_names) | set(RENUMBERED)) - set(dropped_columns)


def assert_times_exact(copy):
    """from_timestamp and to_timestamp of every episode are times of the file's own frames."""
    meta = read_metadata(str(copy))
    files = sorted(Path(copy).glob("meta/episodes/*/*.parquet"))
    table = pa.concat_tables([pq.read_table(path) for path in files])
    for camera in meta.episodes.videos:
        start, stop = (table.column(f"videos/{camera}/{end}_timestamp").to_numpy() for end in ("from", "to"))
        for row in range(len(table)):
            name = meta.video_file(row, camera)
            pts_s = read_video_index(meta.storage, name).pts_s
            track = read_track(meta.storage, name)
            first = int(np.flatnonzero(pts_s == start[row])[0])
            bounds = [*pts_s.tolist(), int(track.duration.sum()) / track.description.timescale]
            assert bounds[first + int(meta.episodes.length[row])] == stop[row]
