import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import make_index, plan_start

from raypipe.errors import ConfigError
from raypipe.plan import (
    BatchSpec,
    CameraCost,
    Leg,
    MemberCost,
    OrderSpec,
    concat_indexes,
    first_leg,
    measure_held,
    plan_epoch,
    plan_world,
    resolve_live,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"seed": 0, "live_spans": 0}, "live_spans must be an integer of at least 1, got 0"),
        ({"seed": 0, "span_frames": 0}, "span_frames must be an integer of at least 1 or 'episode', got 0"),
        ({"seed": 0, "lanes": "ranks"}, "lanes must be an integer of at least 1 or 'world_size', got 'ranks'"),
        ({"seed": 0, "tail": "shrot"}, "tail='shrot' is not known; did you mean 'short'"),
    ],
)
def test_order_spec_refuses_the_impossible(options, message):
    with pytest.raises(ConfigError, match=message):
        OrderSpec(**options)


def test_batch_that_does_not_share_out_names_the_nearest_that_do():
    assert BatchSpec(size=12).per_lane(lanes=8, world_size=2) == 3
    assert BatchSpec(size=24, scope="global").per_lane(lanes=8, world_size=2) == 3
    with pytest.raises(ConfigError, match=r"batch_size=10 does not share out over 4 lanes .*: 8 or 12"):
        BatchSpec(size=10).per_lane(lanes=8, world_size=2)
    with pytest.raises(ConfigError, match=r"global_batch_size=3 does not share out over 8 lanes .*: 8\."):
        BatchSpec(size=3, scope="global").per_lane(lanes=8, world_size=2)


def test_an_epoch_starts_on_the_base_lanes_where_the_ranks_divide_them():
    spec = OrderSpec(seed=0, lanes=12)

    assert first_leg(spec, world_size=4) == Leg(lanes=12, live_spans=128)
    assert first_leg(spec, world_size=5) == Leg(lanes=5, live_spans=128)
    assert first_leg(OrderSpec(seed=0), world_size=5) == Leg(lanes=5, live_spans=128)


def test_a_start_with_fewer_frames_than_lanes_is_refused():
    with pytest.raises(ConfigError, match="3 frames cannot be shared out over 4 lanes; use at most 3"):
        plan_start(make_index([1, 2]), OrderSpec(seed=0), world_size=4)


def test_a_start_without_a_full_batch_is_refused():
    with pytest.raises(ConfigError, match="tail='drop' leaves no batch: a lane has 2 frames and a batch takes 3"):
        plan_start(make_index([4]), OrderSpec(seed=0, tail="drop"), world_size=2, per_lane=3)


def test_ranks_that_do_not_divide_the_lanes_are_refused():
    plan = plan_epoch(make_index([20]), OrderSpec(seed=0, lanes=6), epoch=0)

    with pytest.raises(ConfigError, match="4 ranks cannot serve 6 lanes; 1, 2, 3, 6 can"):
        plan_world(plan, world_size=4, batch=BatchSpec(size=1))


def test_lanes_of_the_world_size_need_legs():
    with pytest.raises(ConfigError, match="needs the legs of a world size"):
        plan_epoch(make_index([20]), OrderSpec(seed=0), epoch=0)


def test_spans_are_cut_at_multiples_of_span_frames():
    world = plan_start(make_index([25]), OrderSpec(seed=0, shuffle=False, span_frames=10), world_size=1)

    queue = world.rank(0).queue

    assert list(zip(queue.start.tolist(), queue.stop.tolist(), strict=True)) == [(0, 10), (10, 20), (20, 25)]


def camera(**options):
    return CameraCost(**{"name": "top", "keyframe_interval": 2, "frame_bytes": 1_000_000, **options})


def budget(index=None, cameras=(), *, row_bytes=100, **options):
    index = index or make_index([300] * 1000)
    members = [MemberCost(row_bytes=row_bytes, cameras=tuple(cameras))]
    return resolve_live(index, members, **{"batch": 64, **options})


def test_clips_are_as_long_as_the_keyframe_interval_and_live_spans_fill_the_memory():
    found = budget(cameras=[camera()], live_bytes=500_000_000)

    # 64 frames of the batch, 64 ahead, and one frame of a clip for every live span.
    assert (found.clip_frames, found.live_spans, found.span_frames) == (2, 500 - 128, "episode")
    assert found.clip_bytes <= 500_000_000
    assert found.cost == pytest.approx(1.0657, abs=1e-3)


def test_clips_of_small_frames_are_a_little_longer_since_a_jump_costs_more_of_them():
    found = budget(cameras=[camera(num_pixels=320 * 240, frame_bytes=3 * 320 * 240)])

    assert (found.clip_frames, found.live_spans) == (4, 1024)


def test_more_memory_buys_live_spans_up_to_a_bound_and_not_longer_clips():
    found = budget(cameras=[camera()], live_bytes=1 << 40)

    assert (found.clip_frames, found.live_spans) == (2, 1024)


