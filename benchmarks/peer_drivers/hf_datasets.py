"""Hugging Face datasets, streaming the parquet files; windows and videos are read by hand before its shuffle buffer."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import common
import torch
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from frames import Frames
from torchdata.stateful_dataloader import StatefulDataLoader

BUFFER = 1000
"""Samples of the shuffle buffer of a worker; the default of `datasets`."""


@cache
def open_frames(root: str, action_frames: int) -> Frames:
    """Return the reader of this process."""
    return Frames(root, action_frames)


class AddPixels:
    """Turns rows that follow each other into samples; one pass per run of an episode."""

    def __init__(self, root: str, action_frames: int) -> None:
        self._arguments = (root, action_frames)

    def __call__(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        frames, samples = open_frames(*self._arguments), []
        numbers, episodes, first = rows["index"], rows["episode_index"], 0
        for end in range(1, len(numbers) + 1):
            is_last = end == len(numbers)
            if is_last or episodes[end] != episodes[first] or numbers[end] != numbers[end - 1] + 1:
                samples += frames.read(episodes[first], numbers[first], numbers[end - 1] + 1)
                first = end
        return {name: [sample[name] for sample in samples] for name in (samples[0] if samples else ())}


class HfDatasets:
    """`load_dataset(streaming=True)` in torchdata's loader, as its documentation shows for saving a place."""

    def __init__(self, request: common.Request) -> None:
        files = sorted(str(path) for path in Path(request.root, "data").rglob("*.parquet"))
        data = load_dataset("parquet", data_files=files, split="train", streaming=True)
        columns = data.column_names
        if request.world_size > 1:
            data = split_dataset_by_node(data, rank=request.rank, world_size=request.world_size)
        add = AddPixels(request.root, request.action_frames)
        data = data.map(add, batched=True, batch_size=32, remove_columns=columns)
        self._data = data.shuffle(seed=request.seed, buffer_size=BUFFER, **request.options)
        self._loader = StatefulDataLoader(
            self._data, batch_size=request.batch_size, num_workers=request.num_workers, persistent_workers=True
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
    common.run(HfDatasets)
