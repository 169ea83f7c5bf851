"""What a wait is put down to, and the figures of a world of ranks."""

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.feed import STAGES, Interval, Live, LoaderStats, Meter, RecentStats, split_wait, sum_up
from raypipe.feed.metrics import RECENT_STEPS, share_wait

NOTHING = LoaderStats(**{field.name: 0 for field in fields(LoaderStats) if field.name != "recent"})

seconds = st.floats(0, 100)


@given(begin=seconds, waited=seconds, done=st.floats(-50, 250))
def test_a_wait_is_for_the_stage_until_it_is_done_and_then_for_the_way(begin, waited, done):
    stage, transport = split_wait("read", begin, begin + waited, done)

    assert (stage.begin, stage.end, transport.end) == (begin, transport.begin, begin + waited)
    assert stage.begin <= stage.end <= transport.end
    assert stage.end == pytest.approx(min(max(done, begin), begin + waited))


def test_a_wait_for_what_is_done_here_is_all_of_its_stage():
    stage, transport = split_wait("decode", 10.0, 20.0, math.inf)

    assert (stage.end - stage.begin, transport.end - transport.begin) == (10.0, 0.0)


def one_after_the_other(drawn):
    """What one thread did: its intervals do not overlap."""
    at, done = 0.0, []
    for stage, pause, seconds in drawn:
        done.append(Interval(stage, at + pause, at + pause + seconds))
        at = done[-1].end
    return done


intervals = st.lists(st.tuples(st.sampled_from(STAGES), st.floats(0, 100), st.floats(0, 20)), max_size=12).map(
    one_after_the_other
)


@given(intervals, st.floats(0, 300), st.floats(0, 300))
def test_every_second_of_a_wait_is_put_down_to_one_stage(done, begin, waited):
    parts = share_wait(begin, begin + waited, done, "assembly")

    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(waited, abs=1e-6)


def test_a_wait_that_begins_in_the_middle_of_a_stage_counts_from_there():
    done = [Interval("read", 0.0, 4.0), Interval("decode", 4.0, 9.0), Interval("assembly", 9.0, 10.0)]

    parts = share_wait(6.0, 11.0, done, "transport")

    assert parts == {"read": 0.0, "decode": 3.0, "transport": 1.0, "assembly": 1.0}


@pytest.mark.parametrize(
    ("figures", "stage"),
    [
        ({"wait_share": 0.5, "read_wait_s": 3.0, "decode_wait_s": 2.0}, "read"),
        ({"wait_share": 0.5, "decode_wait_s": 2.0, "assemble_s": 9.0}, "decode"),
        ({"wait_share": 0.5, "transport_wait_s": 2.0}, "transport"),
        ({"wait_share": 0.5, "assembly_wait_s": 1.0, "read_wait_s": 0.5}, "assembly"),
        ({"wait_share": 0.01, "read_wait_s": 3.0}, "nothing"),
    ],
)
def test_a_loop_waits_for_the_stage_that_is_late_most(figures, stage):
    assert replace(NOTHING, **figures).waits_for == stage


def test_the_worst_rank_is_the_one_that_waits_most():
    ranks = {
        0: replace(NOTHING, samples_per_s=100.0, wait_share=0.1, read_wait_s=1.0),
        1: replace(NOTHING, samples_per_s=90.0, wait_share=0.4, decode_wait_s=1.0),
        2: replace(NOTHING, samples_per_s=95.0, wait_share=0.4, transport_wait_s=1.0),
    }

    world = sum_up(ranks)

    assert (world.num_ranks, world.worst_rank, world.waits_for) == (3, 1, "decode")
    assert (world.samples_per_s, world.wait_share) == pytest.approx((285.0, 0.3))


def test_the_figures_of_a_world_may_be_of_the_last_steps():
    slow = RecentStats(steps=9, samples_per_s=10.0, wait_share=0.7, waits_for="assembly")
    ranks = {
        0: replace(NOTHING, samples_per_s=100.0, wait_share=0.9, read_wait_s=1.0),
        1: replace(NOTHING, samples_per_s=90.0, wait_share=0.1, decode_wait_s=1.0, recent=slow),
    }

    since, now = sum_up(ranks), sum_up(ranks, recent=True)

    assert (since.worst_rank, since.waits_for, since.samples_per_s) == (0, "read", 190.0)
    assert (now.worst_rank, now.waits_for, now.samples_per_s, now.worst_wait_share) == (1, "assembly", 10.0, 0.7)


def test_a_slow_start_leaves_the_recent_figures(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("raypipe.feed.metrics.time.perf_counter", lambda: clock[0])
    meter = Meter()
    meter.start_iteration()

    for number in range(RECENT_STEPS + 1):
        meter.ask()
        clock[0] += 0.25 if number else 1000.0
        meter.hand_over(8)
        # The training step.
        clock[0] += 0.75
        if not number:
            assert meter.read(Live()).recent.waits_for == "read"
    stats = meter.read(Live())

    assert stats.recent.steps == RECENT_STEPS
    assert (stats.recent.samples_per_s, stats.recent.wait_share) == pytest.approx((8.0, 0.25))
    assert stats.recent.waits_for == "assembly"
    assert (stats.wait_share, stats.waits_for) == (pytest.approx(1025 / 1100), "read")
    assert stats.to_dict()["recent"]["steps"] == RECENT_STEPS


def test_meter_counts_what_was_handed_over():
    meter = Meter()

    meter.start_iteration()
    for num_samples in (4, 3):
        meter.ask()
        meter.hand_over(num_samples)
    stats = meter.read(Live(decoded_frames=14))

    assert (stats.samples, stats.batches, stats.decoded_frames) == (7, 2, 14)
    waits = stats.read_wait_s + stats.decode_wait_s + stats.transport_wait_s + stats.assembly_wait_s
    assert waits == pytest.approx(stats.wait_s)
