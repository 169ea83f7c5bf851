"""States, accounts and plans as order version 1 wrote them first: every later version goes on from them unchanged.

The files hold no data: datasets are written anew, and an order knows them by their metadata. ``PYTHONPATH=tests python
tests/inprocess/test_frozen.py`` writes the files that are not there yet; those that are there stay as they are.
"""

import hashlib
import json
import sys
import tempfile
from itertools import islice
from pathlib import Path

import pyarrow.fs
import pytest
from batches import local_loader
from program import run_program

from raypipe.account import merge_accounts, read_rank_accounts, write_rank_account
from raypipe.account.file import read_account
from raypipe.account.verdict import check_account
from raypipe.mixture import open_dataset
from raypipe.pipeline import Pipeline
from raypipe.plan import OrderState, SelectionSpec, follow_state, plan_epoch, resume
from raypipe.testing import CameraSpec, SynthSpec, write_dataset
from raypipe.views.account import read_frames

FROZEN = Path(__file__).parent.parent / "golden" / "frozen_1"

ORDER = {
    "live_spans": 3,
    "span_frames": 4,
    "clip_frames": "span",
}
"""The order of these runs, said in full: a field that comes later is to stand here with what was meant before it."""

RUNS = {
    "cut_spans": ("rows", ORDER),
    "whole_episodes": ("rows", {**ORDER, "span_frames": "episode"}),
    "six_lanes_wrap": ("rows", {**ORDER, "lanes": 6, "tail": "wrap"}),
    "drop": ("rows", {**ORDER, "tail": "drop"}),
    "file_order": ("rows", {**ORDER, "shuffle": False}),
    "mixture": ("mixture.yaml", ORDER),
}
"""By name: what is read, and in which order."""

NOTHING_SAID = {"rows_defaults": ("rows", {}), "mixture_defaults": ("mixture.yaml", {})}
"""Runs that leave the order to raypipe, as most do: what it chooses may change, but not under a run that goes on."""

ACCOUNTS = {"rows_account": "rows", "mixture_account": "mixture.yaml"}
PLACES = (".", "checkpoint_000000")
"""Of a recorded run: all of it, and its complete checkpoint alone."""

PLANNED = ("rows", "camera", "mixture.yaml")
EPOCHS, WORLDS = (0, 1, 7), (1, 2, 3)
ASKED = ((3, 1), (9, 2), (16, 0))
"""Steps and ranks of a recorded run: on 2 ranks, on 3, and in the second epoch."""

LENGTHS = {"rows": (20, 1, 33, 12, 27, 9, 30, 14, 16), "small": (7, 5, 11), "large": (20, 9, 14, 30, 16, 25)}
MIXTURE = "datasets:\n  small: {root: small, weight: 1}\n  large: {root: large, weight: 2}\n"
"""Of 137 frames an epoch takes two laps of the small one, and not all of the large one."""

pytestmark = pytest.mark.filterwarnings("ignore:the state was saved with another source of the dataset")


def write_sources(folder: Path) -> Path:
    for name, lengths in LENGTHS.items():
        write_dataset(folder / name, synth_spec(lengths))
    camera = CameraSpec(name="observation.images.top", height=32, width=48, kind="image")
    write_dataset(folder / "camera", synth_spec(LENGTHS["rows"], (camera,)))
    (folder / "mixture.yaml").write_text(MIXTURE)
    return folder


def synth_spec(lengths, cameras=()) -> SynthSpec:
    return SynthSpec(version="v3.0", lengths=lengths, fps=10, cameras=cameras, state_dim=2, action_dim=2)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return write_sources(tmp_path_factory.mktemp("frozen"))


def make_pipe(sources, name):
    source, order = {**RUNS, **NOTHING_SAID}[name]
    return open_pipe(sources, source, order)


def open_pipe(sources, source, order=ORDER):
    # 12 frames over all ranks share out on 1, 2, 3 and 6 lanes.
    batch = {"size": 12, "scope": "global"}
    return Pipeline(open_dataset(str(sources / source)), batch_size=batch, seed=11, order=order)


