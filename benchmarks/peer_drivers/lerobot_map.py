"""LeRobot's map-style dataset, as `lerobot-train` loads it: its own sampler, shared out by accelerate."""

from collections.abc import Iterator
from typing import Any

import common
import torch
from accelerate.data_loader import BatchSamplerShard
from lerobot.datasets import EpisodeAwareSampler, LeRobotDataset, compute_sampler_state
from torch.utils.data import BatchSampler, DataLoader


class LerobotMap:
    """Shuffled, cameras as uint8."""

    def __init__(self, request: common.Request) -> None:
        self._request = request
        self._num_steps = 0
        dataset = LeRobotDataset(
            "peers/dataset", root=request.root, delta_timestamps=request.windows(), return_uint8=True
        )
        episodes = dataset.meta.episodes
        bounds = episodes["dataset_from_index"], episodes["dataset_to_index"]
        self._sampler = EpisodeAwareSampler(*bounds, shuffle=True, seed=request.seed)
        batches: Any = BatchSampler(self._sampler, request.batch_size, drop_last=False)
        if request.world_size > 1:
            batches = BatchSamplerShard(batches, num_processes=request.world_size, process_index=request.rank)
        self._loader = DataLoader(
            dataset, batch_sampler=batches, num_workers=request.num_workers, persistent_workers=request.mode == "speed"
        )

    def epoch(self) -> Iterator[common.Batch]:
        for batch in self._loader:
            self._num_steps += 1
            yield common.ids(batch)

    def state(self) -> Any:
        return {"step": self._num_steps, "num_processes": self._request.world_size}

    def load(self, state: Any) -> None:
        request = self._request
        place = compute_sampler_state(state["step"], len(self._sampler), request.batch_size, state["num_processes"])
        self._sampler.load_state_dict(place)


if __name__ == "__main__":
    torch.set_num_threads(1)
    common.run(LerobotMap)
