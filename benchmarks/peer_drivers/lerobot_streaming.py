"""LeRobot's streaming dataset on local files; it has no way to go on."""

from collections.abc import Iterator

import common
import torch
from lerobot.datasets import StreamingLeRobotDataset
from torch.utils.data import DataLoader


class LerobotStreaming:
    """Shuffled in its buffer of 1,000 frames a worker."""

    def __init__(self, request: common.Request) -> None:
        dataset = StreamingLeRobotDataset(
            "peers/dataset", root=request.root, delta_timestamps=request.windows(), return_uint8=True, seed=request.seed
        )
        self._loader = DataLoader(
            dataset, batch_size=request.batch_size, num_workers=request.num_workers, persistent_workers=True
        )

    def epoch(self) -> Iterator[common.Batch]:
        for batch in self._loader:
            yield common.ids(batch)


if __name__ == "__main__":
    torch.set_num_threads(1)
    common.run(LerobotStreaming)
