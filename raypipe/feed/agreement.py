"""Where the ranks of a pipeline meet: they compare their places before the first batch, and share a list of bad data.

A run whose ranks differ in state, seed, data or batch size would train on frames twice and miss others without a word.
One `Meeting` serves all ranks. It lives in the feeder's actor, or in the process of the ranks; `remote_meeting` reaches
the one of rank 0 from the other processes of ``torchrun``.
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
    """What a rank asks for: the rest of an epoch. Equal on all ranks."""

    order: OrderSpec
    epoch: int
    legs: tuple[Leg, ...]
    world_size: int
    batch: BatchSpec
    fingerprint: str
    """Of the plan, as the rank computed it."""

    shares: Shares | None = None
    """Of a mixture: its datasets stand where the state says that the ranks have loaded."""


def ask_for(world: WorldPlan) -> Ask:
    """Return what a rank asks for that goes on with a plan."""
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
    """Return a name for a start of the ranks, the same for all of them: accounts are sorted by it, no order is."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")


class PassPlace(NamedTuple):
    """Which pass over the rest of an epoch it is: the same on all ranks."""

    series: int
    number: int
    """Passes of the series before it."""

    @property
    def following(self) -> "PassPlace":
        """The place of the next pass."""
        return PassPlace(self.series, self.number + 1)

    def is_over_at(self, place: "PassPlace") -> bool:
        """Whether all ranks are done with this pass when one asks for that at `place`.

        Ranks begin a series together. Within one, a rank that fetches ahead is two passes before the last at most. A
        late request of an earlier series ends nothing of a later one.
        """
        return self.series < place.series or (self.series == place.series and self.number < place.number - 2)


class RollCall:
    """Waits until every rank begins a series of passes, and compares what they ask for.

    A rank begins one when it starts, and when it has left its order by a break or a loaded state.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._changed = threading.Condition()
        self._waiting: dict[int, _Outcome] = {}
        self._num_series = 0

    def answer(self, rank: int, ask: Ask, left: PassPlace | None = None) -> int:
        """Return the number of the series, the same for all ranks, when all ask for the same.

        Args:
            rank: who asks.
            ask: what for.
            left: the last pass that it has opened before.

        Raises:
            ResumeError: all ranks are here and do not; names those that differ. Or this rank has asked again meanwhile.
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

        A rank that is behind may still begin passes that others have left: those that they never opened tell.

        Raises:
            ResumeError: others have left the series before this pass and wait for all to do so; they get it too.
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
        """Return the ranks that others wait for; none if nobody waits."""
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
    """Return who asks for what where it is not the same; an empty string where it is."""
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
    """What the ranks of one pipeline share. Threads may call it at once: a rank that waits for others holds one."""

    def __init__(self, bad_data: BadDataSpec, index: EpisodeIndex, num_ranks: int) -> None:
        """Begin without any rank.

        Args:
            num_ranks: that must come before one goes on; 1 where a rank is looked at without the others.
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
        """Return the place of a pass, when all ranks ask for the same.

        Without a place the rank begins a series of passes: that waits until all ranks do.

        Raises:
            ResumeError: ranks ask for different things; every rank gets it.
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
        """Return the ranks that have not asked while others wait for them."""
        return self._roll_call.missing()

    def report_bad(self, span: BadSpan) -> None:
        """Note a span that a rank leaves out.

        Raises:
            DatasetError: more episodes are bad than may be.
        """
        self._skips.add(span)

    def note_bad(self, episodes: Mapping[tuple[int, int], str]) -> None:
        """Count episodes as bad that were left out before this start."""
        self._skips.note(episodes)

    def tell(self, rank: int, stats: LoaderStats) -> None:
        """Note the figures of a rank."""
        self._stats[rank] = stats

    def figures(self) -> dict[int, LoaderStats]:
        """Return the figures that each rank has told last."""
        return dict(self._stats)


def describe_waiting(rank: int, world_size: int, missing: Sequence[int], wait_s: float) -> str:
    """Return what a rank says that has waited for others for a while."""
    return (
        f"rank {rank} of {world_size} has waited {wait_s:g} s for {name_ranks(missing)} to start the epoch. Every rank "
        f"must iterate its loader, all at once."
    )
