"""Compare the places of a pipeline's ranks before the first batch, and share a list of bad data.

If ranks differed in state, seed, data or batch size, the run would silently train on some frames twice and miss others.
One `Meeting` serves all ranks. It lives in the feeder's actor, or in the process of the ranks. Under ``torchrun`` it is
in rank 0's process, and the other processes reach it by `remote_agreement`.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from raypipe.errors import ConfigError, ResumeError
from raypipe.feed.bad_data import BadDataSpec, BadSpan, SkipList
from raypipe.feed.metrics import LoaderStats
from raypipe.plan import BatchSpec, EpisodeIndex, Leg, OrderSpec, Shares, WorldPlan
from raypipe.text import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A rank's request for the rest of an epoch. Equal on all ranks."""

    order: OrderSpec
    epoch: int
    legs: tuple[Leg, ...]
    world_size: int
    batch: BatchSpec
    fingerprint: str
    """Fingerprint of the plan, computed by the rank."""

    shares: Shares | None = None
    """The shares of a mixture, with its datasets at the positions of the loaded state."""


def ask_for(world: WorldPlan) -> Ask:
    """Return the request of a rank that continues with a plan."""
    plan = world.plan
    return Ask(
        order=plan.spec,
        epoch=plan.epoch,
        legs=plan.legs,
        world_size=world.world_size,
        batch=BatchSpec(size=world.steps.per_lane * plan.leg.lanes, scope="global"),
        fingerprint=plan.fingerprint,
        shares=plan.index.shares,
    )


def name_attempt() -> str:
    """Return a name for a start, to give to all ranks. Accounts sort by it; the order of frames does not use it."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")


class PassPlace(NamedTuple):
    """Identifies a pass over the rest of an epoch; the same on all ranks."""

    series: int
    number: int
    """Passes of the series before it."""

    @property
    def following(self) -> "PassPlace":
        """The place of the next pass."""
        return PassPlace(self.series, self.number + 1)

    def is_over_at(self, place: "PassPlace") -> bool:
        """Return whether all ranks are done with this pass once one of them asks for the pass at `place`.

        Ranks begin a series together. Within a series, a rank that fetches ahead is at most two passes ahead of the
        last one. A late request of an earlier series does not end passes of a later one.
        """
        return self.series < place.series or (self.series == place.series and self.number < place.number - 2)


class RollCall:
    """Waits until every rank begins a series of passes, and compares their requests.

    A rank begins a series when it starts, and when it has left its order by a break or a loaded state.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._changed = threading.Condition()
        self._waiting: dict[int, _Outcome] = {}
        self._num_series = 0

    def answer(self, rank: int, ask: Ask, left: PassPlace | None = None) -> int:
        """Return the number of the series, the same for all ranks, once all have made the same request.

        Args:
            rank: the rank that asks.
            ask: its request.
            left: the last pass that it opened before.

        Raises:
            ResumeError: the requests differ; names the ranks. Or this rank has asked for something else meanwhile.
        """
        answer = _Outcome(ask, left)
        with self._changed:
            if rank in self._waiting:
                self._waiting[rank].decide(f"rank {rank} has asked for something else meanwhile: {_describe(ask)}")
            self._waiting[rank] = answer
            if len(self._waiting) == self._num_ranks:
                verdict = describe_difference({number: waiting.ask for number, waiting in self._waiting.items()})
                self._num_series += 1
                for waiting in self._waiting.values():
                    waiting.decide(verdict, self._num_series)
                self._waiting = {}
            self._changed.notify_all()
            self._changed.wait_for(lambda: answer.is_decided)
        if answer.verdict:
            raise ResumeError(answer.verdict)
        return answer.series

    def go_on(self, rank: int, place: PassPlace) -> None:
        """Note that a rank begins a pass of its series at `place`, as all others must.

        A rank that is behind may still begin a pass that others opened and then left. It may not begin one that they
        never opened.

        Raises:
            ResumeError: other ranks left the series before this pass and wait for all to do so; they raise it too.
        """
        with self._changed:
            others = [number for number in sorted(self._waiting) if self._waiting[number].has_left_before(place)]
            if not others:
                return
            verdict = (
                f"{name_ranks(others)} left an epoch by a break or a loaded state and begin anew, and rank {rank} goes "
                f"on with the next one: they would wait for each other for ever. All ranks must iterate, break and "
                f"load at the same places."
            )
            for number in others:
                self._waiting.pop(number).decide(verdict)
            self._changed.notify_all()
        raise ResumeError(verdict)

    def missing(self) -> list[int]:
        """Return the ranks that others wait for; none if no rank waits."""
        with self._changed:
            return sorted(set(range(self._num_ranks)) - set(self._waiting)) if self._waiting else []


