"""One budget of requests for all processes of a Ray cluster: an actor that every one of them asks.

The actor has a name, so that all pipelines and jobs share it. Whoever needs it first makes it. It is detached: it does
not end with the process that made it, which may be a read task, but when nobody has asked it for a while. One that is
made in place of one that was lost begins empty. A request to the Hub takes tens of milliseconds, and there are seven of
them in a second: one call of an actor for each, or two where it has to wait, costs nothing beside it.
"""

import threading
import time
from typing import Any, Final

import ray

from raypipe.storage.request_budget import HUB_PERIOD_S, Budget, Turn, current_gate, own_budget, use_gate

_NAME: Final = "raypipe-requests-2"
"""To be changed with what is asked and answered: jobs of two versions may meet on a cluster."""
_NAMESPACE: Final = "raypipe"

_LOST_WAIT_S: Final = 1.0
"""Before the actor is asked for again, where it was lost."""

IDLE_S: Final = 2 * HUB_PERIOD_S
"""After so long without a request the actor ends, with its process of some 100 MB. By then nothing that it knows
matters."""

_PAUSE_TRIES: Final = 3
"""Actors that are told of a pause, where one after the other is lost; whoever was told to wait waits in any case."""


class SharedBudget(Budget):
    """The budget of the cluster, as an actor; ends by itself when it is idle."""

    def __init__(self, *, is_empty: bool = False, idle_s: float = IDLE_S) -> None:
        super().__init__(is_empty=is_empty)
        self._asked_at = time.monotonic()
        actor = ray.get_runtime_context().current_actor
        threading.Thread(target=self._end_when_idle, args=(actor, idle_s), daemon=True).start()

    def take(self, turn: Turn | None = None) -> Turn:
        """Count a request and return its turn; see `Budget`."""
        # Not back from the end of a pause.
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
        """Whether there was an actor that is gone. If it ended for idleness, the next is emptier than it need be."""
        self._joined = ""
        """Who this process is in the cluster of the actor: another one where it has left and joined again."""

    def take(self, turn: Turn | None = None) -> Turn:
        """Return the next turn of the cluster, or how long it still takes to the one that was given before."""
        if not ray.is_initialized():
            # The process has left its cluster, as a notebook may.
            return own_budget().take(turn)
        try:
            given: Turn = ray.get(self._find().take.remote(turn))
            return given
        except ray.exceptions.RayActorError:
            # Ended, perhaps with its node.
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
                # The one that is made in its place must know too.
                self._lose()

    def tell_sent(self) -> None:
        """Let the cluster know of what this process has sent by its own budget, if anything."""
        if ray.is_initialized() and own_budget().num_recent():
            self._find()

    def _lose(self) -> None:
        with self._lock:
            self._actor, self._is_lost = None, True

    def _find(self) -> Any:
        here = ray.get_runtime_context()
        # Jobs are numbered from 1 in every cluster, and nodes are named at random.
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
    """Let this process, which is of a Ray cluster, send requests to the Hub by the cluster's budget."""
    if not isinstance(current_gate(), ClusterGate):
        gate = ClusterGate()
        gate.tell_sent()
        use_gate(gate)
