"""Relative and delta actions through datasets, loaders and mixtures; their statistics, and who refuses others'."""

import json
import os
import pickle
import warnings

import numpy as np
import pytest
import torch
from batches import assert_equals_samples, local_loader, rows_spec

from raypipe.dataset import action_stats, open_dataset
from raypipe.errors import ConfigError, DatasetError
from raypipe.mixture import Mixture, MixtureStats, Normaliser
from raypipe.pipeline import Pipeline, index_frames
from raypipe.plan import SelectionSpec
from raypipe.testing import SynthSpec, write_dataset

STATE = "observation.state"
OFFSETS = {"action": [-1, 0, 1, 2, 5], STATE: [-1, 0]}
WIDTHS = {"wide": (4, ["a", "b", "c", "gripper"]), "narrow": (2, ["gripper", "a"])}


def write_named(root, width, names, lengths=(7, 1, 12, 5)):
    write_dataset(root, SynthSpec(lengths=lengths, cameras=(), state_dim=width, action_dim=width, robot_type=root.name))
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    for name in ("action", STATE):
        info["features"][name]["names"] = names
    path.write_text(json.dumps(info))
    return str(root)


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("actions")
    return {name: write_named(folder / name, *about) for name, about in WIDTHS.items()}


@pytest.fixture
def dataset(roots):
    return open_dataset(roots["wide"]).windowed(offsets=OFFSETS)


def slow_vectors(dataset, mode, kept=(3,), frames=None):
    """Return every vector that statistics count, from samples without `actions`, one number at a time."""
    plain, vectors = dataset.windowed(offsets={"action": dataset.window.offsets["action"]}), []
    for episode, length in enumerate(plain.meta.episodes.length.tolist()):
        for frame in range(length) if frames is None else frames:
            sample = plain.sample_of(episode, frame)
            window, state = sample["action"].double().numpy(), sample[STATE].double().numpy()
            for slot in range(len(window)):
                if not sample["action_is_pad"][slot]:
                    less = window[slot - 1] if mode == "delta" and slot else state
                    vectors.append(
                        [v if i in kept else v - s for i, (v, s) in enumerate(zip(window[slot], less, strict=True))]
                    )
    return np.array(vectors, dtype=np.float32)


@pytest.mark.parametrize("mode", ["relative", "delta"])
def test_batches_hold_what_the_reference_path_gives(dataset, mode):
    represented = dataset.with_actions({"mode": mode, "absolute": ["gripper"]})

    batches = list(local_loader(Pipeline(represented, batch_size=4, seed=0)))

    assert len(batches) > 1
    for batch in batches:
        assert_equals_samples(batch, represented)
        assert set(batch["action_representation"]) == {f"{mode} to {STATE}; absolute gripper"}


def test_only_the_action_changes(dataset):
    represented = dataset.with_actions({"mode": "relative"})

    for sample, plain in zip(represented, dataset, strict=True):
        assert sample.keys() - plain.keys() == {"action_representation"}
        for key in plain.keys() - {"action"}:
            assert torch.equal(sample[key], plain[key]) if isinstance(plain[key], torch.Tensor) else True, key
        moved = represented.actions.decode(sample["action"], plain[STATE][1])
        torch.testing.assert_close(moved, plain["action"], rtol=1e-6, atol=1e-5)


def test_the_order_of_frames_does_not_move(dataset):
    plain = Pipeline(dataset, batch_size=4, seed=3)
    represented = Pipeline(dataset, batch_size=4, seed=3, actions={"mode": "delta"})

    frames = [[batch["index"].tolist() for batch in local_loader(pipe)] for pipe in (plain, represented)]

    assert frames[0] == frames[1]
    states = [local_loader(pipe).state_dict() for pipe in (plain, represented)]
    assert states[1].pop("actions") == f"delta to {STATE}"
    assert states[0] == states[1]


