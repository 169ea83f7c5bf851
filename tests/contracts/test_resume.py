"""Stop after a batch, restore from JSON in new loaders, also on another number of ranks: the same rest."""

import json
import re
from itertools import islice

import pytest
from batches import frames_of, frames_of_all, frames_of_dataset, planned_epoch, planned_frames
from ray_session import run_ranks

from raypipe.errors import ResumeError
from raypipe.pipeline import Pipeline

pytestmark = pytest.mark.usefixtures("ray_cluster")


def train(pipe, world_size, state, num_steps=None):
    """Let new loaders go on from a state for some steps; return the batches of every rank, and the state."""
    loaders = pipe.loaders(world_size)
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(json.loads(json.dumps(state)))
    ranks = run_ranks(loaders, lambda loader: list(islice(loader, num_steps)))
    states = [loader.state_dict() for loader in loaders]
    assert all(other == states[0] for other in states)
    return ranks, states[0]


def test_rest_of_an_epoch_is_the_same_in_new_loaders_and_exactly_once_on_other_ranks(rows):
    # 4 lanes; 2 ranks divide them and 3 do not: there the rest becomes a new leg.
    batch = {"size": 12, "scope": "global"}
    pipe = Pipeline(rows, batch_size=batch, seed=1, order={"live_spans": 3, "lanes": 4})

    first, state = train(pipe, 2, None, 1)
    second, state = train(pipe, 2, state, 2)
    third, end = train(pipe, 3, state)

    planned = pipe.plan(world_size=2)
    for rank in range(2):
        came = [frames_of(batch) for batch in first[rank] + second[rank]]
        assert came == planned_epoch(planned, rank)[:3]
    emitted = [frame for ranks in (first, second, third) for batches in ranks for frame in frames_of_all(batches)]
    assert sorted(emitted) == frames_of_dataset(rows)
    assert (end["epoch"], end["legs"]) == (1, [])


@pytest.mark.parametrize("differs", ["state", "number of loads"])
def test_ranks_that_load_different_states_are_all_told_so_before_the_first_batch(rows, differs):
    pipe = Pipeline(rows, batch_size=4, seed=1, order={"live_spans": 3})
    loaders = pipe.loaders(3)
    for rank, loader in enumerate(loaders):
        if differs == "state" or rank == 1:
            loader.load_state_dict(pipe.state_at(2 + (rank == 1), world_size=3))

    messages = run_ranks(loaders, message_of_error)

    assert len(set(messages)) == 1
    assert re.search(
        r"^ranks do not stand.*ranks 0, 2 asked for epoch 0, legs .*; rank 1 asked for epoch 0, legs \[\(3, 12\)\]",
        messages[0],
    )
    assert "Load the same state on every rank" in messages[0]


def message_of_error(loader):
    with pytest.raises(ResumeError) as caught:
        next(iter(loader))
    return str(caught.value)


def test_ranks_that_differed_may_try_again_together(rows):
    pipe = Pipeline(rows, batch_size=4, seed=1, order={"live_spans": 3})
    loaders = pipe.loaders(2)
    loaders[1].set_epoch(3)
    run_ranks(loaders, message_of_error)
    for loader in loaders:
        loader.load_state_dict(pipe.state_at(2, world_size=2))

    rests = run_ranks(loaders)

    assert [frames_of(rank[0]) for rank in rests] == [planned_frames(pipe.plan(world_size=2), 2, r) for r in range(2)]


def test_rest_that_is_too_little_for_the_ranks_ends_the_epoch_without_a_batch(rows):
    pipe = Pipeline(rows, batch_size=4, seed=1, order={"live_spans": 3})
    # 57 - 14 * 4 leaves one frame, which two ranks cannot share.
    loaders = pipe.loaders(2, transport="local")
    for loader in loaders:
        loader.load_state_dict(pipe.state_at(14))

    rests = run_ranks(loaders)

    assert rests == [[], []]
    assert [loader.epoch for loader in loaders] == [1, 1]
