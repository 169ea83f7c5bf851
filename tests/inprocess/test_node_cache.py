"""Remote datasets through the cache of a node: the same batches, each file fetched once, within the bytes."""

import hashlib
import shutil
import threading
from pathlib import Path

import fsspec
import pytest
from batches import WINDOWS, frames_of_all, local_loader, varied_spec
from fsspec.implementations.memory import MemoryFileSystem
from torch.testing import assert_close

from raypipe.dataset import open_dataset
from raypipe.errors import ConfigError, DatasetError, DownloadError
from raypipe.pipeline import Pipeline
from raypipe.storage import CacheSpec, FileCache, Storage, open_cache
from raypipe.testing import write_dataset


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    root = tmp_path_factory.mktemp("local") / "arm"
    write_dataset(root, varied_spec())
    return root


@pytest.fixture
def remote(local):
    """The dataset on a filesystem that is none of the system's, by its URI."""
    memory = fsspec.filesystem("memory")
    memory.put(str(local), "/bucket/arm", recursive=True)
    yield "memory://bucket/arm"
    memory.rm("/bucket", recursive=True)


def files_of(local, pattern):
    return [path for path in local.rglob(pattern) if path.is_file()]


def make_pipe(root, **parts):
    dataset = open_dataset(str(root)).windowed(offsets=WINDOWS)
    return Pipeline(dataset, batch_size=6, seed=3, order={"live_spans": 4}, **parts)


def equal(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, list):
            assert value == other[key]
        else:
            assert_close(value, other[key], rtol=0, atol=0)


def test_batches_are_those_of_the_local_files_and_every_file_is_fetched_once(local, remote, tmp_path):
    spec = CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 30)

    cached = list(local_loader(make_pipe(remote, cache=spec)))

    plain = list(local_loader(make_pipe(local)))
    assert len(cached) == len(plain)
    for one, other in zip(cached, plain, strict=True):
        equal(one, other)
    stats, wanted = open_cache(spec).stats(), files_of(local, "*.mp4") + files_of(local, "data/**/*.parquet")
    assert stats.misses + stats.prefetched == len(wanted)
    assert stats.bytes_fetched == sum(path.stat().st_size for path in wanted)


def test_a_second_start_fetches_nothing(remote, tmp_path):
    spec = CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 30)
    list(local_loader(make_pipe(remote, cache=spec)))
    before = open_cache(spec).stats()

    list(local_loader(make_pipe(remote, cache={"folder": spec.folder, "max_bytes": spec.max_bytes})))

    assert open_cache(spec).stats().bytes_fetched == before.bytes_fetched


def test_videos_of_spans_to_come_are_fetched_ahead_where_the_rank_decodes(remote, tmp_path):
    spec = CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 30)

    list(local_loader(make_pipe(remote, cache=spec)))

    assert open_cache(spec).stats().prefetched > 0


def test_a_cache_smaller_than_the_dataset_stays_within_its_bytes(local, remote, tmp_path):
    sizes = sorted(path.stat().st_size for path in local.rglob("*") if path.suffix in (".mp4", ".parquet"))
    folder, most = tmp_path / "cache", 3 * sizes[-1]
    spec = CacheSpec(folder=str(folder), max_bytes=most)
    worst, is_done = [0], threading.Event()
    watcher = threading.Thread(target=watch, args=(folder, worst, is_done))
    watcher.start()
    try:
        cached = list(local_loader(make_pipe(remote, cache=spec)))
    finally:
        is_done.set()
        watcher.join()

    assert frames_of_all(cached) == frames_of_all(local_loader(make_pipe(local)))
    assert 0 < worst[0] <= most


def watch(folder, worst, is_done):
    while not is_done.is_set():
        total = 0
        for path in Path(folder).glob("*"):
            try:
                total += path.stat().st_size if path.suffix != ".lock" and path.name not in ("ledger", "bound") else 0
            except FileNotFoundError:
                continue
        worst[0] = max(worst[0], total)


def test_opening_a_dataset_leaves_what_a_larger_cache_keeps_in_the_default_folder(remote, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    large = FileCache("~/.cache/raypipe/files", 400 << 30)
    for key in ("a", "b"):
        large.hold(key, lambda path, _: truncate(path, 40 << 30), 40 << 30).close()

    list(local_loader(make_pipe(remote)))

    kept = [path.stat().st_size for path in Path(large.folder).iterdir() if len(path.name) == 32]
    assert kept.count(40 << 30) == 2
    assert len(kept) > 2, "files of the dataset are kept there too"


def truncate(path, size):
    """Make a file of so many bytes that takes no room on the disk."""
    with open(path, "wb") as stream:
        stream.truncate(size)


def test_a_file_that_changes_is_fetched_anew(remote, tmp_path):
    memory, spec = fsspec.filesystem("memory"), CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 20)
    memory.pipe_file("/bucket/arm/meta/note.txt", b"one")
    first = Storage(remote, spec).read_bytes("meta/note.txt")
    memory.pipe_file("/bucket/arm/meta/note.txt", b"two")

    assert (first, Storage(remote, spec).read_bytes("meta/note.txt")) == (b"one", b"two")
    assert Storage(remote, spec).read_range("meta/note.txt", 1, 3) == b"wo"


