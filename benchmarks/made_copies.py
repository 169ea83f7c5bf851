"""Datasets for benchmarks that are longer than what is encoded or stored for them: the same videos, several times."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.format import DATA_TEMPLATES, VIDEO_TEMPLATES, format_path
from raypipe.testing import SynthSpec, write_dataset
from raypipe.testing.write import VideoPlace, episode_ranges, write_meta, write_rows


def write_repeated(root: Path, spec: SynthSpec, num_distinct: int) -> Path:
    """Write the v3.0 dataset of `spec`, of which only `num_distinct` videos of each camera are encoded.

    Each is as long as the longest episode. The video of episode ``e`` is the beginning of number ``e % num_distinct``,
    joined to the others without encoding again, as LeRobot's recorder joins them. So its frames bear the stamps of
    episode ``e % num_distinct``.
    """
    for number, episodes in enumerate(episode_ranges(spec, spec.episodes_per_data_file)):
        write_rows(spec, episodes, root / format_path(DATA_TEMPLATES[True], number, chunks_size=spec.chunks_size))
    with tempfile.TemporaryDirectory(dir=root, prefix="encoded-") as folder:
        lengths = (max(spec.lengths),) * num_distinct
        encoded = replace(spec, version="v2.1", lengths=lengths, with_stats=False)
        write_dataset(Path(folder, "encoded"), encoded)
        places = {camera.name: _join_camera(root, spec, camera.name, Path(folder)) for camera in spec.cameras}
    write_meta(root, spec, places)
    return root


def copy_episodes(source: Path, root: Path, num_copies: int) -> Path:
    """Write a v2.x dataset with every episode of `source` `num_copies` times, each in files of its own.

    Copies and not links: the system would hold the pages of linked files once.
    """
    info = json.loads((source / "meta" / "info.json").read_text())
    if not info["codebase_version"].startswith("v2."):
        raise SystemExit(
            f"{source} is of {info['codebase_version']}, and episodes are copied file by file: take a dataset of v2.0 "
            f"or v2.1, which has a file per episode"
        )
    episodes = _read_lines(source / "meta" / "episodes.jsonl")
    first_row = 0
    for number, episode in enumerate(episodes * num_copies):
        _copy_videos(source, root, info, episode["episode_index"], number)
        _copy_rows(source, root, info, episode["episode_index"], number, first_row)
        first_row += episode["length"]
    _copy_meta(source, root, info, num_copies)
    return root


def _join_camera(root: Path, spec: SynthSpec, camera: str, folder: Path) -> list[VideoPlace]:
    encoded = sorted(folder.glob(f"encoded/videos/*/{camera}/*.mp4"))
    places: list[VideoPlace] = []
    for number, episodes in enumerate(episode_ranges(spec, spec.episodes_per_video_file)):
        lines = []
        for episode in range(episodes.start, episodes.stop):
            clip, length = folder / f"{episode}.mp4", spec.lengths[episode]
            _run_ffmpeg(["-i", str(encoded[episode % len(encoded)]), "-frames:v", str(length)], clip)
            # A clip gives its own duration in whole milliseconds, and LeRobot refuses frames that drift by more.
            lines.append(f"file '{clip.name}'\nduration {length / spec.fps:.6f}\n")
        listing = folder / "clips.txt"
        listing.write_text("".join(lines))
        path = root / format_path(VIDEO_TEMPLATES[True], number, camera, spec.chunks_size)
        path.parent.mkdir(parents=True, exist_ok=True)
        _run_ffmpeg(["-f", "concat", "-i", str(listing), "-movflags", "+faststart"], path)
        times = [frames / spec.fps for frames in accumulate(spec.lengths[episodes.start : episodes.stop], initial=0)]
        places += [
            VideoPlace(file_number=number, from_timestamp=start, to_timestamp=stop) for start, stop in pairwise(times)
        ]
    return places


def _run_ffmpeg(arguments: Sequence[str], path: Path) -> None:
    subprocess.run(["ffmpeg", "-v", "error", "-y", *arguments, "-c", "copy", str(path)], check=True)


def _copy_videos(source: Path, root: Path, info: dict[str, Any], episode: int, number: int) -> None:
    cameras = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    for camera in cameras:
        name, copied = (
            format_path(info["video_path"], each, camera, info["chunks_size"]) for each in (episode, number)
        )
        # A camera that is declared, and has no files, is met in real datasets.
        if (source / name).exists():
            (root / copied).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, root / copied)


def _copy_rows(source: Path, root: Path, info: dict[str, Any], episode: int, number: int, first_row: int) -> None:
    name, copied = (format_path(info["data_path"], each, chunks_size=info["chunks_size"]) for each in (episode, number))
    table = pq.read_table(source / name)
    numbers = {"episode_index": [number] * len(table), "index": range(first_row, first_row + len(table))}
    for column, values in numbers.items():
        if column in table.column_names:
            position = table.column_names.index(column)
            table = table.set_column(position, table.field(position), pa.array(values, table.field(position).type))
    (root / copied).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, root / copied)


def _copy_meta(source: Path, root: Path, info: dict[str, Any], num_copies: int) -> None:
    (root / "meta").mkdir(parents=True)
    for path in (source / "meta").iterdir():
        if path.name in ("episodes.jsonl", "episodes_stats.jsonl"):
            lines = enumerate(_read_lines(path) * num_copies)
            _write_lines(root / "meta" / path.name, (line | {"episode_index": number} for number, line in lines))
        elif path.name != "info.json":
            shutil.copyfile(path, root / "meta" / path.name)
    counts = {name: num_copies * info[name] for name in ("total_episodes", "total_frames", "total_videos")}
    num_episodes = counts["total_episodes"]
    num_chunks = -(-num_episodes // info["chunks_size"])
    changed = {"total_chunks": num_chunks, "splits": {"train": f"0:{num_episodes}"}}
    # Last: `info.json` tells that the dataset is whole.
    (root / "meta" / "info.json").write_text(json.dumps(info | counts | changed, indent=4))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
