"""A report for people and for the pipeline: tables for a terminal, exclude files, and one self-contained HTML page.

Findings that are alike are one line of a table. The report of a mixture has its own findings, an overview of the
datasets, then each dataset's findings. The page has plots and thumbnails inside it, for which it decodes a few frames,
but none of a video that crashed its decoder.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from raypipe.errors import ConfigError, DatasetError
from raypipe.plan import SelectionSpec
from raypipe.storage import Storage, open_storage, write_whole
from raypipe.text import (
    count_whole,
    counted,
    either,
    encode_pixels,
    figure_png,
    lines_table,
    make_page,
    new_figure,
    page_part,
    plural,
    span_text,
)
from raypipe.validate.findings import KINDS, Finding, MixtureReport, Report, Severity, count_severities, worst_severity

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim", "none": "green"}
"""The terminal's colour for each severity."""
_SHOWN_RUNS = 6

_MAX_ROWS: Final = 40
"""Most rows of the overview, and most datasets with their findings listed; the JSON and the page have all."""

_MAX_THUMBNAILS: Final = 24
_MAX_DRAWN: Final = 60
"""How many datasets of a mixture get plots, the worst first: drawing them takes some tenths of a second each."""
_MAX_PICTURES: Final = 120
"""Thumbnails of all datasets of a mixture together: some tens of megabytes."""

_WIDTH_INCHES: Final = 4.6
_HEIGHT_INCHES: Final = 2.9
_LOG_SCALE_FROM: Final = 100
"""The scale is logarithmic if a kind has more findings than this."""
_COLOURS = {"error": "#b3261e", "warning": "#b26a00", "note": "#5f6368"}
_TEMPLATE: Final = "validate/templates/report.html"
_EPISODE: Final = re.compile(r"[0-9]{1,18}")
"""An episode's number; Arrow has 64 bits for it."""

_ESCAPED: Final = re.compile("[\x7f-\x9f\ufffe\uffff]")

PagePicture = tuple[bytes, str]
"""A PNG file and its caption."""


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
    def place(self) -> str:
        """Where the findings are, in short form."""
        parts = [self.feature] if self.feature else []
        files = list(dict.fromkeys(finding.place.file for finding in self.findings if finding.place.file))
        if files:
            parts.append(files[0] + (f" and {len(files) - 1} more" if len(files) > 1 else ""))
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


def _summary_lines(report: Report | MixtureReport) -> list[tuple[str, str]]:
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


def findings_table(report: Report | MixtureReport) -> "Group":
    """Return the report for a terminal: what validate looked at, then findings; of many datasets only the worst."""
    from rich.console import Group
    from rich.text import Text

    if isinstance(report, MixtureReport):
        return Group(lines_table(_summary_lines(report)), Text(), *_mixture_parts(report))
    found = _folds_table(report.findings) if report.findings else Text("nothing is wrong with it", style="green")
    return Group(lines_table(_summary_lines(report)), found)


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
        severity = Text(fold.severity, style=_STYLES[fold.severity])
        # Names of files and tasks are data: do not read markup in them.
        cells = [Text(text) for text in (fold.kind, fold.place, fold.message, fold.findings[0].remedy)]
        table.add_row(severity, *cells)
    return table


def _mixture_parts(report: MixtureReport) -> list[Any]:
    from rich.text import Text

    parts: list[Any] = []
    for fold in fold_findings(report.findings):
        # As lines: a message on the mixture may be a table of its own.
        head = (fold.severity, _STYLES[fold.severity]), f"  {fold.kind}\n{_own_text(fold)}\n"
        parts += [Text.assemble(*head, (f"remedy: {fold.findings[0].remedy}", "dim")), Text()]
    parts += [_overview(report), Text()]
    told = [name for name in _worst_members(report) if name in report.reports and report.reports[name].findings]
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
    return parts


def _worst_members(report: MixtureReport) -> list[str]:
    """Return the names of all members, worst first; equals keep their order."""
    severities = {name: list(count_severities(one.findings).values()) for name, one in report.reports.items()}
    unchecked = [member.name for member in report.members if member.name not in report.reports]
    return [*unchecked, *sorted(severities, key=lambda name: [-number for number in severities[name]])]


