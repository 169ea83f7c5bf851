"""What tells that the files of a dataset have changed, without opening one: sizes, times, and tags of the storage.

A state is a mapping of file names to *stamps*; two equal states mean the same files. Locally all files of ``meta/`` are
looked at, and of data and videos those that opening looks at. A listing of a remote ``meta/`` is one request; its data
and videos are taken to change with it, but for videos that were missing and may have been uploaded since.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final

from raypipe.errors import DownloadError
from raypipe.metadata import DatasetMeta
from raypipe.row_features import looked_at_rows
from raypipe.storage import Storage, remote_stamp, walk_files

State = dict[str, str]
"""Stamps by file name; an empty stamp where there is no such file."""

_FOLDER: Final = "meta"


def find_meta_state(storage: Storage, revision: str) -> State | None:
    """Return the state of ``meta/``, which is the `revision` where one is given; None where the storage does not tell.

    Raises:
        DownloadError: the storage does not answer.
    """
    if revision:
        return {"revision": revision}
    if storage.is_local:
        top = storage.locate(_FOLDER)
        return {name: _local_stamp(os.path.join(top, name)) for name in sorted(walk_files(top))}
    if not storage.is_listable:
        return None
    return _find_remote_state(storage)


def looked_at_files(meta: DatasetMeta, cameras: Iterable[str]) -> tuple[str, ...]:
    """Return the data files that opening looks at, and the videos of `cameras`."""
    rows = sorted(set(looked_at_rows(meta)))
    placed = [camera for camera in cameras if camera in meta.episodes.videos]
    names = [meta.data_file(row) for row in rows]
    return tuple(dict.fromkeys(names + [meta.video_file(row, camera) for camera in placed for row in rows]))


def missing_files(meta: DatasetMeta, cameras: Iterable[str]) -> tuple[str, ...]:
    """Return the videos that opening looked for, and did not find."""
    data_files = looked_at_files(meta, ())
    return tuple(name for name in looked_at_files(meta, cameras) if name not in data_files)


def read_state(storage: Storage, names: Sequence[str]) -> State:
    """Return the state of these files; of a remote one only whether it is there."""
    if storage.is_local:
        return {name: _local_stamp(storage.locate(name)) for name in names}
    return {name: "there" if storage.exists(name) else "" for name in names}


def _local_stamp(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"


def _find_remote_state(storage: Storage) -> State | None:
    top = storage.locate(_FOLDER)
    try:
        # A filesystem may remember listings for as long as the process lives.
        storage.filesystem.invalidate_cache(top)
        files: dict[str, dict[str, Any]] = storage.filesystem.find(top, detail=True)
    except FileNotFoundError:
        return {}
    except Exception as error:
        raise DownloadError(
            f"cannot list {top!r} of {storage.uri!r}: {type(error).__name__}: {error}. Check the network, the address "
            f"and your permissions."
        ) from error
    stamps = {name: remote_stamp(info) for name, info in files.items()}
    return stamps if all(stamps.values()) else None
