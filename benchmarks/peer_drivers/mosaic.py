"""MosaicML Streaming on a copy in its own format, with JPEG frames of quality 95."""

from collections.abc import Iterator
from typing import Any

import common
import torch
from frames import Frames, from_jpeg, to_jpeg
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset


def convert(request: common.Request) -> None:
    """Write the copy: a sample a row, with its action chunk."""
    frames = Frames(request.root, request.action_frames)
    columns = {
        "index": "int",
        "episode_index": "int",
        "action": "ndarray:float32",
        "observation.state": "ndarray:float32",
    }
    columns |= dict.fromkeys(frames.cameras, "bytes")
    with MDSWriter(out=request.copy, columns=columns) as out:
        for episode in range(len(frames.episodes)):
            for sample in frames.read(episode, *frames.bounds(episode)):
                out.write({**sample, **{camera: to_jpeg(sample[camera]) for camera in frames.cameras}})


class Samples(StreamingDataset):
    """Decodes the frames of a sample."""

    def __getitem__(self, at: int) -> Any:
        sample = super().__getitem__(at)
        return {name: from_jpeg(value) if isinstance(value, bytes) else value for name, value in sample.items()}


class Mosaic:
    """Shuffled by its default algorithm, py1e."""

    def __init__(self, request: common.Request) -> None:
        self._dataset = Samples(
            local=request.copy, shuffle=True, shuffle_seed=request.seed, batch_size=request.batch_size
        )
        self._loader = StreamingDataLoader(
            self._dataset, batch_size=request.batch_size, num_workers=request.num_workers, persistent_workers=True
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
    common.run(Mosaic, convert)
