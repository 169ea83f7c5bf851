"""`RankLoader` without Ray: its batches, its order, its state, and what it does when asked for odd things."""

import json
import pickle
import re
import threading
import time
from itertools import islice

import pytest
import torch
from batches import (
    TOP,
    WRIST,
    assert_equals_samples,
    frames_of,
    frames_of_all,
    frames_of_dataset,
    local_loader,
    planned_epoch,
    rows_spec,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import specs

from raypipe.dataset import open_dataset
from raypipe.errors import ConfigError, ResumeError
from raypipe.pipeline import Pipeline
from raypipe.plan import clip_bound
from raypipe.testing import CameraSpec, SynthSpec, assert_resumes_exactly, write_dataset

ORDER = {"live_spans": 3}


def rows_pipeline(rows, **parts):
    order = {**ORDER, **parts.pop("order", {})}
    return Pipeline(rows, **{"batch_size": 4, "seed": 1, "order": order, **parts})


class OneEpoch:
    """A loader as an iterator that ends with its epoch: the loader itself goes on with the next."""

    def __init__(self, loader):
        self._loader = loader

    def __iter__(self):
        return iter(self._loader) if self._loader.epoch == 0 else iter(())

    def state_dict(self):
        return self._loader.state_dict()

    def load_state_dict(self, state):
        self._loader.load_state_dict(state)


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
def test_loader_gives_the_values_of_samples_in_the_planned_order(varied, version):
    dataset = varied[version]
    pipe = Pipeline(dataset, batch_size=5, seed=3, order=ORDER)

    batches = list(local_loader(pipe))

    assert [frames_of(batch) for batch in batches] == planned_epoch(pipe.plan(), 0)
    assert sorted(frames_of_all(batches)) == frames_of_dataset(dataset)
    for batch in batches:
        assert_equals_samples(batch, dataset)


@pytest.mark.parametrize(("spans_per_block", "span_frames"), [(1, 4), (3, "episode"), (4, 2)])
def test_loader_gives_the_same_values_for_spans_cut_and_packed(varied, spans_per_block, span_frames):
    dataset = varied["v3.0"]
    order = {**ORDER, "span_frames": span_frames}
    pipe = Pipeline(dataset, batch_size=5, seed=3, order=order, feed={"spans_per_block": spans_per_block})

    ranks = [list(local_loader(pipe, rank, 2)) for rank in range(2)]

    world = pipe.plan(world_size=2)
    for rank, batches in enumerate(ranks):
        assert [frames_of(batch) for batch in batches] == planned_epoch(world, rank)
        for batch in batches:
            assert_equals_samples(batch, dataset)


def test_loader_resumed_in_the_middle_gives_the_values_of_samples(varied):
    dataset = varied["v2.1"]
    pipe = Pipeline(dataset, batch_size=5, seed=3, order=ORDER)
    resumed = local_loader(pipe)

    resumed.load_state_dict(pipe.state_at(6))
    rest = list(resumed)

    assert [frames_of(batch) for batch in rest] == planned_epoch(pipe.plan(), 0)[6:]
    for batch in rest:
        assert_equals_samples(batch, dataset)


def test_loader_without_shuffle_reads_the_file_in_order(rows):
    pipe = rows_pipeline(rows, order={"shuffle": False})

    batches = list(local_loader(pipe))

    assert frames_of_all(batches) == frames_of_dataset(rows)


def test_loader_gives_depth_images_as_the_reference_path_does(tmp_path):
    cameras = (CameraSpec(name=TOP, kind="depth-image"), CameraSpec(name=WRIST))
    root = write_dataset(tmp_path / "dataset", SynthSpec(lengths=(5, 3, 6), cameras=cameras))
    dataset = open_dataset(str(root)).windowed(offsets={TOP: [-1, 0]})
    pipe = Pipeline(dataset, batch_size=4, seed=3, order=ORDER)

    batches = list(local_loader(pipe))

    assert batches[0][TOP].dtype == torch.float32
    for batch in batches:
        assert_equals_samples(batch, dataset)


@pytest.mark.parametrize("clip_frames", [1, 2, 3, 8, "span"])
def test_values_do_not_depend_on_the_length_of_clips(varied, clip_frames):
    order = {**ORDER, "clip_frames": clip_frames}
    pipe = Pipeline(varied["v3.0"], batch_size=5, seed=3, order=order)

    batches = list(local_loader(pipe))

    assert sorted(frames_of_all(batches)) == frames_of_dataset(varied["v3.0"])
    for batch in batches:
        assert_equals_samples(batch, varied["v3.0"])


def test_loader_gives_every_frame_of_a_selection_and_no_other(rows):
    pipe = rows_pipeline(rows, selection={"exclude": (2, 6)})

    batches = list(local_loader(pipe))

    assert sorted(frames_of_all(batches)) == [frame for frame in frames_of_dataset(rows) if frame[0] not in (2, 6)]


@settings(max_examples=25)
@given(specs, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]), st.data())
def test_any_order_comes_as_planned_also_after_a_resume(rows, spec, world_size, spans_per_block, data):
    feed = {"spans_per_block": spans_per_block}
    lanes = spec.lanes if isinstance(spec.lanes, int) and spec.lanes % world_size == 0 else world_size
    pipe = Pipeline(rows, batch_size={"size": 3 * lanes, "scope": "global"}, seed=0, order=spec, feed=feed)
    world = pipe.plan(world_size=world_size)
    stop = data.draw(st.integers(0, world.num_steps - 1))

    for rank in range(world_size):
        stopped = local_loader(pipe, rank, world_size)
        came = [frames_of(batch) for batch in islice(stopped, stop)]
        resumed = local_loader(pipe, rank, world_size)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        came += [frames_of(batch) for batch in resumed]

        assert came == planned_epoch(world, rank)


