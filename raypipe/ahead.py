"""`Ahead`: the run of an epoch that follows, started by a thread while the one before it ends."""

import threading
from collections.abc import Callable

from raypipe.plan import WorldPlan
from raypipe.run import EpochRun

Started = tuple[WorldPlan, EpochRun]


class Ahead:
    """The run of the next epoch, being started by a thread."""

    def __init__(self, begin: Callable[[], Started]) -> None:
        self._result: Started | BaseException | None = None
        self._begin = begin
        self._thread = threading.Thread(target=self._work, name="raypipe-next-epoch", daemon=True)
        self._thread.start()

    def take(self) -> Started:
        """Return the plan and the run, when they are ready."""
        self._thread.join()
        if isinstance(self._result, BaseException):
            raise self._result
        assert self._result is not None
        return self._result

    def discard(self) -> None:
        """Close the run, when it is ready; what went wrong with it is nobody's concern."""
        self._thread.join()
        if isinstance(self._result, tuple):
            self._result[1].close()

    def _work(self) -> None:
        try:
            self._result = self._begin()
        except BaseException as error:
            self._result = error
