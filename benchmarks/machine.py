"""What every benchmark prints and writes beside its figures: the machine, the versions, and its own command."""

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("raypipe", "ray", "torch", "torchcodec", "pyarrow", "numpy", "lerobot")


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory, Python and package versions, and the command line."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        "versions": versions,
        "command": " ".join(["python", *sys.argv]),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def write_results(path: str | None, results: list[dict[str, Any]], columns: Sequence[str] = ()) -> None:
    """Print the results, as a table of `columns` if given, and write them to `path` if given.

    The file is a list of objects, each with the machine that it was measured on.
    """
    machine = describe_machine()
    print(f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['versions']}")
    for line in _table(results, columns) if columns else map(_line, results):
        print(line)
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        objects = [{**result, "machine": machine} for result in results]
        Path(path).write_text(json.dumps(objects, indent=2) + "\n")


def _line(result: dict[str, Any]) -> str:
    return "  " + ", ".join(f"{key} {value}" for key, value in result.items())


def _table(results: list[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    used = [name for name in columns if any(result.get(name) is not None for result in results)]
    cells = [used, *([_cell(result.get(name)) for name in used] for result in results)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + "---|" * len(used), *lines[1:]]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value).replace("\n", " ")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        if names:
            return names[0]
    return platform.processor() or platform.machine()
