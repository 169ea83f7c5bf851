"""Normalised metadata on disk, so that a start with hundreds of datasets does not read every ``meta/`` again.

One file per dataset, which is used while the files that it was made from are as they were:

::

    FOLDER/<hash of the root>.arrow
      header          what this is, and the checksum of the rest
      Arrow stream    the episode table; in its schema, as JSON, all else and the state of the files

A file that is damaged, foreign or out of date is written anew: the cache is never a reason to fail. A dataset that
cannot be opened is not in it, so that mending is seen at once.
"""

import hashlib
import json
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from numpy.typing import NDArray

from raypipe import __version__
from raypipe.dataset import find_missing_cameras
from raypipe.metadata import DatasetMeta, DepthCodes, EpisodeTable, Feature, Tasks, VideoColumns, read_metadata
from raypipe.mixture.file_state import State, find_meta_state, looked_at_files, missing_files, read_state
from raypipe.row_features import find_absent_columns
from raypipe.storage import Storage

DEFAULT_CACHE: Final = Path("~/.cache/raypipe/metadata")

FORMAT: Final = 2
"""Higher whenever what is stored, or what reading ``meta/`` makes of it, changes without a new version of raypipe."""

_MAGIC: Final = f"raypipe metadata, format {FORMAT}, raypipe {__version__}, "
_HEADER_BYTES: Final = 192
"""A multiple of 64, to which Arrow aligns its buffers."""
_KEY: Final = b"raypipe"
_PARTIAL_S: Final = 3600.0
"""A file that is being written is moved into place in milliseconds: one of this age was left by a process that died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What opening a dataset finds: its metadata, and what its files lack."""

    meta: DatasetMeta
    missing_cameras: tuple[str, ...]
    """Declared cameras of which no file was found."""
    absent_columns: tuple[str, ...]
    """Declared features that the rows do not have."""
    cache_failure: str = ""
    """Why this is not kept for the next time; empty where it is, or where there is no cache."""


def read_contents(storage: Storage) -> Contents:
    """Return what the dataset at `storage` holds; reads ``meta/`` and up to three footers.

    Raises:
        DatasetError: it is no dataset, or nothing of it can be read.
    """
    meta = read_metadata(storage)
    return Contents(meta=meta, missing_cameras=find_missing_cameras(meta), absent_columns=find_absent_columns(meta))


def read_contents_cached(storage: Storage, folder: str | Path, *, revision: str = "") -> Contents:
    """Return what the dataset at `storage` holds, from the cache in `folder` if it is there; else keep it there.

    Args:
        revision: what names an unchanging state of the dataset; that of the Hub, where it is pinned to a commit. Then
            no file is looked at but the videos that were missing.
    """
    revision = revision or storage.commit
    try:
        path = cache_file(storage, folder)
    except RuntimeError as error:
        # A user without a home, as in some containers; the default folder is there.
        return _unkept(read_contents(storage), f"{str(folder)!r} is nowhere: {error}")
    # Before reading: a file that changes meanwhile makes the kept state outdated, never the kept values.
    state = find_meta_state(storage, revision)
    if state is None:
        contents = read_contents(storage)
        kind = type(storage.filesystem).__name__
        return _unkept(contents, f"{kind} of {storage.uri.split('://')[0]}:// does not tell when a file has changed")
    found = _find(path, storage, state)
    if found is not None:
        return found
    meta = read_metadata(storage)
    looked_at = read_state(storage, looked_at_files(meta, meta.cameras)) if storage.is_local and not revision else {}
    missing, absent = find_missing_cameras(meta), find_absent_columns(meta)
    if not looked_at:
        looked_at = dict.fromkeys(missing_files(meta, missing), "")
    contents = Contents(meta=meta, missing_cameras=missing, absent_columns=absent)
    try:
        _write(path, _pack(contents, state, looked_at))
    except OSError as error:
        return _unkept(contents, f"{str(path.parent)!r} cannot be written: {error.strerror or error}")
    return contents


def cache_file(storage: Storage, folder: str | Path) -> Path:
    """Return where the cache in `folder` keeps what it knows of the dataset at `storage`.

    One place per root: what is written there takes the place of what was, so that the folder does not grow.

    Raises:
        RuntimeError: `folder` is in a home directory, and there is none.
    """
    name = hashlib.sha256(storage.uri.encode(errors="surrogatepass")).hexdigest()[:32]
    return Path(folder).expanduser() / f"{name}.arrow"


def remove_partial_files(folder: str | Path) -> None:
    """Remove from a cache what processes that died have left half-written."""
    try:
        place = Path(folder).expanduser()
    except RuntimeError:
        # There is no home directory, and so nothing in it; opening tells of it.
        return
    for path in place.glob("*.part"):
        try:
            if time.time() - path.stat().st_mtime > _PARTIAL_S:
                path.unlink()
        except OSError:
            # Another process was quicker, or the folder is not ours to write to.
            continue


