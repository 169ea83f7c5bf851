"""Bad spans that are left out: shorter batches, equal steps, and every other frame where it would have been."""

import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batches import MODES, TOP, frames_of, frames_of_all, local_loader, planned_epoch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raypipe.dataset import open_dataset
from raypipe.decode import OpenVideo
from raypipe.errors import DatasetError, DecodeError
from raypipe.pipeline import Pipeline
from raypipe.plan import WHOLE_EPISODE
from raypipe.testing import CameraSpec, SynthSpec, assert_resumes_exactly, write_dataset

LENGTHS = (6, 4, 9, 7, 5, 8, 3, 10)
SKIP = {"on_bad_episode": "skip", "max_bad_episodes": 8}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    spec = SynthSpec(
        version="v2.1", lengths=LENGTHS, cameras=(CameraSpec(name=TOP, height=32, width=32),), state_dim=2, action_dim=2
    )
    return write_dataset(tmp_path_factory.mktemp("holes") / "dataset", spec)


@pytest.fixture(scope="module")
def rows_alone(tmp_path_factory):
    spec = SynthSpec(version="v2.1", lengths=LENGTHS, cameras=(), state_dim=2, action_dim=2)
    return write_dataset(tmp_path_factory.mktemp("holes-rows") / "dataset", spec)


def copy_without_files(root: Path, to: Path, episodes, pattern="data/chunk-000/episode_{:06d}.parquet") -> Path:
    """Copy a dataset and remove the files of some episodes."""
    shutil.copytree(root, to)
    for episode in episodes:
        (to / pattern.format(episode)).unlink()
    return to


def without(planned, bad):
    """The planned batches without the frames of bad episodes."""
    return [[frame for frame in batch if frame[0] not in bad] for batch in planned]


def handed(loader):
    """The frames of every batch that are no repeats, and whether a batch is one repeat alone."""
    batches = list(loader)
    return [
        [frame for frame, is_repeat in zip(frames_of(batch), batch["is_repeat"].tolist(), strict=True) if not is_repeat]
        for batch in batches
    ], batches


@pytest.mark.parametrize("span_frames", [WHOLE_EPISODE, 3])
@pytest.mark.filterwarnings("ignore:rank . left out")
def test_frames_of_bad_videos_are_left_out_and_no_other_frame_moves(sound, tmp_path, span_frames):
    bad = {2, 5}
    root = copy_without_files(sound, tmp_path / "bad", bad, f"videos/chunk-000/{TOP}/episode_{{:06d}}.mp4")
    order = {"live_spans": 3, "span_frames": span_frames}
    pipe = Pipeline(open_dataset(str(root)), batch_size=4, seed=1, order=order, decode=MODES["rank"], **SKIP)

    for rank in range(2):
        loader = local_loader(pipe, rank, 2)
        found, batches = handed(loader)

        assert found == without(planned_epoch(pipe.plan(world_size=2), rank), bad)
        assert all(len(batch["index"]) for batch in batches)
        assert {span.episode for span in loader.skipped} <= bad
        assert loader.stats().skipped_frames == sum(
            frame[0] in bad for batch in planned_epoch(pipe.plan(world_size=2), rank) for frame in batch
        )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bad=st.sets(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=len(LENGTHS) - 1),
    world_size=st.integers(1, 3),
    batch_size=st.integers(1, 5),
    tail=st.sampled_from(["short", "wrap", "drop"]),
    live_spans=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
@pytest.mark.filterwarnings("ignore:rank . left out")
def test_steps_are_equal_and_good_frames_come_once_whatever_is_bad(
    rows_alone, tmp_path_factory, bad, world_size, batch_size, tail, live_spans, seed
):
    root = copy_without_files(rows_alone, tmp_path_factory.mktemp("bad") / "dataset", bad)
    order = {"live_spans": live_spans, "tail": tail}
    pipe = Pipeline(open_dataset(str(root)), batch_size=batch_size, seed=seed, order=order, **SKIP)
    world = pipe.plan(world_size=world_size)

    for rank in range(world_size):
        loader = local_loader(pipe, rank, world_size)
        found, batches = handed(loader)

        assert len(batches) == world.num_steps
        planned = [
            [f for f, r in zip(batch, world.frames_at(step, rank).is_repeat, strict=True) if not r]
            for step, batch in enumerate(planned_epoch(world, rank))
        ]
        assert found == without(planned, bad)
        assert all(episode not in bad for episode, _ in frames_of_all(batches))


