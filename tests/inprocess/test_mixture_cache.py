import json
import os
import shutil
from dataclasses import fields

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from contents_equal import assert_same_meta

from raypipe.errors import DatasetError, DownloadError
from raypipe.mixture import cache as cache_module
from raypipe.mixture.cache import (
    Contents,
    cache_file,
    read_contents,
    read_contents_cached,
    remove_partial_files,
)
from raypipe.mixture.file_state import find_meta_state
from raypipe.storage import open_storage
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

TOP = "observation.images.top"
LENGTHS = (4, 1, 6, 3)
SPECS = {
    "v2.0": SynthSpec(version="v2.0", cameras=(), lengths=LENGTHS),
    "v2.1": SynthSpec(version="v2.1", cameras=(), lengths=LENGTHS),
    "v3.0": SynthSpec(version="v3.0", cameras=(), lengths=LENGTHS),
    "a camera": SynthSpec(cameras=(CameraSpec(name=TOP, height=32, width=48),), lengths=LENGTHS),
    "cameras that share columns": SynthSpec(
        version="v2.1", cameras=tuple(CameraSpec(name=name, height=32, width=48) for name in "ab"), lengths=(2, 1)
    ),
    "images in rows": SynthSpec(cameras=(CameraSpec(name=TOP, height=32, width=48, kind="image"),), lengths=LENGTHS),
    "odd texts": SynthSpec(cameras=(), lengths=LENGTHS, tasks=("Würfel 🤖\n", "2024-01-01"), two_tasks=True),
    "many files": SynthSpec(cameras=(), lengths=(3,) * 7, episodes_per_data_file=1, episodes_per_meta_file=2),
    "every kind of feature": SynthSpec(
        cameras=(), lengths=LENGTHS, extra_features=("next.done", "observation.grid", "note"), drop_columns=("index",)
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cached")
    return {name: write_dataset(folder / str(i), spec) for i, (name, spec) in enumerate(SPECS.items())}


@pytest.fixture
def dataset(made, tmp_path):
    """A v3.0 dataset of rows that a test may change."""
    return shutil.copytree(made["v3.0"], tmp_path / "dataset")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch):
    """The roots of which metadata was read."""
    read, original = [], cache_module.read_metadata
    monkeypatch.setattr(cache_module, "read_metadata", lambda storage: read.append(storage.uri) or original(storage))
    return read


def open_cached(root, folder, **options):
    return read_contents_cached(open_storage(str(root)), folder, **options)


def garble_everything(root):
    """Change the bytes of every file, and neither its size nor its time."""
    for path in (path for path in root.rglob("*") if path.is_file()):
        before = path.stat()
        path.write_bytes(b"x" * before.st_size)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def change_info(root, change):
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info))


@pytest.mark.parametrize("name", SPECS)
def test_what_the_cache_gives_equals_what_is_read(made, folder, reads, name):
    read = read_contents(open_storage(str(made[name])))
    kept = open_cached(made[name], folder)
    del reads[:]

    cached = open_cached(made[name], folder)

    assert reads == []
    for contents in (kept, cached):
        assert_same_meta(contents.meta, read.meta)
        for field in (field.name for field in fields(Contents) if field.name != "meta"):
            assert getattr(contents, field) == getattr(read, field), field


@pytest.mark.parametrize("folder", ["~/.cache/raypipe/metadata", "~nobody-of-this-name/cache"])
def test_without_a_home_directory_nothing_is_kept_and_that_is_told(dataset, monkeypatch, folder):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", pwd_without_users)
    read = read_contents(open_storage(str(dataset)))

    remove_partial_files(folder)
    contents = open_cached(dataset, folder)

    assert contents.cache_failure.startswith(f"metadata is not cached: '{folder}' is nowhere: ")
    assert_same_meta(contents.meta, read.meta)


def pwd_without_users(uid):
    raise KeyError(uid)


def test_a_dataset_without_episodes_is_kept(dataset, folder, reads):
    shutil.rmtree(dataset / "meta/episodes")
    change_info(dataset, lambda info: info.update(total_episodes=0, total_frames=0))
    read = open_cached(dataset, folder)

    cached = open_cached(dataset, folder)

    assert len(reads) == 1
    assert_same_meta(cached.meta, read.meta)


def test_episodes_without_tasks_and_notes_are_kept(dataset, folder, reads):
    path = next((dataset / "meta/episodes").rglob("*.parquet"))
    table = pq.read_table(path)
    tasks = pa.array([None, [], ["a", None], ["b"]], pa.list_(pa.string()))
    pq.write_table(table.set_column(table.column_names.index("tasks"), "tasks", tasks), path)
    change_info(dataset, lambda info: info.update(total_frames=99, splits={"odd": "first half", "train": "0:2"}))
    read = open_cached(dataset, folder)

    cached = open_cached(dataset, folder)

    assert len(reads) == 1
    assert len(cached.meta.notes) == 2
    assert_same_meta(cached.meta, read.meta)