def _unkept(contents: Contents, why: str) -> Contents:
    return Contents(
        meta=contents.meta,
        missing_cameras=contents.missing_cameras,
        absent_columns=contents.absent_columns,
        cache_failure=f"metadata is not cached: {why}",
    )


def _find(path: Path, storage: Storage, state: State) -> Contents | None:
    """Return what the cache knows, if it is whole and the files are as they were."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if content[:_HEADER_BYTES] != _header(memoryview(content)[_HEADER_BYTES:]):
        return None
    with pa.ipc.open_stream(pa.py_buffer(content)[_HEADER_BYTES:]) as reader:
        table = reader.read_all()
    about = json.loads(table.schema.metadata[_KEY])
    if about["root"] != storage.uri or about["state"] != state:
        return None
    if read_state(storage, list(about["looked_at"])) != about["looked_at"]:
        return None
    return _unpack(storage, about, table)


def _write(path: Path, content: bytes) -> None:
    """Put the file in place at once; without waiting for the disk, since a torn file is recognised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.part")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _header(body: bytes | memoryview) -> bytes:
    checksum = hashlib.blake2b(body, digest_size=32).hexdigest()
    header = f"{_MAGIC}checksum {checksum}\n".encode().ljust(_HEADER_BYTES)
    assert len(header) == _HEADER_BYTES, header
    return header


def _pack(contents: Contents, state: State, looked_at: State) -> bytes:
    meta = contents.meta
    columns, videos = _columns(meta.episodes)
    about = {
        "root": meta.root,
        "state": state,
        "looked_at": looked_at,
        "missing_cameras": contents.missing_cameras,
        "absent_columns": contents.absent_columns,
        "version": meta.version,
        "fps": meta.fps,
        "robot_type": meta.robot_type,
        "features": [asdict(feature) for feature in meta.features.values()],
        "tasks": list(meta.tasks.texts.items()),
        "splits": meta.splits,
        "data_template": meta.data_template,
        "video_template": meta.video_template,
        "is_packed": meta.is_packed,
        "notes": meta.notes,
        "videos": videos,
    }
    table = pa.table({**columns, "tasks": meta.episodes.tasks}).replace_schema_metadata({_KEY: json.dumps(about)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    body: bytes = sink.getvalue().to_pybytes()
    return _header(body) + body


def _columns(episodes: EpisodeTable) -> tuple[dict[str, NDArray[Any]], dict[str, list[str]]]:
    """Return the columns of numbers, and which of them say where each camera is: cameras may share them."""
    columns: dict[str, NDArray[Any]] = {
        "episode_index": episodes.episode_index,
        "length": episodes.length,
        "from_index": episodes.from_index,
        "chunk_index": episodes.chunk_index,
        "file_index": episodes.file_index,
    }
    names = {id(values): name for name, values in columns.items()}
    videos: dict[str, list[str]] = {}
    for camera, places in episodes.videos.items():
        videos[camera] = []
        for values in (places.chunk_index, places.file_index, places.from_timestamp):
            name = names.setdefault(id(values), f"places {len(names)}")
            columns[name] = values
            videos[camera].append(name)
    return columns, videos


def _unpack(storage: Storage, about: Mapping[str, Any], table: pa.Table) -> Contents:
    columns = {name: table.column(name).to_numpy() for name in table.column_names if name != "tasks"}
    numbers = ("episode_index", "length", "from_index", "chunk_index", "file_index")
    episodes = EpisodeTable(
        **{name: columns[name] for name in numbers},
        tasks=table.column("tasks"),
        videos={camera: VideoColumns(*(columns[name] for name in names)) for camera, names in about["videos"].items()},
    )
    meta = DatasetMeta(
        storage=storage,
        version=about["version"],
        fps=about["fps"],
        robot_type=about["robot_type"],
        features={spec["name"]: _feature(spec) for spec in about["features"]},
        episodes=episodes,
        tasks=Tasks(dict(about["tasks"])),
        splits={name: (start, stop) for name, (start, stop) in about["splits"].items()},
        data_template=about["data_template"],
        video_template=about["video_template"],
        is_packed=about["is_packed"],
        notes=tuple(about["notes"]),
    )
    return Contents(
        meta=meta,
        missing_cameras=tuple(about["missing_cameras"]),
        absent_columns=tuple(about["absent_columns"]),
    )


def _feature(spec: Mapping[str, Any]) -> Feature:
    codes = DepthCodes(**spec["depth_codes"]) if spec["depth_codes"] is not None else None
    return Feature(**{**spec, "shape": tuple(spec["shape"]), "names": tuple(spec["names"]), "depth_codes": codes})
