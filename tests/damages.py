"""Damage to sound datasets: what validate must find, and what the pipeline must do about it.

    damage = DAMAGES["nan-actions"]
    root = shutil.copytree(write_dataset(..., base_spec("v3.0")), ...)
    damaged = damage.apply(root)        # episodes and files that are damaged

`SOUND` are datasets that look odd and are not: nothing but notes may be found in them.
"""

import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torchcodec.decoders import VideoDecoder
from torchcodec.encoders import VideoEncoder

from raypipe.format import DatasetMeta, read_metadata
from raypipe.storage import open_storage
from raypipe.testing import CameraSpec, SynthSpec, write_dataset
from raypipe.validate.video import read_container

TOP, WRIST = "observation.images.top", "observation.images.wrist"
LENGTHS = (7, 9, 12, 9, 8)
V3 = ("v3.0",)
V2 = ("v2.1",)
BOTH = ("v3.0", "v2.1")

Pipeline = Literal["refuses", "bad_episodes", "harmless"]


@dataclass(frozen=True)
class Damaged:
    """What a damage has hit."""

    episodes: tuple[int, ...]
    """Those that findings of the damage's kind name, and that cannot be read where the pipeline finds bad episodes."""
    files: tuple[str, ...]
    """Those that findings of the damage's kind name."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One way to damage a dataset that `base_spec` describes."""

    name: str
    apply: Callable[[Path], Damaged]
    kind: str
    """The kind of finding that tells of it."""
    pipeline: Pipeline
    """``refuses``: the dataset cannot be opened. ``bad_episodes``: the episodes cannot be read. ``harmless``: values
    are right all the same, or nobody can know."""
    versions: tuple[str, ...] = BOTH
    also: tuple[str, ...] = ()
    """Kinds of findings that follow from the damage, in one version or the other."""
    needs_deep: bool = False


DAMAGES: dict[str, Damage] = {}


def base_spec(version: str) -> SynthSpec:
    """Return the sound dataset that damages start from: in v3.0 two data files, of 3 and 2 episodes."""
    cameras = tuple(CameraSpec(name=name, height=32, width=48) for name in (TOP, WRIST))
    return SynthSpec(version=version, lengths=LENGTHS, cameras=cameras)


def damage(kind: str, pipeline: Pipeline, **options: Any) -> Callable[[Callable[[Path], Damaged]], Callable]:
    """Register a function as a damage, under its own name with dashes."""

    def register(apply: Callable[[Path], Damaged]) -> Callable[[Path], Damaged]:
        name = apply.__name__.replace("_", "-")
        DAMAGES[name] = Damage(name=name, apply=apply, kind=kind, pipeline=pipeline, **options)
        return apply

    return register


def meta_of(root: Path) -> DatasetMeta:
    return read_metadata(str(root))


def data_file(root: Path, episode: int) -> str:
    meta = meta_of(root)
    return meta.data_file(meta.episodes.find_row(episode))


def video_file(root: Path, episode: int, camera: str = TOP) -> str:
    meta = meta_of(root)
    return meta.video_file(meta.episodes.find_row(episode), camera)


def is_packed(root: Path) -> bool:
    return json.loads((root / "meta/info.json").read_text())["codebase_version"] == "v3.0"


def with_file_of(root: Path, episode: int) -> tuple[int, ...]:
    """Return the episodes that share the files of one."""
    if not is_packed(root):
        return (episode,)
    return (0, 1, 2) if episode < 3 else (3, 4)


def edit_info(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info, indent=4))


def edit_rows(root: Path, episode: int, change: Callable[[pa.Table], pa.Table]) -> str:
    """Replace the rows of one episode by `change` of them; every episode stays a row group."""
    name = data_file(root, episode)
    path = root / name
    table = pq.read_table(path)
    numbers = table.column("episode_index").to_numpy()
    parts = [table.filter(pa.array(numbers == number)) for number in np.unique(numbers)]
    parts = [change(part) if part.column("episode_index")[0].as_py() == episode else part for part in parts]
    write_groups(path, [part for part in parts if len(part)])
    return name


