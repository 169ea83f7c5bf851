"""``raypipe account`` and ``raypipe where``: what was handed over, and which frames a step had."""

import json

import numpy as np
import pytest
from account_cases import HandRun
from program import run_program

import raypipe
from raypipe.account import count_values
from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline
from raypipe.pipeline.config import row_bytes
from raypipe.plan import BatchSpec, OrderSpec, SelectionSpec, plan_epoch, plan_world, start
from raypipe.testing import SynthSpec, write_dataset
from raypipe.views.account import read_frames

SPEC = OrderSpec(seed=3, live_spans=2)


def run(*arguments):
    return run_program(*arguments)


def hand_run(root, **options):
    index, axis = read_frames(str(root), SelectionSpec())
    made = HandRun(index, SPEC, axis=axis, **options)
    made.root = str(root)
    return made


@pytest.fixture
def run_folder(tiny_dataset, tmp_path):
    """A run of 34 frames: a checkpoint after 2 steps, a crash, and another number of ranks up to the second epoch."""
    made = hand_run(tiny_dataset, bad={2})
    made.start(2, 3)
    made.steps(2)
    made.write_checkpoint(tmp_path / "checkpoint_000000")
    made.steps(1)
    made.write_heartbeat(tmp_path)
    made.crash()
    made.start(3, 2)
    made.steps(made.world.num_steps + 1)
    made.write_heartbeat(tmp_path)
    return tmp_path


def test_account_of_an_honest_run_is_exactly_once(run_folder):
    done = run("account", run_folder)

    assert done.returncode == 0, done.stderr
    assert "exactly once" in done.stdout
    assert "epoch 0: exactly once: " in done.stdout
    assert "epoch 1: exactly once so far: " in done.stdout
    assert "skipped: episode 2: " in done.stdout
    assert "episode 2 is bad" in done.stdout


def test_account_json_has_the_promised_keys(run_folder, tmp_path):
    printed = json.loads(run("account", run_folder, "--json").stdout)
    done = run("account", run_folder, "--json-file", tmp_path / "account.json")

    assert json.loads((tmp_path / "account.json").read_text()) == printed
    assert "exactly once" in done.stdout
    first, second = printed["epochs"]
    assert printed["is_exact"] is first["is_exact"] is True
    assert first["num_frames"] == 34
    assert first["num_emitted"] + first["num_skipped"] + first["num_left_over"] == 34
    assert first["num_rolled_back"] > 0
    assert (first["is_finished"], second["is_finished"]) == (True, False)
    assert sorted(printed) == ["epochs", "is_exact", "name", "place", "problem", "root", "state"]


def test_account_of_a_checkpoint_alone_is_up_to_its_state(run_folder):
    printed = json.loads(run("account", run_folder / "checkpoint_000000", "--json").stdout)

    (epoch,) = printed["epochs"]
    assert epoch["is_exact"]
    assert epoch["num_emitted"] + epoch["num_skipped"] == 12
    assert epoch["num_to_come"] == 22


def test_account_of_a_run_that_lost_frames_names_them_and_exits_with_1(tiny_dataset, tmp_path):
    lost = []

    def lose_one(handed):
        batch = handed[1][0]
        lost.append(int(batch.numbers[0]))
        handed[1][0] = type(batch)(
            numbers=batch.numbers[1:], is_repeat=batch.is_repeat[1:], lanes=batch.lanes, skipped=batch.skipped
        )

    made = hand_run(tiny_dataset, tamper=lose_one)
    made.start(2, 3)
    made.steps(2)
    made.write_checkpoint(tmp_path)

    done = run("account", tmp_path)

    assert done.returncode == 1, done.stderr
    assert "NOT exactly once: 1 frame missing" in done.stdout
    (frames,) = made.axis.name_frames(count_values(np.array(lost)))
    assert f"missing: {frames.describe()}" in done.stdout


