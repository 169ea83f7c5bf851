"""The conditions of a figure: the machine, the versions, and the command."""

import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

_PACKAGES: Final = ("raypipe", "ray", "torch", "torchcodec", "pyarrow", "numpy", "lerobot")


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory, load, Python and package versions, and the command line."""
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
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
        "command": _command(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _command() -> str:
    program = Path(sys.argv[0])
    # Show the name of an installed program, but the typed path of a script.
    words = ["python", sys.argv[0]] if program.suffix == ".py" else [program.name]
    return " ".join([*words, *sys.argv[1:]])


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        if names:
            return names[0]
    return platform.processor() or platform.machine()