@dataclass(slots=True)
class _Outcome:
    ask: Ask
    left: PassPlace | None
    is_decided: bool = False
    verdict: str = ""
    series: int = 0

    def has_left_before(self, place: PassPlace) -> bool:
        return self.left is not None and self.left.series == place.series and self.left.number < place.number

    def decide(self, verdict: str, series: int = 0) -> None:
        self.is_decided, self.verdict, self.series = True, verdict, series


def describe_difference(asks: Mapping[int, Ask]) -> str:
    """Return which ranks ask for what if their requests differ; an empty string if they are equal."""
    groups: dict[Ask, list[int]] = {}
    for rank, ask in sorted(asks.items()):
        groups.setdefault(ask, []).append(rank)
    if len(groups) == 1:
        return ""
    sides = "; ".join(f"{name_ranks(ranks)} asked for {_describe(ask)}" for ask, ranks in groups.items())
    return (
        f"ranks do not stand at the same place: {sides}. Load the same state on every rank, and use the same seed, "
        f"data and batch size."
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _describe(ask: Ask) -> str:
    return (
        f"epoch {ask.epoch}, legs {[(leg.lanes, leg.frames_per_lane) for leg in ask.legs]}, seed {ask.order.seed}, "
        f"{counted(ask.world_size, 'rank')}, global batch {ask.batch.size}, plan {ask.fingerprint[:12]}"
    )


class Meeting:
    """The shared state of a pipeline's ranks. Thread-safe; a rank that waits for others blocks its thread."""

    def __init__(self, bad_data: BadDataSpec, index: EpisodeIndex, num_ranks: int) -> None:
        """Begin without any rank.

        Args:
            num_ranks: how many ranks must arrive before any continues; 1 to look at one rank without the others.
        """
        num_episodes = len(np.unique(np.stack([index.dataset, index.episode]), axis=1).T)
        self._given = (bad_data, index, num_ranks)
        self._num_ranks = num_ranks
        self._roll_call = RollCall(num_ranks)
        self._skips = SkipList(bad_data, num_episodes)
        self._lock = threading.RLock()
        self._places: dict[int, PassPlace] = {}
        self._asked: dict[PassPlace, tuple[int, Ask]] = {}
        self._stats: dict[int, LoaderStats] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        if self._num_ranks > 1:
            raise ConfigError(
                "loaders of several ranks that meet in this process cannot be sent to others. Ranks in processes of "
                "their own get theirs by rp.train.share_loader(pipe), or by pipe.loaders(world_size, transport='ray')."
            )
        return type(self), self._given

    @property
    def index(self) -> EpisodeIndex:
        """The episodes that the ranks read."""
        return self._given[1]

    def begin(self, rank: int, ask: Ask, place: PassPlace | None) -> PassPlace:
        """Return the place of a pass, if all ranks make the same request.

        Without a place the rank begins a series of passes, and waits until all ranks do.

        Raises:
            ResumeError: the requests differ; raised on every rank.
        """
        if place is None:
            place = PassPlace(self._roll_call.answer(rank, ask, self._places.get(rank)), 0)
        with self._lock:
            self._places[rank] = place
            first, asked = self._asked.setdefault(place, (rank, ask))
            self._asked = {old: told for old, told in self._asked.items() if not old.is_over_at(place)}
        difference = describe_difference({first: asked, rank: ask})
        if difference:
            raise ResumeError(difference)
        return place

    def go_on(self, rank: int, place: PassPlace) -> None:
        """Note that a rank begins a pass; see `RollCall.go_on`."""
        self._roll_call.go_on(rank, place)

    def missing_ranks(self) -> list[int]:
        """Return the ranks that others wait for; none if no rank waits."""
        return self._roll_call.missing()

    def report_bad(self, span: BadSpan) -> None:
        """Note a span that a rank leaves out.

        Raises:
            DatasetError: more episodes are bad than the policy allows.
        """
        self._skips.add(span)

    def note_bad(self, episodes: Mapping[tuple[int, int], str]) -> None:
        """Count episodes that an earlier start left out as bad."""
        self._skips.note(episodes)

    def tell(self, rank: int, stats: LoaderStats) -> None:
        """Store the figures of a rank."""
        self._stats[rank] = stats

    def figures(self) -> dict[int, LoaderStats]:
        """Return the latest figures of each rank."""
        return dict(self._stats)


def describe_waiting(rank: int, world_size: int, missing: Sequence[int], wait_s: float) -> str:
    """Return the warning of a rank that has waited long for others."""
    return (
        f"rank {rank} of {world_size} has waited {wait_s:g} s for {name_ranks(missing)} to start the epoch. Every rank "
        f"must iterate its loader, all at once."
    )
