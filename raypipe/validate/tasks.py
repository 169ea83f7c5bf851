"""Runs units of work in this process or as Ray tasks, for validate and for reshard; decides nothing about them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

Shared = TypeVar("Shared")
Work = TypeVar("Work")
Made = TypeVar("Made")

_IN_FLIGHT_PER_CPU: Final = 2
"""One task runs and one waits, so that no CPU waits for the driver."""


def run_tasks(
    work: Callable[[Shared, Work], Made],
    shared: Shared,
    tasks: Sequence[Work],
    *,
    on_ray: bool,
    on_crash: Callable[[Work, Exception], list[Work]] | None = None,
) -> Iterator[tuple[Work, Made]]:
    """Yield each task with ``work(shared, task)``: in order in this process, and as they end on Ray.

    The error of a task is raised as it is. Ray runs a task again when its worker dies.

    Args:
        on_crash: called for a task whose workers died twice; returns the tasks to run in its place, or raises.
    """
    if not on_ray:
        yield from ((task, work(shared, task)) for task in tasks)
        return
    import ray

    from raypipe.storage import share_gate

    with running_ray():
        # Counts what this process has already asked of the Hub, too.
        share_gate()
        retries = {} if on_crash is None else {"max_retries": 1}
        remote = ray.remote(num_cpus=1, **retries)(_work_on_ray)
        # Send it once for all tasks: the episode table of a large dataset takes megabytes.
        everywhere = ray.put(shared)
        limit = max(1, int(_IN_FLIGHT_PER_CPU * ray.cluster_resources().get("CPU", 1)))
        waiting = list(tasks)[::-1]
        flying: dict[Any, Work] = {}
        # After an error, let tasks in flight finish: they may write whole files that are still wanted. Cancelling a
        # task that is just ending aborts the driver in Ray 2.60 ("tried to complete task that was not pending").
        while waiting or flying:
            while waiting and len(flying) < limit:
                task = waiting.pop()
                flying[remote.remote(work, everywhere, task)] = task
            done, _ = ray.wait(list(flying), num_returns=1)
            task = flying.pop(done[0])
            try:
                made = _result(done[0])
            except ray.exceptions.WorkerCrashedError as error:
                if on_crash is None:
                    raise
                waiting += on_crash(task, error)
                continue
            yield task, made


def _work_on_ray(work: Callable[[Shared, Work], Made], shared: Shared, task: Work) -> Made:
    from raypipe.storage import share_gate

    share_gate()
    return work(shared, task)


def _result(reference: Any) -> Any:
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        # Raise the original error, as if it came from here: its text names the file and the remedy.
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise


@contextmanager
def running_ray() -> Iterator[None]:
    """Use the running Ray, or start one for the time of the body."""
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(logging_level="warning", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
