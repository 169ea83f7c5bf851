"""One budget of requests for all processes of a Ray cluster, kept by an actor.

The actor has a name, so that all pipelines and jobs share it. The first process that needs it creates it. It is
detached: it outlives that process, which may be a read task, and ends after some time without requests. An actor that
replaces a lost one starts empty. The cost is negligible: a request to the Hub takes tens of milliseconds, the budget
allows seven a second, and each needs one call of the actor, or two if it has to wait.
"""

import threading
import time
from typing import Any, Final

import ray

from raypipe.storage.request_budget import HUB_PERIOD_S, Budget, Turn, current_gate, own_budget, use_gate

_NAME: Final = "raypipe-requests-2"
"""Change the number with the actor's interface: jobs of two versions may share a cluster."""
_NAMESPACE: Final = "raypipe"

_LOST_WAIT_S: Final = 1.0
"""Wait before asking for a new actor after one was lost."""

IDLE_S: Final = 2 * HUB_PERIOD_S
"""After this time without a request the actor ends, and with it its process of about 100 MB. By then its state no
longer matters."""

_PAUSE_TRIES: Final = 3
"""Attempts to pass a pause on when one actor after the other is lost. The process that the Hub asked waits anyway."""


class SharedBudget(Budget):
    """The budget of the cluster, as an actor; ends by itself when idle."""

    def __init__(self, *, is_empty: bool = False, idle_s: float = IDLE_S) -> None:
        super().__init__(is_empty=is_empty)
        self._asked_at = time.monotonic()
        actor = ray.get_runtime_context().current_actor
        threading.Thread(target=self._end_when_idle, args=(actor, idle_s), daemon=True).start()

    def take(self, turn: Turn | None = None) -> Turn:
        """Count a request and return its turn; see `Budget`."""
        # max: the end of a pause may lie in the future.
        self._asked_at = max(self._asked_at, time.monotonic())
        return super().take(turn)

    def pause(self, wait_s: float) -> None:
        """Let nothing through for `wait_s` seconds from now."""
        self._asked_at = max(self._asked_at, time.monotonic() + wait_s)
        super().pause(wait_s)

    def _end_when_idle(self, actor: Any, idle_s: float) -> None:
        while (left_s := self._asked_at + idle_s - time.monotonic()) > 0:
            time.sleep(left_s)
        ray.kill(actor)


class ClusterGate:
    """Asks the actor for every request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actor: Any = None
        self._is_lost = False
        """Whether an earlier actor is gone. If it ended for idleness, the next one starts emptier than necessary."""
        self._joined = ""
        """Node and job of this process in the actor's cluster; they change when the process leaves and joins again."""

    def take(self, turn: Turn | None = None) -> Turn:
        """Return the next turn of the cluster, or the remaining wait for a turn given before."""
        if not ray.is_initialized():
            # The process has left its cluster, as a notebook may do.
            return own_budget().take(turn)
        try:
            given: Turn = ray.get(self._find().take.remote(turn))
            return given
        except ray.exceptions.RayActorError:
            # The actor has ended, perhaps with its node.
            self._lose()
            return Turn(_LOST_WAIT_S)

    def pause(self, wait_s: float) -> None:
        """Let no process of the cluster send anything for a while."""
        if not ray.is_initialized():
            own_budget().pause(wait_s)
            return
        for _ in range(_PAUSE_TRIES):
            try:
                ray.get(self._find().pause.remote(wait_s))
                return
            except ray.exceptions.RayActorError:
                # Its replacement must know of the pause too.
                self._lose()

    def tell_sent(self) -> None:
        """Tell the cluster what this process has sent by its own budget, if anything."""
        if ray.is_initialized() and own_budget().num_recent():
            self._find()

    def _lose(self) -> None:
        with self._lock:
            self._actor, self._is_lost = None, True

    def _find(self) -> Any:
        here = ray.get_runtime_context()
        # Jobs are numbered from 1 in every cluster, but node ids are random.
        joined = f"{here.get_node_id()} {here.get_job_id()}"
        with self._lock:
            if self._joined != joined:
                self._joined, self._actor, self._is_lost = joined, None, False
            if self._actor is None:
                actor = ray.remote(num_cpus=0, max_concurrency=64)(SharedBudget)
                named = actor.options(name=_NAME, namespace=_NAMESPACE, lifetime="detached", get_if_exists=True)
                self._actor = named.remote(is_empty=self._is_lost)
                self._actor.spend.remote(own_budget().num_recent())
            return self._actor


def share_gate() -> None:
    """Make this process, part of a Ray cluster, send requests to the Hub by the cluster's budget."""
    if not isinstance(current_gate(), ClusterGate):
        gate = ClusterGate()
        gate.tell_sent()
        use_gate(gate)
