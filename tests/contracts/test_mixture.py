"""Mixtures of unlike datasets on a real Ray: every value, exact shares, resume, changes between epochs, bad members."""

import json
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import ray
import torch
from batches import MODES, rows_spec
from mixture_cases import (
    FRAMES,
    MAIN,
    NAMES,
    REAL_CAMERAS,
    REAL_DATA,
    SECONDS,
    UNLIKE,
    WRIST,
    Reference,
    assert_equal_visits,
    assert_equals_reference,
    frames_of,
    frames_of_plan,
    needs_real_data,
    real_pixels,
    visits_of,
    visits_of_ranks,
    write_real_file,
    write_unlike,
)
from ray_session import ensure_ray, run_ranks

import raypipe as rp
from raypipe.account import lay_out, merge_accounts
from raypipe.account.verdict import check_account
from raypipe.errors import ResumeError
from raypipe.mixture import MixtureSpec, read_mixture_file
from raypipe.plan import OrderState, follow_state
from raypipe.testing import write_dataset

pytestmark = pytest.mark.usefixtures("ray_cluster")

ORDER = {"live_spans": 2, "span_frames": 4}
"""Spans are short and few are live: then the bound on shares at every step is narrow."""


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    """The file of a mixture of four unlike datasets, of 249 frames together."""
    return write_unlike(tmp_path_factory.mktemp("unlike"))


def open_mixture(members, **settings):
    return rp.Mixture(members, progress=False, **settings)


def rows_only(path, **changes) -> MixtureSpec:
    """Return the mixture of a file without its cameras."""
    spec = read_mixture_file(str(path))
    return replace(spec, members=tuple(replace(one, cameras={}) for one in spec.members), **changes)


def verdicts_of(pipe, loaders):
    """Return what the account of all ranks says of every epoch."""
    account, mixture = merge_accounts([loader.account() for loader in loaders]), pipe.config.mixture
    episodes = [dataset.meta.episodes for dataset in mixture.datasets]
    axis = lay_out(mixture.names, [(one.episode_index, one.length) for one in episodes], has_laps=True)
    _, index = follow_state(OrderState.from_dict(account.header.state), pipe.config.index())
    return check_account(index, axis, account)


def windowed(path, windows):
    if windows == "seconds":
        return open_mixture(path).windowed(SECONDS)
    return open_mixture(path, rate=10 if "per second" in windows else "own").windowed(offsets=FRAMES)


@pytest.mark.parametrize(
    ("transport", "mode", "windows", "world_size"),
    [("local", "rank", "seconds", 1), ("ray", "rank", "frames at 10 per second", 2), ("ray", "cluster", "frames", 2)],
)
def test_every_value_of_an_epoch_is_that_of_its_own_dataset(unlike, transport, mode, windows, world_size):
    order = {"live_spans": 4, "span_frames": 16}
    pipe = rp.Pipeline(windowed(unlike, windows), batch_size=16, seed=3, order=order, decode=MODES[mode])

    ranks = run_ranks(pipe.loaders(world_size, transport=transport, progress=False))

    world, reference = pipe.plan(world_size=world_size), Reference(unlike.parent, windows)
    for rank, batches in enumerate(ranks):
        planned = [frames_of_plan(world, step, rank) for step in range(world.num_steps)]
        assert [frames_of(batch) for batch in batches] == planned
        for batch in batches:
            assert_equals_reference(batch, reference)
    assert len(visits_of_ranks(ranks)) == 249


@needs_real_data
def test_values_of_real_robots_as_one_are_those_of_each(tmp_path):
    mixture = open_mixture(write_real_file(tmp_path / "real.yaml")).windowed(offsets={"action": [0, 1, 2]})
    order = {"live_spans": 6, "span_frames": 4}
    pipe = rp.Pipeline(mixture, batch_size=24, seed=2, order=order, decode=MODES["rank"])

    with pipe.loader(transport="local", progress=False) as loader:
        batches = list(islice(loader, 2))

    # What k tenths of a second are at 10, 20, 15, 30, 30 and 10 frames per second; 1.5 frames are 2.
    own_offsets = [[0, 1, 2], [0, 2, 4], [0, 2, 3], [0, 3, 6], [0, 3, 6], [0, 1, 2]]
    alone = [
        rp.open_dataset(str(REAL_DATA / name), cameras=()).windowed(offsets={"action": offsets})
        for name, offsets in zip(REAL_CAMERAS, own_offsets, strict=True)
    ]
    assert {number for batch in batches for number, _, _ in frames_of(batch)} == set(range(6))
    for batch in batches:
        for i, (number, episode, frame) in enumerate(frames_of(batch)):
            name, own = list(REAL_CAMERAS)[number], alone[number].sample_of(episode, frame)
            for key in ("action", "observation.state"):
                width = own[key].shape[-1]
                assert torch.equal(batch[key][i][..., :width], own[key])
                assert not batch[key][i][..., width:].any()
                assert batch[f"{key}_dim_is_pad"][i].tolist() == [k >= width for k in range(44)]
            assert torch.equal(batch["action_is_pad"][i], own["action_is_pad"])
            assert (batch["index"][i], batch["task"][i]) == (own["index"], own["task"])
            for camera in (MAIN, WRIST):
                wanted = real_pixels(name, camera, episode, frame)
                # Pillow and torch round apart.
                assert (batch[camera][i].int() - wanted.int()).abs().max() <= 1, (name, episode, frame)
                assert batch[f"{camera}_is_missing"][i] == (camera not in REAL_CAMERAS[name])


