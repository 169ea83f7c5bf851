"""The process that meets the inputs: told a site and seeds, it prints what came of each, one JSON line apiece.

A crash, a hang and memory are seen by whoever started it: the input is the one whose line is missing.
"""

import base64
import itertools
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from fuzz_site import Damage, Site, WrongData  # noqa: E402
from fuzz_sites import SITES  # noqa: E402

from raypipe.errors import RaypipeError  # noqa: E402

MOST_BYTES: Final = 2 << 30
"""Of a worker's memory at any time."""

_SPARE_BYTES: Final = 6 << 30
"""What a worker may map beyond what it has mapped at its start: an input that asks for more fails at once."""


def run_seed(site: Site, name: str, seed: int) -> dict[str, Any]:
    """Return what came of the input with this number."""
    return run_damage(site, site.draw(random.Random(f"{name}:{seed}")))


def run_damage(site: Site, damage: Damage) -> dict[str, Any]:
    """Return what came of a damage: `outcome`, and of a failure `key`, which failures of one cause share."""
    told = {"use": damage.use, "file": damage.file}
    try:
        return {"outcome": site.apply(damage), **told}
    except RaypipeError as error:
        if site.names(error, damage):
            return {"outcome": type(error).__name__, **told}
        return {"outcome": "unnamed", **_describe(error), **told}
    except WrongData as error:
        return {"outcome": "wrong", "key": f"wrong {damage.use}", "error": str(error), **told}
    except MemoryError as error:
        return {"outcome": "memory", **_describe(error), **told}
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return {"outcome": "raw", **_describe(error), **told}


def _describe(error: BaseException) -> dict[str, str]:
    frames = [one for one in traceback.extract_tb(error.__traceback__) if f"{os.sep}raypipe{os.sep}" in one.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
    text = "".join(traceback.format_exception(error)[-12:])
    return {"key": f"{type(error).__name__} in {place}", "error": text[-4000:]}


def limit_memory() -> None:
    """Let an allocation that no input may ask for fail, so that the machine lives on."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _SPARE_BYTES, resource.RLIM_INFINITY))


def make_site(name: str) -> tuple[Site, Path]:
    """Return a site in a new folder in memory, and the folder."""
    top = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="raypipe-fuzz-", dir=top))
    return SITES[name](folder), folder


def damage_of(kept: dict[str, Any]) -> Damage:
    """Return the damage of a past failure, which is a line of the corpus."""
    return Damage(kept["file"], zlib.decompress(base64.b64decode(kept["content"])), kept["use"])


def _run_corpus(lines: IO[str]) -> None:
    kept = sorted(map(json.loads, sys.stdin), key=lambda one: one["site"])
    for name, ones in itertools.groupby(kept, key=lambda one: one["site"]):
        site, folder = make_site(name)
        try:
            for one in ones:
                told = run_damage(site, damage_of(one))
                print(json.dumps({"name": one["name"], **told}), file=lines, flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _main() -> None:
    # The lines go where nothing else is printed.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    if sys.argv[1] == "corpus":
        _run_corpus(lines)
        return
    name, first, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    site, folder = make_site(name)
    print(json.dumps({"folder": str(folder)}), file=lines, flush=True)
    with suppress(OSError, ValueError):
        limit_memory()
    try:
        seed = first
        while True:
            told = run_seed(site, name, seed)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            if peak > MOST_BYTES:
                told = {"outcome": "memory", "key": f"{told.get('key', '')} {told['use']}", "error": f"{peak} bytes"}
            print(json.dumps({"seed": seed, "peak": peak, **told}), file=lines, flush=True)
            if peak > MOST_BYTES:
                return
            seed += step
    except BrokenPipeError:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main()
