from pathlib import Path

import pytest
from ray_session import ensure_ray, leave_ray, mark_tests


def pytest_collection_modifyitems(items):
    mark_tests(items, Path(__file__).parent, 180)


def pytest_runtest_teardown(item, nextitem):
    leave_ray(nextitem)


@pytest.fixture
def ray_cluster():
    """A local Ray with 2 CPUs, shared by all tests that need no other."""
    ensure_ray(2)
