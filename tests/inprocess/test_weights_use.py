"""Weights, flags of frames and every n-th frame, from the pipeline to the trainer and to the account."""

import importlib.util
import json
import pickle
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batches import assert_equals_samples, frames_of, frames_of_all, local_loader, varied_spec
from program import run_program
from selection_cases import LENGTHS, write_rows

import raypipe as rp
from raypipe.account import add_runs, count_values, subtract_runs
from raypipe.account.verdict import check_account
from raypipe.errors import ConfigError, ResumeError
from raypipe.testing import write_dataset
from raypipe.train import read_state, restore, write_states
from raypipe.views import view_plan
from raypipe.views.account import check_run, read_frames
from raypipe.views.plan import plan_lines

NUM_FRAMES = sum(LENGTHS)
QUALITY = [1, 0, 2, 1, 0.5, 3, 1, 1, 0]
QUALITY_OF = dict(enumerate(QUALITY))
SELECTED = sum(length for length, weight in zip(LENGTHS, QUALITY, strict=True) if weight)


def load_checker():
    path = Path(__file__).parents[2] / "examples/check_account.py"
    spec = importlib.util.spec_from_file_location("check_account", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_good(episode, frame):
    return (episode + frame) % 3 != 0


def frame_weight(episode, frame):
    return 0.0 if episode == 2 else 1.0 + frame


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_rows(
        tmp_path_factory.mktemp("rows") / "dataset",
        episode_columns={"quality": QUALITY},
        row_columns={"is_good": is_good, "reward": frame_weight},
    )


@pytest.fixture(scope="module")
def dataset(root):
    return rp.open_dataset(root)


def write_parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return str(path)


def make_pipe(dataset, **parts):
    return rp.Pipeline(dataset, **{"batch_size": 4, "seed": 3, "order": {"live_spans": 4}, **parts})


def epoch_of(pipe, epoch=0):
    world = pipe.plan(epoch=epoch)
    steps = [world.frames_at(step, 0) for step in range(world.num_steps)]
    return Counter((e, f) for one in steps for e, f in zip(one.episode.tolist(), one.frame.tolist(), strict=True))


def part_of(episode_weights):
    """The frames of an epoch that each episode gets, exactly, as a fraction of a frame may be."""
    sums = np.array(episode_weights) * LENGTHS
    return np.array([n for n, w in zip(LENGTHS, episode_weights, strict=True) if w]).sum() * sums / sums.sum()


def test_weights_come_from_a_column_a_file_a_mapping_or_a_function(dataset, tmp_path):
    numbers = [*range(9)]
    by_episode = write_parquet(tmp_path / "episodes.parquet", episode_index=numbers[::-1], weight=QUALITY[::-1])
    by_frame = write_parquet(tmp_path / "frames.parquet", index=range(NUM_FRAMES), weight=np.repeat(QUALITY, LENGTHS))
    sources = [
        QUALITY_OF,
        by_episode,
        by_frame,
        Path(by_frame),
        lambda table: np.array(table.column("quality")),
        lambda table: [QUALITY[episode] for episode in table.column("episode_index").to_pylist()],
    ]

    plan = make_pipe(dataset, weights="quality").plan()

    assert all(make_pipe(dataset, weights=one).plan().plan.fingerprint == plan.plan.fingerprint for one in sources)
    inside = make_pipe(dataset, selection={"weights": QUALITY_OF})
    assert inside.plan().plan.fingerprint == plan.plan.fingerprint


def test_episodes_have_their_part_of_an_epoch_to_one_frame(dataset):
    pipe = make_pipe(dataset, weights="quality")

    for epoch in range(4):
        taken = Counter()
        for (episode, _), times in epoch_of(pipe, epoch).items():
            taken[episode] += times
        assert sum(taken.values()) == SELECTED
        assert all(abs(taken[episode] - part) < 1.001 for episode, part in enumerate(part_of(QUALITY)))


def test_weights_of_frames_come_from_a_column_of_the_rows(dataset):
    pipe = make_pipe(dataset, weights="reward")

    times = sum((epoch_of(pipe, epoch) for epoch in range(60)), Counter())

    wanted = {(e, f): frame_weight(e, f) for e, length in enumerate(LENGTHS) for f in range(length)}
    rate = (NUM_FRAMES - LENGTHS[2]) / sum(wanted.values())
    assert all(abs(times[place] - 60 * weight * rate) < 4 for place, weight in wanted.items())


def test_a_flag_of_the_rows_leaves_exactly_its_frames(dataset):
    good = {(e, f) for e, length in enumerate(LENGTHS) for f in range(length) if is_good(e, f)}

    assert epoch_of(make_pipe(dataset, selection={"where": {"is_good": True}})) == Counter(dict.fromkeys(good, 1))
    third = epoch_of(make_pipe(dataset, selection={"where": {"is_good": True}, "every": 3}))
    assert third.total() == len(third) == len(good) // 3
    assert set(third) <= good
    both = epoch_of(make_pipe(dataset, selection={"where": {"is_good": [True]}}, weights="quality"))
    assert {episode for episode, _ in both} == {e for e, weight in QUALITY_OF.items() if weight} & {e for e, _ in good}
    assert set(both) <= good


@pytest.mark.parametrize(
    "parts",
    [
        {"selection": {"every": 3}},
        {"weights": "quality"},
        {"weights": "reward", "selection": {"every": 2, "where": {"is_good": True}}},
    ],
    ids=["every", "episodes", "frames"],
)
def test_a_run_over_other_ranks_hands_over_what_is_planned_and_its_account_says_so(root, parts, tmp_path):
    handed, plain = Counter(), load_checker()
    pipe = make_pipe(rp.open_dataset(root), batch_size=2, **parts)
    for number, (world_size, steps) in enumerate([(1, 3), (2, 2), (3, 99), (3, 99), (2, 1)]):
        folder = tmp_path / f"checkpoint_{number}"
        loaders = [local_loader(pipe, rank, world_size) for rank in range(world_size)]
        for loader in loaders:
            loader._source.attempt = f"attempt-{number}"
            if number:
                assert restore(tmp_path / f"checkpoint_{number - 1}", loader)
            handed.update(frames_of_all(islice(loader, steps)))
        for loader in reversed(loaders):
            write_states(folder, loader)

        checked = check_run(folder)
        assert checked.is_exact, checked.describe()
        assert plain.check(folder)[1] == []

    state = read_state(folder)
    whole = sum((epoch_of(pipe, epoch) for epoch in range(state["epoch"])), Counter())
    begun = handed - whole
    assert not whole - handed
    assert begun
    assert not begun - epoch_of(pipe, state["epoch"])


def test_an_epoch_that_ran_with_other_weights_is_not_called_inexact(root, tmp_path):
    before, after = (make_pipe(rp.open_dataset(root), weights=weights) for weights in ("quality", {0: 3.0}))
    first = local_loader(before)
    list(first)
    write_states(tmp_path / "checkpoint_0", first)
    second = local_loader(after)
    assert restore(tmp_path / "checkpoint_0", second)
    list(second)
    write_states(tmp_path / "checkpoint_1", second)

    checked = check_run(tmp_path / "checkpoint_1")
    done = run_program("account", tmp_path / "checkpoint_1")

    old, new = checked.verdicts
    assert (old.is_exact, old.num_emitted, new.is_exact, checked.is_exact) == (False, SELECTED, True, False)
    assert "its frames were chosen otherwise" in old.unchecked
    assert not any((old.missing, old.foreign, old.gaps))
    assert done.returncode == 2
    assert "epoch 0: cannot be checked" in done.stdout
    assert "checkpoint from before the change" in done.stdout
    assert "NOT exactly once" not in done.stdout
    assert json.loads(run_program("account", tmp_path / "checkpoint_1", "--json").stdout)["epochs"][0]["unchecked"]
    assert run_program("account", tmp_path / "checkpoint_0").returncode == 0


def test_frames_of_the_last_epoch_that_were_chosen_otherwise_are_an_error(root, tmp_path):
    path = write_parquet(tmp_path / "weights.parquet", episode_index=range(len(QUALITY)), weight=QUALITY)
    loader = local_loader(make_pipe(rp.open_dataset(root), weights=path))
    list(loader)
    write_states(tmp_path / "checkpoint", loader)
    write_parquet(tmp_path / "weights.parquet", episode_index=range(len(QUALITY)), weight=QUALITY[::-1])

    checked = check_run(tmp_path / "checkpoint")

    assert [one.unchecked for one in checked.verdicts] == [""]
    assert any("its frames were chosen otherwise" in line for line in checked.verdicts[0].describe())
    assert run_program("account", tmp_path / "checkpoint").returncode == 1


def test_an_account_tells_which_time_of_a_frame_is_missing_or_too_many(dataset, root):
    pipe = make_pipe(dataset, weights="quality")
    loader = local_loader(pipe)
    for _ in range(2):
        list(loader)
    account, (index, axis) = loader.account(), read_frames(str(root), pipe.config.selection)
    emitted = account.parts[1].emitted.values()
    second = emitted[emitted >= NUM_FRAMES][:1]
    never = [number for number in range(NUM_FRAMES, 2 * NUM_FRAMES) if number not in emitted]

    def judge(change):
        part = replace(account.parts[1], emitted=change(account.parts[1].emitted))
        return check_account(index, axis, replace(account, parts=(account.parts[0], part)))[1]

    assert judge(lambda emitted: emitted).is_exact
    (lost,) = judge(lambda emitted: subtract_runs(emitted, count_values(second))).missing
    assert (lost.num_frames, lost.lap) == (1, 1)
    assert "in lap 2 of the epoch" in lost.describe()
    (again,) = judge(lambda emitted: add_runs(emitted, count_values(second))).doubled
    assert (again.num_frames, again.lap) == (1, 1)
    (foreign,) = judge(lambda emitted: add_runs(emitted, count_values(np.array(never[:1])))).foreign
    assert (foreign.num_frames, foreign.lap) == (1, 1)


def test_batches_of_weighted_frames_hold_what_samples_hold(tmp_path):
    dataset = rp.open_dataset(write_dataset(tmp_path / "varied", varied_spec())).windowed({"action": [0, 0.1]})
    pipe = rp.Pipeline(dataset, batch_size=5, seed=1, weights=QUALITY_OF, order={"live_spans": 3, "clip_frames": 4})

    batches = list(pipe.loader(progress=False, transport="local"))

    assert Counter(frames_of_all(batches)) == epoch_of(pipe)
    for batch in batches:
        assert_equals_samples(batch, dataset)
    seeds = [seed for batch in batches for seed in batch["augment_seed"].tolist()]
    assert len(set(seeds)) == len(seeds) > len(set(frames_of_all(batches)))


def test_a_state_goes_on_in_another_process_with_the_same_function_and_not_with_other_weights(dataset, tmp_path):
    pipe = pickle.loads(pickle.dumps(make_pipe(dataset, weights=lambda table: np.array(table.column("quality")))))
    loader = local_loader(pipe)
    whole = frames_of_all(local_loader(make_pipe(dataset, weights="quality")))
    begun = frames_of_all(islice(loader, 3))
    write_states(tmp_path, loader)
    state = json.loads(json.dumps(read_state(tmp_path)))

    goes_on, other = (local_loader(make_pipe(dataset, weights=one)) for one in (QUALITY_OF, {0: 2}))
    goes_on.load_state_dict(state)

    assert begun + frames_of_all(goes_on) == whole
    assert check_run(tmp_path).is_exact
    with pytest.raises(ResumeError, match="selection is"):
        other.load_state_dict(state)


def test_members_of_a_mixture_have_weights_of_their_own(root, tmp_path):
    write_parquet(tmp_path / "frames.parquet", index=range(NUM_FRAMES), weight=np.repeat(QUALITY, LENGTHS))
    file = tmp_path / "mixture.yaml"
    file.write_text(
        "frames_per_epoch: 90\n"
        "datasets:\n"
        f"  one: {{root: {root}, weight: 2, selection: {{weights: frames.parquet}}}}\n"
        f"  two: {{root: {root}, weight: 1, selection: {{every: 3}}}}\n"
    )
    pipe = make_pipe(rp.Mixture(file, progress=False))
    loader = local_loader(pipe)
    batches = list(loader)
    write_states(tmp_path, loader)

    taken = Counter(number for batch in batches for number in batch["dataset_index"].tolist())
    assert taken == {0: 60, 1: 30}
    episodes = {
        e for b in batches for e, n in zip(b["episode_index"].tolist(), b["dataset_index"], strict=True) if not n
    }
    assert episodes == {episode for episode, weight in QUALITY_OF.items() if weight}
    checked = check_run(tmp_path)
    assert checked.is_exact, checked.describe()
    assert load_checker().check(tmp_path)[1] == []


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("qualitty", r"weights names the column 'qualitty', which neither .* have; did you mean 'quality'\?"),
        ("action", r"'action' of dataset .* whose rows hold float32 of the shape \[2\]; one number or flag"),
        ("tasks", "the column 'tasks' holds no numbers"),
        ({3: -1.0}, r"a weight of episode 3 of dataset 'dataset' is -1.0 in the weights \(1 such in all\)"),
        ({3: float("nan")}, "a weight of episode 3 of dataset 'dataset' is nan"),
        ({40: 1.0}, "weights name the episode 40, which dataset 'dataset' does not have"),
        (dict.fromkeys(range(9), 0), "all weights of the selected frames of dataset 'dataset' are 0"),
        ({0: "much"}, "give the name of a column, the path of a parquet file, or a mapping"),
        (3.0, "weights is 3.0; give the name of a column"),
        (lambda table: [1.0], r"returned numbers of the shape \(1,\) for 9 episodes"),
    ],
)
def test_weights_that_make_no_sense_are_told(dataset, weights, message):
    with pytest.raises(ConfigError, match=message):
        make_pipe(dataset, weights=weights)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"index": range(NUM_FRAMES - 1), "weight": [1.0] * (NUM_FRAMES - 1)},
            "56 weights by 'index', .* and not index 56",
        ),
        ({"index": [0] * NUM_FRAMES, "weight": [1.0] * NUM_FRAMES}, "57 weights by 'index', 1 of them different"),
        ({"episode_index": range(10), "weight": [1.0] * 10}, "10 weights by 'episode_index', .* 'dataset' has 9"),
        ({"frame": range(9), "weight": [1.0] * 9}, "has no column 'index'"),
        ({"episode_index": list("abcdefghi"), "weight": [1.0] * 9}, r"column 'episode_index' of .* holds no numbers"),
        ({"episode_index": [None] * 9, "weight": [1.0] * 9}, "9 weights by 'episode_index', .* and not .* 0"),
        ({"episode_index": range(9), "weight": [[1.0, 2.0]] * 9}, r"column 'weight' of .* holds no numbers"),
    ],
)
def test_a_file_that_does_not_fit_the_dataset_is_told(dataset, tmp_path, columns, message):
    with pytest.raises(ConfigError, match=message):
        make_pipe(dataset, weights=write_parquet(tmp_path / "weights.parquet", **columns))


