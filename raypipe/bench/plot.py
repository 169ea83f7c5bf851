"""A bench as a picture."""

from pathlib import Path

from raypipe.bench.report import BenchReport


def plot_bench(report: BenchReport, path: Path) -> None:
    """Draw speed, CPU and memory of every setting as bars, fastest first, to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in report.ranked if "error" not in row]
    best, names = report.find_best(), [row["name"] for row in rows]
    figure = Figure(figsize=(12, 1.9 + 0.38 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    columns = {"samples_per_s": "samples/s", "cpu_s_per_1k": "CPU s per 1,000 samples", "peak_mb": "peak memory, MB"}
    for axes, (column, title) in zip(figure.subplots(1, len(columns), sharey=True), columns.items(), strict=True):
        colours = ["#1b6e53" if row is best else "#8fa8b8" if "setting" in row else "#d9a566" for row in rows]
        bars = axes.barh(names, [row[column] for row in rows], color=colours)
        axes.bar_label(bars, fmt="{:,.3g}" if column == "cpu_s_per_1k" else "{:,.0f}", padding=3, fontsize=8)
        if column != "peak_mb" and report.floor.get(column):
            axes.axvline(report.floor[column], color="#444444", linestyle=":", linewidth=1.2, label="floor")
            axes.legend(fontsize=8, loc="lower right", frameon=False)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.18)
        axes.spines[["top", "right"]].set_visible(False)
    if rows:
        figure.axes[0].invert_yaxis()
    machine, given = report.machine, report.conditions
    figure.suptitle(
        f"{given['used_frames']:,} frames, batch {given['batch_size']}, {machine['processor']}, {machine['cores']} "
        f"cores; dark green is advised, the floor only decodes",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
