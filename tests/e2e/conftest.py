from pathlib import Path

import pytest
from ray_session import IGNORED_WARNINGS, leave_ray


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            # A start of Ray Train takes 10 s where nothing else runs and minutes where much does; a test has up to two.
            item.add_marker(pytest.mark.timeout(600))
            for ignored in IGNORED_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(ignored))


def pytest_runtest_teardown(item, nextitem):
    leave_ray(nextitem)