def test_weights_are_said_once(dataset):
    with pytest.raises(ConfigError, match="weights is 'quality', and selection has other weights, 'reward'"):
        make_pipe(dataset, weights="quality", selection={"weights": "reward"})


@pytest.mark.filterwarnings("ignore:rank . left out")
def test_every_time_of_a_bad_frame_is_left_out_and_listed(tmp_path):
    root = write_rows(tmp_path / "dataset", "v2.1")
    pipe = make_pipe(rp.open_dataset(root), weights={2: 5.0}, on_bad_episode="skip")
    (root / "data/chunk-000/episode_000002.parquet").unlink()
    loader = local_loader(pipe)

    handed = Counter(
        place
        for batch in loader
        for place, is_repeat in zip(frames_of(batch), batch["is_repeat"].tolist(), strict=True)
        if not is_repeat
    )

    write_states(tmp_path, loader)
    planned, checked = epoch_of(pipe), check_run(tmp_path)
    lost = sum(times for (episode, _), times in planned.items() if episode == 2)
    assert lost > 2 * LENGTHS[2]
    assert handed == {place: times for place, times in planned.items() if place[0] != 2}
    assert checked.is_exact, checked.describe()
    assert checked.verdicts[0].num_skipped == lost
    assert load_checker().check(tmp_path)[1] == []


