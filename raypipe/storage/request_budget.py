"""Requests to remote storage: counted in every process, and delayed by a gate that keeps a budget.

The Hub allows a user 3,000 requests in 5 minutes, from all machines together. A single process keeps this budget by
itself; on a Ray cluster `raypipe.storage.cluster_budget` replaces it with one gate for all processes. This module
decides when a request may be sent, how long to wait for a server, and how slowly a body may arrive; not what is
requested.
"""

import email.utils
import math
import re
import threading
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

HUB_REQUESTS: Final = 3000
"""Requests that the Hub allows a user in `HUB_PERIOD_S`."""

HUB_PERIOD_S: Final = 300.0

_BURST_SHARE: Final = 3
"""A third of the requests may be sent at once; the rest accrue evenly, so that no period exceeds the limit."""

SILENCE_S: Final = 30.0
"""How long a server may send nothing. The Hub uses ``HF_HUB_DOWNLOAD_TIMEOUT`` instead, and S3 the limit of s3fs."""

PACE_S = 60.0
"""After each such time of waiting in total, a body must have brought `PACE_BYTES` since the last check."""

PACE_BYTES = 64 << 10
"""About 1 kB/s, for each body. A file may have any size and take any time, but a server that sends a byte now and then
is as good as silent: at this rate, a dataset of 1 GB would take eleven days."""

LONG_WAIT_S: Final = 10.0
"""raypipe warns of waits of at least this length."""

_SECONDS: Final = re.compile("[0-9]{1,9}")

_ROUNDING: Final = 1e-9
"""In requests. A smaller rest counts as none, so that a caller who waits the full time never has to wait again."""


@dataclass(frozen=True, slots=True)
class Turn:
    """When a request may be sent."""

    wait_s: float
    """Counted from the call of the gate; 0 means now."""
    due_s: float = 0.0
    """On the clock of the budget that gave the turn."""
    budget: str = ""
    """The name of that budget; another budget gives a new turn."""


class Gate(Protocol):
    """Decides when requests may be sent, for one process or for many."""

    def take(self, turn: Turn | None = None) -> Turn:
        """Return the next free turn, or the remaining wait for a turn given before.

        After its wait, a caller asks again with its turn: there may have been a pause in between.
        """
        ...

    def pause(self, wait_s: float) -> None:
        """Let nothing through for a while, as the server has asked."""
        ...


@dataclass
class Budget:
    """At most `limit` requests in any period of `period_s` seconds; a `Gate` for the threads of one process.

    Callers get turns in the order of their calls; an unused turn is lost. The budget's clock stops during a pause, so
    that waiting callers do not all send at its end.
    """

    limit: int = HUB_REQUESTS
    period_s: float = HUB_PERIOD_S
    clock: Callable[[], float] = time.monotonic
    is_empty: bool = False
    """Whether it starts with no requests left: it replaces a lost budget whose state is unknown."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._name = uuid.uuid4().hex
        self._burst = max(1, self.limit // _BURST_SHARE)
        # The rest of the limit accrues evenly: burst and refill of a whole period add up to the limit.
        self._per_s = max(self.limit - self._burst, 1) / self.period_s
        # Negative while given turns are still due.
        self._left = 0.0 if self.is_empty else float(self._burst)
        self._own_s = 0.0
        self._told_at = self.clock()
        self._closed_until = self._told_at
        self.num_granted = 0

    def take(self, turn: Turn | None = None) -> Turn:
        """Count a request and return its turn, or the remaining wait for a turn given before."""
        with self._lock:
            now = self._advance()
            if turn is None or turn.budget != self._name:
                self._left -= 1
                self.num_granted += 1
                # The turn is due when `_left` is back at 0.
                due_s = self._own_s + max(0.0, -self._left) / self._per_s
            else:
                due_s = turn.due_s
            left_s = due_s - self._own_s
            wait_s = left_s if left_s > _ROUNDING / self._per_s else 0.0
            return Turn(wait_s + max(0.0, self._closed_until - now), due_s, self._name)

    def pause(self, wait_s: float) -> None:
        """Let nothing through for `wait_s` seconds from now."""
        with self._lock:
            self._closed_until = max(self._closed_until, self._advance() + wait_s)

    def spend(self, num_requests: int) -> None:
        """Count requests that were sent before this budget was asked."""
        with self._lock:
            self._advance()
            self._left = min(self._left, max(0.0, self._left - num_requests))
            self.num_granted += num_requests

    def num_recent(self) -> int:
        """Return how many granted requests the refill has not made up for yet."""
        with self._lock:
            self._advance()
            return math.ceil(self._burst - self._left - _ROUNDING)

    def _advance(self) -> float:
        """Advance the budget's own clock, and return the present time."""
        now = self.clock()
        open_s = max(0.0, now - max(self._told_at, self._closed_until))
        self._own_s += open_s
        self._left = min(float(self._burst), self._left + open_s * self._per_s)
        self._told_at = now
        return now


class _Process:
    """The number of requests that this process has sent, and the gate that it asks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_requests = 0
        self.own = Budget()
        self.gate: Gate = self.own


_process = _Process()


def count_requests(num_requests: int = 1) -> None:
    """Count requests of this process."""
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
    """Send all requests of this process through another gate from now on."""
    _process.gate = gate


def own_budget() -> Budget:
    """Return the budget that this process keeps while no other gate is used."""
    return _process.own


class TooSlowError(ConnectionError):
    """A body arrives more slowly than `PACE_BYTES` in `PACE_S`. Not a `TimeoutError`: fsspec drops its message."""


class Pace:
    """Checks how fast a body arrives; counts the time spent waiting for it, not the time spent writing or using it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waited_s = 0.0
        self._received = 0

    def follow(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the pieces of a body as they arrive.

        Raises:
            TooSlowError: they arrive too slowly.
        """
        while True:
            asked_at = self._clock()
            piece = next(pieces, None)
            self._note(asked_at, piece)
            if piece is None:
                return
            yield piece

    async def follow_async(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Do the same as `follow`."""
        while True:
            asked_at = self._clock()
            piece = await anext(pieces, None)
            self._note(asked_at, piece)
            if piece is None:
                return
            yield piece

    def _note(self, asked_at: float, piece: bytes | None) -> None:
        if piece is None:
            return
        self._waited_s += self._clock() - asked_at
        self._received += len(piece)
        if self._waited_s < PACE_S:
            return
        if self._received < PACE_BYTES:
            raise TooSlowError(
                f"{self._received} bytes came in {self._waited_s:.1f} s, fewer than {PACE_BYTES} in {PACE_S:g} s"
            )
        self._waited_s, self._received = 0.0, 0


def parse_wait_s(given: str) -> float:
    """Return the seconds that a header ``Retry-After`` asks to wait, a number or a date; 0 if it is neither."""
    given = given.strip()
    if _SECONDS.fullmatch(given):
        return float(given)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def say_wait(wait_s: float, why: str) -> None:
    """Warn of a long wait before it begins."""
    if wait_s >= LONG_WAIT_S:
        warnings.warn(f"waits for {wait_s:.0f} s: {why}", stacklevel=2)