def test_a_batch_of_bad_frames_alone_repeats_one_frame_and_marks_it(rows_alone, tmp_path):
    root = copy_without_files(rows_alone, tmp_path / "bad", {0, 1, 2, 3})
    order = {"live_spans": 1, "shuffle": False}
    pipe = Pipeline(open_dataset(str(root)), batch_size=6, seed=0, order=order, **SKIP)

    with pytest.warns(UserWarning, match="rank 0 left out 4 bad spans in epoch 0"):
        batches = list(local_loader(pipe))

    assert frames_of(batches[0]) == [(4, 0)]
    assert batches[0]["is_repeat"].tolist() == [True]
    assert frames_of_all(batches[5:]) == [(e, f) for e in (4, 5, 6, 7) for f in range(LENGTHS[e])][4:]


def test_a_dataset_without_a_good_frame_ends_the_run(sound, tmp_path):
    root = copy_without_files(sound, tmp_path / "bad", ())
    for path in (root / "videos").rglob("*.mp4"):
        path.write_bytes(path.read_bytes()[:100])
    pipe = Pipeline(open_dataset(str(root)), batch_size=4, seed=0, **SKIP)

    with (
        pytest.warns(UserWarning, match=r"left out \d bad spans?"),
        pytest.raises(DatasetError, match="not one of 8 episodes can be read"),
    ):
        list(local_loader(pipe))


def test_a_damaged_image_leaves_its_clip_out(tmp_path):
    spec = SynthSpec(
        version="v2.1", lengths=LENGTHS, cameras=(CameraSpec(name=TOP, height=32, width=32, kind="image"),)
    )
    root = write_dataset(tmp_path / "dataset", spec)
    path = root / "data/chunk-000/episode_000003.parquet"
    table = pq.read_table(path)
    images = table.column(TOP).to_pylist()
    images[5]["bytes"] = images[5]["bytes"][:40]
    place = table.column_names.index(TOP)
    pq.write_table(table.set_column(place, TOP, pa.array(images, table.schema.field(TOP).type)), path)
    order = {"live_spans": 2, "clip_frames": 2}
    pipe = Pipeline(open_dataset(str(root)), batch_size=4, seed=0, order=order, **SKIP)

    with pytest.warns(UserWarning, match="episode 3 of .* frames 4 to 5"):
        found, _ = handed(local_loader(pipe))

    planned = planned_epoch(pipe.plan(), 0)
    assert found == [[frame for frame in batch if frame not in {(3, 4), (3, 5)}] for batch in planned]


@pytest.mark.filterwarnings("ignore:rank . left out")
@pytest.mark.parametrize("clip_frames", [1, 3, 4])
def test_damage_inside_a_video_makes_holes_of_its_clip_alone_after_any_stop_on_any_world(
    sound, monkeypatch, clip_frames
):
    damaged, read = (7, 5), OpenVideo.read_frames

    def fail(self, frames):
        if "episode_000007" in self.place and damaged[1] in frames.tolist():
            raise DecodeError(f"frame {damaged[1]} of {self.place!r} is broken")
        return read(self, frames)

    monkeypatch.setattr(OpenVideo, "read_frames", fail)
    order = {"live_spans": 4, "clip_frames": clip_frames}
    pipe = Pipeline(open_dataset(str(sound)), batch_size=4, seed=1, order=order, **SKIP)
    first = damaged[1] - damaged[1] % clip_frames
    holes = {(7, frame) for frame in range(first, min(first + clip_frames, LENGTHS[7]))}
    everything = [(episode, frame) for episode, length in enumerate(LENGTHS) for frame in range(length)]

    for stop in range(0, pipe.plan(world_size=2).num_steps, 3):
        seen, states = [], []
        for rank in range(2):
            loader = local_loader(pipe, rank, 2)
            seen += good_frames(list(islice(loader, stop)))
            states.append(loader.state_dict())
        for rank in range(3):
            loader = local_loader(pipe, rank, 3)
            loader.load_state_dict(states[0])
            seen += good_frames(list(loader))

        missing = set(everything) - set(seen)
        assert len(seen) == len(set(seen))
        assert missing >= holes
        # Fewer frames than ranks may be left over at the end of a leg.
        assert len(missing - holes) < 3


def good_frames(batches):
    """Return the frames of batches that are no repeats."""
    return [
        frame
        for batch in batches
        for frame, is_repeat in zip(frames_of(batch), batch["is_repeat"].tolist(), strict=True)
        if not is_repeat
    ]


