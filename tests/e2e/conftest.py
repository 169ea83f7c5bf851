from pathlib import Path

from ray_session import leave_ray, mark_tests


def pytest_collection_modifyitems(items):
    # A start of Ray Train takes 10 s where nothing else runs and minutes where much does; a test has up to two.
    mark_tests(items, Path(__file__).parent, 600)


def pytest_runtest_teardown(item, nextitem):
    leave_ray(nextitem)
