import re
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from raypipe.dataset import WindowSpec
from raypipe.dataset.windows import window_from_timestamps
from raypipe.errors import ConfigError
from raypipe.format import INDEX_FEATURES, Feature
from raypipe.mixture.members import MemberFeatures, member_windows
from raypipe.mixture.spec import MixtureSpec, read_mixture_file
from raypipe.mixture.unify import add_windows, unify

ACTION = {"action": ("float32", (6,))}
TOP = "observation.images.top"
WRIST = "observation.images.wrist"


def row(name, dtype, shape, names=()):
    kind = dtype if dtype in ("string", "language") else "vector"
    return Feature(name=name, kind=kind, dtype=dtype, shape=shape, names=names)


def camera(name, height=480, width=640, kind="video", *, is_depth=False, codec="h264"):
    return Feature(name=name, kind=kind, dtype="uint8", shape=(3, height, width), is_depth=is_depth, codec=codec)


def member(name, rows=ACTION, cameras=(), others=()):
    """Return a member of row features given as (dtype, shape), and of cameras given as features or names."""
    found = [one if isinstance(one, Feature) else camera(one) for one in cameras]
    index = {one: row(one, dtype, (1,)) for one, dtype in INDEX_FEATURES.items()}
    own = {one: row(one, *value) for one, value in rows.items()}
    return MemberFeatures(name=name, rows=own | index, cameras={one.name: one for one in found}, others=others)


def unified(*members, specs=(), **options):
    given_specs = {one["name"]: one for one in specs}
    spec = MixtureSpec(
        members=[{"root": one.name, "name": one.name, **given_specs.get(one.name, {})} for one in members], **options
    )
    schema, notes = unify(members, spec)
    return SimpleNamespace(schema=schema, notes=tuple(notes))


def refusal(*members, **options):
    with pytest.raises(ConfigError) as caught:
        unified(*members, **options)
    return str(caught.value)


def test_like_members_are_as_each_of_them():
    schema = unified(member("a", cameras=[TOP]), member("b", cameras=[TOP])).schema

    assert list(schema.features) == ["action", *INDEX_FEATURES, TOP]
    assert (schema.features["action"].dtype, schema.features["action"].shape) == ("float32", (6,))
    assert schema.features[TOP] == camera(TOP)
    assert schema.members[0] == schema.members[1]
    assert (schema.widths, schema.windows, schema.time_axes) == ({}, {}, ())


def test_names_in_the_mixture_lead_to_own_names():
    result = unified(
        member("a", {"action": ("float32", (6,)), "extra": ("float32", (2,))}, ["cam_left", "cam_high"]),
        member("b", {"act": ("float64", (6,))}, ["grip", "laptop"]),
        specs=[
            {"name": "a", "cameras": {WRIST: "cam_left"}, "drop": ["extra"]},
            {"name": "b", "rename": {"act": "action", "grip": WRIST}, "drop": ["laptop"]},
        ],
    )

    first, second = result.schema.members
    assert first.cameras == {WRIST: "cam_left"}
    assert second.cameras == {WRIST: "grip"}
    assert (first.rows["action"], second.rows["action"]) == ("action", "act")
    assert all(second.rows[name] == name for name in INDEX_FEATURES)
    assert "extra" not in result.schema.features
    assert result.notes == ()


def test_two_names_may_change_places():
    specs = [{"name": "a", "rename": {"x": "y", "y": "x"}}]

    schema = unified(member("a", {"x": ("int64", (1,)), "y": ("float32", (3,))}), specs=specs).schema

    assert (schema.members[0].rows["x"], schema.members[0].rows["y"]) == ("y", "x")
    assert schema.features["x"].shape == (3,)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 12))
def test_vectors_are_as_wide_as_the_widest_and_padding_is_told(numbers, wanted):
    widest = max(*numbers, wanted, 0)
    members = [member(f"m{i}", {"action": ("float32", (n,))} if n else {}) for i, n in enumerate(numbers)]
    if not any(numbers) or (wanted and wanted < max(numbers)):
        return
    schema = unified(*members, on_missing="fill", widths={"action": wanted} if wanted else {}).schema

    assert schema.features["action"].shape == (widest,)
    if any(0 < n < widest for n in numbers):
        assert schema.widths == {"action": tuple(numbers)}
        assert schema.dim_is_pad["action"].sum(axis=1).tolist() == [widest - n for n in numbers]
    else:
        assert schema.widths == {}
    assert schema.is_missing.get("action", np.zeros(len(numbers), bool)).tolist() == [n == 0 for n in numbers]


