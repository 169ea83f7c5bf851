"""Finds the best settings of a pipeline for this machine and this dataset.

The modules, from the bottom up (each may use those above it)::

    loaders.py  what is measured: a small grid around what `live_bytes` gives, or   BenchSpec, Setting, grid,
                decoding alone (the floor), each in its own process                 Request, FloorLoader
    report.py   which setting is best, how two benches compare, tables, a picture   BenchReport
    run.py      all steps; starts a process for each measurement, and watches it    run_bench, TreeSampler

`run_bench` measures a small grid of settings, each in a fresh process with a Ray of its own, and the floor: decoding
the same frames in file order and nothing else. Nothing here changes a pipeline: the advice is a line to paste.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.bench.loaders import BenchSpec, Setting
    from raypipe.bench.report import (
        BenchReport,
        bench_table,
        check_plot,
        compare,
        compare_table,
        plot_bench,
        read_report,
    )
    from raypipe.bench.run import run_bench
else:
    __all__, __getattr__ = lazy_names(__name__)
