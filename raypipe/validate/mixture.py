"""Checks a mixture: whether its datasets open and fit together as in training, then every dataset.

A dataset that cannot be opened is a finding; the others are still checked. Each dataset is checked whole, whatever the
mixture selects or drops: a choice in the file may change, and the files should be sound all the same.
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

from raypipe.dataset import Dataset
from raypipe.errors import RaypipeError
from raypipe.format import DatasetMeta
from raypipe.mixture import (
    NUM_THREADS,
    MemberNote,
    MemberSpec,
    Mixture,
    MixtureSpec,
    Opened,
    only_members,
    open_members,
    read_mixture_file,
    with_weight,
)
from raypipe.validate.findings import Finding, Place, Report, make_finding, worst_first
from raypipe.validate.kinds import Severity
from raypipe.validate.mixture_report import MixtureReport
from raypipe.validate.run import CheckWhere, check_where, is_small, validate_dataset
from raypipe.validate.tasks import running_ray

_UNUSABLE: Final = "member-unusable"


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
    spec = read_mixture_file(path)
    spec, left_out = with_weight(spec)
    members = spec.members
    findings = [make_finding("mixture-note", "not checked: its weight is 0", Place(dataset=name)) for name in left_out]
    together = check_members(spec, progress=progress)
    on_ray = where == "ray" or (where == "auto" and not _are_small(list(together.usable.values()), deep=deep))
    options: dict[str, Any] = {"deep": deep, "where": "ray" if on_ray else "process", "progress": progress}
    with running_ray() if on_ray else nullcontext():
        reports, lost = _validate_all(members, options)
    # `together` already reports the datasets that cannot be opened.
    findings += [*together.findings, *(finding for finding in lost if finding.place.dataset in together.usable)]
    return MixtureReport(
        mixture=path,
        members=members,
        is_deep=deep,
        findings=worst_first(findings, path),
        reports=reports,
        elapsed_s=time.monotonic() - started,
    )


@dataclass(frozen=True, kw_only=True)
class Together:
    """How the members fit together as one mixture."""

    findings: tuple[Finding, ...]
    usable: Mapping[str, Dataset]
    """The datasets that can be opened, by name; each of the others has a finding."""


def check_members(spec: MixtureSpec, *, progress: bool = False) -> Together:
    """Return what keeps the members from being one mixture, and what the mixture does to make them fit."""
    with warnings.catch_warnings():
        # Findings report what is skipped.
        warnings.simplefilter("ignore", UserWarning)
        findings, usable, known = _open(spec, progress=progress)
        positions = [position for position, one in enumerate(spec.members) if one.name in usable]
        if not positions:
            return Together(findings=tuple(findings), usable=usable)
        try:
            mixture = Mixture(only_members(spec, positions), progress=False)
        except RaypipeError as error:
            findings.append(make_finding("mixture-misfit", str(error), Place()))
        else:
            # What is odd about one dataset belongs in its own report.
            notes = [note.text for note in mixture.notes if note not in known and not note.name]
            findings += [make_finding("mixture-note", text, Place()) for text in notes]
    return Together(findings=tuple(findings), usable=usable)


def _open(spec: MixtureSpec, *, progress: bool) -> tuple[list[Finding], dict[str, Dataset], tuple[MemberNote, ...]]:
    """Return findings on members that cannot be opened, the datasets of the others, and notes on opening."""
    try:
        opened = open_members(spec.members, on_bad_dataset="skip", progress=progress)
    except RaypipeError as error:
        # Something worse than bad data, or no dataset opens: the message covers all. Still look at each one alone.
        with ThreadPoolExecutor(NUM_THREADS["remote"]) as pool:
            alone = list(pool.map(_open_alone, spec.members))
        usable = {one.name: found.datasets[0] for one, found in zip(spec.members, alone, strict=True) if found}
        notes = tuple(note for found in alone if found for note in found.notes)
        return [make_finding(_UNUSABLE, str(error), Place())], usable, notes
    severity: Severity = "error" if spec.on_bad_dataset == "raise" else "warning"
    findings = [
        make_finding(_UNUSABLE, f"{bad.root}: {bad.error}", Place(dataset=bad.name), severity=severity)
        for bad in opened.bad
    ]
    names = [spec.members[position].name for position in opened.positions]
    return findings, dict(zip(names, opened.datasets, strict=True)), opened.notes


def _open_alone(member: MemberSpec) -> Opened | None:
    """Return the dataset of one member; None if it cannot be opened."""
    try:
        return open_members((member,), progress=False)
    except RaypipeError:
        return None


def _validate_all(members: Sequence[MemberSpec], options: dict[str, Any]) -> tuple[dict[str, Report], list[Finding]]:
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
            message = f"{member.root}: {' '.join(str(error).split())}"
            lost.append(make_finding(_UNUSABLE, message, Place(dataset=member.name)))
    return reports, lost


def _are_small(datasets: Sequence[Dataset], *, deep: bool) -> bool:
    """Return whether the datasets together are as small as one small dataset."""
    frames = sum(dataset.meta.num_frames for dataset in datasets)
    # Count files last: that takes a while if there are many.
    return is_small(frames, 0, deep) and is_small(frames, sum(_count_files(one.meta) for one in datasets), deep)


def _count_files(meta: DatasetMeta) -> int:
    rows = range(len(meta.episodes))
    videos = {meta.video_file(row, camera) for camera in meta.episodes.videos for row in rows}
    return len({meta.data_file(row) for row in rows} | videos)
