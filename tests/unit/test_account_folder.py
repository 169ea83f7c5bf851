"""Which account of a run's folder counts, and what the others tell."""

import shutil
from dataclasses import replace

import pytest
from account_cases import HandRun
from plan_cases import make_index

from raypipe.account import Account
from raypipe.account.checkpoint import account_name
from raypipe.account.file import write_account
from raypipe.account.folder import read_run_account
from raypipe.account.verdict import check_account
from raypipe.errors import ConfigError, DatasetError, RaypipeError
from raypipe.plan import OrderSpec


def made_run(**options):
    run = HandRun(make_index([9, 8, 7, 12]), OrderSpec(seed=4, live_spans=2), **options)
    run.start(2, 2)
    return run


def crashed_run(folder):
    """Two checkpoints, a crash after the second, ranks that wrote down different steps, and a second attempt."""
    run = made_run()
    run.steps(2)
    run.write_checkpoint(folder / "checkpoint_000000")
    run.steps(2)
    run.write_checkpoint(folder / "checkpoint_000001")
    run.steps(1)
    run.write_heartbeat(folder)
    run.steps(2)
    late = Account(header=run.header(), parts=run.ledgers[1].parts())
    write_account(folder / "raypipe-account/train" / run.attempt / account_name(1, 2), late)
    return run


def test_a_checkpoint_is_found_by_its_own_folder(tmp_path):
    run = made_run()
    run.steps(3)
    run.write_checkpoint(tmp_path)

    found = read_run_account(tmp_path)

    assert found.account == run.account()
    assert (found.problem, found.attempts) == ("", ())


def test_of_an_attempt_that_died_the_newest_checkpoint_counts(tmp_path):
    run = crashed_run(tmp_path)

    found = read_run_account(tmp_path)

    assert found.place.endswith("checkpoint_000001/raypipe/account/train")
    (verdict,) = check_account(run.index, run.axis, found.account, found.attempts)
    assert verdict.is_exact
    # One step of rank 0 and three of rank 1, of 2 frames each.
    assert (verdict.num_emitted, verdict.num_rolled_back) == (16, 8)


def test_of_a_run_that_went_on_the_last_attempt_counts(tmp_path):
    run = crashed_run(tmp_path)
    run.start(3, 2)
    run.steps(run.world.num_steps)
    run.write_heartbeat(tmp_path)

    found = read_run_account(tmp_path)

    assert found.place.endswith("raypipe-account/train/attempt-001")
    (verdict,) = check_account(run.index, run.axis, found.account, found.attempts)
    assert verdict.is_exact
    assert verdict.is_finished
    assert verdict.num_rolled_back == 8


def test_a_checkpoint_that_lost_a_file_is_told_of(tmp_path):
    run = made_run()
    run.steps(3)
    run.write_checkpoint(tmp_path)
    (tmp_path / "raypipe/account/train" / account_name(1, 2)).unlink()

    found = read_run_account(tmp_path)

    assert "has 1 of 2 files" in found.problem
    (verdict,) = check_account(run.index, run.axis, found.account)
    assert verdict.missing_ranks == (f"{found.account.parts[0].describe()}: no record of rank 1",)


def test_an_older_checkpoint_does_not_stand_in_for_the_newest_that_lost_a_file(tmp_path):
    crashed_run(tmp_path)
    (tmp_path / "checkpoint_000001/raypipe/account/train" / account_name(1, 2)).unlink()

    found = read_run_account(tmp_path)

    assert found.place.endswith("checkpoint_000001/raypipe/account/train")
    assert "has 1 of 2 files" in found.problem


def test_an_attempt_that_goes_on_stands_in_for_a_checkpoint_that_lost_a_file(tmp_path):
    run = crashed_run(tmp_path)
    run.start(3, 2)
    run.steps(run.world.num_steps)
    run.write_heartbeat(tmp_path)
    (tmp_path / "checkpoint_000001/raypipe/account/train" / account_name(1, 2)).unlink()

    found = read_run_account(tmp_path)

    assert found.place.endswith("raypipe-account/train/attempt-001")
    assert found.problem == ""


def test_the_loader_is_chosen_by_name(tmp_path):
    train, val = made_run(), made_run()
    val.name = "val"
    train.steps(1)
    val.steps(2)
    train.write_checkpoint(tmp_path)
    val.write_checkpoint(tmp_path)

    assert read_run_account(tmp_path).account.header.name == "train"
    assert read_run_account(tmp_path, "val").account.parts[0].num_steps == 2
    with pytest.raises(ConfigError, match=r"no account of a loader 'vla'; did you mean 'val'\?"):
        read_run_account(tmp_path, "vla")


def test_two_runs_are_not_taken_for_one(tmp_path):
    for name in ("first", "second"):
        run = made_run()
        run.steps(2)
        run.write_heartbeat(tmp_path / name)
    other = made_run()
    other.steps(3)
    other.write_checkpoint(tmp_path / "third/checkpoint_000000")

    with pytest.raises(ConfigError, match="holds 2 runs; give the folder of one: first, second"):
        read_run_account(tmp_path)
    shutil.rmtree(tmp_path / "second")
    assert read_run_account(tmp_path).place.endswith("first/raypipe-account/train/attempt-000")


def test_folders_without_an_account_and_folders_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match="there is no account in"):
        read_run_account(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        read_run_account(tmp_path / "nothing")


def test_a_damaged_file_is_named(tmp_path):
    run = made_run()
    run.steps(1)
    run.write_checkpoint(tmp_path)
    path = tmp_path / "raypipe/account/train" / account_name(1, 2)
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(DatasetError, match="rank-00001-of-00002"):
        read_run_account(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}"])
def test_a_state_that_is_no_json_object_is_named_with_what_to_do(tmp_path, content):
    run = made_run()
    for number in range(2):
        run.steps(1)
        run.write_checkpoint(tmp_path / f"checkpoint_00000{number}")
    path = tmp_path / "checkpoint_000001/raypipe/train.json"
    saved = path.read_bytes()
    path.write_text(content)

    with pytest.raises(DatasetError, match=r"damaged state .*checkpoint_000001/raypipe/train\.json"):
        read_run_account(tmp_path)

    assert read_run_account(tmp_path / "checkpoint_000000").problem == ""
    path.write_bytes(saved)
    assert read_run_account(tmp_path).place.endswith("checkpoint_000001/raypipe/account/train")


def test_ranks_that_stopped_after_different_steps_cannot_be_checked_without_a_checkpoint(tmp_path):
    run = made_run()
    run.steps(1)
    run.write_heartbeat(tmp_path)
    late = replace(run.header(), state={**run.header().state, "epoch": 7})
    path = tmp_path / "raypipe-account/train/attempt-000" / account_name(1, 2)
    write_account(path, Account(header=late, parts=run.ledgers[1].parts()))

    with pytest.raises(RaypipeError, match=r"no account in .* can be checked: .*not of one state"):
        read_run_account(tmp_path)