def test_cameras_of_one_layout_share_their_columns_as_when_read(made, folder):
    open_cached(made["cameras that share columns"], folder)

    videos = open_cached(made["cameras that share columns"], folder).meta.episodes.videos

    assert videos["a"].from_timestamp is videos["b"].from_timestamp


def test_no_file_of_the_dataset_is_opened_while_their_sizes_and_times_stay(dataset, folder):
    read = open_cached(dataset, folder)
    garble_everything(dataset)

    cached = open_cached(dataset, folder)

    assert_same_meta(cached.meta, read.meta)
    with pytest.raises(DatasetError):
        read_contents(open_storage(str(dataset)))


def add_to_meta(root):
    (root / "meta/notes.txt").write_text("a file more")


def remove_from_meta(root):
    (root / "meta/stats.json").unlink()


def touch_data(root):
    path = next((root / "data").rglob("*.parquet"))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def grow_info(root):
    before = (root / "meta/info.json").stat()
    change_info(root, lambda info: info.update(robot_type="another one"))
    os.utime(root / "meta/info.json", ns=(before.st_atime_ns, before.st_mtime_ns))


def touch_episode_table(root):
    os.utime(next((root / "meta/episodes").rglob("*.parquet")))


@pytest.mark.parametrize(
    "change", [add_to_meta, remove_from_meta, touch_data, grow_info, touch_episode_table], ids=lambda c: c.__name__
)
def test_any_change_of_a_file_that_opening_looks_at_is_seen(dataset, folder, reads, change):
    open_cached(dataset, folder)
    change(dataset)

    changed = open_cached(dataset, folder)
    open_cached(dataset, folder)

    assert len(reads) == 2
    assert_same_meta(changed.meta, read_contents(open_storage(str(dataset))).meta)


def test_a_camera_whose_files_come_later_is_found(made, tmp_path, folder):
    root = shutil.copytree(made["a camera"], tmp_path / "d")
    shutil.move(root / "videos", tmp_path / "videos")
    before = [open_cached(root, folder).missing_cameras for _ in range(2)]
    shutil.move(tmp_path / "videos", root / "videos")

    after = open_cached(root, folder).missing_cameras

    assert before == [(TOP,), (TOP,)]
    assert after == ()


def test_columns_that_rows_lack_are_kept(dataset, folder, reads):
    change_info(dataset, lambda info: info["features"].update(ghost={"dtype": "float32", "shape": [2]}))
    read = open_cached(dataset, folder)

    cached = open_cached(dataset, folder)

    assert len(reads) == 1
    assert read.absent_columns == cached.absent_columns == ("ghost",)


def test_a_dataset_that_cannot_be_opened_is_not_kept_and_mending_is_seen(dataset, folder):
    shutil.move(dataset / "meta/tasks.parquet", dataset / "tasks")
    for _ in range(2):
        with pytest.raises(DatasetError, match="no tasks"):
            open_cached(dataset, folder)
    assert not folder.exists() or not [*folder.iterdir()]

    shutil.move(dataset / "tasks", dataset / "meta/tasks.parquet")

    assert len(open_cached(dataset, folder).meta.tasks) == 2


