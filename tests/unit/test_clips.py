"""The clip store: each clip decoded once, ahead of need, within its bound, and let go frame by frame."""

from concurrent.futures import Future
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import lengths, make_index, plan_start, specs, start_or_assume

from raypipe.decode.clips import ClipRequest, ClipStore, FramePool, OpenedClip
from raypipe.decode.executors import ThreadExecutor
from raypipe.errors import DatasetError, DownloadError
from raypipe.plan import DEFAULT_LIVE_BYTES, CameraCost, MemberCost, OrderSpec, clip_bound, resolve_live

FRAME_BYTES = 10


class Decoded(Future):
    """Frames that are there."""

    def drop(self, pool):
        pass


class Executor:
    """Decodes at once; counts what it was asked for."""

    def __init__(self, *, errors=(), is_shared=True):
        self.finished_at = 0.0
        self.is_shared = is_shared
        self.errors = dict(errors)
        self.asked = []
        self.num_flushed = 0

    def submit(self, request):
        self.asked.append((request.row, *request.frames.tolist()))
        future = Decoded()
        error = self.errors.get(request.row)
        if error is not None:
            future.set_exception(error)
        else:
            # One byte a frame that says which it is.
            future.set_result([np.array([frame], dtype=np.uint8) for frame in request.frames])
        return future

    def flush(self):
        self.num_flushed += 1


def opener(clip_frames, *, has_windows=False, num_frames=1 << 20):
    """Spans that begin at frame 0; windows show the frame before too."""

    def open_clip(key):
        span, clip = key
        own = np.arange(clip * clip_frames, min((clip + 1) * clip_frames, num_frames))
        shown = np.union1d(own, np.maximum(own - 1, 0)) if has_windows else own
        request = ClipRequest(dataset=0, row=span, camera="top", frames=shown, span=(0, 9), frame_bytes=FRAME_BYTES)
        return OpenedClip({"top": request}, len(own), has_windows)

    return open_clip


class StampDecoder:
    """Gives frames of one byte that say which they are; episode 13 is bad."""

    keeps_frames = False

    def read_clip(self, row, camera, frames, pool, *, span, stored):
        if row == 13:
            raise DatasetError("bad")
        return [pool.keep(frame) for frame in frames.astype(np.uint8).reshape(-1, 1, 1, 1)]


class SlabPool(FramePool):
    """Notes which slabs frames have come from."""

    def __init__(self):
        super().__init__()
        self.slabs = {}

    def take(self, shape, dtype):
        pixels = super().take(shape, dtype)
        self.slabs[id(pixels.base)] = pixels.base
        return pixels


def shown(store, key):
    return sorted(store.frames(key, "top"))


def test_a_clip_is_decoded_once_and_its_frames_go_one_by_one():
    executor = Executor()
    store = ClipStore(opener(3), executor, most_bytes=1000, pool=FramePool())

    store.ask([(0, 1), (0, 1)], is_next=False)
    in_flight = store.in_flight_bytes
    store.wait([(0, 1)])
    store.leave([((0, 1), 4)])

    assert (in_flight, store.in_flight_bytes, store.held_bytes) == (30, 0, 20)
    assert shown(store, (0, 1)) == [3, 5]
    store.ask([(0, 1)], is_next=True)
    store.leave([((0, 1), 3), ((0, 1), 5)])
    assert (store.num_bytes, executor.asked) == (0, [(0, 3, 4, 5)])


