"""`reshard_dataset`: the steps of a rewrite, in order.

::

    check      whether it can be done              request, workspace
    encode     episodes -> clips, if asked         Ray tasks
    scan       video indexes -> pieces             Ray tasks
    plan       pieces, sizes -> files              pure
    write      data files, video files             Ray tasks, one per file
    meta       meta/ from the plan and the files   driver
    finish     check, validate, rename             driver
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from raypipe.errors import DatasetError
from raypipe.format import DatasetMeta, read_metadata
from raypipe.reshard.columns import Columns, read_columns
from raypipe.reshard.data import DataJob, TaskNumbers, number_tasks, write_data_file
from raypipe.reshard.finish import check_copy, copy_other_files
from raypipe.reshard.info import Encoding, make_info
from raypipe.reshard.meta import MetaJob, write_meta
from raypipe.reshard.mp4 import Description
from raypipe.reshard.pieces import Piece, SourceFile, scan_file
from raypipe.reshard.plan import (
    DataCopy,
    Numbering,
    VideoCopy,
    estimate_data_sizes,
    plan_data_files,
    plan_numbering,
    plan_video_files,
)
from raypipe.reshard.request import check_choices, choose_encodings, local_folder, video_cameras
from raypipe.reshard.source_meta import SourceEpisodes, open_source_episodes
from raypipe.reshard.spec import ReshardReport, ReshardSpec
from raypipe.reshard.tasks import CopyWhere, Runner, choose_where, open_runner
from raypipe.reshard.videos import write_video_file
from raypipe.reshard.workspace import (
    Workspace,
    check_finished,
    clean_up,
    find_finished,
    find_workspace,
    hold_workspace,
    list_sizes,
    publish,
)
from raypipe.storage import open_storage
from raypipe.text import counted, either

_FILES_PER_SCAN: Final = 64
_FRAMES_PER_ENCODING: Final = 2_000
"""A few seconds of work: enough to be worth starting a task, and little to lose if the task is killed."""


def reshard_dataset(
    root: str,
    out: str | os.PathLike[str],
    spec: ReshardSpec = ReshardSpec(),  # noqa: B008
    *,
    where: CopyWhere = "auto",
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
    workspace = find_workspace(meta, spec, local_folder(out), size_of)
    if find_finished(workspace) is not None:
        clean_up(workspace)
        return _report_of_finished(workspace, meta, spec)
    chosen = choose_where(where, sum(size_of.values()), is_reencoded=spec.is_reencoded)
    with _telling_how_to_go_on(meta.root):
        job = _prepare(meta, spec, workspace, cameras, size_of)
        with hold_workspace(workspace, meta, spec), open_runner(chosen, progress=progress) as runner:
            plan = _plan_videos(job, runner)
            num_kept = _write_files(job, plan, runner)
            notes = _write_meta(job, plan)
            notes += check_copy(meta, job.numbering, cameras, workspace, where=chosen, allow_findings=allow_findings)
            report = _report(job, plan, num_kept, notes)
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


def _report(job: "_Job", plan: "_VideoPlan", num_kept: int, notes: Sequence[str]) -> ReshardReport:
    return ReshardReport(
        root=job.meta.root,
        out=job.workspace.out,
        num_episodes=len(job.numbering),
        num_frames=int(job.meta.episodes.length[job.numbering.rows].sum()),
        num_excluded=len(job.meta.episodes) - len(job.numbering),
        num_data_files=len(job.data_units),
        num_video_files=len(plan.units),
        size_bytes=sum(list_sizes(open_storage(job.workspace.dataset)).values()),
        num_kept_files=num_kept,
        was_complete=False,
        notes=(*job.columns.notes(), *plan.notes(), *notes),
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Job:
    """All that is known before any video is read."""

    meta: DatasetMeta
    spec: ReshardSpec
    workspace: Workspace
    cameras: tuple[str, ...]
    numbering: Numbering
    columns: Columns
    tasks: TaskNumbers
    encodings: dict[str, Encoding]
    source: SourceEpisodes
    described: tuple[str, ...]
    data_units: tuple[DataCopy, ...]
    size_of: dict[str, int]


def _prepare(
    meta: DatasetMeta, spec: ReshardSpec, workspace: Workspace, cameras: tuple[str, ...], size_of: dict[str, int]
) -> _Job:
    numbering = plan_numbering(meta, spec.exclude)
    columns = read_columns(meta, numbering, spec.drop_cameras)
    tasks = number_tasks(meta.tasks)
    source = open_source_episodes(meta, (*spec.drop_cameras, *columns.absent))
    sizes = estimate_data_sizes(meta, numbering, size_of)
    return _Job(
        meta=meta,
        spec=spec,
        workspace=workspace,
        cameras=cameras,
        numbering=numbering,
        columns=columns,
        tasks=tasks,
        encodings=choose_encodings(meta, spec, numbering, cameras),
        source=source,
        described=_described(meta, columns, source, numbering, tasks),
        data_units=tuple(plan_data_files(sizes, spec.data_mb << 20)),
        size_of=size_of,
    )


def _described(
    meta: DatasetMeta, columns: Columns, source: SourceEpisodes, numbering: Numbering, tasks: TaskNumbers
) -> tuple[str, ...]:
    """Return the row features to compute statistics for: those without any, and those whose numbers change."""
    changed = set() if numbering.is_same(meta) else {"episode_index", "index"}
    changed |= set() if tasks.is_same else {"task_index"}
    vectors = [name for name in columns.names if name not in meta.features or meta.features[name].kind == "vector"]
    known = [name for name in vectors if name not in columns.undeclared]
    return tuple(name for name in known if name in changed or name not in source.described)


@dataclass(frozen=True, slots=True, kw_only=True)
class _VideoPlan:
    units: tuple[VideoCopy, ...]
    copied_depth: tuple[str, ...]

    def notes(self) -> list[str]:
        """Return notes on the videos, in words."""
        pieces = [piece for unit in self.units for piece in unit.pieces]
        lead_in = sum(piece.num_lead_in for piece in pieces)
        whole = sum(piece.description is None for piece in pieces)
        sounding = len({piece.name for piece in pieces if piece.has_other_tracks})
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
        if self.copied_depth:
            notes.append(f"{', '.join(self.copied_depth)}: depth is not re-encoded; its packets were copied")
        return notes


def _plan_videos(job: _Job, runner: Runner) -> _VideoPlan:
    _encode_clips(job, runner)
    units: list[VideoCopy] = []
    for camera in job.cameras:
        files = _source_files(job, camera)
        batches = [files[start : start + _FILES_PER_SCAN] for start in range(0, len(files), _FILES_PER_SCAN)]
        shared = (job.meta, job.numbering.is_kept)
        found = runner.run(f"scan {camera}", _scan, shared, batches)
        pieces = _shared_descriptions(piece for batch in found for piece in batch)
        units += plan_video_files(camera, pieces, job.spec.video_mb << 20)
    depth = [camera for camera in job.cameras if job.spec.is_reencoded and camera not in job.encodings]
    return _VideoPlan(units=tuple(units), copied_depth=tuple(depth))


def _shared_descriptions(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces with one shared object for equal descriptions: in a large dataset most are equal."""
    known: dict[Description | None, Description | None] = {}
    return [replace(piece, description=known.setdefault(piece.description, piece.description)) for piece in pieces]


