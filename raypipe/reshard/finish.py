"""The last look at a copy before it appears: counts against the source, and everything that validate knows."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from raypipe.errors import DatasetError
from raypipe.format import DatasetMeta, read_metadata
from raypipe.reshard.plan import Numbering
from raypipe.reshard.tasks import CopyWhere
from raypipe.reshard.workspace import Workspace
from raypipe.storage import Storage
from raypipe.text import counted, either
from raypipe.validate import validate_dataset

_WRITTEN = ("meta/info.json", "meta/stats.json", "meta/tasks", "meta/episodes", "meta/reshard")
"""What stands in meta/ of any version and is written anew."""


def copy_other_files(meta: DatasetMeta, workspace: Workspace, size_of: Mapping[str, int]) -> list[str]:
    """Copy what else belongs to a dataset, further files of meta/ and its README; return what was left out."""
    used = {meta.data_file(row) for row in range(len(meta.episodes))}
    for camera in meta.episodes.videos:
        used |= {meta.video_file(row, camera) for row in range(len(meta.episodes))}
    left, outside = [], []
    for name in sorted(size_of.keys() - used):
        if name.startswith(_WRITTEN):
            continue
        if not name.startswith(("meta/", "README", "LICENSE")):
            left.append(name)
        elif _leads_out(meta.storage, name):
            outside.append(name)
        else:
            _copy_file(meta, workspace, name)
    return [
        f"{counted(len(names), 'file')} {which} {either(len(names), 'was', 'were')} {done}: {', '.join(names[:5])}"
        + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        for names, which, done in (
            (left, "that no episode uses", "left out"),
            (outside, "to which links lead out of the dataset", "not copied"),
        )
        if names
    ]


def _leads_out(storage: Storage, name: str) -> bool:
    """Return whether a file is elsewhere by a link: whoever made the dataset may have meant a file of another."""
    if not storage.is_local:
        return False
    place, root = Path(os.path.realpath(storage.locate(name))), Path(os.path.realpath(storage.path))
    # The Hub's cache has links to its own blobs in place of files.
    own = [root, *(folder.parent / "blobs" for folder in root.parents if folder.name == "snapshots")]
    return not any(place.is_relative_to(folder) for folder in own)


def _copy_file(meta: DatasetMeta, workspace: Workspace, name: str) -> None:
    content = meta.storage.read_bytes(name)

    def write(stream: IO[bytes]) -> None:
        stream.write(content)

    workspace.write_file(workspace.dataset / name, write)


def check_copy(
    meta: DatasetMeta,
    numbering: Numbering,
    cameras: Sequence[str],
    workspace: Workspace,
    *,
    where: CopyWhere,
    allow_findings: bool,
) -> list[str]:
    """Raise where the copy is not what it should be; return what validate found, in words.

    Args:
        cameras: those whose videos the copy must have.

    Raises:
        DatasetError: the copy has other episodes than planned, lacks videos, or has errors by validate that are not
            allowed.
    """
    copy = read_metadata(str(workspace.dataset))
    expected = meta.episodes.length[numbering.rows]
    if not np.array_equal(copy.episodes.length, expected) or copy.notes:
        raise DatasetError(
            f"the copy in {str(workspace.dataset)!r} has {counted(len(copy.episodes), 'episode')} and "
            f"{counted(copy.num_frames, 'frame')}, expected {len(expected)} and {int(expected.sum())} "
            f"({'; '.join(copy.notes) or 'no notes'}). Remove it and run again: rm -r {workspace.folder}"
        )
    _check_cameras(copy, cameras)
    report = validate_dataset(str(workspace.dataset), where=where)
    errors = [finding for finding in report.findings if finding.severity == "error"]
    if errors and not allow_findings:
        told = "; ".join(f"{found.kind}, {found.place.file}: {found.message}" for found in errors[:3])
        raise DatasetError(
            f"the copy of {meta.root!r} has {counted(len(errors), 'error')} by validate, as its source has: {told}. "
            f"Leave the bad episodes out: `raypipe validate {meta.root} --exclude-file bad.txt`, then "
            f"`--exclude-file bad.txt` here; or run the same command with --allow-findings to keep them."
        )
    counts = report.tally
    return [f"validate found {', '.join(f'{count} {kind}' for kind, count in counts.items())}"] if counts else []


def _check_cameras(copy: DatasetMeta, cameras: Sequence[str]) -> None:
    there = set(copy.storage.list_files("videos"))
    for camera in cameras:
        is_declared = camera in copy.episodes.videos
        needed = {copy.video_file(row, camera) for row in range(len(copy.episodes))} if is_declared else set()
        lost = sorted(needed - there)
        if lost or not is_declared:
            raise DatasetError(
                f"the copy in {copy.root!r} lacks videos of the camera {camera!r}: "
                f"{', '.join(lost[:3]) or 'it is not declared'}. Run the same command again."
            )
