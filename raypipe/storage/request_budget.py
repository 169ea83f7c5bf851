"""Requests to remote storage: counted in every process, and delayed by a gate that keeps a budget.

The Hub allows a user 3,000 requests in 5 minutes, from all machines together. A single process keeps this budget by
itself. On a Ray cluster an actor keeps it for all processes: it has a name, so that all pipelines and jobs share it,
and the first process that needs it creates it. It is detached: it outlives that process, which may be a read task, and
ends after some time without requests. An actor that replaces a lost one starts empty. The cost is negligible: a request
to the Hub takes tens of milliseconds, the budget allows seven a second, and each needs one call of the actor, or two if
it has to wait.

This module decides when a request may be sent, how long to wait for a server, and how slowly a body may arrive; not
what is requested.
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
from typing import Any, Final

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

_NAME: Final = "raypipe-requests-2"
"""Of the cluster's actor. Change the number with its interface: jobs of two versions may share a cluster."""

_NAMESPACE: Final = "raypipe"

_LOST_WAIT_S: Final = 1.0
"""Wait before asking for a new actor after one was lost."""

IDLE_S: Final = 2 * HUB_PERIOD_S
"""After this time without a request the actor ends, and with it its process of about 100 MB. By then its state no
longer matters."""

_PAUSE_TRIES: Final = 3
"""Attempts to pass a pause on when one actor after the other is lost. The process that the Hub asked waits anyway."""


@dataclass(frozen=True, slots=True)
class Turn:
    """When a request may be sent."""

    wait_s: float
    """Counted from the call of the gate; 0 means now."""
    due_s: float = 0.0
    """On the clock of the budget that gave the turn."""
    budget: str = ""
    """The name of that budget; another budget gives a new turn."""


@dataclass
class Budget:
    """At most `limit` requests in any period of `period_s` seconds, for the threads of one process.

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
        """Count a request and return its turn, or the remaining wait for a turn given before.

        After its wait, a caller asks again with its turn: there may have been a pause in between.
        """
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
        """Let nothing through for `wait_s` seconds from now, as the server has asked."""
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
        self.gate: Budget | ClusterGate = self.own


_process = _Process()


def count_requests(num_requests: int = 1) -> None:
    """Count requests of this process."""
    with _process.lock:
        _process.num_requests += num_requests


def num_requests() -> int:
    """Return how many requests this process has sent so far, to the Hub and to any other remote storage."""
    with _process.lock:
        return _process.num_requests


def current_gate() -> "Budget | ClusterGate":
    """Return the gate that requests to the Hub pass."""
    return _process.gate


def use_gate(gate: "Budget | ClusterGate") -> None:
    """Send all requests of this process through another gate from now on."""
    _process.gate = gate


class SharedBudget(Budget):
    """The budget of the cluster, as an actor; ends by itself when idle."""

    def __init__(self, *, is_empty: bool = False, idle_s: float = IDLE_S) -> None:
        import ray

        super().__init__(is_empty=is_empty)
        actor = ray.get_runtime_context().current_actor

        def end_when_idle() -> None:
            # The end of a pause may lie in the future.
            while (left_s := max(self._told_at, self._closed_until) + idle_s - self.clock()) > 0:
                time.sleep(left_s)
            ray.kill(actor)

        threading.Thread(target=end_when_idle, daemon=True).start()


class ClusterGate:
    """Asks the actor for every request."""

    def __init__(self) -> None:
        import ray

        self._ray = ray
        self._lock = threading.Lock()
        self._actor: Any = None
        self._is_lost = False
        """Whether an earlier actor is gone. If it ended for idleness, the next one starts emptier than necessary."""
        self._joined = ""
        """Node and job of this process in the actor's cluster; they change when the process leaves and joins again."""
        if ray.is_initialized() and _process.own.num_recent():
            # The cluster must know what this process has sent by its own budget.
            self._find()

    def take(self, turn: Turn | None = None) -> Turn:
        """Return the next turn of the cluster, or the remaining wait for a turn given before."""
        given: list[Turn] = self._ask("take", turn)
        return given[0] if given else Turn(_LOST_WAIT_S)

    def pause(self, wait_s: float) -> None:
        """Let no process of the cluster send anything for a while."""
        for _ in range(_PAUSE_TRIES):
            # The replacement of a lost actor must know of the pause too.
            if self._ask("pause", wait_s):
                return

    def _ask(self, method: str, told: Any) -> list[Any]:
        """Return what the budget answers, alone in a list; nothing if the actor is lost, perhaps with its node."""
        if not self._ray.is_initialized():
            # The process has left its cluster, as a notebook may do.
            return [getattr(_process.own, method)(told)]
        try:
            return [self._ray.get(getattr(self._find(), method).remote(told))]
        except self._ray.exceptions.RayActorError:
            with self._lock:
                self._actor, self._is_lost = None, True
            return []

    def _find(self) -> Any:
        here = self._ray.get_runtime_context()
        # Jobs are numbered from 1 in every cluster, but node ids are random.
        joined = f"{here.get_node_id()} {here.get_job_id()}"
        with self._lock:
            if self._joined != joined:
                self._joined, self._actor, self._is_lost = joined, None, False
            if self._actor is None:
                actor = self._ray.remote(num_cpus=0, max_concurrency=64)(SharedBudget)
                named = actor.options(name=_NAME, namespace=_NAMESPACE, lifetime="detached", get_if_exists=True)
                self._actor = named.remote(is_empty=self._is_lost)
                self._actor.spend.remote(_process.own.num_recent())
            return self._actor


def share_gate() -> None:
    """Make this process, part of a Ray cluster, send requests to the Hub by the cluster's budget."""
    if not isinstance(current_gate(), ClusterGate):
        use_gate(ClusterGate())


class TooSlowError(ConnectionError):
    """A body arrives more slowly than `PACE_BYTES` in `PACE_S`. Not a `TimeoutError`: fsspec drops its message."""


class Pace:
    """Checks how fast a body arrives; counts the time spent waiting for it, not the time spent writing or using it."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._received = 0

    def follow(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the pieces of a body as they arrive; raise a `TooSlowError` if that is too slow."""
        asked_at = time.monotonic()
        for piece in pieces:
            self._note(asked_at, len(piece))
            yield piece
            asked_at = time.monotonic()

    async def follow_async(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Do the same as `follow`."""
        asked_at = time.monotonic()
        async for piece in pieces:
            self._note(asked_at, len(piece))
            yield piece
            asked_at = time.monotonic()

    def _note(self, asked_at: float, num_bytes: int) -> None:
        self._waited_s += time.monotonic() - asked_at
        self._received += num_bytes
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
