"""LitData on a copy in its own format, with JPEG frames of quality 95."""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import common
import torch
from frames import Frames, from_jpeg, to_jpeg
from litdata import StreamingDataLoader, StreamingDataset, optimize


def read_episode(frames: Frames, episode: int) -> Iterator[dict[str, Any]]:
    """Yield the samples of the copy: with their action chunk."""
    for sample in frames.read(episode, *frames.bounds(episode)):
        yield {**sample, **{camera: to_jpeg(sample[camera]) for camera in frames.cameras}}


def convert(request: common.Request) -> None:
    """Write the copy."""
    frames = Frames(request.root, request.action_frames)
    optimize(
        fn=partial(read_episode, frames),
        inputs=list(range(len(frames.episodes))),
        output_dir=request.copy,
        chunk_bytes="64MB",
        num_workers=1,
        verbose=False,
    )


class Samples(StreamingDataset):
    """Decodes the frames of a sample."""

    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        return {
            name: from_jpeg(value) if isinstance(value, bytes | memoryview) else value for name, value in sample.items()
        }


class Lit:
    """Shuffled by chunks and inside them, as it does by default."""

    def __init__(self, request: common.Request) -> None:
        if request.world_size > 1:
            torch.distributed.init_process_group("gloo", rank=request.rank, world_size=request.world_size)
        dataset = Samples(input_dir=request.copy, shuffle=True, drop_last=False, seed=request.seed)
        self._loader = StreamingDataLoader(
            dataset, batch_size=request.batch_size, num_workers=request.num_workers, persistent_workers=True
        )

    def epoch(self) -> Iterator[common.Batch]:
        for batch in self._loader:
            yield common.ids(batch)

    def state(self) -> Any:
        return self._loader.state_dict()

    def load(self, state: Any) -> None:
        self._loader.load_state_dict(state)


if __name__ == "__main__":
    os.environ.setdefault("DISABLE_VERSION_CHECK", "1")
    torch.set_num_threads(1)
    common.run(Lit, convert)
