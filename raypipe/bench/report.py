"""The results of a bench: which setting is best, and how two benches compare. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from raypipe.bench.settings import setting_of
from raypipe.errors import ConfigError
from raypipe.plan import DEFAULT_LIVE_BYTES

FORMAT: Final = 2
_TIE: Final = 0.05
"""Speeds this close count as equal: on a machine in use, samples/s differ by more between two runs."""
_MIXING: Final = 0.95
"""To be advised, a setting needs this share of the distinct episodes in a batch of a full shuffle."""
COMPARED: Final = ("samples_per_s", "cpu_s_per_1k", "first_batch_s", "peak_mb", "distinct_episodes")


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """The figures of one machine and one dataset."""

    machine: Mapping[str, Any]
    conditions: Mapping[str, Any]
    floor: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    """One per setting or other loader: ``name``, the figures or ``error``, and ``setting`` for raypipe's."""

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
        return [row for row in self.rows if "setting" in row and "error" not in row]

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
        return f"Pipeline(..., batch_size={self.conditions['batch_size']}, {memory}{setting_of(best).advice()})"

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "raypipe_bench": FORMAT,
            "machine": dict(self.machine),
            "conditions": dict(self.conditions),
            "floor": dict(self.floor),
            "rows": [dict(row) for row in self.rows],
            "advice": self.advice(),
        }


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
        content = json.loads(Path(path).read_text())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(
            f"there is no file {str(path)!r}; write one with `raypipe bench ROOT --json-file FILE`"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is no JSON: {error}") from error
    if not isinstance(content, dict) or content.get("raypipe_bench") != FORMAT:
        raise ConfigError(f"{str(path)!r} was not written by `raypipe bench ROOT --json-file FILE` of this version")
    return BenchReport(
        machine=content["machine"],
        conditions=content["conditions"],
        floor=content["floor"],
        rows=tuple(content["rows"]),
    )


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
    found = []
    for name in ("processor", "cores", "versions"):
        values = [report.machine.get(name) for report in (first, second)]
        if values[0] != values[1]:
            found.append(f"{name}: {_short(values[0], values[1])} against {_short(values[1], values[0])}")
    for name in ("fingerprint", "batch_size", "action_frames", "observation_frames", "used_frames", "live_bytes"):
        values = [report.conditions.get(name) for report in (first, second)]
        if values[0] != values[1]:
            found.append(f"{name}: {values[0]} against {values[1]}")
    return found


def _short(value: Any, other: Any) -> str:
    """Return a value; if both are mappings, only the entries that differ."""
    if isinstance(value, dict) and isinstance(other, dict):
        return ", ".join(f"{name} {value.get(name, 'none')}" for name in value if value[name] != other.get(name))
    return str(value)
