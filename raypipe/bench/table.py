"""Formats a bench for a person at a terminal."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from raypipe.bench.report import COMPARED, BenchReport, Comparison
from raypipe.text import counted

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_COLUMNS: Final = {
    "samples_per_s": "samples/s",
    "cpu_s_per_1k": "CPU s\nper 1,000",
    "first_batch_s": "first\nbatch, s",
    "peak_mb": "peak\nMB",
    "distinct_episodes": "episodes\na batch",
    "decoded_per_emitted": "decoded\n/ emitted",
}


def bench_table(report: BenchReport) -> "Group":
    """Return the settings, fastest first, the floor, the conditions, and the line to paste."""
    from rich.console import Group
    from rich.text import Text

    best = report.find_best()
    rate = report.conditions.get("gpu_samples_per_s", 0.0)
    columns = [*_COLUMNS.values(), *([f"cores for\n{rate:,g}/s"] if rate else [])]
    table = _table("setting", columns)
    for row in report.ranked:
        mark = "* " if row is best else "  "
        if "error" in row:
            table.add_row(f"{mark}{row['name']}", "failed", *[""] * (len(columns) - 1))
        else:
            table.add_row(mark + row["name"], *_cells(row), style="bold" if row is best else "")
    table.add_section()
    floor = ["failed"] if "error" in report.floor else _cells({**report.floor, "first_batch_s": None})
    table.add_row("  floor: all frames in file order, all cores", *floor)
    lines = [_conditions(report), *_notes(report), f"* {report.advice()}"]
    return Group(table, *(Text(line) for line in lines))


def compare_table(comparison: Comparison) -> "Group":
    """Return the ratios of two reports, and their other differences."""
    from rich.console import Group
    from rich.text import Text

    table = _table("second / first", [_COLUMNS[name] for name in COMPARED])
    for name, ratios in comparison.ratios.items():
        table.add_row(name, *("" if value is None else f"{value:.2f}" for value in ratios.values()))
    lines = [f"differs: {difference}" for difference in comparison.differences]
    lines += [f"only in the first: {name}" for name in comparison.only_first]
    lines += [f"only in the second: {name}" for name in comparison.only_second]
    return Group(table, *(Text(line) for line in lines))


def row_line(name: str, row: Mapping[str, Any]) -> str:
    """Return the line on a row that appears while others are still measured."""
    if "error" in row:
        return f"{name}: failed: {_reason(row)}"
    return f"{name}: {row['samples_per_s']:,.0f} samples/s, {row['cpu_s_per_1k']:.2f} CPU s per 1,000"


def left_out_lines(cameras: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines on declared cameras that are not measured, given by reason."""
    return [f"left out: {', '.join(names)}: {why}" for why, names in cameras.items()]


def _table(first: str, columns: Any) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    # On a narrow terminal names may wrap, but figures never.
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = []
    for name in _COLUMNS:
        value = row.get(name)
        mark = "~" if name == "samples_per_s" and row.get("is_partial") else ""
        cells.append("" if value is None else mark + (f"{value:,.0f}" if value >= 100 else f"{value:.3g}"))
    return [*cells, f"{row['cores']:,} ({row['cores_exact']:,.1f})"] if "cores" in row else cells


def _reason(row: Mapping[str, Any]) -> str:
    return (str(row["error"]).strip().splitlines() or ["ended without a message"])[-1]


def _conditions(report: BenchReport) -> str:
    given, machine = report.conditions, report.machine
    return (
        f"second of two epochs of {given['used_episodes']:,} of {counted(given['episodes'], 'episode')} "
        f"({counted(given['used_frames'], 'frame')}), batch {given['batch_size']}, action chunk "
        f"{given['action_frames']}, {counted(given['observation_frames'], 'observation frame')}; "
        f"{machine['processor']}, {counted(machine['cores'], 'core')}, load {machine['load_average']}"
    )


def _notes(report: BenchReport) -> list[str]:
    notes = ["CPU seconds are of the whole process tree and move little with the load; samples/s move a lot"]
    if rate := report.conditions.get("gpu_samples_per_s"):
        notes.append(f"cores for {rate:,g}/s: what a rank needs for a GPU that takes so many samples/s, whole (exact)")
    if report.conditions["used_episodes"] < report.conditions["episodes"]:
        notes.append(
            "memory, first batch and mixing are of those episodes: `raypipe plan` tells of all, --seconds takes more"
        )
    notes += left_out_lines(report.conditions.get("left_out_cameras", {}))
    for row in ({**report.floor, "name": "the floor"}, *report.rows):
        if "error" in row:
            notes.append(f"failed: {row['name']}: {_reason(row)}")
    if any(row.get("is_partial") for row in report.rows):
        notes.append("~ an epoch was broken off, as too slow for --seconds: a whole one is at least that fast")
    if shuffled := report.conditions.get("full_shuffle_episodes"):
        notes.append(f"a batch of a full shuffle has {shuffled:.3g} of these episodes")
    if faster := report.tell_faster():
        notes.append(faster)
    if not any("setting" not in row for row in report.rows):
        notes.append("LeRobot cannot be imported here, so it is not compared; benchmarks/peers.py does that")
    return notes
