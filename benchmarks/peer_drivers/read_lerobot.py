"""Ray's own reader of LeRobot datasets, one task per episode; it has no way to go on inside an epoch."""

from collections.abc import Iterator

import common
import numpy as np
import ray
import ray.data
import torch


class ReadLerobot:
    """In file order, or shuffled in a buffer of so many samples."""

    def __init__(self, request: common.Request) -> None:
        ray.init(
            address="local",
            num_cpus=request.num_workers,
            include_dashboard=False,
            logging_level="error",
            log_to_driver=False,
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
        self._batch_size = request.batch_size
        self._buffer = request.options["buffer"] or None
        self._data = ray.data.read_lerobot(request.root, read_granularity="episode", delta_timestamps=request.windows())

    def epoch(self) -> Iterator[common.Batch]:
        for batch in self._data.iter_batches(
            batch_size=self._batch_size, batch_format="numpy", local_shuffle_buffer_size=self._buffer
        ):
            # Cameras come as arrays of arrays, since their shapes may differ; training wants one tensor.
            tensors = {
                name: torch.from_numpy(np.stack(values) if values.dtype == object else values)
                for name, values in batch.items()
                if name not in ("task", "stats")
            }
            yield common.ids(tensors)


if __name__ == "__main__":
    common.run(ReadLerobot)
