"""Checks a whole dataset: plans the units of work, runs them, and joins their results.

::

    outline -> plan_units -> [check_unit, ...]  in this process, or as Ray tasks
                                 |
            structure + whole + stats  ->  Report

A unit is one file. A task takes several units, since it costs Ray about a millisecond, and a fixed number of tasks is
in flight. A task that raises shows a bug in raypipe; bad data makes findings.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Literal, get_args

from raypipe.errors import ConfigError, suggest
from raypipe.storage import open_root
from raypipe.text import count_bar
from raypipe.validate.data import DataResult, check_data_file
from raypipe.validate.findings import Counts, Finding, Place, Report, make_finding, worst_first
from raypipe.validate.outline import Outline, read_outline
from raypipe.validate.promises import Promises, read_promises
from raypipe.validate.stats import check_stats
from raypipe.validate.structure import DataUnit, Unit, check_structure, plan_units
from raypipe.validate.summary import EpisodeSummary, join_summaries
from raypipe.validate.tasks import run_tasks
from raypipe.validate.video import VideoResult, check_video_file
from raypipe.validate.whole import check_whole

CheckWhere = Literal["auto", "process", "ray"]
FileResult = DataResult | VideoResult
Advance = Callable[[int], None]

_TASK_FRAMES: Final = 50_000
_TASK_FILES: Final = 64
"""The most rows of a task, and the most files: some tenths of a second of work."""

_SMALL_FRAMES: Final = {False: 500_000, True: 20_000}
_SMALL_FILES: Final = 500
"""Up to this size, checking takes less time than starting Ray; the limit is lower if frames are decoded."""


def validate_dataset(
    root: str, *, deep: bool = False, where: CheckWhere = "auto", progress: bool = False, title: str = "checking files"
) -> Report:
    """Return all findings on the dataset at `root`; reads every data file, and the index of every video.

    Args:
        deep: also decode every frame of every camera.
        where: ``process`` runs in this process, ``ray`` on a Ray cluster, and ``auto`` in this process if the dataset
            is small.
        progress: show a bar, at a terminal or in a notebook.
        title: the text before the bar.

    Raises:
        DatasetError: there is no folder at `root`. Everything else that is wrong is a finding.
    """
    check_where(where)
    started = time.monotonic()
    outline = read_outline(open_root(root))
    promises = read_promises(outline, is_deep=deep)
    units, findings = plan_units(outline)
    findings += [*promises.findings, *check_structure(outline)]
    on_ray = where == "ray" or (where == "auto" and not is_small(promises.meta.num_frames, len(units), deep))
    with count_bar(title, len(units), is_on=progress) as advance:
        results = _run_units(promises, units, advance, on_ray=on_ray)
    findings += [finding for result in results for finding in result.findings]
    data = [result for result in results if isinstance(result, DataResult)]
    found, summary = _check_together(outline, promises, data)
    findings += found
    return Report(
        root=outline.meta.root,
        version=outline.meta.version,
        fps=outline.meta.fps,
        is_deep=deep,
        findings=worst_first(findings, outline.meta.root),
        counts=_count(promises, results),
        elapsed_s=time.monotonic() - started,
        summary=summary,
    )


def check_rows(outline: Outline) -> tuple[Finding, ...]:
    """Return the findings of `validate_dataset` on the rows of a dataset; reads every data file, in this process."""
    promises = read_promises(outline, is_deep=False)
    data = [check_data_file(promises, unit) for unit in plan_units(outline)[0] if isinstance(unit, DataUnit)]
    findings = [*promises.findings, *(finding for result in data for finding in result.findings)]
    return worst_first([*findings, *_check_together(outline, promises, data)[0]], outline.meta.root)


def _check_together(
    outline: Outline, promises: Promises, data: Sequence[DataResult]
) -> tuple[list[Finding], EpisodeSummary]:
    """Return the findings that need all data files together, and the summary of all episodes."""
    summary = join_summaries([result.summary for result in data])
    return [*check_whole(promises, data, summary), *check_stats(promises, outline.files, summary)], summary


def check_where(where: str) -> None:
    """Raise a `ConfigError` if `where` is not a place where files can be checked."""
    if where not in get_args(CheckWhere):
        raise ConfigError(f"where is {where!r}{suggest(where, get_args(CheckWhere))}")


def is_small(num_frames: int, num_files: int, deep: bool) -> bool:
    """Return whether checking this much here takes less time than starting Ray."""
    return num_files <= _SMALL_FILES and num_frames <= _SMALL_FRAMES[deep]


def _count(promises: Promises, results: Sequence[FileResult]) -> Counts:
    num_data = sum(isinstance(result, DataResult) for result in results)
    return Counts(
        episodes=len(promises.meta.episodes),
        frames=promises.meta.num_frames,
        data_files=num_data,
        video_files=len(results) - num_data,
        decoded_frames=sum(result.decoded_frames for result in results),
    )


def check_unit(promises: Promises, unit: Unit) -> FileResult:
    """Return the result of checking one file."""
    if not isinstance(unit, DataUnit):
        return check_video_file(promises, unit)
    result = check_data_file(promises, unit)
    if not promises.is_deep or not result.columns:
        return result
    from raypipe.validate.deep import decode_images

    found, num_decoded = decode_images(promises, unit)
    return replace(result, findings=(*result.findings, *found), decoded_frames=num_decoded)


def pack_units(promises: Promises, units: Sequence[Unit]) -> list[list[Unit]]:
    """Return the units packed into tasks; a video to decode is a task of its own, since it may crash."""
    tasks: list[list[Unit]] = []
    frames, kind = 0, ""
    for unit in units:
        is_video = not isinstance(unit, DataUnit)
        count = int(promises.meta.episodes.length[list(unit.rows)].sum()) if not is_video else 0
        is_alone = is_video and promises.is_deep
        is_full = frames + count > _TASK_FRAMES or (tasks and len(tasks[-1]) >= _TASK_FILES)
        if not tasks or is_alone or is_full or kind != type(unit).__name__:
            tasks.append([])
            frames = 0
        tasks[-1].append(unit)
        frames, kind = frames + count, type(unit).__name__
    return tasks


def _check_units(promises: Promises, units: Sequence[Unit]) -> list[FileResult]:
    return [check_unit(promises, unit) for unit in units]


def _run_units(promises: Promises, units: Sequence[Unit], advance: Advance, *, on_ray: bool) -> list[FileResult]:
    """Return the results of the units, in the order of completion."""
    results: list[FileResult] = []

    def run_alone(chosen: list[Unit], error: Exception) -> list[list[Unit]]:
        if len(chosen) > 1:
            return [[unit] for unit in chosen]
        results.append(_crashed(promises, chosen[0], error))
        advance(1)
        return []

    tasks = pack_units(promises, units) if on_ray else [[unit] for unit in units]
    for chosen, found in run_tasks(_check_units, promises, tasks, on_ray=on_ray, on_crash=run_alone):
        results += found
        advance(len(chosen))
    return results


def _crashed(promises: Promises, unit: Unit, error: Exception) -> FileResult:
    if isinstance(unit, DataUnit):
        raise error
    place = Place(file=unit.name, episodes=promises.numbers(unit.rows), feature=unit.camera)
    message = "two processes died while they decoded it, and nothing else"
    finding: Finding = make_finding("video-crash", message, place)
    return VideoResult(unit=unit, findings=(finding,))