def test_memory_of_frames_that_have_left_is_used_for_the_next_ones():
    executor, pool = Executor(is_shared=False), FramePool()
    store, keys = ClipStore(opener(3), executor, 120, pool), [(0, number) for number in range(4)]
    store.ask(keys, is_next=True)
    store.wait(keys)
    left, stays = store.frames((0, 1), "top")[4], store.frames((0, 1), "top")[3]

    store.leave([((0, 1), 4), ((0, 2), 6), ((0, 2), 7)])

    assert (store.held_bytes, shown(store, (0, 1)), shown(store, (0, 2))) == (90, [3, 5], [8])
    taken = [pool.take((1,), np.uint8) for _ in range(4)]
    assert any(one is left for one in taken)
    assert not any(one is stays for one in taken)
    other = ClipStore(opener(3), executor, 120, pool)
    store.clear()
    # Twice, and beside a thread that still works with it: nothing is given back twice.
    store.clear()
    store.leave([((0, 1), 3), ((0, 1), 5)])
    assert store.num_bytes == 0
    again = [pool.take((1,), np.uint8) for _ in range(20)]
    assert any(one is stays for one in again)
    assert len({id(one) for one in again}) == 20
    # The last store leaves nothing behind.
    pool.give_back(again)
    other.clear()
    assert not any(pool.take((1,), np.uint8) is one for one in again for _ in range(20))


def test_frames_of_windows_stay_until_the_last_sample_has_left():
    store = ClipStore(opener(2, has_windows=True), Executor(), most_bytes=1000, pool=FramePool())
    store.ask([(0, 1)], is_next=True)
    store.wait([(0, 1)])

    store.leave([((0, 1), 2)])

    assert shown(store, (0, 1)) == [1, 2, 3]
    store.leave([((0, 1), 3)])
    assert store.num_bytes == 0


def test_nothing_is_decoded_ahead_beyond_the_bound_and_the_next_batch_always_is():
    executor = Executor()
    store = ClipStore(opener(2), executor, most_bytes=160, pool=FramePool())

    # A quarter may be in flight; of what does not fit the first part is asked for.
    assert not store.ask([(0, 0), (1, 0), (2, 0)], is_next=False)
    assert (store.peak_bytes, len(executor.asked)) == (40, 2)
    assert store.ask([(2, 0)], is_next=True)
    assert (store.peak_bytes, len(executor.asked)) == (60, 3)
    assert store.ask([(0, 0), (1, 0)], is_next=False)


def test_what_is_held_leaves_less_room_for_what_comes():
    executor = Executor()
    store, keys = ClipStore(opener(2), executor, most_bytes=160, pool=FramePool()), [(number, 0) for number in range(7)]
    store.ask(keys, is_next=True)
    store.wait(keys)

    assert not store.ask([(7, 0), (8, 0)], is_next=False)
    assert (store.num_bytes, len(executor.asked)) == (160, 8)


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "own"])
def test_frames_of_later_batches_make_room_for_the_next_one_and_are_decoded_again(is_shared):
    executor = Executor(is_shared=is_shared)
    store, begun = ClipStore(opener(3), executor, 120, FramePool()), [(number, 0) for number in range(4)]
    store.ask(begun, is_next=True)
    store.wait(begun)
    store.leave((key, 1) for key in begun)

    store.ask([(0, 0), (4, 0), (5, 0)], is_next=True)
    store.wait([(4, 0), (5, 0)])

    # The clip that began last goes; that of the batch stays, whatever it takes.
    assert (store.peak_bytes, store.num_bytes) == (120, 120)
    assert shown(store, (0, 0)) == [0, 2]
    store.leave([((4, 0), 0), ((4, 0), 1), ((4, 0), 2), ((3, 0), 0)])
    store.ask([(3, 0)], is_next=True)
    store.wait([(3, 0)])
    assert {frame: int(pixels[0]) for frame, pixels in store.frames((3, 0), "top").items()} == {0: 0, 2: 2}
    assert executor.asked[4:] == [(4, 0, 1, 2), (5, 0, 1, 2), (3, 0, 2)]
    store.leave([((3, 0), 0), ((3, 0), 2)])
    store.drop_spans([0, 1, 2, 5])
    assert store.num_bytes == 0


