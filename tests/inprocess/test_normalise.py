"""Every sample is scaled by the statistics of its own dataset, robot or mixture, and comes back as it was."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from normalise_cases import ACTIONS, PIXELS, REWARDS, SCHEMA, STATS, alone, describe, make_members, raw

from raypipe.errors import ConfigError
from raypipe.mixture import MemberStats, Normaliser, mixture_stats

SCALED = ("mean_std", "min_max", "quantiles")


def make_batch(index, **values):
    dataset = torch.tensor(index)
    masks = {
        name: torch.from_numpy(mask)
        for name, mask in SCHEMA.masks(dataset.numpy()).items()
        if name.removesuffix("_is_missing").removesuffix("_dim_is_pad") in values
    }
    names = [list(ACTIONS)[i] for i in index]
    robots = [STATS.robot_types[name] for name in names]
    return {"dataset_index": dataset, "dataset": names, "robot_type": robots, **values, **masks}


def padded(values, width=5):
    return torch.from_numpy(np.pad(values, ((0, 0), (0, width - values.shape[1])))).float()


@pytest.mark.parametrize("mode", SCALED)
def test_each_sample_is_scaled_by_its_own_dataset(mode):
    names = list(ACTIONS)
    index = [2, 0, 1, 1]
    batch = make_batch(index, action=torch.cat([padded(ACTIONS[names[i]][:1]) for i in index]))

    scaled = Normaliser(STATS, {"action": mode}, "dataset").normalise(batch)["action"]

    for row, i in enumerate(index):
        own, value = describe(ACTIONS[names[i]]), ACTIONS[names[i]][0]
        low, high = {"min_max": ("min", "max"), "quantiles": ("q01", "q99")}.get(mode, ("mean", "std"))
        expected = (
            (value - own["mean"]) / (own["std"] + 1e-8)
            if mode == "mean_std"
            else 2 * (value - own[low]) / (own[high] - own[low]) - 1
        )
        np.testing.assert_allclose(scaled[row, : len(value)], expected, rtol=1e-4, atol=1e-5)
        assert scaled[row, len(value) :].tolist() == [0] * (5 - len(value))


@pytest.mark.parametrize("mode", SCALED)
@pytest.mark.parametrize("by", ["dataset", "robot", "pooled"])
@pytest.mark.filterwarnings("ignore:the quantiles of")
@settings(max_examples=25)
@given(data=st.data())
def test_values_come_back_as_they_were(mode, by, data):
    index = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    shape = data.draw(st.sampled_from([(), (3,)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    size = len(index)
    batch = make_batch(
        index,
        action=torch.randn(size, *shape, 5, generator=generator, dtype=dtype) * 10,
        reward=torch.randn(size, *shape, generator=generator, dtype=dtype) * 10,
        wrist=torch.rand(size, *shape, 3, 2, 4, generator=generator, dtype=dtype),
    )
    # As batches have it: 0 where a robot has no such number.
    batch["action"] = batch["action"].masked_fill(batch["action_dim_is_pad"].reshape(size, *[1] * len(shape), 5), 0)
    normaliser = Normaliser(STATS, dict.fromkeys(("action", "reward", "wrist"), mode), by)

    scaled = normaliser.normalise(batch)
    again = normaliser.unnormalise(scaled)

    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    for key in ("action", "reward", "wrist"):
        assert scaled[key].shape == batch[key].shape
        torch.testing.assert_close(again[key], batch[key], rtol=tolerance, atol=tolerance)
        assert not torch.equal(scaled[key], batch[key])


@pytest.mark.parametrize("mode", SCALED)
@pytest.mark.parametrize("by", ["dataset", "robot", "pooled"])
@pytest.mark.filterwarnings("ignore:the quantiles of")
def test_padding_and_missing_features_stay_zero_both_ways(mode, by):
    batch = make_batch([1, 0], action=torch.zeros(2, 6, 5), top=torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    normaliser = Normaliser(STATS, {"action": mode, "top": mode}, by)

    scaled = normaliser.normalise(batch)
    predicted = normaliser.unnormalise({**batch, "action": torch.full((2, 6, 5), 0.7)})

    for values in (scaled["action"], predicted["action"]):
        assert values[0, :, 2:].abs().max() == 0
        assert values[1, :, 4:].abs().max() == 0
        assert values[0, :, :2].abs().min() > 0
    assert scaled["top"][0].abs().max() == 0
    assert scaled["top"][1].abs().min() > 0


@pytest.mark.parametrize("mode", SCALED)
def test_padding_is_zero_by_dataset_even_without_a_mask(mode):
    batch = {"dataset": ["so101"], "action": torch.zeros(1, 5), "top": torch.zeros(1, 3, 8, 8)}

    scaled = Normaliser(STATS, {"action": mode, "top": mode}, "dataset").normalise(batch)

    assert scaled["action"][0, 2:].tolist() == [0, 0, 0]
    assert scaled["top"].abs().max() == 0


def test_bytes_of_a_camera_are_divided_first():
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    normaliser = Normaliser(STATS, {"wrist": "mean_std"}, "dataset")

    of_bytes = normaliser.normalise(make_batch([0, 1], wrist=pixels))["wrist"]
    of_floats = normaliser.normalise(make_batch([0, 1], wrist=pixels.float() / 255))["wrist"]

    torch.testing.assert_close(of_bytes, of_floats)
    mean, std = PIXELS["aloha"].mean(0), PIXELS["aloha"].std(0)
    expected = (pixels[0].numpy() / 255 - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(of_bytes[0], expected, rtol=1e-4, atol=1e-5)


def test_bytes_of_pixels_that_are_not_known_for_a_camera_are_refused():
    stats = replace(STATS, cameras=())
    batch = make_batch([0], wrist=torch.zeros(1, 3, 4, 4, dtype=torch.uint8))

    with pytest.raises(ConfigError, match=r"'wrist' in the batch is uint8.*Divide it by 255"):
        Normaliser(stats, {"wrist": "mean_std"}).normalise(batch)


def test_bytes_of_a_vector_are_numbers():
    stats = alone(np.array([[0.0, 10.0], [200.0, 20.0]]))

    scaled = Normaliser(stats, {"action": "min_max"}).normalise(
        {"action": torch.tensor([[100, 20]], dtype=torch.uint8)}
    )

    assert scaled["action"].tolist() == [[0, 1]]


@pytest.mark.parametrize("mode", SCALED)
def test_a_constant_number_is_scaled_as_lerobot_does(mode):
    normaliser = Normaliser(alone(np.full((5, 2), 3.0)), {"action": mode})

    scaled = normaliser.normalise({"action": torch.full((4, 2), 3.0)})
    again = normaliser.unnormalise(scaled)

    assert torch.equal(scaled["action"], torch.full((4, 2), 0.0 if mode == "mean_std" else -1.0))
    assert torch.equal(again["action"], torch.full((4, 2), 3.0))


def test_a_range_below_the_least_float32_gives_finite_values():
    normaliser = Normaliser(alone(np.array([[0.0], [1e-60]])), {"action": "min_max"})

    assert torch.isfinite(normaliser.normalise({"action": torch.zeros(3)})["action"]).all()


def test_a_matrix_keeps_its_shape():
    values = np.random.default_rng(0).normal(size=(50, 2, 3))
    normaliser = Normaliser(alone(values), {"action": "mean_std"})

    scaled = normaliser.normalise({"action": torch.from_numpy(values)})["action"]

    np.testing.assert_allclose(scaled.mean(0), np.zeros((2, 3)), atol=1e-12)
    np.testing.assert_allclose(scaled.std(0, correction=0), np.ones((2, 3)), rtol=1e-6)


def test_samples_of_another_mixture_are_scaled_by_name_and_not_by_number():
    # Of the three datasets of the statistics, this mixture has the last two, in another order.
    names = ["so101-kitchen", "so101", "so101-kitchen"]
    batch = {"dataset_index": torch.tensor([0, 1, 0]), "dataset": names, "robot_type": ["so101"] * 3}
    batch["reward"] = torch.zeros(3)

    by_dataset = Normaliser(STATS, {"reward": "mean_std"}, "dataset").normalise(batch)["reward"]
    by_robot = Normaliser(STATS, {"reward": "mean_std"}, "robot").normalise(batch)["reward"]

    together = np.concatenate([REWARDS["so101"], REWARDS["so101-kitchen"]])
    np.testing.assert_allclose(by_dataset, [-REWARDS[name].mean() / REWARDS[name].std() for name in names], rtol=1e-5)
    np.testing.assert_allclose(by_robot, [-together.mean() / together.std()] * 3, rtol=1e-5)


def test_names_may_be_an_array_and_a_sample_has_one():
    normaliser = Normaliser(STATS, {"reward": "mean_std"}, "robot")
    expected = normaliser.normalise({"reward": torch.zeros(())}, robot="aloha")["reward"]

    of_batch = normaliser.normalise({"reward": torch.zeros(2), "robot_type": np.array(["aloha", "so101"], object)})
    of_sample = normaliser.normalise({"reward": torch.zeros(()), "robot_type": "aloha"})

    assert of_batch["reward"][0] == of_sample["reward"] == expected
    assert of_batch["reward"][1] != expected


@pytest.mark.parametrize(
    ("by", "key", "name", "known"),
    [("dataset", "dataset", "so102", "so101"), ("robot", "robot_type", "aloha2", "aloha")],
)
def test_a_sample_of_which_there_are_no_statistics_is_refused_by_name(by, key, name, known):
    batch = {"dataset_index": torch.tensor([0, 1]), key: [known, name], "reward": torch.zeros(2)}

    with pytest.raises(ConfigError, match=rf"'{key}' is '{name}', and there are no statistics .* mean '{known}'"):
        Normaliser(STATS, {"reward": "mean_std"}, by).normalise(batch)


def test_even_one_dataset_is_not_taken_for_another():
    normaliser = Normaliser(alone(raw(9, 60, 3)), {"action": "mean_std"})

    with pytest.raises(ConfigError, match=r"'dataset' is 'other', .* Known: 'alone'. Make the normaliser from"):
        normaliser.normalise({"action": torch.ones(1, 3), "dataset": ["other"]})


def test_one_robot_needs_no_name():
    members = [MemberStats(name=one.name, robot_type="arm", stats=one.stats) for one in make_members()]
    normaliser = Normaliser(mixture_stats(SCHEMA, members), {"reward": "mean_std"}, "robot")

    scaled = normaliser.normalise({"dataset_index": torch.tensor([0, 7]), "reward": torch.zeros(2)})["reward"]

    rewards = np.concatenate(list(REWARDS.values()))
    np.testing.assert_allclose(scaled, [-rewards.mean() / rewards.std()] * 2, rtol=1e-5)


def test_a_dataset_that_stands_alone_needs_no_name():
    values = raw(9, 60, 3)
    normaliser = Normaliser(alone(values), {"action": "mean_std"})

    for shape in ((3,), (7, 3), (2, 7, 3)):
        scaled = normaliser.normalise({"action": torch.ones(shape)})["action"]
        expected = np.broadcast_to((1 - values.mean(0)) / values.std(0), shape)
        np.testing.assert_allclose(scaled, expected, rtol=1e-4, atol=1e-6)


def test_half_precision_is_scaled_in_float32():
    scaled = Normaliser(alone(raw(1, 9, 2)), {"action": "mean_std"}).unnormalise(
        {"action": torch.ones(1, 2, dtype=torch.bfloat16)}
    )

    assert scaled["action"].dtype == torch.float32


def test_gradients_flow_through():
    action = torch.ones(2, 3, requires_grad=True)
    values = raw(1, 9, 3)

    Normaliser(alone(values), {"action": "min_max"}).unnormalise({"action": action})["action"].sum().backward()

    np.testing.assert_allclose(action.grad[0], (values.max(0) - values.min(0)) / 2, rtol=1e-5)


def test_other_keys_pass_and_the_batch_is_not_changed():
    batch = make_batch([0], action=torch.ones(1, 5), reward=torch.ones(1))
    batch |= {"task": ["fold"], "state": torch.ones(1, 2)}
    before = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    modes = {"action": "mean_std", "reward": "identity", "wrist": "mean_std"}

    scaled = Normaliser(STATS, modes, "dataset").normalise(batch)

    assert scaled.keys() == batch.keys()
    assert all(scaled[key] is batch[key] for key in batch if key != "action")
    assert torch.equal(batch["action"], before["action"])


def test_actions_are_unnormalised_by_the_name_of_a_dataset_or_a_robot():
    action = {"action": torch.full((1, 5), 0.5)}
    by_dataset = Normaliser(STATS, {"action": "min_max"}, "dataset")
    by_robot = Normaliser(STATS, {"action": "min_max"}, "robot")

    kitchen = by_dataset.unnormalise(action, dataset="so101-kitchen")["action"]
    aloha = by_dataset.unnormalise(action, robot="aloha")["action"]
    robot = by_robot.unnormalise(action, robot="so101")["action"]

    def at_three_quarters(values):
        return values.min(0) + 0.75 * (values.max(0) - values.min(0))

    together = np.concatenate([ACTIONS["so101"], ACTIONS["so101-kitchen"]])
    np.testing.assert_allclose(kitchen[0, :2], at_three_quarters(ACTIONS["so101-kitchen"]), rtol=1e-5)
    np.testing.assert_allclose(aloha[0, :4], at_three_quarters(ACTIONS["aloha"]), rtol=1e-5)
    np.testing.assert_allclose(robot[0, :2], at_three_quarters(together), rtol=1e-5)
    assert torch.equal(by_robot.unnormalise(action, dataset="so101")["action"], robot)


@pytest.mark.parametrize(
    "names", [{}, {"dataset": "so101-kitchen"}, {"robot": "so101"}], ids=["no", "dataset", "robot"]
)
def test_pooled_statistics_are_the_same_for_every_name(names):
    scaled = Normaliser(STATS, {"reward": "mean_std"}, "pooled").normalise({"reward": torch.zeros(2)}, **names)[
        "reward"
    ]

    rewards = np.concatenate(list(REWARDS.values()))
    np.testing.assert_allclose(scaled, [-rewards.mean() / rewards.std()] * 2, rtol=1e-5)


def test_a_name_that_is_given_takes_the_place_of_those_of_the_batch():
    batch = {"dataset": ["aloha", "unheard of"], "reward": torch.zeros(2)}
    normaliser = Normaliser(STATS, {"reward": "mean_std"}, "dataset")

    scaled = normaliser.normalise(batch, dataset="so101")["reward"]

    assert scaled[0] == pytest.approx(-REWARDS["so101"].mean() / REWARDS["so101"].std(), rel=1e-5)


@pytest.mark.parametrize(
    ("batch", "names", "message"),
    [
        ({}, {}, r"no 'dataset', .*Give dataset= \(of 'aloha', 'so101', 'so101-kitchen'\)"),
        ({"dataset_index": torch.tensor([0, 1])}, {}, r"no 'dataset', "),
        ({}, {"dataset": "so10"}, "there is no dataset 'so10' in the mixture; did you mean 'so101'"),
        ({}, {"robot": "panda"}, "there is no robot 'panda'.*Known: 'aloha', 'so101'"),
        ({}, {"robot": "so101"}, "is of the datasets 'so101', 'so101-kitchen'.*give dataset="),
        ({}, {"robot": "so101", "dataset": "so101"}, "both dataset='so101' and robot='so101'"),
        ({"dataset": ["aloha"]}, {}, r"'action' .* \(2, 5\), and the batch says of 1 sample whose"),
        ({"action": torch.zeros(2, 4)}, {"dataset": "so101"}, r"has the shape \(2, 4\), and its statistics are \(5,\)"),
        ({"action": torch.zeros(())}, {"dataset": "so101"}, r"has the shape \(\), and its statistics are \(5,\)"),
        ({"action": [0.0] * 5}, {"dataset": "so101"}, "'action' in the batch is a list"),
    ],
)
def test_a_batch_that_cannot_be_scaled_is_an_error_that_says_why(batch, names, message):
    normaliser = Normaliser(STATS, {"action": "mean_std"}, "dataset")

    with pytest.raises(ConfigError, match=message):
        normaliser.unnormalise({"action": torch.zeros(2, 5), **batch}, **names)


def test_an_empty_batch_is_scaled_to_an_empty_batch():
    batch = {"dataset": [], "action": torch.zeros(0, 5)}

    assert Normaliser(STATS, {"action": "mean_std"}).normalise(batch)["action"].shape == (0, 5)


def test_missing_statistics_are_an_error_that_names_dataset_feature_and_remedy():
    members = make_members(so101={"action": {k: v for k, v in describe(ACTIONS["so101"]).items() if k != "q99"}})
    stats = mixture_stats(SCHEMA, members)

    with pytest.raises(ConfigError, match=r"dataset 'so101' .* 'action' .* 'so101' \(no q99\).*choose another mode"):
        Normaliser(stats, {"action": "quantiles"}, "dataset")
    with pytest.raises(ConfigError, match=r"the mixture has .* 'so101' \(no q99\)"):
        Normaliser(stats, {"action": "quantiles"}, "pooled")
    with pytest.raises(ConfigError, match=r"robot 'so101' has .* 'so101' \(no q99\)"):
        Normaliser(stats, {"action": "quantiles"}, "robot")


def test_a_dataset_without_statistics_is_named_where_those_of_others_take_their_place():
    stats = mixture_stats(SCHEMA, make_members(so101={"action": {}}))

    with pytest.raises(ConfigError, match=r"dataset 'so101' has no statistics to normalise 'action'"):
        Normaliser(stats, {"action": "mean_std"}, "dataset")
    with pytest.warns(UserWarning, match="no statistics of action of 'so101'"):
        Normaliser(stats, {"action": "mean_std"}, "pooled")


def test_an_unknown_feature_is_an_error_with_a_suggestion():
    with pytest.raises(ConfigError, match="no dataset of the mixture has statistics of 'acton'; did you mean 'action'"):
        Normaliser(STATS, {"acton": "mean_std"})


@pytest.mark.parametrize(
    ("modes", "by", "message"),
    [
        ({"action": "zscore"}, "dataset", "the mode of 'action' is 'zscore'.* Known: 'mean_std', 'min_max'"),
        (
            {"action": "mean_std"},
            "datasets",
            "by is 'datasets'.* Known: 'dataset', 'robot', 'pooled'",
        ),
    ],
)
def test_unknown_words_are_errors_with_the_known_ones(modes, by, message):
    with pytest.raises(ConfigError, match=message):
        Normaliser(STATS, modes, by)


def test_statistics_that_are_not_finite_are_an_error():
    stats = mixture_stats(
        SCHEMA, make_members(so101={"reward": {**describe(REWARDS["so101"]), "std": np.array([np.nan])}})
    )

    with pytest.raises(ConfigError, match=r"the 'std' of 'reward' for dataset 'so101' is \[nan\]"):
        Normaliser(stats, {"reward": "mean_std"})


@pytest.mark.parametrize("by", ["dataset", "robot", "pooled"])
def test_a_standard_deviation_that_the_range_rules_out_is_an_error(by):
    damaged = {**describe(PIXELS["so101"], is_camera=True), "std": np.zeros((3, 1, 1))}
    stats = mixture_stats(SCHEMA, make_members(so101={"gripper": damaged}))

    with pytest.raises(ConfigError, match=r"'wrist' in dataset 'so101' contradict each other: std 0 with values from"):
        Normaliser(stats, {"wrist": "mean_std"}, by)
    Normaliser(stats, {"wrist": "min_max"}, by)


@pytest.mark.parametrize(("by", "named"), [("pooled", "pooled/action"), ("robot", "robots/so101/action")])
def test_envelopes_are_told_once_when_they_are_taken_for_quantiles(by, named):
    with pytest.warns(UserWarning, match=f"the quantiles of {named} are envelopes") as caught:
        normaliser = Normaliser(STATS, {"action": "quantiles", "reward": "mean_std"}, by)
    # A second warning would be an error here.
    copy = pickle.loads(pickle.dumps(normaliser))
    copy.normalise(make_batch([0], action=torch.ones(1, 5)))

    assert [warning.filename for warning in caught] == [__file__]


def test_unnamed_robots_are_not_taken_for_one():
    members = [MemberStats(name=one.name, robot_type="unknown", stats=one.stats) for one in make_members()]
    stats = mixture_stats(SCHEMA, members)

    with pytest.raises(ConfigError, match="'aloha', 'so101', 'so101-kitchen' do not say of which robot"):
        Normaliser(stats, {"action": "mean_std"}, "robot")


def test_a_normaliser_travels_by_pickle_and_json(tmp_path):
    normaliser = Normaliser(STATS, {"action": "quantiles", "wrist": "mean_std", "reward": "identity"}, "dataset")
    batch = make_batch([2, 0], action=torch.randn(2, 5), wrist=torch.rand(2, 3, 8, 8))
    expected = normaliser.normalise(batch)
    normaliser.save(tmp_path / "normaliser.json")

    copies = [
        pickle.loads(pickle.dumps(normaliser)),
        Normaliser.from_json(normaliser.to_json()),
        Normaliser.load(tmp_path / "normaliser.json"),
    ]

    for copy in copies:
        assert (copy.modes, copy.by) == (normaliser.modes, "dataset")
        scaled = copy.normalise(batch)
        assert torch.equal(scaled["action"], expected["action"])
        assert torch.equal(scaled["wrist"], expected["wrist"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"by": "nobody"}, "by is 'nobody'"),
        ({"modes": ["action"]}, "is damaged: ValueError"),
        ({"stats": {}}, "is not the JSON of a MixtureStats"),
        ({"kind": "other"}, "is not the JSON of a Normaliser"),
    ],
)
def test_a_damaged_normaliser_is_an_error(change, message):
    text = json.dumps({**json.loads(Normaliser(STATS, {"action": "mean_std"}).to_json()), **change})

    with pytest.raises(ConfigError, match=message):
        Normaliser.from_json(text)


def test_importing_normalise_does_not_load_torch():
    check = "import raypipe.mixture, sys; print('torch' in sys.modules)"

    printed = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "False"
