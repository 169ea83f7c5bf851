"""What the ranks of a pipeline share: their places before the first batch, and which bad data is left out.

If ranks differed in state, seed, data or batch size, the run would silently train on some frames twice and miss others.
A span that is left out keeps its positions in the order, as holes. No other frame moves, a batch with holes is shorter
on its rank, and every rank does the same steps.

One `Meeting` serves all ranks. It lives in the feeder's actor, or in the process of the ranks. Under ``torchrun`` it is
in rank 0's process, and the other processes reach it by `raypipe.feed.local.RemoteMeeting`.
"""

import math
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from numbers import Real
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np

from raypipe.errors import ConfigError, DatasetError, ResumeError, suggest
from raypipe.feed.metrics import LoaderStats
from raypipe.plan import BatchSpec, EpisodeIndex, Leg, OrderSpec, Shares, WorldPlan
from raypipe.text import counted, either, frames_text

OnBadEpisode = Literal["raise", "skip"]

_MAX_SHOWN: Final = 20

_WAIT_FOR_RANKS_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BadDataSpec:
    """What a pipeline does about data that cannot be read or decoded."""

    on_bad_episode: OnBadEpisode = "raise"
    """ "raise" ends the run on the rank that needs the data; "skip" leaves the span out, lists it, and continues."""

    max_bad_episodes: int | float = 0.01
    """With "skip", how many episodes of a run may be bad: a count or, below 1, a share of all episodes, which allows at
    least one. One more ends the run with the list, because then a wrong path or a lost disk is the likely cause."""

    check_finite: bool = True
    """Whether NaN and infinite values of actions and observations are bad data. They would reach the weights."""

    def __post_init__(self) -> None:
        given, known = self.on_bad_episode, get_args(OnBadEpisode)
        if given not in known:
            raise ConfigError(f"on_bad_episode={given!r} is not known{suggest(given, known)}")
        most = self.max_bad_episodes
        is_number = isinstance(most, Real) and not isinstance(most, bool) and math.isfinite(most)
        if not is_number or most < 0 or (most >= 1 and most != int(most)):
            raise ConfigError(f"max_bad_episodes must be a count, or a share between 0 and 1, got {most!r}")

    def budget(self, num_episodes: int) -> int:
        """Return how many of `num_episodes` may be bad."""
        if isinstance(self.max_bad_episodes, int) or self.max_bad_episodes >= 1:
            return int(self.max_bad_episodes)
        return max(1, int(self.max_bad_episodes * num_episodes)) if self.max_bad_episodes else 0


