"""Runs units of work in this process or as Ray tasks; decides nothing.

A unit writes one file, or a few, and may run twice. So a unit is retried when storage fails for a while, and Ray
retries it when a worker dies. An error in the data is raised as it is and ends the run; finished files stay.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar, get_args

from raypipe.errors import ConfigError, suggest
from raypipe.storage import retry_transient
from raypipe.text import is_shown, open_console

CopyWhere = Literal["auto", "process", "ray"]

_SMALL_BYTES = 200 << 20
"""A smaller dataset is copied in this process in less time than Ray needs to start: about 5 s."""

Shared = TypeVar("Shared")
Work = TypeVar("Work")
Made = TypeVar("Made")

_IN_FLIGHT_PER_CPU = 2
"""One task runs and one waits, so that no CPU waits for the driver."""


class Runner(Protocol):
    """Runs a function over units."""

    def run(
        self, title: str, work: Callable[[Shared, Work], Made], shared: Shared, units: Sequence[Work]
    ) -> list[Made]:
        """Return ``work(shared, unit)`` for every unit, in the order of the units."""
        ...


def choose_where(where: CopyWhere, size_bytes: int, *, is_reencoded: bool) -> CopyWhere:
    """Return where to run: in this process if the dataset is small and no pixels are encoded, else on Ray."""
    if where not in get_args(CopyWhere):
        raise ConfigError(f"where is {where!r}{suggest(where, get_args(CopyWhere))}")
    if where != "auto":
        return where
    return "process" if size_bytes < _SMALL_BYTES and not is_reencoded else "ray"


@contextmanager
def open_runner(where: CopyWhere, *, progress: bool) -> Iterator[Runner]:
    """Give a runner for the chosen place; start Ray if it is not running, and shut it down again afterwards."""
    with _bars(is_on=progress) as bars:
        if where == "process":
            yield _InProcess(bars)
            return
        import ray

        was_there = ray.is_initialized()
        if not was_there:
            ray.init(logging_level="warning", log_to_driver=False)
        try:
            yield _OnRay(bars)
        finally:
            if not was_there:
                ray.shutdown()


class _InProcess:
    def __init__(self, bars: "_Bars") -> None:
        self._bars = bars

    def run(
        self, title: str, work: Callable[[Shared, Work], Made], shared: Shared, units: Sequence[Work]
    ) -> list[Made]:
        advance = self._bars.add(title, len(units))
        results = []
        for unit in units:
            results.append(_work(work, shared, unit))
            advance()
        return results


class _OnRay:
    def __init__(self, bars: "_Bars") -> None:
        self._bars = bars

    def run(
        self, title: str, work: Callable[[Shared, Work], Made], shared: Shared, units: Sequence[Work]
    ) -> list[Made]:
        import ray

        from raypipe.storage import share_gate

        # Counts what this process has already asked of the Hub, too.
        share_gate()
        advance = self._bars.add(title, len(units))
        remote = ray.remote(num_cpus=1)(_work_on_ray)
        # Send it once for all tasks: the episode table of a large dataset takes megabytes.
        everywhere = ray.put(shared)
        limit = max(1, int(_IN_FLIGHT_PER_CPU * ray.cluster_resources().get("CPU", 1)))
        results: dict[int, Made] = {}
        pending: dict[Any, int] = {}
        left = iter(enumerate(units))
        # After an error, let tasks in flight finish: they write whole files that are still wanted. Cancelling a task
        # that is just ending aborts the driver in Ray 2.60 ("tried to complete task that was not pending").
        while len(results) < len(units):
            while len(pending) < limit and (taken := next(left, None)) is not None:
                pending[remote.remote(work, everywhere, taken[1])] = taken[0]
            done, _ = ray.wait(list(pending), num_returns=1)
            results[pending.pop(done[0])] = _result(done[0])
            advance()
        return [results[number] for number in range(len(units))]


def _work(work: Callable[[Shared, Work], Made], shared: Shared, unit: Work) -> Made:
    return retry_transient(lambda: work(shared, unit))


def _work_on_ray(work: Callable[[Shared, Work], Made], shared: Shared, unit: Work) -> Made:
    from raypipe.storage import share_gate

    share_gate()
    return _work(work, shared, unit)


def _result(reference: Any) -> Any:
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        # Raise the original error, as if it came from here: its text names the file and the remedy.
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise


class _Bars(Protocol):
    def add(self, title: str, total: int) -> Callable[[], None]:
        """Show a bar; call the returned function to advance it by one."""
        ...


class _NoBars:
    def add(self, title: str, total: int) -> Callable[[], None]:  # noqa: ARG002
        return lambda: None


class _RichBars:
    def __init__(self, progress: Any) -> None:
        self._progress = progress

    def add(self, title: str, total: int) -> Callable[[], None]:
        task = self._progress.add_task(title, total=total)
        return lambda: self._progress.advance(task)


@contextmanager
def _bars(*, is_on: bool) -> Iterator[_Bars]:
    """Show bars while the body runs, if `is_on`, at a terminal or in a notebook."""
    if not is_on or not is_shown():
        yield _NoBars()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=open_console(stderr=True)) as progress:
        yield _RichBars(progress)
