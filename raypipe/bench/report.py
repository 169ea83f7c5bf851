"""The results of a bench: which setting is best, how two benches compare, and both as tables and as a picture."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raypipe.bench.loaders import Setting
from raypipe.errors import ConfigError
from raypipe.plan import DEFAULT_LIVE_BYTES
from raypipe.storage import check_writable, save_figure
from raypipe.text import counted, field_names, new_figure, parse_json

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

FORMAT: Final = 2
_TIE: Final = 0.05
"""Speeds this close count as equal: on a machine in use, samples/s differ by more between two runs."""
_MIXING: Final = 0.95
"""To be advised, a setting needs this share of the distinct episodes in a batch of a full shuffle."""
_CONDITIONS: Final = (
    "processor",
    "cores",
    "versions",
    "fingerprint",
    "batch_size",
    "action_frames",
    "observation_frames",
    "used_frames",
    "live_bytes",
)
"""What must be the same for two reports to compare."""
COMPARED: Final = ("samples_per_s", "cpu_s_per_1k", "first_batch_s", "peak_mb", "distinct_episodes")


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """The figures of one machine and one dataset."""

    machine: Mapping[str, Any]
    conditions: Mapping[str, Any]
    floor: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    """One per setting: ``name``, ``setting``, and the figures or ``error``."""

    @property
    def ranked(self) -> list[Mapping[str, Any]]:
        """The measured rows, fastest first, then the failed ones."""
        return sorted(self.rows, key=lambda row: -row.get("samples_per_s", 0.0))

    def find_best(self) -> Mapping[str, Any] | None:
        """Return the row to advise: among the fastest settings that mix well, the one that takes least CPU.

        Fastest means within 5% of the fastest. Mixing well means 95% of the distinct episodes in a batch of a full
        shuffle, or of the most that any setting reaches if none reaches that: a setting is not better for showing fewer
        episodes at a time. If the bench used fewer episodes than the first setting has live spans, it cannot judge
        their mixing, and advises no setting with fewer live spans. None if no setting could be measured.
        """
        rows = self._measured
        if not rows:
            return None
        used, least = self.conditions.get("used_episodes", 0), rows[0]["setting"]["live_spans"]
        if used < min(least, self.conditions.get("episodes", 0)):
            rows = [row for row in rows if row["setting"]["live_spans"] >= least]
        wanted = self._wanted_episodes(rows)
        mixed = [row for row in rows if (row["distinct_episodes"] or 0.0) >= wanted]
        fastest = max(row["samples_per_s"] for row in mixed)
        close = [row for row in mixed if row["samples_per_s"] >= (1 - _TIE) * fastest]
        return min(close, key=lambda row: row["cpu_s_per_1k"])

    def tell_faster(self) -> str:
        """Return why the fastest setting is not the advised one; empty if it is, or is nearly as fast."""
        best = self.find_best()
        rows = self._measured
        fastest = max(rows, key=lambda row: row["samples_per_s"], default=None)
        if best is None or fastest is None or best["samples_per_s"] >= (1 - _TIE) * fastest["samples_per_s"]:
            return ""
        told = f"{fastest['name']} is {fastest['samples_per_s'] / best['samples_per_s']:.2g} times as fast"
        shown, mixed = fastest["distinct_episodes"] or 0.0, best["distinct_episodes"] or 0.0
        if shown < self._wanted_episodes(rows):
            return f"{told}, but mixes less: {shown:.3g} episodes a batch, not {mixed:.3g}. Take it if that is enough"
        return f"{told}, but has fewer live spans, whose mixing these few episodes do not show: --seconds takes more"

    @property
    def _measured(self) -> list[Mapping[str, Any]]:
        """The rows of settings that have figures."""
        return [row for row in self.rows if "error" not in row]

    def _wanted_episodes(self, rows: Sequence[Mapping[str, Any]]) -> float:
        """Return the distinct episodes per batch that count as well mixed."""
        most: float = max(row["distinct_episodes"] or 0.0 for row in rows)
        shuffled: float = self.conditions.get("full_shuffle_episodes", most)
        return _MIXING * min(most, shuffled)

    def advice(self) -> str:
        """Return the line to paste."""
        best = self.find_best()
        if best is None:
            return "no setting could be measured"
        live_bytes = self.conditions.get("live_bytes", DEFAULT_LIVE_BYTES)
        memory = "" if live_bytes == DEFAULT_LIVE_BYTES else f"live_bytes={live_bytes}, "
        return (
            f"Pipeline(..., batch_size={self.conditions['batch_size']}, {memory}{Setting(**best['setting']).advice()})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {"raypipe_bench": FORMAT, **vars(self), "advice": self.advice()}


def with_cores(row: Mapping[str, Any], samples_per_s: float) -> dict[str, Any]:
    """Return a row with the cores that feed a GPU taking so many samples a second, rounded up and exact.

    The row is unchanged if nothing was measured or the rate is 0.
    """
    if not samples_per_s or "cpu_s_per_1k" not in row:
        return dict(row)
    exact = round(samples_per_s * row["cpu_s_per_1k"] / 1000, 4)
    return {**row, "cores": math.ceil(exact), "cores_exact": exact}


def read_report(path: str | Path) -> BenchReport:
    """Return the report that ``raypipe bench --json-file`` wrote."""
    try:
        content = parse_json(Path(path).read_text())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(
            f"there is no file {str(path)!r}; write one with `raypipe bench ROOT --json-file FILE`"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is no JSON: {error}") from error
    names = field_names(BenchReport)
    if not isinstance(content, dict) or content.get("raypipe_bench") != FORMAT or not content.keys() >= set(names):
        raise ConfigError(f"{str(path)!r} was not written by `raypipe bench ROOT --json-file FILE` of this version")
    return BenchReport(**{name: content[name] for name in names} | {"rows": tuple(content["rows"])})


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two reports side by side."""

    ratios: Mapping[str, Mapping[str, float | None]]
    """The second's figure over the first's, by name, for rows that both have measured."""
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    differences: tuple[str, ...]
    """Conditions that differ, so that the ratios do not compare only machines or versions."""


