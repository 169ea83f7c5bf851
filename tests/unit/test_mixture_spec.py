import math
import pickle
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from raypipe.errors import ConfigError
from raypipe.mixture.mixture import resolve_weights
from raypipe.mixture.spec import MemberSpec, MixtureSpec
from raypipe.plan import SelectionSpec

counts = st.integers(1, 10**9)
roots = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4).map("/".join)


def names(*members):
    return [member.name for member in MixtureSpec(members=list(members)).members]


def mixture_of(weights, /, **options):
    return MixtureSpec(members=[(f"d{number}", weight) for number, weight in enumerate(weights)], **options)


def test_members_may_be_roots_pairs_dicts_or_specs():
    spec = MixtureSpec(members=["x/a", ("b", 2), {"root": "c", "weight": 3}, MemberSpec(root="d"), Path("e")])

    assert [(one.root, one.name, one.weight) for one in spec.members] == [
        ("x/a", "a", 1.0),
        ("b", "b", 2.0),
        ("c", "c", 3.0),
        ("d", "d", 1.0),
        ("e", "e", 1.0),
    ]


def test_given_lists_and_dicts_become_plain_values():
    spec = MixtureSpec(
        members=[{"root": "a", "drop": ["x"], "selection": {"episodes": [0, 2]}}], resize=[240, 320], weights=[2]
    )

    assert spec.members[0].drop == ("x",)
    assert spec.members[0].selection == SelectionSpec(episodes=(0, 2))
    assert (spec.resize, spec.weights) == ((240, 320), (2.0,))
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (["a", "b"], "frames"),
        (["a", ("b", 1)], "given"),
        ([{"root": "a", "weight": 1}], "given"),
        ([{"root": "a"}], "frames"),
        ([MemberSpec(root="a", weight=2)], "given"),
    ],
)
def test_weights_that_were_given_count_by_default(members, expected):
    assert MixtureSpec(members=members).weights == expected


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (["data/aloha/", "s3://bucket/so101"], ["aloha", "so101"]),
        (["lab/aloha", "home/aloha", "home/koch"], ["lab/aloha", "home/aloha", "koch"]),
        (["/x/lab/aloha", "/y/lab/aloha"], ["x/lab/aloha", "y/lab/aloha"]),
        (["x/aloha", "x/aloha", "x/aloha"], ["aloha", "aloha-2", "aloha-3"]),
        (["aloha", "data/aloha"], ["aloha", "data/aloha"]),
        ([{"root": "x/b", "name": "aloha"}, "x/aloha"], ["aloha", "x/aloha"]),
        ([{"root": "b", "name": "aloha-2"}, "aloha", "aloha"], ["aloha-2", "aloha", "aloha-3"]),
        (["."], ["dataset"]),
    ],
)
def test_names_are_the_last_parts_that_tell_roots_apart(members, expected):
    assert names(*members) == expected


@given(st.lists(roots, min_size=1, max_size=12), st.data())
def test_names_differ_whatever_the_roots(some, data):
    given_names = data.draw(st.lists(roots, max_size=3, unique=True))
    members = [{"root": root} for root in some] + [{"root": "z", "name": name} for name in given_names]

    found = names(*members)

    assert len(set(found)) == len(found)
    assert found[len(some) :] == given_names


@given(st.lists(st.just(0.0) | st.floats(1e-9, 1e300), min_size=1, max_size=20), st.floats(1, 100))
def test_weights_sum_to_one_and_zero_stays_zero(weights, temperature):
    assume(any(weights))
    spec = mixture_of(weights, temperature=temperature)

    resolved = resolve_weights(spec, [1] * len(weights), [1] * len(weights))

    assert math.fsum(resolved) == pytest.approx(1)
    assert [weight == 0 for weight in resolved] == [weight == 0 for weight in weights]


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=10), st.floats(0.5, 10))
def test_temperature_is_a_power_of_the_ratio(weights, temperature):
    resolved = resolve_weights(mixture_of(weights, temperature=temperature), [1] * len(weights), [1] * len(weights))

    expected = (weights[0] / weights[1]) ** (1 / temperature)
    assert resolved[0] / resolved[1] == pytest.approx(expected)


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=10))
def test_counted_weights_are_proportional_to_what_is_selected(pairs):
    frames, episodes = [one for one, _ in pairs], [two for _, two in pairs]
    members = [f"d{number}" for number in range(len(pairs))]

    def resolved(rule):
        return resolve_weights(MixtureSpec(members=members, weights=rule), frames, episodes)

    assert resolved("frames") == pytest.approx([count / sum(frames) for count in frames])
    assert resolved("episodes") == pytest.approx([count / sum(episodes) for count in episodes])
    roots_of = [math.sqrt(count) for count in frames]
    assert resolved("sqrt") == pytest.approx([root / sum(roots_of) for root in roots_of])