def test_a_scalar_beside_a_vector_is_a_vector_of_one_number():
    one, many = member("a", {"gripper": ("float32", (1,))}), member("b", {"gripper": ("float32", (2,))})

    assert unified(one, one_like(one)).schema.value_shape("gripper") == ()
    result = unified(one, many)

    assert result.schema.value_shape("gripper") == (2,)
    assert result.schema.widths == {"gripper": (1, 2)}
    assert result.notes == ("'gripper' is padded to 2 numbers: 1 in a",)


def one_like(found):
    return MemberFeatures(name=f"{found.name}-like", rows=found.rows, cameras=found.cameras)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("float64", "float32"), "float32"),
        (("int32", "uint8"), "int64"),
        (("bool", "bool"), "bool"),
        (("float64", "int64"), "float32"),
        (("bool", "float16"), "float32"),
        (("bool", "int8"), "int64"),
    ],
)
def test_a_dtype_holds_those_of_all_members(dtypes, expected):
    members = [member(f"m{i}", {"x": (dtype, (2, 2))}) for i, dtype in enumerate(dtypes)]

    assert unified(*members).schema.features["x"].dtype == expected


def test_widened_numbers_are_noted():
    whole, real, flag = (member(name, {"x": (name, (1,))}) for name in ("int64", "float32", "bool"))

    assert unified(whole, real).notes == (
        "'x' is float32, and a whole number that it does not hold is an error: int64 in int64; float32 in float32",
    )
    assert unified(flag, real).notes == ("'x' is float32, which holds all: bool in bool; float32 in float32",)
    assert unified(flag, whole).notes == ("'x' is int64, which holds all: bool in bool; int64 in int64",)


def test_names_of_numbers_are_kept_where_all_say_the_same():
    like = member("a", {"action": ("float32", (2,), ("x", "y"))})
    other = member("c", {"action": ("float32", (2,), ("x", "z"))})

    assert unified(like, one_like(like)).schema.features["action"].names == ("x", "y")
    assert unified(like, other).schema.features["action"].names == ()


def test_text_is_one_with_text_only():
    text = member("a", {"note": ("string", (1,))})

    assert unified(text, one_like(text)).schema.features["note"].kind == "string"
    assert "'note' is not of one kind: string in a; float32 [1] in b" in refusal(
        text, member("b", {"note": ("float32", (1,))})
    )
    assert "not of one kind" in refusal(text, member("b", {"note": ("language", (1,))}))


def test_shapes_of_more_axes_must_be_equal():
    message = refusal(member("a", {"map": ("float32", (2, 3))}), member("b", {"map": ("float32", (2, 4))}))

    assert "'map' has unlike shapes: float32 [2x3] in a; float32 [2x4] in b" in message
    assert "unlike shapes" in refusal(
        member("a", {"map": ("float32", (2, 3))}), member("b", {"map": ("float32", (6,))})
    )


def test_cameras_of_unlike_sizes_need_a_resize():
    members = member("a", cameras=[camera(TOP, 480, 640)]), member("b", cameras=[camera(TOP, 240, 320)])

    message = refusal(*members)
    schema = unified(*members, resize=(120, 160)).schema

    assert "'observation.images.top' has unlike or unknown sizes (height x width): rgb 480x640 in a" in message
    assert "resize: [240, 320]" in message
    assert schema.features[TOP].shape == (3, 120, 160)


def test_unknown_sizes_are_refused_where_a_batch_would_need_them():
    unknown = member("a", cameras=[camera(TOP, 0, 0)])

    assert "rgb ?x? in a, a-like; give a resize" in refusal(unknown, one_like(unknown))
    assert "rgb ?x? in a; give a resize" in refusal(unknown, member("b"), on_missing="fill")
    assert unified(unknown).schema.features[TOP].shape == (3, 0, 0)


def test_a_camera_is_an_image_only_where_every_members_is():
    image, video = camera(TOP, kind="image", codec=""), camera(TOP)

    both = unified(member("a", cameras=[image]), member("b", cameras=[video])).schema
    images = unified(member("a", cameras=[image]), member("b", cameras=[image])).schema

    assert (both.features[TOP].kind, both.features[TOP].codec) == ("video", "")
    assert images.features[TOP].kind == "image"


