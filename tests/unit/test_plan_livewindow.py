"""The live window against its definition in Python's own integers, at sizes where 64 bits could overflow."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.plan.lanes import Lane
from raypipe.plan.spans import Spans

MASK = 2**64 - 1


def make_lane(counts, live_spans, seed=0):
    counts = np.asarray(counts, dtype=np.int64)
    keys = np.random.default_rng(seed).integers(0, 2**64, len(counts), dtype=np.uint64)
    zeros = np.zeros(len(counts), dtype=np.int64)
    spans = Spans(
        row=np.arange(len(counts)),
        dataset=zeros.astype(np.int32),
        lap=zeros,
        episode=np.arange(len(counts)),
        start=zeros,
        stop=counts,
        key=keys,
        floor=zeros.astype(np.uint64),
        count=counts,
    )
    return Lane(spans=spans, live_spans=live_spans)


def mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def key_of(lane, span, nth):
    """Return the key of a frame by the formula in the module's docstring."""
    length, window = len(lane), min(lane.live_spans, len(lane))
    lo = 0 if span < window else span + 1 - (window + 1) // 2
    hi = length if span >= length - window else span + 1 + window // 2
    step = ((hi - lo) << 24) // int(lane.spans.count[span])
    span_key = int(lane.spans.key[span])
    jitter = (mix((span_key + nth * 0x9E3779B97F4A7C15) & MASK) >> 41) + (span_key >> 41)
    return (lo << 24) + nth * step + (jitter * step >> 24)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.sampled_from([1, 2, 3, 5, 8, 64]), st.integers(0, 9))
def test_frames_come_in_the_order_of_their_keys(counts, live_spans, seed):
    lane = make_lane(counts, live_spans, seed)

    run = lane.between(lane.counts(0), lane.counts(lane.num_frames))

    by_key = sorted((key_of(lane, span, nth), span, nth) for span, n in enumerate(counts) for nth in range(n))
    assert list(zip(run.span.tolist(), run.nth.tolist(), strict=True)) == [(span, nth) for _, span, nth in by_key]


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=30),
    st.sampled_from([1, 2, 3, 5, 8, 64]),
    st.integers(0, 9),
    st.sampled_from([0, 8, 1 << 12]),
    st.data(),
)
def test_counts_are_of_what_was_emitted_before_a_position(counts, live_spans, seed, most_to_sort, data):
    lane = make_lane(counts, live_spans, seed)
    whole = lane.between(lane.counts(0), lane.counts(lane.num_frames)).span
    position = data.draw(st.integers(0, lane.num_frames))

    with patch("raypipe.plan.lanes._FRAMES_TO_SORT", most_to_sort):
        found = lane.counts(position)

    assert found.tolist() == np.bincount(whole[:position], minlength=len(lane)).tolist()


@pytest.mark.parametrize(
    ("counts", "live_spans"),
    [
        # One frame each and a window of half of them: the life of a span times its jitter needs 65 bits in one piece.
        (np.ones(60_000), 40_000),
        # As long as a span may be, in the shortest life.
        (np.array([2**24, 1, 2**24]), 1),
        (np.array([1_000_000] * 5), 128),
        # A million spans: keys of 44 bits do not leave room to pack a chunk of that many frames.
        (np.ones(1_000_000), 2),
    ],
    ids=["wide", "long", "few", "many"],
)
def test_extreme_sizes_keep_the_order(counts, live_spans):
    lane = make_lane(counts, live_spans)
    positions = [0, 1, lane.num_frames // 3, lane.num_frames // 3 + 1000, lane.num_frames - 2]

    for position in positions:
        end = min(lane.num_frames, position + 300)
        run = lane.between(lane.counts(position), lane.counts(end))
        keys = [(key_of(lane, span, nth), span) for span, nth in zip(run.span.tolist(), run.nth.tolist(), strict=True)]
        assert len(keys) == end - position
        assert keys == sorted(keys)
        assert all(0 <= key < len(lane) << 24 for key, _ in keys)


def test_a_chunk_too_large_to_pack_sorts_the_same():
    lane = make_lane(np.ones(1 << 20), 2)

    run = lane.between(lane.counts(0), lane.counts(lane.num_frames))

    keys = [(key_of(lane, span, 0), span) for span in run.span[:: 1 << 10].tolist()]
    assert keys == sorted(keys)
    assert np.array_equal(np.sort(run.span), np.arange(1 << 20))


def test_a_lane_of_nothing_has_no_frames():
    lane = make_lane([], 4)

    assert lane.num_frames == 0
    assert len(lane.between(lane.counts(0), lane.counts(0)).order) == 0
    assert lane.tick_positions().tolist() == [0]
    assert lane.peak_live_frames() == 0
