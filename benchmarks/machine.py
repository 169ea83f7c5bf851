"""What every benchmark prints and writes beside its figures: the machine, the versions, and its own command."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypipe.bench.run import describe_machine


def write_results(path: str | None, results: list[dict[str, Any]], columns: Sequence[str] = ()) -> None:
    """Print the results, as a table of `columns` if given, and write them to `path` if given.

    The file is a list of objects, each with the machine that it was measured on.
    """
    machine = describe_machine()
    print(f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['versions']}")
    for line in markdown_table(results, columns) if columns else map(_line, results):
        print(line)
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        objects = [{**result, "machine": machine} for result in results]
        Path(path).write_text(json.dumps(objects, indent=2) + "\n")


def markdown_table(results: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """Return the lines of a table of those columns that any result has."""
    used = [name for name in columns if any(result.get(name) is not None for result in results)]
    cells = [used, *([_cell(result.get(name)) for name in used] for result in results)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + "---|" * len(used), *lines[1:]]


def _line(result: dict[str, Any]) -> str:
    return "  " + ", ".join(f"{key} {value}" for key, value in result.items())


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value).replace("\n", " ")