@dataclass(frozen=True)
class Run:
    """Three epochs of rows on two ranks."""

    pipe: Any
    epochs: list
    """By epoch, rank and step: the visits of a batch."""
    verdicts: tuple
    state: dict

    def visits(self):
        return [visit for ranks in self.epochs for rank in ranks for step in rank for visit in step]


@pytest.fixture(scope="module")
def run(unlike):
    # 200 frames are more than two laps of no member, and no whole number of laps of any.
    ensure_ray(2)
    pipe = rp.Pipeline(open_mixture(rows_only(unlike, frames_per_epoch=200)), batch_size=5, seed=1, order=ORDER)
    loaders = pipe.loaders(2, num_epochs=3, progress=False)
    ranks = run_ranks(loaders, lambda loader: [[visits_of(batch) for batch in loader] for _ in range(3)])
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    assert states[0] == states[1]
    return Run(pipe, [list(epoch) for epoch in zip(*ranks, strict=True)], verdicts_of(pipe, loaders), states[0])


def test_every_epoch_has_the_exact_share_of_every_member(run):
    counts = [Counter(visit[0] for rank in ranks for step in rank for visit in step) for ranks in run.epochs]

    # 200 frames by weights of 1.7, 0.6, 1 and 0.45: 90.67, 32, 53.33 and 24.
    assert counts == [{0: 91, 1: 32, 2: 53, 3: 24}] * 3
    assert tuple(run.pipe.config.mixture.shares.values()) == (91, 32, 53, 24)


def test_over_epochs_every_frame_of_a_member_comes_equally_often(run):
    visits = run.visits()

    assert len(set(visits)) == len(visits) == 600, "a frame has another seed each time it comes"
    assert_equal_visits(visits)


def test_account_of_every_epoch_says_exactly_once(run):
    assert [(one.epoch, one.is_exact, one.num_frames, one.num_emitted) for one in run.verdicts] == [
        (epoch, True, 200, 200) for epoch in range(3)
    ]


def test_at_every_step_each_member_has_its_share_within_the_bound(run):
    shares, longest, lanes = np.array(tuple(run.pipe.config.mixture.shares.values())), 4, 2
    parts = shares / 200
    bound = parts * lanes * (ORDER["live_spans"] + 2) * longest + longest + parts * len(shares) * longest
    assert bound.max() < 27

    for ranks in run.epochs:
        counts, emitted = np.zeros(len(shares)), 0
        for batches in zip(*ranks, strict=True):
            members = [visit[0] for batch in batches for visit in batch]
            counts += np.bincount(members, minlength=len(shares))
            emitted += len(members)
            assert (np.abs(counts - emitted * parts) <= bound).all()


def train(pipe, world_size, state=None, num_steps=None, parts=()):
    """Let new loaders go on from a state, through JSON, for some steps; return batches, state and loaders.

    Rank 0 carries the parts of an account along, as it does in a training run. States and shares are the same on both
    feeds, and the local one starts at once.
    """
    loaders = pipe.loaders(world_size, transport="local", progress=False)
    for loader in loaders if state is not None else ():
        loader.load_state_dict(json.loads(json.dumps(state)))
        loader.load_account(parts if loader.rank == 0 else ())
    ranks = run_ranks(loaders, lambda loader: list(islice(loader, num_steps)))
    states = [loader.state_dict() for loader in loaders]
    assert all(other == states[0] for other in states)
    return ranks, states[0], loaders


def parts_of(loaders):
    return merge_accounts([loader.account() for loader in loaders]).parts