def test_weights_of_a_mixture_are_those_of_its_members(root):
    with pytest.raises(ConfigError, match="weights are of one dataset, and this is a mixture"):
        make_pipe(rp.Mixture([root, root], progress=False), weights="quality")


def test_the_plan_and_the_pipeline_tell_what_is_left_out_and_the_shares(dataset, root):
    def plan(**selection):
        return view_plan(str(root), {"seed": 0}, rp.BatchSpec(size=4), world_size=2, selection=selection).report

    weighted, third = plan(weights="quality"), plan(every=3, min_frames=5)

    lost = NUM_FRAMES - SELECTED
    assert weighted.selection[0] == f"{lost} frames left out, 2 whole episodes among them"
    assert [one.frames for one in weighted.rates] == [9, 26, 12, 3]
    assert sum(one.share for one in weighted.rates) == pytest.approx(1)
    assert weighted.rates[-1].share == pytest.approx(part_of(QUALITY)[5] / SELECTED)
    assert weighted.rates[-1].least_times / weighted.rates[0].least_times == pytest.approx(6, rel=1e-4)
    assert third.selection == (
        "8 frames left out, 3 whole episodes among them",
        "16 frames an epoch of 49, each 0.327 times",
    )
    text = "\n".join(f"{name} {line}" for name, line in plan_lines(weighted))
    assert f"weights 9 frames {weighted.rates[0].least_times:.3g} times each" in text
    assert all(f"{line}, " in repr(make_pipe(dataset, weights="quality")) for line in weighted.selection)
    assert plan().selection == plan().rates == ()