def test_account_without_the_file_of_a_rank_exits_with_1(run_folder):
    (run_folder / "checkpoint_000000/raypipe/account/train/rank-00001-of-00002.parquet").unlink()

    done = run("account", run_folder / "checkpoint_000000")

    assert done.returncode == 1
    assert "has 1 of 2 files" in done.stdout
    assert "no record of rank 1" in done.stdout


def test_account_that_cannot_be_checked_exits_with_2(run_folder, tmp_path, tiny_dataset):
    raypipe.testing.write_dataset(tmp_path / "other", raypipe.testing.SynthSpec(lengths=(5, 6), cameras=()))

    for arguments, message in [
        ((tmp_path / "nothing",), "there is no folder"),
        ((tiny_dataset,), "there is no account in"),
        ((run_folder, "--root", tmp_path / "gone"), "no such folder"),
        ((run_folder, "--root", tmp_path / "other"), "the account is of another dataset"),
        ((run_folder, "--name", "val"), "no account of a loader 'val'"),
    ]:
        done = run("account", *arguments)
        assert done.returncode == 2, done.stdout
        assert message in done.stderr


def frames_of(printed):
    return [(frame["episode"], frame["frame"], frame["index"]) for frame in printed["frames"]]


def planned(root, epoch, step, rank, world_size=2, batch_size=3):
    index, axis = read_frames(str(root), SelectionSpec())
    begin = start(SPEC, world_size=world_size, epoch=epoch)
    plan = plan_epoch(index, begin.spec, epoch=epoch, legs=begin.legs)
    found = plan_world(plan, world_size=world_size, batch=BatchSpec(size=batch_size)).frames_at(step, rank)
    numbers = axis.starts_of(found.dataset, found.episode) + found.frame
    return list(zip(found.episode.tolist(), found.frame.tolist(), numbers.tolist(), strict=True))


OPTIONS = ("--batch-size", 3, "--world-size", 2, "--seed", 3, "--live-spans", 2, "--clip-frames", "span")


def test_where_tells_the_frames_of_the_plan(tiny_dataset):
    within = json.loads(run("where", 2, 1, "--root", tiny_dataset, *OPTIONS, "--epoch", 4, "--json").stdout)
    across = json.loads(run("where", 6 + 2, 1, "--root", tiny_dataset, *OPTIONS, "--json").stdout)

    assert frames_of(within) == planned(tiny_dataset, epoch=4, step=2, rank=1)
    assert (across["epoch"], across["step_in_epoch"]) == (1, 2)
    assert frames_of(across) == planned(tiny_dataset, epoch=1, step=2, rank=1)


def test_where_follows_the_ranks_and_legs_of_an_account(tiny_dataset, run_folder):
    made = hand_run(tiny_dataset)
    made.start(2, 3)
    first = made.world.frames_at(1, 1)
    made.steps(2)
    made.save()
    made.start(3, 2)
    second, num_steps = made.world.frames_at(2, 2), made.world.num_steps

    before = json.loads(run("where", 1, 1, "--account", run_folder, "--json").stdout)
    after = json.loads(run("where", 2 + 2, 2, "--account", run_folder, "--json").stdout)
    ahead = json.loads(run("where", 2 + num_steps + 3, 0, "--account", run_folder, "--json").stdout)
    later = json.loads(run("where", 1, 0, "--account", run_folder, "--epoch", 5, "--json").stdout)

    assert [frame["frame"] for frame in before["frames"]] == first.frame.tolist()
    assert [frame["episode"] for frame in after["frames"]] == second.episode.tolist()
    assert [frame["frame"] for frame in after["frames"]] == second.frame.tolist()
    assert (after["epoch"], after["step_in_epoch"], after["world_size"]) == (0, 4, 3)
    assert (ahead["epoch"], ahead["step_in_epoch"]) == (1, 3)
    assert frames_of(ahead) == planned(tiny_dataset, epoch=1, step=3, rank=0, world_size=3, batch_size=2)
    assert frames_of(later) == planned(tiny_dataset, epoch=5, step=1, rank=0, world_size=3, batch_size=2)


