"""The report of a mixture as one HTML file: an index of the datasets, then a section for each."""

import html
from collections.abc import Sequence
from typing import Final

from raypipe.text import either
from raypipe.validate.findings import KINDS, Finding, MixtureReport, count_severities
from raypipe.validate.page import MAX_THUMBNAILS, format_document, format_lines, report_parts
from raypipe.validate.table import fold_findings, own_text, summary_lines, worst_members

_MAX_DRAWN: Final = 60
"""How many datasets get plots, the worst first: drawing them takes some tenths of a second each."""

_MAX_PICTURES: Final = 120
"""Thumbnails of all datasets together: some tens of megabytes."""


def format_mixture_page(report: MixtureReport) -> str:
    """Return the report as an HTML page; draws the plots and decodes the frames for the thumbnails."""
    with_findings = sum(bool(one.findings) for one in report.reports.values())
    most = min(MAX_THUMBNAILS, max(1, _MAX_PICTURES // max(1, with_findings)))
    drawn = set(worst_members(report)[:_MAX_DRAWN])
    parts = [
        f"<h1 id='top'>raypipe validate: <span class='{report.severity}'>{report.severity}</span></h1>",
        format_lines(summary_lines(report)),
        *_own_findings(report.findings),
        f"<h2>Datasets</h2>{_index(report)}",
    ]
    if len(report.reports) > len(drawn):
        parts.append(
            f"<p>Plots are of {either(len(drawn), 'the worst dataset', f'the {len(drawn)} worst datasets')}; frames "
            f"are up to {most} of each.</p>"
        )
    for position, member in enumerate(report.members):
        if member.name in report.reports:
            one = report.reports[member.name]
            heading = f"<h2>{html.escape(member.name)}: <span class='{one.severity}'>{one.severity}</span>"
            parts += [
                f"<section id='dataset-{position}'>{heading} <a href='#top'>to the top</a></h2>",
                *report_parts(one, tag="h3", has_plots=member.name in drawn, most_thumbnails=most),
                "</section>",
            ]
    return format_document(f"raypipe validate {report.mixture}", parts)


def _own_findings(findings: Sequence[Finding]) -> list[str]:
    """Return the mixture's own findings as paragraphs of full width: a message may be a table of its own."""
    parts = [
        f"<h3><span class='{fold.severity}'>{fold.severity}</span> <code>{fold.kind}</code>: "
        f"{html.escape(KINDS[fold.kind].meaning)}</h3><pre>{html.escape(own_text(fold))}</pre>"
        f"<p>Remedy: {html.escape(fold.findings[0].remedy)}</p>"
        for fold in fold_findings(findings)
    ]
    return ["<h2>The mixture</h2>", *parts] if parts else []


def _index(report: MixtureReport) -> str:
    titles = ("errors", "warnings", "notes", "episodes", "frames")
    numbers = "".join(f"<th class='number'>{title}</th>" for title in titles)
    rows = "".join(_index_row(report, position) for position in range(len(report.members)))
    return f"<table class='index'><tr><th>dataset</th><th>worst</th>{numbers}<th>root</th></tr>{rows}</table>"


def _index_row(report: MixtureReport, position: int) -> str:
    member = report.members[position]
    name, root = html.escape(member.name), html.escape(member.root)
    if member.name not in report.reports:
        cells = "<td class='error'>not checked</td><td colspan='5'></td>"
        return f"<tr><td>{name}</td>{cells}<td class='place'>{root}</td></tr>"
    one = report.reports[member.name]
    numbers = (*count_severities(one.findings).values(), one.counts.episodes, one.counts.frames)
    cells = "".join(f"<td class='number'>{number:,}</td>" for number in numbers)
    return (
        f"<tr><td><a href='#dataset-{position}'>{name}</a></td><td class='{one.severity}'>{one.severity}</td>"
        f"{cells}<td class='place'>{root}</td></tr>"
    )