@pytest.mark.filterwarnings("ignore:rank . left out")
def test_a_loader_that_leaves_spans_out_resumes_exactly(rows_alone, tmp_path):
    root = copy_without_files(rows_alone, tmp_path / "bad", {1, 7})
    pipe = Pipeline(open_dataset(str(root)), batch_size=4, seed=5, order={"live_spans": 3}, **SKIP)

    class OneEpoch:
        def __init__(self):
            self._loader = local_loader(pipe)

        def __iter__(self):
            return (frames_of(batch) for batch in self._loader) if self._loader.epoch == 0 else iter(())

        def state_dict(self):
            return self._loader.state_dict()

        def load_state_dict(self, state):
            self._loader.load_state_dict(state)

    assert_resumes_exactly(OneEpoch)


def test_more_bad_episodes_than_may_be_end_the_run_with_the_list(rows_alone, tmp_path):
    root = copy_without_files(rows_alone, tmp_path / "bad", {2, 4})
    pipe = Pipeline(open_dataset(str(root)), batch_size=4, seed=0, on_bad_episode="skip", max_bad_episodes=1)

    with pytest.warns(UserWarning, match="left out 1 bad span in"), pytest.raises(DatasetError) as raised:
        list(local_loader(pipe))

    assert "2 of 8 episodes are bad" in str(raised.value)
    assert "episode_000002.parquet" in str(raised.value)
    assert "episode_000004.parquet" in str(raised.value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("feature", ["action", "observation.state"])
def test_values_that_are_no_numbers_are_bad_data(rows_alone, tmp_path, feature, value):
    root = copy_without_files(rows_alone, tmp_path / "bad", ())
    path = root / "data/chunk-000/episode_000005.parquet"
    table = pq.read_table(path)
    values = table.column(feature).to_pylist()
    values[2][1] = value
    place = table.column_names.index(feature)
    pq.write_table(table.set_column(place, feature, pa.array(values, table.schema.field(feature).type)), path)
    dataset = open_dataset(str(root))

    with pytest.raises(DatasetError, match=f"feature '{feature}' of episode 5 .* frame 2.*episode_000005.parquet"):
        list(local_loader(Pipeline(dataset, batch_size=4, seed=0)))
    whole = list(local_loader(Pipeline(dataset, batch_size=4, seed=0, check_finite=False)))
    with pytest.warns(UserWarning, match="episode 5 of"):
        skipped, _ = handed(local_loader(Pipeline(dataset, batch_size=4, seed=0, **SKIP)))

    assert len(frames_of_all(whole)) == sum(LENGTHS)
    assert sum(map(len, skipped)) == sum(LENGTHS) - LENGTHS[5]


def test_a_row_with_an_unknown_task_is_bad_data(rows_alone, tmp_path):
    root = copy_without_files(rows_alone, tmp_path / "bad", ())
    path = root / "data/chunk-000/episode_000004.parquet"
    table = pq.read_table(path)
    place = table.column_names.index("task_index")
    pq.write_table(table.set_column(place, "task_index", pa.array([99] * len(table))), path)
    dataset = open_dataset(str(root))

    with pytest.raises(DatasetError, match=r"task_index 99.*episode 4 .*episode_000004.parquet"):
        list(local_loader(Pipeline(dataset, batch_size=4, seed=0)))
    with pytest.warns(UserWarning, match="task_index 99"):
        found, _ = handed(local_loader(Pipeline(dataset, batch_size=4, seed=0, **SKIP)))

    assert sum(map(len, found)) == sum(LENGTHS) - LENGTHS[4]


def test_a_loop_that_is_broken_off_often_lists_and_warns_of_a_bad_span_once(rows_alone, tmp_path):
    root = copy_without_files(rows_alone, tmp_path / "bad", {3})
    pipe = Pipeline(open_dataset(str(root)), batch_size=4, seed=0, order={"live_spans": 8}, **SKIP)
    loader = local_loader(pipe)

    def take_two_by_two():
        while loader.epoch == 0:
            for _ in zip(loader, range(2), strict=False):
                pass

    with pytest.warns(UserWarning, match="left out") as warned:
        take_two_by_two()

    assert len(warned) == len(loader.skipped) == 1


@pytest.mark.filterwarnings("ignore:rank . left out")
def test_episodes_that_were_bad_before_a_restart_count_in_the_budget(rows_alone, tmp_path):
    root = copy_without_files(rows_alone, tmp_path / "bad", {0, 7})
    pipe = Pipeline(
        open_dataset(str(root)),
        batch_size=6,
        seed=0,
        order={"shuffle": False},
        on_bad_episode="skip",
        max_bad_episodes=1,
    )
    first = local_loader(pipe)
    for _ in zip(range(3), first, strict=False):
        pass
    again = local_loader(pipe)
    again.load_state_dict(first.state_dict())
    again.load_account(first.account().parts)

    with pytest.raises(DatasetError, match=r"2 of 8 episodes are bad(.|\n)*episode 0 of dataset 0, left out before"):
        list(again)