def test_room_is_made_by_clips_that_are_there_and_costs_what_is_left_of_them():
    executor = Executor()

    def open_clip(key):
        return opener(100 if key[0] == 9 else 10)(key)

    store, begun = ClipStore(open_clip, executor, 100, FramePool()), [(number, 0) for number in range(3)]
    # The large clip stays in flight.
    store.ask([*begun, (9, 0)], is_next=True)
    store.wait(begun)
    store.leave((key, frame) for key in begun for frame in range(8))

    store.ask([(3, 0)], is_next=True)
    store.ask(begun, is_next=True)

    # Some 70 bytes may be decoded again, less than a whole clip: two frames are left of each of the three, 60 bytes.
    assert executor.asked[5:] == [(0, 8, 9), (1, 8, 9), (2, 8, 9)]


def test_a_clip_that_made_room_and_whose_span_is_left_out_is_not_decoded_again():
    executor = Executor()
    store, begun = ClipStore(opener(2), executor, 40, FramePool()), [(0, 0), (1, 0)]
    store.ask(begun, is_next=True)
    store.wait(begun)
    store.ask([(2, 0)], is_next=True)

    store.drop_spans([1])
    store.ask([(1, 0)], is_next=True)

    # As a span that comes for the first time.
    assert executor.asked[-1] == (1, 0, 1)
    store.drop_spans([0, 1, 2])
    assert store.num_bytes == 0


def test_a_bound_that_is_always_too_small_does_not_decode_everything_twice():
    executor, num_spans = Executor(), 40
    store = ClipStore(opener(2), executor, 80, FramePool())
    keys = [(span, clip) for clip in range(8) for span in range(num_spans)]

    for half in (0, 1):
        for key in keys[half * num_spans : (half + 7) * num_spans]:
            store.ask([key], is_next=True)
            store.wait([key])
            store.leave([(key, 2 * key[1] + half)])

    num_asked = sum(len(frames) for _, *frames in executor.asked)
    assert num_asked * FRAME_BYTES <= 2 * len(keys) * FRAME_BYTES + 40 + num_asked * FRAME_BYTES // 64


