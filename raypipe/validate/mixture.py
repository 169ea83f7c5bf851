"""Checks a mixture: that its datasets open and fit together as training would have them, then every one of them.

A dataset that cannot be opened is a finding and does not keep the others from being checked. Each is checked whole,
whatever the mixture selects or drops of it: a choice in the file may change, the files should be sound all the same.
"""

import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

from raypipe.dataset import Dataset
from raypipe.errors import ConfigError, DatasetError, RaypipeError
from raypipe.metadata import DatasetMeta
from raypipe.mixture import MemberSpec, Mixture, MixtureSpec, read_mixture_file
from raypipe.mixture.open_members import open_members
from raypipe.validate.findings import Finding, Place, Report, make_finding, worst_first
from raypipe.validate.mixture_report import MixtureReport
from raypipe.validate.run import Where, check_where, is_small, running_ray, validate_dataset

_UNUSABLE: Final = "member-unusable"


def validate_mixture(path: str, *, deep: bool = False, where: Where = "auto", progress: bool = False) -> MixtureReport:
    """Return all that is wrong with the mixture file at `path` and with its datasets, one after the other.

    Args:
        deep: also decode every frame of every camera.
        where: as for one dataset. ``auto`` is settled by all datasets together, and Ray is started once.
        progress: show a bar for every dataset, if a person looks.

    Raises:
        ConfigError: the file cannot be read, or describes no mixture.
    """
    check_where(where)
    started = time.monotonic()
    spec = read_mixture_file(path)
    positions = _with_weight(spec)
    members = tuple(spec.members[position] for position in positions)
    findings = [
        make_finding("mixture-note", "not checked: its weight is 0", Place(dataset=member.name))
        for position, member in enumerate(spec.members)
        if position not in positions
    ]
    found, datasets = check_members(_only(spec, positions), progress=progress)
    on_ray = where == "ray" or (where == "auto" and not _are_small(datasets, deep=deep))
    options: dict[str, Any] = {"deep": deep, "where": "ray" if on_ray else "process", "progress": progress}
    with running_ray() if on_ray else nullcontext():
        reports, lost = _validate_all(members, options)
    known = {finding.place.dataset for finding in found if finding.kind == _UNUSABLE}
    findings += [*found, *(finding for finding in lost if finding.place.dataset not in known)]
    return MixtureReport(
        mixture=path,
        members=members,
        is_deep=deep,
        findings=worst_first(findings, path),
        reports=reports,
        elapsed_s=time.monotonic() - started,
    )


def check_members(spec: MixtureSpec, *, progress: bool = False) -> tuple[list[Finding], tuple[Dataset, ...]]:
    """Return what keeps the members from being one mixture, and the datasets that can be opened."""
    # A cache that lives as long as this: metadata is read once for both steps, and as the files are now.
    with tempfile.TemporaryDirectory(prefix="raypipe-") as cache, warnings.catch_warnings():
        # What is skipped is a finding.
        warnings.simplefilter("ignore", UserWarning)
        try:
            opened = open_members(spec.members, on_bad_dataset="skip", cache=cache, progress=progress)
        except DatasetError as error:
            return [make_finding(_UNUSABLE, str(error), Place())], ()
        findings = [
            make_finding(
                _UNUSABLE,
                f"{bad.root}: {bad.error}",
                Place(dataset=bad.name),
                severity="error" if spec.on_bad_dataset == "raise" else "warning",
            )
            for bad in opened.bad
        ]
        try:
            mixture = Mixture(_only(spec, opened.positions), cache=cache, progress=False)
        except RaypipeError as error:
            return [*findings, make_finding("mixture-misfit", str(error), Place())], opened.datasets
    # What is odd about one dataset is for its own report.
    notes = [note.text for note in mixture.notes if note not in opened.notes]
    return [*findings, *(make_finding("mixture-note", text, Place()) for text in notes)], opened.datasets


def _with_weight(spec: MixtureSpec) -> list[int]:
    given = [one.weight for one in spec.members] if isinstance(spec.weights, str) else spec.weights
    positions = [position for position, weight in enumerate(given) if weight]
    if not positions:
        names = ", ".join(repr(one.name) for one in spec.members)
        raise ConfigError(f"every member of the mixture has weight 0: {names}; there is nothing to check")
    return positions


def _only(spec: MixtureSpec, positions: Sequence[int]) -> MixtureSpec:
    weights = spec.weights if isinstance(spec.weights, str) else tuple(spec.weights[i] for i in positions)
    return replace(spec, members=tuple(spec.members[i] for i in positions), weights=weights)


def _validate_all(members: Sequence[MemberSpec], options: dict[str, Any]) -> tuple[dict[str, Report], list[Finding]]:
    """Return the report of every member, a root that several have looked at once, and those that have none."""
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
    """Return whether all datasets together would be small as one."""
    frames = sum(dataset.meta.num_frames for dataset in datasets)
    # Files are counted last: that takes a while where there are many.
    return is_small(frames, 0, deep) and is_small(frames, sum(_count_files(one.meta) for one in datasets), deep)


def _count_files(meta: DatasetMeta) -> int:
    rows = range(len(meta.episodes))
    videos = {meta.video_file(row, camera) for camera in meta.episodes.videos for row in rows}
    return len({meta.data_file(row) for row in rows} | videos)
