"""How long the first batch takes, from the start of Python, and where the time goes.

    python benchmarks/start.py [DATASET] [--rounds 3] [--json-file FILE]

Without a dataset one of 50 episodes with two 640x480 AV1 cameras is made. Batches of 64, an action chunk of 16, raypipe
as it comes. Every round is a new process; the median of each stage is shown, in seconds of wall clock.

    local            a plain script: the rank reads its own rows
    local, warm      the same, counted from after ``import torch, torchcodec``
    ray, to start    transport="ray", where no Ray is running
    ray, running     the same in a process that is connected already
    second loader    another loader of the same pipeline in the same process, for each transport
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import write_results
from made import make_dataset

SCRIPT = """
import sys, time
begun = float(sys.argv[2])
mode = sys.argv[3]
stages = {}
last = begun

def stage(name):
    global last
    now = time.time()
    stages[name] = now - last
    last = now

stage("python")
if mode == "local, warm":
    import torch, torchcodec.decoders
    stage("torch (not counted)")
    begun = time.time()
if mode == "ray, running":
    import ray
    ray.init(address="local", include_dashboard=False, logging_level="error", log_to_driver=False)
    stage("ray (not counted)")
    begun = time.time()
import raypipe as rp
ds = rp.open_dataset(sys.argv[1])
stage("open")
pipe = rp.Pipeline(ds, batch_size=64, seed=0, delta_timestamps={"action": [i / ds.meta.fps for i in range(16)]})
stage("pipeline")
transport = "ray" if mode.startswith("ray") else "local"
loader = pipe.loader(transport=transport, progress=False)
stage("loader")
next(iter(loader))
stage("first batch")
total = time.time() - begun
loader.close()
again = time.time()
second = pipe.loader(transport=transport, progress=False)
next(iter(second))
import json
print(json.dumps({"total": total, "second loader": time.time() - again, **stages}))
"""

MODES = ("local", "local, warm", "ray, to start", "ray, running")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", nargs="?", help="a folder with a LeRobot dataset")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE")
    parser.add_argument("--json-file", dest="json", help="also write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raypipe-start-") as folder:
        root = arguments.dataset or str(make_dataset("av1-640", Path(folder) / "dataset"))
        results = [{"mode": mode, **measure(root, mode, arguments.rounds)} for mode in arguments.modes]
    columns = list(dict.fromkeys(key for result in results for key in result))
    write_results(arguments.json, results, columns)


def measure(root: str, mode: str, rounds: int) -> dict[str, float]:
    """Return the median of every stage over the rounds."""
    found = []
    for _ in range(rounds):
        command = [sys.executable, "-c", SCRIPT, root, str(time.time()), mode]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found.append(json.loads(printed.splitlines()[-1]))
    return {stage: round(statistics.median(one[stage] for one in found), 2) for stage in found[0]}


if __name__ == "__main__":
    main()
