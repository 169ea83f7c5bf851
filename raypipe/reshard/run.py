"""`reshard_dataset`: the steps of a rewrite, in order.

::

    check      whether it can be done              plan, workspace
    encode     episodes -> clips, if asked         tasks
    scan       video indexes -> pieces             tasks
    plan       pieces, sizes -> files              pure
    write      data files, video files             tasks, one per file
    meta       meta/ from the plan and the files   driver
    finish     check, validate, rename             driver

A task writes one file, or a few, and may run twice. So it is retried when storage fails for a while, and Ray retries it
when a worker dies. An error in the data ends the run; finished files stay.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from raypipe.errors import DatasetError
from raypipe.format import DatasetMeta, read_metadata
from raypipe.reshard.data import read_columns, write_data_file
from raypipe.reshard.meta import SourceEpisodes, open_source_episodes, write_meta
from raypipe.reshard.mp4 import Description
from raypipe.reshard.plan import (
    CopyJob,
    DataCopy,
    FilePlan,
    Piece,
    ReshardSpec,
    VideoCopy,
    check_choices,
    estimate_data_sizes,
    number_tasks,
    plan_data_files,
    plan_numbering,
    plan_video_files,
    video_cameras,
)
from raypipe.reshard.videos import choose_encodings, encode_episodes, list_source_files, scan_files, write_video_file
from raypipe.reshard.workspace import (
    Workspace,
    check_finished,
    find_workspace,
    hold_workspace,
    is_finished,
    list_sizes,
    publish,
)
from raypipe.storage import open_storage, retry_transient
from raypipe.text import count_bar, counted, either
from raypipe.validate import CheckWhere, check_where, run_tasks, running_ray, validate_dataset

_SMALL_BYTES: Final = 200 << 20
"""A smaller dataset is copied in this process in less time than Ray needs to start: about 5 s."""
_FILES_PER_SCAN: Final = 64
_FRAMES_PER_ENCODING: Final = 2_000
"""A few seconds of work: enough to be worth starting a task, and little to lose if the task is killed."""

CopyUnit = TypeVar("CopyUnit")
CopyResult = TypeVar("CopyResult")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """What a resharded copy holds, and notes on it."""

    root: str
    out: Path
    num_episodes: int
    num_frames: int
    num_excluded: int
    num_data_files: int
    num_video_files: int
    size_bytes: int
    num_kept_files: int
    """Files that an earlier, interrupted run had already finished."""
    was_complete: bool
    """True if `out` already existed, made with the same arguments; then nothing was done."""
    notes: tuple[str, ...]
    """What was computed, taken over or left out, in words."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self) | {"out": str(self.out), "notes": list(self.notes)}


def report_lines(report: ReshardReport) -> list[str]:
    """Return the report as lines for a person."""
    held = f"{counted(report.num_episodes, 'episode')}, {counted(report.num_frames, 'frame')}"
    if report.was_complete:
        return [f"{report.out} is complete already: {held}"]
    files = f"{counted(report.num_data_files, 'data file')} and {counted(report.num_video_files, 'video file')}"
    lines = [f"wrote {held} to {report.out}: {files}, {report.size_bytes / 2**20:.1f} MB"]
    if report.num_kept_files:
        lines.append(
            f"{counted(report.num_kept_files, 'file')} {either(report.num_kept_files, 'was', 'were')} there from an "
            f"earlier run"
        )
    return [*lines, *(f"note: {note}" for note in report.notes)]


