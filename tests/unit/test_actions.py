"""Relative and delta actions, against a loop over slots and numbers; and which numbers a spec means."""

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raypipe.dataset import ActionSpec, WindowSpec, check_window, map_actions, window_rows
from raypipe.errors import ConfigError
from raypipe.format import Feature

STATE = "observation.state"


def vector(name, width, names=(), dtype="float32"):
    return Feature(name=name, kind="vector", dtype=dtype, shape=(width,), names=tuple(names))


def mapped(spec, action=("x", "y", "gripper"), state=("x", "y", "gripper")):
    features = {"action": vector("action", len(action), action), STATE: vector(STATE, len(state), state)}
    return map_actions(ActionSpec(**spec), features, action="action", state=STATE, place="'here'")


def slow(spec, actions, states, frame, offsets, names):
    """Return one window by the definition, number by number, in Python's floats."""
    rows = [min(max(frame + offset, 0), len(actions) - 1) for offset in offsets]
    window = np.empty((len(rows), len(names)), dtype=np.float32)
    for slot, row in enumerate(rows):
        for dim, name in enumerate(names):
            value = float(actions[row, dim])
            if name not in spec.get("absolute", ()):
                is_later = spec["mode"] == "delta" and slot > 0
                value -= float(actions[rows[slot - 1], dim]) if is_later else float(states[frame, dim])
                period = spec.get("wrap", {}).get(name)
                value = value if period is None else value - period * math.floor(value / period + 0.5)
            window[slot, dim] = np.float32(value)
    return window


floats = st.floats(-1e3, 1e3, width=32)


@st.composite
def episodes(draw):
    length, width = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    # Which of some numbers each place has: one draw for all places.
    numbers = np.array(draw(st.lists(floats, min_size=1, max_size=16)), dtype=np.float32)
    places = np.frombuffer(draw(st.binary(min_size=2 * length * width, max_size=2 * length * width)), dtype=np.uint8)
    actions, states = numbers[places % len(numbers)].reshape(2, length, width)
    names = [f"n{i}" for i in range(width)]
    absolute = draw(st.lists(st.sampled_from(names), unique=True))
    turning = [name for name in names if name not in absolute and draw(st.booleans())]
    spec = {
        "mode": draw(st.sampled_from(["relative", "delta"])),
        "absolute": absolute,
        "wrap": dict.fromkeys(turning, draw(st.sampled_from([360.0, 2 * math.pi]))),
    }
    offsets = sorted(draw(st.sets(st.integers(-4, 12), min_size=1, max_size=6)))
    return spec, actions, states, names, offsets


@given(episodes())
@settings(max_examples=150)
def test_windows_are_those_of_the_definition(case):
    spec, actions, states, names, offsets = case
    anchors = np.arange(len(actions))
    slots, _ = window_rows(anchors, len(actions), offsets)

    encoded = mapped(spec, names, names).encode(actions[slots], states, has_window=True)

    expected = [slow(spec, actions, states, frame, offsets, names) for frame in range(len(actions))]
    assert encoded.dtype == np.float32
    np.testing.assert_array_equal(encoded, expected)


@given(episodes(), st.booleans())
def test_decoding_gives_the_window_back_with_its_padding(case, is_torch):
    spec, actions, states, names, offsets = case
    spec = {**spec, "wrap": {}}
    slots, _ = window_rows(np.arange(len(actions)), len(actions), offsets)
    one = mapped(spec, names, names)
    encoded = one.encode(actions[slots], states, has_window=True)
    as_given = torch.from_numpy if is_torch else np.asarray

    decoded = one.decode(as_given(encoded), as_given(states))

    assert type(decoded) is type(as_given(states))
    np.testing.assert_allclose(decoded, actions[slots], rtol=1e-5, atol=2e-3)
    np.testing.assert_array_equal(encoded, one.encode(actions[slots], states, has_window=True))


@given(episodes())
def test_a_padded_slot_holds_what_a_robot_that_stays_would(case):
    spec, actions, states, names, _ = case
    slots, is_pad = window_rows(np.arange(len(actions)), len(actions), range(len(actions) + 2))
    one = mapped(spec, names, names)

    encoded = one.encode(actions[slots], states, has_window=True)

    for window, padding in zip(encoded, is_pad, strict=True):
        last = window[np.flatnonzero(~padding)[-1]].copy()
        if spec["mode"] == "delta":
            last[list(one.dims)] = 0
        np.testing.assert_array_equal(window[padding], np.broadcast_to(last, (padding.sum(), len(last))))


@given(floats, floats, st.sampled_from([360.0, 2 * math.pi]))
def test_an_angle_goes_the_short_way_round(action, state, period):
    one = mapped({"mode": "relative", "wrap": {"x": period}}, ["x"], ["x"])

    (found,) = one.encode(np.array([[action]], np.float32), np.array([[state]], np.float32), has_window=False)[0]

    assert abs(found) <= np.float32(period / 2)
    turns = (float(action) - float(state) - float(found)) / period
    assume(abs(found) < period / 2 - 1e-3)
    assert abs(turns - round(turns)) < 1e-4


def test_without_a_window_both_modes_are_less_the_state():
    actions, states = np.array([[3, 5, 1]], np.float32), np.array([[1, 1, 1]], np.float32)

    for mode in ("relative", "delta"):
        one = mapped({"mode": mode, "absolute": ["gripper"]})
        encoded = one.encode(actions, states, has_window=False)
        assert encoded.tolist() == [[2, 4, 1]]
        assert one.decode(encoded, states).tolist() == actions.tolist()


