"""Breaks, new epochs, ranks in processes of their own, and two pipelines at once."""

import os
import subprocess
import sys
from itertools import islice

import pytest
import ray
from batches import frames_of, frames_of_dataset, planned_epoch
from ray_session import run_ranks

from raypipe.pipeline import Pipeline

pytestmark = pytest.mark.usefixtures("ray_cluster")


def rows_pipeline(rows, **parts):
    return Pipeline(rows, **{"batch_size": 4, "seed": 1, "order": {"live_spans": 3}, **parts})


def came(batches):
    return [frames_of(batch) for batch in batches]


def test_iteration_after_an_early_break_on_all_ranks_gives_the_rest(rows):
    pipe = rows_pipeline(rows)
    loaders = pipe.loaders(2)

    first = run_ranks(loaders, lambda loader: came(islice(loader, 3)))
    rest = run_ranks(loaders, came)

    world = pipe.plan(world_size=2)
    assert [first[rank] + rest[rank] for rank in range(2)] == [planned_epoch(world, rank) for rank in range(2)]


def test_new_epoch_after_an_early_break_is_whole(rows):
    pipe = rows_pipeline(rows)
    loaders = pipe.loaders(2)
    run_ranks(loaders, lambda loader: came(islice(loader, 3)))

    for loader in loaders:
        loader.set_epoch(5)
    whole = run_ranks(loaders, came)

    world = pipe.plan(epoch=5, world_size=2)
    assert whole == [planned_epoch(world, rank) for rank in range(2)]
    assert [loader.epoch for loader in loaders] == [6, 6]


def test_ranks_in_processes_of_their_own_cross_epochs_together(rows):
    @ray.remote(num_cpus=0)
    def train(loader):
        emitted = [
            list(zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True))
            for batch in loader.steps(11)
        ]
        return emitted, loader.state_dict()

    pipe = rows_pipeline(rows)

    (first, state), (second, other_state) = ray.get([train.remote(loader) for loader in pipe.loaders(2)], timeout=150)

    epochs = [pipe.plan(epoch=epoch, world_size=2) for epoch in range(2)]
    wanted = [[step for world in epochs for step in planned_epoch(world, rank)] for rank in range(2)]
    assert [first, second] == [steps[:11] for steps in wanted]
    assert state == other_state == pipe.state_at(11, world_size=2)


def test_two_pipelines_in_one_ray_at_once_do_not_mix(rows, varied):
    train = rows_pipeline(rows)
    evaluation = Pipeline(varied["v3.0"], batch_size=8, seed=1, order={"shuffle": False}, decode={"where": "cluster"})

    trained, evaluated = run_ranks([train.loader(), evaluation.loader()], came)

    assert trained == planned_epoch(train.plan(), 0)
    assert [frame for frames in evaluated for frame in frames] == frames_of_dataset(varied["v3.0"])


def test_epochs_that_are_known_to_follow_are_fetched_ahead_and_given_up_for_another(rows):
    pipe = rows_pipeline(rows)
    loader = pipe.loader(num_epochs=5)

    epochs = [came(loader) for _ in range(2)]
    loader.set_epoch(3)
    epochs.append(came(loader))
    loader.close()

    assert epochs == [planned_epoch(pipe.plan(epoch=epoch), 0) for epoch in (0, 1, 3)]
    assert loader.epoch == 4


def test_loaders_of_the_same_ranks_take_turns_with_epochs_fetched_ahead(rows):
    pipe = rows_pipeline(rows)

    def take_turns(loader):
        other = loader.with_settings(num_epochs=3)
        return [came(one) for _ in range(3) for one in (loader, other)]

    turns = run_ranks(pipe.loaders(2, num_epochs=3), take_turns)

    wanted = [pipe.plan(epoch=epoch, world_size=2) for epoch in range(3) for _ in range(2)]
    assert turns == [[planned_epoch(world, rank) for world in wanted] for rank in range(2)]


def test_epochs_of_other_lengths_follow_each_other_in_one_split(rows):
    pipe = rows_pipeline(rows, selection={"every": 3}, feed={"spans_per_block": 1, "blocks_per_chapter": 4})
    plans = [pipe.plan(epoch=epoch, world_size=2) for epoch in range(3)]

    epochs = run_ranks(pipe.loaders(2, num_epochs=3), lambda loader: [came(loader) for _ in range(3)])

    assert epochs == [[planned_epoch(world, rank) for world in plans] for rank in range(2)]
    assert len({len(plan.rank(0).queue) for plan in plans}) > 1


LEFT_UNDER_WAY = """
import sys, threading
import ray
import raypipe as rp
from raypipe.feed.feeder import end_feeders

ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
feed = {"spans_per_block": 1, "prefetch_blocks": 1}
pipe = rp.Pipeline(rp.open_dataset(sys.argv[1]), batch_size=2, seed=0, order={"live_spans": 1}, feed=feed)
loaders, has_begun = pipe.loaders(2, progress=False), threading.Barrier(3)

def train(loader):
    batches = iter(loader)
    next(batches)
    has_begun.wait()
    threading.Event().wait()

for loader in loaders:
    threading.Thread(target=train, args=(loader,), daemon=True).start()
has_begun.wait()
if sys.argv[2] == "shutdown":
    end_feeders()
    ray.shutdown()
print("fine", flush=True)
"""


@pytest.mark.parametrize("end", ["exit", "shutdown"])
def test_process_with_loaders_under_way_ends_clean(rows, end):
    # Memory that is freed is overwritten at once: what uses it ends the process.
    env = {**os.environ, "MALLOC_PERTURB_": "165"}
    command = [sys.executable, "-c", LEFT_UNDER_WAY, str(rows.meta.root), end]

    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)

    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-2000:]


QUIET = """
import sys
import raypipe as rp

pipe = rp.Pipeline(rp.open_dataset(sys.argv[1]), batch_size=8, seed=0)
print(sum(len(batch["index"]) for batch in pipe.loader(transport="ray")))
"""


def test_log_of_a_user_holds_no_lines_of_ray(rows):
    command = [sys.executable, "-c", QUIET, str(rows.meta.root)]

    # A Ray of its own, not that of the tests.
    env = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)

    started, num_frames = done.stdout.splitlines()
    assert started.startswith("raypipe: using Ray with")
    assert num_frames == "57"
    assert done.stderr == ""
