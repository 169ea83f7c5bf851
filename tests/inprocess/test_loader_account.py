"""The account that loaders write down: true of what they hand over, through stops, restarts, other ranks and skips."""

import itertools
import pickle
import shutil
from itertools import islice

import numpy as np
import pyarrow.fs
import pytest
import ray.train
from batches import frames_of_all, local_loader, rows_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.account import lay_out, merge_accounts, read_rank_accounts, write_rank_account
from raypipe.account.file import read_account
from raypipe.account.verdict import check_account
from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline
from raypipe.plan import SINGLE_DATASET
from raypipe.testing import write_dataset
from raypipe.train import read_state, report, restore, write_states
from raypipe.views.account import check_run

NUM_FRAMES = 57


def make_pipe(rows, **parts):
    return Pipeline(rows, **{"batch_size": 4, "seed": 1, "order": {"live_spans": 3}, **parts})


def start(pipe, world_size, state=None, parts=()):
    loaders = [local_loader(pipe, rank, world_size) for rank in range(world_size)]
    for loader in loaders:
        loader._source.attempt = f"attempt-{next(_numbers)}" if loader.rank == 0 else loaders[0]._source.attempt
        if state is not None:
            loader.load_state_dict(state)
        if loader.rank == 0:
            loader.load_account(parts)
        else:
            loader.load_account(())
    return loaders


_numbers = itertools.count()


def run(loaders, num_steps):
    """Take so many batches on every rank, at most to the end of the epoch."""
    return [list(islice(loader, num_steps)) for loader in loaders]


def check(pipe, loaders, attempts=()):
    episodes = pipe.config.dataset.meta.episodes
    axis = lay_out([SINGLE_DATASET], [(episodes.episode_index, episodes.length)])
    account = merge_accounts([loader.account() for loader in loaders])
    return check_account(pipe.config.index(), axis, account, attempts)


def test_account_of_an_epoch_says_exactly_once(rows):
    pipe = make_pipe(rows)
    loaders = start(pipe, 2)

    batches = run(loaders, 100)

    (verdict,) = check(pipe, loaders)
    assert verdict.is_exact, verdict.describe()
    assert verdict.num_emitted == len(frames_of_all(batches[0] + batches[1])) == NUM_FRAMES


def test_account_holds_what_was_handed_over_and_not_what_was_prefetched(rows):
    pipe = make_pipe(rows)
    loaders = start(pipe, 2)

    run(loaders, 3)

    (verdict,) = check(pipe, loaders)
    assert verdict.is_exact, verdict.describe()
    assert (verdict.num_emitted, verdict.num_to_come) == (24, NUM_FRAMES - 24)


def test_a_loop_that_is_broken_off_and_goes_on_is_exactly_once(rows):
    pipe = make_pipe(rows)
    loaders = start(pipe, 2)

    run(loaders, 2)
    run(loaders, 3)
    run(loaders, 100)
    run(loaders, 1)

    first, second = check(pipe, loaders)
    assert first.is_exact, first.describe()
    assert first.num_emitted == NUM_FRAMES
    assert second.is_exact, second.describe()
    assert second.num_emitted == 8


@settings(max_examples=20, deadline=None)
@given(
    legs=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=4),
    tail=st.sampled_from(["short", "drop", "wrap"]),
    seed=st.integers(0, 99),
)
def test_account_balances_through_restarts_on_other_ranks_that_roll_steps_back(rows, legs, tail, seed):
    pipe = make_pipe(rows, batch_size={"size": 12, "scope": "global"}, seed=seed, order={"live_spans": 3, "tail": tail})
    state, parts, attempts, num_lost = None, (), [], 0

    for world_size, num_steps, num_more in legs:
        loaders = start(pipe, world_size, state, parts)
        if loaders[0].epoch > 0 or loaders[0].steps_left == 0:
            break
        run(loaders, num_steps)
        state = loaders[0].state_dict()
        account = merge_accounts([loader.account() for loader in loaders])
        parts = account.parts
        if loaders[0].epoch == 0:
            # Handed over after the state that the next start loads: rolled back.
            num_lost += sum(len(frames_of_all(batches)) for batches in run(loaders, num_more))
        attempts += [part for loader in loaders for part in loader.account().parts]
    loaders = start(pipe, 2, state, parts)
    if loaders[0].epoch == 0:
        run(loaders, 100)

    verdict = check(pipe, loaders, attempts)[0]
    assert verdict.is_exact, verdict.describe()
    assert verdict.num_emitted + verdict.num_left_over == NUM_FRAMES
    if tail != "wrap":
        assert verdict.num_rolled_back == num_lost


