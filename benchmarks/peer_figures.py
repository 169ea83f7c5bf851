"""The figures of the peers as one JSON object, and how those of several runs are joined. Measures nothing.

::

    {"machine": {...}, "conditions": {...},
     "data": {KIND: {"frames": ..., "speed": {PEER: {"cpu_s_per_1k": ..., "run": ...}}}},
     "counts": {PEER: {"whole": ..., "resume": ..., "reshape": ..., "run": ...}},
     "versions": {PEER: {PACKAGE: VERSION}}}

``run`` is the time at which the run of a figure began.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

KINDS = ("av1-640", "h264")
"""The datasets, in the order of the page."""

Figures = dict[str, Any]


def read_figures(path: Path) -> Figures:
    """Return the figures of a file.

    Raises:
        SystemExit: it does not hold figures by dataset.
    """
    found = json.loads(path.read_text())
    if "data" not in found:
        raise SystemExit(f"{path} does not hold figures by dataset; remove it, or name another file")
    return dict(found)


def join_figures(first: Figures, second: Figures) -> Figures:
    """Return the figures of both; where both have one of the same peer and dataset, that of the second.

    Raises:
        SystemExit: they were measured on unlike machines or data, or with unlike settings.
    """
    _check_alike(_settings(first), _settings(second))
    data = {
        kind: {
            **(second["data"].get(kind) or first["data"][kind]),
            "speed": {**first["data"].get(kind, {}).get("speed", {}), **second["data"].get(kind, {}).get("speed", {})},
        }
        for kind in KINDS
        if kind in first["data"] or kind in second["data"]
    }
    return {**second, "data": data, **{key: {**first[key], **second[key]} for key in ("counts", "versions")}}


def order_figures(figures: Figures, names: Iterable[str]) -> Figures:
    """Return the figures of the peers that `names` has, in its order."""
    names = list(names)
    data = {kind: {**each, "speed": _in_order(each["speed"], names)} for kind, each in figures["data"].items()}
    return {**figures, "data": data, **{key: _in_order(figures[key], names) for key in ("counts", "versions")}}


def find_runs(figures: Mapping[str, Any]) -> list[str]:
    """Return the times at which the runs of all figures began, each once, in order."""
    every = [*figures["counts"].values(), *(f for each in figures["data"].values() for f in each["speed"].values())]
    return sorted({one["run"] for one in every})


def _in_order(by_name: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: by_name[name] for name in names if name in by_name}


def _settings(figures: Figures) -> dict[str, Any]:
    """Return all that two runs must share."""
    machine = {key: figures["machine"][key] for key in ("processor", "cores", "memory_gb")}
    data = {f"{kind} {key}": value for kind, each in figures["data"].items() for key, value in each.items()}
    return {**machine, **figures["conditions"], **{key: data[key] for key in data if not key.endswith(" speed")}}


def _check_alike(first: dict[str, Any], second: dict[str, Any]) -> None:
    shared = [key for key in first if key in second and first[key] != second[key]]
    if shared:
        unlike = ", ".join(f"{key} {first[key]!r} and {second[key]!r}" for key in shared)
        raise SystemExit(f"these figures cannot be joined, they have {unlike}; give --json-file another one")
