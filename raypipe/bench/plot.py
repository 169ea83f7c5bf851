"""Draws a bench as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from raypipe.bench.report import BenchReport
from raypipe.errors import ConfigError
from raypipe.storage import check_writable, save_figure
from raypipe.text import counted

_COLUMNS: Final = {
    "samples_per_s": "samples/s",
    "cpu_s_per_1k": "CPU s per 1,000",
    "peak_mb": "peak memory, MB",
    "distinct_episodes": "episodes a batch",
}


def check_plot(path: Path) -> None:
    """Raise a `ConfigError` if no bench can be drawn to `path`; called before minutes of measuring."""
    if path.suffix != ".png":
        raise ConfigError(f"cannot draw to {str(path)!r}: give a file that ends in .png")
    check_writable(path)


def plot_bench(report: BenchReport, path: Path) -> None:
    """Draw speed, CPU, memory and mixing of every setting as bars, fastest first, to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _drawn_rows(report)
    best, names = report.find_best(), [row["name"] for row in rows]
    figure = Figure(figsize=(12, 1.9 + 0.38 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    colours = ["#1b6e53" if row is best else "#8fa8b8" if "setting" in row else "#d9a566" for row in rows]
    for axes, (column, title) in zip(figure.subplots(1, len(_COLUMNS), sharey=True), _COLUMNS.items(), strict=True):
        bars = axes.barh(names, [row[column] or 0.0 for row in rows], color=colours)
        axes.bar_label(bars, [_label(row, column) for row in rows], padding=3, fontsize=8)
        if mark := _mark(report, column):
            axes.axvline(mark, color="#444444", linestyle=":", linewidth=1.2)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.18)
        axes.spines[["top", "right"]].set_visible(False)
    if rows:
        figure.axes[0].invert_yaxis()
    figure.suptitle(_title(report), fontsize=10)
    save_figure(figure, path, dpi=110)


def _mark(report: BenchReport, column: str) -> float:
    """Return the value to compare the bars of a column with; 0: none."""
    marks = {
        "samples_per_s": report.floor.get("samples_per_s"),
        "cpu_s_per_1k": report.floor.get("cpu_s_per_1k"),
        "distinct_episodes": report.conditions.get("full_shuffle_episodes"),
    }
    return marks.get(column) or 0.0


def _label(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if value is None:
        return "?"
    mark = "~" if column == "samples_per_s" and row.get("is_partial") else ""
    return mark + (f"{value:,.0f}" if value >= 100 else f"{value:.3g}")


def _title(report: BenchReport) -> str:
    machine, given = report.machine, report.conditions
    where = f"{machine['processor']}, {counted(machine['cores'], 'core')}"
    what = f"{counted(given['used_frames'], 'frame')}, batch {given['batch_size']}, {where}"
    return f"{what}\n{', '.join(describe_marks(report))}"


def describe_marks(report: BenchReport) -> list[str]:
    """Return the meanings of the colours, lines and signs in the picture."""
    rows = _drawn_rows(report)
    lines = {
        "the floor, which only decodes": _mark(report, "samples_per_s") or _mark(report, "cpu_s_per_1k"),
        "a full shuffle": _mark(report, "distinct_episodes"),
    }
    dotted = ", and ".join(text for text, mark in lines.items() if mark)
    meanings = {
        "dark green is advised": report.find_best() is not None,
        "orange are other loaders": any("setting" not in row for row in rows),
        f"dotted: {dotted}": bool(dotted),
        "~ was broken off": any(row.get("is_partial") for row in rows),
    }
    return [text for text, is_shown in meanings.items() if is_shown]


def _drawn_rows(report: BenchReport) -> list[Mapping[str, Any]]:
    return [row for row in report.ranked if "error" not in row]
