"""Storage that fails for a while, or says in its own words that a file is missing."""

import errno
import sys
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import fsspec
import pytest
from batches import (
    MODES,
    TOP,
    WRIST,
    assert_equals_samples,
    frames_of_all,
    frames_of_dataset,
    local_loader,
    varied_spec,
)
from ray import cloudpickle

from raypipe.dataset import open_dataset
from raypipe.errors import DatasetError
from raypipe.pipeline import Pipeline
from raypipe.storage import Storage
from raypipe.testing import write_dataset

# The workers of Ray cannot import modules of the tests: what is defined here travels to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ORDER = {"live_spans": 3}


@dataclass(frozen=True)
class FlakyStorage(Storage):
    """A folder whose files with `suffix` fail the first two times that they are opened, in whatever process."""

    notes: str = ""
    """A folder that remembers the failures."""
    suffix: str = ""

    def __getstate__(self):
        return {"uri": self.uri, "notes": self.notes, "suffix": self.suffix}

    def size_bytes(self, name):
        self._fail(name)
        return super().size_bytes(name)

    def open_file(self, name):
        self._fail(name)
        return super().open_file(name)

    def _fail(self, name):
        failed = Path(self.notes) / name.replace("/", "_")
        failures = failed.read_text() if failed.exists() else ""
        if name.endswith(self.suffix) and len(failures) < 2:
            failed.write_text(failures + "x")
            raise OSError(errno.EIO, "the storage did not answer", name)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return open_dataset(str(write_dataset(tmp_path_factory.mktemp("storage") / "dataset", varied_spec())))


def flaky(dataset, notes, suffix):
    notes.mkdir()
    # Which columns there are is read from the first file, here and now, before the storage fails.
    opened = replace(
        dataset, meta=replace(dataset.meta, storage=FlakyStorage(dataset.meta.root, notes=str(notes), suffix=suffix))
    )
    opened.__dict__["row_features"] = dataset.row_features
    return opened


@pytest.fixture
def _no_waits(monkeypatch):
    """In this process only: a read that is tried again is tried at once."""
    monkeypatch.setattr("raypipe.storage.retry.RETRY_WAITS_S", (0.0, 0.0, 0.0))


@pytest.mark.usefixtures("_no_waits")
@pytest.mark.parametrize("suffix", [".parquet", ".mp4"])
def test_storage_that_fails_twice_and_then_works_gives_right_data(dataset, tmp_path, suffix):
    pipe = Pipeline(flaky(dataset, tmp_path / "notes", suffix), batch_size=6, seed=0, order=ORDER, decode=MODES["rank"])

    batches = list(local_loader(pipe))

    assert sorted(frames_of_all(batches)) == frames_of_dataset(dataset)
    for batch in batches:
        assert_equals_samples(batch, dataset)


@pytest.mark.usefixtures("ray_cluster")
def test_storage_that_fails_twice_in_read_tasks_gives_right_data(dataset, tmp_path):
    shaky = flaky(dataset, tmp_path / "notes", ".parquet")
    pipe = Pipeline(shaky, batch_size=6, seed=0, order=ORDER, decode=MODES["cluster"])

    batches = list(pipe.loader())

    assert any((tmp_path / "notes").iterdir())
    assert sorted(frames_of_all(batches)) == frames_of_dataset(dataset)
    for batch in batches:
        assert_equals_samples(batch, dataset)


@pytest.fixture
def remote(dataset):
    """The dataset in an object store, as its files."""
    name = f"/raypipe-{uuid.uuid4().hex}"
    store = fsspec.filesystem("memory")
    for path in Path(dataset.meta.root).rglob("*"):
        if path.is_file():
            store.pipe_file(f"{name}/{path.relative_to(dataset.meta.root)}", path.read_bytes())
    yield f"memory:/{name}"
    store.rm(name, recursive=True)


def test_object_store_gives_right_data(dataset, remote):
    pipe = Pipeline(open_dataset(remote), batch_size=6, seed=0, order=ORDER, decode=MODES["rank"])

    batches = list(local_loader(pipe))

    assert sorted(frames_of_all(batches)) == frames_of_dataset(dataset)
    for batch in batches:
        assert_equals_samples(batch, dataset)


@pytest.mark.parametrize(
    "name", ["data/chunk-000/file-001.parquet", f"videos/{TOP}/chunk-000/file-001.mp4"], ids=["rows", "video"]
)
def test_file_missing_in_an_object_store_is_an_error_that_names_it(remote, name):
    dataset = open_dataset(remote, cameras=[TOP, WRIST])
    fsspec.filesystem("memory").rm(f"{dataset.meta.storage.path}/{name}")
    loader = local_loader(Pipeline(dataset, batch_size=6, seed=0, order=ORDER, decode=MODES["rank"]))

    with pytest.raises(DatasetError) as caught:
        list(loader)

    told = "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert name in told
    assert "episode" in told
