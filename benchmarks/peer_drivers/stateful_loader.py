"""torchdata's StatefulDataLoader over raypipe's reference dataset, one sample at a time."""

from collections.abc import Iterator
from typing import Any

import common
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

import raypipe as rp


class StatefulLoader:
    """Shuffled over the whole dataset; among ranks, by its distributed sampler."""

    def __init__(self, request: common.Request) -> None:
        dataset = rp.open_dataset(request.root).windowed(request.windows())
        sampler: Any = RandomSampler(dataset, generator=torch.Generator().manual_seed(request.seed))
        if request.world_size > 1:
            sampler = StatefulDistributedSampler(
                dataset, num_replicas=request.world_size, rank=request.rank, seed=request.seed
            )
        self._loader = StatefulDataLoader(
            dataset,
            batch_size=request.batch_size,
            sampler=sampler,
            num_workers=request.num_workers,
            persistent_workers=True,
        )

    def epoch(self) -> Iterator[common.Batch]:
        for batch in self._loader:
            yield common.ids(batch)

    def state(self) -> Any:
        return self._loader.state_dict()

    def load(self, state: Any) -> None:
        self._loader.load_state_dict(state)


if __name__ == "__main__":
    torch.set_num_threads(1)
    common.run(StatefulLoader)
