import pickle

import fsspec
import pytest

from raypipe.errors import ConfigError, DatasetError
from raypipe.storage import open_storage


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    root = str(tmp_path / "root") if request.param == "local" else f"memory://{tmp_path.name}/root"
    storage = open_storage(root)
    storage.write_atomic("meta/info.json", b"0123456789")
    return storage


def test_storage_reads_what_was_written_whole_and_by_range(storage):
    assert storage.read_bytes("meta/info.json") == b"0123456789"
    assert storage.read_range("meta/info.json", 3, 6) == b"345"
    assert storage.read_range("meta/info.json", 8, 20) == b"89"
    assert storage.size_bytes("meta/info.json") == 10
    with storage.open_file("meta/info.json") as stream:
        assert stream.read(2) == b"01"


def test_closing_a_file_closes_that_of_a_remote_filesystem(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"0123456789")
    storage, opened = open_storage("memory://root"), []
    monkeypatch.setattr(storage.filesystem, "open", lambda *_: opened.append((tmp_path / "a").open("rb")) or opened[0])

    with storage.open_file("a") as stream:
        assert stream.read(2) == b"01"
        assert not opened[0].closed

    assert opened[0].closed


def test_storage_lists_names_relative_to_its_root(storage):
    storage.write_atomic("data/a.parquet", b"")

    assert storage.list_files() == ["data/a.parquet", "meta/info.json"]
    assert storage.list_files("meta") == ["meta/info.json"]
    assert storage.list_files("nowhere") == []


def test_storage_tells_what_exists(storage):
    assert storage.exists()
    assert storage.exists("meta/info.json")
    assert not storage.exists("meta/other.json")


def test_storage_survives_pickling_with_an_open_filesystem(storage):
    storage.exists()

    again = pickle.loads(pickle.dumps(storage))

    assert again == storage
    assert again.read_bytes("meta/info.json") == b"0123456789"


def test_an_atomic_write_that_fails_leaves_the_old_content_and_no_part(tmp_path, monkeypatch):
    storage = open_storage(tmp_path)
    storage.write_atomic("state.json", b"old")

    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        storage.write_atomic("state.json", b"new")

    assert storage.read_bytes("state.json") == b"old"
    assert storage.list_files() == ["state.json"]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DatasetError, match=r"missing file '.*/meta/info\.json'"):
        open_storage(tmp_path).read_bytes("meta/info.json")


def test_an_unknown_protocol_is_an_error_that_says_what_is_allowed():
    with pytest.raises(ConfigError, match=r"nowhere://x.*RAYPIPE_PROTOCOLS"):
        open_storage("nowhere://x").exists()


def test_an_empty_root_is_an_error():
    with pytest.raises(ConfigError, match="empty"):
        open_storage("")


def test_a_local_root_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert open_storage("sub").uri == str(tmp_path / "sub")
    assert isinstance(open_storage("memory://a").filesystem, fsspec.implementations.memory.MemoryFileSystem)
