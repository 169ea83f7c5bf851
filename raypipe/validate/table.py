"""Findings for a person at a terminal: one line for findings that are alike."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raypipe.text import counted, plural
from raypipe.validate.findings import Counts, Finding, Report, count_severities
from raypipe.validate.kinds import Severity

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

STYLES = {"error": "bold red", "warning": "yellow", "note": "dim", "none": "green"}
"""The terminal's colour for each severity."""
_SHOWN_RUNS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Findings of one kind on one feature."""

    kind: str
    severity: Severity
    feature: str
    findings: tuple[Finding, ...]

    @property
    def episodes(self) -> tuple[int, ...]:
        """All episodes of the findings, ascending, each once."""
        return tuple(sorted({number for finding in self.findings for number in finding.place.episodes}))

    @property
    def files(self) -> tuple[str, ...]:
        """All files of the findings, each once."""
        return tuple(dict.fromkeys(finding.place.file for finding in self.findings if finding.place.file))

    @property
    def place(self) -> str:
        """Where the findings are, in short form."""
        parts = [self.feature] if self.feature else []
        if self.files:
            parts.append(self.files[0] + (f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""))
        if self.episodes:
            parts.append(f"{plural(len(self.episodes), 'episode')} {format_runs(self.episodes)}")
        return "\n".join(parts)

    @property
    def message(self) -> str:
        """What the first finding says, and how many are like it."""
        more = len(self.findings) - 1
        return self.findings[0].message + (f" (and {more} more like it)" if more else "")


def fold_findings(findings: Iterable[Finding]) -> list[Fold]:
    """Return the findings folded by kind, severity and feature, in their order."""
    alike: dict[tuple[str, Severity, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        alike[finding.kind, finding.severity, finding.place.feature].append(finding)
    return [
        Fold(kind=kind, severity=severity, feature=feature, findings=tuple(found))
        for (kind, severity, feature), found in alike.items()
    ]


def format_runs(numbers: Sequence[int], most: int = _SHOWN_RUNS) -> str:
    """Return ascending numbers as runs, such as ``0-2, 5, 7-9``; shows at most `most` runs."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:most])
    left = sum(last - first + 1 for first, last in runs[most:])
    return shown + (f" and {left} more" if left else "")


def summary_lines(report: Report) -> list[tuple[str, str]]:
    """Return what validate looked at and what it found, as names and texts."""
    return [
        ("root", report.root),
        ("format", f"{report.version}, {report.fps:g} fps"),
        *count_lines(report.counts, is_deep=report.is_deep),
        ("found", f"{severity_text(report.findings)} in {report.elapsed_s:.1f} s"),
    ]


def count_lines(counts: Counts, *, is_deep: bool) -> list[tuple[str, str]]:
    """Return what validate looked at, as names and texts."""
    decoded = f", {counted(counts.decoded_frames, 'camera frame')} decoded" if is_deep else ""
    return [
        ("looked at", f"{counted(counts.episodes, 'episode')}, {counted(counts.frames, 'frame')}"),
        ("files", f"{counted(counts.data_files, 'data file')}, {counted(counts.video_files, 'video file')}{decoded}"),
    ]


def severity_text(findings: Iterable[Finding]) -> str:
    """Return how many errors, warnings and notes there are."""
    numbers = count_severities(findings)
    return ", ".join(counted(number, name) for name, number in numbers.items())


def findings_table(report: Report) -> "Group":
    """Return the report for a terminal: what validate looked at, then a table with a row per fold."""
    from rich.console import Group
    from rich.text import Text

    head = lines_table(summary_lines(report))
    if not report.findings:
        return Group(head, Text("nothing is wrong with it", style="green"))
    return Group(head, folds_table(report.findings))


def lines_table(lines: Iterable[tuple[str, str]]) -> "Table":
    """Return names and texts as two columns for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines:
        table.add_row(name, Text(text))
    return table


def folds_table(findings: Iterable[Finding]) -> "Table":
    """Return a table for a terminal, with a row for findings that are alike."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)
    for title, options in (("severity", {"no_wrap": True}), ("kind", {"no_wrap": True})):
        table.add_column(title, **options)  # type: ignore[arg-type]
    for title in ("place", "what", "remedy"):
        table.add_column(title, overflow="fold")
    for fold in fold_findings(findings):
        severity = Text(fold.severity, style=STYLES[fold.severity])
        # Names of files and tasks are data: do not read markup in them.
        cells = [Text(text) for text in (fold.kind, fold.place, fold.message, fold.findings[0].remedy)]
        table.add_row(severity, *cells)
    return table
