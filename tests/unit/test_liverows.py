"""Rows in a pool whose places are used again, pixels in buffers that nobody else holds."""

import ctypes
import sys
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.decode.clips import BatchBuffers
from raypipe.feed import SpanBlock, SpanRequest
from raypipe.loader import at_hand as liverows
from raypipe.loader.at_hand import LiveRows, RowPool
from raypipe.plan import Batch


def rows_of(name, num_rows):
    """Columns whose every row says which span it is of and which row it is."""
    numbers = np.arange(num_rows)
    return {
        "state": np.stack([np.full(num_rows, name), numbers], axis=1).astype(np.float32),
        "index": 10_000 * name + numbers,
        "note": [f"{name}:{row}" for row in range(num_rows)],
    }


def assert_rows(taken, name, wanted):
    assert taken["state"].tolist() == [[name, row] for row in wanted]
    assert taken["index"].tolist() == [10_000 * name + row for row in wanted]
    assert taken["note"].tolist() == [f"{name}:{row}" for row in wanted]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 3)), min_size=1, max_size=20))
def test_row_pool_keeps_what_it_holds_while_others_come_and_go(history):
    pool, held = RowPool(), {}

    for name, (num_rows, num_freed) in enumerate(history):
        held[name] = pool.add(rows_of(name, num_rows), num_rows)
        for old in list(held)[:num_freed]:
            pool.free(held.pop(old))

    places = [place for taken in held.values() for place in taken.tolist()]
    assert len(set(places)) == len(places)
    for name, taken in held.items():
        order = np.arange(len(taken))[::-1]
        assert_rows(pool.take(taken[order]), name, order.tolist())


def test_size_of_a_row_pool_can_be_read_while_another_thread_adds_columns():
    pool = RowPool()
    pool.add(rows_of(0, 8), 8)

    class Meanwhile:
        @property
        def nbytes(self):
            pool.add({"later": np.zeros(4)}, 4)
            return 0

    pool._columns["now"] = Meanwhile()

    assert pool.num_bytes > 0
    assert "later" in pool._columns


def test_row_pool_uses_places_again_and_does_not_grow_for_it():
    pool = RowPool()
    first = pool.add(rows_of(0, 800), 800)
    size = pool.num_bytes
    pool.free(first)

    for name in range(1, 20):
        pool.free(pool.add(rows_of(name, 900), 900))

    assert pool.num_bytes == size


def test_row_pool_holds_a_span_larger_than_twice_itself():
    pool = RowPool()
    small = pool.add(rows_of(1, 10), 10)

    large = pool.add(rows_of(2, 9_000), 9_000)

    assert_rows(pool.take(small), 1, range(10))
    assert_rows(pool.take(large), 2, range(9_000))


def test_row_pool_keeps_lists_of_equal_length_as_lists():
    pool = RowPool()

    places = pool.add({"language": [["a", "b"], ["c", "d"]]}, 2)

    assert pool.take(places)["language"].tolist() == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array[1:, ..., 0],
        torch.from_numpy,
        lambda array: torch.from_numpy(array).permute(0, 3, 1, 2)[:, 0],
        lambda array: torch.from_numpy(array)[1].flatten()[3:4],
        lambda array: torch.from_numpy(array).numpy()[0],
        memoryview,
    ],
    ids=["array", "array view", "tensor", "permuted", "part of a tensor", "back to numpy", "memoryview"],
)
def test_buffer_that_a_user_still_holds_a_part_of_is_not_handed_out(hold):
    buffers = BatchBuffers()
    held = hold(buffers.take("top", (2, 4, 4, 3), np.uint8))

    other = buffers.take("top", (2, 4, 4, 3), np.uint8)

    assert not np.shares_memory(np.asarray(held), other)


def test_buffer_that_nobody_holds_is_handed_out_again():
    buffers = BatchBuffers()
    tensor = torch.from_numpy(buffers.take("top", (2, 4, 4, 3), np.uint8))
    address = tensor.data_ptr()
    del tensor

    again = buffers.take("top", (2, 4, 4, 3), np.uint8)

    assert again.ctypes.data == address


