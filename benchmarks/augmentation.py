"""What augmentation by torchvision costs a loader, sample by sample: in raypipe's threads, in one, and in LeRobot.

    python benchmarks/augmentation.py ROOT [--way samples --way batch --way lerobot] [--batch-size 32] [--seconds 20]

Every way makes the same change, `ColorJitter` and `RandomAffine` of torchvision's v2, to every camera of every sample:
`samples` in `sample_transform`, `batch` in a loop within `transform`, `lerobot` as `image_transforms` of a
`LeRobotDataset` under torch's `DataLoader` with a worker per core. `none` is raypipe without a change. Samples per
second are counted from the first batch on, CPU is that of the process and its children. A way whose package is not
installed is left out with a word; `benchmarks/peer_envs.py` makes an environment that has LeRobot.
"""

import argparse
import os
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from machine import write_results

COLUMNS = ("way", "samples_per_s", "cpu_s_per_1000", "samples", "first_batch_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="may be given several times; all by default")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json-file", dest="json", help="also write the figures here")
    arguments = parser.parse_args()
    results = []
    for way in arguments.way or WAYS:
        try:
            results.append(measure(way, WAYS[way](arguments.root, arguments.batch_size), arguments.seconds))
        except ImportError as error:
            print(f"{way}: left out, {error}")
    write_results(arguments.json, results, COLUMNS)


def make_change() -> Callable[[torch.Tensor], torch.Tensor]:
    from torchvision.transforms import v2

    return v2.Compose([v2.ColorJitter(0.2, 0.2, 0.2, 0.05), v2.RandomAffine(5, (0.05, 0.05))])


def with_threads(root: str, batch_size: int) -> Iterator[Any]:
    change = make_change()

    def change_sample(sample: dict[str, Any], _: int) -> dict[str, Any]:
        # In memory the channels come last; torchvision is quicker where they come first.
        return {name: change(value.contiguous()) if "images" in name else value for name, value in sample.items()}

    return open_loader(root, batch_size, sample_transform=change_sample)


def with_one_thread(root: str, batch_size: int) -> Iterator[Any]:
    change = make_change()

    def change_batch(batch: dict[str, Any], _: torch.Tensor) -> dict[str, Any]:
        for name in [name for name in batch if "images" in name]:
            batch[name] = torch.stack([change(one.contiguous()) for one in batch[name]])
        return batch

    return open_loader(root, batch_size, transform=change_batch)


def unchanged(root: str, batch_size: int) -> Iterator[Any]:
    return open_loader(root, batch_size)


def open_loader(root: str, batch_size: int, **settings: Any) -> Iterator[Any]:
    import raypipe as rp

    loader = rp.Pipeline(root, batch_size=batch_size, seed=0).loader(progress=False, num_epochs=1000, **settings)
    return loader.steps(1 << 40)


def with_lerobot(root: str, batch_size: int) -> Iterator[Any]:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("augmentation", root=root, image_transforms=make_change())
    workers = len(os.sched_getaffinity(0))
    loader = torch.utils.data.DataLoader(dataset, batch_size, shuffle=True, num_workers=workers, drop_last=True)
    while True:
        yield from loader


WAYS: dict[str, Callable[[str, int], Iterator[Any]]] = {
    "none": unchanged,
    "samples": with_threads,
    "batch": with_one_thread,
    "lerobot": with_lerobot,
}


def measure(way: str, batches: Iterator[Any], seconds: float) -> dict[str, Any]:
    began = time.monotonic()
    next(batches)
    first, cpu, samples = time.monotonic(), cpu_s(), 0
    while time.monotonic() < first + seconds:
        samples += len(next(batches)["index"])
    elapsed, used = time.monotonic() - first, cpu_s() - cpu
    batches.close()  # type: ignore[attr-defined]
    return {
        "way": way,
        "samples_per_s": round(samples / elapsed, 1),
        "cpu_s_per_1000": round(1000 * used / samples, 2),
        "samples": samples,
        "first_batch_s": round(first - began, 2),
    }


def cpu_s() -> float:
    """Return the CPU of this process and of its children, also of those that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) + sum(map(_cpu_of_child, _children()))


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(number) for number in file.read().split()]


def _cpu_of_child(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
