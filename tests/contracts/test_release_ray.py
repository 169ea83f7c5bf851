"""Past epochs and dropped loaders on Ray leave nothing behind, without `close()` and without the collector.

Of a dropped loader a socket stays open for a while: see `Footprint.files`.
"""

import os
from dataclasses import replace

import pytest
from footprint import footprint, no_collector, num_descriptors, resident_bytes, wait_until_within

from raypipe.pipeline import Pipeline

pytestmark = pytest.mark.usefixtures("ray_cluster")

NUM_EPOCHS = int(os.environ.get("RAYPIPE_RELEASE_EPOCHS", "4"))
"""`make epochs` does 50: an epoch on Ray takes a second or two, however small it is."""


@pytest.mark.timeout(max(180, 10 * NUM_EPOCHS))
def test_epochs_and_dropped_loaders_leave_nothing_on_ray(rows):
    pipe = Pipeline(rows, batch_size=16, seed=0)
    with no_collector():
        before, seen, descriptors, sizes = footprint(), [], [], []
        loader = pipe.loader(num_epochs=NUM_EPOCHS)
        for _ in range(NUM_EPOCHS):
            list(loader)
            seen.append(footprint())
            descriptors.append(num_descriptors())
            sizes.append(resident_bytes())
        del loader
        # Ray opens some files once.
        first = wait_until_within(replace(before, files=seen[-1].files))
        for _ in range(2):
            # With the next epoch opened, or being opened, when it is dropped.
            list(pipe.loader(num_epochs=2))
        after = wait_until_within(first)

    assert max(one.runs for one in seen) <= before.runs + 2
    # The feeder, and one split for all epochs.
    assert max(one.actors for one in seen) <= before.actors + 2
    assert descriptors[-1] <= max(descriptors[:3]), descriptors
    assert sizes[-1] <= 1.1 * sizes[2]
    assert first.is_within(replace(before, files=first.files)), (before, first)
    assert after.is_within(first), (first, after)


def test_epochs_that_are_broken_off_leave_one_split(rows):
    loader = Pipeline(rows, batch_size=4, seed=0).loader()
    before = footprint()

    for _ in range(3):
        next(iter(loader))
    after = wait_until_within(replace(before, runs=99, loaders=99, threads=99, files=999, actors=before.actors + 2))

    assert after.actors == before.actors + 2
