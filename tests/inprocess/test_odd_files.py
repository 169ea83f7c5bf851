"""Files that differ from what the metadata says, one by one: named, left out exactly, or read all the same."""

import shutil
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batches import TOP, frames_of, frames_of_all, frames_of_dataset, local_loader

from raypipe.dataset import open_dataset
from raypipe.decode.frames import FrameDecoder
from raypipe.errors import DatasetError, DecodeError, DownloadError
from raypipe.pipeline import Pipeline
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

LENGTHS = (12,) * 6
SKIP = {"on_bad_episode": "skip", "max_bad_episodes": 6}
BAD = 2


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Datasets with a video camera, an image camera, and none."""
    folder = tmp_path_factory.mktemp("odd")
    cameras = {
        "video": (CameraSpec(name=TOP, height=32, width=48),),
        "image": (CameraSpec(name=TOP, height=32, width=48, kind="image"),),
        "rows": (),
    }
    return {
        kind: write_dataset(folder / kind, SynthSpec(version="v2.1", lengths=LENGTHS, cameras=cameras[kind]))
        for kind in cameras
    }


def copy(sound, kind, tmp_path):
    return shutil.copytree(sound[kind], tmp_path / kind)


def make_pipe(root, **parts):
    order = {"live_spans": 3, **parts.pop("order", {})}
    return Pipeline(open_dataset(str(root)), batch_size=5, seed=0, order=order, **parts)


def edit_column(root, episode, name, change):
    path = root / f"data/chunk-000/episode_{episode:06d}.parquet"
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(name), name, change(table.column(name))), path)


def assert_resumes_exactly_after_every_batch(pipe):
    whole = [frames_of(batch) for batch in local_loader(pipe)]
    for stop in range(1, len(whole)):
        loader = local_loader(pipe)
        for _ in islice(loader, stop):
            pass
        resumed = local_loader(pipe)
        resumed.load_state_dict(loader.state_dict())
        assert [frames_of(batch) for batch in resumed] == whole[stop:], f"after batch {stop}"


@pytest.mark.filterwarnings("ignore:rank . left out")
def test_an_episode_with_one_bad_row_stays_bad_after_any_resume(sound, tmp_path):
    root = copy(sound, "rows", tmp_path)

    def spoil(column):
        values = column.to_pylist()
        values[7][0] = np.nan
        return pa.array(values, column.type)

    edit_column(root, BAD, "action", spoil)

    assert_resumes_exactly_after_every_batch(make_pipe(root, **SKIP))


@pytest.mark.filterwarnings("ignore:rank . left out")
def test_an_episode_with_one_bad_frame_stays_bad_after_any_resume(sound, tmp_path, monkeypatch):
    root = copy(sound, "video", tmp_path)
    read, failed = FrameDecoder.read_video, []

    def fail(self, request):
        if request.row == BAD and 7 in request.frames:
            failed.append(request.row)
            raise DecodeError("frame 7 is damaged")
        return read(self, request)

    monkeypatch.setattr(FrameDecoder, "read_video", fail)

    assert_resumes_exactly_after_every_batch(make_pipe(root, **SKIP))
    assert failed


@pytest.mark.filterwarnings("ignore:rank . left out")
def test_a_bad_clip_leaves_the_others_of_its_episode(sound, tmp_path, monkeypatch):
    root = copy(sound, "video", tmp_path)
    read = FrameDecoder.read_video

    def fail(self, request):
        if request.row == BAD and 2 in request.frames:
            raise DecodeError("frame 2 is damaged")
        return read(self, request)

    monkeypatch.setattr(FrameDecoder, "read_video", fail)
    pipe = make_pipe(root, order={"clip_frames": 4}, **SKIP)

    loader = local_loader(pipe)
    handed = {frame for batch in loader for frame in frames_of(batch)}

    assert {(span.episode, span.start, span.stop) for span in loader.skipped} == {(BAD, 0, 4)}
    assert {frame for episode, frame in handed if episode == BAD} == set(range(4, LENGTHS[BAD]))


def test_a_video_of_another_size_is_named_with_both_sizes(sound, tmp_path):
    root = copy(sound, "video", tmp_path)
    spec = SynthSpec(version="v2.1", lengths=LENGTHS, cameras=(CameraSpec(name=TOP, height=64, width=64),))
    other = write_dataset(tmp_path / "other", spec)
    name = f"videos/chunk-000/{TOP}/episode_{BAD:06d}.mp4"
    shutil.copy(other / name, root / name)

    with pytest.raises(DecodeError, match=rf"episode {BAD} of .*{name}.*\(64, 64, 3\).* declares \(32, 48, 3\)"):
        list(local_loader(make_pipe(root)))
    with pytest.warns(UserWarning, match="left out 1 bad span in"):
        batches = list(local_loader(make_pipe(root, **SKIP)))
    resized = make_pipe(root).config.decode

    assert len({episode for episode, _ in frames_of_all(batches)}) == len(LENGTHS) - 1
    assert resized.frame_shape(open_dataset(str(root)).features[TOP]) == (32, 48, 3)


def test_an_image_of_another_size_or_a_broken_one_is_bad_data(sound, tmp_path):
    root = copy(sound, "image", tmp_path)
    spec = SynthSpec(
        version="v2.1", lengths=LENGTHS, cameras=(CameraSpec(name=TOP, height=64, width=64, kind="image"),)
    )
    other = pq.read_table(write_dataset(tmp_path / "other", spec) / "data/chunk-000/episode_000002.parquet")

    def swap(column):
        values = column.to_pylist()
        values[5] = other.column(TOP)[5].as_py()
        return pa.array(values, column.type)

    def garble(column):
        values = column.to_pylist()
        content = bytearray(values[3]["bytes"])
        content[40:60] = b"\xff" * 20
        values[3]["bytes"] = bytes(content)
        return pa.array(values, column.type)

    edit_column(root, 2, TOP, swap)
    edit_column(root, 4, TOP, garble)

    with pytest.warns(UserWarning, match="left out 2 bad spans"):
        batches = list(local_loader(make_pipe(root, **SKIP)))
    missing = set(frames_of_dataset(open_dataset(str(root)))) - set(frames_of_all(batches))
    assert missing == {(2, 5), (4, 3)}


@pytest.mark.parametrize("name", ["timestamp", "task_index", "index"])
@pytest.mark.parametrize("values", [["a"] * 12, [{"x": 1}] * 12], ids=["text", "struct"])
def test_a_column_that_holds_no_numbers_is_bad_data(sound, tmp_path, name, values):
    root = copy(sound, "rows", tmp_path)
    edit_column(root, BAD, name, lambda _: pa.array(values))

    with pytest.raises(DatasetError, match=rf"episode {BAD} of .*column '{name}' is of type"):
        list(local_loader(make_pipe(root)))
    with pytest.warns(UserWarning, match=rf"episode {BAD}.*column '{name}' is of type"):
        batches = list(local_loader(make_pipe(root, **SKIP)))

    assert {episode for episode, _ in frames_of_all(batches)} == set(range(6)) - {BAD}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("timestamp", lambda column: column.cast(pa.float64())),
        ("frame_index", lambda column: column.cast(pa.int32())),
        ("action", lambda column: pa.array(column.to_pylist(), pa.list_(pa.float64()))),
    ],
)
def test_files_that_store_numbers_otherwise_are_packed_and_read_alike(sound, tmp_path, name, change):
    root = copy(sound, "rows", tmp_path)
    wanted = list(local_loader(make_pipe(root, feed={"spans_per_block": 4})))
    edit_column(root, BAD, name, change)

    found = list(local_loader(make_pipe(root, feed={"spans_per_block": 4})))

    assert sorted(frames_of_all(found)) == frames_of_dataset(open_dataset(str(root)))
    for one, other in zip(found, wanted, strict=True):
        assert one[name].dtype == other[name].dtype
        assert one[name].tolist() == other[name].tolist()


def test_storage_that_does_not_answer_is_never_left_out(sound, tmp_path, monkeypatch):
    root = copy(sound, "video", tmp_path)
    monkeypatch.setattr("raypipe.storage.retry.RETRY_WAITS_S", (0.0,))

    def fail(self, request):
        raise DecodeError("cannot read") from TimeoutError("no answer")

    monkeypatch.setattr(FrameDecoder, "read_video", fail)

    with pytest.raises(DownloadError, match="cannot read"):
        list(local_loader(make_pipe(root, **SKIP)))