def test_stops_and_other_world_sizes_leave_the_visits_of_an_epoch_as_they_are(unlike):
    # 4 lanes: 1, 2 and 4 ranks divide them, and 3 do not. A member gives some of its frames only.
    batch = {"size": 12, "scope": "global"}
    spec = rows_only(unlike, frames_per_epoch=204)
    selected = replace(spec.members[2], selection={"episodes": [0, 2], "drop_last_frames": 4})
    mixture = open_mixture(replace(spec, members=(*spec.members[:2], selected, spec.members[3])))
    pipe = rp.Pipeline(mixture, batch_size=batch, seed=1, order={**ORDER, "lanes": 4})

    whole, _, _ = train(pipe, 1)
    first, state, loaders = train(pipe, 2, None, 5)
    second, state, loaders = train(pipe, 4, state, 4, parts_of(loaders))
    third, end, loaders = train(pipe, 3, state, None, parts_of(loaders))

    assert (end["epoch"], end["legs"], end["mixture"]["since"]) == (1, [], 0)
    assert steps_of(first) + steps_of(second) == steps_of(whole)[:9]
    came = [visit for ranks in (first, second, third) for visit in visits_of_ranks(ranks)]
    assert sorted(came) == visits_of_ranks(whole)
    assert {(episode, frame) for number, episode, frame, _ in came if number == 2} == {
        (episode, frame) for episode, stop in ((0, 21), (2, 17)) for frame in range(stop)
    }
    (verdict,) = verdicts_of(pipe, loaders)
    assert (verdict.is_exact, verdict.num_emitted) == (True, len(came)) == (True, 204), verdict.describe()


def steps_of(ranks):
    """The global batches: what all ranks have in a step."""
    return [sorted(v for batch in batches for v in visits_of(batch)) for batches in zip(*ranks, strict=True)]


def changed(spec, *, drop="", **weights) -> MixtureSpec:
    members = [replace(one, weight=weights.get(one.name, one.weight)) for one in spec.members if one.name != drop]
    return replace(spec, members=tuple(members))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"cr5": 1.2}, "frames per epoch of 'cr5': 32 in the state, 55 here"),
        ({"drop": "umi"}, "'umi' is in the state and not here"),
    ],
)
def test_state_of_another_mixture_is_refused_and_the_member_is_named(unlike, run, change, line):
    spec = changed(rows_only(unlike, frames_per_epoch=200), **change)
    pipe = rp.Pipeline(open_mixture(spec), batch_size=5, seed=1, order=ORDER)

    with pytest.raises(ResumeError) as caught:
        pipe.loader(transport="local", progress=False).load_state_dict(run.state)

    assert line in str(caught.value)
    assert "allow_mixture_change=True" in str(caught.value)


def test_mixture_that_may_change_goes_on_between_epochs_and_not_within_one(unlike, run):
    spec = changed(rows_only(unlike, frames_per_epoch=200), cr5=1.2)
    options = {"batch_size": 5, "seed": 1, "order": ORDER}
    pipe = rp.Pipeline(open_mixture(spec), **options, allow_mixture_change=True)

    ranks, state, loaders = train(pipe, 2, run.state)

    shares = tuple(pipe.config.mixture.shares.values())
    assert shares == (78, 55, 46, 21)
    assert Counter(number for number, *_ in visits_of_ranks(ranks)) == dict(enumerate(shares))
    # Each member goes on in its laps where it stood.
    assert_equal_visits([*run.visits(), *visits_of_ranks(ranks)])
    assert (state["epoch"], state["mixture"]["since"]) == (4, 3)
    (verdict,) = verdicts_of(pipe, loaders)
    assert (verdict.epoch, verdict.is_exact, verdict.num_emitted) == (3, True, 200), verdict.describe()
    within = run.pipe.state_at(2, world_size=2)
    with pytest.raises(ResumeError, match="within epoch 0: go on with the mixture that it was saved with"):
        loaders[0].load_state_dict(within)


def test_changed_members_go_on_where_they_stood_and_new_ones_begin(unlike, run):
    # Without one of the four, and with another under a new name.
    spec = changed(rows_only(unlike, frames_per_epoch=150), drop="umi")
    added = replace(spec.members[1], name="another", weight=0.5)
    spec = replace(spec, members=(added, *spec.members))
    pipe = rp.Pipeline(open_mixture(spec), batch_size=5, seed=1, order=ORDER, allow_mixture_change=True)

    ranks, state, loaders = train(pipe, 2, run.state)
    again, _, more = train(pipe, 3, state)

    positions = {one["name"]: one["position"] for one in state["mixture"]["members"]}
    assert positions == {"another": 0, "aloha": 3 * 91, "cr5": 3 * 32, "so101": 3 * 53}
    for batches, epoch, who in ((ranks, 3, loaders), (again, 4, more)):
        counts = Counter(number for number, *_ in visits_of_ranks(batches))
        assert [counts[number] for number in range(4)] == list(pipe.config.mixture.shares.values())
        *before, verdict = verdicts_of(pipe, who)
        assert (verdict.epoch, verdict.is_exact, verdict.num_emitted) == (epoch, True, 150), verdict.describe()
        # The second run went on from the state alone: its account tells nothing of the first one's epoch.
        assert [one.is_exact for one in before] == [False] * (epoch - 3)