def test_where_marks_the_frames_that_an_account_skipped(run_folder):
    places = [(step, rank) for step in range(2) for rank in range(2)]
    steps = [json.loads(run("where", *place, "--account", run_folder, "--json").stdout)["frames"] for place in places]
    number = next(number for number, frames in enumerate(steps) if any(frame["is_skipped"] for frame in frames))
    words = run("where", *places[number], "--account", run_folder).stdout

    for frames in steps:
        assert [frame["is_skipped"] for frame in frames] == [frame["episode"] == 2 for frame in frames]
    assert "frames planned, of which" in words
    assert any(line.rstrip().endswith("skipped") for line in words.splitlines())


@pytest.mark.parametrize(("batch_size", "live_frames"), [(80, 10_000), (4, 5_500)], ids=["large batch", "small memory"])
def test_where_and_plan_take_the_order_that_a_pipeline_takes(batch_size, live_frames, tmp_path):
    # Not the defaults of `OrderSpec`: more live spans for a large batch, short ones for little memory.
    dataset = open_dataset(str(write_dataset(tmp_path / "made", SynthSpec(lengths=(300,) * 20, cameras=()))))
    live_bytes = live_frames * row_bytes(dataset)
    pipe = Pipeline(dataset, batch_size=batch_size, seed=5, live_bytes=live_bytes)
    options = ("--batch-size", batch_size, "--seed", 5, "--live-bytes", live_bytes)

    step = json.loads(run("where", 2, 0, "--root", tmp_path / "made", *options, "--json").stdout)
    plan = json.loads(run("plan", tmp_path / "made", "--world-size", 1, *options, "--json").stdout)

    order, found = pipe.config.order, pipe.plan(world_size=1).frames_at(2, 0)
    assert (order.live_spans, order.span_frames) != (128, "episode")
    assert (step["live_spans"], step["span_frames"]) == (order.live_spans, order.span_frames)
    assert (plan["live_spans"], plan["span_frames"]) == (order.live_spans, order.span_frames)
    assert [(one["episode"], one["frame"]) for one in step["frames"]] == list(
        zip(found.episode.tolist(), found.frame.tolist(), strict=True)
    )


def test_where_takes_the_clips_that_are_given(tiny_dataset):
    options = ("--root", tiny_dataset, "--batch-size", 4, "--clip-frames", 2)

    step = json.loads(run("where", 2, 0, *options, "--json").stdout)
    words = run("where", 2, 0, *options).stdout

    pipe = Pipeline(open_dataset(str(tiny_dataset)), batch_size=4, seed=0, order={"clip_frames": 2})
    found = pipe.plan().frames_at(2, 0)
    assert step["clip_frames"] == 2
    assert "clip_frames=2" in words
    assert [(one["episode"], one["frame"]) for one in step["frames"]] == list(
        zip(found.episode.tolist(), found.frame.tolist(), strict=True)
    )


def test_where_prints_a_table(tiny_dataset):
    done = run("where", 0, 0, "--root", tiny_dataset, *OPTIONS)

    assert done.returncode == 0, done.stderr
    assert "epoch 0, step 0 of it, rank 0 of 2: 3 frames" in done.stdout
    assert "episode" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), "which run? Give --account DIR"),
        ((0, 5, "--root", "{root}", *OPTIONS), "there is no rank 5: the world has 2 ranks, counted from 0"),
        ((99, 0, "--root", "{root}", *OPTIONS, "--epoch", 1), "there is no step 99 in epoch 1: it has 6 steps"),
        ((0, 0, "--root", "{root}"), "batch_size must be an integer of at least 1, got 0"),
        ((0, 0, "--root", "{root}", *OPTIONS, "--tail", "cut"), "tail='cut' is not known"),
    ],
)
def test_where_explains_what_is_impossible(tiny_dataset, arguments, message):
    done = run("where", *(str(argument).format(root=tiny_dataset) for argument in arguments))

    assert done.returncode == 2
    assert message in done.stderr