def test_frames_that_are_keyframes_are_decoded_one_by_one():
    assert budget(cameras=[camera(keyframe_interval=1)]).clip_frames == 1


def test_rows_alone_have_no_clips():
    found = budget()

    assert (found.clip_frames, found.live_spans, found.cost) == ("span", 1024, 1.0)


def test_little_memory_gives_clips_of_one_frame_before_it_gives_up_live_spans():
    found = budget(cameras=[camera()], live_bytes=140_000_000)

    assert found.clip_frames == 1
    assert found.live_spans >= 128
    assert found.cost == pytest.approx(1.631, abs=1e-3)


def test_a_long_gop_trades_live_spans_for_bearable_clips_and_says_what_it_would_take():
    found = budget(cameras=[camera(keyframe_interval=250)], live_bytes=1 << 30)
    ample = budget(cameras=[camera(keyframe_interval=250)], live_bytes=found.ample_bytes)

    assert found.is_long_gop
    assert 1.5 < found.cost <= 2.5
    assert 1 <= found.live_spans < 128
    assert found.clip_bytes <= 1 << 30
    assert (ample.is_long_gop, ample.live_spans >= 128, ample.cost < 1.1) == (False, True, True)


def test_the_reach_of_windows_counts_in_the_choice():
    near = budget(cameras=[camera(offsets=(-1, 0))], live_bytes=1 << 34)
    far = budget(cameras=[camera(offsets=(-30, -15, 0))], live_bytes=1 << 36)

    # A frame more for every clip: of 2 frames that would be half of the cost again.
    assert near.clip_frames >= 6
    assert far.clip_frames >= 48


@pytest.mark.parametrize(("offsets", "clip_frames", "shown"), [((0,), 4, 4), ((-1, 0), 4, 5), ((-30, -15, 0), 2, 6)])
def test_each_frame_of_a_clip_is_decoded_once(offsets, clip_frames, shown):
    assert len(camera(offsets=offsets).shown_frames(0, clip_frames)) == shown


def test_datasets_of_a_mixture_have_clips_of_their_own():
    members = [MemberCost(row_bytes=1, cameras=(camera(keyframe_interval=interval),)) for interval in (2, 8)]
    index = concat_indexes([make_index([300] * 500, name="a"), make_index([300] * 500, name="b")])

    found = resolve_live(index, members, batch=16, live_bytes=4 << 30)

    assert found.clip_frames == (2, 8)
    # As many as fit if all of them were of the dataset with the long clips.
    assert 32 <= found.live_spans <= (4 << 30) / 7_000_000


def test_what_is_given_is_kept():
    found = budget(cameras=[camera()], live_spans=77, clip_frames=5, span_frames=50, live_bytes=1 << 30)

    assert (found.live_spans, found.clip_frames, found.span_frames) == (77, 5, 50)


def test_images_in_rows_shorten_spans_so_that_enough_are_live():
    found = budget(cameras=[camera(keyframe_interval=1)], row_bytes=50_000, batch=16, live_bytes=1 << 30)

    assert found.span_frames != "episode"
    assert found.live_spans >= 32
    assert found.live_spans * found.span_frames * 50_000 <= (1 << 30) / 4


def test_a_budget_too_small_for_one_batch_is_an_error_that_says_what_it_takes():
    with pytest.raises(ConfigError, match="live_bytes=60,000,000 does not hold the decoded frames of one batch: 64 "):
        budget(cameras=[camera()], live_bytes=60_000_000)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.sampled_from([2, 3, 8]), st.lists(st.integers(1, 60), min_size=3, max_size=30), st.data())
def test_a_rank_never_holds_more_than_the_budget_reckons_with(live_spans, clip_frames, lengths, data):
    index, member = make_index(lengths), MemberCost(row_bytes=1, cameras=(camera(frame_bytes=1),))
    spec = OrderSpec(seed=data.draw(st.integers(0, 99)), live_spans=live_spans, clip_frames=clip_frames)
    world = plan_start(index, spec, world_size=1, per_lane=4)

    _, next_bytes = measure_held(world, [member], [clip_frames], live_bytes=1)

    assert next_bytes <= live_spans * (clip_frames - 1) + 4


def test_whole_numbers_of_any_type_are_stored_as_pythons_own():
    spec = OrderSpec(seed=np.int64(3), live_spans=np.int32(8), lanes=np.int16(4))

    assert json.loads(json.dumps([spec.seed, spec.live_spans, spec.lanes])) == [3, 8, 4]


@pytest.mark.parametrize(
    "options", [{"seed": "3"}, {"seed": 0.7}, {"seed": 0, "lanes": True}, {"seed": 0, "shuffle": "no"}]
)
def test_order_spec_refuses_other_types(options):
    with pytest.raises(ConfigError, match="got"):
        OrderSpec(**options)
