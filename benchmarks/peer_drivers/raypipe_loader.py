"""raypipe. All ranks live in this process, each in a thread: they must be iterated at once."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import common
import ray

import raypipe as rp


class Raypipe:
    """Its defaults, but for where frames are decoded and the memory for live spans."""

    def __init__(self, request: common.Request) -> None:
        ray.init(
            address="local",
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            logging_level="error",
            log_to_driver=False,
        )
        pipe = rp.Pipeline(
            rp.open_dataset(request.root),
            batch_size=request.batch_size,
            seed=request.seed,
            delta_timestamps=request.windows(),
            **request.options,
        )
        order = pipe.config.order
        self.settings = {
            "live_bytes": pipe.config.budget.live_bytes,
            "live_spans": order.live_spans,
            "span_frames": order.span_frames,
        }
        # Those of all ranks together, in a run that is stopped.
        self._stop = request.num_batches // request.world_size if request.mode == "part" else None
        self._is_speed, self._num_begun = request.mode == "speed", 0
        self._loaders = pipe.loaders(request.world_size, num_epochs=2 if request.mode == "speed" else 1, progress=False)

    def epoch(self) -> Iterator[common.Batch]:
        if self._is_speed:
            # One that was broken off is not gone on with: what it has left is no epoch.
            self._loaders[0].set_epoch(self._num_begun)
            self._num_begun += 1
        if len(self._loaders) == 1:
            yield from map(common.ids, self._loaders[0])
            return
        with ThreadPoolExecutor(len(self._loaders)) as pool:
            ranks = list(pool.map(self._read_rank, self._loaders))
        yield from chain.from_iterable(zip(*ranks, strict=True))

    def _read_rank(self, loader: rp.RankLoader) -> list[common.Batch]:
        return [common.ids(batch) for batch in islice(loader, self._stop)]

    def state(self) -> Any:
        return self._loaders[0].state_dict()

    def load(self, state: Any) -> None:
        for loader in self._loaders:
            loader.load_state_dict(state)


if __name__ == "__main__":
    common.run(Raypipe)