def test_colour_and_depth_are_not_one():
    depth = camera(TOP, kind="image", is_depth=True)

    assert "not of one kind: rgb 480x640 in a; depth 480x640 in b" in refusal(
        member("a", cameras=[TOP]), member("b", cameras=[depth])
    )
    assert unified(member("a", cameras=[depth])).schema.features[TOP].shape == (1, 480, 640)


def test_what_some_lack_is_refused_left_out_or_filled():
    members = member("a", cameras=[TOP]), member("b")

    assert "'observation.images.top' is in a, and missing in b" in refusal(*members)
    dropped, filled = unified(*members, on_missing="drop"), unified(*members, on_missing="fill")
    assert TOP not in dropped.schema.features
    assert dropped.schema.members[0].cameras == {}
    assert dropped.notes == (f"'{TOP}' is left out everywhere: missing in b",)
    assert filled.schema.is_missing[TOP].tolist() == [False, True]
    assert filled.notes == (f"'{TOP}' is filled with zeros and marked there: missing in b",)


def test_what_is_left_out_need_not_fit():
    members = [member("a", {"x": ("float32", (2, 2))}), member("b", {"x": ("float32", (3, 3))}), member("c", {})]

    assert "x" not in unified(*members, on_missing="drop").schema.features


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"rename": {"acton": "x"}}, r"a: rename names 'acton', which it does not have; did you mean 'action'"),
        ({"rename": {"extra": "action"}}, r"a: 'action' and 'extra' both become 'action'"),
        ({"rename": {"action": TOP}}, rf"a: 'action' and '{TOP}' both become '{TOP}'"),
        ({"cameras": {"x": "observation.images.top1"}}, rf"cameras names '.*top1', .* did you mean '{TOP}'"),
        ({"cameras": {"x": "action"}}, r"cameras names 'action', which it does not have"),
        ({"cameras": {"x": WRIST}, "rename": {TOP: "y"}}, rf"rename names the camera '{TOP}'; give its name in"),
        ({"drop": ["extar"]}, r"drop names 'extar', which it does not have; did you mean 'extra'"),
        ({"rename": {"gone": "x"}}, r"rename names 'gone', which it declares and does not give"),
    ],
)
def test_what_a_member_spec_names_must_be_there(spec, message):
    rows = {"action": ("float32", (6,)), "extra": ("float32", (2,))}

    found = refusal(member("a", rows, [TOP, WRIST], others=("gone",)), specs=[{"name": "a", **spec}])

    assert re.search(message, found)


def test_what_is_declared_and_not_given_may_be_dropped():
    unified(member("a", others=("gone",)), specs=[{"name": "a", "drop": ["gone"]}])


def test_a_row_feature_may_not_have_the_name_of_a_camera():
    here, there = member("a", {"top": ("float32", (2,))}), member("b", {}, ["top"])

    assert "'top' is not of one kind: float32 [2] in a; rgb 480x640 in b" in refusal(here, there)
    message = refusal(here, there, specs=[{"name": "b", "rename": {"top": TOP}}], on_missing="fill")
    assert "'top' of a is read from rows and is an own camera name of b; rename the row feature" in message


@pytest.mark.parametrize("name", ["robot_type", "dataset", "task", "action_is_pad", "x_dim_is_pad", "top_is_missing"])
def test_features_may_not_have_the_names_of_keys_that_batches_set(name):
    rows = member("a", {"action": ("float32", (6,)), name: ("float32", (2,))})
    pixels = member("b", cameras=[name])

    for taken in (rows, pixels):
        who = f"'{name}' of {taken.name} has the name of a key that batches use themselves; rename or drop it"
        assert who in refusal(taken)
        # Others are not asked to have it too.
        assert f"'{name}' is in" not in refusal(taken, member("c"))
        mended = unified(taken, specs=[{"name": taken.name, "rename": {name: "free"}}])
        assert "free" in mended.schema.features
        unified(taken, specs=[{"name": taken.name, "drop": [name]}])
    assert name not in unified(rows, member("c"), on_missing="drop").schema.features


def test_widths_must_name_vectors_and_hold_the_widest():
    message = refusal(member("a"), widths={"actoin": 8, "action": 5})

    assert "widths names 'actoin', which is no vector of the mixture; did you mean 'action'" in message
    assert "widths gives 'action' 5 numbers, and a has 6; give at least 6" in message


