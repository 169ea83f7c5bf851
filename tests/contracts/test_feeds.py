"""Two feeds, two executors, one order: batches, pixels, states, skips and accounts are the same, bit for bit."""

import json
import pickle
from itertools import islice

import pytest
import torch
from batches import WINDOWS, varied_spec
from mixture_cases import write_unlike
from ray_session import run_ranks

from raypipe.feed.local import can_read_here, room_for
from raypipe.mixture import open_dataset
from raypipe.pipeline import Pipeline
from raypipe.testing import write_dataset

pytestmark = pytest.mark.usefixtures("ray_cluster")

FEEDS = {
    "ray, rank": ({"where": "rank"}, "ray"),
    "ray, cluster": ({"where": "cluster"}, "ray"),
}
"""Each is compared with the local feed."""


WORLDS = {"one rank": (1,), "other ranks": (2, 3)}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """A dataset with windows on everything and relative actions, one episode without rows and one without a video."""
    root = write_dataset(tmp_path_factory.mktemp("feeds") / "dataset", varied_spec("v2.1"))
    dataset = open_dataset(str(root)).windowed(offsets=WINDOWS).with_actions({"mode": "relative", "absolute": [5]})
    (root / "data/chunk-000/episode_000002.parquet").unlink()
    (video,) = (root / "videos").rglob("episode_000006.mp4")
    video.write_bytes(video.read_bytes()[:200])
    return dataset


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    """A mixture of unlike robots."""
    return open_dataset(str(write_unlike(tmp_path_factory.mktemp("unlike"))))


def run(pipe, transport, world_sizes):
    """Run an epoch that goes on with other ranks after 3 steps; return the batches, the state and what was skipped."""
    came, state, loaders = [], "", []
    for world_size in world_sizes:
        loaders = pipe.loaders(world_size, transport=transport, progress=False)
        for loader in loaders if state else ():
            loader.load_state_dict(json.loads(state))
        stop = None if world_size == world_sizes[-1] else 3
        came.append(run_ranks(loaders, lambda loader, stop=stop: list(islice(loader, stop))))
        state = json.dumps(loaders[0].state_dict(), sort_keys=True)
    return came, state, [loader.skipped for loader in loaders]


def assert_same_run(make_pipe, feed, world_sizes):
    decode, transport = FEEDS[feed]

    local = run(make_pipe({}), "local", world_sizes)
    other = run(make_pipe(decode), transport, world_sizes)

    assert local[1:] == other[1:]
    for ranks, other_ranks in zip(local[0], other[0], strict=True):
        for batches, other_batches in zip(ranks, other_ranks, strict=True):
            assert len(batches) > 1
            assert_same_batches(batches, other_batches)


def assert_same_batches(batches, others):
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == other[key].dtype
                assert torch.equal(value, other[key]), key
            else:
                assert value == other[key], key


def test_feeds_give_the_same_batches_of_weighted_frames_also_after_a_resume(varied):
    def make_pipe(decode):
        parts = {"weights": {0: 0, 2: 3.5, 4: 0.4}, "selection": {"every": 2}, "order": {"live_spans": 4}}
        return Pipeline(varied["v3.0"], batch_size=2, seed=2, decode=decode, **parts)

    assert_same_run(make_pipe, "ray, rank", WORLDS["other ranks"])


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("world_sizes", WORLDS.values(), ids=WORLDS)
def test_feeds_give_the_same_batches_pixel_for_pixel_also_after_a_resume(varied, feed, world_sizes):
    def make_pipe(decode):
        order = {"live_spans": 4, "clip_frames": 2}
        return Pipeline(varied["v3.0"], batch_size=4, seed=2, order=order, decode={**decode, "resize": (20, 16)})

    assert_same_run(make_pipe, feed, world_sizes)


@pytest.mark.filterwarnings("ignore:rank . left out")
@pytest.mark.parametrize("feed", FEEDS)
def test_feeds_leave_out_the_same_frames(damaged, feed):
    def make_pipe(decode):
        policy = {"on_bad_episode": "skip", "max_bad_episodes": 2}
        return Pipeline(damaged, batch_size=4, seed=5, order={"live_spans": 3}, decode=decode, **policy)

    assert_same_run(make_pipe, feed, (2, 3))


@pytest.mark.filterwarnings("ignore:rank . left out")
def test_rows_that_ranks_read_while_ray_starts_are_those_of_ray(damaged, monkeypatch):
    monkeypatch.setattr("raypipe.feed.feeder.can_read_here", can_read_here)

    def make_pipe(decode):
        policy = {"on_bad_episode": "skip", "max_bad_episodes": 2}
        return Pipeline(damaged, batch_size=4, seed=5, order={"live_spans": 3}, decode=decode, **policy)

    assert_same_run(make_pipe, "ray, rank", (2, 3))


def test_rank_reads_its_first_blocks_itself_until_ray_sends_one(varied, monkeypatch):
    monkeypatch.setattr("raypipe.feed.feeder.can_read_here", can_read_here)
    pipe = Pipeline(varied["v3.0"], batch_size=4, seed=2, order={"live_spans": 4}, feed={"spans_per_block": 1})
    loader = pipe.loader(transport="ray", progress=False)

    batches = list(loader)

    # Ray sends all blocks; those that the rank had read before came twice.
    world, num_blocks = pipe.plan(), loader.stats().received_blocks
    num_spans = len(world.rank(0).queue)
    assert num_spans < num_blocks <= num_spans + room_for(world, world.rank(0), 1)
    assert_same_batches(batches, list(pipe.loader(transport="local")))


@pytest.mark.filterwarnings("ignore:rank . left out")
def test_lone_rank_with_room_for_the_whole_epoch_reads_it_alone_unless_data_is_bad(varied, damaged, monkeypatch):
    monkeypatch.setattr("raypipe.feed.feeder.can_read_here", can_read_here)
    policy = {"on_bad_episode": "skip", "max_bad_episodes": 2, "feed": {"spans_per_block": 1}}
    sound, broken = (Pipeline(dataset, batch_size=4, seed=2, **policy) for dataset in (varied["v3.0"], damaged))
    loaders = [pipe.loader(transport="ray", progress=False, num_epochs=2) for pipe in (sound, broken)]

    batches = [list(loader.steps(2 * len(loader))) for loader in loaders]

    for pipe, came in zip((sound, broken), batches, strict=True):
        local = pipe.loader(transport="local", progress=False, num_epochs=2)
        assert_same_batches(came, list(local.steps(2 * len(local))))
    # Every block came once: Ray sent none.
    num_spans = len(sound.plan().rank(0).queue)
    assert loaders[0].stats().received_blocks == 2 * num_spans


def test_copies_of_a_lone_loader_that_has_asked_ray_read_for_themselves(varied):
    pipe = Pipeline(varied["v3.0"], batch_size=4, seed=2, order={"live_spans": 4})
    loader = pipe.loader(transport="ray", progress=False)
    first = list(islice(loader, 3))
    loader.close()

    rests = [list(copy) for copy in (pickle.loads(pickle.dumps(loader)), pickle.loads(pickle.dumps(loader)))]

    whole = list(pipe.loader(transport="local", progress=False))
    for rest in rests:
        assert_same_batches(first + rest, whole)


def test_feeds_give_the_same_batches_of_a_mixture(unlike):
    def make_pipe(decode):
        return Pipeline(unlike, batch_size=6, seed=1, order={"live_spans": 4}, decode=decode)

    assert_same_run(make_pipe, "ray, cluster", (2, 1))
