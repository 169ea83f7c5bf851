"""A report as text: tables for a person at a terminal, and the exclude file for the pipeline, which is read back here.

Findings that are alike are one line of a table. The report of a mixture has its own findings, an overview of the
datasets, then each dataset's findings.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raypipe.errors import ConfigError
from raypipe.plan import SelectionSpec
from raypipe.text import counted, lines_table, plural
from raypipe.validate.findings import (
    Finding,
    MixtureReport,
    Report,
    Severity,
    count_severities,
    worst_severity,
)

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

STYLES = {"error": "bold red", "warning": "yellow", "note": "dim", "none": "green"}
"""The terminal's colour for each severity."""
_SHOWN_RUNS = 6

_MAX_ROWS: Final = 40
"""Most rows of the overview, and most datasets with their findings listed; the JSON and the page have all."""


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


def summary_lines(report: Report | MixtureReport) -> list[tuple[str, str]]:
    """Return what validate looked at and what it found, as names and texts."""
    if isinstance(report, Report):
        findings = report.findings
        head = [("root", report.root), ("format", f"{report.version}, {report.fps:g} fps")]
    else:
        findings = report.all_findings
        lost = len(report.members) - len(report.reports)
        checked = f"{len(report.reports):,} checked{f', {lost:,} could not be' if lost else ''}"
        head = [("mixture", report.mixture), ("datasets", checked)]
    counts = report.counts
    decoded = f", {counted(counts.decoded_frames, 'camera frame')} decoded" if report.is_deep else ""
    found = ", ".join(counted(number, name) for name, number in count_severities(findings).items())
    return [
        *head,
        ("looked at", f"{counted(counts.episodes, 'episode')}, {counted(counts.frames, 'frame')}"),
        ("files", f"{counted(counts.data_files, 'data file')}, {counted(counts.video_files, 'video file')}{decoded}"),
        ("found", f"{found} in {report.elapsed_s:.1f} s"),
    ]


def findings_table(report: Report) -> "Group":
    """Return the report for a terminal: what validate looked at, then a table with a row per fold."""
    from rich.console import Group
    from rich.text import Text

    found = _folds_table(report.findings) if report.findings else Text("nothing is wrong with it", style="green")
    return Group(lines_table(summary_lines(report)), found)


def _folds_table(findings: Iterable[Finding]) -> "Table":
    """Return a table for a terminal, with a row for findings that are alike."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)
    for title in ("severity", "kind"):
        table.add_column(title, no_wrap=True)
    for title in ("place", "what", "remedy"):
        table.add_column(title, overflow="fold")
    for fold in fold_findings(findings):
        severity = Text(fold.severity, style=STYLES[fold.severity])
        # Names of files and tasks are data: do not read markup in them.
        cells = [Text(text) for text in (fold.kind, fold.place, fold.message, fold.findings[0].remedy)]
        table.add_row(severity, *cells)
    return table


def mixture_findings_table(report: MixtureReport) -> "Group":
    """Return the report for a terminal; if there are many datasets, only the worst."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [lines_table(summary_lines(report)), Text()]
    for fold in fold_findings(report.findings):
        parts += [_paragraph(fold), Text()]
    parts += [_overview(report), Text()]
    told = [name for name in worst_members(report) if name in report.reports and report.reports[name].findings]
    # Notes on hundreds of datasets would bury what matters.
    shown = told if len(told) <= _MAX_ROWS else [name for name in told if report.reports[name].exit_code][:_MAX_ROWS]
    for name in shown:
        one = report.reports[name]
        parts += [Text.assemble((name, "bold"), f"  {one.root}"), _folds_table(one.findings), Text()]
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


def bad_episodes(report: Report) -> dict[int, Finding]:
    """Return the episodes that have an error, ascending, each with its first error."""
    bad: dict[int, Finding] = {}
    for finding in report.findings:
        if finding.severity == "error":
            for episode in finding.place.episodes:
                bad.setdefault(episode, finding)
    return dict(sorted(bad.items()))


def format_exclude_file(report: Report) -> str:
    """Return the text of an exclude file: a comment with the reason, then the number, for each bad episode."""
    lines = [f"# {report.root}: episodes that raypipe validate found bad"]
    for episode, finding in bad_episodes(report).items():
        lines += [f"# {finding.kind}: {_reason(finding)}", str(episode)]
    return "\n".join(lines) + "\n"


def format_mixture_exclude_file(report: MixtureReport) -> str:
    """Return the selections to write under the datasets in the mixture file so that their bad episodes are left out.

    The text is TOML or YAML, like that file. It repeats what a member already selects, since a key may occur only once.
    """
    is_toml = report.mixture.lower().endswith(".toml")
    lines = [f"# {report.mixture}: episodes that raypipe validate found bad"]
    lines.append("# write each selection under its dataset in the mixture file, in place of the one that is there")
    for member in (one for one in report.members if one.name in report.reports):
        bad = bad_episodes(report.reports[member.name])
        if not bad:
            continue
        lines += ["", f"# {member.root}"]
        lines += [f"# {finding.kind}: episode {episode}: {_reason(finding)}" for episode, finding in bad.items()]
        selection = {**_given(member.selection), "exclude": sorted({*member.selection.exclude, *bad})}
        name = json.dumps(member.name, ensure_ascii=False)
        fields_text = (f"{key} = {json.dumps(value)}" for key, value in selection.items())
        shown = f"selection = {{{', '.join(fields_text)}}}" if is_toml else f"  selection: {json.dumps(selection)}"
        lines += [f"[{name}]" if is_toml else f"{name}:", shown]
    return "\n".join(lines) + "\n"


def _reason(finding: Finding) -> str:
    return f"{finding.place.file}: {' '.join(finding.message.split())}"


def _given(selection: SelectionSpec) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    plain = asdict(SelectionSpec())
    return {name: value for name, value in asdict(selection).items() if value != plain[name]}


def read_exclude_file(path: str | Path) -> tuple[int, ...]:
    """Return the episode numbers in an exclude file, ascending, without repeats.

    Raises:
        ConfigError: a line is neither a number, nor empty, nor a comment.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the exclude file {str(path)!r}: {error}") from error
    numbers = set()
    for position, line in enumerate(lines, start=1):
        text = line.split("#", 1)[0].strip()
        if text and not (text.isascii() and text.isdecimal()):
            raise ConfigError(
                f"line {position} of {str(path)!r} is {text!r}; expected the number of an episode, or a comment "
                f"behind '#'"
            )
        if text:
            numbers.add(int(text))
    return tuple(sorted(numbers))