def test_loader_gives_float_cameras_as_the_reference_path_does(tiny_dataset):
    dataset = open_dataset(str(tiny_dataset), camera_dtype="float32")
    pipe = Pipeline(dataset, batch_size=7, seed=0, decode={"camera_dtype": "float32"})

    batch = next(iter(local_loader(pipe)))

    assert_equals_samples(batch, dataset)


def test_loader_gives_the_camera_dtype_that_its_dataset_was_opened_with(tiny_dataset):
    dataset = open_dataset(str(tiny_dataset), camera_dtype="float32")
    pipe = Pipeline(dataset, batch_size=7, seed=0)

    batch = next(iter(local_loader(pipe)))

    assert_equals_samples(batch, dataset)


def test_loader_gives_an_empty_text_as_the_reference_path_does(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    spec = rows_spec(lengths=(4, 4, 4, 4, 4, 4))
    root = write_dataset(tmp_path / "dataset", type(spec)(**{**fields(spec), "extra_features": ("note",)}))
    for path in sorted((root / "data").rglob("*.parquet")):
        table = pq.read_table(path)
        odd = [number % 2 for number in table.column("episode_index").to_pylist()]
        notes = [None if is_odd else note for is_odd, note in zip(odd, table.column("note").to_pylist(), strict=True)]
        place = table.column_names.index("note")
        pq.write_table(table.set_column(place, "note", pa.array(notes, pa.string())), path, row_group_size=4)
    dataset = open_dataset(str(root))
    pipe = Pipeline(dataset, batch_size=2, seed=0, order={"live_spans": 2})

    batches = list(local_loader(pipe))

    for batch in batches:
        assert_equals_samples(batch, dataset)


def fields(spec):
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def test_augment_seeds_are_the_same_on_any_number_of_ranks_and_differ_between_epochs(rows):
    pipe = rows_pipeline(rows)

    alone = seeds_by_frame(local_loader(pipe))
    shared = seeds_by_frame(local_loader(pipe, 0, 2)) | seeds_by_frame(local_loader(pipe, 1, 2))
    later = local_loader(pipe)
    later.set_epoch(1)

    assert alone == shared
    assert len(set(alone.values())) == len(alone)
    assert not set(alone.values()) & set(seeds_by_frame(later).values())


def seeds_by_frame(loader):
    return {
        frame: seed
        for batch in loader
        for frame, seed in zip(frames_of(batch), batch["augment_seed"].tolist(), strict=True)
    }


def test_transform_gets_the_batch_and_its_augment_seeds(rows):
    def double(batch, seeds):
        assert torch.equal(seeds, batch["augment_seed"])
        return {**batch, "action": 2 * batch["action"]}

    pipe = rows_pipeline(rows)

    plain = list(local_loader(pipe))
    changed = list(local_loader(pipe, transform=double))

    for before, after in zip(plain, changed, strict=True):
        assert torch.equal(after["action"], 2 * before["action"])


def test_error_of_a_transform_reaches_the_training_loop(rows):
    def fail(batch, seeds):
        raise ZeroDivisionError("in the user's code")

    loader = local_loader(rows_pipeline(rows), transform=fail)

    with pytest.raises(ZeroDivisionError, match="in the user's code"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("tail", "shuffle", "rank", "world_size"),
    [
        ("short", True, 0, 1),
        ("short", False, 1, 2),
        ("drop", True, 1, 2),
        ("drop", False, 0, 1),
        ("wrap", True, 0, 2),
        ("wrap", False, 0, 1),
    ],
)
def test_loader_resumes_exactly_after_every_batch(rows, tail, shuffle, rank, world_size):
    pipe = rows_pipeline(rows, batch_size=6, order={"tail": tail, "shuffle": shuffle})

    assert_resumes_exactly(lambda: OneEpoch(local_loader(pipe, rank, world_size)))


def test_loader_resumes_exactly_with_several_lanes_and_packed_blocks(rows):
    pipe = rows_pipeline(rows, order={"lanes": 4, "span_frames": 5}, feed={"spans_per_block": 3})

    assert_resumes_exactly(lambda: OneEpoch(local_loader(pipe, 1, 2)))


def test_state_counts_what_was_handed_over_and_not_what_was_prefetched(rows):
    pipe = rows_pipeline(rows)
    loader = local_loader(pipe, prefetch_batches=8)

    states = [loader.state_dict()]
    for _ in loader:
        states.append(loader.state_dict())

    assert states == [pipe.state_at(step) for step in range(len(states))]
    assert (states[-1]["epoch"], states[-1]["legs"]) == (1, [])


@pytest.mark.parametrize("tail", ["short", "drop", "wrap"])
def test_every_tail_emits_what_it_says(rows, tail):
    pipe = rows_pipeline(rows, batch_size=4, order={"tail": tail, "lanes": 2})
    world = pipe.plan(world_size=2)

    ranks = [list(local_loader(pipe, rank, 2)) for rank in range(2)]

    left = set(zip(world.left_over().episode.tolist(), world.left_over().frame.tolist(), strict=True))
    repeated = [repeats(batch) for batches in ranks for batch in batches]
    emitted = frames_of_all(ranks[0] + ranks[1])
    sizes = [[len(batch["index"]) for batch in batches] for batches in ranks]
    # 57 frames: lanes of 29 and 28, hence 7 full steps and an extra.
    assert (
        sizes
        == {
            "short": [[4] * 6 + [2, 3], [4] * 6 + [2, 2]],
            "drop": [[4] * 7, [4] * 7],
            "wrap": [[4] * 8, [4] * 8],
        }[tail]
    )
    assert len(left) == (1 if tail == "drop" else 0)
    assert sum(map(sum, repeated)) == (7 if tail == "wrap" else 0)
    assert sorted({*emitted, *left}) == frames_of_dataset(rows)
    assert len(emitted) == 57 - len(left) + sum(map(sum, repeated))


def repeats(batch):
    return batch["is_repeat"].tolist() if "is_repeat" in batch else []


def test_steps_left_count_down_and_start_again_with_the_next_epoch(rows):
    loader = local_loader(rows_pipeline(rows))

    left = [loader.steps_left]
    for _ in loader:
        left.append(loader.steps_left)
        assert len(loader) == 15

    assert left == [*range(15, 0, -1), 15]


@pytest.mark.parametrize("tail", ["short", "drop", "wrap"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_len_is_of_the_whole_epoch_after_a_resume_too(rows, tail, num_ranks):
    pipe = rows_pipeline(rows, order={"tail": tail, "live_spans": 3})
    whole, loader = pipe.plan(world_size=num_ranks).num_steps, local_loader(pipe, 0, num_ranks)

    loader.load_state_dict(pipe.state_at(4, world_size=num_ranks))

    assert (len(loader), loader.steps_left) == (whole, whole - 4)
    assert len(list(loader)) == whole - 4
    assert len(loader) == loader.steps_left == whole


def test_a_loader_says_who_it_is_and_where_it_stands(rows):
    loader = local_loader(rows_pipeline(rows))
    list(islice(loader, 3))

    assert repr(loader).startswith(
        "RankLoader('train', rank 0 of 1: epoch 0, 12 of 15 batches left, 4 a rank, on 'cpu'"
    )


def test_iteration_after_an_early_break_gives_the_rest(rows):
    pipe = rows_pipeline(rows)
    loader = local_loader(pipe)
    whole = planned_epoch(pipe.plan(), 0)

    first = list(islice(loader, 3))
    second = list(islice(loader, 4))
    rest = list(loader)

    assert [frames_of(batch) for batch in first + second + rest] == whole
    assert loader.epoch == 1


def test_epochs_follow_each_other_and_differ(rows):
    pipe = rows_pipeline(rows)
    loader = local_loader(pipe)

    epochs = [[frames_of(batch) for batch in loader] for _ in range(3)]

    assert epochs == [planned_epoch(pipe.plan(epoch=epoch), 0) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]


def test_set_epoch_of_the_current_epoch_changes_nothing(rows):
    pipe = rows_pipeline(rows)
    loader = local_loader(pipe)
    list(islice(loader, 5))
    state = loader.state_dict()

    loader.set_epoch(0)

    assert loader.state_dict() == state
    assert [frames_of(batch) for batch in loader] == planned_epoch(pipe.plan(), 0)[5:]


def test_set_epoch_after_an_early_break_gives_a_clean_epoch(rows):
    pipe = rows_pipeline(rows)
    loader = local_loader(pipe)
    list(islice(loader, 5))

    loader.set_epoch(2)

    assert (loader.epoch, len(loader)) == (2, 15)
    assert [frames_of(batch) for batch in loader] == planned_epoch(pipe.plan(epoch=2), 0)
    assert loader.epoch == 3


def test_set_epoch_before_the_first_batch_refuses_lanes_that_the_batch_does_not_fit_as_a_start_does(rows):
    pipe = rows_pipeline(rows, batch_size=6, order={"lanes": 4})
    started, moved = local_loader(pipe), local_loader(pipe)
    with pytest.raises(ConfigError) as refused:
        len(started)

    moved.set_epoch(1)

    with pytest.raises(ConfigError, match=re.escape(str(refused.value))):
        len(moved)


def test_steps_crosses_the_ends_of_epochs(rows):
    pipe = rows_pipeline(rows)
    loader = local_loader(pipe)

    batches = list(loader.steps(35))

    wanted = [frames for epoch in range(3) for frames in planned_epoch(pipe.plan(epoch=epoch), 0)]
    assert [frames_of(batch) for batch in batches] == wanted[:35]
    assert (loader.epoch, loader.steps_left) == (2, 10)
    assert loader.state_dict() == pipe.state_at(35)


def test_no_step_is_no_batch(rows):
    assert list(local_loader(rows_pipeline(rows)).steps(0)) == []


def test_pickled_loader_goes_on_where_it_stood(rows):
    pipe = rows_pipeline(rows)
    loader = local_loader(pipe)
    list(islice(loader, 5))

    copied = pickle.loads(pickle.dumps(loader))

    assert copied.state_dict() == loader.state_dict()
    assert [frames_of(batch) for batch in copied] == planned_epoch(pipe.plan(), 0)[5:]


def test_loader_that_is_iterated_refuses_a_second_iteration(rows):
    loader = local_loader(rows_pipeline(rows))
    batches = iter(loader)
    next(batches)

    with pytest.raises(ConfigError, match="being iterated already"):
        next(iter(loader))

    batches.close()
    assert len(list(loader)) == 14


@pytest.mark.timeout(120)
def test_end_of_an_old_iteration_does_not_end_a_new_one(rows):
    pipe = rows_pipeline(rows)
    loader = local_loader(pipe)
    old = iter(loader)
    next(old)
    loader.set_epoch(1)
    new = iter(loader)
    first = next(new)

    old.close()
    rest = list(new)

    assert [frames_of(batch) for batch in [first, *rest]] == planned_epoch(pipe.plan(epoch=1), 0)


def test_state_of_another_seed_is_refused(rows):
    state = local_loader(rows_pipeline(rows, seed=2)).state_dict()

    with pytest.raises(ResumeError, match="seed is 2 in the state and 1 here"):
        local_loader(rows_pipeline(rows)).load_state_dict(state)


def test_rest_of_an_epoch_goes_to_other_world_sizes_exactly_once(rows):
    # 4 lanes on 2 ranks, then on 3 ranks, which do not divide them, then on 1.
    pipe = rows_pipeline(rows, batch_size={"size": 12, "scope": "global"}, order={"lanes": 4})
    emitted, state = [], None

    for world_size, num_steps in ((2, 2), (3, 1), (1, None)):
        loaders = [local_loader(pipe, rank, world_size) for rank in range(world_size)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            emitted += frames_of_all(islice(loader, num_steps))
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]

    assert sorted(emitted) == frames_of_dataset(rows)
    assert (state["epoch"], state["legs"]) == (1, [])


def test_epoch_with_too_few_frames_left_for_the_ranks_ends_without_a_batch(rows):
    pipe = rows_pipeline(rows, batch_size=4)
    almost_done = pipe.state_at(14)
    wide = rows_pipeline(rows, batch_size=1)
    loader = local_loader(wide, 0, 5)
    loader.load_state_dict(almost_done)

    # 57 - 14 * 4 leaves one frame, which five ranks cannot share.
    assert loader.steps_left == 0
    assert list(loader) == []
    assert loader.epoch == 1
    assert len(list(loader)) > 0


def test_global_batches_are_the_same_sets_on_every_world_size_that_divides_the_lanes(rows):
    pipe = rows_pipeline(rows, batch_size={"size": 8, "scope": "global"}, order={"lanes": 4})

    sets = {}
    for world_size in (1, 2, 4):
        ranks = [list(local_loader(pipe, rank, world_size)) for rank in range(world_size)]
        sets[world_size] = [sorted(frames_of_all(step)) for step in zip(*ranks, strict=True)]

    assert sets[1] == sets[2] == sets[4]


def test_batches_kept_by_the_user_are_not_written_over(tiny_dataset):
    dataset = open_dataset(str(tiny_dataset))
    pipe = Pipeline(dataset, batch_size=3, seed=0, order=ORDER)
    camera = dataset.spec.cameras[0]

    # Some are kept whole, some as a view of one frame, most not at all, so that buffers are used again.
    kept = {}
    for number, batch in enumerate(local_loader(pipe, prefetch_batches=1)):
        if number % 3 == 0:
            kept[number] = (frames_of(batch)[-1], batch[camera][-1, 1:])
        del batch

    for (episode, frame), pixels in kept.values():
        assert torch.equal(pixels, dataset.sample_of(episode, frame)[camera][1:])


def test_stats_count_samples_blocks_and_decoded_frames(tiny_dataset):
    dataset = open_dataset(str(tiny_dataset))
    pipe = Pipeline(dataset, batch_size=5, seed=0, order=ORDER)
    loader = local_loader(pipe)

    num_batches = len(list(loader))

    stats = loader.stats()
    assert (stats.samples, stats.batches, stats.received_blocks) == (34, num_batches, 5)
    assert (stats.decoded_frames, stats.emitted_frames, stats.decoded_per_emitted) == (68, 68, 1.0)
    assert (stats.live_spans, stats.live_bytes, stats.peak_clip_bytes > 0) == (0, 0, True)
    assert json.loads(json.dumps(stats.to_dict()))["samples"] == 34


@pytest.mark.parametrize(
    ("live_bytes", "order"), [(150_000, {}), (400_000, {}), (400_000, {"clip_frames": 8}), (2_000_000, {})]
)
def test_frames_held_and_in_flight_stay_within_the_bound(tmp_path, live_bytes, order):
    lengths = tuple(20 + 7 * (i % 9) for i in range(30))
    spec = SynthSpec(lengths=lengths, cameras=(CameraSpec(name=TOP),))
    dataset = open_dataset(str(write_dataset(tmp_path / "dataset", spec)))
    pipe = Pipeline(dataset, batch_size=4, seed=0, live_bytes=live_bytes, order=order)
    loader = local_loader(pipe)

    seen = frames_of_all(list(loader))

    assert sorted(seen) == frames_of_dataset(dataset)
    batch_bytes = 4 * 64 * 64 * 3
    assert loader.stats().peak_clip_bytes <= clip_bound(live_bytes, batch_bytes)
    # Frames that make room for the next batch are decoded again: few.
    assert loader.stats().decoded_per_emitted <= 1.03


def test_epochs_that_are_fetched_ahead_come_one_after_the_other_also_when_the_loop_pauses(rows):
    pipe = Pipeline(rows, batch_size=8, seed=3)
    loader = local_loader(pipe, num_epochs=4)

    epochs = []
    for _ in range(4):
        epochs.append([frames_of(batch) for batch in loader])
        # Long enough for all blocks of the next epoch to arrive before it is asked for.
        time.sleep(0.3)

    assert epochs == [planned_epoch(pipe.plan(epoch=epoch), 0) for epoch in range(4)]


def test_iteration_that_was_broken_off_starts_no_later_epoch_when_its_last_block_comes(rows):
    pipe = Pipeline(rows, batch_size=8, seed=3)
    loader = local_loader(pipe, num_epochs=3)
    ends = threading.Event()
    open_feed = loader._source.open
    loader._source.open = lambda *args: LateEnd(open_feed(*args), ends)

    first = [frames_of(batch) for batch in islice(loader, 2)]
    ends.set()
    time.sleep(0.2)
    rest = [frames_of(batch) for batch in loader]

    assert first + rest == planned_epoch(pipe.plan(), 0)


class LateEnd:
    """A feed whose last block has come while it does not tell yet that it was the last."""

    def __init__(self, feed, ends):
        self.resident_spans, self.place = feed.resident_spans, feed.place
        self._feed, self._ends, self.is_remote = feed, ends, feed.is_remote

    def streams(self, *, is_waited_for):
        yield self.blocks()

    def blocks(self):
        yield from self._feed.blocks()
        self._ends.wait(timeout=60)


def test_next_epoch_that_cannot_be_fetched_ahead_is_told_of_when_it_is_asked_for(rows):
    pipe = Pipeline(rows, batch_size=8, seed=3)
    loader = local_loader(pipe, num_epochs=2)
    open_feed = loader._source.open
    loader._source.open = lambda world, *args: refuse() if world.plan.epoch else open_feed(world, *args)

    first = list(loader)
    with pytest.raises(OSError, match="no more epochs"):
        next(iter(loader))
    loader._source.open = open_feed
    second = list(loader)

    assert sorted(frames_of_all(first)) == sorted(frames_of_all(second)) == frames_of_dataset(rows)


def refuse():
    raise OSError("no more epochs")


def test_closing_says_nothing_of_an_epoch_that_could_not_be_fetched_ahead(rows):
    loader = local_loader(Pipeline(rows, batch_size=8, seed=3), num_epochs=2)
    open_feed = loader._source.open
    loader._source.open = lambda world, *args: refuse() if world.plan.epoch else open_feed(world, *args)
    list(loader)

    loader.close()

    assert loader.epoch == 1


def test_figures_count_the_opening_and_nothing_is_live_after_a_break(rows):
    loader = local_loader(Pipeline(rows, batch_size=8, seed=3))
    open_feed = loader._source.open

    def slow_open(*args):
        time.sleep(0.2)
        return open_feed(*args)

    loader._source.open = slow_open
    next(iter(loader))
    loader.close()

    stats = loader.stats()
    assert stats.first_batch_s >= 0.2
    assert (stats.live_spans, stats.live_bytes, stats.waiting_spans) == (0, 0, 0)