def test_given_weights_are_exact_where_numbers_allow():
    assert resolve_weights(mixture_of([1, 1, 2]), [5, 5, 5], [1, 1, 1]) == (0.25, 0.25, 0.5)


def test_a_weight_of_zero_leaves_a_member_out_under_every_rule():
    for rule in ("given", "frames", "episodes", "sqrt"):
        assert resolve_weights(mixture_of([0, 3], weights=rule), [10, 10], [1, 1]) == (0.0, 1.0)
    assert resolve_weights(mixture_of([1, 1], weights=[0, 3]), [10, 10], [1, 1]) == (0.0, 1.0)


def test_all_weights_zero_is_an_error_that_names_the_members():
    with pytest.raises(ConfigError, match=r"weight 0: 'd0', 'd1'"):
        resolve_weights(mixture_of([0, 0]), [1, 1], [1, 1])


def test_a_weight_on_no_frames_names_the_member():
    with pytest.raises(ConfigError, match=r"member 'd1' has weight 2 and no selected frame"):
        resolve_weights(mixture_of([1, 2]), [3, 0], [1, 0])


def test_a_weight_that_vanishes_is_not_dropped_silently():
    with pytest.raises(ConfigError, match=r"'d0' with weight 1 comes to nothing beside 10 at temperature 0.001"):
        resolve_weights(mixture_of([1, 10], temperature=0.001), [1, 1], [1, 1])


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ({"root": "a", "weight": -1}, r"weight of member 'a' is -1"),
        ({"root": "a", "weight": float("nan")}, r"weight of member 'a' is nan"),
        ({"root": "a", "name": "arm", "weight": True}, r"weight of member 'arm' is True"),
        ({"root": "a", "wieght": 1}, r"members\[0\] has no field 'wieght'; did you mean 'weight'"),
        ({"weight": 1}, r"has no 'root'"),
        ({"root": ""}, r"empty root"),
        ({"root": 7}, r"root of a member is 7"),
        ({"root": "a", "rename": ["x"]}, r"rename of member 'a' is \['x'\]; give a mapping"),
        ({"root": "a", "rename": {"x": "z", "y": "z"}}, r"names 'z' twice"),
        ({"root": "a", "rename": {"timestamp": "time"}}, r"'timestamp' is always there"),
        ({"root": "a", "rename": {"x": "index"}}, r"'index' is always there"),
        (
            {"root": "a", "rename": {"x": "task"}},
            r"rename of member 'a' gives a feature the name 'task', which batches",
        ),
        ({"root": "a", "rename": {"x": "dataset"}}, r"the name 'dataset', which batches use themselves"),
        ({"root": "a", "rename": {"x": "dataset_index"}}, r"the name 'dataset_index'"),
        ({"root": "a", "rename": {"x": "robot_type"}}, r"the name 'robot_type'"),
        ({"root": "a", "rename": {"x": "augment_seed"}}, r"the name 'augment_seed'"),
        ({"root": "a", "rename": {"x": "is_repeat"}}, r"the name 'is_repeat'"),
        ({"root": "a", "rename": {"x": "action_is_pad"}}, r"the name 'action_is_pad'"),
        ({"root": "a", "rename": {"x": "action_dim_is_pad"}}, r"the name 'action_dim_is_pad'"),
        ({"root": "a", "cameras": {"top_is_missing": "x"}}, r"cameras of .* the name 'top_is_missing'"),
        ({"root": "a", "rename": {"x": 1}}, r"names of features are text"),
        ({"root": "a", "cameras": ["top"]}, r"cameras of member 'a' is \['top'\]; give a mapping"),
        ({"root": "a", "cameras": "top"}, r"or 'all'"),
        ({"root": "a", "cameras": {"x": "top", "y": "top"}}, r"names 'top' twice"),
        ({"root": "a", "drop": "x"}, r"drop of member 'a' is 'x'; give a list"),
        ({"root": "a", "drop": ["index"]}, r"has 'index'"),
        ({"root": "a", "drop": ["x"], "rename": {"x": "y"}}, r"leaves out 'x'"),
        ({"root": "a", "cameras": {"y": "x"}, "rename": {"x": "z"}}, r"the camera 'x' in cameras and in rename"),
        ({"root": "a", "selection": {"epsiodes": [1]}}, r"'epsiodes'; did you mean 'episodes'"),
        ({"root": "a", "selection": {"episodes": "first"}}, r"episodes is 'first'; give whole numbers"),
        ({"root": "a", "selection": {"episodes": ["x"]}}, r"selection of member 'a' is"),
        ({"root": "a", "selection": {"episodes": 5}}, r"episodes is 5; give whole numbers"),
        ({"root": "a", "selection": 3}, r"selection of member 'a' must be .* got 3"),
        ({"root": "a", "tolerance_s": "own"}, r"tolerance_s of member 'a' is 'own'.*'mixture'"),
        (3, r"members\[0\] is 3"),
        (("a", 1, 2), r"members\[0\] is \('a', 1, 2\)"),
    ],
)
def test_an_impossible_member_is_an_error_with_its_value(member, message):
    with pytest.raises(ConfigError, match=message):
        MixtureSpec(members=[member])


