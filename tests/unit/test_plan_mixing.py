"""Distinct episodes per batch beside a full shuffle, for small and large datasets, on one and on many lanes."""

import numpy as np
import pytest
from plan_cases import make_index, plan_start

from raypipe.plan import (
    BatchSpec,
    FrameSizes,
    OrderSpec,
    emitted_frames,
    expected_distinct,
    measure_mixing,
    mix_indexes,
    plan_epoch,
    plan_world,
    report_plan,
)
from raypipe.plan.members import report_members


def make_world(
    num_episodes, *, lanes=1, world_size=1, live_spans=128, lengths=(100, 501), batch_size=64, span_frames="episode"
):
    frames = np.random.default_rng(1).integers(*lengths, num_episodes)
    spec = OrderSpec(seed=3, lanes=lanes, live_spans=live_spans, span_frames=span_frames)
    plan = plan_epoch(make_index(frames), spec, epoch=0)
    return plan_world(plan, world_size=world_size, batch=BatchSpec(size=batch_size))


@pytest.mark.parametrize("num_episodes", [1_000, 50_000])
@pytest.mark.parametrize(("lanes", "world_size"), [(1, 1), (8, 8), (8, 2)], ids=["1 lane", "8 lanes", "4 lanes a rank"])
def test_a_window_of_two_batches_mixes_like_a_full_shuffle(num_episodes, lanes, world_size):
    mixing = measure_mixing(make_world(num_episodes, lanes=lanes, world_size=world_size))

    for batch in (mixing.local_batch, mixing.global_batch):
        assert batch.mean >= 0.97 * batch.full_shuffle
        assert batch.first >= 0.93 * batch.full_shuffle
        assert batch.last >= 0.93 * batch.full_shuffle


def test_batches_some_steps_apart_share_more_episodes_than_under_a_full_shuffle():
    mixing = measure_mixing(make_world(1_000))

    assert sorted(mixing.overlap) == [1, 10, 100]
    assert mixing.overlap_full_shuffle == pytest.approx(4.3, abs=0.2)
    # A window of 128 spans has half of them in any batch of 64.
    assert all(10 < shared < 45 for shared in mixing.overlap.values())
    # As the README says.
    assert mixing.overlap[10] == pytest.approx(36, abs=2)


def test_a_full_shuffle_is_what_shuffled_batches_have():
    world = make_world(60, lengths=(1, 40))
    episode = np.repeat(world.plan.index.episode, world.plan.index.length)
    generator = np.random.default_rng(0)

    drawn = [len(np.unique(generator.choice(episode, 64, replace=False))) for _ in range(400)]

    assert measure_mixing(world).local_batch.full_shuffle == pytest.approx(np.mean(drawn), rel=0.01)


def test_report_says_what_an_epoch_costs_and_gives():
    world = make_world(300, lanes=4, world_size=2)

    report = report_plan(world, FrameSizes(row_bytes=100, pixel_bytes=1000)).to_json()

    assert report["steps"] == world.num_steps
    assert report["frames"] == world.plan.index.num_frames
    assert report["spans"] == int(world.spans_per_rank.sum())
    assert report["fingerprint"] == world.plan.fingerprint
    assert report["live_bytes"] == report["live_frames"] * 1100
    assert 0 < report["first_batch_frames"] <= report["live_frames"] * 1.1
    assert report["resume_frames"] < report["live_frames"]
    assert sorted(report["distinct_episodes"]) == ["first", "last", "mean", "min"]
    assert report["distinct_episodes_full_shuffle"] > 50
    assert report["left_over"] == 0
    assert report["advice"] == ()


def test_report_advises_more_live_spans_where_the_mixing_is_poor():
    report = report_plan(make_world(1_000, live_spans=32), FrameSizes(row_bytes=1, pixel_bytes=0))

    assert "set live_spans to 128, twice the 64 frames" in report.advice[0]


def test_report_advises_shorter_spans_where_memory_is_large_and_decode_on_exit_where_that_is_not_enough():
    world = make_world(1_000)

    large = report_plan(world, FrameSizes(row_bytes=100, pixel_bytes=96 * 96 * 6)).advice
    huge = report_plan(world, FrameSizes(row_bytes=100, pixel_bytes=480 * 640 * 6)).advice

    assert "set span_frames to 256 for" in large[0]
    assert "decode when='exit'" in huge[0]