def test_the_plan_command_takes_a_selection(root):
    size = (root, "--world-size", 1, "--batch-size", 4)

    told = json.loads(run_program("plan", *size, "--selection", '{"every": 3}', "--json").stdout)
    wrong = run_program("plan", *size, "--selection", "every=3")

    assert (told["frames"], told["rates"][0]["frames"]) == (NUM_FRAMES // 3, NUM_FRAMES)
    assert "--selection is no JSON" in wrong.stderr
    assert wrong.returncode


def test_episodes_that_are_left_out_are_neither_read_nor_weighed(tmp_path):
    quality = [1.0, 2.0, float("nan"), *[1.0] * 6]
    root = write_rows(
        tmp_path / "dataset", episode_columns={"quality": quality}, row_columns={"share": lambda _, frame: 0.1 * frame}
    )
    dataset = rp.open_dataset(root)
    few = {"exclude": [2], "where": {"share": [0.1, 0.2]}, "weights": "quality"}

    frames = set(frames_of_all(local_loader(make_pipe(dataset, selection=few))))

    assert frames == {(e, f) for e, length in enumerate(LENGTHS) if e != 2 for f in (1, 2) if f < length}
    with pytest.raises(ConfigError, match="no frame that is selected of dataset 'dataset' has such a number"):
        make_pipe(dataset, selection={"where": {"share": 0.15}})
    with pytest.raises(ConfigError, match="where has 'high' for 'share' of dataset 'dataset', whose rows hold float32"):
        make_pipe(dataset, selection={"where": {"share": "high"}})


@pytest.mark.parametrize("weights", [{1.7: 0.0}, [(0, 1), (0, 0)]])
def test_weights_by_episode_name_each_episode_once(dataset, weights):
    with pytest.raises(ConfigError, match="weights is "):
        make_pipe(dataset, selection={"weights": weights})


def test_the_file_of_a_member_is_found_from_any_folder(root, dataset, tmp_path, monkeypatch):
    write_parquet(tmp_path / "weights.parquet", episode_index=list(range(len(LENGTHS))), weight=QUALITY)
    monkeypatch.chdir(tmp_path)
    for given in ("weights.parquet", Path("weights.parquet")):
        mixture = rp.Mixture([{"root": root, "selection": {"weights": given}}])

        assert mixture.spec.members[0].selection.weights == str(tmp_path / "weights.parquet")