def compare(first: BenchReport, second: BenchReport) -> Comparison:
    """Return how the second report differs from the first, by setting."""
    rows = [{"floor": report.floor, **{row["name"]: row for row in report.rows}} for report in (first, second)]
    shared = [name for name in rows[0] if name in rows[1]]
    return Comparison(
        ratios={name: _ratios(rows[0][name], rows[1][name]) for name in shared},
        only_first=tuple(name for name in rows[0] if name not in rows[1]),
        only_second=tuple(name for name in rows[1] if name not in rows[0]),
        differences=tuple(_differences(first, second)),
    )


def _ratios(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, float | None]:
    pairs = {name: (first.get(name), second.get(name)) for name in COMPARED}
    return {name: mine / its if mine and its else None for name, (its, mine) in pairs.items()}


def _differences(first: BenchReport, second: BenchReport) -> list[str]:
    one, other = ({**report.conditions, **report.machine} for report in (first, second))
    return [
        f"{name}: {_short(one.get(name), other.get(name))} against {_short(other.get(name), one.get(name))}"
        for name in _CONDITIONS
        if one.get(name) != other.get(name)
    ]


def _short(value: Any, other: Any) -> str:
    """Return a value; if both are mappings, only the entries that differ."""
    if isinstance(value, dict) and isinstance(other, dict):
        differing = [name for name in {**value, **other} if value.get(name) != other.get(name)]
        return ", ".join(f"{name} {value.get(name, 'none')}" for name in differing)
    return str(value)


_TABLE_COLUMNS: Final = {
    "samples_per_s": "samples/s",
    "cpu_s_per_1k": "CPU s\nper 1,000",
    "first_batch_s": "first\nbatch, s",
    "peak_mb": "peak\nMB",
    "distinct_episodes": "episodes\na batch",
    "decoded_per_emitted": "decoded\n/ emitted",
}


