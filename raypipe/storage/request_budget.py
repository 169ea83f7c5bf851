"""Requests to remote storage: counted in every process, let through by a gate that keeps a budget, and given up.

The Hub allows 3,000 requests in 5 minutes to a user, wherever they come from. A process keeps to that by itself; on a
Ray cluster `raypipe.storage.cluster_budget` puts one gate for all processes in its place. Decides when a request may be
sent, for how long a server may make us wait, and how slowly a body may come; not what is asked.
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
"""What the Hub allows to a user in `HUB_PERIOD_S`."""

HUB_PERIOD_S: Final = 300.0

_BURST_SHARE: Final = 3
"""A third of the requests may come at once; the rest come as time goes by: no period holds more than allowed."""

SILENCE_S: Final = 30.0
"""How long a server may send nothing. The Hub's is ``HF_HUB_DOWNLOAD_TIMEOUT``, and S3's that of s3fs."""

PACE_S = 60.0
"""A body that has been waited for so long in all must have brought `PACE_BYTES` since it was last looked at."""

PACE_BYTES = 64 << 10
"""About 1 kB/s, for each body. A file may be of any size and take any time, but a server that sends a byte now and then
is as good as silent: at this rate, a dataset of 1 GB would take eleven days."""

LONG_WAIT_S: Final = 10.0
"""A wait that is longer is said."""

_SECONDS: Final = re.compile("[0-9]{1,9}")

_ROUNDING: Final = 1e-9
"""Of a request: who waits for as long as told shall not be told to wait for a rest that rounding has left."""


@dataclass(frozen=True, slots=True)
class Turn:
    """When a request may be sent."""

    wait_s: float
    """From the moment at which the gate was asked; 0: now."""
    due_s: float = 0.0
    """On the clock of the budget that gave it."""
    budget: str = ""
    """Which one that was; another one gives another turn."""


class Gate(Protocol):
    """Whoever lets requests through, for one process or for many."""

    def take(self, turn: Turn | None = None) -> Turn:
        """Return the next turn that is free, or how long it still takes to the one that was given before.

        Whoever has waited as told asks again with the turn: there may have been a pause in between.
        """
        ...

    def pause(self, wait_s: float) -> None:
        """Let nothing through for a while: the other side has asked for it."""
        ...


@dataclass
class Budget:
    """At most `limit` requests in any period of `period_s` seconds; a `Gate` for the threads of one process.

    Turns are given in the order in which they are asked for, each once: one that is not used is lost. They are counted
    on a clock that stands still in a pause, so that those who wait do not all come at its end.
    """

    limit: int = HUB_REQUESTS
    period_s: float = HUB_PERIOD_S
    clock: Callable[[], float] = time.monotonic
    is_empty: bool = False
    """Whether it begins with nothing left: it takes the place of one that was lost, and of that nothing is known."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._name = uuid.uuid4().hex
        self._burst = max(1, self.limit // _BURST_SHARE)
        # What is left of the limit comes back evenly: burst and refill of a whole period together are the limit.
        self._per_s = max(self.limit - self._burst, 1) / self.period_s
        # Below 0 where turns are given that are still to come.
        self._left = 0.0 if self.is_empty else float(self._burst)
        self._own_s = 0.0
        self._told_at = self.clock()
        self._closed_until = self._told_at
        self.num_granted = 0

    def take(self, turn: Turn | None = None) -> Turn:
        """Count a request and return its turn, or how long it still takes to the one that was given before."""
        with self._lock:
            now = self._advance()
            if turn is None or turn.budget != self._name:
                self._left -= 1
                self.num_granted += 1
                # It is there when what is left has come back to 0.
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
        """Return how many requests have been let through that time has not made up for."""
        with self._lock:
            self._advance()
            return math.ceil(self._burst - self._left - _ROUNDING)

    def _advance(self) -> float:
        """Let the own clock go on to the present, which is returned."""
        now = self.clock()
        open_s = max(0.0, now - max(self._told_at, self._closed_until))
        self._own_s += open_s
        self._left = min(float(self._burst), self._left + open_s * self._per_s)
        self._told_at = now
        return now


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


class TooSlowError(ConnectionError):
    """A body comes more slowly than `PACE_BYTES` in `PACE_S`. No `TimeoutError`: fsspec would drop what it says."""


class Pace:
    """Looks how fast a body comes: by the time that it is waited for, not by that in which it is written or used."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waited_s = 0.0
        self._received = 0

    def follow(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the pieces of a body as they come.

        Raises:
            TooSlowError: they come too slowly.
        """
        while True:
            asked_at = self._clock()
            piece = next(pieces, None)
            self._note(asked_at, piece)
            if piece is None:
                return
            yield piece

    async def follow_async(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield what `follow` does."""
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
    """Return for how many seconds a header ``Retry-After`` asks to wait: a number or a date; 0 where it is neither."""
    given = given.strip()
    if _SECONDS.fullmatch(given):
        return float(given)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def say_wait(wait_s: float, why: str) -> None:
    """Warn of a wait that is long, before it begins."""
    if wait_s >= LONG_WAIT_S:
        warnings.warn(f"waits for {wait_s:.0f} s: {why}", stacklevel=2)
