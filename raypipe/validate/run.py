"""Checks a whole dataset, or every dataset of a mixture: plans the units of work, runs them, and joins their results.

::

    outline -> plan_units -> [check_unit, ...]  in this process, or as Ray tasks
                                 |
            structure + whole  ->  Report

A unit is one file. A task takes several units, since it costs Ray about a millisecond, and a fixed number of tasks is
in flight. A task that raises shows a bug in raypipe; bad data makes findings.

Of a mixture, whether its datasets open and fit together as in training comes first. A dataset that cannot be opened is
a finding; the others are still checked. Each dataset is checked whole, whatever the mixture selects or drops: a choice
in the file may change, and the files should be sound all the same.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

# The door, which loads the room on use: the tasks that check files have no use for it.
from raypipe import mixture as mixtures
from raypipe.errors import ConfigError, RaypipeError, suggest
from raypipe.format import one_line
from raypipe.storage import open_root
from raypipe.text import count_bar
from raypipe.validate.data import FileResult, check_data_file
from raypipe.validate.findings import Counts, Finding, MixtureReport, Place, Report, Severity, make_finding, worst_first
from raypipe.validate.outline import DataUnit, Outline, Unit, check_structure, plan_units, read_outline, read_stored
from raypipe.validate.video import check_video_file
from raypipe.validate.whole import check_whole

if TYPE_CHECKING:
    from raypipe.dataset import Dataset
    from raypipe.mixture import MemberNote, MemberSpec, MixtureSpec, Opened

CheckWhere = Literal["auto", "process", "ray"]
Advance = Callable[[int], None]

_TASK_FRAMES: Final = 50_000
_TASK_FILES: Final = 64
"""The most rows of a task, and the most files: some tenths of a second of work."""

_SMALL_FRAMES: Final = {False: 500_000, True: 20_000}
_SMALL_FILES: Final = 500
"""Up to this size, checking takes less time than starting Ray; the limit is lower if frames are decoded."""

_UNUSABLE: Final = "member-unusable"


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
    stored, findings = read_stored(outline)
    outline = replace(outline, is_deep=deep, stored=stored)
    units, lacking = plan_units(outline)
    findings += [*lacking, *check_structure(outline)]
    on_ray = where == "ray" or (where == "auto" and not is_small(outline.meta.num_frames, len(units), deep))
    with count_bar(title, len(units), is_on=progress) as advance:
        results = _run_units(outline, units, advance, on_ray=on_ray)
    data = [result for result in results if isinstance(result.unit, DataUnit)]
    found, summary = check_whole(outline, data)
    findings += [*(finding for result in results for finding in result.findings), *found]
    return Report(
        root=outline.meta.root,
        version=outline.meta.version,
        fps=outline.meta.fps,
        is_deep=deep,
        findings=worst_first(findings, outline.meta.root),
        counts=Counts(
            episodes=len(outline.meta.episodes),
            frames=outline.meta.num_frames,
            data_files=len(data),
            video_files=len(results) - len(data),
            decoded_frames=sum(result.decoded_frames for result in results),
        ),
        elapsed_s=time.monotonic() - started,
        summary=summary,
    )


def check_rows(outline: Outline) -> tuple[Finding, ...]:
    """Return the findings of `validate_dataset` on the rows of a dataset; reads every data file, in this process."""
    stored, findings = read_stored(outline)
    outline = replace(outline, stored=stored)
    data = [check_data_file(outline, unit) for unit in plan_units(outline)[0] if isinstance(unit, DataUnit)]
    findings += [*(finding for result in data for finding in result.findings), *check_whole(outline, data)[0]]
    return worst_first(findings, outline.meta.root)


def check_where(where: str) -> None:
    """Raise a `ConfigError` if `where` is not a place where files can be checked."""
    if where not in get_args(CheckWhere):
        raise ConfigError(f"where is {where!r}{suggest(where, get_args(CheckWhere))}")


def is_small(num_frames: int, num_files: int, deep: bool) -> bool:
    """Return whether checking this much here takes less time than starting Ray."""
    return num_files <= _SMALL_FILES and num_frames <= _SMALL_FRAMES[deep]


def _check_units(outline: Outline, units: Sequence[Unit]) -> list[FileResult]:
    return [
        check_data_file(outline, unit) if isinstance(unit, DataUnit) else check_video_file(outline, unit)
        for unit in units
    ]


def _pack_units(outline: Outline, units: Sequence[Unit]) -> list[list[Unit]]:
    """Return the units packed into tasks; a video to decode is a task of its own, since it may crash."""
    tasks: list[list[Unit]] = []
    frames, kind = 0, ""
    for unit in units:
        is_video = not isinstance(unit, DataUnit)
        count = int(outline.meta.episodes.length[list(unit.rows)].sum()) if not is_video else 0
        is_alone = is_video and outline.is_deep
        is_full = frames + count > _TASK_FRAMES or (tasks and len(tasks[-1]) >= _TASK_FILES)
        if not tasks or is_alone or is_full or kind != type(unit).__name__:
            tasks.append([])
            frames = 0
        tasks[-1].append(unit)
        frames, kind = frames + count, type(unit).__name__
    return tasks


def _run_units(outline: Outline, units: Sequence[Unit], advance: Advance, *, on_ray: bool) -> list[FileResult]:
    """Return the results of the units, in the order of completion."""
    results: list[FileResult] = []

    def run_alone(chosen: list[Unit], error: Exception) -> list[list[Unit]]:
        if len(chosen) > 1:
            return [[unit] for unit in chosen]
        (unit,) = chosen
        if isinstance(unit, DataUnit):
            raise error
        message = "two processes died while they decoded it, and nothing else"
        results.append(FileResult(unit=unit, findings=(unit.finding("video-crash", message, unit.episodes),)))
        advance(1)
        return []

    tasks = _pack_units(outline, units) if on_ray else [[unit] for unit in units]
    # A task has no use for the list of all files.
    sent = replace(outline, files=())
    for chosen, found in run_tasks(_check_units, sent, tasks, on_ray=on_ray, on_crash=run_alone):
        results += found
        advance(len(chosen))
    return results


def validate_mixture(
    path: str, *, deep: bool = False, where: CheckWhere = "auto", progress: bool = False
) -> MixtureReport:
    """Return the findings on the mixture file at `path` and on its datasets, which are checked one after the other.

    Args:
        deep: also decode every frame of every camera.
        where: as for one dataset. ``auto`` decides by the size of all datasets together, and Ray starts once.
        progress: show a bar for every dataset, at a terminal or in a notebook.

    Raises:
        ConfigError: the file cannot be read, or does not describe a mixture.
    """
    check_where(where)
    started = time.monotonic()
    spec, left_out = mixtures.with_weight(mixtures.read_mixture_file(path))
    findings = [make_finding("mixture-note", "not checked: its weight is 0", Place(dataset=name)) for name in left_out]
    usable = _check_members(spec, findings, progress=progress)
    on_ray = where == "ray" or (where == "auto" and not _are_small(list(usable.values()), deep=deep))
    options: dict[str, Any] = {"deep": deep, "where": "ray" if on_ray else "process", "progress": progress}
    with running_ray() if on_ray else nullcontext():
        reports, lost = _validate_all(spec.members, options)
    # The datasets that cannot be opened have findings already.
    findings += [finding for finding in lost if finding.place.dataset in usable]
    return MixtureReport(
        mixture=path,
        members=spec.members,
        is_deep=deep,
        findings=worst_first(findings, path),
        reports=reports,
        elapsed_s=time.monotonic() - started,
    )


def _check_members(spec: "MixtureSpec", findings: list[Finding], *, progress: bool) -> dict[str, "Dataset"]:
    """Return the datasets that can be opened, by name; add what keeps them from being one mixture, and how they fit."""
    with warnings.catch_warnings():
        # Findings report what is skipped.
        warnings.simplefilter("ignore", UserWarning)
        usable, known = _open(spec, findings, progress=progress)
        positions = [position for position, one in enumerate(spec.members) if one.name in usable]
        if not positions:
            return usable
        try:
            mixture = mixtures.Mixture(mixtures.only_members(spec, positions), progress=False)
        except RaypipeError as error:
            findings.append(make_finding("mixture-misfit", str(error), Place()))
            return usable
    # What is odd about one dataset belongs in its own report.
    notes = [note.text for note in mixture.notes if note not in known and not note.name]
    findings += [make_finding("mixture-note", text, Place()) for text in notes]
    return usable


def _open(
    spec: "MixtureSpec", findings: list[Finding], *, progress: bool
) -> tuple[dict[str, "Dataset"], list["MemberNote"]]:
    """Return the datasets of the members that can be opened, and notes on opening; add findings on the others."""
    names = [member.name for member in spec.members]
    try:
        opened = mixtures.open_members(spec.members, on_bad_dataset="skip", progress=progress)
    except RaypipeError as error:
        # Something worse than bad data, or no dataset opens: the message covers all. Still look at each one alone.
        findings.append(make_finding(_UNUSABLE, str(error), Place()))
        with ThreadPoolExecutor(mixtures.NUM_THREADS["remote"]) as pool:
            alone = dict(zip(names, pool.map(_open_alone, spec.members), strict=True))
        notes = [note for found in alone.values() if found for note in found.notes]
        return {name: found.datasets[0] for name, found in alone.items() if found}, notes
    severity: Severity = "error" if spec.on_bad_dataset == "raise" else "warning"
    for bad in opened.bad:
        message = f"{bad.root}: {bad.error}"
        findings.append(make_finding(_UNUSABLE, message, Place(dataset=bad.name), severity=severity))
    there = [names[position] for position in opened.positions]
    return dict(zip(there, opened.datasets, strict=True)), list(opened.notes)


def _open_alone(member: "MemberSpec") -> "Opened | None":
    """Return the dataset of one member; None if it cannot be opened."""
    try:
        return mixtures.open_members((member,), progress=False)
    except RaypipeError:
        return None


def _validate_all(members: Sequence["MemberSpec"], options: dict[str, Any]) -> tuple[dict[str, Report], list[Finding]]:
    """Return every member's report, and findings on members without one; a root that several share is read once."""
    by_root: dict[str, Report] = {}
    reports: dict[str, Report] = {}
    lost: list[Finding] = []
    for position, member in enumerate(members):
        try:
            if member.root not in by_root:
                title = f"{member.name} ({position + 1} of {len(members)})"
                by_root[member.root] = validate_dataset(member.root, title=title, **options)
            reports[member.name] = by_root[member.root]
        except (RaypipeError, OSError) as error:
            message = f"{member.root}: {one_line(error)}"
            lost.append(make_finding(_UNUSABLE, message, Place(dataset=member.name)))
    return reports, lost


