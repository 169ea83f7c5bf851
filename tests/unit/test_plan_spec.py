import json

import numpy as np
import pytest
from plan_cases import make_index, plan_start

from raypipe.errors import ConfigError
from raypipe.plan import BatchSpec, Leg, OrderSpec, first_leg, plan_epoch, plan_world, resolve_live


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


def budget(index, **options):
    resolved = resolve_live(index, **{"row_bytes": 100, "pixel_bytes": 10_000, "live_spans": 10, **options})
    return resolved.span_frames, resolved.is_decode_on_exit


def test_a_memory_budget_buys_whole_episodes_then_shorter_spans_then_rows_only():
    index = make_index([300] * 100)
    whole = 13 * 300 * 10_100

    assert budget(index, live_bytes=whole) == ("episode", False)
    assert budget(index, live_bytes=whole - 1) == (256, False)
    assert budget(index, live_bytes=whole // 4) == (64, False)
    assert budget(index, live_bytes=13 * 32 * 10_100) == (32, False)
    assert budget(index, live_bytes=13 * 31 * 10_100) == ("episode", True)


def test_a_memory_budget_holds_the_peak_of_uneven_episodes():
    lengths = [100] * 2000 + [20_000] * 20
    index = make_index(lengths)

    found = resolve_live(index, row_bytes=0, pixel_bytes=1000, live_spans=128, live_bytes=100_000_000)

    spec = OrderSpec(seed=0, live_spans=128, span_frames=found.span_frames)
    peak = plan_start(index, spec, world_size=1).peak_live_frames() * 1000
    assert found.span_frames != "episode"
    assert peak <= 100_000_000


def test_whole_numbers_of_any_type_are_stored_as_pythons_own():
    spec = OrderSpec(seed=np.int64(3), live_spans=np.int32(8), lanes=np.int16(4))

    assert json.loads(json.dumps([spec.seed, spec.live_spans, spec.lanes])) == [3, 8, 4]


@pytest.mark.parametrize(
    "options", [{"seed": "3"}, {"seed": 0.7}, {"seed": 0, "lanes": True}, {"seed": 0, "shuffle": "no"}]
)
def test_order_spec_refuses_other_types(options):
    with pytest.raises(ConfigError, match="got"):
        OrderSpec(**options)


def test_a_memory_budget_that_buys_nothing_says_what_it_takes():
    index = make_index([300] * 100)

    with pytest.raises(ConfigError, match="does not hold 10 live spans of 32 frames of 100 bytes, even without pixels"):
        budget(index, live_bytes=1000)


def test_a_memory_budget_never_counts_more_than_the_dataset():
    assert budget(make_index([10, 10]), live_bytes=20 * 10_100) == ("episode", False)