def test_everything_wrong_is_told_at_once_with_a_table():
    message = refusal(
        member("aloha", {"action": ("float32", (14,)), "map": ("float32", (2, 3))}, [camera(TOP), WRIST]),
        member("so101", {"action": ("float32", (6,)), "map": ("float32", (3, 3))}, [camera(TOP, 240, 320)]),
    )

    assert message == (
        "the features of the mixture do not fit together:\n"
        "  - 'observation.images.wrist' is in aloha, and missing in so101\n"
        "  - 'map' has unlike shapes: float32 [2x3] in aloha; float32 [3x3] in so101; only vectors are padded. Rename "
        "or drop it\n"
        "  - 'observation.images.top' has unlike or unknown sizes (height x width): rgb 480x640 in aloha; rgb 240x320 "
        "in so101; give a resize\n"
        "\n"
        "who has what (features that all have alike are left out):\n"
        "                            aloha          so101\n"
        "  action                    float32 [14]   float32 [6]\n"
        "  map                       float32 [2x3]  float32 [3x3]\n"
        "  observation.images.top    rgb 480x640    rgb 240x320\n"
        "  observation.images.wrist  rgb 480x640    -\n"
        "\n"
        "to write in the mixture file, once the names are known to mean the same:\n"
        "  resize: [240, 320]\n"
        "  on_missing: fill  # zeros and a mask; or drop: leaves out observation.images.wrist"
    )


def test_members_that_are_alike_share_a_column():
    many = [member(f"arm{i}", cameras=[TOP]) for i in range(30)]

    message = refusal(*many, member("odd"), member("odder", {"act": ("float32", (6,))}))

    assert re.search(r"arm0 \(30 alike\) +odd +odder$", message, re.MULTILINE)
    assert "in arm0, arm1, arm2, arm3, arm4 and 26 more, and missing in odder" in message


def test_a_wide_table_goes_on_below():
    members = [member(f"a-rather-long-dataset-name-{i}", {"action": ("float32", (i, 2))}) for i in range(1, 9)]

    lines = refusal(*members).split("\n\n", 1)[1].splitlines()

    assert max(map(len, lines)) <= 122
    assert sum("action" in line for line in lines) == 3


def pasted(message, members, specs):
    """Return the specs and options after following what the message says to write."""
    lines = message.split("mean the same:\n")[1].splitlines()
    specs = {one.name: {"name": one.name, **specs.get(one.name, {})} for one in members}
    options, under = {}, []
    for line in (line.removeprefix("  ") for line in lines):
        if line.startswith("under "):
            under = line.removeprefix("under ").removesuffix(":").split(", ")
        else:
            value = yaml.safe_load(line.strip())
            targets = [specs[name] for name in under] if line.startswith(" ") else [options]
            for target in targets:
                target.update(value)
    return list(specs.values()), options


SUGGESTED = {
    "row features": (
        [member("a", {"action": ("float32", (6,))}), member("b", {"actions": ("float32", (7,))})],
        {},
        'under b:\n    rename: {"actions": "action"}',
    ),
    "the more frequent name": (
        [member("a", {"act": ("float32", (6,))}), member("b"), member("c")],
        {},
        'under a:\n    rename: {"act": "action"}',
    ),
    "several cameras, by name": (
        [
            member("a", cameras=[TOP, WRIST]),
            member("b", cameras=["observation.images.left_wrist", "observation.images.laptop"]),
        ],
        {},
        f'"observation.images.left_wrist": "{WRIST}"',
    ),
    "a lone pair, whatever its names": (
        [member("a", cameras=[TOP]), member("b", cameras=[camera("observation.images.phone", 240, 320)])],
        {},
        "resize: [240, 320]",
    ),
    "the last pair, once the others are told by name": (
        [member("a", cameras=["cam_high", "cam_wrist"]), member("b", cameras=["top", "wrist"])],
        {},
        'under b:\n    rename: {"wrist": "cam_wrist", "top": "cam_high"}',
    ),
    "a mapping of cameras": (
        [member("a", cameras=[TOP, WRIST]), member("b", cameras=["x", "y", "z"])],
        {"b": {"cameras": {TOP: "x", "observation.images.wrists": "y"}}},
        f'cameras: {{"{TOP}": "x", "{WRIST}": "y"}}',
    ),
    "a rename that is there already": (
        [
            member("a", {"p": ("float32", (2,)), "action": ("float32", (3,))}),
            member("b", {"q": ("float32", (2,)), "z": ("float32", (3,))}),
        ],
        {"b": {"rename": {"q": "p", "z": "actoin"}}},
        'rename: {"q": "p", "z": "action"}',
    ),
    "what has no counterpart": (
        [member("a", cameras=[TOP]), member("b", {"action": ("float32", (6,)), "note": ("string", (1,))})],
        {},
        "on_missing: fill",
    ),
}


