"""raypipe. All ranks live in this process, each in a thread: they must be iterated at once."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import common

import raypipe as rp


class Raypipe:
    """As it comes, with a batch size, a seed and an action chunk, but for what the options say."""

    def __init__(self, request: common.Request) -> None:
        if request.options.get("decode", {}).get("where") == "cluster":
            start_ray()
        pipe = rp.Pipeline(
            rp.open_dataset(request.root),
            batch_size=request.batch_size,
            seed=request.seed,
            delta_timestamps=request.windows(),
            **request.options,
        )
        self._config = pipe.config
        # Those of all ranks together, in a run that is stopped.
        self._stop = request.num_batches // request.world_size if request.mode == "part" else None
        self._is_speed, self._num_begun = request.mode == "speed", 0
        # An epoch decodes ahead for the next: with a third to come, the second pays for as much as it was given.
        self._loaders = pipe.loaders(request.world_size, num_epochs=3 if self._is_speed else 1, progress=False)
        self._before = self._count_frames()

    @property
    def settings(self) -> dict[str, Any]:
        """What raypipe chose, and how many frames it decoded and copied in the last epoch."""
        order = self._config.order
        return {
            "live_bytes": self._config.budget.live_bytes,
            "live_spans": order.live_spans,
            "span_frames": order.span_frames,
            "clip_frames": order.clip_frames,
            **{name: count - self._before[name] for name, count in self._count_frames().items()},
        }

    def epoch(self) -> Iterator[common.Batch]:
        if self._is_speed:
            # One that was broken off is not gone on with: what it has left is no epoch.
            self._loaders[0].set_epoch(self._num_begun)
            self._num_begun += 1
            self._before = self._count_frames()
        if len(self._loaders) == 1:
            yield from map(common.ids, self._loaders[0])
            return
        with ThreadPoolExecutor(len(self._loaders)) as pool:
            ranks = list(pool.map(self._read_rank, self._loaders))
        yield from chain.from_iterable(zip(*ranks, strict=True))

    def _count_frames(self) -> dict[str, int]:
        stats = self._loaders[0].stats()
        return {"decoded_frames": stats.decoded_frames, "kept_frames": stats.kept_frames}

    def _read_rank(self, loader: rp.RankLoader) -> list[common.Batch]:
        return [common.ids(batch) for batch in islice(loader, self._stop)]

    def state(self) -> Any:
        return self._loaders[0].state_dict()

    def load(self, state: Any) -> None:
        for loader in self._loaders:
            loader.load_state_dict(state)


def start_ray() -> None:
    """Start a Ray of this process alone; imported here, since raypipe as it comes needs none."""
    import ray

    ray.init(
        address="local", num_cpus=os.cpu_count(), include_dashboard=False, logging_level="error", log_to_driver=False
    )


if __name__ == "__main__":
    common.run(Raypipe)