def test_members_of_a_mixture_are_as_they_are_alone(roots):
    spec = {"mode": "relative", "absolute": ["gripper"]}
    mixture = Mixture(list(roots.values()), progress=False).windowed(offsets=OFFSETS)

    batches = list(local_loader(Pipeline(mixture, batch_size=6, seed=0, actions=spec)))

    alone = [open_dataset(root).windowed(offsets=OFFSETS).with_actions(spec) for root in roots.values()]
    assert {int(number) for batch in batches for number in batch["dataset_index"]} == {0, 1}
    for batch in batches:
        for i, number in enumerate(batch["dataset_index"].tolist()):
            sample = alone[number].sample_of(int(batch["episode_index"][i]), int(batch["frame_index"][i]))
            width = sample["action"].shape[-1]
            assert torch.equal(batch["action"][i, :, :width], sample["action"])
            assert not batch["action"][i, :, width:].any()
            assert batch["action_representation"][i] == sample["action_representation"]


def test_statistics_of_a_mixture_are_of_its_own_actions_also_after_those_of_another_were_read(roots):
    mixture = Mixture(list(roots.values()), progress=False)
    assert not mixture.stats.representations

    relative = mixture.with_actions({"mode": "relative"})

    assert relative.stats.representations == {"action": str(relative.actions)}


def test_a_number_must_be_in_every_member_and_a_pattern_in_one(roots):
    mixture = Mixture(list(roots.values()), progress=False)

    assert [len(one.actions.dims) for one in mixture.with_actions({"mode": "delta", "absolute": ["b*"]}).datasets] == [
        3,
        2,
    ]
    with pytest.raises(ConfigError, match="'action' of member 'narrow' has no number 'b'"):
        mixture.with_actions({"mode": "delta", "absolute": ["b"]})
    with pytest.raises(ConfigError, match="no member has a number of 'action' that fits 'z\\*'"):
        mixture.with_actions({"mode": "delta", "absolute": ["z*"]})
    with pytest.raises(ConfigError, match="the mixture does not have"):
        mixture.with_actions({"mode": "delta", "to": "observation.pose"})