@pytest.mark.parametrize("case", SUGGESTED)
def test_what_the_error_suggests_can_be_pasted_and_mends_it(case):
    members, specs, expected = SUGGESTED[case]
    message = refusal(*members, specs=[{"name": name, **one} for name, one in specs.items()])

    specs, options = pasted(message, members, specs)
    assert expected in message
    unified(*members, specs=specs, **options)


def test_names_that_one_member_has_both_are_not_offered_as_one():
    message = refusal(
        member("a", cameras=["cam_left", "cam_right"]),
        member("b", cameras=["cam_left"]),
        member("c", cameras=["cam_right"]),
    )

    assert "rename" not in message


camera_names = st.lists(st.sampled_from(["top", "tops", "wrist", "wrist_l", "side"]), unique=True, max_size=4)
vectors = st.dictionaries(
    st.sampled_from(["state", "states", "act", "action"]), st.tuples(st.just("float32"), st.tuples(st.integers(1, 3)))
)


@given(st.lists(st.tuples(vectors, camera_names, st.sampled_from([120, 240])), min_size=2, max_size=5))
def test_any_members_of_like_kinds_are_mended_by_what_is_suggested(drawn):
    members = [
        member(f"m{number}", rows, [camera(name, height, 320) for name in cameras])
        for number, (rows, cameras, height) in enumerate(drawn)
    ]
    try:
        unified(*members)
    except ConfigError as error:
        specs, options = pasted(str(error), members, {})
        unified(*members, specs=specs, **options)


def schema_of_two():
    specs = [{"name": "b", "rename": {"act": "action", "phone": TOP}}]
    first = member("a", cameras=[TOP, WRIST])
    return unified(first, member("b", {"act": ("float32", (6,))}, ["phone"]), specs=specs, on_missing="fill").schema


def windows_of(schema, fps, options=None, members=(), **given):
    spec = MixtureSpec(members=members or [f"m{i}" for i in range(len(fps))], **(options or {}))
    return [one.offsets for one in member_windows(schema, spec, fps, **given)]


def test_windows_are_under_own_names_at_own_rates():
    found = windows_of(schema_of_two(), [30, 50], delta_timestamps={"action": [0, 0.1], TOP: [-0.1], WRIST: [0.0]})

    assert found == [{"action": (0, 3), TOP: (-3,), WRIST: (0,)}, {"act": (0, 5), "phone": (-5,)}]


def test_seconds_need_frames_only_where_the_feature_is():
    found = windows_of(schema_of_two(), [30, 7], delta_timestamps={WRIST: [0.1]})

    assert found == [{WRIST: (3,)}, {}]


def test_offsets_are_own_frames_unless_there_is_a_rate():
    given_offsets = {"action": [-1, 0, 3], WRIST: [0]}

    own = windows_of(schema_of_two(), [30, 50], offsets=given_offsets)
    common = windows_of(schema_of_two(), [30, 50], {"rate": 10}, offsets=given_offsets)

    assert own == [{"action": (-1, 0, 3), WRIST: (0,)}, {"act": (-1, 0, 3)}]
    assert common == [{"action": (-3, 0, 9), WRIST: (0,)}, {"act": (-5, 0, 15)}]


@given(
    st.lists(st.floats(-3, 3), min_size=1, max_size=8),
    st.lists(st.integers(1, 100), min_size=1, max_size=4),
)
def test_with_a_rate_a_slot_is_the_nearest_own_frame(deltas, rates):
    members = [member(f"m{i}") for i in range(len(rates))]

    found = windows_of(unified(*members).schema, rates, {"rate": 7}, delta_timestamps={"action": deltas})

    for fps, window in zip(rates, found, strict=True):
        assert all(
            abs(offset - delta * fps) <= 0.5 + 1e-5 for offset, delta in zip(window["action"], deltas, strict=True)
        )


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=8), st.integers(1, 100))
def test_a_window_is_that_of_the_dataset_alone(frames, fps):
    seconds = {"action": [frame / fps for frame in frames]}

    found = windows_of(unified(member("a")).schema, [fps], delta_timestamps=seconds)

    assert found == [window_from_timestamps(seconds, fps=fps).offsets]


def test_halves_of_frames_are_taken_evenly():
    found = windows_of(unified(member("a")).schema, [10], {"rate": 20}, offsets={"action": range(-2, 5)})

    assert found == [{"action": (-1, 0, 0, 1, 1, 2, 2)}]