def test_the_bound_of_two_640x480_cameras_holds_when_all_live_spans_begin_at_once():
    top = CameraCost(name="top", keyframe_interval=2, frame_bytes=640 * 480 * 3)
    member = MemberCost(row_bytes=1200, cameras=(top, replace(top, name="wrist")))
    index = make_index(np.random.default_rng(0).integers(100, 301, 400))
    budget = resolve_live(index, [member], batch=64)
    spec = OrderSpec(seed=0, live_spans=budget.live_spans, clip_frames=budget.clip_frames, lanes=1)
    plan = plan_start(index, spec, world_size=1, per_lane=64).rank(0)
    bound = clip_bound(DEFAULT_LIVE_BYTES, 64 * member.sample_bytes)

    def open_clip(key):
        own = np.arange(2 * key[1], min(2 * key[1] + 2, plan.queue.stop[key[0]]))
        request = ClipRequest(
            dataset=0, row=key[0], camera="top", frames=own, span=(0, 9), frame_bytes=member.sample_bytes
        )
        return OpenedClip({"top": request}, len(own), has_windows=False)

    executor = Executor(is_shared=False)
    store = ClipStore(open_clip, executor, bound, FramePool())
    num_frames = 0
    for batch in islice(plan.batches(), 40):
        keys = list(zip(batch.span.tolist(), (batch.frame // 2).tolist(), strict=True))
        store.ask(keys, is_next=True)
        store.wait(keys)
        store.leave(zip(keys, batch.frame.tolist(), strict=True))
        num_frames += len(keys)

    assert store.peak_bytes <= bound
    again = sum(len(frames) for _, *frames in executor.asked) - num_frames - store.num_bytes // member.sample_bytes
    assert 0 < again <= 100


def test_clips_of_spans_that_are_left_out_are_let_go_in_flight_or_held():
    store = ClipStore(opener(2), Executor(), most_bytes=1000, pool=FramePool())
    store.ask([(0, 0), (0, 3), (1, 0)], is_next=False)
    store.wait([(0, 0)])

    store.drop_spans([0, 5])

    assert store.num_bytes == 2 * FRAME_BYTES


def test_bad_data_is_the_error_of_its_clip_told_once():
    store = ClipStore(opener(2), Executor(errors={1: DatasetError("broken")}), most_bytes=1000, pool=FramePool())
    store.ask([(0, 0), (1, 0), (1, 1)], is_next=True)

    told = store.wait([(0, 0), (1, 0)])

    assert {key: str(error) for key, error in told.items()} == {(1, 0): "broken"}
    assert store.wait([(0, 0), (1, 0)]) == {}
    assert store.held_bytes == 2 * FRAME_BYTES


def test_threads_decode_several_clips_to_a_job_and_a_bad_one_spares_the_others():
    executor = ThreadExecutor(lambda: [StampDecoder()], num_threads=2, pool=FramePool())

    clips = [executor.submit(opener(2)((row, 1)).requests["top"]) for row in range(16)]
    executor.flush()

    with pytest.raises(DatasetError, match="bad"):
        clips.pop(13).result()
    assert [np.concatenate(clip.result()).ravel().tolist() for clip in clips] == [[2, 3]] * 15
    assert len({id(clip.job) for clip in clips}) == 4
    executor.close()


def bad_beside_good(bad):
    """Clips of two cameras, of which one is bad."""

    def open_clip(key):
        good = opener(3)(key).requests["top"]
        requests = {one: replace(good, row=13 if one == bad else 0, camera=one) for one in ("top", "wrist")}
        return OpenedClip(requests, 3, has_windows=False)

    return open_clip


@pytest.mark.parametrize("bad", ["top", "wrist"])
def test_memory_of_the_good_camera_of_bad_clips_is_used_again(bad):
    pool = SlabPool()
    executor = ThreadExecutor(lambda: [StampDecoder()], num_threads=1, pool=pool)
    store = ClipStore(bad_beside_good(bad), executor, 10_000, pool)

    for span in range(1000):
        store.ask([(span, 0)], is_next=True)
        assert list(store.wait([(span, 0)])) == [(span, 0)]
        assert store.num_bytes == 0
        store.leave([((span, 0), frame) for frame in range(3)])

    # 3,000 frames were decoded, and a slab holds 1,024.
    assert len(pool.slabs) == 1
    executor.close()


@pytest.mark.parametrize("bad", ["top", "neither"])
def test_memory_of_clips_that_are_dropped_in_flight_is_used_again(bad, caplog):
    pool = SlabPool()
    executor = ThreadExecutor(lambda: [StampDecoder()], num_threads=1, pool=pool)
    store = ClipStore(bad_beside_good(bad), executor, 10_000, pool)

    for span in range(0, 2000, 2):
        store.ask([(span, 0)], is_next=True)
        store.drop_spans([span])
        assert store.num_bytes == 0
        # What is asked later is decoded later.
        store.ask([(span + 1, 0)], is_next=True)
        store.wait([(span + 1, 0)])
        store.drop_spans([span + 1])

    assert len(pool.slabs) == 1
    # What a thread meets in clips that nobody waits for is nobody's concern.
    assert caplog.records == []
    executor.close()


def test_frames_that_come_after_the_last_store_has_left_are_not_kept():
    pool = FramePool()
    pool.enter()
    late = pool.take((4,), np.uint8)

    pool.leave()
    pool.give_back([late])

    assert pool.take((4,), np.uint8) is not late


def test_a_pool_without_a_store_takes_memory_for_one_frame_at_a_time():
    pool = FramePool()
    alone = pool.take((4,), np.uint8)
    pool.enter()
    first, second = pool.take((4,), np.uint8), pool.take((4,), np.uint8)

    assert alone.base.nbytes == 4
    assert first.base is second.base


def test_storage_that_does_not_answer_is_no_bad_data():
    store = ClipStore(opener(2), Executor(errors={0: DownloadError("no answer")}), most_bytes=1000, pool=FramePool())
    store.ask([(0, 0)], is_next=True)

    with pytest.raises(DownloadError, match="no answer"):
        store.wait([(0, 0)])


def test_frames_that_stay_are_copied_when_the_first_of_them_has_left_and_their_memory_is_used_again():
    store = ClipStore(opener(3), Executor(), most_bytes=1000, pool=FramePool())
    store.ask([(0, 0), (1, 1)], is_next=True)
    store.wait([(0, 0), (1, 1)])
    decoded = dict(store.frames((0, 0), "top"))

    store.leave([((0, 0), 1)])
    kept = dict(store.frames((0, 0), "top"))
    store.leave([((0, 0), 0), ((0, 0), 2), ((1, 1), 4)])
    again = dict(store.frames((1, 1), "top"))

    assert sorted(kept) == [0, 2]
    assert all(kept[frame] is not decoded[frame] for frame in kept)
    assert {frame: int(pixels[0]) for frame, pixels in again.items()} == {3: 3, 5: 5}
    assert {id(pixels) for pixels in again.values()} == {id(pixels) for pixels in kept.values()}


@settings(max_examples=30, deadline=None)
@given(lengths, specs, st.integers(1, 6), st.integers(1, 5), st.integers(0, 4), st.integers(0, 2000), st.booleans())
def test_any_order_has_every_frame_when_it_leaves_and_decodes_each_once(
    frames, spec, clip_frames, per_lane, ahead, most_bytes, is_shared
):
    world = start_or_assume(make_index(frames), spec, world_size=1, per_lane=per_lane)
    plan, executor = world.rank(0), Executor(is_shared=is_shared)
    sent = {arrival: plan.frames_of(arrival) for arrival in range(len(plan.queue))}

    def open_clip(key):
        own = sent[key[0]][sent[key[0]] // clip_frames == key[1]]
        request = ClipRequest(dataset=0, row=key[0], camera="top", frames=own, span=(0, 9), frame_bytes=FRAME_BYTES)
        # What the tail repeats may have left before: frames stay as long as their clip does.
        return OpenedClip({"top": request}, len(own), plan.steps.num_repeats > 0)

    store, batches = ClipStore(open_clip, executor, most_bytes, FramePool()), list(plan.batches())
    for number, batch in enumerate(batches):
        for later in batches[number : number + ahead + 1]:
            keys = list(zip(later.span.tolist(), (later.frame // clip_frames).tolist(), strict=True))
            before = store.num_bytes
            is_done = store.ask(keys, is_next=later is batch)
            if later is not batch:
                assert store.num_bytes <= max(most_bytes, before)
            if not is_done:
                break
        keys = list(zip(batch.span.tolist(), (batch.frame // clip_frames).tolist(), strict=True))
        assert store.wait(keys) == {}
        for key, frame in zip(keys, batch.frame.tolist(), strict=True):
            assert store.frames(key, "top")[frame] == frame % 256
        store.leave(
            (key, frame)
            for key, frame, is_repeat in zip(keys, batch.frame.tolist(), batch.is_repeat.tolist(), strict=True)
            if not is_repeat
        )
        store.drop_spans(batch.done.tolist())
        assert (store.held_bytes >= 0, store.in_flight_bytes >= 0) == (True, True)

    assert store.num_bytes == 0
    num_asked = sum(len(frames) for _, *frames in executor.asked)
    if spec.tail != "wrap":
        num_again = num_asked - sum(map(len, sent.values()))
        assert num_again * FRAME_BYTES <= most_bytes // 2 + num_asked * FRAME_BYTES // 64


def test_the_frames_at_hand_are_at_most_what_is_left_of_one_clip_of_every_live_span():
    spec = OrderSpec(seed=0, live_spans=20, clip_frames=4, lanes=1)
    world = plan_start(make_index([40] * 50), spec, world_size=1, per_lane=8)
    plan, store = world.rank(0), ClipStore(opener(4, num_frames=40), Executor(), most_bytes=0, pool=FramePool())

    for batch in plan.batches():
        keys = list(zip(batch.span.tolist(), (batch.frame // 4).tolist(), strict=True))
        store.ask(keys, is_next=True)
        store.wait(keys)
        store.leave(zip(keys, batch.frame.tolist(), strict=True))
        assert store.held_bytes <= 20 * 3 * FRAME_BYTES