def start(pipe, world_size, state=None):
    loaders = [local_loader(pipe, rank, world_size) for rank in range(world_size)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return loaders


def take(loaders, num_steps=1_000):
    """Take so many batches on every rank, at most to the end of the epoch."""
    return [list(islice(loader, num_steps)) for loader in loaders]


def save_states(pipe):
    """Return states and the ranks to go on with: from within an epoch on 2 ranks, and from its second leg on 3."""
    first = start(pipe, 2)
    take(first, 5)
    second = start(pipe, 3, first[0].state_dict())
    take(second, 2)
    begun, moved = first[0].state_dict(), second[0].state_dict()
    return [(begun, 2), (begun, 3), (moved, 3), (moved, 2)]


def go_on(pipe, state, world_size):
    """Return all that follows a state: the rest of its epoch on every rank, and two steps of the next."""
    loaders = start(pipe, world_size, state)
    fingerprint = plan_from(pipe, state, world_size).fingerprint
    rest, after = take(loaders), take(loaders, 2)
    return {
        "fingerprint": fingerprint,
        "rest": [[frames_of(batch) for batch in batches] for batches in rest],
        "after": [[frames_of(batch) for batch in batches] for batches in after],
        "marks": [marks_of(batches) for batches in map(list.__add__, rest, after)],
    }


def plan_from(pipe, state, world_size):
    saved, index = follow_state(OrderState.from_dict(state), pipe.config.index())
    todo = resume(saved, index, saved.spec, world_size=world_size)
    return plan_epoch(index, todo.spec, epoch=todo.epoch, legs=todo.legs)


def frames_of(batch):
    """The [dataset, episode, frame] of every sample of a batch."""
    columns = (batch[key].tolist() for key in ("dataset_index", "episode_index", "frame_index"))
    return [list(frame) for frame in zip(*columns, strict=True)]


def marks_of(batches):
    """A digest of the seeds of all samples, and of which are repeats where some may be."""
    keys = ("augment_seed", "is_repeat")
    marks = [[batch[key].tolist() for key in keys if key in batch] for batch in batches]
    return hashlib.blake2b(json.dumps(marks).encode(), digest_size=8).hexdigest()


def record(pipe, folder):
    """Leave a run's folder behind: 5 steps on 2 ranks and 2 more that are lost, then 3 ranks to the second epoch.

    All ranks put their account into the first checkpoint, and rank 0 alone into the second.
    """
    first = start_recorded(pipe, 2, folder, "attempt-1")
    take(first, 5)
    for loader in first:
        write_rank_account(folder / "checkpoint_000000/raypipe", loader.account(), loader.rank, 2)
    state = first[0].state_dict()
    take(first, 2)
    parts = read_parts(folder / "checkpoint_000000")
    second = start_recorded(pipe, 3, folder, "attempt-2", state, parts)
    take(second)
    take(second, 1)
    write_rank_account(folder / "checkpoint_000001/raypipe", second[0].account(), 0, 3)
    for loader in second[1:]:
        loader.save_account()
    take(second, 1)


def start_recorded(pipe, world_size, folder, attempt, state=None, parts=()):
    loaders = start(pipe, world_size, state)
    for loader in loaders:
        loader._source.attempt = attempt
        loader.load_account(parts if loader.rank == 0 else ())
        loader.keep_account(folder)
    return loaders


def read_parts(checkpoint):
    return read_rank_accounts(pyarrow.fs.LocalFileSystem(), str(checkpoint / "raypipe"), "train")


def account_files(folder):
    """The accounts of checkpoints and attempts; those beside checkpoints are named by a digest of a place too."""
    paths = (path.relative_to(folder) for path in folder.rglob("*.parquet"))
    return sorted(path for path in paths if "saved" not in path.parts)


def print_account(sources, name, place):
    return print_json("account", FROZEN / name / place, "--root", sources / ACCOUNTS[name], "--json")


def print_step(sources, name, step, rank):
    root = sources / ACCOUNTS[name]
    return print_json("where", step, rank, "--account", FROZEN / name, "--root", root, "--json")


def print_plan(sources, source):
    order = [text for key, value in ORDER.items() for text in (f"--{key.replace('_', '-')}", value)]
    options = ("--world-size", 2, "--batch-size", 6, "--seed", 11, "--epoch", 1, *order)
    return print_json("plan", sources / source, *options, "--json")


def print_json(*arguments, codes=(0,)):
    """Return what a command prints, without the places of files."""
    done = run_program(*arguments)
    assert done.returncode in codes, (done.stdout, done.stderr)
    return {key: value for key, value in json.loads(done.stdout).items() if key not in ("place", "root")}


def plan_fingerprints(sources):
    pipes = {name: make_pipe(sources, name) for name in RUNS}
    return {
        name: [[pipe.plan(epoch=epoch, world_size=world).plan.fingerprint for world in WORLDS] for epoch in EPOCHS]
        for name, pipe in pipes.items()
    }


def load(name):
    return json.loads((FROZEN / name).read_text())


MOVED = {"is_decode_on_exit", "live_bytes", "live_pixel_bytes", "first_batch_frames", "first_batch_bytes"} | {
    "resume_frames",
    "advice",
}
"""What a plan prints of memory and of the first batch: pixels are held by clips since, and spans come in the order of
their first frame."""


def assert_kept(frozen, now, place=""):
    """Require every frozen key to have its value still; there may be more keys."""
    if isinstance(frozen, dict):
        assert frozen.keys() <= now.keys(), f"{place} lacks {sorted(frozen.keys() - now.keys())}"
        for key, value in frozen.items():
            assert_kept(value, now[key], f"{place}/{key}")
    elif isinstance(frozen, list):
        assert len(frozen) == len(now), place
        for number, (value, other) in enumerate(zip(frozen, now, strict=True)):
            assert_kept(value, other, f"{place}/{number}")
    else:
        # Means are floats, and another machine may add them up in another order.
        wanted = pytest.approx(frozen, rel=1e-9) if isinstance(frozen, float) else frozen
        assert now == wanted, f"{place} is {now!r}, and was {frozen!r}"


@pytest.mark.parametrize("name", [*RUNS, *NOTHING_SAID])
def test_a_frozen_state_goes_on_with_the_same_frames(sources, name):
    pipe = make_pipe(sources, name)

    for saved in load(f"state_{name}.json"):
        found = go_on(pipe, saved["state"], saved["world_size"])

        assert found == saved["follows"], f"on {saved['world_size']} ranks from {saved['state']}"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_saves_the_states_that_were_frozen(sources, name):
    frozen = [(OrderState.from_dict(saved["state"]), saved["world_size"]) for saved in load(f"state_{name}.json")]

    found = [(OrderState.from_dict(state), ranks) for state, ranks in save_states(make_pipe(sources, name))]

    assert found == frozen


@pytest.mark.parametrize("name", [*RUNS, *NOTHING_SAID])
def test_a_frozen_state_is_written_again_with_all_it_said(name):
    for saved in load(f"state_{name}.json"):
        said = {key: value for key, value in saved["state"].items() if key != "source"}

        written = OrderState.from_dict(json.loads(json.dumps(saved["state"]))).to_dict()

        assert_kept(said, written)


def test_plan_fingerprints_are_the_frozen_ones(sources):
    assert plan_fingerprints(sources) == load("fingerprints.json")


@pytest.mark.parametrize("name", ACCOUNTS)
def test_a_frozen_account_is_exact(sources, name):
    frozen = load("verdicts.json")[name]

    for place in PLACES:
        found = print_account(sources, name, place)

        assert found["is_exact"] is True
        assert_kept(frozen[place], found)


@pytest.mark.parametrize("name", ACCOUNTS)
def test_a_run_writes_the_account_that_was_frozen(sources, tmp_path, name):
    record(open_pipe(sources, ACCOUNTS[name]), tmp_path)

    assert account_files(tmp_path) == account_files(FROZEN / name)
    for path in account_files(tmp_path):
        found, frozen = read_account(tmp_path / path), read_account(FROZEN / name / path)
        assert found.parts == frozen.parts, path
        assert found.header.order_state == frozen.header.order_state, path


@pytest.mark.parametrize("checkpoint", ["checkpoint_000000", "checkpoint_000001"])
@pytest.mark.parametrize("name", ACCOUNTS)
def test_a_run_that_goes_on_from_a_frozen_checkpoint_is_exact(sources, tmp_path, name, checkpoint):
    pipe = open_pipe(sources, ACCOUNTS[name])
    (path, *_) = sorted((FROZEN / name / checkpoint).rglob("*.parquet"))
    state, parts = read_account(path).header.state, read_parts(FROZEN / name / checkpoint)

    loaders = start_recorded(pipe, 2, tmp_path, "attempt-3", state, parts)
    take(loaders)

    _, axis = read_frames(str(sources / ACCOUNTS[name]), SelectionSpec())
    account = merge_accounts([loader.account() for loader in loaders])
    verdicts = check_account(loaders[0]._stand.index, axis, account)
    assert not any(part.missing_ranks for part in parts)
    assert all(verdict.is_exact and verdict.is_finished for verdict in verdicts), [v.describe() for v in verdicts]
    assert [verdict.epoch for verdict in verdicts] == list(range(state["epoch"] + 1))


@pytest.mark.parametrize("name", ACCOUNTS)
def test_steps_of_a_frozen_account_had_the_same_frames(sources, name):
    for asked, frozen in zip(ASKED, load("steps.json")[name], strict=True):
        assert_kept(frozen, print_step(sources, name, *asked))


@pytest.mark.parametrize("source", PLANNED)
def test_a_plan_of_an_order_said_in_full_is_printed_as_it_was(sources, source):
    # Images that rows store count among the rows since.
    moved = MOVED | {"live_row_bytes"} if source == "camera" else MOVED
    frozen = {key: value for key, value in load("plans.json")[source].items() if key not in moved}

    assert_kept(frozen, print_plan(sources, source))


def write_frozen(sources: Path) -> None:
    """Write the files that are not there yet."""
    FROZEN.mkdir(exist_ok=True)
    for name in (*RUNS, *NOTHING_SAID):
        freeze(f"state_{name}.json", lambda name=name: follow_states(make_pipe(sources, name)))
    for name, source in ACCOUNTS.items():
        if not (FROZEN / name).exists():
            record(open_pipe(sources, source), FROZEN / name)
    freeze("fingerprints.json", lambda: plan_fingerprints(sources))
    freeze("verdicts.json", lambda: {n: {p: print_account(sources, n, p) for p in PLACES} for n in ACCOUNTS})
    freeze("steps.json", lambda: {name: [print_step(sources, name, *asked) for asked in ASKED] for name in ACCOUNTS})
    freeze("plans.json", lambda: {source: print_plan(sources, source) for source in PLANNED})


def follow_states(pipe):
    return [
        {"state": state, "world_size": world_size, "follows": go_on(pipe, state, world_size)}
        for state, world_size in save_states(pipe)
    ]


def freeze(name, make):
    if (FROZEN / name).exists():
        print(f"{name} is frozen", file=sys.stderr)
        return
    (FROZEN / name).write_text(json.dumps(make()) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_frozen(write_sources(Path(folder) / "sources"))