def test_seconds_between_frames_are_listed_for_all_members_with_the_remedy():
    schema = unified(member("a"), member("b"), member("c")).schema
    members = ["a", "b", {"root": "c", "tolerance_s": 0.001}]

    with pytest.raises(ConfigError) as caught:
        windows_of(schema, [30, 15, 50], members=members, delta_timestamps={"action": [0, 0.1, 0.05]})

    message = str(caught.value)
    assert "a at 30 fps, within 0.0001 s: {'action': [0.05]}" in message
    assert "b at 15 fps, within 0.0001 s: {'action': [0.1, 0.05]}" in message
    assert "c at 50 fps, within 0.001 s: {'action': [0.05]}" in message
    assert "for the whole mixture:  tolerance_s: 0.034" in message
    assert "under c:  tolerance_s: 0.01" in message
    assert "rate: 50" in message


@given(
    st.lists(st.floats(-3, 3), min_size=1, max_size=5), st.lists(st.sampled_from([10, 24, 29.97, 30, 50]), min_size=1)
)
def test_the_tolerance_that_the_error_names_is_enough(deltas, rates):
    schema = unified(*[member(f"m{i}") for i in range(len(rates))]).schema
    try:
        windows_of(schema, rates, delta_timestamps={"action": deltas})
    except ConfigError as error:
        tolerance_s = float(re.search(r"tolerance_s: (\S+)", str(error))[1])
        windows_of(schema, rates, {"tolerance_s": tolerance_s}, delta_timestamps={"action": deltas})
        with pytest.raises(ConfigError, match="do not"):
            windows_of(schema, rates, {"tolerance_s": 0.85 * tolerance_s}, delta_timestamps={"action": deltas})


def test_a_tolerance_of_the_message_is_a_number_in_a_file(tmp_path):
    (tmp_path / "m.yaml").write_text("datasets: [/d/a]\ntolerance_s: 1.7e-05\n")

    assert read_mixture_file(str(tmp_path / "m.yaml")).tolerance_s == 1.7e-05


@pytest.mark.parametrize(
    ("given_windows", "message"),
    [
        ({"offsets": {"actoin": [0], "x": [1]}}, r"names 'actoin', 'x', which .* did you mean 'action'"),
        ({"delta_timestamps": {"phone": [0]}}, r"names 'phone'"),
        ({"delta_timestamps": {"action": 0.1}}, r"window of 'action' is 0.1; give a list of seconds"),
        ({"delta_timestamps": {"action": [float("inf")]}}, r"finite"),
        ({"offsets": {"action": [0.5]}}, r"give a list of frame numbers"),
        ({"offsets": {"action": []}}, r"empty"),
        ({}, r"either"),
        ({"offsets": {}, "delta_timestamps": {}}, r"either"),
    ],
)
def test_an_impossible_window_is_an_error(given_windows, message):
    with pytest.raises(ConfigError, match=message):
        windows_of(schema_of_two(), [30, 50], **given_windows)


def test_windows_of_members_become_those_of_the_schema():
    first = WindowSpec(offsets={"action": (0, 3), TOP: (0,), WRIST: (-1, 0)})
    second = WindowSpec(offsets={"act": (0, 5), "phone": (0,)})

    schema = add_windows(schema_of_two(), [("a", first), ("b", second)])

    assert schema.windows == {"action": 2, TOP: 1, WRIST: 2}
    assert schema.time_axes == (WRIST,)


@pytest.mark.parametrize(("kinds", "expected"), [(("image", "image"), (TOP,)), (("image", "video"), ())])
def test_a_window_of_one_frame_keeps_its_axis_only_where_all_store_images(kinds, expected):
    schema = unified(*[member(f"m{i}", cameras=[camera(TOP, kind=kind)]) for i, kind in enumerate(kinds)]).schema

    assert add_windows(schema, [("x", WindowSpec(offsets={TOP: (0,)}))] * 2).time_axes == expected


@pytest.mark.parametrize("offsets", [{}, {"act": (0, 1, 2)}])
def test_windows_of_unlike_lengths_are_an_error(offsets):
    windows = [("/d/a", WindowSpec(offsets={"action": (0, 1)})), ("/d/b", WindowSpec(offsets=offsets))]

    with pytest.raises(ConfigError, match=r"windows of 'action' differ in length: 2 frames in member 0 \(/d/a\); [03]"):
        add_windows(schema_of_two(), windows)