def _encode_clips(job: _Job, runner: Runner) -> None:
    if not job.encodings:
        return
    from raypipe.reshard.encode import EncodeUnit, encode_episodes

    length = job.meta.episodes.length[job.numbering.rows]
    group = np.cumsum(length) // _FRAMES_PER_ENCODING
    cuts = np.flatnonzero(np.diff(group)) + 1
    units = [
        EncodeUnit(camera=camera, encoding=encoding, rows=tuple(rows.tolist()))
        for camera, encoding in job.encodings.items()
        for rows in np.split(job.numbering.rows, cuts)
    ]
    runner.run("re-encode", encode_episodes, (job.meta, job.workspace), units)


def _source_files(job: _Job, camera: str) -> list[SourceFile]:
    """Return the videos of a camera that hold kept episodes, each with all its episodes."""
    meta = job.meta
    if camera in job.encodings:
        from raypipe.reshard.encode import clip_name

        clips = open_storage(job.workspace.clips)
        return [
            SourceFile(storage=clips, name=clip_name(camera, row), camera=camera, rows=(row,), is_clip=True)
            for row in job.numbering.rows.tolist()
        ]
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row in range(len(meta.episodes)):
        rows_of[meta.video_file(row, camera)].append(row)
    is_kept = job.numbering.is_kept
    return [
        SourceFile(storage=meta.storage, name=name, camera=camera, rows=tuple(rows))
        for name, rows in rows_of.items()
        if is_kept[rows].any()
    ]