def write_groups(path: Path, parts: Sequence[pa.Table]) -> None:
    with pq.ParquetWriter(path, parts[0].schema) as writer:
        for part in parts:
            writer.write_table(part, row_group_size=max(1, len(part)))


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    """Return the table with other values in a column of the same type."""
    kind = table.schema.field(name).type
    return table.set_column(table.column_names.index(name), name, pa.array(list(values), kind))


def column(table: pa.Table, name: str) -> np.ndarray:
    return np.array(table.column(name).to_pylist())


def edit_episodes(root: Path, episode: int, changes: dict[str, Any]) -> str:
    """Change fields of one episode in the episode table."""
    if is_packed(root):
        name = "meta/episodes/chunk-000/file-000.parquet"
        table = pq.read_table(root / name)
        for field, value in changes.items():
            values = table.column(field).to_pylist()
            values[episode] = value(values[episode]) if callable(value) else value
            table = with_column(table, field, values)
        pq.write_table(table, root / name)
        return name
    name = "meta/episodes.jsonl"
    lines = [json.loads(line) for line in (root / name).read_text().splitlines()]
    for field, value in changes.items():
        lines[episode][field] = value(lines[episode][field]) if callable(value) else value
    (root / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return name


def truncate(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def boxes(content: bytes) -> list[tuple[bytes, bytes]]:
    """Return the top-level boxes of an mp4: kind and whole bytes."""
    found, position = [], 0
    while position < len(content):
        size, kind = struct.unpack_from(">I4s", content, position)
        found.append((kind, content[position : position + size]))
        position += size
    return found


def put_index_first(path: Path) -> None:
    """Rewrite an mp4 with its index before its frames, as LeRobot's recorder leaves it."""
    parts = boxes(path.read_bytes())
    moov = bytearray(next(body for kind, body in parts if kind == b"moov"))
    start = moov.index(b"stco")
    (count,) = struct.unpack_from(">I", moov, start + 8)
    for number in range(count):
        place = start + 12 + 4 * number
        (offset,) = struct.unpack_from(">I", moov, place)
        struct.pack_into(">I", moov, place, offset + len(moov))
    rest = [body for kind, body in parts if kind not in (b"ftyp", b"moov")]
    path.write_bytes(b"".join([parts[0][1], bytes(moov), *rest]))


def other_lengths(root: Path, lengths: tuple[int, ...], episode: int) -> str:
    """Replace a video by that of a dataset with other lengths; frames that both have are the same."""
    info = json.loads((root / "meta/info.json").read_text())
    base = base_spec(info["codebase_version"])
    spec = SynthSpec(version=base.version, lengths=lengths, cameras=base.cameras, with_stats=False)
    name = video_file(root, episode)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(write_dataset(Path(folder) / "other", spec) / name, root / name)
    return name


def stats_file(root: Path) -> str:
    return "meta/episodes/chunk-000/file-000.parquet" if is_packed(root) else "meta/episodes_stats.jsonl"


@damage("video-unreadable", "bad_episodes")
def truncated_video(root: Path) -> Damaged:
    name = video_file(root, 2)
    truncate(root / name, 0.5)
    return Damaged(with_file_of(root, 2), (name,))


@damage("video-truncated", "bad_episodes")
def truncated_video_with_its_index_first(root: Path) -> Damaged:
    name = video_file(root, 2)
    put_index_first(root / name)
    # The last quarter of the frames, which are all of episode 2.
    truncate(root / name, 0.8)
    return Damaged((2,), (name,))


@damage("video-missing", "bad_episodes")
def missing_video(root: Path) -> Damaged:
    name = video_file(root, 3)
    (root / name).unlink()
    return Damaged(with_file_of(root, 3), (name,))


@damage("camera-missing", "harmless")
def missing_camera(root: Path) -> Damaged:
    name = video_file(root, 0, WRIST)
    for path in root.glob("videos/**/*.mp4"):
        if WRIST in path.parts:
            path.unlink()
    return Damaged((), (name,))


@damage("video-unreadable", "bad_episodes")
def git_lfs_pointer(root: Path) -> Damaged:
    name = video_file(root, 3)
    (root / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4711\n")
    return Damaged(with_file_of(root, 3), (name,))


@damage("video-unreadable", "bad_episodes")
def zero_byte_video(root: Path) -> Damaged:
    name = video_file(root, 3)
    (root / name).write_bytes(b"")
    return Damaged(with_file_of(root, 3), (name,))


@damage("video-short", "bad_episodes")
def short_video(root: Path) -> Damaged:
    name = other_lengths(root, (7, 9, 10, 9, 8), 2)
    return Damaged((2,), (name,))


@damage("video-long", "harmless", versions=V2)
def long_video(root: Path) -> Damaged:
    name = other_lengths(root, (7, 9, 15, 9, 8), 2)
    return Damaged((2,), (name,))


@damage("video-short", "bad_episodes", versions=V2, also=("video-long",))
def swapped_videos(root: Path) -> Damaged:
    first, second = root / video_file(root, 1), root / video_file(root, 2)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    return Damaged((2,), (video_file(root, 2),))


@damage("video-damaged", "bad_episodes", needs_deep=True)
def corrupted_bytes(root: Path) -> Damaged:
    name = video_file(root, 2)
    path = root / name
    content = bytearray(path.read_bytes())
    start = 0
    for kind, body in boxes(bytes(content)):
        if kind == b"mdat":
            # In the last third: frames of episode 2.
            place = start + int(len(body) * 0.8)
            content[place : place + 200] = b"\xff" * 200
        start += len(body)
    path.write_bytes(bytes(content))
    return Damaged((2,), (name,))


@damage("video-damaged", "harmless", needs_deep=True)
def painted_over_bytes(root: Path) -> Damaged:
    """Damage that the decoder paints over: it gives a wrong frame, and says so in its log only."""
    name = video_file(root, 2)
    container = read_container(open_storage(str(root)), name)
    ends = container.end_byte
    # A keyframe of episode 2, which is last in its file: its first bytes stay.
    frame = len(ends) - 4
    start, stop = int(ends[frame - 1]), int(ends[frame])
    content = bytearray((root / name).read_bytes())
    content[start + (stop - start) // 2 : stop] = b"\xff" * (stop - start - (stop - start) // 2)
    (root / name).write_bytes(bytes(content))
    return Damaged((2,), (name,))


@damage("fps-mismatch", "harmless", also=("video-fps", "video-span"))
def wrong_fps(root: Path) -> Damaged:
    edit_info(root, lambda info: info.update(fps=15))
    return Damaged((), ("meta/info.json",))


@damage("video-size", "refuses")
def wrong_size(root: Path) -> Damaged:
    edit_info(root, lambda info: info["features"][TOP]["info"].update({"video.width": 64}))
    return Damaged((), tuple(sorted({video_file(root, episode) for episode in range(5)})))


@damage("video-codec", "harmless")
def wrong_codec(root: Path) -> Damaged:
    edit_info(root, lambda info: info["features"][TOP]["info"].update({"video.codec": "av1"}))
    return Damaged((), tuple(sorted({video_file(root, episode) for episode in range(5)})))


@damage("camera-black", "harmless", needs_deep=True)
def black_camera(root: Path) -> Damaged:
    name = video_file(root, 2)
    frames = VideoDecoder(str(root / name))[:]
    # The last episode of its file.
    frames[-LENGTHS[2] :] = 0
    encoder = VideoEncoder(frames, frame_rate=base_spec("v3.0").fps)
    encoder.to_file(root / name, codec="libx264", pixel_format="yuv420p", extra_options={"g": 2, "bf": 0})
    return Damaged((2,), (name,))


@damage("info-key", "refuses")
def missing_fps(root: Path) -> Damaged:
    edit_info(root, lambda info: info.pop("fps"))
    return Damaged((), ("meta/info.json",))


@damage("info-key", "refuses")
def missing_features(root: Path) -> Damaged:
    edit_info(root, lambda info: info.pop("features"))
    return Damaged((), ("meta/info.json",))


@damage("info-key", "harmless")
def missing_total(root: Path) -> Damaged:
    edit_info(root, lambda info: info.pop("total_frames"))
    return Damaged((), ("meta/info.json",))


@damage("version-unknown", "refuses")
def unknown_version(root: Path) -> Damaged:
    edit_info(root, lambda info: info.update(codebase_version="v9.9"))
    return Damaged((), ("meta/info.json",))


@damage("template-invalid", "refuses")
def broken_template(root: Path) -> Damaged:
    edit_info(root, lambda info: info.update(data_path=info["data_path"].replace(":03d}", ":03d", 1)))
    return Damaged((), ("meta/info.json",))


@damage("info-unreadable", "refuses")
def truncated_info(root: Path) -> Damaged:
    truncate(root / "meta/info.json", 0.5)
    return Damaged((), ("meta/info.json",))


@damage("feature-invalid", "refuses")
def no_dtype(root: Path) -> Damaged:
    edit_info(root, lambda info: info["features"]["action"].pop("dtype"))
    return Damaged((), ("meta/info.json",))


@damage("feature-unknown", "harmless")
def unknown_dtype(root: Path) -> Damaged:
    edit_info(root, lambda info: info["features"]["action"].update(dtype="float23"))
    return Damaged((), ("meta/info.json",))


@damage("count-mismatch", "harmless")
def wrong_total(root: Path) -> Damaged:
    edit_info(root, lambda info: info.update(total_frames=46))
    return Damaged((), ("meta/info.json",))


@damage("count-mismatch", "refuses")
def lost_episode_in_table(root: Path) -> Damaged:
    edit_info(root, lambda info: info.update(total_episodes=6))
    return Damaged((), ("meta/info.json",))


@damage("dtype-mismatch", "bad_episodes")
def wrong_dtype(root: Path) -> Damaged:
    edit_info(root, lambda info: info["features"]["action"].update(dtype="int64"))
    files = tuple(sorted({data_file(root, episode) for episode in range(5)}))
    return Damaged((0, 1, 2, 3, 4), files)


@damage("shape-mismatch", "bad_episodes")
def wrong_shape(root: Path) -> Damaged:
    edit_info(root, lambda info: info["features"]["observation.state"].update(shape=[7]))
    files = tuple(sorted({data_file(root, episode) for episode in range(5)}))
    return Damaged((0, 1, 2, 3, 4), files)


@damage("length-mismatch", "bad_episodes", also=("count-mismatch", "video-short", "index-range", "video-span"))
def wrong_length(root: Path) -> Damaged:
    name = data_file(root, 2)
    edit_episodes(root, 2, {"length": 15})
    return Damaged((2,), (name,))


@damage("video-drift", "harmless", versions=V3)
def drifted_from_timestamp(root: Path) -> Damaged:
    name = video_file(root, 2)
    edit_episodes(root, 2, {f"videos/{TOP}/from_timestamp": lambda start: start + 0.3})
    return Damaged((2,), (name,))


@damage("video-start", "bad_episodes", versions=V3)
def start_behind_the_end(root: Path) -> Damaged:
    # With one frame missing the lengths tell nothing, and the start must be right.
    name = other_lengths(root, (7, 9, 11, 9, 8), 2)
    edit_episodes(root, 2, {f"videos/{TOP}/from_timestamp": 9.0, f"videos/{TOP}/to_timestamp": 10.2})
    return Damaged((2,), (name,))


@damage("video-overlap", "harmless", versions=V3)
def overlapping_episodes(root: Path) -> Damaged:
    name = other_lengths(root, (7, 9, 11, 9, 8), 2)
    edit_episodes(
        root,
        2,
        {f"videos/{TOP}/from_timestamp": lambda at: at - 0.2, f"videos/{TOP}/to_timestamp": lambda at: at - 0.2},
    )
    return Damaged((1, 2), (name,))


@damage("video-span", "harmless", versions=V3)
def wrong_to_timestamp(root: Path) -> Damaged:
    name = video_file(root, 2)
    edit_episodes(root, 2, {f"videos/{TOP}/to_timestamp": lambda stop: stop + 0.5})
    return Damaged((2,), (name,))


@damage("index-range", "harmless", versions=V3)
def wrong_from_index(root: Path) -> Damaged:
    edit_episodes(root, 2, {"dataset_from_index": lambda start: start + 5, "dataset_to_index": lambda stop: stop + 5})
    return Damaged((2,), ("meta/episodes",))


@damage("length-mismatch", "bad_episodes", versions=V3, also=("rows-misplaced",))
def wrong_file_in_table(root: Path) -> Damaged:
    edit_episodes(root, 4, {"data/file_index": 0})
    return Damaged((4,), ("data/chunk-000/file-000.parquet",))


@damage("episodes-unreadable", "refuses")
def missing_episode_table(root: Path) -> Damaged:
    if is_packed(root):
        shutil.rmtree(root / "meta/episodes")
        return Damaged((), ("meta/episodes",))
    (root / "meta/episodes.jsonl").unlink()
    return Damaged((), ("meta/episodes.jsonl",))


@damage("episodes-unreadable", "refuses")
def doubled_episode_in_table(root: Path) -> Damaged:
    packed = is_packed(root)
    edit_episodes(root, 2, {"episode_index": 1})
    return Damaged((), ("meta/episodes" if packed else "meta/episodes.jsonl",))


@damage("episodes-unreadable", "refuses")
def truncated_episode_table(root: Path) -> Damaged:
    if is_packed(root):
        truncate(root / "meta/episodes/chunk-000/file-000.parquet", 0.5)
        return Damaged((), ("meta/episodes",))
    truncate(root / "meta/episodes.jsonl", 0.5)
    return Damaged((), ("meta/episodes.jsonl",))


@damage("tasks-unreadable", "refuses")
def missing_tasks(root: Path) -> Damaged:
    name = "meta/tasks.parquet" if is_packed(root) else "meta/tasks.jsonl"
    (root / name).unlink()
    return Damaged((), (name,))


@damage("task-unlisted", "harmless")
def unlisted_task(root: Path) -> Damaged:
    edit_episodes(root, 2, {"tasks": ["juggle"]})
    return Damaged((2,), ("meta",))


@damage("task-mismatch", "harmless")
def other_task_in_table(root: Path) -> Damaged:
    edit_episodes(root, 2, {"tasks": ["open the drawer"]})
    return Damaged((2,), (data_file(root, 2),))


@damage("data-unreadable", "bad_episodes")
def zero_byte_parquet(root: Path) -> Damaged:
    name = data_file(root, 3)
    (root / name).write_bytes(b"")
    return Damaged(with_file_of(root, 3), (name,))


@damage("data-unreadable", "bad_episodes")
def corrupt_parquet_footer(root: Path) -> Damaged:
    name = data_file(root, 3)
    content = bytearray((root / name).read_bytes())
    content[-64:-8] = b"\xff" * 56
    (root / name).write_bytes(bytes(content))
    return Damaged(with_file_of(root, 3), (name,))


@damage("data-unreadable", "bad_episodes")
def truncated_parquet(root: Path) -> Damaged:
    name = data_file(root, 3)
    truncate(root / name, 0.7)
    return Damaged(with_file_of(root, 3), (name,))


@damage("data-unreadable", "bad_episodes")
def corrupt_parquet_page(root: Path) -> Damaged:
    name = data_file(root, 3)
    content = bytearray((root / name).read_bytes())
    # The header of the first page of the first row group, which is that of episode 3.
    content[4:36] = b"\xff" * 32
    (root / name).write_bytes(bytes(content))
    return Damaged((3,), (name,))


@damage("data-missing", "bad_episodes")
def missing_parquet(root: Path) -> Damaged:
    name = data_file(root, 3)
    (root / name).unlink()
    return Damaged(with_file_of(root, 3), (name,))


@damage("file-extra", "harmless")
def extra_data_file(root: Path) -> Damaged:
    name = "data/chunk-000/copy.parquet"
    shutil.copy(root / data_file(root, 0), root / name)
    return Damaged((), (name,))


@damage("row-groups", "harmless", versions=V3)
def collapsed_row_groups(root: Path) -> Damaged:
    names = tuple(sorted({data_file(root, episode) for episode in range(5)}))
    for name in names:
        pq.write_table(pq.read_table(root / name), root / name)
    return Damaged((), names)


@damage("feature-missing", "bad_episodes")
def missing_column(root: Path) -> Damaged:
    name = data_file(root, 3)
    table = pq.read_table(root / name).drop_columns(["action"])
    numbers = table.column("episode_index").to_numpy()
    write_groups(root / name, [table.filter(pa.array(numbers == number)) for number in np.unique(numbers)])
    return Damaged(with_file_of(root, 3), (name,))


@damage("stats-mismatch", "harmless")
def swapped_columns(root: Path) -> Damaged:
    name = data_file(root, 3)
    table = pq.read_table(root / name)
    state, action = (table.column(column) for column in ("observation.state", "action"))
    for field, values in (("observation.state", action), ("action", state)):
        table = table.set_column(table.column_names.index(field), field, values)
    numbers = table.column("episode_index").to_numpy()
    write_groups(root / name, [table.filter(pa.array(numbers == number)) for number in np.unique(numbers)])
    return Damaged(with_file_of(root, 3), (stats_file(root), *(["meta/stats.json"] if is_packed(root) else [])))


@damage("nan-values", "bad_episodes")
def nan_actions(root: Path) -> Damaged:
    return Damaged((2,), (_set_value(root, 2, "action", np.nan),))


@damage("inf-values", "bad_episodes")
def inf_state(root: Path) -> Damaged:
    return Damaged((2,), (_set_value(root, 2, "observation.state", np.inf),))


def _set_value(root: Path, episode: int, feature: str, value: float) -> str:
    def change(table: pa.Table) -> pa.Table:
        values = column(table, feature)
        values[4, 2] = value
        return with_column(table, feature, values.tolist())

    return edit_rows(root, episode, change)


@damage("null-values", "bad_episodes")
def null_actions(root: Path) -> Damaged:
    def change(table: pa.Table) -> pa.Table:
        values = table.column("action").to_pylist()
        values[4] = None
        return with_column(table, "action", values)

    return Damaged((2,), (edit_rows(root, 2, change),))


@damage("rows-orphaned", "harmless")
def orphaned_rows(root: Path) -> Damaged:
    name = data_file(root, 3)
    table = pq.read_table(root / name)
    numbers = table.column("episode_index").to_numpy()
    parts = [table.filter(pa.array(numbers == number)) for number in np.unique(numbers)]
    stray = with_column(parts[0], "episode_index", [99] * len(parts[0]))
    write_groups(root / name, [*parts, stray])
    return Damaged((99,), (name,))


@damage("rows-duplicated", "bad_episodes")
def duplicated_rows(root: Path) -> Damaged:
    name = edit_rows(root, 2, lambda table: pa.concat_tables([table.slice(0, 5), table.slice(4)]))
    return Damaged((2,), (name,))


@damage("length-mismatch", "bad_episodes")
def lost_rows(root: Path) -> Damaged:
    return Damaged((2,), (edit_rows(root, 2, lambda table: table.slice(0, 10)),))


@damage("frame-gap", "bad_episodes")
def frame_gap(root: Path) -> Damaged:
    def change(table: pa.Table) -> pa.Table:
        frame = column(table, "frame_index")
        return with_column(table, "frame_index", frame + (frame > 5))

    return Damaged((2,), (edit_rows(root, 2, change),))


@damage("index-mismatch", "harmless")
def index_gap(root: Path) -> Damaged:
    def change(table: pa.Table) -> pa.Table:
        index = column(table, "index")
        return with_column(table, "index", index + 100 * (np.arange(len(index)) > 5))

    return Damaged((2,), (edit_rows(root, 2, change),))


@damage("rows-unordered", "harmless")
def unordered_rows(root: Path) -> Damaged:
    def change(table: pa.Table) -> pa.Table:
        return table.take([*range(5), 7, 6, 5, *range(8, len(table))])

    return Damaged((2,), (edit_rows(root, 2, change),))


@damage("timestamp-drift", "harmless")
def drifted_timestamps(root: Path) -> Damaged:
    def change(table: pa.Table) -> pa.Table:
        return with_column(table, "timestamp", column(table, "timestamp") * 1.2)

    return Damaged((2,), (edit_rows(root, 2, change),))


@damage("timestamp-offset", "harmless")
def late_timestamps(root: Path) -> Damaged:
    def change(table: pa.Table) -> pa.Table:
        return with_column(table, "timestamp", column(table, "timestamp") + 0.1)

    return Damaged((2,), (edit_rows(root, 2, change),))


@damage("timestamp-order", "harmless", also=("timestamp-drift",))
def timestamps_that_fall(root: Path) -> Damaged:
    def change(table: pa.Table) -> pa.Table:
        stamps = column(table, "timestamp")
        stamps[[5, 6]] = stamps[[6, 5]]
        return with_column(table, "timestamp", stamps)

    return Damaged((2,), (edit_rows(root, 2, change),))


@damage("task-unresolved", "bad_episodes")
def unresolved_task(root: Path) -> Damaged:
    def change(table: pa.Table) -> pa.Table:
        return with_column(table, "task_index", [7] * len(table))

    return Damaged((2,), (edit_rows(root, 2, change),))


@damage("episode-duplicate", "harmless", also=("stats-mismatch",))
def duplicate_episode(root: Path) -> Damaged:
    source = data_file(root, 1)
    table = pq.read_table(root / source)
    one = table.filter(pa.array(table.column("episode_index").to_numpy() == 1))

    def change(other: pa.Table) -> pa.Table:
        for name in ("observation.state", "action"):
            other = other.set_column(other.column_names.index(name), name, one.column(name))
        return other

    edit_rows(root, 3, change)
    return Damaged((1, 3), (source,))


@damage("stats-mismatch", "harmless")
def wrong_stats(root: Path) -> Damaged:
    if is_packed(root):
        name = "meta/stats.json"
        stats = json.loads((root / name).read_text())
        stats["action"]["max"][2] += 1.0
        (root / name).write_text(json.dumps(stats))
        return Damaged((), (name,))
    name = "meta/episodes_stats.jsonl"
    lines = [json.loads(line) for line in (root / name).read_text().splitlines()]
    lines[2]["stats"]["action"]["mean"][2] += 1.0
    (root / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Damaged((2,), (name,))


@damage("stats-unreadable", "harmless", versions=V3)
def truncated_stats(root: Path) -> Damaged:
    truncate(root / "meta/stats.json", 0.5)
    return Damaged((), ("meta/stats.json",))


def _sound(**options: Any) -> SynthSpec:
    options.setdefault("cameras", (CameraSpec(name=TOP, height=32, width=48),))
    options.setdefault("lengths", (6, 1, 9))
    return SynthSpec(**options)


SOUND: dict[str, SynthSpec] = {
    "v3.0": base_spec("v3.0"),
    "v2.1": base_spec("v2.1"),
    "v2.0": base_spec("v2.0"),
    "unicode and blanks": _sound(
        cameras=(CameraSpec(name="observation.images.caméra gauche 左", height=32, width=48),),
        tasks=("Würfel greifen 🤖", "öffne [die] Lade"),
    ),
    "dots in a camera's name": _sound(
        cameras=(CameraSpec(name="observation.images.left.rgb.v2", height=32, width=48),)
    ),
    "an episode of one frame": _sound(lengths=(1, 5)),
    "one frame in all": _sound(lengths=(1,), version="v2.1"),
    "two tasks an episode": _sound(two_tasks=True),
    "frames of no episode in a video": _sound(gap_frames=3),
    "B-frames": _sound(cameras=(CameraSpec(name=TOP, height=32, width=48, gop=6, b_frames=2),)),
    "a long GOP": _sound(
        lengths=(70, 9), fps=30, cameras=(CameraSpec(name=TOP, height=32, width=48, gop=250),), version="v2.1"
    ),
    "no index columns": _sound(drop_columns=("index", "frame_index", "task_index"), version="v2.1"),
    "every kind of feature": _sound(extra_features=("next.done", "observation.grid", "note")),
    "channels first": _sound(cameras=(CameraSpec(name=TOP, height=32, width=48, shape_order="chw"),)),
    "images inside the rows": _sound(cameras=(CameraSpec(name=TOP, height=32, width=48, kind="image"),)),
    "distances inside the rows": _sound(cameras=(CameraSpec(name=TOP, height=32, width=48, kind="depth-image"),)),
    "no cameras": _sound(cameras=()),
    "no statistics": _sound(with_stats=False),
    "many small files": _sound(
        lengths=(3,) * 7, episodes_per_data_file=1, episodes_per_video_file=2, chunks_size=2, episodes_per_meta_file=3
    ),
    "odd rate": _sound(fps=7, lengths=(40, 3)),
}
"""Datasets with nothing wrong; at most notes are found."""
