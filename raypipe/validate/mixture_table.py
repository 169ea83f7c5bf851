"""The report of a mixture for a person at a terminal: its own findings, an overview, then each dataset's findings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from raypipe.text import counted
from raypipe.validate.findings import Report, count_severities, worst_severity
from raypipe.validate.mixture_report import MixtureReport
from raypipe.validate.table import STYLES, Fold, count_lines, fold_findings, folds_table, lines_table, severity_text

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_MAX_ROWS: Final = 40
"""Most rows of the overview, and most datasets with their findings listed; the JSON and the page have all."""


def mixture_summary_lines(report: MixtureReport) -> list[tuple[str, str]]:
    """Return what validate looked at and what it found, as names and texts."""
    lost = len(report.members) - len(report.reports)
    return [
        ("mixture", report.mixture),
        ("datasets", f"{len(report.reports):,} checked{f', {lost:,} could not be' if lost else ''}"),
        *count_lines(report.counts, is_deep=report.is_deep),
        ("found", f"{severity_text(report.all_findings)} in {report.elapsed_s:.1f} s"),
    ]


def mixture_findings_table(report: MixtureReport) -> "Group":
    """Return the report for a terminal; if there are many datasets, only the worst."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [lines_table(mixture_summary_lines(report)), Text()]
    for fold in fold_findings(report.findings):
        parts += [_paragraph(fold), Text()]
    parts += [_overview(report), Text()]
    told = [name for name in worst_members(report) if name in report.reports and report.reports[name].findings]
    # Notes on hundreds of datasets would bury what matters.
    shown = told if len(told) <= _MAX_ROWS else [name for name in told if report.reports[name].exit_code][:_MAX_ROWS]
    for name in shown:
        one = report.reports[name]
        parts += [Text.assemble((name, "bold"), f"  {one.root}"), folds_table(one.findings), Text()]
    if len(told) > len(shown):
        more = counted(len(told) - len(shown), f"{'more ' * bool(shown)}dataset")
        parts.append(Text(f"the findings of {more} are in --json and --html"))
    if not report.all_findings:
        parts.append(Text("nothing is wrong with them", style="green"))
    return Group(*parts)


def worst_members(report: MixtureReport) -> list[str]:
    """Return the names of all members, worst first; equals keep their order."""
    severities = {name: list(count_severities(one.findings).values()) for name, one in report.reports.items()}
    unchecked = [member.name for member in report.members if member.name not in report.reports]
    return [*unchecked, *sorted(severities, key=lambda name: [-number for number in severities[name]])]


def own_text(fold: Fold) -> str:
    """Return what findings on the mixture say, and on which datasets, as lines."""
    lines = [f"{f'{one.place.dataset}: ' * bool(one.place.dataset)}{one.message}" for one in fold.findings[:_MAX_ROWS]]
    more = len(fold.findings) - len(lines)
    lines += [f"and {more} more: --json has all"] if more else []
    return "\n".join(lines if len(lines) == 1 else [f"- {line}" for line in lines])


def _paragraph(fold: Fold) -> "Text":
    """Return findings on the mixture as lines of text: a message may be a table of its own."""
    from rich.text import Text

    return Text.assemble(
        (fold.severity, STYLES[fold.severity]),
        f"  {fold.kind}\n{own_text(fold)}\n",
        (f"remedy: {fold.findings[0].remedy}", "dim"),
    )


def _overview(report: MixtureReport) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("dataset", overflow="fold")
    table.add_column("worst", no_wrap=True)
    for title in ("errors", "warnings", "notes", "episodes", "frames"):
        table.add_column(title, justify="right", no_wrap=True)
    names = [member.name for member in report.members]
    shown = set(names if len(names) <= _MAX_ROWS else worst_members(report)[: _MAX_ROWS - 1])
    for name in (name for name in names if name in shown):
        table.add_row(Text(name), *_cells([report.reports[name]] if name in report.reports else []))
    rest = [report.reports[name] for name in names if name not in shown and name in report.reports]
    if rest:
        table.add_section()
        table.add_row(counted(len(rest), "other"), *_cells(rest))
    return table


def _cells(reports: Sequence[Report]) -> list["Text"]:
    from rich.text import Text

    if not reports:
        return [Text("not checked", style=STYLES["error"])]
    findings = [finding for report in reports for finding in report.findings]
    numbers = count_severities(findings)
    worst = worst_severity(findings)
    totals = (sum(one.counts.episodes for one in reports), sum(one.counts.frames for one in reports))
    return [Text(worst, style=STYLES[worst]), *(Text(f"{number:,}") for number in (*numbers.values(), *totals))]
