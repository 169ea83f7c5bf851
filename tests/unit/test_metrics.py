"""What a wait is put down to, and the figures of a world of ranks."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.metrics import Live, LoaderStats, Meter, TaskTimes, split_wait, sum_up

NOTHING = LoaderStats(**{field.name: 0 for field in fields(LoaderStats)})

seconds = st.floats(0, 100)


@given(begin=seconds, waited=seconds, read_s=seconds, decode_s=seconds, finished_at=st.floats(-50, 250))
def test_parts_of_a_wait_are_never_negative_and_add_up_to_it(begin, waited, read_s, decode_s, finished_at):
    task = TaskTimes(read_s=read_s, decode_s=decode_s, finished_at=finished_at)

    parts = split_wait(begin, begin + waited, task)

    assert min(parts.read_s, parts.decode_s, parts.transport_s) >= -1e-9
    assert parts.read_s + parts.decode_s + parts.transport_s == pytest.approx(begin + waited - begin)


# A rank waits from 10 s to 20 s.
WAITS = {
    "done before: on its way": (TaskTimes(read_s=5, decode_s=5, finished_at=9), (0, 0, 10)),
    "decoded until the end": (TaskTimes(read_s=5, decode_s=30, finished_at=20), (0, 10, 0)),
    "read, decoded, sent": (TaskTimes(read_s=4, decode_s=3, finished_at=17), (4, 3, 3)),
    "rows alone": (TaskTimes(read_s=2, decode_s=0, finished_at=20), (10, 0, 0)),
    "no CPU was free for 6 s": (TaskTimes(read_s=1, decode_s=3, finished_at=20), (2.5, 7.5, 0)),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_put_down_to_what_was_going_on(name):
    task, expected = WAITS[name]

    parts = split_wait(10.0, 20.0, task)

    assert (parts.read_s, parts.decode_s, parts.transport_s) == pytest.approx(expected)


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


def test_meter_counts_what_was_handed_over():
    meter = Meter()

    meter.start_iteration()
    for num_samples in (4, 3):
        meter.ask()
        meter.hand_over(num_samples)
    meter.add(read_wait_s=0.5)
    stats = meter.read(Live(decoded_frames=14))

    assert (stats.samples, stats.batches, stats.read_wait_s, stats.decoded_frames) == (7, 2, 0.5, 14)
