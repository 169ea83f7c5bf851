"""Accounts that a forger or a broken disk made: both judges find every kind, and say what `forged_cases` says.

Unlike those of `test_account_doctored`, files are changed as files, and ranks one by one.
"""

import shutil
from dataclasses import replace

import pytest
from account_cases import HandRun, load_checker
from forged_cases import FILES, FORGED, MIXED, Checkpoint

from raypipe.audit.check import check_run
from raypipe.audit.frames import read_frames
from raypipe.errors import RaypipeError
from raypipe.mixture import Mixture
from raypipe.plan import OrderSpec, SelectionSpec
from raypipe.testing import SynthSpec, write_dataset

SPEC = OrderSpec(seed=3, live_spans=2)
checker = load_checker()


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
    for name, lengths in (("small", (5, 6, 9)), ("large", (7, 9, 12, 20))):
        write_dataset(folder / name, SynthSpec(cameras=(), lengths=lengths))
    (folder / "mix.yaml").write_text("datasets:\n  small: {root: small}\n  large: {root: large, weight: 2}\n")
    index, axis = read_frames(str(folder / "mix.yaml"), SelectionSpec())
    run = HandRun(index, SPEC, axis=axis)
    run.root, run.members = "", Mixture(folder / "mix.yaml").sources()
    write_runs(folder, run)
    return folder


def doctored(runs, tmp_path, doctor, **options):
    shutil.copytree(runs / "newest", tmp_path, dirs_exist_ok=True)
    doctor(Checkpoint(tmp_path, runs, **options))
    return tmp_path


def said_by_raypipe(folder):
    """Return what `raypipe account` says; nothing where the account is exact."""
    try:
        checked = check_run(folder)
    except RaypipeError as error:
        return str(error)
    return "" if checked.is_exact else "\n".join(checked.describe())


def said_by_checker(folder):
    return "\n".join(checker.check(folder)[1])


@pytest.mark.parametrize("run", ["older", "newest", "later"])
def test_the_accounts_that_are_forged_are_exact(runs, mixed, run):
    for folder in (runs / run, mixed / run):
        assert said_by_raypipe(folder) == ""
        assert said_by_checker(folder) == ""


@pytest.mark.parametrize("kind", FILES)
def test_files_that_were_damaged_or_exchanged_are_found(runs, tmp_path, kind):
    doctor, raypipe_says, checker_says = FILES[kind]
    folder = doctored(runs, tmp_path, doctor)

    assert raypipe_says in said_by_raypipe(folder) != ""
    assert checker_says in said_by_checker(folder) != ""


@pytest.mark.parametrize("kind", [*FORGED, *MIXED])
def test_a_forged_account_is_found_although_its_chain_is_new(runs, mixed, tmp_path, kind):
    doctor, raypipe_says, checker_says = {**FORGED, **MIXED}[kind]
    folder = doctored(runs if kind in FORGED else mixed, tmp_path, doctor)

    assert raypipe_says in said_by_raypipe(folder) != ""
    if checker_says:
        assert checker_says in said_by_checker(folder)


@pytest.mark.parametrize("kind", [*FORGED, *MIXED])
def test_a_forged_account_with_its_old_chain_is_found_by_both(runs, mixed, tmp_path, kind):
    doctor = {**FORGED, **MIXED}[kind][0]
    folder = doctored(runs if kind in FORGED else mixed, tmp_path, doctor, is_sealed=False)

    assert said_by_raypipe(folder)
    assert said_by_checker(folder)
