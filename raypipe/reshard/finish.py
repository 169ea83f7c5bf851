"""The last check before a copy appears: its counts against the source, and all that validate checks."""

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
"""The parts of meta/, in any version, that reshard writes itself."""


def copy_other_files(meta: DatasetMeta, workspace: Workspace, size_of: Mapping[str, int]) -> list[str]:
    """Copy the dataset's other files, further files of meta/ and the README; return notes on what was left out."""
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
    """Return whether a file is a link to a place outside the dataset, perhaps to somebody else's file."""
    if not storage.is_local:
        return False
    place, root = Path(os.path.realpath(storage.locate(name))), Path(os.path.realpath(storage.path))
    # The Hub's cache stores files as links to its own blobs.
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
    """Return validate's findings on the copy, in words; raise if the copy is not as it should be.

    Args:
        cameras: those whose videos the copy must have.

    Raises:
        DatasetError: the copy has other episodes than planned, lacks videos, or has validate errors that
            `allow_findings` does not permit.
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
