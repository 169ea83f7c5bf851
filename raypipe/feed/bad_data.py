"""Define the policy on data that cannot be read or decoded, and the list of what was left out.

A span that is left out keeps its positions in the order, as holes. No other frame moves, a batch with holes is shorter
on its rank, and every rank does the same steps. The ranks' `Meeting` keeps one `SkipList` for all.
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Final, Literal, get_args

from raypipe.errors import ConfigError, DatasetError, suggest
from raypipe.text import counted, either, frames_text

OnBadEpisode = Literal["raise", "skip"]

_MAX_SHOWN: Final = 20


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
        known = get_args(OnBadEpisode)
        if self.on_bad_episode not in known:
            raise ConfigError(
                f"on_bad_episode={self.on_bad_episode!r} is not known{suggest(self.on_bad_episode, known)}"
            )
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


class SkipList:
    """The spans that ranks have left out, and how many episodes may still be bad. Thread-safe."""

    def __init__(self, spec: BadDataSpec, num_episodes: int) -> None:
        self._lock = threading.Lock()
        self._spec = spec
        self._num_episodes = num_episodes
        self._first: dict[tuple[int, int], BadSpan] = {}
        self._before: dict[tuple[int, int], str] = {}

    def note(self, episodes: Mapping[tuple[int, int], str]) -> None:
        """Count episodes that were left out before. Maps (dataset, episode) to the reason."""
        with self._lock:
            self._before.update(episodes)

    def add(self, span: BadSpan) -> None:
        """Note a span.

        Raises:
            DatasetError: more episodes are bad than the policy allows; lists them.
        """
        with self._lock:
            self._first.setdefault((span.dataset, span.episode), span)
            bad, budget = list(self._first.values()), self._spec.budget(self._num_episodes)
            before = {key: why for key, why in self._before.items() if key not in self._first}
        number = len(bad) + len(before)
        if number > budget:
            earlier = [
                f"  episode {episode} of dataset {dataset}, left out before: {why}"
                for (dataset, episode), why in before.items()
            ]
            raise DatasetError(
                f"{number} of {counted(self._num_episodes, 'episode')} {either(number, 'is', 'are')} bad, and "
                f"max_bad_episodes={self._spec.max_bad_episodes} lets {budget} be skipped:\n"
                + "\n".join([describe_spans(bad), *earlier[:_MAX_SHOWN]])
                + f"\n`raypipe validate {span.root}` lists all and what to do. Mend them, leave them out with "
                f"selection={{'exclude': (...)}}, or raise max_bad_episodes."
            )

    def spans(self) -> list[BadSpan]:
        """Return the first bad span of every episode, in the order of discovery."""
        with self._lock:
            return list(self._first.values())


def merge_spans(spans: "list[BadSpan]") -> "list[BadSpan]":
    """Return the same frames in fewer spans: spans of an episode that touch become one, with the first reason.

    A damaged video is bad clip by clip, which would give a line for each.
    """
    merged: list[BadSpan] = []
    for span in spans:
        touching = [one for one in merged if _touches(one, span)]
        if not touching:
            merged.append(span)
            continue
        parts = [*touching, span]
        whole = replace(touching[0], start=min(one.start for one in parts), stop=max(one.stop for one in parts))
        merged[merged.index(touching[0])] = whole
        merged = [one for one in merged if one not in touching[1:]]
    return merged


def _touches(one: "BadSpan", other: "BadSpan") -> bool:
    is_same = (one.epoch, one.dataset, one.root, one.episode) == (other.epoch, other.dataset, other.root, other.episode)
    return is_same and one.start <= other.stop and other.start <= one.stop


def describe_spans(spans: "list[BadSpan]") -> str:
    """Return a line per span; if there are many, the first ones and the number of the rest."""
    lines = [f"  {span.describe()}" for span in spans[:_MAX_SHOWN]]
    return "\n".join([*lines, *([f"  and {len(spans) - _MAX_SHOWN} more"] if len(spans) > _MAX_SHOWN else [])])
