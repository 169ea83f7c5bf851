"""Pooled statistics are those of all values together; quantiles are an envelope; what cannot be pooled is named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ConfigError, DatasetError
from raypipe.format.stats import is_low, is_quantile, pool_stats

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def describe(values):
    """Return the statistics of raw values ``(frames, numbers)``."""
    found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    found |= dict(zip(QUANTILES, np.quantile(values, list(QUANTILES.values()), axis=0), strict=True))
    return found | {"count": np.array([len(values)], dtype=np.float64)}


def assert_same(one, two):
    assert one.keys() == two.keys()
    for feature in one:
        assert one[feature].keys() == two[feature].keys()
        for name, value in one[feature].items():
            np.testing.assert_allclose(value, two[feature][name], rtol=1e-9, atol=1e-9, err_msg=f"{feature}, {name}")


@st.composite
def raw_parts(draw):
    """Draw raw values of parts of one to fifty frames of three numbers, on scales and offsets of their own."""
    generator = np.random.default_rng(draw(st.integers(0, 10_000)))
    sizes = draw(st.lists(st.integers(1, 50), min_size=1, max_size=6))
    offsets = st.sampled_from([0.0, -3.0, 1e4])
    scales = st.sampled_from([0.0, 0.1, 20.0])
    return [draw(offsets) + draw(scales) * generator.normal(size=(size, 3)) for size in sizes]


@given(raw_parts())
@settings(max_examples=100)
def test_pooled_statistics_are_those_of_all_values_together(parts):
    pooled = pool_stats([{"action": describe(part)} for part in parts])["action"]

    together = describe(np.concatenate(parts))
    for name in ("min", "max", "count"):
        np.testing.assert_array_equal(pooled[name], together[name])
    # A standard deviation of 0 at an offset of 1e4 has an error of 1e-12 in the raw values already.
    np.testing.assert_allclose(pooled["mean"], together["mean"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(pooled["std"], together["std"], rtol=1e-9, atol=1e-9)


@given(raw_parts(), st.data())
@settings(max_examples=100)
def test_pooling_is_associative_and_independent_of_order(parts, data):
    stats = [{"action": describe(part)} for part in parts]
    shuffled = data.draw(st.permutations(stats))
    cut = data.draw(st.integers(0, len(stats)))

    halves = [pool_stats(half) for half in (shuffled[:cut], shuffled[cut:]) if half]

    assert_same(pool_stats(halves), pool_stats(stats))


@given(raw_parts())
@settings(max_examples=50)
def test_pooled_quantiles_are_the_least_of_the_lower_and_the_greatest_of_the_upper(parts):
    pooled = pool_stats([{"action": describe(part)} for part in parts])["action"]

    stats = [describe(part) for part in parts]
    for name in QUANTILES:
        values = [found[name] for found in stats]
        expected = np.min(values, axis=0) if name in ("q01", "q10", "q50") else np.max(values, axis=0)
        np.testing.assert_array_equal(pooled[name], expected)


def test_one_part_stays_as_it_is():
    stats = {"action": describe(np.random.default_rng(0).normal(size=(9, 3)))}

    pooled = pool_stats([stats])

    for name, value in stats["action"].items():
        np.testing.assert_array_equal(pooled["action"][name], value)


def test_a_feature_is_pooled_over_the_parts_that_have_it():
    narrow, wide = describe(np.zeros((4, 1))), describe(np.ones((6, 2)))

    pooled = pool_stats([{"state": narrow}, {"state": narrow, "action": wide}, {"action": wide}])

    assert pooled["state"]["count"].tolist() == [8]
    assert pooled["action"]["count"].tolist() == [12]


def test_a_statistic_that_a_part_lacks_is_not_pooled():
    full = describe(np.random.default_rng(0).normal(size=(9, 3)))
    without = {name: value for name, value in full.items() if name != "q01"}

    pooled = pool_stats([{"action": full}, {"action": without}])["action"]

    assert "q01" not in pooled
    assert {"min", "max", "mean", "std", "count", "q99"} <= pooled.keys()


def test_unknown_statistics_are_left_out():
    pooled = pool_stats([{"action": {**describe(np.ones((2, 1))), "median_of_medians": np.ones(1)}}])

    assert "median_of_medians" not in pooled["action"]


def test_a_number_that_a_part_does_not_have_is_pooled_over_the_others():
    generator = np.random.default_rng(0)
    narrow, wide = generator.normal(5, 1, (10, 1)), generator.normal(-3, 2, (30, 3))
    padded = {
        name: np.array([*value, 77.0, 77.0]) if name != "count" else np.array([10.0, 0.0, 0.0])
        for name, value in describe(narrow).items()
    }
    counted = {**describe(wide), "count": np.array([30.0, 30.0, 0.0])}

    pooled = pool_stats([{"action": padded}, {"action": counted}])["action"]

    assert pooled["count"].tolist() == [40, 30, 0]
    first = describe(np.concatenate([narrow, wide[:, :1]]))
    second = describe(wide)
    for name in ("min", "max", "mean", "std"):
        assert pooled[name][0] == pytest.approx(first[name][0], rel=1e-12)
        assert pooled[name][1] == pytest.approx(second[name][1], rel=1e-12)
        # Nobody has the third number: it stays as the first part has it.
        assert pooled[name][2] == 77


def test_cameras_and_scalars_keep_their_shapes():
    camera = {name: np.full((3, 1, 1), 0.5) for name in ("min", "max", "mean", "std")} | {"count": np.array([5.0])}
    scalar = {name: np.array(0.5) for name in ("min", "max", "mean", "std")} | {"count": np.array(7.0)}

    pooled = pool_stats([{"top": camera, "reward": scalar}] * 2)

    assert {value.shape for name, value in pooled["top"].items() if name != "count"} == {(3, 1, 1)}
    assert {value.shape for name, value in pooled["reward"].items() if name != "count"} == {()}
    assert (pooled["top"]["count"].tolist(), pooled["reward"]["count"].tolist()) == ([10], [14])


def test_no_parts_have_no_statistics():
    assert pool_stats([]) == {}


@pytest.mark.parametrize("count", [0.0, -1.0, np.nan, np.inf])
def test_a_count_that_counts_nothing_is_an_error_that_names_it(count):
    good, bad = describe(np.ones((2, 2))), {**describe(np.ones((2, 2))), "count": np.array([count])}

    with pytest.raises(DatasetError, match=rf"'count' of 'action' in aloha is \[{count}\]"):
        pool_stats([{"action": good}, {"action": bad}], names=["so101", "aloha"])


def test_a_missing_count_is_an_error_that_names_the_part_and_the_remedy():
    bare = {name: value for name, value in describe(np.ones((2, 2))).items() if name != "count"}

    with pytest.raises(DatasetError, match=r"'action' in part 1 have no 'count'.*Make the statistics again"):
        pool_stats([{"action": describe(np.ones((2, 2)))}, {"action": bare}])


def test_a_count_of_another_shape_is_an_error():
    odd = {**describe(np.ones((2, 3))), "count": np.ones(2)}

    with pytest.raises(DatasetError, match=r"'count' of 'action' in part 0 has the shape \(2,\); .* \(3,\)"):
        pool_stats([{"action": odd}])


def test_parts_of_different_widths_are_an_error():
    parts = [{"action": describe(np.ones((2, 2)))}, {"action": describe(np.ones((2, 3)))}]

    with pytest.raises(DatasetError, match=r"'action' differ in shape: 'min' is \(3,\) in b, and a has \(2,\)"):
        pool_stats(parts, names=["a", "b"])


def test_statistics_of_one_part_that_differ_in_shape_are_an_error():
    odd = {**describe(np.ones((2, 3))), "std": np.ones(1)}

    with pytest.raises(DatasetError, match=r"'std' is \(1,\) in part 0, and part 0 has \(3,\)"):
        pool_stats([{"action": odd}])


@pytest.mark.parametrize(("names", "message"), [(["a"], "the names of 2 parts"), (["a", "a"], "as many and differ")])
def test_odd_names_are_errors(names, message):
    with pytest.raises(ConfigError, match=message):
        pool_stats([{"action": describe(np.ones((2, 2)))}] * 2, names=names)


def test_which_statistics_are_pooled_downwards():
    assert [name for name in ("min", "max", "mean", "q01", "q10", "q50", "q51", "q99") if is_low(name)] == [
        "min",
        "q01",
        "q10",
        "q50",
    ]
    assert not is_quantile("quantile")
