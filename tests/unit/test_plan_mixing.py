"""Distinct episodes and near repeats beside a full shuffle, for small and large datasets, on one and on many lanes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_cases import make_index, mixtures, plan_start, specs, start_or_assume

from raypipe.errors import ConfigError
from raypipe.plan import (
    BatchSpec,
    CameraCost,
    MemberCost,
    OrderSpec,
    emitted_frames,
    expected_distinct,
    measure_mixing,
    mix_indexes,
    plan_epoch,
    plan_world,
    report_plan,
    resolve_live,
)
from raypipe.plan.report import report_members

SIZES = [MemberCost(row_bytes=100, cameras=(CameraCost(name="top", keyframe_interval=2, frame_bytes=1000),))]


def make_world(num_episodes, *, lanes=1, world_size=1, lengths=(100, 501), batch_size=64, **order):
    frames = np.random.default_rng(1).integers(*lengths, num_episodes)
    spec = OrderSpec(**{"seed": 3, "lanes": lanes, "live_spans": 128, **order})
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


def test_window_of_two_640x480_cameras_mixes_as_the_readme_says():
    camera = CameraCost(name="top", keyframe_interval=2, frame_bytes=640 * 480 * 3)
    member = MemberCost(row_bytes=200, cameras=(camera, replace(camera, name="wrist")))
    chosen = resolve_live(make_world(1_000).plan.index, [member], batch=64)

    mixing = measure_mixing(make_world(1_000, live_spans=chosen.live_spans, clip_frames=chosen.clip_frames))

    assert mixing.local_batch.mean >= mixing.local_batch.full_shuffle
    assert mixing.overlap[10] == pytest.approx(11, abs=1)
    assert mixing.overlap_full_shuffle == pytest.approx(4.3, abs=0.2)


def test_a_full_shuffle_is_what_shuffled_batches_have():
    world = make_world(60, lengths=(1, 40))
    episode = np.repeat(world.plan.index.episode, world.plan.index.length)
    generator = np.random.default_rng(0)

    drawn = [len(np.unique(generator.choice(episode, 64, replace=False))) for _ in range(400)]

    assert measure_mixing(world).local_batch.full_shuffle == pytest.approx(np.mean(drawn), rel=0.01)


def count_near_repeats(batches, near_frames, num_batches):
    """Return the share of frames, of the batches that have so many after them, with a near one in these."""
    found = [
        any(
            other[:2] == (dataset, episode) and abs(other[2] - frame) <= near_frames[dataset]
            for later in batches[number + 1 : number + 1 + num_batches]
            for other in later
        )
        for number, batch in enumerate(batches[: len(batches) - num_batches])
        for dataset, episode, frame in batch
    ]
    return np.mean(found)


def batches_of(world):
    found = [world.frames_at(step, 0) for step in range(world.steps.num_full)]
    return [list(zip(one.dataset.tolist(), one.episode.tolist(), one.frame.tolist(), strict=True)) for one in found]


@settings(max_examples=20)
@given(mixtures(most_frames=100), specs, st.sampled_from([1, 2]), st.integers(1, 4), st.data())
def test_near_repeats_are_those_that_the_batches_have(index, spec, world_size, per_lane, data):
    assume(spec.lanes == "world_size" or spec.lanes % world_size == 0)
    world = start_or_assume(index, spec, world_size=world_size, per_lane=per_lane)
    # So few batches are all looked at.
    assume(1 < world.steps.num_full <= 60)
    near_frames = [data.draw(st.integers(0, 6)) for _ in index.dataset_names]

    near = measure_mixing(world, near_frames=near_frames).near_repeats

    assert near.num_batches == min(16, world.steps.num_full - 1)
    assert near.share == pytest.approx(count_near_repeats(batches_of(world), near_frames, near.num_batches))


def test_near_repeats_of_a_full_shuffle_are_what_shuffled_frames_have():
    # Episodes of two datasets, of which one gives two and a half laps; half a second has 3 and 8 frames.
    near_frames = (3, 8)
    members = [make_index([9, 60, 25, 140] * 8, name="one"), make_index([5, 30, 12] * 3, name="other", fingerprint="x")]
    index = mix_indexes(members, [1872, 352])
    world = plan_start(index, OrderSpec(seed=0, live_spans=16, lanes=1), world_size=1, per_lane=8)
    spans = world.plan.queues.spans
    frames = [
        (dataset, episode, frame)
        for dataset, episode, start, stop in zip(spans.dataset, spans.episode, spans.start, spans.stop, strict=True)
        for frame in range(start, stop)
    ]
    generator = np.random.default_rng(0)

    shares = []
    for _ in range(20):
        shuffled = [frames[place] for place in generator.permutation(len(frames)).tolist()]
        batches = [shuffled[first : first + 8] for first in range(0, 40 * 8, 8)]
        shares.append(count_near_repeats(batches, near_frames, 16))

    expected = measure_mixing(world, near_frames=near_frames).near_repeats.full_shuffle
    error = np.std(shares, ddof=1) / np.sqrt(len(shares))
    assert error < 0.02 * expected
    assert expected == pytest.approx(np.mean(shares), abs=3 * error)


def test_near_repeats_of_a_large_full_shuffle_are_those_of_its_lengths():
    # More than a million frames, of which a part is looked at; 16 batches draw 1,024 of the others.
    world = make_world(4_000, lengths=(300, 301))

    near = measure_mixing(world, near_frames=[5]).near_repeats

    edges = [min(frame, 5) + min(299 - frame, 5) for frame in range(300)]
    assert near.full_shuffle == pytest.approx(np.mean([1 - (1 - 1024 / 1_200_000) ** n for n in edges]), rel=0.001)


@pytest.mark.parametrize(("lanes", "world_size"), [(1, 1), (8, 8), (4, 2)])
def test_clips_have_more_near_repeats_than_whole_spans(lanes, world_size):
    def share(clip_frames):
        world = make_world(1_000, lanes=lanes, world_size=world_size, clip_frames=clip_frames)
        return measure_mixing(world, near_frames=[5]).near_repeats.share

    whole, single, pair, eight = (share(clip_frames) for clip_frames in ("span", 1, 2, 8))

    assert single == pytest.approx(whole, abs=0.05)
    # Of a pair the first has its other frame a few batches later: half of the frames.
    assert pair > whole + 0.25
    assert eight > pair + 0.25


def test_more_live_spans_have_fewer_near_repeats():
    worlds = [make_world(1_000, live_spans=live_spans, clip_frames=2) for live_spans in (128, 1_000)]

    few, many = (measure_mixing(world, near_frames=[5]).near_repeats.share for world in worlds)

    assert many < 0.75 * few


def test_episodes_of_one_frame_have_no_near_repeats():
    near = measure_mixing(make_world(3_000, lengths=(1, 2), clip_frames=2), near_frames=[15]).near_repeats

    assert (near.share, near.full_shuffle, near.num_batches) == (0.0, 0.0, 16)


def test_an_epoch_of_one_batch_has_no_next_one_to_repeat_in():
    near = measure_mixing(make_world(3, lengths=(2, 5)), near_frames=[15]).near_repeats

    assert (near.share, near.full_shuffle, near.num_batches) == (0.0, 0.0, 0)


def test_near_repeats_want_a_frame_rate_of_every_dataset():
    world = make_world(100)

    assert measure_mixing(world).near_repeats is None
    with pytest.raises(ConfigError, match=r"near_frames=\(5, 8\) must have a number for the dataset"):
        measure_mixing(world, near_frames=(5, 8))


def test_report_says_what_an_epoch_costs_and_gives():
    world = make_world(300, lanes=4, world_size=2)

    report = report_plan(world, SIZES, near_frames=[5]).to_json()

    assert report["steps"] == world.num_steps
    assert report["frames"] == world.plan.index.num_frames
    assert report["spans"] == int(world.spans_per_rank.sum())
    assert report["fingerprint"] == world.plan.fingerprint
    assert report["live_bytes"] == report["live_frames"] * 100 + report["live_pixel_bytes"]
    assert report["live_pixel_bytes"] > 0
    assert 0 < report["first_batch_frames"] < report["live_frames"]
    assert 0 < report["resume_frames"] < report["live_frames"]
    assert sorted(report["distinct_episodes"]) == ["first", "last", "mean", "min"]
    assert report["distinct_episodes_full_shuffle"] > 50
    assert 0 < report["near_repeats_full_shuffle"] < report["near_repeats"] < 1
    assert report["clip_frames"] == "span"
    assert report["left_over"] == 0
    assert report["advice"] == ()


def test_report_advises_more_live_spans_where_the_mixing_is_poor():
    report = report_plan(make_world(1_000, live_spans=32), [MemberCost(row_bytes=1)])

    assert "set live_spans to 128, twice the 64 frames" in report.advice[0]


def test_report_advises_where_decoding_is_dear_and_says_what_would_help():
    far = CameraCost(name="top", keyframe_interval=250, frame_bytes=900_000)

    (advice,) = report_plan(make_world(1_000), [MemberCost(row_bytes=100, cameras=(far,))]).advice

    assert "live_bytes=" in advice
    assert "reshard ROOT TARGET --gop 2" in advice
    assert "a keyframe every 250 frames" in advice


def test_cutting_uneven_episodes_mixes_better():
    uneven = np.exp(np.random.default_rng(0).normal(5.3, 1.0, 600)).astype(np.int64) + 1

    def mean(span_frames):
        plan = plan_epoch(make_index(uneven), OrderSpec(seed=0, lanes=1, span_frames=span_frames), epoch=0)
        return measure_mixing(plan_world(plan, world_size=1, batch=BatchSpec(size=64))).local_batch.mean

    assert mean(64) > mean("episode") * 1.1


def test_report_of_an_epoch_of_one_short_batch():
    world = make_world(3, lengths=(2, 5))

    report = report_plan(world, [MemberCost(row_bytes=1)])

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
