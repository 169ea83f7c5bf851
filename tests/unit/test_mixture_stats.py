"""Statistics of a mixture are in its names and widths, pooled by robot and over all, and saved to the last digit."""

import json
from dataclasses import replace

import numpy as np
import pytest
from normalise_cases import ACTIONS, SCHEMA, STATS, describe, make_members

from raypipe.errors import ConfigError, DatasetError
from raypipe.mixture import MemberStats, MixtureStats, Normaliser, mixture_stats


def test_statistics_are_in_the_names_and_widths_of_the_mixture():
    entry = STATS.datasets["so101"]

    assert set(entry) == {"action", "reward", "wrist", "top"}
    assert entry["action"]["mean"].shape == (5,)
    np.testing.assert_array_equal(entry["action"]["mean"][:2], ACTIONS["so101"].mean(0))
    assert entry["wrist"]["mean"].shape == (3, 1, 1)
    assert entry["reward"]["mean"].shape == (1,)
    assert STATS.cameras == ("wrist", "top")


def test_padding_has_statistics_that_keep_a_zero_at_zero():
    action = STATS.datasets["so101"]["action"]

    assert {name: value[2:].tolist() for name, value in action.items()} == {
        "mean": [0, 0, 0],
        "std": [1, 1, 1],
        "min": [-1, -1, -1],
        "max": [1, 1, 1],
        "q01": [-1, -1, -1],
        "q10": [-1, -1, -1],
        "q50": [0, 0, 0],
        "q90": [1, 1, 1],
        "q99": [1, 1, 1],
        "count": [0, 0, 0],
    }


def test_a_number_is_pooled_over_the_robots_that_have_it():
    pooled = STATS.pooled["action"]

    narrow = np.concatenate([values[:, :2] for values in ACTIONS.values()])
    for name in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(pooled[name][:2], describe(narrow)[name], rtol=1e-12)
        np.testing.assert_allclose(pooled[name][2:4], describe(ACTIONS["aloha"])[name][2:], rtol=1e-12)
    assert pooled["count"].tolist() == [160, 160, 40, 40, 0]
    assert (pooled["mean"][4], pooled["std"][4], pooled["min"][4], pooled["max"][4]) == (0, 1, -1, 1)


def test_a_robot_is_pooled_over_its_datasets():
    together = describe(np.concatenate([ACTIONS["so101"], ACTIONS["so101-kitchen"]]))

    for name in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(STATS.robots["so101"]["action"][name][:2], together[name], rtol=1e-12)
    np.testing.assert_array_equal(STATS.robots["aloha"]["action"]["std"], STATS.datasets["aloha"]["action"]["std"])


def test_quantiles_of_several_datasets_are_marked_as_envelopes():
    assert set(STATS.envelopes) == {
        "pooled/action",
        "pooled/reward",
        "pooled/wrist",
        "robots/so101/action",
        "robots/so101/reward",
        "robots/so101/wrist",
    }


def test_a_feature_that_no_dataset_of_a_robot_has_is_padding_throughout():
    top = STATS.robots["so101"]["top"]

    assert (top["mean"].tolist(), top["count"].tolist()) == ([[[0]], [[0]], [[0]]], [[[0]], [[0]], [[0]]])
    np.testing.assert_array_equal(STATS.pooled["top"]["mean"], STATS.datasets["aloha"]["top"]["mean"])


def test_missing_statistics_leave_the_feature_out_of_the_entry():
    stats = mixture_stats(SCHEMA, make_members(so101={"action": {}}))

    assert "action" not in stats.datasets["so101"]
    np.testing.assert_array_equal(
        stats.robots["so101"]["action"]["mean"], stats.datasets["so101-kitchen"]["action"]["mean"]
    )


def test_a_feature_without_statistics_is_not_taken_for_padding_as_others_lack_it():
    schema = replace(SCHEMA, members=SCHEMA.members[::-1], widths={"action": (2, 2, 4)})

    stats = mixture_stats(schema, make_members(aloha={"cam_high": {}})[::-1])

    assert "top" in stats.datasets["so101"]
    assert "top" not in stats.pooled
    with pytest.raises(ConfigError, match=r"the mixture has no statistics to normalise 'top'.*'aloha' \(no mean, std"):
        Normaliser(stats, {"top": "mean_std"}, "pooled")


def test_statistics_without_a_count_are_weighed_by_frames_where_these_are_known():
    members = make_members()
    bare = {key: {k: v for k, v in values.items() if k != "count"} for key, values in members[1].stats.items()}
    members[1] = MemberStats(name="so101", robot_type="so101", stats=bare, num_frames=20)

    stats = mixture_stats(SCHEMA, members)

    assert stats.pooled["action"]["count"].tolist() == [160, 160, 40, 40, 0]
    np.testing.assert_array_equal(stats.pooled["action"]["mean"], STATS.pooled["action"]["mean"])