def _own_text(fold: Fold) -> str:
    """Return what findings on the mixture say, and on which datasets, as lines."""
    lines = [f"{f'{one.place.dataset}: ' * bool(one.place.dataset)}{one.message}" for one in fold.findings[:_MAX_ROWS]]
    more = len(fold.findings) - len(lines)
    lines += [f"and {more} more: --json has all"] if more else []
    return "\n".join(lines if len(lines) == 1 else [f"- {line}" for line in lines])


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
    shown = set(names if len(names) <= _MAX_ROWS else _worst_members(report)[: _MAX_ROWS - 1])
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
        return [Text("not checked", style=_STYLES["error"])]
    findings = [finding for report in reports for finding in report.findings]
    numbers = count_severities(findings)
    worst = worst_severity(findings)
    totals = (sum(one.counts.episodes for one in reports), sum(one.counts.frames for one in reports))
    return [Text(worst, style=_STYLES[worst]), *(Text(f"{number:,}") for number in (*numbers.values(), *totals))]


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
    is_toml, plain = report.mixture.lower().endswith(".toml"), asdict(SelectionSpec())
    lines = [f"# {report.mixture}: episodes that raypipe validate found bad"]
    lines.append("# write each selection under its dataset in the mixture file, in place of the one that is there")
    for member in (one for one in report.members if one.name in report.reports):
        bad = bad_episodes(report.reports[member.name])
        if not bad:
            continue
        lines += ["", f"# {member.root}"]
        lines += [f"# {finding.kind}: episode {episode}: {_reason(finding)}" for episode, finding in bad.items()]
        given = {name: value for name, value in asdict(member.selection).items() if value != plain[name]}
        selection = {**given, "exclude": sorted({*member.selection.exclude, *bad})}
        fields_text = (f"{key} = {_quoted(value)}" for key, value in selection.items())
        shown = f"selection = {{{', '.join(fields_text)}}}" if is_toml else f"  selection: {_quoted(selection)}"
        lines += [f"[{_quoted(member.name)}]" if is_toml else f"{_quoted(member.name)}:", shown]
    return "\n".join(lines) + "\n"


def _quoted(value: Any) -> str:
    """Return a value as TOML and YAML read it.

    They do not join the two halves that JSON makes of some letters, and refuse others that are no escapes.
    """
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def _reason(finding: Finding) -> str:
    return f"{finding.place.file}: {' '.join(finding.message.split())}"


