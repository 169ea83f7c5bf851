"""Which settings are best on this machine, for this dataset.

`run_bench` measures a small grid of settings, each in a fresh process with a Ray of its own, beside the floor: the same
frames decoded in file order and nothing else. ``one_loader`` is what runs in that process; ``processes`` watches its
tree from outside. Nothing here decides anything for a pipeline: the advice is a line to paste.
"""

from raypipe.bench.report import BenchReport, Comparison, compare, read_report
from raypipe.bench.settings import Setting
from raypipe.bench.spec import BenchSpec

__all__ = ["BenchReport", "BenchSpec", "Comparison", "Setting", "compare", "read_report"]
