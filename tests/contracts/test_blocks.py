"""One block per episode, whatever their number and size."""

import pytest
from batches import frames_of_all, frames_of_dataset, rows_spec

from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline
from raypipe.testing import write_dataset

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.mark.parametrize(
    "lengths",
    [
        (7, 1, 12, 5, 9, 8_000),
        # Fewer episodes than CPUs.
        (20_000,),
    ],
    ids=["many and a large one", "a large one"],
)
def test_every_episode_is_one_block(tmp_path, lengths):
    dataset = open_dataset(str(write_dataset(tmp_path / "dataset", rows_spec(lengths))))
    pipe = Pipeline(dataset, batch_size=1000, seed=0, feed={"spans_per_block": 1})
    loader = pipe.loader()

    batches = list(loader)

    assert loader.stats().received_blocks == len(lengths)
    assert sorted(frames_of_all(batches)) == frames_of_dataset(dataset)
