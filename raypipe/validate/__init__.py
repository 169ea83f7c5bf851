"""Checks a dataset before training: what is wrong, where, and what to do. Writes nothing into the dataset.

::

    outline.py    meta/, as much of it as can be read        Outline
    structure.py  keys, counts, files, the episode table     findings, and the units of work
    promises.py   what the files must agree with             Promises
    data.py       one data file, with frames.py, values.py   DataResult     a unit of work
    video.py      one video file, with container.py          VideoResult    a unit of work
    deep.py       every pixel of one file
    summary.py    the few numbers kept of every episode      columns, O(episodes)
    whole.py      what only all files together show          pure
    stats.py      the stored statistics against the values
    run.py        all steps, in this process or on Ray       validate_dataset -> Report
    mixture.py    the same for every dataset of a mixture    validate_mixture -> MixtureReport
    findings.py, kinds.py, mixture_report.py                 the values
    exclude.py, table.py, mixture_table.py                   for people and for the pipeline
    page.py                                                  the page, by templates/, and both files

A bad file is a finding and stops nothing: validate checks everything else that it can.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.validate.exclude import (
        bad_episodes,
        format_exclude_file,
        format_mixture_exclude_file,
        read_exclude_file,
    )
    from raypipe.validate.findings import Counts, Finding, Place, Report
    from raypipe.validate.kinds import KINDS
    from raypipe.validate.mixture import validate_mixture
    from raypipe.validate.mixture_report import MixtureReport
    from raypipe.validate.mixture_table import mixture_findings_table as mixture_findings_table
    from raypipe.validate.outline import read_outline as read_outline
    from raypipe.validate.page import write_report
    from raypipe.validate.run import check_rows as check_rows
    from raypipe.validate.run import is_small as is_small
    from raypipe.validate.run import validate_dataset
    from raypipe.validate.stats import bound_room as bound_room
    from raypipe.validate.structure import DataUnit as DataUnit
    from raypipe.validate.structure import check_structure as check_structure
    from raypipe.validate.structure import plan_units as plan_units
    from raypipe.validate.table import findings_table as findings_table
    from raypipe.validate.table import fold_findings as fold_findings
    from raypipe.validate.table import format_runs as format_runs
else:
    _, __getattr__ = lazy_names(
        __name__,
        {
            "exclude": "bad_episodes format_exclude_file format_mixture_exclude_file read_exclude_file",
            "findings": "Counts Finding Place Report",
            "kinds": "KINDS",
            "mixture": "validate_mixture",
            "mixture_report": "MixtureReport",
            "mixture_table": "mixture_findings_table",
            "outline": "read_outline",
            "page": "write_report",
            "run": "check_rows is_small validate_dataset",
            "stats": "bound_room",
            "structure": "DataUnit check_structure plan_units",
            "table": "findings_table fold_findings format_runs",
        },
    )

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