def _are_small(datasets: Sequence["Dataset"], *, deep: bool) -> bool:
    """Return whether the datasets together are as small as one small dataset."""
    metas = [dataset.meta for dataset in datasets]
    frames = sum(meta.num_frames for meta in metas)
    if not is_small(frames, 0, deep):
        return False
    # Counting takes a while if there are many.
    num_files = sum(len(meta.rows_by_file(camera)) for meta in metas for camera in ("", *meta.episodes.videos))
    return is_small(frames, num_files, deep)


Shared = TypeVar("Shared")
Work = TypeVar("Work")
Made = TypeVar("Made")

_IN_FLIGHT_PER_CPU: Final = 2
"""One task runs and one waits, so that no CPU waits for the driver."""


def run_tasks(
    work: Callable[[Shared, Work], Made],
    shared: Shared,
    tasks: Sequence[Work],
    *,
    on_ray: bool,
    on_crash: Callable[[Work, Exception], list[Work]] | None = None,
) -> Iterator[tuple[Work, Made]]:
    """Yield each task with ``work(shared, task)``: in order in this process, and as they end on Ray.

    The error of a task is raised as it is. Ray runs a task again when its worker dies.

    Args:
        on_crash: called for a task whose workers died twice; returns the tasks to run in its place, or raises.
    """
    if not on_ray:
        yield from ((task, work(shared, task)) for task in tasks)
        return
    import ray

    from raypipe.storage import share_gate

    with running_ray():
        # Counts what this process has already asked of the Hub, too.
        share_gate()
        retries = {} if on_crash is None else {"max_retries": 1}
        remote = ray.remote(num_cpus=1, **retries)(_work_on_ray)
        # Send it once for all tasks: the episode table of a large dataset takes megabytes.
        everywhere = ray.put(shared)
        limit = max(1, int(_IN_FLIGHT_PER_CPU * ray.cluster_resources().get("CPU", 1)))
        waiting = list(tasks)[::-1]
        flying: dict[Any, Work] = {}
        # After an error, let tasks in flight finish: they may write whole files that are still wanted. Cancelling a
        # task that is just ending aborts the driver in Ray 2.60 ("tried to complete task that was not pending").
        while waiting or flying:
            while waiting and len(flying) < limit:
                task = waiting.pop()
                flying[remote.remote(work, everywhere, task)] = task
            done, _ = ray.wait(list(flying), num_returns=1)
            task = flying.pop(done[0])
            try:
                made = _result(done[0])
            except ray.exceptions.WorkerCrashedError as error:
                if on_crash is None:
                    raise
                waiting += on_crash(task, error)
                continue
            yield task, made


def _work_on_ray(work: Callable[[Shared, Work], Made], shared: Shared, task: Work) -> Made:
    from raypipe.storage import share_gate

    share_gate()
    return work(shared, task)


def _result(reference: Any) -> Any:
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        # Raise the original error, as if it came from here: its text names the file and the remedy.
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise


@contextmanager
def running_ray() -> Iterator[None]:
    """Use the running Ray, or start one for the time of the body."""
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(logging_level="warning", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