def test_own_names_that_batches_use_can_be_given_up():
    spec = MemberSpec(root="a", rename={"task": "goal", "x_is_pad": "x_mask"}, cameras={"top": "robot_type"})

    assert (spec.rename["task"], spec.cameras["top"]) == ("goal", "robot_type")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": []}, r"at least one dataset"),
        ({"members": "a"}, r"members is 'a'; give a list"),
        ({"members": [{"root": "a", "name": "x"}, {"root": "b", "name": "x"}]}, r"2 members .* 'x'"),
        ({"weights": "frame"}, r"weights is 'frame'; did you mean 'frames'"),
        ({"weights": [1]}, r"1 numbers for 2 members"),
        ({"weights": [1, -2]}, r"weight of member 'b' is -2"),
        ({"weights": [1, 10**400]}, r"weight of member 'b' is 1000.*; give a number of at least 0"),
        ({"weights": [1, float("nan")]}, r"weight of member 'b' is nan"),
        ({"weights": 3}, r"weights is 3"),
        ({"temperature": 0}, r"temperature is 0; give a number above 0"),
        ({"temperature": float("inf")}, r"temperature is inf"),
        ({"frames_per_epoch": 0}, r"frames_per_epoch must be"),
        ({"frames_per_epoch": 1.5}, r"or 'all', got 1.5"),
        ({"resize": 2.5}, r"resize is 2.5"),
        ({"resize": (0, 3)}, r"resize \(0, 3\)"),
        ({"resize": "small"}, r"resize is 'small'"),
        ({"on_missing": "skip"}, r"on_missing is 'skip'"),
        ({"on_bad_dataset": "skipp"}, r"did you mean 'skip'"),
        ({"widths": {"action": 0}}, r"widths of 'action' must be"),
        ({"widths": {"frame_index": 3}}, r"widths has 'frame_index', which is one number in every dataset"),
        ({"widths": {"timestamp": 1}}, r"widths has 'timestamp'"),
        ({"widths": ["action"]}, r"widths is \['action'\]"),
        ({"rate": 0}, r"rate is 0.*or 'own'"),
        ({"rate": 10**400}, r"rate is 1000.*or 'own'"),
        ({"tolerance_s": -1}, r"tolerance_s is -1"),
    ],
)
def test_an_impossible_mixture_is_an_error_with_its_value(options, message):
    with pytest.raises(ConfigError, match=message):
        MixtureSpec(**{"members": ["a", "b"], **options})