def _scan(shared: tuple[DatasetMeta, Any], files: Sequence[SourceFile]) -> list[Piece]:
    meta, is_kept = shared
    return [piece for file in files for piece in scan_file(meta, file, is_kept)]


def _write_files(job: _Job, plan: _VideoPlan, runner: Runner) -> int:
    """Write every file that does not exist yet; return how many existed already."""
    units: list[DataCopy | VideoCopy] = [*job.data_units, *plan.units]
    left = [unit for unit in units if job.workspace.find_record(unit.path) is None]
    data = DataJob(
        meta=job.meta, numbering=job.numbering, columns=job.columns, tasks=job.tasks, described=job.described
    )
    runner.run("write", _write_unit, (data, job.workspace), left)
    for unit in units:
        check_finished(job.workspace, unit.path)
    return len(units) - len(left)


def _write_unit(shared: tuple[DataJob, Workspace], unit: DataCopy | VideoCopy) -> None:
    data, workspace = shared
    if isinstance(unit, DataCopy):
        write_data_file(data, workspace, unit)
    else:
        write_video_file(data.meta, workspace, unit)


def _write_meta(job: _Job, plan: _VideoPlan) -> list[str]:
    _remove_stray(job.workspace, [*job.data_units, *plan.units])
    info = make_info(job.meta, job.spec, job.numbering, job.columns, job.encodings, len(job.tasks.texts))
    notes = write_meta(
        MetaJob(
            meta=job.meta,
            spec=job.spec,
            workspace=job.workspace,
            numbering=job.numbering,
            tasks=job.tasks,
            data_units=job.data_units,
            video_units=plan.units,
            source=job.source,
            described=job.described,
            dropped=(*job.spec.drop_cameras, *job.columns.absent),
        ),
        info,
    )
    return notes + copy_other_files(job.meta, job.workspace, job.size_of)


def _remove_stray(workspace: Workspace, units: Iterable[DataCopy | VideoCopy]) -> None:
    """Remove files of an interrupted run that this run does not write itself under the same name."""
    shutil.rmtree(workspace.dataset / "meta", ignore_errors=True)
    wanted = {unit.path for unit in units}
    for name in list_sizes(open_storage(workspace.dataset)):
        if name not in wanted:
            (workspace.dataset / name).unlink()


def _report_of_finished(workspace: Workspace, meta: DatasetMeta, spec: ReshardSpec) -> ReshardReport:
    copy = read_metadata(str(workspace.out))
    sizes = list_sizes(open_storage(workspace.out))
    return ReshardReport(
        root=meta.root,
        out=workspace.out,
        num_episodes=len(copy.episodes),
        num_frames=copy.num_frames,
        num_excluded=len(set(spec.exclude)),
        num_data_files=sum(name.startswith("data/") for name in sizes),
        num_video_files=sum(name.startswith("videos/") for name in sizes),
        size_bytes=sum(sizes.values()),
        num_kept_files=0,
        was_complete=True,
        notes=(),
    )