@pytest.mark.parametrize("worlds", [(4, 3, 1), (3, 1), (5, 1), (6, 2)])
def test_a_run_goes_on_on_any_ranks_and_is_saved_after_the_last_batch_of_an_epoch(rows, worlds):
    pipe = make_pipe(rows, batch_size=2)
    state, parts = None, ()
    for world_size in worlds:
        loaders = start(pipe, world_size, state, parts)
        run(loaders, 1)
        state, parts = loaders[0].state_dict(), merge_accounts([loader.account() for loader in loaders]).parts

    run(loaders, 100)
    going_on = start(pipe, worlds[-1], loaders[0].state_dict(), merge_accounts(one.account() for one in loaders).parts)
    num_steps = len(loaders[0])
    run(going_on, 100)

    assert (going_on[0].epoch, len(going_on[0])) == (2, num_steps)
    first, second = check(pipe, going_on)
    assert first.is_exact, first.describe()
    assert second.is_exact, second.describe()
    assert first.num_emitted == second.num_emitted == NUM_FRAMES


def torn_run(rows, folder, *, writers):
    """Save after 2 steps; after 4 only `writers` do: 0 and 1 are the accounts of the ranks, s is the state."""
    pipe = make_pipe(rows)
    loaders = start(pipe, 2)
    run(loaders, 2)
    for loader in loaders:
        write_states(folder, loader)
    early = (folder / "raypipe/train.json").read_bytes()
    run(loaders, 2)
    for loader in loaders:
        if str(loader.rank) in writers:
            write_states(folder, loader)
    if "s" not in writers:
        (folder / "raypipe/train.json").write_bytes(early)
    return pipe


@pytest.mark.parametrize(("writers", "num_unrecorded"), [("", 0), ("0", 0), ("1", 0), ("01", 0), ("0s", 8)])
def test_a_torn_checkpoint_does_not_make_the_account_inexact(rows, tmp_path, writers, num_unrecorded):
    pipe = torn_run(rows, tmp_path, writers=writers)

    torn = check_run(tmp_path)
    loaders = start(pipe, 3)
    for loader in loaders:
        assert restore(tmp_path, loader)
    run(loaders, 100)

    (verdict,) = check(pipe, loaders)
    assert torn.is_exact, torn.describe()
    assert verdict.is_exact, verdict.describe()
    assert verdict.is_finished
    assert verdict.num_unrecorded == num_unrecorded
    assert verdict.num_emitted + verdict.num_unrecorded == NUM_FRAMES
    assert ("without a record: a torn checkpoint" in verdict.describe()[0]) == bool(num_unrecorded)


def test_a_newest_file_that_is_gone_is_lost_and_not_torn_though_an_older_one_stands_beside_it(rows, tmp_path):
    pipe = torn_run(rows, tmp_path, writers="01s")
    (tmp_path / "raypipe/account/train/rank-00001-of-00002.parquet").unlink()
    assert (tmp_path / "raypipe/account/train/before/rank-00001-of-00002.parquet").exists()

    checked = check_run(tmp_path)
    (going_on,) = start(pipe, 1)
    with pytest.warns(UserWarning, match="lacks what rank 1 did: the file is lost"):
        restore(tmp_path, going_on)

    assert not checked.is_exact
    assert "has 1 of 2 files" in checked.run.problem
    assert checked.verdicts[0].missing_ranks


def test_a_rank_that_dies_in_the_middle_of_its_write_leaves_its_newest_file(rows, tmp_path, monkeypatch):
    pipe = make_pipe(rows)
    loaders = start(pipe, 2)
    run(loaders, 2)
    save_all(tmp_path, loaders)
    run(loaders, 2)
    write_states(tmp_path, loaders[0])
    monkeypatch.setattr("raypipe.account.checkpoint.write_account", refuse)
    with pytest.raises(OSError, match="dies here"):
        write_states(tmp_path, loaders[1])

    checked = check_run(tmp_path)

    assert checked.is_exact, checked.describe()
    assert checked.verdicts[0].num_unrecorded == 8