def test_statistics_that_cannot_be_weighed_are_an_error_only_where_they_are_needed():
    members = make_members()
    bare = {key: {k: v for k, v in values.items() if k != "count"} for key, values in members[1].stats.items()}
    members[1] = MemberStats(name="so101", robot_type="so101", stats=bare)

    stats = mixture_stats(SCHEMA, members)

    Normaliser(stats, {"action": "mean_std"}, "dataset")
    with pytest.raises(ConfigError, match=r"the mixture has no statistics to normalise 'action'.*'so101' \(no count\)"):
        Normaliser(stats, {"action": "mean_std"}, "pooled")


@pytest.mark.parametrize(
    ("statistic", "value", "message"),
    [
        ("mean", np.ones(3), r"'mean' of 'action' in dataset 'so101' has the shape \(3,\), .* has \(2,\)"),
        ("count", np.array([0.0]), r"'count' of 'action' in dataset 'so101' is \[0.0\]"),
        ("count", np.array([np.nan]), r"'count' of 'action' in dataset 'so101' is \[nan\]"),
    ],
)
def test_statistics_that_do_not_fit_their_feature_are_an_error(statistic, value, message):
    damaged = {**describe(ACTIONS["so101"]), statistic: value}

    with pytest.raises(DatasetError, match=message):
        mixture_stats(SCHEMA, make_members(so101={"action": damaged}))


def test_flat_and_grey_camera_statistics_get_the_axes_of_pixels():
    flat = {"mean": np.array([0.1, 0.2, 0.3]), "std": np.array([0.5]), "count": np.array([9.0])}

    entry = mixture_stats(SCHEMA, make_members(so101={"gripper": flat})).datasets["so101"]["wrist"]

    assert entry["mean"].tolist() == [[[0.1]], [[0.2]], [[0.3]]]
    assert entry["std"].tolist() == [[[0.5]], [[0.5]], [[0.5]]]


@pytest.mark.parametrize("members", [make_members()[:2], [make_members()[0]] * 3], ids=["too few", "one name"])
def test_members_are_those_of_the_schema(members):
    with pytest.raises(ConfigError, match="the schema is of 3 datasets"):
        mixture_stats(SCHEMA, members)


def test_saved_statistics_come_back_to_the_last_digit(tmp_path):
    STATS.save(tmp_path / "stats.json")
    loaded = MixtureStats.load(tmp_path / "stats.json")

    assert loaded.to_json() == STATS.to_json()
    assert list(loaded.datasets) == list(STATS.datasets)
    assert (loaded.cameras, loaded.envelopes, loaded.robot_types) == (STATS.cameras, STATS.envelopes, STATS.robot_types)
    for name, entry in STATS.datasets.items():
        for feature, values in entry.items():
            for statistic, value in values.items():
                again = loaded.datasets[name][feature][statistic]
                np.testing.assert_array_equal(again, value)
                assert (again.dtype, again.shape) == (np.float64, value.shape)


def damage(**changes):
    return json.dumps({**json.loads(STATS.to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (STATS.to_json()[:-20], "is not JSON"),
        ("[]", "is not the JSON of a MixtureStats"),
        (damage(kind="Normaliser"), "is not the JSON of a MixtureStats"),
        (damage(version=2), "is of version 2"),
        (damage(datasets=[]), "is damaged: AttributeError"),
        (damage(pooled={"action": {"mean": ["a"]}}), "is damaged: ValueError: .* where numbers are expected"),
        (damage(pooled={"action": {"mean": [None]}}), r"is damaged: ValueError: \[None\] where numbers"),
        (damage(robot_types={"aloha": "aloha"}), "give a robot type for each dataset"),
        (damage(robots={}), "give statistics for each robot type"),
        (json.dumps({"kind": "MixtureStats", "version": 1}), "is damaged: KeyError: 'datasets'"),
    ],
)
def test_a_damaged_file_of_statistics_is_an_error_that_says_how(tmp_path, text, message):
    path = tmp_path / "stats.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        MixtureStats.load(path)


def test_files_that_are_not_there_or_not_text_are_errors(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ConfigError, match=r"there is no file '.*none\.json'"):
        MixtureStats.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"binary\.json' is not text"):
        MixtureStats.load(tmp_path / "binary.json")
    with pytest.raises(ConfigError, match="does not name a file"):
        STATS.save("folder/")
