"""The end of an epoch on several ranks, and global batches on several numbers of them."""

import pytest
from batches import frames_of_all, frames_of_dataset, planned_epoch
from ray_session import run_ranks

from raypipe.pipeline import Pipeline

# 57 frames on 2 ranks of batches of 4: lanes of 29 and 28, hence 7 full steps and an extra frame. The other tail,
# "short", is that of all other tests.
SIZES = {
    "drop": [[4] * 7, [4] * 7],
    "wrap": [[4] * 8, [4] * 8],
}


@pytest.mark.parametrize("tail", SIZES)
def test_every_tail_emits_what_it_says_on_two_ranks(rows, tail):
    pipe = Pipeline(rows, batch_size=4, seed=1, order={"live_spans": 3, "tail": tail})

    ranks = run_ranks(pipe.loaders(2, transport="local"))

    left = pipe.plan(world_size=2).left_over()
    left_over = list(zip(left.episode.tolist(), left.frame.tolist(), strict=True))
    repeats = [
        is_repeat
        for batches in ranks
        for batch in batches
        for is_repeat in (batch["is_repeat"].tolist() if "is_repeat" in batch else [False] * len(batch["index"]))
    ]
    emitted = [frame for batches in ranks for frame in frames_of_all(batches)]
    once = [frame for frame, is_repeat in zip(emitted, repeats, strict=True) if not is_repeat]
    assert [[len(batch["index"]) for batch in batches] for batches in ranks] == SIZES[tail]
    assert len(left_over) == (tail == "drop")
    assert sum(repeats) == (7 if tail == "wrap" else 0)
    assert sorted(once + left_over) == frames_of_dataset(rows)


def test_global_batches_are_the_same_sets_on_every_world_size_that_divides_the_lanes(rows):
    pipe = Pipeline(rows, batch_size={"size": 8, "scope": "global"}, seed=1, order={"live_spans": 3, "lanes": 4})

    sets = {}
    for world_size in (2, 4):
        ranks = run_ranks(pipe.loaders(world_size, transport="local"))
        sets[world_size] = [sorted(frames_of_all(step)) for step in zip(*ranks, strict=True)]

    on_one_rank = [sorted(frames) for frames in planned_epoch(pipe.plan(), 0)]
    assert sets[2] == sets[4] == on_one_rank
