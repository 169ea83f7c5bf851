"""The report as one self-contained HTML file, with plots and thumbnails inside it.

Decodes a few frames for the thumbnails, but none of a video that crashed its decoder.
"""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError
from raypipe.storage import Storage, open_storage
from raypipe.text import counted, plural, span_text
from raypipe.validate.findings import KINDS, Finding, Report
from raypipe.validate.table import Fold, fold_findings, summary_lines

MAX_THUMBNAILS: Final = 24
_MAX_DETAILS: Final = 200
"""How many findings are listed under a line of the table; the JSON has all."""

_WIDTH_INCHES: Final = 4.6
_HEIGHT_INCHES: Final = 2.9
_LOG_SCALE_FROM: Final = 100
"""The scale is logarithmic if a kind has more findings than this."""
_COLOURS = {"error": "#b3261e", "warning": "#b26a00", "note": "#5f6368"}
_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1f1f1f; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid #ddd; }
.summary td:first-child { font-weight: 600; width: 8rem; }
.error, .warning, .note { font-weight: 600; } .error { color: #b3261e; } .warning { color: #b26a00; }
.note { color: #5f6368; }
code, .place { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
figure { display: inline-block; margin: .5rem 1rem .5rem 0; vertical-align: top; max-width: 100%; }
figure img { max-width: 100%; border: 1px solid #ddd; } .plot img { width: 23rem; }
.thumbnail img { height: 160px; image-rendering: pixelated; }
figcaption { font-size: 13px; max-width: 22rem; overflow-wrap: anywhere; }
details { margin-top: .3rem; font-size: 13px; }
section { margin-top: 3rem; border-top: 3px solid #ddd; } section h2 a { float: right; font-size: 13px; }
h3 { font-size: 1rem; margin-top: 1.5rem; } .number { text-align: right; } .none { color: #188038; font-weight: 600; }
pre { font: 13px/1.4 ui-monospace, monospace; overflow-x: auto; white-space: pre-wrap; margin: .3rem 0; }
"""


@dataclass(frozen=True, slots=True)
class PagePicture:
    """A picture of the page."""

    png: bytes
    caption: str


def format_page(report: Report) -> str:
    """Return the report as an HTML page; draws the plots and decodes the frames for the thumbnails."""
    heading = f"<h1>raypipe validate: <span class='{report.severity}'>{report.severity}</span></h1>"
    return format_document(f"raypipe validate {report.root}", [heading, *report_parts(report)])


def format_document(title: str, parts: Sequence[str]) -> str:
    """Return a whole HTML document; the parts are HTML already, the title is text."""
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def report_parts(
    report: Report, *, tag: str = "h2", has_plots: bool = True, most_thumbnails: int = MAX_THUMBNAILS
) -> list[str]:
    """Return the parts of a page on one dataset; draws the plots and decodes the frames for the thumbnails.

    Args:
        tag: the HTML tag of the headings.
    """
    thumbnails = read_thumbnails(open_storage(report.root), report.findings, most=most_thumbnails)
    parts = [format_lines(summary_lines(report))]
    if has_plots:
        parts += [f"<{tag}>Plots</{tag}>", *(_figure(plot, "plot") for plot in draw_plots(report))]
    parts += [f"<{tag}>Findings</{tag}>", _findings(fold_findings(report.findings))]
    if thumbnails:
        parts += [f"<{tag}>Frames</{tag}>", *(_figure(picture, "thumbnail") for picture in thumbnails)]
    return parts


def format_lines(lines: Sequence[tuple[str, str]]) -> str:
    """Return names and texts as an HTML table."""
    rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>" for name, text in lines)
    return f"<table class='summary'>{rows}</table>"


def _figure(picture: PagePicture, kind: str) -> str:
    data = base64.b64encode(picture.png).decode()
    caption = html.escape(picture.caption)
    return (
        f"<figure class='{kind}'><img alt='{caption}' src='data:image/png;base64,{data}'>"
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _findings(folds: Sequence[Fold]) -> str:
    if not folds:
        return "<p>Nothing is wrong with it.</p>"
    head = "".join(f"<th>{title}</th>" for title in ("severity", "kind", "place", "what", "remedy"))
    return f"<table class='findings'><tr>{head}</tr>{''.join(map(_row, folds))}</table>"


def _row(fold: Fold) -> str:
    place = "<br>".join(html.escape(line) for line in fold.place.splitlines())
    meaning = html.escape(KINDS[fold.kind].meaning)
    cells = [
        f"<td class='{fold.severity}'>{fold.severity}</td>",
        f"<td><code>{fold.kind}</code><br>{meaning}</td>",
        f"<td class='place'>{place}</td>",
        f"<td>{html.escape(fold.message)}{_details(fold)}</td>",
        f"<td>{html.escape(fold.findings[0].remedy)}</td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _details(fold: Fold) -> str:
    if len(fold.findings) < 2:
        return ""
    shown = fold.findings[:_MAX_DETAILS]
    lines = [
        f"<li><span class='place'>{html.escape(finding.place.file)} {', '.join(map(str, finding.place.episodes[:20]))}"
        f"</span>: {html.escape(finding.message)}</li>"
        for finding in shown
    ]
    if len(fold.findings) > len(shown):
        lines.append(f"<li>and {len(fold.findings) - len(shown)} more, in the JSON</li>")
    return f"<details><summary>all {len(fold.findings)}</summary><ul>{''.join(lines)}</ul></details>"


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


def _count_in_whole_numbers(*scales: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    for scale in scales:
        scale.set_major_locator(MaxNLocator(integer=True))


def _new_axes(height: float = _HEIGHT_INCHES) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _saved(figure: Any, caption: str) -> PagePicture:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return PagePicture(buffer.getvalue(), caption)


def _draw_lengths(lengths: NDArray[np.int64], fps: float) -> PagePicture:
    figure, axes = _new_axes()
    axes.hist(lengths, bins=min(40, max(5, len(np.unique(lengths)))), color="#3367d6")
    axes.set(xlabel="frames of an episode", ylabel="episodes")
    _count_in_whole_numbers(axes.xaxis, axes.yaxis)
    each = f"{span_text(lengths.min(), lengths.max())} {plural(lengths.max(), 'frame')}"
    total_s = float(lengths.sum() / fps)
    lasting = f", {total_s / 3600:.2f} hours" if total_s >= 3600 else f", {total_s:.1f} s" if total_s > 0 else ""
    return _saved(figure, f"lengths of {counted(len(lengths), 'episode')}: {each}{lasting}")


def _draw_kinds(report: Report) -> PagePicture:
    tally = report.tally
    severities = {finding.kind: finding.severity for finding in reversed(report.findings)}
    kinds = list(tally)[::-1]
    figure, axes = _new_axes(max(_HEIGHT_INCHES, 0.25 * len(kinds) + 0.8))
    bars = axes.barh(kinds, [tally[kind] for kind in kinds], color=[_COLOURS[severities[kind]] for kind in kinds])
    axes.bar_label(bars, padding=3)
    axes.set(xlabel="findings")
    axes.margins(x=0.15)
    if max(tally.values()) > _LOG_SCALE_FROM:
        axes.set_xscale("symlog")
    else:
        _count_in_whole_numbers(axes.xaxis)
    return _saved(figure, "findings by kind: red errors, amber warnings, grey notes")


def _draw_drift(
    episodes: NDArray[np.int64], offset_s: NDArray[np.float64], drift_s: NDArray[np.float64]
) -> PagePicture:
    figure, axes = _new_axes()
    axes.plot(episodes, drift_s, ".", markersize=4, color="#b26a00", label="largest drift in the episode")
    axes.plot(episodes, offset_s, ".", markersize=4, color="#3367d6", label="first timestamp")
    axes.axhline(0, color="#999", linewidth=0.8)
    axes.set(xlabel="episode", ylabel="seconds")
    _count_in_whole_numbers(axes.xaxis)
    axes.legend(fontsize=8)
    return _saved(figure, "how far timestamps are from frame / fps")


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
                pictures.append(PagePicture(_png(pixels), caption))
    return pictures


def _read_frame(storage: Storage, name: str, frame: int) -> NDArray[np.uint8] | None:
    """Return a frame ``(H, W, 3)``; None if it cannot be decoded, which a finding reports."""
    from raypipe.decode import open_video

    try:
        pixels: NDArray[np.uint8] = open_video(storage, name).read_frames(np.array([frame]))[0].numpy()
    except DatasetError:
        return None
    return pixels


def _png(pixels: NDArray[np.uint8]) -> bytes:
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, pixels, format="png")
    return buffer.getvalue()
