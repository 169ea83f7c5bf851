from pathlib import Path

import pytest
from batches import rows as rows
from batches import varied as varied
from ray_session import ensure_ray, leave_ray, mark_tests


def pytest_collection_modifyitems(items):
    mark_tests(items, Path(__file__).parent, 180)


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