def test_report_advises_for_the_memory_that_is_given():
    world, sizes = make_world(1_000), FrameSizes(row_bytes=100, pixel_bytes=96 * 96 * 6)
    held = int(1.3 * report_plan(world, sizes).live_bytes)

    assert report_plan(world, sizes, live_bytes=held).advice == ()
    assert "set span_frames to 256 for" in report_plan(world, sizes, live_bytes=2 << 30).advice[0]
    assert "set span_frames to 128 for" in report_plan(world, sizes, live_bytes=1 << 30).advice[0]


def test_report_of_rows_alone_does_not_advise_to_hold_fewer_pixels():
    world = make_world(1_000)
    held = int(1.3 * report_plan(world, FrameSizes(row_bytes=100, pixel_bytes=0)).live_bytes)
    on_exit = FrameSizes(row_bytes=100, pixel_bytes=0, is_decode_on_exit=True)

    (a_little,) = report_plan(world, on_exit, live_bytes=held - 1).advice
    (shorter,) = report_plan(world, on_exit, live_bytes=held // 2).advice
    (fewer,) = report_plan(world, on_exit, live_bytes=held // 100).advice

    assert "of rows: lower live_spans from 128" in a_little
    assert "of rows: set span_frames to" in shorter
    assert "of rows: lower live_spans from 128" in fewer


def test_cutting_uneven_episodes_mixes_better():
    uneven = np.exp(np.random.default_rng(0).normal(5.3, 1.0, 600)).astype(np.int64) + 1

    def mean(span_frames):
        plan = plan_epoch(make_index(uneven), OrderSpec(seed=0, lanes=1, span_frames=span_frames), epoch=0)
        return measure_mixing(plan_world(plan, world_size=1, batch=BatchSpec(size=64))).local_batch.mean

    assert mean(64) > mean("episode") * 1.1


def test_report_of_an_epoch_of_one_short_batch():
    world = make_world(3, lengths=(2, 5))

    report = report_plan(world, FrameSizes(row_bytes=1, pixel_bytes=0))

    assert (report.steps, report.mixing.local_batch.min) == (1, 3)
    assert report.first_batch_frames == report.frames


def test_a_mixture_reports_what_every_dataset_gives_and_how_evenly():
    members = [make_index([40] * 30, name="long"), make_index([10] * 20, name="short", fingerprint="x")]
    index = mix_indexes(members, [600, 700])
    world = plan_start(index, OrderSpec(seed=0, live_spans=16), world_size=2, per_lane=8)

    long, short = report_members(world)
    steps = np.arange(world.num_steps + 1)
    emitted = emitted_frames(world, steps)

    assert (long.frames, long.epoch_frames, long.laps) == (1200, 600, 0.5)
    # 15 episodes, of which one is cut to make the lanes equal.
    assert long.spans in (15, 16)
    assert (short.frames, short.epoch_frames, short.laps) == (200, 700, 3.5)
    assert long.share + short.share == 1
    counted = [np.bincount(world.frames_at(step, rank).dataset, minlength=2) for step in (0, 1) for rank in (0, 1)]
    assert emitted[2].tolist() == sum(counted).tolist()
    worst = np.abs(emitted - emitted.sum(axis=1, keepdims=True) * np.array([long.share, short.share])).max(axis=0)
    assert 0 < long.deviation <= worst[0]
    assert 0 < short.deviation <= worst[1]


def test_a_dataset_alone_has_no_report_of_members():
    assert report_members(plan_start(make_index([40] * 30), OrderSpec(seed=0), world_size=2)) == ()


def test_a_batch_has_no_fewer_distinct_datasets_than_under_a_full_shuffle():
    members = [make_index([20] * 8, name=f"robot-{i}", fingerprint=str(i)) for i in range(40)]
    index = mix_indexes(members, [160] * 40)
    world = plan_start(index, OrderSpec(seed=0, live_spans=128), world_size=1, per_lane=64)

    found = measure_mixing(world).datasets

    # 40 robots of equal share: 40 * (1 - (39 / 40) ** 64) of them in 64 draws.
    assert found.full_shuffle == pytest.approx(40 * (1 - (39 / 40) ** 64), rel=0.01)
    assert found.full_shuffle <= found.mean <= 40


@pytest.mark.parametrize(
    ("lengths", "batch", "expected"),
    [((2, 2), 1, 1.0), ((2, 2), 2, 1 + 2 / 3), ((1, 3), 2, 1.5), ((5, 7, 9), 21, 3.0), ((4,), 3, 1.0)],
)
def test_full_shuffle_has_as_many_episodes_as_chance_gives(lengths, batch, expected):
    assert expected_distinct(np.array(lengths), batch) == pytest.approx(expected)
