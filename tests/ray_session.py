"""One local Ray for the tests that need it, started when first asked for; and ranks as threads of this process."""

import threading
from pathlib import Path

import pytest
import ray

from raypipe.feed.feeder import end_feeders

RAY_FOLDERS = {"contracts", "e2e", "faults"}

IGNORED_WARNINGS = (
    # Ray warns of its own settings when it copies a DataContext, whatever they are.
    "ignore::DeprecationWarning:ray.data.context",
    # Ray's fetching thread of a rank that still waits for a failed one when Ray ends.
    "ignore:Exception in thread iter_threaded:pytest.PytestUnhandledThreadExceptionWarning",
)


def ensure_ray(num_cpus: int = 2) -> None:
    """Use the local Ray that is there, or start one: another one only for another number of CPUs."""
    if ray.is_initialized():
        if ray.cluster_resources().get("CPU") == num_cpus:
            return
        end_ray()
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, logging_level="warning", log_to_driver=False)


def mark_tests(items, folder: Path, timeout_s: int) -> None:
    """Give the tests below a folder their time limit, and let them pass over what Ray warns of."""
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(pytest.mark.timeout(timeout_s))
            for ignored in IGNORED_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(ignored))


def leave_ray(nextitem) -> None:
    """End Ray unless the next test needs it too: tests without Ray forbid what its threads may do."""
    is_next = nextitem is not None and (
        RAY_FOLDERS & set(nextitem.path.parts) or nextitem.path.name == "test_tripwires.py"
    )
    if not is_next:
        end_ray()


def end_ray() -> None:
    """End Ray when no thread of a loader stands in a call of it: that would end this process too."""
    end_feeders(wait_s=60.0)
    ray.shutdown()


def run_ranks(loaders, consume=list, timeout_s=150.0) -> list:
    """Let every rank consume its loader in a thread of its own, as ranks do; return what each gave, in order.

    Raises:
        the error of the lowest rank that failed.
    """
    results: list = [None] * len(loaders)
    errors: list = [None] * len(loaders)

    def work(rank):
        try:
            results[rank] = consume(loaders[rank])
        except BaseException as error:
            errors[rank] = error

    # Daemons: a rank that waits for one that failed must not keep the test run alive.
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(loaders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not any(errors) and timeout_s > 0:
            thread.join(timeout=0.1)
            timeout_s -= 0.1
    failed = [error for error in errors if error is not None]
    if failed:
        raise failed[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
