"""Past epochs and dropped loaders on Ray leave no actor, thread or open file, without `close()` and the collector."""

from dataclasses import replace

import pytest
from footprint import footprint, no_collector, wait_until_within

from raypipe.pipeline import Pipeline

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_epochs_and_dropped_loaders_leave_nothing_on_ray(rows):
    pipe = Pipeline(rows, batch_size=16, seed=0)
    with no_collector():
        before, seen = footprint(), []
        loader = pipe.loader(num_epochs=4)
        for _ in range(4):
            list(loader)
            seen.append(footprint())
        del loader
        # Ray opens some files once.
        first = wait_until_within(replace(before, files=seen[-1].files))
        for _ in range(2):
            # With the next epoch opened, or being opened, when it is dropped.
            list(pipe.loader(num_epochs=2))
        after = wait_until_within(first)

    assert max(one.runs for one in seen) <= before.runs + 2
    # The feeder, and the splits of the epoch that ends, of the one before it, which is ending, and of the next.
    assert max(one.actors for one in seen) <= before.actors + 4
    assert first.is_within(replace(before, files=first.files)), (before, first)
    assert after.is_within(first), (first, after)