def refuse(*_):
    raise OSError("dies here")


@pytest.mark.parametrize("is_written", [False, True], ids=["before its account", "before the state"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_in_which_rank_0_of_another_world_died_is_exact(
    rows, tmp_path, world_size, is_written, monkeypatch
):
    pipe = make_pipe(rows)
    loaders = start(pipe, world_size)
    run(loaders, 2)
    save_all(tmp_path, loaders)
    saved = (tmp_path / "raypipe/train.json").read_bytes()
    others = start(pipe, 3)
    restore_all(tmp_path, others)
    run(others, 1)
    if is_written:
        write_states(tmp_path, others[0])
        (tmp_path / "raypipe/train.json").write_bytes(saved)
    else:
        monkeypatch.setattr("raypipe.account.checkpoint.write_account", refuse)
        with pytest.raises(OSError, match="dies here"):
            write_states(tmp_path, others[0])

    checked = check_run(tmp_path)

    assert checked.is_exact, checked.describe()
    assert checked.verdicts[0].num_emitted == world_size * 8
    again = start(pipe, 3)
    restore_all(tmp_path, again)
    run(again, 100)
    (verdict,) = check(pipe, again)
    assert verdict.is_exact, verdict.describe()


@pytest.mark.parametrize("worlds", [(2, 2), (3, 3), (3, 2), (2, 3), (1, 4)], ids=str)
def test_however_often_rank_0_dies_before_the_state_is_written_what_leads_to_it_stays(rows, tmp_path, worlds):
    pipe = make_pipe(rows)
    loaders = start(pipe, 2)
    run(loaders, 2)
    save_all(tmp_path, loaders)
    for world_size in worlds:
        others = start(pipe, world_size)
        restore_all(tmp_path, others)
        run(others, 1)
        for loader in others:
            write_rank_account(tmp_path / "raypipe", loader.account(), loader.rank, world_size)

        checked = check_run(tmp_path)
        assert checked.is_exact, checked.describe()
        assert (checked.verdicts[0].num_emitted, checked.verdicts[0].num_unrecorded) == (16, 0)

    # Saved at last: of what was kept nothing stays that is not needed.
    again = start(pipe, 3)
    restore_all(tmp_path, again)
    for num_steps in (1, 1):
        run(again, num_steps)
        save_all(tmp_path, again)
    assert check_run(tmp_path).is_exact
    names = {path.name.partition("-of-")[2] for path in (tmp_path / "raypipe/account").rglob("*.parquet")}
    assert names == {"00003.parquet"}


def test_a_torn_checkpoint_of_another_world_stays_told_when_rank_0_of_the_next_one_dies(rows, tmp_path):
    pipe = torn_run(rows, tmp_path, writers="0s")
    saved = (tmp_path / "raypipe/train.json").read_bytes()
    others = start(pipe, 3)
    restore_all(tmp_path, others)
    run(others, 1)
    write_states(tmp_path, others[0])
    (tmp_path / "raypipe/train.json").write_bytes(saved)

    checked = check_run(tmp_path)

    assert checked.is_exact, checked.describe()
    assert checked.verdicts[0].num_unrecorded == 8


def save_all(folder, loaders):
    for loader in loaders:
        write_states(folder, loader)


def restore_all(folder, loaders):
    for loader in loaders:
        assert restore(folder, loader)


def test_what_a_torn_checkpoint_lost_stays_told_over_later_checkpoints(rows, tmp_path):
    pipe = torn_run(rows, tmp_path / "first", writers="0s")
    for before, after in (("first", "second"), ("second", "third")):
        loaders = start(pipe, 2)
        restore_all(tmp_path / before, loaders)
        run(loaders, 1)
        save_all(tmp_path / after, loaders)

    verdict = check_run(tmp_path / "third")

    assert verdict.is_exact, verdict.describe()


def test_ranks_that_go_back_to_an_older_checkpoint_in_the_same_process_are_exact(rows, tmp_path):
    pipe = make_pipe(rows)
    loaders = start(pipe, 2)
    run(loaders, 2)
    save_all(tmp_path / "old", loaders)
    run(loaders, 2)

    # Twice: a trainer may restore what its framework has restored before.
    restore_all(tmp_path / "old", loaders)
    restore_all(tmp_path / "old", loaders)
    run(loaders, 1)
    save_all(tmp_path / "new", loaders)

    verdict = check_run(tmp_path / "new")
    assert verdict.is_exact, verdict.describe()


@pytest.mark.parametrize("lost", ["rank-00000-of-00002.parquet", "*.parquet"])
def test_a_lost_account_of_a_checkpoint_is_warned_of_and_shows_in_the_verdict(rows, tmp_path, lost):
    pipe = make_pipe(rows)
    loaders = start(pipe, 2)
    run(loaders, 100)
    for loader in loaders:
        write_states(tmp_path, loader)
    for path in (tmp_path / "raypipe/account/train").glob(lost):
        path.unlink()

    (going_on,) = start(pipe, 1)
    with pytest.warns(UserWarning, match="the account of this run"):
        restore(tmp_path, going_on)
    run([going_on], 100)

    first, second = check(pipe, [going_on])
    assert not first.is_exact
    assert second.is_exact, second.describe()


def test_skipped_frames_are_in_the_account_with_the_reason(rows, tmp_path):
    root = write_dataset(tmp_path / "dataset", rows_spec())
    pipe = make_pipe(open_dataset(str(root)), on_bad_episode="skip", max_bad_episodes=5)
    for path in (root / "data").rglob("*.parquet"):
        path.write_bytes(b"")
        break
    loaders = start(pipe, 2)

    with pytest.warns(UserWarning, match="left out"):
        batches = run(loaders, 100)

    (verdict,) = check(pipe, loaders)
    assert verdict.is_exact, verdict.describe()
    handed = [
        frame
        for batch in batches[0] + batches[1]
        for frame, is_repeat in zip(frames_of_all([batch]), batch["is_repeat"].tolist(), strict=True)
        if not is_repeat
    ]
    assert verdict.num_emitted == len(handed)
    assert verdict.num_skipped == NUM_FRAMES - len(handed) > 0
    assert {skip.episode for skip in verdict.skipped} == {span.episode for loader in loaders for span in loader.skipped}
    assert all("parquet" in skip.why for skip in verdict.skipped)


def test_account_passes_through_the_files_of_a_checkpoint(rows, tmp_path):
    pipe = make_pipe(rows)
    loaders = start(pipe, 3)
    run(loaders, 2)
    state = loaders[0].state_dict()
    for loader in loaders:
        write_rank_account(tmp_path, loader.account(), loader.rank, 3)

    parts = read_rank_accounts(pyarrow.fs.LocalFileSystem(), str(tmp_path), "train")
    going_on = start(pipe, 2, state, parts)
    run(going_on, 100)

    (verdict,) = check(pipe, going_on)
    assert verdict.is_exact, verdict.describe()
    for loader in going_on:
        write_rank_account(tmp_path, loader.account(), loader.rank, 2)
    assert sorted(path.name for path in (tmp_path / "account/train").glob("*.parquet")) == [
        "rank-00000-of-00002.parquet",
        "rank-00001-of-00002.parquet",
    ]


def test_a_damaged_account_of_a_checkpoint_is_warned_of_and_the_run_goes_on(rows, tmp_path):
    (loader,) = start(make_pipe(rows), 1)
    write_rank_account(tmp_path, loader.account(), 0, 1)
    (path,) = (tmp_path / "account/train").iterdir()
    path.write_bytes(path.read_bytes()[:30])

    with pytest.warns(UserWarning, match=r"begins anew: .*rank-00000-of-00001.parquet"):
        parts = read_rank_accounts(pyarrow.fs.LocalFileSystem(), str(tmp_path), "train")

    assert parts == ()


@pytest.mark.parametrize(
    "stray", ["._rank-00000-of-00001.parquet", "rank-00000-of-00001 (1).parquet", "rank-x-of-1.parquet"]
)
@pytest.mark.parametrize("is_account", [True, False])
def test_files_that_no_rank_wrote_do_not_end_the_account_of_a_checkpoint(rows, tmp_path, stray, is_account):
    (loader,) = start(make_pipe(rows), 1)
    run([loader], 1)
    write_rank_account(tmp_path, loader.account(), 0, 1)
    (path,) = (tmp_path / "account/train").iterdir()
    (path.parent / stray).write_bytes(path.read_bytes() if is_account else b"\0\5\26\7")

    parts = read_rank_accounts(pyarrow.fs.LocalFileSystem(), str(tmp_path), "train")

    assert parts == loader.account().parts


def test_kept_account_is_there_after_the_epoch_and_after_a_break(rows, tmp_path):
    (loader,) = start(make_pipe(rows), 1)
    loader.keep_account(str(tmp_path))

    for _ in islice(loader, 2):
        pass

    (path,) = tmp_path.glob("raypipe-account/train/*/rank-00000-of-00001.parquet")
    assert read_account(path).parts[0].num_steps == 2
    for _ in loader:
        pass
    assert sum(part.emitted.num_values for part in read_account(path).parts) == NUM_FRAMES


def test_a_folder_that_cannot_be_written_is_warned_of_and_the_run_goes_on(rows, tmp_path):
    (tmp_path / "raypipe-account").write_text("in the way")
    (loader,) = start(make_pipe(rows), 1)
    loader.keep_account(str(tmp_path))

    with pytest.warns(UserWarning, match="an account was not written to"):
        batches = list(loader)

    assert len(frames_of_all(batches)) == NUM_FRAMES


def test_a_loader_that_is_sent_elsewhere_keeps_its_account(rows):
    (loader,) = start(make_pipe(rows), 1)
    run([loader], 2)
    loader.close()

    sent = pickle.loads(pickle.dumps(loader))

    assert [part.num_steps for part in sent.account().parts] == [2]
    list(sent)
    (verdict,) = check(make_pipe(rows), [sent])
    assert verdict.is_exact, verdict.describe()


def test_going_back_in_the_same_process_is_told_as_rolled_back(rows, tmp_path):
    pipe = make_pipe(rows)
    loaders = start(pipe, 2)
    for loader in loaders:
        loader.keep_account(str(tmp_path))
    run(loaders, 2)
    state = loaders[0].state_dict()
    run(loaders, 3)

    for loader in loaders:
        loader.load_state_dict(state)
    run(loaders, 100)

    (verdict,) = check(pipe, loaders)
    assert verdict.is_exact, verdict.describe()
    assert (verdict.num_emitted, verdict.num_rolled_back) == (NUM_FRAMES, 24)
    assert len(list(tmp_path.glob("raypipe-account/train/*/"))) == 2


def test_an_old_file_of_a_rank_that_died_before_it_wrote_anew_loses_nothing(rows, tmp_path):
    pipe = make_pipe(rows)
    loaders = start(pipe, 2)
    run(loaders, 2)
    for loader in loaders:
        write_rank_account(tmp_path, loader.account(), loader.rank, 2)
    local = pyarrow.fs.LocalFileSystem()
    going_on = start(pipe, 2, loaders[0].state_dict(), read_rank_accounts(local, str(tmp_path), "train"))
    run(going_on, 1)
    write_rank_account(tmp_path, going_on[0].account(), 0, 2)

    parts = read_rank_accounts(local, str(tmp_path), "train")

    assert [(part.num_steps, len(part.ranks)) for part in parts] == [(2, 2), (1, 1)]


@pytest.mark.parametrize("exclude", [np.array([1, 2]), range(1, 3), [np.int64(1), 2]])
def test_account_of_any_kind_of_selection_can_be_written(rows, tmp_path, exclude):
    (loader,) = start(make_pipe(rows, selection={"exclude": exclude}), 1)
    run([loader], 1)

    write_rank_account(tmp_path, loader.account(), 0, 1)

    (path,) = (tmp_path / "account/train").iterdir()
    assert read_account(path).header.selection["exclude"] == (1, 2)


def test_account_of_a_rank_that_puts_nothing_into_the_checkpoint_is_found_beside_it(rows, tmp_path):
    pipe = make_pipe(rows)
    loaders = start(pipe, 2)
    for loader in loaders:
        loader.keep_account(str(tmp_path))
    run(loaders, 2)
    write_rank_account(tmp_path / "checkpoint/raypipe", loaders[0].account(), 0, 2)
    loaders[1].save_account()
    run(loaders, 1)

    parts = read_rank_accounts(pyarrow.fs.LocalFileSystem(), str(tmp_path / "checkpoint/raypipe"), "train")

    assert [(part.num_steps, len(part.ranks)) for part in parts] == [(2, 2)]


def start_reported(pipe, checkpoint):
    """Return the loaders of two ranks after one step, which is in a checkpoint."""
    loaders = start(pipe, 2)
    for loader in loaders:
        loader.keep_account(str(checkpoint.parent))
    run(loaders, 1)
    report({}, checkpoint, loaders[0])
    report({}, None, loaders[1])
    return loaders


@pytest.mark.parametrize("later", ["at later states", "at the same state"])
def test_accounts_of_the_last_checkpoint_stay_however_many_reports_without_one_follow(
    rows, tmp_path, monkeypatch, later
):
    monkeypatch.setattr(ray.train, "report", lambda metrics, checkpoint=None: None)
    pipe, checkpoint = make_pipe(rows), tmp_path / "checkpoint"
    loaders = start_reported(pipe, checkpoint)
    at_checkpoint = loaders[0].state_dict()

    for _ in range(6):
        if later == "at later states":
            run(loaders, 1)
        for loader in loaders:
            report({}, None, loader)

    parts = read_rank_accounts(pyarrow.fs.LocalFileSystem(), str(checkpoint / "raypipe"), "train")
    assert [(part.num_steps, len(part.ranks)) for part in parts] == [(1, 2)]
    assert read_state(checkpoint) == at_checkpoint
    # A few of the other states, not all of them.
    assert len(list(tmp_path.glob("raypipe-account/train/saved/*/rank-00001-*"))) <= 5


def test_report_right_after_a_restart_leaves_what_led_to_the_checkpoint(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(ray.train, "report", lambda metrics, checkpoint=None: None)
    pipe, checkpoint = make_pipe(rows), tmp_path / "checkpoint"
    loaders = start_reported(pipe, checkpoint)

    restarted = start(pipe, 2, loaders[0].state_dict())
    for loader in restarted:
        loader.keep_account(str(tmp_path))
        report({"validation": 1.0}, None, loader)

    parts = read_rank_accounts(pyarrow.fs.LocalFileSystem(), str(checkpoint / "raypipe"), "train")
    assert [(part.num_steps, len(part.ranks)) for part in parts] == [(1, 2)]


def test_accounts_of_a_few_checkpoints_are_kept_and_not_of_all(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(ray.train, "report", lambda metrics, checkpoint=None: None)
    loaders = start(make_pipe(rows), 2)
    for loader in loaders:
        loader.keep_account(str(tmp_path))

    for number in range(20):
        run(loaders, 1)
        report({}, tmp_path / f"checkpoint_{number}", loaders[0])
        report({}, None, loaders[1])

    assert len(list(tmp_path.glob("raypipe-account/train/saved/*/rank-00001-*"))) == 8
    assert len(list(tmp_path.glob("raypipe-account/train/saved/*/checkpoint"))) == 8


def test_run_whose_other_ranks_put_nothing_into_checkpoints_goes_on_and_is_exact(rows, tmp_path):
    """Twice: the second time rank 0 carries parts, and stands behind what the others left beside the checkpoint."""
    pipe, local = make_pipe(rows), pyarrow.fs.LocalFileSystem()
    state, parts = None, ()
    for number in range(3):
        checkpoint = tmp_path / f"checkpoint_{number}"
        loaders = start(pipe, 2, state, parts)
        for loader in loaders:
            loader.keep_account(str(tmp_path))
        run(loaders, 2)
        write_rank_account(checkpoint / "raypipe", loaders[0].account(), 0, 2)
        loaders[1].save_account()
        state = loaders[0].state_dict()
        parts = read_rank_accounts(local, str(checkpoint / "raypipe"), "train")

    checked = check_run(tmp_path)

    assert [(part.num_steps, len(part.ranks)) for part in parts] == [(2, 2)] * 3
    assert checked.is_exact, checked.describe()
    assert checked.verdicts[0].num_emitted == 48
    shutil.rmtree(tmp_path / "raypipe-account/train" / loaders[0]._attempt)
    from_checkpoint = check_run(tmp_path)
    assert from_checkpoint.is_exact, from_checkpoint.describe()
    assert from_checkpoint.verdicts[0].num_emitted == 48