def read_exclude_file(path: str | Path) -> tuple[int, ...]:
    """Return the episode numbers in an exclude file, ascending, without repeats.

    Raises:
        ConfigError: a line is neither a number, nor empty, nor a comment.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the exclude file {str(path)!r}: {error}") from error
    numbers = set()
    for position, line in enumerate(lines, start=1):
        text = line.split("#", 1)[0].strip()
        if text and not _EPISODE.fullmatch(text):
            raise ConfigError(
                f"line {position} of {str(path)!r} is {text!r}; expected the number of an episode, or a comment "
                f"behind '#'"
            )
        if text:
            numbers.add(int(text))
    return tuple(sorted(numbers))


def write_report(
    report: Report | MixtureReport, *, exclude_file: Path | None = None, html_file: Path | None = None
) -> None:
    """Write the report to the given files, for people and for the pipeline; for programs there is `to_json`."""
    format_exclude: Any = format_exclude_file if isinstance(report, Report) else format_mixture_exclude_file
    for path, format_file in ((exclude_file, format_exclude), (html_file, format_page)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, format_file(report))


def format_page(report: Report | MixtureReport) -> str:
    """Return the report as an HTML page; draws the plots and decodes the frames for the thumbnails."""
    if isinstance(report, Report):
        root, body = report.root, page_part("dataset", _shown(report), template=_TEMPLATE)
    else:
        root, body = report.mixture, _mixture_part(report)
    title = page_part("title", "raypipe validate", report.severity, template=_TEMPLATE)
    return make_page(f"raypipe validate {root}", page_part("view", title, body, "top"))


def _shown(report: Report, *, has_plots: bool = True, most_thumbnails: int = _MAX_THUMBNAILS) -> dict[str, Any]:
    """Return what the page shows of a dataset; draws the plots and decodes the frames for the thumbnails."""
    return {
        "lines": _summary_lines(report),
        "plots": _draw_plots(report) if has_plots else [],
        "folds": [(fold, KINDS[fold.kind].meaning) for fold in fold_findings(report.findings)],
        "thumbnails": _read_thumbnails(open_storage(report.root), report.findings, most=most_thumbnails),
    }


def _mixture_part(report: MixtureReport) -> str:
    """Return an index of the datasets, then a section for each."""
    with_findings = sum(bool(one.findings) for one in report.reports.values())
    most = min(_MAX_THUMBNAILS, max(1, _MAX_PICTURES // max(1, with_findings)))
    drawn = set(_worst_members(report)[:_MAX_DRAWN])
    members = []
    for member in report.members:
        told: dict[str, Any] = {"name": member.name, "root": member.root, "shown": None}
        if member.name in report.reports:
            one = report.reports[member.name]
            told["severity"] = one.severity
            told["numbers"] = (*count_severities(one.findings).values(), one.counts.episodes, one.counts.frames)
            told["shown"] = _shown(one, has_plots=member.name in drawn, most_thumbnails=most)
        members.append(told)
    own = [(fold, KINDS[fold.kind].meaning, _own_text(fold)) for fold in fold_findings(report.findings)]
    worst = either(len(drawn), "the worst dataset", f"the {len(drawn)} worst datasets")
    cut = f"Plots are of {worst}; frames are up to {most} of each." if len(report.reports) > len(drawn) else ""
    return page_part("mixture", _summary_lines(report), own, members, cut, template=_TEMPLATE)


def _draw_plots(report: Report) -> list[PagePicture]:
    """Return the plots: episode lengths, findings by kind, and timestamp drift if there is any."""
    of_time = {"timestamp-drift", "timestamp-offset", "timestamp-jitter", "fps-mismatch"} & report.tally.keys()
    wanted = {_draw_lengths: len(report.summary), _draw_kinds: report.findings, _draw_drift: of_time}
    plots = []
    for draw in (draw for draw, is_drawn in wanted.items() if is_drawn):
        figure = new_figure(_WIDTH_INCHES, _HEIGHT_INCHES)
        caption = draw(figure.subplots(), report)
        plots.append((figure_png(figure, dpi=130), caption))
    return plots


def _draw_lengths(axes: Any, report: Report) -> str:
    lengths = report.summary.num_frames
    axes.hist(lengths, bins=min(40, max(5, len(np.unique(lengths)))), color="#3367d6")
    axes.set(xlabel="frames of an episode", ylabel="episodes")
    count_whole(axes.xaxis, axes.yaxis)
    each = f"{span_text(lengths.min(), lengths.max())} {plural(lengths.max(), 'frame')}"
    total_s = float(lengths.sum() / report.fps)
    lasting = f", {total_s / 3600:.2f} hours" if total_s >= 3600 else f", {total_s:.1f} s" if total_s > 0 else ""
    return f"lengths of {counted(len(lengths), 'episode')}: {each}{lasting}"


def _draw_kinds(axes: Any, report: Report) -> str:
    tally = report.tally
    severities = {finding.kind: finding.severity for finding in reversed(report.findings)}
    kinds = list(tally)[::-1]
    axes.figure.set_figheight(max(_HEIGHT_INCHES, 0.25 * len(kinds) + 0.8))
    bars = axes.barh(kinds, [tally[kind] for kind in kinds], color=[_COLOURS[severities[kind]] for kind in kinds])
    axes.bar_label(bars, padding=3)
    axes.set(xlabel="findings")
    axes.margins(x=0.15)
    if max(tally.values()) > _LOG_SCALE_FROM:
        axes.set_xscale("symlog")
    else:
        count_whole(axes.xaxis)
    return "findings by kind: red errors, amber warnings, grey notes"


def _draw_drift(axes: Any, report: Report) -> str:
    summary = report.summary
    episodes = summary.episode_index
    axes.plot(episodes, summary.drift_s, ".", markersize=4, color="#b26a00", label="largest drift in the episode")
    axes.plot(episodes, summary.offset_s, ".", markersize=4, color="#3367d6", label="first timestamp")
    axes.axhline(0, color="#999", linewidth=0.8)
    axes.set(xlabel="episode", ylabel="seconds")
    count_whole(axes.xaxis)
    axes.legend(fontsize=8)
    return "how far timestamps are from frame / fps"


def _read_thumbnails(storage: Storage, findings: Sequence[Finding], *, most: int) -> list[PagePicture]:
    """Return up to `most` frames that video findings point at, without those that cannot be decoded."""
    pictures: list[PagePicture] = []
    for finding in findings:
        place = finding.place
        if finding.kind in ("video-crash", "video-unreadable") or not place.file.endswith(".mp4"):
            continue
        for frame in place.frames:
            if len(pictures) == most:
                return pictures
            from raypipe.decode import OpenVideo

            try:
                pixels = OpenVideo(storage, place.file).read_frames(np.array([frame]))[0].numpy()
            except DatasetError:
                # A finding reports it.
                continue
            told = f"{plural(len(place.episodes), 'episode')} {', '.join(map(str, place.episodes))}, {place.feature}"
            caption = f"{finding.kind}: frame {frame} of {place.file} ({told})"
            pictures.append((encode_pixels(pixels), caption))
    return pictures