def test_a_third_buffer_is_made_only_where_two_are_held(monkeypatch):
    buffers = BatchBuffers()
    held = [buffers.take("top", (2, 3), np.uint8) for _ in range(2)]
    address = held[0].ctypes.data
    # The loop lets go of its first batch while the third is being put together.
    monkeypatch.setattr("time.sleep", lambda _: held.pop(0))

    third = buffers.take("top", (2, 3), np.uint8)

    assert third.ctypes.data == address
    # It waits for a batch, and holds two.
    buffers.is_asked = True
    assert buffers.take("top", (2, 3), np.uint8).ctypes.data not in (address, held[0].ctypes.data)


def test_a_third_buffer_goes_when_a_loop_holds_one_batch_at_a_time_again():
    buffers = BatchBuffers()
    buffers.is_asked = True
    held = [buffers.take("top", (2, 3), np.uint8) for _ in range(3)]
    memory = [weakref.ref(one.base) for one in held]

    # One is trained on, and of two that are free one is put together.
    del held[1:]
    held.append(buffers.take("top", (2, 3), np.uint8))

    assert [one() is not None for one in memory].count(True) == 2


def test_shorter_batches_use_the_buffers_of_longer_ones():
    buffers = BatchBuffers()
    longest = buffers.take("top", (8, 4, 3), np.uint8)
    address = longest.ctypes.data
    del longest

    for length in (5, 3, 8, 1):
        assert buffers.take("top", (length, 4, 3), np.uint8).shape == (length, 4, 3)
        assert buffers.take("top", (length, 4, 3), np.uint8).ctypes.data == address


def test_buffers_of_another_shape_or_dtype_are_others():
    buffers = BatchBuffers()
    buffers.take("top", (2, 3), np.uint8)

    assert buffers.take("top", (3, 2), np.uint8).shape == (3, 2)
    assert buffers.take("top", (2, 3), np.float32).dtype == np.float32


def block(arrival, frames):
    request = SpanRequest(epoch=0, dataset=0, lap=0, episode=arrival, start=0, stop=len(frames), lane=0, place=arrival)
    return SpanBlock(
        request=request,
        num_rows=len(frames),
        error=None,
        columns={"frame": np.array(frames), "span": np.full(len(frames), arrival)},
        stored_images={},
        num_requests=0,
        finished_at=0.0,
    )


def batch(spans, rows):
    return Batch(
        step=0,
        span=np.array(spans),
        row=np.array(rows),
        frame=np.array(rows),
        is_repeat=np.zeros(len(rows), dtype=np.bool_),
        num_needed=max(spans) + 1,
        done=np.array([], dtype=np.int64),
    )


def test_live_rows_gathers_rows_in_the_order_of_the_batch():
    rows = LiveRows()
    rows.admit(0, block(0, [10, 11, 12]))
    rows.admit(1, block(1, [20, 21]))

    taken = rows.take_rows(batch([1, 0, 0, 1], [1, 2, 0, 0]))

    assert taken["span"].tolist() == [1, 0, 0, 1]
    assert taken["frame"].tolist() == [21, 12, 10, 20]


def test_live_rows_lets_go_of_what_was_retired_and_minds_nothing_that_never_came():
    rows = LiveRows()
    rows.admit(0, block(0, [10, 11, 12]))
    before = rows.num_bytes
    rows.admit(1, block(1, [20, 21]))

    rows.retire([1, 7])

    assert (len(rows), rows.num_bytes, 1 in rows) == (1, before, False)
    with pytest.raises(KeyError):
        rows.take_rows(batch([1], [0]))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc from 2.33 tells of spare memory")
def test_memory_that_is_spare_is_given_back_and_little_is_kept(monkeypatch):
    # Pieces too small for the allocator to map each by itself, of which every second is let go: holes of 75 MB.
    pieces = [np.ones(100_000, dtype=np.uint8) for _ in range(1500)]
    del pieces[::2]
    before = liverows.spare_bytes(ctypes.CDLL(None))

    monkeypatch.setattr(liverows, "_SPARE_BYTES", sys.maxsize)
    kept = liverows.trim_memory()
    monkeypatch.setattr(liverows, "_SPARE_BYTES", -sys.maxsize)
    given = liverows.trim_memory()

    assert (kept, given) == (False, True)
    assert liverows.spare_bytes(ctypes.CDLL(None)) < before - 50_000_000
