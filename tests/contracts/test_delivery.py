"""Every frame comes exactly once, in the planned order, with the same values, wherever and however it travels."""

from dataclasses import dataclass, field

import pytest
from batches import MODES, assert_equals_samples, frames_of, frames_of_all, frames_of_dataset, planned_epoch
from ray_session import ensure_ray, run_ranks
from slow_meta import slowed

from raypipe.pipeline import Pipeline

ORDER = {"live_spans": 3}


@dataclass(frozen=True, kw_only=True)
class Case:
    mode: str
    world_size: int
    num_cpus: int = 2
    salt: int = 0
    """Reads are slowed down by it; 0 is not at all."""
    feed: dict = field(default_factory=dict)
    prefetch_batches: int = 2

    def __str__(self):
        feed = ",".join(f"{name}={value}" for name, value in self.feed.items())
        return f"{self.mode},{self.world_size} ranks,{self.num_cpus} CPUs,salt {self.salt},{feed}"


# Nearly every pair of values of two settings is in one of these. Every further split starts an actor, which
# costs seconds, so there are few of them. Cases with equal CPUs stand together: they share a Ray.
CASES = [
    Case(mode="cluster", world_size=2, num_cpus=8, salt=1, feed={"prefetch_blocks": 1}),
    Case(mode="rank", world_size=3, num_cpus=8, salt=2, feed={"ranks_per_split": 2}, prefetch_batches=1),
    Case(mode="rank", world_size=2, num_cpus=1, salt=3, feed={"blocks_per_chapter": 6}, prefetch_batches=4),
    Case(mode="cluster", world_size=3, num_cpus=1, feed={"spans_per_block": 2}),
    Case(mode="rank", world_size=1, feed={"prefetch_blocks": 1}),
    Case(mode="rank", world_size=3, salt=4, feed={"spans_per_block": 3}, prefetch_batches=1),
    Case(mode="rank", world_size=2, feed={"blocks_per_chapter": 3, "spans_per_block": 2}),
    Case(mode="cluster", world_size=2, salt=5, feed={"blocks_per_chapter": 3, "ranks_per_split": 1}),
]


@dataclass(frozen=True)
class Epoch:
    dataset: object
    world: object
    ranks: list
    """The batches of every rank."""


@pytest.fixture(scope="module", params=CASES, ids=str)
def epoch(request, varied):
    """An epoch as it came through Ray."""
    case = request.param
    ensure_ray(case.num_cpus)
    dataset = varied["v3.0"]
    pipe = Pipeline(
        slowed(dataset, case.salt) if case.salt else dataset,
        batch_size=4,
        seed=5,
        order=ORDER,
        decode=MODES[case.mode],
        feed=case.feed,
    )
    loaders = pipe.loaders(case.world_size, prefetch_batches=case.prefetch_batches)
    return Epoch(dataset, pipe.plan(world_size=case.world_size), run_ranks(loaders))


def test_batches_come_in_the_planned_order(epoch):
    came = [[frames_of(batch) for batch in batches] for batches in epoch.ranks]

    assert came == [planned_epoch(epoch.world, rank) for rank in range(epoch.world.world_size)]


def test_every_frame_comes_exactly_once(epoch):
    came = [frame for batches in epoch.ranks for frame in frames_of_all(batches)]

    assert sorted(came) == frames_of_dataset(epoch.dataset)


def test_every_rank_has_the_same_number_of_batches(epoch):
    assert {len(batches) for batches in epoch.ranks} == {epoch.world.num_steps}


def test_every_value_is_that_of_the_reference_path(epoch):
    for batches in epoch.ranks:
        for batch in batches:
            assert_equals_samples(batch, epoch.dataset)
