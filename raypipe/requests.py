"""Requests to remote storage: counted in every process, and let through by a gate that keeps a budget.

The Hub allows 3,000 requests in 5 minutes to a user, wherever they come from. A process keeps to that by itself; on a
Ray cluster `raypipe.cluster_gate` puts one gate for all processes in its place. Decides when a request may be sent,
not what is asked.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

HUB_REQUESTS: Final = 3000
"""What the Hub allows to a user in `HUB_PERIOD_S`."""

HUB_PERIOD_S: Final = 300.0

_BURST_SHARE: Final = 3
"""A third of the requests may come at once; the rest come as time goes by: no period holds more than allowed."""

_ROUNDING: Final = 1e-9
"""Of a request: who waits for as long as told shall not be told to wait for a rest that rounding has left."""


class Gate(Protocol):
    """Whoever lets requests through, for one process or for many."""

    def take(self) -> float:
        """Return 0 where a request may be sent now, else for how many seconds to wait before asking again."""
        ...

    def pause(self, wait_s: float) -> None:
        """Let nothing through for a while: the other side has asked for it."""
        ...


@dataclass
class Budget:
    """At most `limit` requests in any period of `period_s` seconds; a `Gate` for the threads of one process."""

    limit: int = HUB_REQUESTS
    period_s: float = HUB_PERIOD_S
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._burst = max(1, self.limit // _BURST_SHARE)
        # What is left of the limit comes back evenly: burst and refill of a whole period together are the limit.
        self._per_s = max(self.limit - self._burst, 1) / self.period_s
        self._left = float(self._burst)
        self._told_at = self.clock()
        self._closed_until = self._told_at
        self.num_granted = 0

    def take(self) -> float:
        """Return 0 and count a request, or the seconds until one may be sent."""
        with self._lock:
            now = self.clock()
            self._left = min(float(self._burst), self._left + (now - self._told_at) * self._per_s)
            self._told_at = now
            if now < self._closed_until:
                return self._closed_until - now
            if self._left < 1 - _ROUNDING:
                return (1 - self._left) / self._per_s
            self._left -= 1
            self.num_granted += 1
            return 0.0

    def pause(self, wait_s: float) -> None:
        """Let nothing through for `wait_s` seconds from now."""
        with self._lock:
            self._closed_until = max(self._closed_until, self.clock() + wait_s)

    def spend(self, num_requests: int) -> None:
        """Count requests that were sent before this budget was asked."""
        with self._lock:
            self._left = max(0.0, self._left - num_requests)
            self.num_granted += num_requests


class _Process:
    """What this process has sent, and the gate that it asks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_requests = 0
        self.own = Budget()
        self.gate: Gate = self.own


_process = _Process()


def count_requests(num_requests: int = 1) -> None:
    """Note requests of this process."""
    with _process.lock:
        _process.num_requests += num_requests


def num_requests() -> int:
    """Return how many requests this process has sent so far, to the Hub and to any other remote storage."""
    with _process.lock:
        return _process.num_requests


def current_gate() -> Gate:
    """Return the gate that requests to the Hub pass."""
    return _process.gate


def use_gate(gate: Gate) -> None:
    """Let all requests of this process pass another gate from now on."""
    _process.gate = gate


def own_budget() -> Budget:
    """Return the budget that this process keeps while no other gate is used."""
    return _process.own
