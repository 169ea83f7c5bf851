"""A report as files: the exclude file, and one self-contained HTML page with plots and thumbnails inside it.

Decodes a few frames for the thumbnails, but none of a video that crashed its decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError
from raypipe.storage import Storage, open_storage, write_whole
from raypipe.text import (
    count_whole,
    counted,
    either,
    encode_pixels,
    figure_png,
    make_page,
    new_figure,
    page_part,
    plural,
    span_text,
)
from raypipe.validate.findings import KINDS, Finding, MixtureReport, Report, count_severities
from raypipe.validate.table import (
    fold_findings,
    format_exclude_file,
    format_mixture_exclude_file,
    own_text,
    summary_lines,
    worst_members,
)

MAX_THUMBNAILS: Final = 24
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


@dataclass(frozen=True, slots=True)
class PagePicture:
    """A picture of the page."""

    png: bytes
    caption: str


def write_report(
    report: Report | MixtureReport, *, exclude_file: Path | None = None, html_file: Path | None = None
) -> None:
    """Write the report to the given files, for people and for the pipeline; for programs there is `to_json`."""
    if exclude_file is not None:
        _write(exclude_file, _format_exclude(report))
    if html_file is not None:
        _write(html_file, format_page(report))


def _format_exclude(report: Report | MixtureReport) -> str:
    return format_exclude_file(report) if isinstance(report, Report) else format_mixture_exclude_file(report)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def format_page(report: Report | MixtureReport) -> str:
    """Return the report as an HTML page; draws the plots and decodes the frames for the thumbnails."""
    if isinstance(report, Report):
        root, body = report.root, page_part("dataset", _shown(report), template=_TEMPLATE)
    else:
        root, body = report.mixture, _mixture_part(report)
    title = page_part("title", "raypipe validate", report.severity, template=_TEMPLATE)
    return make_page(f"raypipe validate {root}", page_part("view", title, body, "top"))


def _shown(report: Report, *, has_plots: bool = True, most_thumbnails: int = MAX_THUMBNAILS) -> dict[str, Any]:
    """Return what the page shows of a dataset; draws the plots and decodes the frames for the thumbnails."""
    return {
        "lines": summary_lines(report),
        "plots": draw_plots(report) if has_plots else [],
        "folds": [(fold, KINDS[fold.kind].meaning) for fold in fold_findings(report.findings)],
        "thumbnails": read_thumbnails(open_storage(report.root), report.findings, most=most_thumbnails),
    }


def _mixture_part(report: MixtureReport) -> str:
    """Return an index of the datasets, then a section for each."""
    with_findings = sum(bool(one.findings) for one in report.reports.values())
    most = min(MAX_THUMBNAILS, max(1, _MAX_PICTURES // max(1, with_findings)))
    drawn = set(worst_members(report)[:_MAX_DRAWN])
    members = []
    for member in report.members:
        told: dict[str, Any] = {"name": member.name, "root": member.root, "shown": None}
        if member.name in report.reports:
            one = report.reports[member.name]
            told["severity"] = one.severity
            told["numbers"] = (*count_severities(one.findings).values(), one.counts.episodes, one.counts.frames)
            told["shown"] = _shown(one, has_plots=member.name in drawn, most_thumbnails=most)
        members.append(told)
    own = [(fold, KINDS[fold.kind].meaning, own_text(fold)) for fold in fold_findings(report.findings)]
    worst = either(len(drawn), "the worst dataset", f"the {len(drawn)} worst datasets")
    cut = f"Plots are of {worst}; frames are up to {most} of each." if len(report.reports) > len(drawn) else ""
    return page_part("mixture", summary_lines(report), own, members, cut, template=_TEMPLATE)


def draw_plots(report: Report) -> list[PagePicture]:
    """Return the plots: episode lengths, findings by kind, and timestamp drift if there is any."""
    plots = []
    summary = report.summary
    if len(summary):
        plots.append(_draw_lengths(summary.num_frames, report.fps))
    if report.findings:
        plots.append(_draw_kinds(report))
    kinds = ("timestamp-drift", "timestamp-offset", "timestamp-jitter", "fps-mismatch")
    if any(finding.kind in kinds for finding in report.findings):
        plots.append(_draw_drift(summary.episode_index, summary.offset_s, summary.drift_s))
    return plots


def _draw_lengths(lengths: NDArray[np.int64], fps: float) -> PagePicture:
    figure = new_figure(_WIDTH_INCHES, _HEIGHT_INCHES)
    axes = figure.subplots()
    axes.hist(lengths, bins=min(40, max(5, len(np.unique(lengths)))), color="#3367d6")
    axes.set(xlabel="frames of an episode", ylabel="episodes")
    count_whole(axes.xaxis, axes.yaxis)
    each = f"{span_text(lengths.min(), lengths.max())} {plural(lengths.max(), 'frame')}"
    total_s = float(lengths.sum() / fps)
    lasting = f", {total_s / 3600:.2f} hours" if total_s >= 3600 else f", {total_s:.1f} s" if total_s > 0 else ""
    return PagePicture(figure_png(figure, dpi=130), f"lengths of {counted(len(lengths), 'episode')}: {each}{lasting}")


def _draw_kinds(report: Report) -> PagePicture:
    tally = report.tally
    severities = {finding.kind: finding.severity for finding in reversed(report.findings)}
    kinds = list(tally)[::-1]
    figure = new_figure(_WIDTH_INCHES, max(_HEIGHT_INCHES, 0.25 * len(kinds) + 0.8))
    axes = figure.subplots()
    bars = axes.barh(kinds, [tally[kind] for kind in kinds], color=[_COLOURS[severities[kind]] for kind in kinds])
    axes.bar_label(bars, padding=3)
    axes.set(xlabel="findings")
    axes.margins(x=0.15)
    if max(tally.values()) > _LOG_SCALE_FROM:
        axes.set_xscale("symlog")
    else:
        count_whole(axes.xaxis)
    return PagePicture(figure_png(figure, dpi=130), "findings by kind: red errors, amber warnings, grey notes")


def _draw_drift(
    episodes: NDArray[np.int64], offset_s: NDArray[np.float64], drift_s: NDArray[np.float64]
) -> PagePicture:
    figure = new_figure(_WIDTH_INCHES, _HEIGHT_INCHES)
    axes = figure.subplots()
    axes.plot(episodes, drift_s, ".", markersize=4, color="#b26a00", label="largest drift in the episode")
    axes.plot(episodes, offset_s, ".", markersize=4, color="#3367d6", label="first timestamp")
    axes.axhline(0, color="#999", linewidth=0.8)
    axes.set(xlabel="episode", ylabel="seconds")
    count_whole(axes.xaxis)
    axes.legend(fontsize=8)
    return PagePicture(figure_png(figure, dpi=130), "how far timestamps are from frame / fps")


def read_thumbnails(storage: Storage, findings: Sequence[Finding], *, most: int = MAX_THUMBNAILS) -> list[PagePicture]:
    """Return up to `most` frames that video findings point at, without those that cannot be decoded."""
    pictures: list[PagePicture] = []
    for finding in findings:
        if finding.kind in ("video-crash", "video-unreadable") or not finding.place.file.endswith(".mp4"):
            continue
        for frame in finding.place.frames:
            if len(pictures) == most:
                return pictures
            pixels = _read_frame(storage, finding.place.file, frame)
            if pixels is not None:
                numbers = finding.place.episodes
                place = f"{plural(len(numbers), 'episode')} {', '.join(map(str, numbers))}, {finding.place.feature}"
                caption = f"{finding.kind}: frame {frame} of {finding.place.file} ({place})"
                pictures.append(PagePicture(encode_pixels(pixels), caption))
    return pictures


def _read_frame(storage: Storage, name: str, frame: int) -> NDArray[np.uint8] | None:
    """Return a frame ``(H, W, 3)``; None if it cannot be decoded, which a finding reports."""
    from raypipe.decode import OpenVideo

    try:
        pixels: NDArray[np.uint8] = OpenVideo(storage, name).read_frames(np.array([frame]))[0].numpy()
    except DatasetError:
        return None
    return pixels