def reshard_dataset(
    root: str,
    out: str | os.PathLike[str],
    spec: ReshardSpec = ReshardSpec(),  # noqa: B008
    *,
    where: CheckWhere = "auto",
    progress: bool = False,
    allow_findings: bool = False,
) -> ReshardReport:
    """Write a copy of the dataset at `root` to the folder `out`, as v3.0 with one row group per episode.

    `out` appears only when everything is written and checked. After a killed run, another call with the same arguments
    continues its work. The files depend only on the source and the spec.

    Args:
        where: ``process`` runs in this process, ``ray`` on a Ray cluster whose machines share `out`, and ``auto`` in
            this process if the dataset is small and no pixels are coded.
        progress: show bars, at a terminal or in a notebook.
        allow_findings: publish the copy even if validate finds errors in it, such as errors of its source.

    Raises:
        ConfigError: the request cannot be met; nothing was written.
        DatasetError: the source does not match its metadata; names the episode.
        ResumeError: an unfinished copy with other arguments is in the way.
    """
    meta = read_metadata(root)
    check_choices(meta, spec)
    cameras = video_cameras(meta, spec)
    size_of = list_sizes(meta.storage)
    workspace = find_workspace(meta.storage, spec.to_json(), out, size_of)
    if is_finished(workspace):
        shutil.rmtree(workspace.folder, ignore_errors=True)
        return _report(workspace, meta, spec, workspace.out)
    check_where(where)
    if where == "auto":
        where = "process" if sum(size_of.values()) < _SMALL_BYTES and not spec.is_reencoded else "ray"
    with _telling_how_to_go_on(meta.root):
        job, source = _prepare(meta, spec, workspace, cameras)
        run = _Runner(on_ray=where == "ray", progress=progress)
        with hold_workspace(workspace, meta.root), running_ray() if run.on_ray else nullcontext():
            files = _plan_files(job, size_of, run)
            num_kept = _write_files(job, files, run)
            _remove_stray(workspace, files)
            notes = [*job.columns.notes(), *_video_notes(job, files), *write_meta(job, files, source, size_of)]
            notes += check_copy(job, where=where, allow_findings=allow_findings)
            report = replace(_report(workspace, meta, spec, workspace.dataset, num_kept), notes=tuple(notes))
            publish(workspace)
    return report


@contextmanager
def _telling_how_to_go_on(root: str) -> Iterator[None]:
    try:
        yield
    except DatasetError as error:
        if "--exclude" not in str(error):
            error.add_note(
                f"To write a copy without the bad episodes: `raypipe validate {root} --exclude-file bad.txt`, then "
                f"`--exclude-file bad.txt` here."
            )
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runner:
    """Where the tasks run, and whether bars show it."""

    on_ray: bool
    progress: bool

    def __call__(
        self, title: str, work: Callable[[CopyJob, CopyUnit], CopyResult], job: CopyJob, units: Sequence[CopyUnit]
    ) -> list[CopyResult]:
        """Return ``work(job, unit)`` for every unit, in any order."""
        made = []
        with count_bar(title, len(units), is_on=self.progress) as advance:
            for _, result in run_tasks(partial(_retried, work), job, units, on_ray=self.on_ray):
                made.append(result)
                advance(1)
        return made


def _retried(work: Callable[[CopyJob, CopyUnit], CopyResult], job: CopyJob, unit: CopyUnit) -> CopyResult:
    return retry_transient(lambda: work(job, unit))


def _prepare(
    meta: DatasetMeta, spec: ReshardSpec, workspace: Workspace, cameras: tuple[str, ...]
) -> tuple[CopyJob, SourceEpisodes]:
    """Return all that is known before any video is scanned."""
    numbering = plan_numbering(meta, spec.exclude)
    columns = read_columns(meta, numbering, spec.drop_cameras)
    tasks = number_tasks(meta.tasks)
    source = open_source_episodes(meta, (*spec.drop_cameras, *columns.absent))
    changed = set() if numbering.is_same(meta) else {"episode_index", "index"}
    changed |= set() if tasks.is_same else {"task_index"}
    known = [name for name in columns.names if name not in columns.undeclared]
    vectors = [name for name in known if name not in meta.features or meta.features[name].kind == "vector"]
    job = CopyJob(
        meta=meta,
        spec=spec,
        workspace=workspace,
        cameras=cameras,
        numbering=numbering,
        columns=columns,
        tasks=tasks,
        encodings=choose_encodings(meta, spec, numbering, cameras),
        described=tuple(name for name in vectors if name in changed or name not in source.described),
    )
    return job, source


def _plan_files(job: CopyJob, size_of: dict[str, int], run: _Runner) -> FilePlan:
    if job.encodings:
        group = np.cumsum(job.lengths) // _FRAMES_PER_ENCODING
        parts = np.split(job.numbering.rows, np.flatnonzero(np.diff(group)) + 1)
        clips = [(camera, rows.tolist()) for camera in job.encodings for rows in parts]
        run("re-encode", encode_episodes, job, clips)
    videos: list[VideoCopy] = []
    for camera in job.cameras:
        files = list_source_files(job, camera)
        batches = [files[start : start + _FILES_PER_SCAN] for start in range(0, len(files), _FILES_PER_SCAN)]
        found = run(f"scan {camera}", scan_files, job, batches)
        pieces = _shared_descriptions(piece for batch in found for piece in batch)
        videos += plan_video_files(camera, pieces, job.spec.video_mb << 20)
    sizes = estimate_data_sizes(job.meta, job.numbering, size_of)
    return FilePlan(data=tuple(plan_data_files(sizes, job.spec.data_mb << 20)), videos=tuple(videos))


