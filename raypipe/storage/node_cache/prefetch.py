"""Fetches ahead of need, on a few background threads."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from raypipe.errors import ConfigError
from raypipe.storage.node_cache.fetching import Wanted


class Prefetcher:
    """Runs `run` for the submitted files in order, `num_threads` at a time.

    A thread ends when the queue is empty. Threads do not keep the process alive: a fetch cut off by its end leaves the
    same state as a kill.
    """

    def __init__(self, run: Callable[[Wanted], bool], num_threads: int) -> None:
        self._run = run
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._queue: deque[tuple[Wanted, Future[bool]]] = deque()
        self._pending: dict[str, Future[bool]] = {}
        """Waiting and running fetches, by key."""
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def submit(self, wanted: Wanted) -> "Future[bool]":
        """Queue the fetch of a file and return its future; a file already queued or running keeps its future."""
        with self._lock:
            if self._is_closed:
                raise ConfigError(f"cannot fetch {wanted.key!r} ahead: the cache is closed. Open another FileCache.")
            pending = self._pending.get(wanted.key)
            # A cancelled fetch does not count.
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
        """Cancel fetches that have not begun, and wait for the rest to end."""
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
            # Not lost: the future raises it, and a later use of the file will meet it too.
            future.set_exception(error)
        else:
            future.set_result(is_there)
