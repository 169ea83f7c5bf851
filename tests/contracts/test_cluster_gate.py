"""One budget of requests for a Ray cluster: shared, paused for all, and empty where it is made anew."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from attempts import wait_for
from ray import cloudpickle
from ray_session import end_ray, ensure_ray
from waiting import wait_until

from raypipe.storage import request_budget as requests
from raypipe.storage.request_budget import Budget, ClusterGate, SharedBudget

# The workers of Ray cannot import modules of the tests: what is defined here travels to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LIMIT, PERIOD_S = 30, 3.0


NAMED = {"name": requests._NAME, "namespace": requests._NAMESPACE}


def is_there():
    return NAMED in ray.util.list_named_actors(all_namespaces=True)


def end_budget():
    """End the budget of the cluster, whoever made it: it outlives a test."""
    if is_there():
        ray.kill(ray.get_actor(**NAMED))
    # A name is free only when its actor is known to be gone.
    wait_until(lambda: not is_there(), "the budget is gone")


@pytest.fixture
def no_actor(ray_cluster):
    """A cluster without a budget."""
    end_budget()
    yield
    # After the last test Ray is left before this.
    if ray.is_initialized():
        end_budget()


class NotedClock:
    """The clock of a budget: `now` is what it said last."""

    def __call__(self):
        self.now = time.monotonic()
        return self.now


class NotingBudget(Budget):
    """Notes when it lets a request through; who sends it may learn of that late on a busy machine."""

    def __post_init__(self):
        super().__post_init__()
        self.granted_at = []

    def take(self, turn=None):
        given = super().take(turn)
        if not given.wait_s:
            self.granted_at.append(self.clock.now)
        return given

    def when_granted(self):
        return self.granted_at


@pytest.fixture
def actor(no_actor):
    """The budget of the cluster, made small before anybody asks for it."""
    made = ray.remote(NotingBudget).options(**NAMED, num_cpus=0).remote(LIMIT, PERIOD_S, clock=NotedClock())
    wait_for(made.take.remote())
    return made


@ray.remote(num_cpus=0)
class Asker:
    """A process that sends requests as the Hub's client does: each when it is let."""

    def __init__(self):
        self.gate = ClusterGate()

    def ask(self, num_requests):
        granted, turn = [], None
        while len(granted) < num_requests:
            turn = self.gate.take(turn)
            if turn.wait_s:
                time.sleep(turn.wait_s)
            else:
                granted.append(time.monotonic())
                turn = None
        return granted

    def pause(self, wait_s):
        told_at = time.monotonic()
        self.gate.pause(wait_s)
        return told_at


def askers(num):
    return [Asker.remote() for _ in range(num)]


def test_processes_share_one_budget(actor):
    each = wait_for([asker.ask.remote(18) for asker in askers(3)])

    granted = wait_for(actor.when_granted.remote())
    assert [len(one) for one in each] == [18] * 3
    # The first is that of the fixture.
    assert len(granted) == 1 + 54
    for first in granted:
        assert sum(first <= at < first + PERIOD_S for at in granted) <= LIMIT
    assert granted[-1] - granted[1] > PERIOD_S


def test_who_waits_asks_twice_and_not_over_and_over(actor):
    """However many wait, the actor is asked as often as it lets something through, and once more."""
    counting = CountingGate()

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda _: counting.pass_through(), range(40)))

    assert counting.num_asked <= 2.5 * 40


class CountingGate(ClusterGate):
    def __init__(self):
        super().__init__()
        self.num_asked = 0

    def pass_through(self):
        turn = None
        while turn is None or turn.wait_s:
            time.sleep(turn.wait_s if turn else 0)
            self.num_asked += 1
            turn = self.take(turn)


def test_a_pause_told_by_one_process_holds_for_all(actor):
    teller, *others = askers(3)
    wait_for([asker.ask.remote(1) for asker in others])

    told_at = wait_for(teller.pause.remote(1.5))
    each = wait_for([asker.ask.remote(2) for asker in others])

    assert all(at >= told_at + 1.5 for one in each for at in one)


def test_the_death_of_the_budget_is_survived(actor):
    one, other = askers(2)
    wait_for([one.ask.remote(1), other.ask.remote(1)])

    ray.kill(actor)
    each = wait_for([one.ask.remote(3), other.ask.remote(3)])

    assert [len(granted) for granted in each] == [3, 3]


def test_a_pause_that_meets_a_dead_budget_is_told_to_the_next(actor):
    one, other = askers(2)
    wait_for([one.ask.remote(1), other.ask.remote(1)])

    ray.kill(actor)
    told_at = wait_for(one.pause.remote(2.0))
    granted = wait_for(other.ask.remote(1))

    assert granted[0] >= told_at + 2.0


def num_recent():
    return wait_for(ray.get_actor(**NAMED).num_recent.remote())


def test_the_budget_outlives_the_process_that_made_it(no_actor):
    first, second = askers(2)
    wait_for(first.ask.remote(1))
    made = ray.get_actor(**NAMED)._actor_id

    ray.kill(first)
    wait_until(lambda: is_dead(first), "its maker is gone")
    wait_for(second.ask.remote(1))

    assert ray.get_actor(**NAMED)._actor_id == made


def is_dead(asker):
    try:
        wait_for(asker.ask.remote(0))
    except ray.exceptions.RayActorError:
        return True
    return False


def test_a_budget_in_place_of_a_lost_one_has_no_burst_to_give(no_actor):
    (asker,) = askers(1)
    wait_for(asker.ask.remote(1))
    begun = num_recent()

    ray.kill(ray.get_actor(**NAMED))
    wait_for(asker.ask.remote(3))

    assert begun <= 1
    # Of a burst of 1,000, of which 7 come back in a second.
    assert num_recent() > 700


def test_a_budget_that_nobody_asks_ends(no_actor):
    shared = ray.remote(num_cpus=0)(SharedBudget).options(**NAMED, lifetime="detached").remote(idle_s=3.0)
    wait_for(shared.take.remote())
    asked_at = time.monotonic()
    wait_for(shared.take.remote())

    wait_until(lambda: not is_there(), "an idle budget ends")

    assert time.monotonic() - asked_at > 3.0


def test_what_a_process_has_sent_by_itself_is_told_to_the_cluster(no_actor, monkeypatch):
    own = Budget()
    monkeypatch.setattr(requests._process, "own", own)
    monkeypatch.setattr(requests._process, "gate", own)
    for _ in range(900):
        own.take()

    requests.share_gate()

    # It is told, and not waited for.
    wait_until(lambda: is_there() and num_recent() > 600, "the cluster knows of it")


def test_a_process_that_has_sent_nothing_makes_no_budget(no_actor, monkeypatch):
    own = Budget()
    monkeypatch.setattr(requests._process, "own", own)
    monkeypatch.setattr(requests._process, "gate", own)

    requests.share_gate()

    assert not is_there()


def test_a_gate_goes_on_in_another_ray(ray_cluster):
    """A notebook may leave its cluster and join another."""
    gate = ClusterGate()
    assert gate.take().wait_s == 0

    end_ray()
    alone = gate.take()
    ensure_ray(2)
    turns = [gate.take() for _ in range(3)]

    assert alone.wait_s == 0
    # A burst: it is not taken for one that was lost.
    assert turns[-1].wait_s == 0
