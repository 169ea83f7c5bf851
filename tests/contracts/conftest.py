from pathlib import Path

import pytest
from batches import WINDOWS, rows_spec, varied_spec
from ray_session import IGNORED_WARNINGS, ensure_ray, leave_ray

from raypipe.dataset import open_dataset
from raypipe.testing import write_dataset


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(180))
            for ignored in IGNORED_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(ignored))


def pytest_runtest_teardown(item, nextitem):
    leave_ray(nextitem)


@pytest.fixture(autouse=True)
def rows_by_ray(monkeypatch):
    """All rows come by Ray: here it is asked what Ray delivers, and ranks would have read tiny datasets themselves."""
    monkeypatch.setattr("raypipe.feed.feeder.can_read_here", lambda _: False)


@pytest.fixture
def ray_cluster():
    """A local Ray with 2 CPUs, shared by all tests that need no other."""
    ensure_ray(2)


@pytest.fixture(scope="session")
def varied(tmp_path_factory):
    """Open datasets of 57 frames with windows on everything, by format version."""
    roots = tmp_path_factory.mktemp("varied")
    return {
        version: open_dataset(str(write_dataset(roots / version, varied_spec(version)))).windowed(offsets=WINDOWS)
        for version in ("v2.0", "v2.1", "v3.0")
    }


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """A dataset of 57 frames without cameras."""
    return open_dataset(str(write_dataset(tmp_path_factory.mktemp("rows") / "dataset", rows_spec())))