@pytest.mark.filterwarnings("ignore:rank . left out")
def test_bad_data_of_a_member_makes_holes_and_is_accounted_for_under_its_name(unlike, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(unlike.parent, folder)
    (folder / "cr5/videos/chunk-000/observation.images.top/episode_000001.mp4").write_bytes(b"no video")
    mixture = open_mixture(folder / "mixture.yaml").windowed(offsets=FRAMES)
    order = {"live_spans": 4, "span_frames": 16}
    skip = {"on_bad_episode": "skip", "max_bad_episodes": 1}
    pipe = rp.Pipeline(mixture, batch_size=16, seed=3, order=order, decode=MODES["cluster"], **skip)
    loaders = pipe.loaders(2, progress=False)

    ranks = run_ranks(loaders)

    world, bad, reference = pipe.plan(world_size=2), (NAMES.index("cr5"), 1), Reference(unlike.parent, "frames")
    num_holes = 0
    for rank, batches in enumerate(ranks):
        for step, batch in enumerate(batches):
            planned = frames_of_plan(world, step, rank)
            again = batch["is_repeat"].tolist()
            came = [frame for frame, is_repeat in zip(frames_of(batch), again, strict=True) if not is_repeat]
            assert came == [frame for frame in planned if frame[:2] != bad]
            num_holes += len(planned) - len(came)
            assert_equals_reference(batch, reference)
    (verdict,) = verdicts_of(pipe, loaders)
    assert verdict.is_exact, verdict.describe()
    assert [(one.dataset, one.episode) for one in verdict.skipped] == [("cr5", 1)]
    assert verdict.num_skipped == num_holes == loaders[0].world_stats().skipped_frames > 0
    assert verdict.num_emitted == 249 - num_holes


def test_mixture_of_many_members_trains_without_the_broken_ones(tmp_path):
    first = write_dataset(tmp_path / "robot-00", rows_spec(lengths=(5, 3)))
    roots = [first, *(tmp_path / f"robot-{number:02d}" for number in range(1, 60))]
    for root in roots[1:]:
        shutil.copytree(first, root)
    broken = {roots[7]: "meta/info.json", roots[21]: "meta/episodes", roots[58]: "data"}
    for root, part in broken.items():
        path = root / part
        path.unlink() if path.is_file() else shutil.rmtree(path)
    (roots[40] / "meta/info.json").write_text('{"codebase_version": "v3.0"')

    with pytest.warns(UserWarning, match="4 of 60 datasets") as warned:
        mixture = open_mixture([str(root) for root in roots], on_bad_dataset="skip")
    pipe = rp.Pipeline(mixture, batch_size=20, seed=0)
    loaders = pipe.loaders(2, transport="local", progress=False)
    ranks = run_ranks(loaders)

    bad = ["robot-07", "robot-21", "robot-40", "robot-58"]
    assert [one.name for one in mixture.bad] == bad
    assert all(name in str(warned[0].message) for name in bad)
    frames = [(episode, frame) for episode, length in enumerate((5, 3)) for frame in range(length)]
    wanted = [(number, *frame) for number in range(56) for frame in frames]
    assert [visit[:3] for visit in visits_of_ranks(ranks)] == wanted
    (verdict,) = verdicts_of(pipe, loaders)
    assert (verdict.is_exact, verdict.num_emitted) == (True, 56 * 8)


def test_epoch_as_a_ray_dataset_has_blocks_of_one_schema_and_the_values_of_the_members(unlike):
    pipe = rp.Pipeline(windowed(unlike, "seconds"), batch_size=4, seed=0)
    dataset = pipe.to_ray(epoch=1).materialize()

    blocks = ray.get(dataset.to_arrow_refs())
    tables = list(dataset.iter_batches(batch_size=None, batch_format="numpy"))

    assert len(blocks) == len(tables) > 10
    for block in blocks:
        assert block.schema.equals(blocks[0].schema, check_metadata=True)
    reference = Reference(unlike.parent, "seconds")
    for table in tables:
        assert len({frame[:2] for frame in frames_of(table)}) == 1
        assert_equals_reference(table, reference, added=())
    planned = [frames_of_plan(pipe.plan(epoch=1), step, 0) for step in range(pipe.plan(epoch=1).num_steps)]
    assert sorted(f for table in tables for f in frames_of(table)) == sorted(f for step in planned for f in step)
    assert Counter(UNLIKE[NAMES[frame[0]]].robot_type for step in planned for frame in step) == Counter(
        robot for table in tables for robot in table["robot_type"]
    )