def test_a_scalar_has_no_axis_of_its_own():
    features = {"action": vector("action", 1), STATE: vector(STATE, 1)}
    one = map_actions(ActionSpec(mode="delta"), features, action="action", state=STATE, place="here")

    encoded = one.encode(np.array([[3, 5, 9]], np.float32), np.array([1], np.float32), has_window=True)

    assert encoded.tolist() == [[2, 2, 4]]


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("num_slots", [1, 2, 4])
@pytest.mark.parametrize(("width", "state_width"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("mode", ["relative", "delta"])
def test_one_number_comes_back_with_and_without_an_axis(mode, width, state_width, num_slots, num_samples):
    features = {"action": vector("action", width), STATE: vector(STATE, state_width)}
    spec = ActionSpec(mode=mode, match=dict.fromkeys(range(width), 0))
    one = map_actions(spec, features, action="action", state=STATE, place="here")
    actions = np.arange(num_samples * num_slots * width, dtype=np.float64).reshape(num_samples, num_slots, width) ** 2
    state = np.arange(num_samples * state_width, dtype=np.float64).reshape(num_samples, state_width) + 7
    encoded = one.encode(actions, state, has_window=True)

    bare_state = state[:, 0] if state_width == 1 else state
    bare = one.decode(encoded[..., 0] if width == 1 else encoded, bare_state)

    np.testing.assert_allclose(one.decode(encoded, state), actions)
    np.testing.assert_allclose(bare, actions[..., 0] if width == 1 else actions)


@pytest.mark.parametrize(
    ("action", "state", "spec", "expected"),
    [
        (("x", "y"), ("x", "y"), {}, [0, 1]),
        (("x", "y"), ("y", "x"), {}, [1, 0]),
        (("x", "y"), ("z", "y", "x", "w"), {}, [2, 1]),
        (("dx", "dy"), ("x", "y"), {}, [0, 1]),
        ((), (), {}, []),
        (("dx", "dy", "gripper"), ("x", "y"), {"match": {"dx": "x", 1: 1}, "absolute": ["grip*"]}, [0, 1]),
        (("x", "y", "gripper"), ("y", "x"), {"absolute": [2]}, [1, 0]),
    ],
)
def test_numbers_belong_together_by_name_then_by_place(action, state, spec, expected):
    one = mapped({"mode": "relative", **spec}, action, state)

    assert list(one.state_dims) == expected


@pytest.mark.parametrize(
    ("action", "state", "spec", "words"),
    [
        (("x", "y", "z"), ("a", "b"), {}, ["'action' has 3 numbers (x, y, z)", f"{STATE!r} has 2 numbers (a, b)"]),
        (("x", "y"), ("y", "w"), {}, ["(x, y)", "(y, w)", "match="]),
        (("x", "y"), ("x", "y"), {"absolute": ["grip"]}, ["no number 'grip'", "'x', 'y'"]),
        (("x", "y"), ("x", "y"), {"absolute": [2]}, ["no number 2", "it has 2"]),
        ((), (), {"absolute": ["x"]}, ["it names none"]),
        (("x", "y"), ("x", "y"), {"absolute": ["x"], "wrap": {"x": 360}}, ["'x'", "absolute and in wrap"]),
        (("x", "y"), ("x", "y"), {"match": {"x": "*"}}, ["2 numbers of"]),
    ],
)
def test_what_does_not_fit_is_told_with_both_sides(action, state, spec, words):
    with pytest.raises(ConfigError) as caught:
        mapped({"mode": "relative", **spec}, action, state)

    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        {"mode": "absolute"},
        {"mode": "delta", "absolute": "gripper"},
        {"mode": "delta", "absolute": [1.5]},
        {"mode": "delta", "wrap": ["x"]},
        {"mode": "delta", "wrap": {"x": 0}},
        {"mode": "delta", "wrap": {"x": True}},
        {"mode": "delta", "match": "x"},
        {"mode": "delta", "to": None},
    ],
)
def test_a_spec_that_says_nothing_sensible_is_an_error(spec):
    with pytest.raises(ConfigError):
        ActionSpec(**spec)


def test_actions_of_whole_numbers_cannot_be_relative():
    features = {"action": vector("action", 2, dtype="int64"), STATE: vector(STATE, 2)}

    with pytest.raises(ConfigError, match="only actions of floats"):
        map_actions(ActionSpec(mode="relative"), features, action="action", state=STATE, place="here")


def test_deltas_need_a_window_that_goes_forward():
    window = WindowSpec(offsets={"action": (0, 2, 1)})

    check_window(ActionSpec(mode="relative"), "action", window)
    with pytest.raises(ConfigError, match="offsets that ascend"):
        check_window(ActionSpec(mode="delta"), "action", window)


def test_a_spec_tells_the_same_of_the_same_representation():
    one = ActionSpec(mode="relative", absolute=["b", "a"], wrap={"x": 360})
    other = ActionSpec(mode="relative", absolute=["a", "b"], wrap={"x": 360.0})

    assert str(one) == str(other) == "relative to observation.state; absolute a, b; wrap x at 360"
    assert pickle.loads(pickle.dumps(one)) == one


def test_decoding_needs_one_state_for_every_window():
    with pytest.raises(ConfigError, match="one frame each"):
        mapped({"mode": "relative"}).decode(np.zeros((4, 3)), np.zeros((2, 4, 3)))