class QuotingFiles(MemoryFileSystem):
    """Tells the ETag of a single file in quotes, and without in a listing: adlfs before 2026.5, its issue 461."""

    protocol = "quoting"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("quoting:/"))

    def find(self, path, detail=False, **_):
        return {name: self.describe(name, self.etag(name)) for name in super().find(path)}

    def info(self, path, **_):
        return self.describe(path, f'"{self.etag(path)}"')

    def describe(self, path, etag):
        info = super().info(path)
        return {"name": info["name"], "size": info["size"], "type": info["type"], "etag": etag}

    def etag(self, path):
        return hashlib.sha256(self.cat_file(path)).hexdigest()


@pytest.mark.parametrize("whole_bytes", [0, 100])
def test_the_version_of_a_file_is_the_same_with_quotes_and_without(remote, tmp_path, whole_bytes):
    fsspec.register_implementation("quoting", QuotingFiles, clobber=True)
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bucket/arm/meta/note.txt", b"one")
    spec = CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 20, whole_bytes=whole_bytes)
    storage, late = Storage("quoting://bucket/arm", spec), Storage("quoting://bucket/arm", spec)

    first = storage.read_bytes("meta/note.txt")
    assert late.size_bytes("meta/note.txt") == 3
    memory.pipe_file("/bucket/arm/meta/note.txt", b"two")

    assert first == b"one"
    shutil.rmtree(spec.folder)
    with pytest.raises(DownloadError, match=r"'meta/note.txt' changed while it was read"):
        late.read_bytes("meta/note.txt")


def test_a_file_that_is_not_there_is_named(remote, tmp_path):
    spec = CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 20)

    with pytest.raises(DatasetError, match=r"missing file '/bucket/arm/data/none\.parquet'"):
        Storage(remote, spec).open_file("data/none.parquet")


def test_a_file_that_comes_short_is_an_error_and_leaves_nothing_behind(remote, tmp_path, monkeypatch):
    spec = CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 20)
    storage = Storage(remote, spec)
    fsspec.filesystem("memory").pipe_file("/bucket/arm/meta/note.txt", b"0123456789")
    assert storage.size_bytes("meta/note.txt") == 10

    # Put back in the test: the fixture that removes the files ends before that of patches does, and one that came back
    # later would stay for all tests to come.
    with monkeypatch.context() as patched:
        patched.setitem(fsspec.filesystem("memory").store, "/bucket/arm/meta/note.txt", shortened(b"0123456"))
        with pytest.raises(
            DownloadError, match=r"'meta/note.txt' changed while it was read: it was size 10, .* and is size 7"
        ):
            storage.read_bytes("meta/note.txt")

    assert not [path for path in Path(spec.folder).iterdir() if path.stat().st_size in (7, 10)]


def shortened(content):
    from fsspec.implementations.memory import MemoryFile

    return MemoryFile(fsspec.filesystem("memory"), "/bucket/arm/meta/note.txt", content)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"folder": "s3://bucket", "max_bytes": 5}, "give a folder on a local disk"),
        ({"folder": "x", "max_bytes": 0}, "max_bytes of a cache must be a number of bytes .*, at least 1.*; got 0"),
        ({"folder": "x", "max_bytes": "200 cows"}, "at least 1, or 'folder'; got '200 cows'"),
        ({"folder": "x", "max_bytes": 1.5}, "got 1.5"),
        ({"folder": "x", "max_bytes": float("inf")}, "got inf"),
        ({"folder": "x", "max_bytes": True}, "got True"),
        ({"folder": "x", "whole_bytes": -1}, "whole_bytes of a cache must be .* at least 0; got -1"),
        ({"folder": "x", "bytes": 3}, "cache has no field 'bytes'"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(local, cache, message):
    with pytest.raises(ConfigError, match=message):
        make_pipe(local, cache=cache)


def test_bytes_of_a_cache_may_be_written_as_a_float(tmp_path):
    spec = CacheSpec(folder=str(tmp_path / "cache"), max_bytes=200e9)

    assert spec == CacheSpec(folder=spec.folder, max_bytes=200 * 10**9)
    assert isinstance(spec.max_bytes, int)


def test_local_datasets_are_read_where_they_are(local, tmp_path):
    list(local_loader(make_pipe(local, cache={"folder": str(tmp_path / "cache"), "max_bytes": 1})))

    assert not (tmp_path / "cache").exists()