@pytest.mark.parametrize("mode", ["relative", "delta"])
def test_statistics_are_of_all_windows_without_padding(dataset, mode):
    values = slow_vectors(dataset, mode)

    stats = dataset.with_actions({"mode": mode, "absolute": ["gripper"]}).stats

    numbers = values.astype(np.float64)
    found = stats["action"]
    assert found["count"].tolist() == [len(values)]
    np.testing.assert_array_equal(found["min"], numbers.min(axis=0))
    np.testing.assert_array_equal(found["max"], numbers.max(axis=0))
    np.testing.assert_allclose(found["mean"], numbers.mean(axis=0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found["std"], numbers.std(axis=0), rtol=1e-12)
    for name, share in action_stats.QUANTILES.items():
        np.testing.assert_allclose(found[name], np.quantile(numbers, share, axis=0), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(stats[STATE]["mean"], dataset.stats[STATE]["mean"])


@pytest.mark.parametrize(
    "selection",
    [
        {"segments": [(episode, 0, 1) for episode in range(4)]},
        {"where": {"frame_index": [0]}},
        {"where": {"frame_index": [0]}, "every": 2},
    ],
    ids=["segments", "frames by a column", "every second of them"],
)
def test_statistics_of_a_pipeline_are_of_the_frames_that_it_selects(dataset, selection):
    pipe = Pipeline(dataset, batch_size=2, seed=0, actions={"mode": "relative"}, selection=selection)

    values = slow_vectors(dataset, "relative", kept=(), frames=[0])

    assert pipe.stats["action"]["count"].tolist() == [len(values)]
    np.testing.assert_allclose(pipe.stats["action"]["mean"], values.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_statistics_are_kept_until_rows_change(roots, tmp_path, monkeypatch):
    dataset = open_dataset(write_named(tmp_path / "own", *WIDTHS["wide"])).with_actions({"mode": "relative"})
    index, folder = index_frames(dataset), str(tmp_path / "kept")
    reads = []
    measure = action_stats._measure
    monkeypatch.setattr(action_stats, "_measure", lambda *given: reads.append(1) or measure(*given))

    first = action_stats.action_stats(dataset, index, folder=folder)
    again = action_stats.action_stats(dataset, index, folder=folder)
    assert len(reads) == 1
    assert first.keys() == again.keys()
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert pickle.loads(pickle.dumps(again)).representation == first.representation

    action_stats.action_stats(dataset, index_frames(dataset, SelectionSpec(exclude=(0,))), folder=folder)
    action_stats.action_stats(dataset.windowed(offsets={"action": [0, 1]}), index, folder=folder)
    assert len(reads) == 3
    os.utime(next((tmp_path / "own/data").rglob("*.parquet")), (1, 1))
    action_stats.action_stats(dataset, index, folder=folder)
    assert len(reads) == 4
    for path in (tmp_path / "kept").iterdir():
        path.write_text("{damaged")
    action_stats.action_stats(dataset, index, folder=folder)
    assert len(reads) == 5


def test_statistics_name_the_episode_with_values_that_are_no_numbers(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = write_named(tmp_path / "nan", 2, ["a", "b"], lengths=(4, 4))
    (path,) = (tmp_path / "nan/data").rglob("*.parquet")
    table = pq.read_table(path)
    values = np.stack(table.column("action").to_numpy()).copy()
    values[5] = np.nan
    table = table.set_column(
        table.column_names.index("action"), "action", pa.FixedSizeListArray.from_arrays(values.ravel(), 2)
    )
    pq.write_table(table, path)
    pipe = Pipeline(open_dataset(root), batch_size=2, seed=0, actions={"mode": "relative"}, selection={"exclude": (1,)})

    with pytest.raises(DatasetError, match=r"episode 1 of .* NaN"):
        _ = open_dataset(root).with_actions({"mode": "relative"}).stats
    assert pipe.stats["action"]["count"].tolist() == [4]


def test_a_normaliser_refuses_statistics_of_another_representation(roots):
    plain = Mixture(list(roots.values()), progress=False).windowed(offsets={"action": [0, 1, 2]})
    relative, delta = (plain.with_actions({"mode": mode}) for mode in ("relative", "delta"))
    batches = {
        name: next(iter(local_loader(Pipeline(one, batch_size=4, seed=0))))
        for name, one in (("absolute", plain), ("relative", relative), ("delta", delta))
    }
    makers = {"absolute": plain.stats, "relative": relative.stats, "delta": delta.stats}

    for made, stats in makers.items():
        normaliser = Normaliser.from_json(Normaliser(stats, {"action": "mean_std"}).to_json())
        for given, batch in batches.items():
            if given == made:
                scaled = normaliser.normalise(batch)
                back = normaliser.unnormalise({"action": scaled["action"]}, dataset="wide")
                assert back["action"].shape == batch["action"].shape
            else:
                with pytest.raises(ConfigError, match=f"{given}.*and the statistics are of 'action' .{made}"):
                    normaliser.normalise(batch)
    assert MixtureStats.from_json(makers["delta"].to_json()).representations == {"action": f"delta to {STATE}"}


@pytest.mark.parametrize("is_mixture", [False, True], ids=["dataset", "mixture"])
def test_a_normaliser_refuses_statistics_of_windows_of_another_length(roots, is_mixture):
    def make_pipe(frames, **parts):
        dataset = Mixture([roots["wide"]], progress=False) if is_mixture else open_dataset(roots["wide"])
        windowed = dataset.windowed(offsets={"action": list(range(frames))}) if frames else dataset
        return Pipeline(windowed, batch_size=4, seed=0, **parts)

    batches = {n: next(iter(local_loader(make_pipe(n, actions={"mode": "relative"})))) for n in (0, 1, 3, 5)}
    stats = make_pipe(3, actions={"mode": "relative"}).stats
    normaliser = Normaliser.from_json(Normaliser(stats, {"action": "mean_std"}).to_json())

    normaliser.normalise(batches[3])
    # A policy may give fewer steps than it was trained on.
    assert normaliser.unnormalise({"action": batches[3]["action"][:, :1]})["action"].shape == (4, 1, 4)
    for frames in (0, 1, 5):
        slots = max(1, frames)
        told = f"windows of {slots} frame.*statistics are of windows of 3 frames"
        with pytest.raises(ConfigError, match=told):
            normaliser.normalise(batches[frames])
    sample = Pipeline(
        open_dataset(roots["wide"]).windowed(offsets={"action": [0, 1]}),
        batch_size=4,
        seed=0,
        actions={"mode": "relative"},
    ).config.dataset[0]
    with pytest.raises(ConfigError, match="windows of 2 frames"):
        normaliser.normalise({"robot_type": "wide", "dataset": "wide", **sample})
    Normaliser(make_pipe(3).stats).normalise(next(iter(local_loader(make_pipe(5)))))


def test_normalised_relative_actions_have_mean_0_and_deviation_1(roots):
    mixture = Mixture(list(roots.values()), progress=False).windowed(offsets={"action": [0, 1, 2]})
    pipe = Pipeline(mixture, batch_size=8, seed=0, actions={"mode": "relative", "absolute": ["gripper"]})
    normaliser = Normaliser(pipe.stats, {"action": "mean_std"})

    batches = [normaliser.normalise(batch) for batch in local_loader(pipe)]

    wide = [batch["action"][batch["dataset_index"] == 0] for batch in batches]
    padding = [batch["action_is_pad"][batch["dataset_index"] == 0] for batch in batches]
    values = torch.cat(wide)[~torch.cat(padding)].double()
    # The first number is constant: state and action are the episode's.
    torch.testing.assert_close(values.mean(dim=0), torch.zeros(4).double(), rtol=0, atol=1e-4)
    assert ((values.std(dim=0, correction=0) - 1).abs() < 1e-3).tolist() == [False, True, True, True]


def test_going_on_with_other_actions_is_told(dataset):
    relative = Pipeline(dataset, batch_size=4, seed=0, actions={"mode": "relative"})
    state = json.loads(json.dumps(local_loader(relative).state_dict()))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local_loader(relative).load_state_dict(state)
    with pytest.warns(UserWarning, match="saved with actions 'relative to observation.state', and they are 'absolute'"):
        local_loader(Pipeline(dataset, batch_size=4, seed=0)).load_state_dict(state)
    del state["actions"]
    with pytest.warns(UserWarning, match="saved with actions 'absolute'"):
        local_loader(relative).load_state_dict(state)


def test_features_keep_what_actions_are_relative_to(dataset, roots):
    represented = dataset.with_actions({"mode": "relative"})
    mixture = Mixture(list(roots.values()), progress=False).with_actions({"mode": "relative"})

    for one in (represented, mixture):
        assert one.select_features([STATE]).actions is None
        assert one.select_features(["action", STATE]).actions is not None
        with pytest.raises(ConfigError, match=r"relative to 'observation\.state', and not that"):
            one.select_features(["action"])


def test_a_scalar_action_is_relative_too(tmp_path):
    root = write_dataset(tmp_path / "one", SynthSpec(lengths=(4,), cameras=(), state_dim=1, action_dim=1))
    represented = open_dataset(str(root)).windowed(offsets={"action": [0, 1]}).with_actions({"mode": "relative"})

    (batch,) = local_loader(Pipeline(represented, batch_size=4, seed=0))

    assert_equals_samples(batch, represented)
    assert represented.stats["action"]["mean"].shape == (1,)
    plain = open_dataset(str(root)).windowed(offsets={"action": [0, 1]})
    stored = np.stack([plain[frame]["action"] for frame in batch["frame_index"].tolist()])
    np.testing.assert_allclose(represented.actions.decode(batch["action"], batch[STATE]), stored, rtol=1e-5, atol=1e-5)


def test_a_dataset_goes_to_other_processes_with_its_actions(tmp_path):
    root = write_dataset(tmp_path / "rows", rows_spec())
    represented = open_dataset(str(root)).with_actions({"mode": "delta"})

    assert pickle.loads(pickle.dumps(represented)).actions == represented.actions
