"""Accounts that someone changed: none of the kinds passes, whether its chain was rewritten or not.

`examples/check_account.py` judges the same accounts, without raypipe and without the plan.
"""

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from account_cases import CHECKER, HandRun, load_checker
from forged_cases import FILES, FORGED, MIXED, Checkpoint
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_cases import WORLDS, lengths, make_index, specs

from raypipe.account import Skip, add_runs, count_values, subtract_runs
from raypipe.account.file import read_account, write_account
from raypipe.account.folder import read_run_account
from raypipe.account.frames import empty_runs
from raypipe.account.parts import seal_account
from raypipe.account.verdict import check_account
from raypipe.errors import ConfigError, RaypipeError
from raypipe.mixture import Mixture
from raypipe.plan import Leg, OrderSpec, SelectionSpec
from raypipe.testing import SynthSpec, write_dataset
from raypipe.views.account import check_run, read_frames

SPEC = OrderSpec(seed=3, live_spans=2)
checker = load_checker()


@pytest.fixture(scope="module")
def honest(runs):
    """A checkpoint after three epochs and a bit: 2 ranks, then 3, a bad episode, and a state within an epoch."""
    return runs / "newest"


@pytest.fixture(scope="module")
def of_another_seed(runs):
    return runs / "other"


def write_runs(folder, run):
    """Write a run of three epochs and a bit on 2 ranks, then 3, within an epoch; and the checkpoints around it."""
    run.start(2, 3)
    run.steps(run.world.num_steps + 2)
    run.save()
    run.start(3, 2)
    run.steps(run.world.num_steps)
    run.interrupt()
    run.steps(run.world.num_steps + 1)
    for name in ("older", "newest", "later"):
        run.write_checkpoint(folder / name)
        run.steps(1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forged")
    root = write_dataset(folder / "dataset", SynthSpec(cameras=()))
    write_dataset(folder / "alike", SynthSpec(cameras=(), state_dim=5))
    write_dataset(folder / "longer", SynthSpec(cameras=(), lengths=(9, 9, 9, 7)))
    index, axis = read_frames(str(root), SelectionSpec())
    for place, seed in ((folder, 3), (folder / "seed-4", 4)):
        run = HandRun(index, replace(SPEC, seed=seed), axis=axis, bad={2})
        run.root = str(root)
        write_runs(place, run)
    (folder / "seed-4/newest").rename(folder / "other")
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    for name, frames in (("small", (5, 6, 9)), ("large", (7, 9, 12, 20))):
        write_dataset(folder / name, SynthSpec(cameras=(), lengths=frames))
    (folder / "mix.yaml").write_text("datasets:\n  small: {root: small}\n  large: {root: large, weight: 2}\n")
    index, axis = read_frames(str(folder / "mix.yaml"), SelectionSpec())
    run = HandRun(index, SPEC, axis=axis)
    run.root, run.members = "", Mixture(folder / "mix.yaml").sources()
    write_runs(folder, run)
    return folder


def part(change, place):
    """Return a doctor that changes one part of the account of rank 0, which has all that was done before."""

    def doctor(accounts, other):
        parts = list(accounts[0].parts)
        parts[place] = change(parts[place], other[0].parts[place])
        return [replace(accounts[0], parts=tuple(parts)), *accounts[1:]]

    return doctor


def parts(change):
    def doctor(accounts, other):
        return [replace(accounts[0], parts=tuple(change(accounts[0].parts, other[0].parts))), *accounts[1:]]

    return doctor


def header(**changes):
    def doctor(accounts, other):
        return [replace(account, header=replace(account.header, **changes)) for account in accounts]

    return doctor


def state(**changes):
    def doctor(accounts, other):
        changed = [{**account.header.state, **changes} for account in accounts]
        return [
            replace(account, header=replace(account.header, state=new))
            for account, new in zip(accounts, changed, strict=True)
        ]

    return doctor


def order(**changes):
    def doctor(accounts, other):
        return state(order={**accounts[0].header.state["order"], **changes})(accounts, other)

    return doctor


def first_of(runs):
    return count_values(runs.values()[:1])


def relabel(one, _):
    (skip, *more) = one.skipped
    return replace(one, skipped=(replace(skip, episode=skip.episode + 1), *more))


def pretend_skip(one, _):
    frames = first_of(one.emitted)
    fake = Skip(dataset=0, episode=2, frames=frames, why="episode 2 is bad")
    return replace(one, emitted=subtract_runs(one.emitted, frames), skipped=(*one.skipped, fake))


def record(**changes):
    return lambda one, _: replace(one, ranks=(replace(one.ranks[0], **changes), *one.ranks[1:]))


def more_steps(one, _):
    return replace(one, num_steps=one.num_steps + 1)


# By the plan and by themselves: also with a chain that was made anew.
BY_PLAN = {
    "a part of another seed": part(lambda one, other: other, 0),
    "a last part of another seed": part(lambda one, other: other, -1),
    "an epoch of another seed": parts(
        lambda mine, other: [*(p for p in other if p.epoch == 0), *(p for p in mine if p.epoch)]
    ),
    "all parts of another seed": parts(lambda mine, other: other),
    "another seed in the state": state(seed=4),
    "another epoch in the state": state(epoch=9),
    "an earlier epoch in the state": state(epoch=0),
    "more legs in the state": state(legs=[{"lanes": 3, "live_spans": 2, "frames_per_lane": 2}] * 2),
    "another place in the state": state(legs=[{"lanes": 3, "live_spans": 2, "frames_per_lane": 6}]),
    "other lanes in the state": state(legs=[{"lanes": 2, "live_spans": 2, "frames_per_lane": 4}]),
    "another fingerprint in the state": state(fingerprint="another"),
    "another order version in the state": state(order_version=2),
    "no shuffle in the state": order(shuffle=False),
    "another tail in the state": order(tail="drop"),
    "another span length in the state": order(span_frames=5),
    "other clips in the state": order(clip_frames=2),
    "other base lanes in the state": order(lanes=6),
    "another selection in the state": order(selection="1 runs, 1 frames, x"),
    "an unknown field in the state": order(depth=1),
    "another selection in the header": header(selection={"episodes": (0,)}),
    "no selection in the header": header(selection={"unknown": 1}),
    "another name in the header": header(name="val"),
    "another place in the header": header(root="/nowhere"),
    "members in the header": header(members=({"name": "a", "root": "b", "selection": {}},)),
    "no first part": parts(lambda mine, _: mine[1:]),
    "no first epoch": parts(lambda mine, _: [p for p in mine if p.epoch > 0]),
    "no first two epochs": parts(lambda mine, _: [p for p in mine if p.epoch > 1]),
    "no second epoch": parts(lambda mine, _: [p for p in mine if p.epoch != 1]),
    "no last part": parts(lambda mine, _: mine[:-1]),
    "no parts": parts(lambda mine, _: []),
    "parts turned round": parts(lambda mine, _: mine[::-1]),
    "two parts swapped": parts(lambda mine, _: [mine[1], mine[0], *mine[2:]]),
    "a skip of another episode": part(relabel, 0),
    "a pretended skip": part(pretend_skip, 1),
    "a skip of nothing": part(
        lambda one, _: replace(one, skipped=(*one.skipped, Skip(dataset=0, episode=1, frames=empty_runs(), why="x"))), 0
    ),
    "a skip of an unknown dataset": part(
        lambda one, _: replace(one, skipped=tuple(replace(skip, dataset=7) for skip in one.skipped)), 0
    ),
    "a skip that is gone": part(lambda one, _: replace(one, skipped=()), 0),
    "a frame that is gone": part(
        lambda one, _: replace(one, emitted=subtract_runs(one.emitted, first_of(one.emitted))), 0
    ),
    "a frame twice": part(lambda one, _: replace(one, emitted=add_runs(one.emitted, first_of(one.emitted))), 0),
    "a frame of no dataset": part(
        lambda one, _: replace(one, emitted=add_runs(one.emitted, count_values(np.array([10**6])))), 0
    ),
    "a repeat that was not": part(
        lambda one, _: replace(one, repeated=add_runs(one.repeated, first_of(one.emitted))), 0
    ),
    "another digest of a rank": part(record(digest="0" * 32), 0),
    "another count of a rank": part(record(num_frames=1), 0),
    "other lanes of a rank": part(record(lanes=((0, 1),)), 0),
    "another number of a rank": part(record(rank=9), 0),
    "a rank that is gone": part(lambda one, _: replace(one, ranks=one.ranks[:1]), 0),
    "another epoch of a part": part(lambda one, _: replace(one, epoch=one.epoch + 1), 0),
    "more steps": part(more_steps, 0),
    "fewer steps": part(lambda one, _: replace(one, num_steps=one.num_steps - 1), 0),
    "another batch": part(lambda one, _: replace(one, per_lane=one.per_lane + 1), 0),
    "other ranks": part(lambda one, _: replace(one, world_size=1), 0),
    "another start": part(lambda one, _: replace(one, legs=(replace(one.legs[-1], frames_per_lane=3),)), 0),
    "an invented leg": part(lambda one, _: replace(one, legs=(*one.legs, Leg(lanes=3, live_spans=2))), 0),
    "another order of a part": part(lambda one, _: replace(one, spec=replace(one.spec, clip_frames=2)), 0),
    "another seed of a part": part(lambda one, _: replace(one, spec=replace(one.spec, seed=9)), 0),
    "another selection of a part": part(lambda one, _: replace(one, selection="1 runs, 1 frames, x"), 0),
}

# By the chain alone: what the plan cannot tell.
BY_CHAIN = {
    "a state that went back to the start of its epoch": state(legs=[]),
    "another number of live spans in the state": order(live_spans=7),
    "another source in the state": state(source={"root": "elsewhere"}),
    "another reason of a skip": part(
        lambda one, _: replace(one, skipped=tuple(replace(skip, why="it was bad") for skip in one.skipped)), 0
    ),
    "another attempt of a part": part(lambda one, _: replace(one, attempt="x"), 0),
    "another turn of a part": part(lambda one, _: replace(one, turn=5), 0),
    "a rank that is said to be torn": part(lambda one, _: replace(one, torn=(1,)), 0),
    "a part that is said to be done again": parts(lambda mine, _: [mine[0], replace(mine[0], turn=1), *mine[1:]]),
    "other live spans in the order of a part": part(
        lambda one, _: replace(one, spec=replace(one.spec, live_spans=50)), 0
    ),
    "other base lanes in the order of a part": part(lambda one, _: replace(one, spec=replace(one.spec, lanes=6)), 0),
    "no head": header(head=""),
    "no chain in a part": part(lambda one, _: replace(one, before=""), 1),
}


NEEDS_THE_PLAN = {
    "another fingerprint in the state",
    "another order version in the state",
    "another selection in the header",
    "no selection in the header",
    "a repeat that was not",
    "another digest of a rank",
    "more steps",
    "another batch",
    "another order of a part",
}
"""What a checker that does not know the order cannot find, once the chain is made anew."""


def doctored_folder(honest, other, tmp_path, doctor, *, is_resealed):
    """Return a copy of the checkpoint with the accounts that a doctor makes of its own."""
    shutil.copytree(honest, tmp_path, dirs_exist_ok=True)
    files = sorted((tmp_path / "raypipe/account/train").glob("*.parquet"))
    others = [read_account(path) for path in sorted((other / "raypipe/account/train").glob("*.parquet"))]
    changed = doctor([read_account(path) for path in files], others)
    for path, account in zip(files, changed, strict=True):
        write_account(path, seal_account(account.header, account.parts) if is_resealed else account)
    if is_resealed:
        saved = {**read_account(files[0]).header.state, "account": read_account(files[0]).header.head}
        (tmp_path / "raypipe/train.json").write_text(json.dumps(saved))
    return tmp_path


def said_by_raypipe(folder):
    """Return what `raypipe account` says; nothing where the account is exact."""
    try:
        checked = check_run(folder)
    except RaypipeError as error:
        return str(error)
    return "" if checked.is_exact else "\n".join(checked.describe())


def said_by_checker(folder):
    try:
        return "\n".join(checker.check(folder)[1])
    except (KeyError, IndexError, ValueError) as error:
        return repr(error)


def test_the_account_that_is_doctored_is_exact(honest):
    checked = check_run(honest)
    lines, wrong = checker.check(honest)

    assert wrong == []
    assert sum(" skipped, " in line for line in lines) == 4

    assert checked.is_exact, checked.describe()
    assert [verdict.is_finished for verdict in checked.verdicts] == [True, True, True, False]
    assert checked.verdicts[0].num_skipped


@pytest.mark.parametrize("kind", [*BY_PLAN, *BY_CHAIN])
def test_a_doctored_account_never_passes(honest, of_another_seed, tmp_path, kind):
    doctor = {**BY_PLAN, **BY_CHAIN}[kind]
    folder = doctored_folder(honest, of_another_seed, tmp_path, doctor, is_resealed=False)

    assert said_by_raypipe(folder)
    assert said_by_checker(folder)


@pytest.mark.parametrize("kind", BY_PLAN)
def test_a_doctored_account_with_a_new_chain_is_found_by_the_plan(honest, of_another_seed, tmp_path, kind):
    folder = doctored_folder(honest, of_another_seed, tmp_path, BY_PLAN[kind], is_resealed=True)

    assert said_by_raypipe(folder)
    if kind not in NEEDS_THE_PLAN:
        assert said_by_checker(folder)


def test_a_whole_account_of_another_run_is_not_that_of_the_checkpoint(honest, of_another_seed, tmp_path):
    shutil.copytree(honest, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "raypipe/account")
    shutil.copytree(of_another_seed / "raypipe/account", tmp_path / "raypipe/account")

    assert said_by_raypipe(tmp_path)


def test_an_account_that_was_sealed_anew_is_not_that_of_the_checkpoint(honest, of_another_seed, tmp_path):
    doctor = BY_CHAIN["another reason of a skip"]
    folder = doctored_folder(honest, of_another_seed, tmp_path, doctor, is_resealed=True)
    assert not said_by_raypipe(folder), "the plan does not know reasons"
    shutil.copy(honest / "raypipe/train.json", folder / "raypipe/train.json")

    with pytest.raises(RaypipeError, match="was saved with an account whose head is"):
        check_run(folder)


def test_a_state_that_was_edited_in_the_checkpoint_is_found(honest, tmp_path):
    shutil.copytree(honest, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "raypipe/train.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "epoch": 1}))

    with pytest.raises(RaypipeError, match="no file of rank 0 leads to the state of the checkpoint"):
        check_run(tmp_path)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_lost_file_of_a_rank_is_found(honest, tmp_path, rank):
    shutil.copytree(honest, tmp_path, dirs_exist_ok=True)
    (tmp_path / f"raypipe/account/train/rank-{rank:05d}-of-00003.parquet").unlink()

    assert said_by_raypipe(tmp_path)


def forged_folder(runs, tmp_path, doctor, **options):
    shutil.copytree(runs / "newest", tmp_path, dirs_exist_ok=True)
    doctor(Checkpoint(tmp_path, runs, **options))
    return tmp_path


@pytest.mark.parametrize("run", ["older", "newest", "later"])
def test_the_accounts_that_are_forged_are_exact(runs, mixed, run):
    for folder in (runs / run, mixed / run):
        assert said_by_raypipe(folder) == ""
        assert said_by_checker(folder) == ""


@pytest.mark.parametrize("kind", FILES)
def test_files_that_were_damaged_or_exchanged_are_found(runs, tmp_path, kind):
    doctor, raypipe_says, checker_says = FILES[kind]
    folder = forged_folder(runs, tmp_path, doctor)

    assert raypipe_says in said_by_raypipe(folder) != ""
    assert checker_says in said_by_checker(folder) != ""


@pytest.mark.parametrize("kind", [*FORGED, *MIXED])
def test_a_forged_account_is_found_although_its_chain_is_new(runs, mixed, tmp_path, kind):
    doctor, raypipe_says, checker_says = {**FORGED, **MIXED}[kind]
    folder = forged_folder(runs if kind in FORGED else mixed, tmp_path, doctor)

    assert raypipe_says in said_by_raypipe(folder) != ""
    if checker_says:
        assert checker_says in said_by_checker(folder)


@pytest.mark.parametrize("kind", [*FORGED, *MIXED])
def test_a_forged_account_with_its_old_chain_is_found_by_both(runs, mixed, tmp_path, kind):
    doctor = {**FORGED, **MIXED}[kind][0]
    folder = forged_folder(runs if kind in FORGED else mixed, tmp_path, doctor, is_sealed=False)

    assert said_by_raypipe(folder)
    assert said_by_checker(folder)


@pytest.mark.parametrize(
    "doctor", [lambda part: part, lambda part: replace(part, emitted=add_runs(part.emitted, part.emitted))]
)
def test_an_earlier_epoch_with_a_forged_selection_is_neither_exact_nor_hides_the_others(runs, tmp_path, doctor):
    def forge(parts):
        return [replace(doctor(part), selection="of others") if part.epoch == 0 else part for part in parts]

    folder = forged_folder(runs, tmp_path, lambda checkpoint: checkpoint.parts(forge, 0, 1, 2))

    checked = check_run(folder)

    assert [bool(one.unchecked) for one in checked.verdicts] == [True, False, False, False]
    assert [one.is_exact for one in checked.verdicts] == [False, True, True, True]
    assert (checked.is_exact, checked.exit_code) == (False, 2)


@pytest.mark.parametrize(
    ("epoch", "doctor", "told"),
    [
        (0, lambda part: replace(part, spec=replace(part.spec, seed=4)), "has the seed 4"),
        (0, lambda part: replace(part, ranks=part.ranks[:1] if part.ranks[0].rank == 0 else ()), "no record of rank 1"),
        (1, lambda part: replace(part, selection=f"of others {len(part.legs)}"), "another order or selection"),
    ],
    ids=["seed", "rank", "selections"],
)
def test_what_is_wrong_by_the_parts_alone_is_told_of_an_epoch_of_another_selection(runs, tmp_path, epoch, doctor, told):
    def forge(parts):
        return [doctor(replace(part, selection="of others")) if part.epoch == epoch else part for part in parts]

    folder = forged_folder(runs, tmp_path, lambda checkpoint: checkpoint.parts(forge, 0, 1, 2))

    checked = check_run(folder)
    lines = checked.verdicts[epoch].describe()

    assert [bool(one.unchecked) for one in checked.verdicts] == [number == epoch for number in range(4)]
    assert checked.exit_code == 1
    assert lines[0].startswith(f"epoch {epoch}: NOT exactly once: 1 ")
    assert "the rest cannot be checked: its frames were chosen otherwise" in lines[0]
    assert told in "\n".join(lines[1:])


def test_parts_that_were_rolled_back_prove_nothing_wrong_of_an_epoch_of_another_selection():
    run = HandRun(make_index([9, 9, 12, 20]), SPEC)
    run.start(2, 3)
    begin = run.state
    run.steps(2)
    run.go_back(begin)
    run.steps(run.world.num_steps + 1)
    first, *others = run.account().parts
    changed = [replace(one, selection="of others") if one.epoch == 0 else one for one in others]
    first = replace(first, selection="of yet others", ranks=first.ranks[:1])
    account = replace(run.account(), parts=(first, *changed))

    verdicts = check_account(run.index, run.axis, account)

    assert [bool(one.unchecked) for one in verdicts] == [True, False]
    assert [one.is_wrong for one in verdicts] == [False, False]


@pytest.mark.parametrize("chosen", ["last", "all"])
def test_a_forged_selection_of_the_last_epoch_is_an_error(runs, tmp_path, chosen):
    def forge(parts):
        last = max(part.epoch for part in parts)
        is_forged = (lambda part: part.epoch == last) if chosen == "last" else (lambda part: True)
        return [replace(part, selection="of others") if is_forged(part) else part for part in parts]

    folder = forged_folder(runs, tmp_path, lambda checkpoint: checkpoint.parts(forge, 0, 1, 2))

    checked = check_run(folder)

    assert not any(one.unchecked for one in checked.verdicts)
    assert not checked.verdicts[-1].is_exact
    assert checked.exit_code == 1


def test_the_checker_is_one_file_that_needs_no_raypipe():
    source = CHECKER.read_text()

    assert "import raypipe" not in source
    assert "from raypipe" not in source
    assert len(source.splitlines()) < 300


@settings(max_examples=15, deadline=None)
@given(lengths, specs, st.data())
def test_both_checkers_pass_any_honest_run(frames, spec, data):
    run = HandRun(make_index(frames), spec, bad=data.draw(st.sets(st.integers(0, len(frames) - 1), max_size=2)))
    with tempfile.TemporaryDirectory() as folder:
        run.root = folder
        (Path(folder) / "meta").mkdir()
        rows = [{"episode_index": number, "length": length} for number, length in enumerate(frames)]
        (Path(folder) / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, rows)))
        try:
            for _ in range(data.draw(st.integers(1, 3))):
                run.start(data.draw(st.sampled_from(WORLDS)), data.draw(st.integers(1, 5)))
                run.steps(data.draw(st.integers(0, 30)))
                run.save()
        except ConfigError:
            # Fewer frames than lanes, or no full batch: tests of the plan.
            assume(False)
        run.write_checkpoint(Path(folder))
        account = read_run_account(folder).account

        lines, wrong = checker.check(folder)

    assert wrong == [], (wrong, lines)
    assert all(verdict.is_exact for verdict in check_account(run.index, run.axis, account))
