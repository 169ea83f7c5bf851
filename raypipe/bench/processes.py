"""Measures the cost of a process and everything it started: CPU seconds and memory, sampled from ``/proc`` (Linux).

A process that was once seen in the tree stays in the sum with its last CPU time, even after it or its parent has ended.
So the sum misses at most one interval of CPU time per process that ends. Reading ``/proc`` costs time in the sampling
process, not in the measured one.
"""

import os
import threading
import time
from pathlib import Path

import numpy as np

_INTERVAL_S = 0.1
_SAMPLES_PER_MEMORY_SAMPLE = 10
"""Memory is sampled less often: the proportional set size walks the page tables of a process, some 20 ms per GB."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

ProcessKey = tuple[int, int]
"""Process number and start time: the system reuses numbers."""


class TreeSampler:
    """Samples the processes of one tree in a thread, from its creation until `stop`."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._cpu_s: dict[ProcessKey, float] = {}
        self._live: dict[int, ProcessKey] = {}
        self._samples: list[tuple[float, float]] = []
        self._memory: list[tuple[float, int]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the sampling."""
        self._stopped.set()
        self._thread.join()

    @property
    def peak_mb(self) -> float:
        """Largest sum of proportional set sizes, which count shared memory once."""
        return max((size for _, size in self._memory), default=0) / 1e6

    def memory_mb_between(self, begin_s: float, end_s: float) -> float | None:
        """Return the median sum between two times of ``time.monotonic``; None if there was no sample."""
        found = [size for time_s, size in self._memory if begin_s <= time_s <= end_s]
        return float(np.median(found)) / 1e6 if found else None

    def cpu_between(self, begin_s: float, end_s: float) -> float:
        """Return the CPU seconds of the tree between two times of ``time.monotonic``, taken by any process."""
        times, sums = zip(*self._samples, strict=True)
        begin, end = np.interp([begin_s, end_s], times, sums)
        return float(end - begin)

    def _work(self) -> None:
        count = 0
        while not self._stopped.is_set():
            self._sample_cpu()
            if count % _SAMPLES_PER_MEMORY_SAMPLE == 0:
                self._memory.append((time.monotonic(), sum(map(_proportional_bytes, self._live))))
            count += 1
            self._stopped.wait(_INTERVAL_S)
        self._sample_cpu()

    def _sample_cpu(self) -> None:
        live = {}
        # Parents before their children: a child starts later.
        for started, pid, parent, cpu_s in sorted(_list_processes()):
            key = (pid, started)
            if pid == self._root or parent in live or key in self._cpu_s:
                live[pid] = key
                self._cpu_s[key] = cpu_s
        self._live = live
        self._samples.append((time.monotonic(), sum(self._cpu_s.values())))


def _list_processes() -> list[tuple[int, int, int, float]]:
    """Return (start time, process number, parent, CPU seconds) of every process."""
    processes = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                content = Path("/proc", name, "stat").read_text()
            except OSError:
                continue
            # The program's name, in brackets, may contain blanks.
            fields = content[content.rindex(")") + 2 :].split()
            cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
            processes.append((int(fields[19]), int(name), int(fields[1]), cpu_s))
    return processes


def _proportional_bytes(pid: int) -> int:
    try:
        for line in Path("/proc", str(pid), "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
