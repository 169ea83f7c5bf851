"""Checks a dataset before training: what is wrong, where, and what to do. Writes nothing into the dataset.

The modules, from the bottom up (each may use those above it)::

    findings.py   every kind of finding with its remedy (`KINDS`); reports      Finding, Report, MixtureReport
    outline.py    meta/, as much of it as can be read, and the list of files    Outline, and the units of work
    values.py     the values of the features in one data file                   EpisodeSummary
    data.py       one data file                                                 FileResult     a unit of work
    video.py      the index of one video file                                   FileResult     a unit of work
    deep.py       every pixel of one file
    whole.py      checks that need the results of all files; stored statistics
    run.py        all steps, in this process or on Ray                          validate_dataset, validate_mixture
    report.py     tables, what to exclude, the page by templates/               write_report

A bad file is a finding and stops nothing: validate checks everything else that it can.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.validate.findings import KINDS, Counts, Finding, MixtureReport, Place, Report
    from raypipe.validate.outline import DataUnit as DataUnit
    from raypipe.validate.outline import check_structure as check_structure
    from raypipe.validate.outline import plan_units as plan_units
    from raypipe.validate.outline import read_outline as read_outline
    from raypipe.validate.report import (
        bad_episodes,
        format_exclude_file,
        format_mixture_exclude_file,
        read_exclude_file,
        write_report,
    )
    from raypipe.validate.report import findings_table as findings_table
    from raypipe.validate.report import fold_findings as fold_findings
    from raypipe.validate.report import format_runs as format_runs
    from raypipe.validate.run import CheckWhere as CheckWhere
    from raypipe.validate.run import check_rows as check_rows
    from raypipe.validate.run import check_where as check_where
    from raypipe.validate.run import is_small as is_small
    from raypipe.validate.run import run_tasks as run_tasks
    from raypipe.validate.run import running_ray as running_ray
    from raypipe.validate.run import validate_dataset, validate_mixture
    from raypipe.validate.whole import bound_room as bound_room
else:
    _, __getattr__ = lazy_names(__name__)

__all__ = [
    "KINDS",
    "Counts",
    "Finding",
    "MixtureReport",
    "Place",
    "Report",
    "bad_episodes",
    "format_exclude_file",
    "format_mixture_exclude_file",
    "read_exclude_file",
    "validate_dataset",
    "validate_mixture",
    "write_report",
]
