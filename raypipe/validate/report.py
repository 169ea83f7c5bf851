"""A report as files: an exclude file, an HTML page."""

from pathlib import Path

from raypipe.storage import write_whole
from raypipe.validate.findings import MixtureReport, Report
from raypipe.validate.table import format_exclude_file, format_mixture_exclude_file


def write_report(
    report: Report | MixtureReport, *, exclude_file: Path | None = None, html_file: Path | None = None
) -> None:
    """Write the report to the given files, for people and for the pipeline; for programs there is `to_json`."""
    if exclude_file is not None:
        _write(exclude_file, _format_exclude_file(report))
    if html_file is not None:
        _write(html_file, _format_page(report))


def _format_exclude_file(report: Report | MixtureReport) -> str:
    return format_exclude_file(report) if isinstance(report, Report) else format_mixture_exclude_file(report)


def _format_page(report: Report | MixtureReport) -> str:
    from raypipe.validate.mixture_page import format_mixture_page
    from raypipe.validate.page import format_page

    return format_page(report) if isinstance(report, Report) else format_mixture_page(report)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
