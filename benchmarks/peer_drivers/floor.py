"""The floor: all frames decoded once, in file order, on all cores; no rows, no batches, no shuffle."""

import os
from collections.abc import Iterator

import common

from raypipe.bench.loaders import FloorLoader


class Floor:
    """A whole epoch is one batch."""

    def __init__(self, request: common.Request) -> None:
        self._loader = FloorLoader(request.root, None, os.cpu_count() or 1)

    def epoch(self) -> Iterator[common.Batch]:
        for num_samples, _ in self._loader.epoch():
            yield list(range(num_samples)), []


if __name__ == "__main__":
    common.run(Floor)
