from pathlib import Path

import pytest
from ray_session import IGNORED_WARNINGS, ensure_ray, leave_ray


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(180))
            for ignored in IGNORED_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(ignored))


def pytest_runtest_teardown(item, nextitem):
    leave_ray(nextitem)


@pytest.fixture
def ray_cluster():
    """A local Ray with 2 CPUs, shared by all tests that need no other."""
    ensure_ray(2)
