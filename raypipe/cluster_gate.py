"""One budget of requests for all processes of a Ray cluster: an actor that every one of them asks.

The actor has a name, so that all pipelines and jobs share it. Whoever needs it first makes it; if the process that made
it ends, the next that asks makes another. A request to the Hub takes tens of milliseconds, and there are at most ten of
them in a second: one call of an actor for each costs nothing beside it.
"""

import threading
from typing import Any, Final

import ray

from raypipe.requests import Budget, current_gate, own_budget, use_gate

_NAME: Final = "raypipe-requests"
_NAMESPACE: Final = "raypipe"

_LOST_WAIT_S: Final = 1.0
"""Before the actor is asked for again, where it was lost."""

_PAUSE_TRIES: Final = 3
"""Actors that are told of a pause, where one after the other is lost; whoever was told to wait waits in any case."""


class ClusterGate:
    """Asks the actor for every request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actor: Any = None
        self._joined = ""
        """Who this process is in the cluster of the actor: another one where it has left and joined again."""

    def take(self) -> float:
        """Return 0 where a request may be sent now, else for how many seconds to wait."""
        if not ray.is_initialized():
            # The process has left its cluster, as a notebook may.
            return own_budget().take()
        try:
            return float(ray.get(self._find().take.remote()))
        except ray.exceptions.RayActorError:
            # The process that made it has ended, perhaps with its node.
            self._actor = None
            return _LOST_WAIT_S

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
                self._actor = None

    def _find(self) -> Any:
        here = ray.get_runtime_context()
        # Jobs are numbered from 1 in every cluster, and nodes are named at random.
        joined = f"{here.get_node_id()} {here.get_job_id()}"
        with self._lock:
            if self._actor is None or self._joined != joined:
                self._joined = joined
                actor = ray.remote(num_cpus=0, max_concurrency=64)(Budget)
                self._actor = actor.options(name=_NAME, namespace=_NAMESPACE, get_if_exists=True).remote()
                self._actor.spend.remote(own_budget().num_granted)
            return self._actor


def share_gate() -> None:
    """Let this process, which is of a Ray cluster, send requests to the Hub by the cluster's budget."""
    if not isinstance(current_gate(), ClusterGate):
        use_gate(ClusterGate())