def bench_table(report: BenchReport) -> "Group":
    """Return the settings, fastest first, the floor, the conditions, and the line to paste."""
    best = report.find_best()
    rate = report.conditions.get("gpu_samples_per_s", 0.0)
    columns = [*_TABLE_COLUMNS.values(), *([f"cores for\n{rate:,g}/s"] if rate else [])]
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
    return _with_lines(table, [_conditions(report), *_notes(report), f"* {report.advice()}"])


def compare_table(comparison: Comparison) -> "Group":
    """Return the ratios of two reports, and their other differences."""
    table = _table("second / first", [_TABLE_COLUMNS[name] for name in COMPARED])
    for name, ratios in comparison.ratios.items():
        table.add_row(name, *("" if value is None else f"{value:.2f}" for value in ratios.values()))
    lines = [f"differs: {difference}" for difference in comparison.differences]
    lines += [f"only in the first: {name}" for name in comparison.only_first]
    lines += [f"only in the second: {name}" for name in comparison.only_second]
    return _with_lines(table, lines)


def _with_lines(table: "Table", lines: Sequence[str]) -> "Group":
    from rich.console import Group
    from rich.text import Text

    return Group(table, *map(Text, lines))


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
    cells = [_figure_text(row, name) for name in _TABLE_COLUMNS]
    return [*cells, f"{row['cores']:,} ({row['cores_exact']:,.1f})"] if "cores" in row else cells


def _figure_text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    mark = "~" if name == "samples_per_s" and row.get("is_partial") else ""
    return mark + (f"{value:,.0f}" if value >= 100 else f"{value:.3g}")


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
    return notes


_PLOT_COLUMNS: Final = {
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
    rows = [row for row in report.ranked if "error" not in row]
    best, names, marks = report.find_best(), [row["name"] for row in rows], _marks(report)
    figure = new_figure(12, 1.9 + 0.38 * len(rows))
    colours = ["#1b6e53" if row is best else "#8fa8b8" for row in rows]
    panels = figure.subplots(1, len(_PLOT_COLUMNS), sharey=True)
    for axes, (column, title) in zip(panels, _PLOT_COLUMNS.items(), strict=True):
        bars = axes.barh(names, [row[column] or 0.0 for row in rows], color=colours)
        axes.bar_label(bars, [_figure_text(row, column) or "?" for row in rows], padding=3, fontsize=8)
        if column in marks:
            axes.axvline(marks[column], color="#444444", linestyle=":", linewidth=1.2)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.18)
        axes.spines[["top", "right"]].set_visible(False)
    if rows:
        figure.axes[0].invert_yaxis()
    machine, frames = report.machine, counted(report.conditions["used_frames"], "frame")
    where = f"{machine['processor']}, {counted(machine['cores'], 'core')}"
    title = f"{frames}, batch {report.conditions['batch_size']}, {where}\n{', '.join(describe_marks(report))}"
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path, dpi=110)


def _marks(report: BenchReport) -> dict[str, float]:
    """Return the values to compare the bars of some columns with."""
    marks = {name: report.floor.get(name) for name in ("samples_per_s", "cpu_s_per_1k")}
    marks["distinct_episodes"] = report.conditions.get("full_shuffle_episodes")
    return {name: mark for name, mark in marks.items() if mark}


def describe_marks(report: BenchReport) -> list[str]:
    """Return the meanings of the colours, lines and signs in the picture."""
    marks = _marks(report)
    lines = {
        "the floor, which only decodes": marks.keys() - {"distinct_episodes"},
        "a full shuffle": "distinct_episodes" in marks,
    }
    dotted = ", and ".join(text for text, is_drawn in lines.items() if is_drawn)
    meanings = {
        "dark green is advised": report.find_best() is not None,
        f"dotted: {dotted}": bool(dotted),
        "~ was broken off": any(row.get("is_partial") for row in report.rows),
    }
    return [text for text, is_shown in meanings.items() if is_shown]