def _shared_descriptions(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces with one shared object for equal descriptions: in a large dataset most are equal."""
    known: dict[Description | None, Description | None] = {}
    return [replace(piece, description=known.setdefault(piece.description, piece.description)) for piece in pieces]


def _write_files(job: CopyJob, files: FilePlan, run: _Runner) -> int:
    """Write every file that does not exist yet; return how many existed already."""
    left = [unit for unit in files.all if job.workspace.find_record(unit.path) is None]
    run("write", _write_unit, job, left)
    for unit in files.all:
        check_finished(job.workspace, unit.path)
    return len(files.all) - len(left)


def _write_unit(job: CopyJob, unit: DataCopy | VideoCopy) -> None:
    if isinstance(unit, DataCopy):
        write_data_file(job, unit)
    else:
        write_video_file(job, unit)


def _remove_stray(workspace: Workspace, files: FilePlan) -> None:
    """Remove files of an interrupted run that this run does not write itself under the same name."""
    shutil.rmtree(workspace.dataset / "meta", ignore_errors=True)
    wanted = {unit.path for unit in files.all}
    for name in list_sizes(open_storage(workspace.dataset)):
        if name not in wanted:
            (workspace.dataset / name).unlink()


def _video_notes(job: CopyJob, files: FilePlan) -> list[str]:
    """Return notes on the videos, in words."""
    pieces = [piece for unit in files.videos for piece in unit.pieces]
    lead_in = sum(piece.num_lead_in for piece in pieces)
    whole = sum(piece.description is None for piece in pieces)
    sounding = len({piece.name for piece in pieces if piece.has_other_tracks})
    depth = [camera for camera in job.cameras if job.spec.is_reencoded and camera not in job.encodings]
    notes = []
    if lead_in:
        notes.append(
            f"{counted(lead_in, 'frame')} of excluded episodes {either(lead_in, 'stays', 'stay')} in the videos, "
            f"shown to nobody: kept frames refer to {either(lead_in, 'it', 'them')}. Re-encode to be rid of "
            f"{either(lead_in, 'it', 'them')}, as with --gop 2"
        )
    if whole:
        notes.append(
            f"{counted(whole, 'video')} without a plain index (fragmented or edited) "
            f"{either(whole, 'was', 'were')} copied as is"
        )
    if sounding:
        notes.append(f"sound and other tracks of {counted(sounding, 'video')} were left out: LeRobot reads none")
    if depth:
        notes.append(f"{', '.join(depth)}: depth is not re-encoded; its packets were copied")
    return notes


def check_copy(job: CopyJob, *, where: CheckWhere, allow_findings: bool) -> list[str]:
    """Return validate's findings on the copy, in words; raise if the copy is not as it should be.

    Raises:
        DatasetError: the copy has other episodes than planned, lacks videos, or has validate errors that
            `allow_findings` does not permit.
    """
    meta, workspace, expected = job.meta, job.workspace, job.lengths
    copy = read_metadata(str(workspace.dataset))
    if not np.array_equal(copy.episodes.length, expected) or copy.notes:
        raise DatasetError(
            f"the copy in {str(workspace.dataset)!r} has {counted(len(copy.episodes), 'episode')} and "
            f"{counted(copy.num_frames, 'frame')}, expected {len(expected)} and {int(expected.sum())} "
            f"({'; '.join(copy.notes) or 'no notes'}). Remove it and run again: rm -r {workspace.folder}"
        )
    _check_cameras(copy, job.cameras)
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
        lost = sorted(copy.rows_by_file(camera).keys() - there) if is_declared else []
        if lost or not is_declared:
            raise DatasetError(
                f"the copy in {copy.root!r} lacks videos of the camera {camera!r}: "
                f"{', '.join(lost[:3]) or 'it is not declared'}. Run the same command again."
            )


def _report(
    workspace: Workspace, meta: DatasetMeta, spec: ReshardSpec, folder: Path, num_kept: int = 0
) -> ReshardReport:
    """Return the report on the copy in `folder`."""
    copy = read_metadata(str(folder))
    sizes = list_sizes(open_storage(folder))
    return ReshardReport(
        root=meta.root,
        out=workspace.out,
        num_episodes=len(copy.episodes),
        num_frames=copy.num_frames,
        num_excluded=len(set(spec.exclude)),
        num_data_files=sum(name.startswith("data/") for name in sizes),
        num_video_files=sum(name.startswith("videos/") for name in sizes),
        size_bytes=sum(sizes.values()),
        num_kept_files=num_kept,
        was_complete=folder == workspace.out,
        notes=(),
    )
