"""Which settings are best on this machine, for this dataset.

::

    spec.py        what is measured, and for how long                       BenchSpec
    settings.py    a small grid around what `live_bytes` gives              Setting, grid
    floor.py       every frame decoded once, in file order: the floor       FloorLoader
    one_loader.py  one loader, in a process of its own                      Request
    processes.py   what such a process and its children cost                TreeSampler
    measure.py     starts it and watches it                                 measure
    machine.py     what a figure was measured on
    run.py         all of that                                              run_bench
    report.py      which setting is best, and how two benches compare       BenchReport
    table.py, plot.py                                                       for people

`run_bench` measures a small grid of settings, each in a fresh process with a Ray of its own, beside the floor: the same
frames decoded in file order and nothing else. Nothing here decides anything for a pipeline: the advice is a line to
paste.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.bench.plot import check_plot, plot_bench
    from raypipe.bench.report import BenchReport, compare, read_report
    from raypipe.bench.run import run_bench
    from raypipe.bench.settings import Setting
    from raypipe.bench.spec import BenchSpec
    from raypipe.bench.table import bench_table, compare_table
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "plot": "check_plot plot_bench",
            "report": "BenchReport compare read_report",
            "run": "run_bench",
            "settings": "Setting",
            "spec": "BenchSpec",
            "table": "bench_table compare_table",
        },
    )

__all__ = [
    "BenchReport",
    "BenchSpec",
    "Setting",
    "bench_table",
    "check_plot",
    "compare",
    "compare_table",
    "plot_bench",
    "read_report",
    "run_bench",
]
