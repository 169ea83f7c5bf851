"""torch's DataLoader over raypipe's reference dataset, one sample at a time; it has no way to go on."""

from collections.abc import Iterator

import common
import torch
from torch.utils.data import DataLoader

import raypipe as rp


class TorchLoader:
    """Shuffled over the whole dataset."""

    def __init__(self, request: common.Request) -> None:
        dataset = rp.open_dataset(request.root).windowed(request.windows())
        self._loader = DataLoader(
            dataset,
            batch_size=request.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(request.seed),
            num_workers=request.num_workers,
            persistent_workers=True,
        )

    def epoch(self) -> Iterator[common.Batch]:
        for batch in self._loader:
            yield common.ids(batch)


if __name__ == "__main__":
    torch.set_num_threads(1)
    common.run(TorchLoader)
