"""Fetches that nobody waits for yet, on a few background threads."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from raypipe.errors import ConfigError
from raypipe.storage.node_cache.fetching import Wanted


class Prefetcher:
    """Runs `run` for the files that are asked for, in their order, `num_threads` at once.

    A thread ends when nothing is left to do. Threads do not keep the process from ending: a fetch that is cut off so is
    as if it was killed.
    """

    def __init__(self, run: Callable[[Wanted], bool], num_threads: int) -> None:
        self._run = run
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._queue: deque[tuple[Wanted, Future[bool]]] = deque()
        self._pending: dict[str, Future[bool]] = {}
        """By key: waiting or running."""
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def submit(self, wanted: Wanted) -> "Future[bool]":
        """Return the outcome of fetching a file; the one that is under way, if it was asked for before."""
        with self._lock:
            if self._is_closed:
                raise ConfigError(f"cannot fetch {wanted.key!r} ahead: the cache is closed. Open another FileCache.")
            pending = self._pending.get(wanted.key)
            # One that its caller has cancelled is as good as not asked for.
            if pending is not None and not pending.cancelled():
                return pending
            future: Future[bool] = Future()
            self._pending[wanted.key] = future
            self._queue.append((wanted, future))
            if len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._work, name="raypipe-prefetch", daemon=True)
                self._threads.add(thread)
                thread.start()
            return future

    def close(self) -> None:
        """Cancel what has not begun, and return when the rest has ended."""
        with self._lock:
            self._is_closed = True
            for _, future in self._queue:
                future.cancel()
            self._queue.clear()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._threads.discard(threading.current_thread())
                    return
                wanted, future = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                self._fulfil(wanted, future)
            with self._lock:
                if self._pending.get(wanted.key) is future:
                    del self._pending[wanted.key]

    def _fulfil(self, wanted: Wanted, future: "Future[bool]") -> None:
        try:
            is_there = self._run(wanted)
        except BaseException as error:
            # Not lost: the future raises it, and whoever comes to use the file will meet it too.
            future.set_exception(error)
        else:
            future.set_result(is_there)