RAISE: Final = BadDataSpec()
"""The default: bad data ends the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSpan:
    """A span that could not be read or decoded, and was left out."""

    epoch: int
    dataset: int
    root: str
    episode: int
    start: int
    stop: int
    why: str

    def describe(self) -> str:
        """Return a line with the dataset, the frames and the reason."""
        return f"episode {self.episode} of {self.root!r}, {frames_text(self.start, self.stop)}: {self.why}"


def add_span(spans: "list[BadSpan]", span: "BadSpan") -> "list[BadSpan]":
    """Return the spans with one more. It and those of its episode that it touches become one, with the first reason.

    A damaged video is bad clip by clip, which would give a line for each.
    """
    touching = [one for one in spans if _touches(one, span)]
    if not touching:
        return [*spans, span]
    first, *others = touching
    parts = [*touching, span]
    whole = replace(first, start=min(one.start for one in parts), stop=max(one.stop for one in parts))
    return [whole if one is first else one for one in spans if one not in others]


def _touches(one: "BadSpan", other: "BadSpan") -> bool:
    is_same = (one.episode, one.dataset, one.epoch) == (other.episode, other.dataset, other.epoch)
    return is_same and one.start <= other.stop and other.start <= one.stop


def describe_spans(spans: "list[BadSpan]") -> str:
    """Return a line per span; if there are many, the first ones and the number of the rest."""
    lines = [f"  {span.describe()}" for span in spans[:_MAX_SHOWN]]
    return "\n".join([*lines, *([f"  and {len(spans) - _MAX_SHOWN} more"] if len(spans) > _MAX_SHOWN else [])])


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
        # Held for moments, unlike the lock of a feeder, which plans while it holds it.
        self._brief_lock = threading.Lock()
        self._waiting: dict[int, _WaitingRank] = {}
        """By rank; a rank that is answered is not here any more."""
        self._num_series = 0

    def answer(self, rank: int, ask: Ask, left: PassPlace | None = None) -> int:
        """Return the number of the series, the same for all ranks, once all have made the same request.

        `left` is the last pass that the rank opened before.

        Raises:
            ResumeError: the requests differ; names the ranks. Or this rank has asked for something else meanwhile.
        """
        mine = _WaitingRank(ask, left)
        with self._brief_lock:
            if rank in self._waiting:
                self._waiting[rank].refuse(f"rank {rank} has asked for something else meanwhile: {_describe(ask)}")
            self._waiting[rank] = mine
            if len(self._waiting) == self._num_ranks:
                verdict = describe_difference({number: one.ask for number, one in self._waiting.items()})
                self._num_series += 1
                for one in self._waiting.values():
                    one.refuse(verdict) if verdict else one.series.set_result(self._num_series)
                self._waiting = {}
        series = mine.series.result()
        if isinstance(series, str):
            raise ResumeError(series)
        return series

    def go_on(self, rank: int, place: PassPlace) -> None:
        """Note that a rank begins a pass of its series at `place`, as all others must.

        A rank that is behind may still begin a pass that others opened and then left. It may not begin one that they
        never opened.

        Raises:
            ResumeError: other ranks left the series before this pass and wait for all to do so; they raise it too.
        """
        with self._brief_lock:
            others = [number for number in sorted(self._waiting) if self._waiting[number].has_left_before(place)]
            if not others:
                return
            verdict = (
                f"{name_ranks(others)} left an epoch by a break or a loaded state and begin anew, and rank {rank} goes "
                f"on with the next one: they would wait for each other for ever. All ranks must iterate, break and "
                f"load at the same places."
            )
            for number in others:
                self._waiting.pop(number).refuse(verdict)
        raise ResumeError(verdict)

    def missing_ranks(self) -> list[int]:
        """Return the ranks that others wait for; none if no rank waits."""
        with self._brief_lock:
            return sorted(set(range(self._num_ranks)) - set(self._waiting)) if self._waiting else []


@dataclass(frozen=True, slots=True)
class _WaitingRank:
    ask: Ask
    left: PassPlace | None
    series: Future[int | str] = field(default_factory=Future)
    """The number of the series, or why there is none: an error kept here would hold the frames of who waits for it."""

    def has_left_before(self, place: PassPlace) -> bool:
        return self.left is not None and self.left.series == place.series and self.left.number < place.number

    def refuse(self, verdict: str) -> None:
        self.series.set_result(verdict)


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


class Meeting(RollCall):
    """The shared state of a pipeline's ranks. Thread-safe; a rank that waits for others blocks its thread."""

    def __init__(self, bad_data: BadDataSpec, index: EpisodeIndex, num_ranks: int) -> None:
        """Begin without any rank. `num_ranks` must arrive before any continues; 1 to look at one without the others."""
        super().__init__(num_ranks)
        self.index = index
        self._bad_data = bad_data
        self._num_episodes = len(np.unique(np.stack([index.dataset, index.episode]), axis=1).T)
        self._bad: dict[tuple[int, int], BadSpan] = {}
        """The first bad span of every episode, in the order of discovery."""
        self._bad_before: dict[tuple[int, int], str] = {}
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
        return type(self), (self._bad_data, self.index, self._num_ranks)

    def begin(self, rank: int, ask: Ask, place: PassPlace | None) -> PassPlace:
        """Return the place of a pass, if all ranks make the same request.

        Without a place the rank begins a series of passes, and waits until all ranks do.

        Raises:
            ResumeError: the requests differ; raised on every rank.
        """
        if place is None:
            place = PassPlace(self.answer(rank, ask, self._places.get(rank)), 0)
        with self._lock:
            self._places[rank] = place
            first, asked = self._asked.setdefault(place, (rank, ask))
            self._asked = {old: told for old, told in self._asked.items() if not old.is_over_at(place)}
        difference = describe_difference({first: asked, rank: ask})
        if difference:
            raise ResumeError(difference)
        return place

    def report_bad(self, span: BadSpan) -> None:
        """Note a span that a rank leaves out.

        Raises:
            DatasetError: more episodes are bad than the policy allows; lists them.
        """
        with self._brief_lock:
            self._bad.setdefault((span.dataset, span.episode), span)
            bad, budget = list(self._bad.values()), self._bad_data.budget(self._num_episodes)
            before = {key: why for key, why in self._bad_before.items() if key not in self._bad}
        number = len(bad) + len(before)
        if number > budget:
            earlier = [
                f"  episode {episode} of dataset {dataset}, left out before: {why}"
                for (dataset, episode), why in before.items()
            ]
            raise DatasetError(
                f"{number} of {counted(self._num_episodes, 'episode')} {either(number, 'is', 'are')} bad, and "
                f"max_bad_episodes={self._bad_data.max_bad_episodes} lets {budget} be skipped:\n"
                + "\n".join([describe_spans(bad), *earlier[:_MAX_SHOWN]])
                + f"\n`raypipe validate {span.root}` lists all and what to do. Mend them, leave them out with "
                f"selection={{'exclude': (...)}}, or raise max_bad_episodes."
            )

    def note_bad(self, episodes: Mapping[tuple[int, int], str]) -> None:
        """Count episodes that an earlier start left out as bad. Maps (dataset, episode) to the reason."""
        with self._brief_lock:
            self._bad_before.update(episodes)

    def tell(self, rank: int, stats: LoaderStats) -> None:
        """Store the figures of a rank."""
        self._stats[rank] = stats

    def figures(self) -> dict[int, LoaderStats]:
        """Return the latest figures of each rank."""
        return dict(self._stats)


MEETING_CALLS: Final = frozenset({"begin", "go_on", "missing_ranks", "report_bad", "note_bad", "tell", "figures"})
"""Methods of a `Meeting` that ranks in other processes may call."""


class MeetingProxy:
    """Has the methods of a `Meeting` in another process. A subclass says how a call gets there."""

    def call(self, name: str, *args: Any) -> Any:
        """Return the answer of the meeting to a call."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name not in MEETING_CALLS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return partial(self.call, name)


def begin_pass(meeting: Meeting | MeetingProxy, world: WorldPlan, rank: int, place: PassPlace | None) -> PassPlace:
    """Return the place of a pass over the rest of a plan, once all ranks ask for the same; see `Meeting.begin`.

    Warns if other ranks let this one wait long.
    """

    def warn() -> None:
        missing: list[int] = meeting.missing_ranks()
        if missing:
            warnings.warn(
                f"rank {rank} of {world.world_size} has waited {_WAIT_FOR_RANKS_S:g} s for {name_ranks(missing)} to "
                f"start the epoch. Every rank must iterate its loader, all at once.",
                stacklevel=2,
            )

    timer = threading.Timer(_WAIT_FOR_RANKS_S, warn)
    timer.daemon = True
    timer.start()
    try:
        begun: PassPlace = meeting.begin(rank, ask_for(world), place)
        return begun
    finally:
        timer.cancel()
