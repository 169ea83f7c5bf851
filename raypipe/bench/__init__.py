"""Finds the best settings of a pipeline for this machine and this dataset.

::

    spec.py        what to measure, and for how long                        BenchSpec
    settings.py    a small grid around what `live_bytes` gives              Setting, grid
    floor.py       every frame decoded once, in file order: the floor       FloorLoader
    one_loader.py  one loader, in a process of its own                      Request
    processes.py   the cost of such a process and its children              TreeSampler
    measure.py     starts such a process and watches it                     measure
    machine.py     the machine and the versions behind a figure
    run.py         all steps                                                run_bench
    report.py      which setting is best, and how two benches compare       BenchReport
    table.py, plot.py                                                       for people

`run_bench` measures a small grid of settings, each in a fresh process with a Ray of its own, and the floor: decoding
the same frames in file order and nothing else. Nothing here changes a pipeline: the advice is a line to paste.
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
    __all__, __getattr__ = lazy_names(
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
