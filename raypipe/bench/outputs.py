"""The files of a bench: whether they can be written is known before minutes are measured."""

import json
from dataclasses import dataclass
from pathlib import Path

from raypipe.bench.plot import plot_bench
from raypipe.bench.report import BenchReport
from raypipe.errors import ConfigError
from raypipe.writable import check_writable

PRINTED = "-"
"""In place of a file: JSON goes to standard output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What is written of a bench beside its table; checked as it is made."""

    json_file: str = ""
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.plot is not None and self.plot.suffix != ".png":
            raise ConfigError(f"cannot draw to {str(self.plot)!r}: give a file that ends in .png")
        for path in self._files():
            check_writable(path)

    @property
    def is_json_printed(self) -> bool:
        """Whether JSON takes the place of the table."""
        return self.json_file == PRINTED

    def write(self, report: BenchReport) -> None:
        """Write the files, JSON first."""
        if self.json_file and not self.is_json_printed:
            Path(self.json_file).write_text(json.dumps(report.to_json(), indent=2) + "\n")
        if self.plot is not None:
            plot_bench(report, self.plot)

    def _files(self) -> list[Path]:
        files = [Path(self.json_file)] if self.json_file and not self.is_json_printed else []
        return files + ([self.plot] if self.plot is not None else [])