def cut(content):
    return content[: len(content) // 2]


def flip_a_bit_of_the_lengths(content):
    # The lengths of the episodes are stored as they are, one after the other.
    place = content.index(np.array(LENGTHS, dtype="<i8").tobytes())
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES = {
    "empty": lambda content: b"",
    "cut": cut,
    "a bit flipped": flip_a_bit_of_the_lengths,
    "something behind": lambda content: content + b"x",
    "another file": lambda content: b"PAR1" + b"\0" * 1000,
    "another format": lambda content: content.replace(b"format ", b"format 9", 1),
    "another version": lambda content: content.replace(b"raypipe 0", b"raypipe 9", 1),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_or_foreign_file_is_ignored_and_written_anew(dataset, folder, reads, name):
    read = open_cached(dataset, folder)
    path = cache_file(open_storage(str(dataset)), folder)
    whole = path.read_bytes()
    assert DAMAGES[name](whole) != whole
    path.write_bytes(DAMAGES[name](whole))

    found = open_cached(dataset, folder)

    assert len(reads) == 2
    assert_same_meta(found.meta, read.meta)
    assert path.read_bytes() == whole


def test_the_file_of_another_dataset_is_not_taken(made, dataset, folder):
    open_cached(made["many files"], folder, revision="a")
    path = cache_file(open_storage(str(dataset)), folder)
    shutil.copy(cache_file(open_storage(str(made["many files"])), folder), path)

    assert open_cached(dataset, folder, revision="a").meta.episodes.length.tolist() == list(LENGTHS)


def test_who_reads_a_file_while_it_is_renewed_reads_the_old_one(dataset, folder):
    open_cached(dataset, folder)
    path = cache_file(open_storage(str(dataset)), folder)
    old = path.read_bytes()

    with open(path, "rb") as reader:
        touch_data(dataset)
        open_cached(dataset, folder)

        assert reader.read() == old
    assert path.read_bytes() != old


def test_a_disk_that_is_full_leaves_the_old_file_and_nothing_half_written(dataset, folder, monkeypatch):
    open_cached(dataset, folder)
    path = cache_file(open_storage(str(dataset)), folder)
    old = path.read_bytes()
    touch_data(dataset)

    def fail(self, content):
        with open(self, "wb") as stream:
            stream.write(content[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "write_bytes", fail)
    contents = open_cached(dataset, folder)

    assert "No space left on device" in contents.cache_failure
    assert [path] == [*folder.iterdir()]
    assert path.read_bytes() == old


def test_the_folder_does_not_grow_when_a_dataset_changes(dataset, folder):
    for number in range(3):
        change_info(dataset, lambda info, number=number: info.update(robot_type=f"robot {number}"))
        open_cached(dataset, folder)

    assert len([*folder.iterdir()]) == 1


def test_a_folder_that_cannot_be_written_is_told_and_no_error(dataset, tmp_path):
    (tmp_path / "file").write_text("not a folder")

    contents = open_cached(dataset, tmp_path / "file/cache")

    assert contents.meta.num_frames == sum(LENGTHS)
    assert "metadata is not cached" in contents.cache_failure
    assert "file/cache" in contents.cache_failure


def test_half_written_files_are_removed_once_they_are_old(tmp_path):
    old, new, kept = (tmp_path / name for name in ("a.1.part", "b.2.part", "c.arrow"))
    for path in (old, new, kept):
        path.write_bytes(b"")
    for path in (old, kept):
        os.utime(path, (0, 0))

    remove_partial_files(tmp_path)
    remove_partial_files(tmp_path / "not there")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.2.part", "c.arrow"]


def test_a_revision_stands_for_all_files(dataset, folder, reads):
    open_cached(dataset, folder, revision="a" * 40)
    (dataset / "meta/info.json").unlink()

    cached = open_cached(dataset, folder, revision="a" * 40)

    assert len(reads) == 1
    assert cached.meta.num_frames == sum(LENGTHS)
    with pytest.raises(DatasetError, match="no LeRobot dataset"):
        open_cached(dataset, folder, revision="b" * 40)


@pytest.fixture
def remote(made):
    """A dataset with a camera on another filesystem: its root, and the filesystem."""
    memory = fsspec.filesystem("memory")
    memory.put(str(made["a camera"]), "/cached", recursive=True)
    yield "memory://cached", memory
    memory.rm("/cached", recursive=True)


def test_a_remote_dataset_is_kept_until_its_metadata_changes(remote, folder, reads):
    root, memory = remote
    read = open_cached(root, folder)

    cached = open_cached(root, folder)
    before = len(reads)
    memory.pipe_file("/cached/meta/info.json", memory.cat_file("/cached/meta/info.json"))
    open_cached(root, folder)

    assert (before, len(reads)) == (1, 2)
    assert_same_meta(cached.meta, read.meta)


def test_a_remote_camera_that_is_uploaded_later_is_found(remote, folder):
    root, memory = remote
    videos = {name: memory.cat_file(name) for name in memory.find("/cached/videos")}
    memory.rm("/cached/videos", recursive=True)
    before = [open_cached(root, folder).missing_cameras for _ in range(2)]
    for name, content in videos.items():
        memory.pipe_file(name, content)

    assert before == [(TOP,), (TOP,)]
    assert open_cached(root, folder).missing_cameras == ()


def test_a_filesystem_that_does_not_tell_of_changes_is_read_every_time(remote, folder, reads, monkeypatch):
    root, memory = remote
    find = type(memory).find

    def bare(self, path, detail=False, **options):
        found = find(self, path, detail=detail, **options)
        return {name: {"size": info["size"]} for name, info in found.items()} if detail else found

    monkeypatch.setattr(type(memory), "find", bare)

    contents = [open_cached(root, folder) for _ in range(2)]

    assert reads == [root, root]
    assert all("does not tell when a file has changed" in one.cache_failure for one in contents)


def test_storage_that_does_not_answer_is_named(remote, monkeypatch):
    root, memory = remote

    def fail(*_args, **_options):
        raise RuntimeError("no route")

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "find", fail)

        with pytest.raises(DownloadError, match=r"cannot list .*memory://cached.*no route"):
            find_meta_state(open_storage(root), "")
