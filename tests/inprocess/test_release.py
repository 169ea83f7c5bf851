"""Past epochs and loaders that nobody holds leave nothing behind, without `close()` and without the collector."""

import pytest
from batches import local_loader
from footprint import (
    footprint,
    no_collector,
    num_descriptors,
    resident_bytes,
    settled_descriptors,
    wait_until_within,
)

from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline


@pytest.fixture
def pipe(tiny_dataset):
    # One thread opens each video once, in the first epoch; of several, each would open some of them at any time.
    return Pipeline(open_dataset(str(tiny_dataset)), batch_size=8, seed=0, decode={"num_threads": 1})


@pytest.mark.timeout(120)
def test_fifty_epochs_leave_what_three_do(pipe):
    with no_collector():
        # What is imported and opened once, by the first loader.
        list(local_loader(pipe))
        before, loader = footprint(), local_loader(pipe, num_epochs=50)
        seen, descriptors, sizes = [], [], []
        for epoch in range(50):
            for _ in loader:
                pass
            descriptors.append(num_descriptors())
            sizes.append(resident_bytes())
            if epoch % 10 == 2:
                seen.append(footprint())
        # An epoch that left one open would leave 47. Threads of a Ray that this process has used open some themselves.
        most = max(descriptors[:3]) + 5
        settled = settled_descriptors(most)
        del loader, _
        after = wait_until_within(before)

    # The run that is opened ahead, and the one before it, with which it shares its room.
    assert max(one.runs for one in seen) <= before.runs + 2
    assert settled <= most, descriptors
    assert sizes[-1] <= 1.1 * sizes[2]
    assert after.is_within(before), (before, after)


def broken_off(loader):
    next(iter(loader))


def ended_with_the_next_one_opened(loader):
    list(loader)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("use", [broken_off, ended_with_the_next_one_opened])
def test_loaders_that_are_dropped_without_close_leave_nothing(pipe, use):
    with local_loader(pipe) as first:
        use(first)
    del first
    with no_collector():
        before = footprint()
        for _ in range(20):
            use(local_loader(pipe, num_epochs=3))
        after = wait_until_within(before)

    assert after.is_within(before), (before, after)
