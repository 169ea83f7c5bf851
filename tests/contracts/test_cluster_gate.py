"""One budget of requests for a Ray cluster: shared, paused for all, and made anew where it is lost."""

import sys
import time

import pytest
import ray
from ray import cloudpickle
from ray_session import ensure_ray

from raypipe import cluster_gate
from raypipe.cluster_gate import ClusterGate
from raypipe.requests import Budget

# The workers of Ray cannot import modules of the tests: what is defined here travels to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LIMIT, PERIOD_S = 30, 3.0


@pytest.fixture
def actor(ray_cluster):
    """The budget of the cluster, made small before anybody asks for it."""
    named = {"name": cluster_gate._NAME, "namespace": cluster_gate._NAMESPACE, "num_cpus": 0}
    made = ray.remote(Budget).options(**named).remote(LIMIT, PERIOD_S)
    # A name is free only when its actor is known to be there.
    ray.get(made.take.remote())
    yield made
    if not ray.is_initialized():
        # After the last test Ray is left before this.
        return
    ray.kill(made)
    end = time.monotonic() + 30
    while any(one["name"] == cluster_gate._NAME for one in ray.util.list_named_actors(all_namespaces=True)):
        assert time.monotonic() < end
        time.sleep(0.05)


@ray.remote(num_cpus=0)
class Asker:
    """A process that sends requests as the Hub's client does: each when it is let."""

    def __init__(self):
        self.gate = ClusterGate()

    def ask(self, num_requests):
        granted = []
        while len(granted) < num_requests:
            wait_s = self.gate.take()
            if wait_s:
                time.sleep(wait_s)
            else:
                granted.append(time.monotonic())
        return granted

    def pause(self, wait_s):
        self.gate.pause(wait_s)
        return time.monotonic()


def askers(num):
    return [Asker.remote() for _ in range(num)]


def test_processes_share_one_budget(actor):
    each = ray.get([asker.ask.remote(18) for asker in askers(3)], timeout=60)

    granted = sorted(at for one in each for at in one)
    assert len(granted) == 54
    # The clock of a machine is the same in all its processes. A grant is seen a moment after it was given.
    for first in granted:
        assert sum(first <= at < first + PERIOD_S - 0.5 for at in granted) <= LIMIT
    assert granted[-1] - granted[0] > PERIOD_S


def test_a_pause_told_by_one_process_holds_for_all(actor):
    teller, *others = askers(3)
    ray.get([asker.ask.remote(1) for asker in others], timeout=30)

    told_at = ray.get(teller.pause.remote(1.5), timeout=30)
    each = ray.get([asker.ask.remote(2) for asker in others], timeout=30)

    assert all(at >= told_at + 1.4 for one in each for at in one)


def test_the_death_of_the_budget_is_survived(actor):
    one, other = askers(2)
    ray.get([one.ask.remote(1), other.ask.remote(1)], timeout=30)

    ray.kill(actor)
    each = ray.get([one.ask.remote(3), other.ask.remote(3)], timeout=60)

    assert [len(granted) for granted in each] == [3, 3]


def test_a_pause_that_meets_a_dead_budget_is_told_to_the_next(actor):
    one, other = askers(2)
    ray.get([one.ask.remote(1), other.ask.remote(1)], timeout=30)

    ray.kill(actor)
    told_at = ray.get(one.pause.remote(2.0), timeout=30)
    granted = ray.get(other.ask.remote(1), timeout=60)

    assert granted[0] >= told_at + 1.9


def test_a_gate_goes_on_in_another_ray(ray_cluster):
    """A notebook may leave its cluster and join another."""
    gate = ClusterGate()
    assert gate.take() == 0

    ray.shutdown()
    alone = gate.take()
    ensure_ray(2)
    waits = [gate.take() for _ in range(3)]

    assert alone == 0
    assert waits[-1] == 0
