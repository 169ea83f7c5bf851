"""`check_account`: check that every frame was handed over exactly once, in the order of the plan.

::

    emitted + skipped + left over + to come + unrecorded  =  the frames of the epoch, each once

The first two come from the record, the others from the plan: the frames left over if the epoch has ended, those to come
if it has not, and those of ranks whose record a torn checkpoint lost. The verdict names all frames that are missing,
doubled, foreign or out of order.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Final

from raypipe.account.frames import FrameAxis, FrameRange, Runs, add_runs, empty_runs, subtract_runs
from raypipe.account.parts import Account, Part, Skip, merge_skips
from raypipe.account.replay import Chain, Link, Replay, drop_later_epochs, keep_parts, link_parts, order_of, other_order
from raypipe.errors import ResumeError
from raypipe.plan import EpisodeIndex, OrderSpec, OrderState
from raypipe.text import counted, either

_MAX_SHOWN: Final = 20
"""Most lines of each kind in `EpochVerdict.describe`; the JSON has all."""

_MOST_LOST_EPOCHS: Final = 10_000
"""Epochs without any record, each of which gets a verdict. Who moves a run on by `set_epoch` leaves a few; a file that
was changed may name any epoch up to 2**63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedFrames:
    """Frames of an episode that were left out, with the reason."""

    dataset: str
    episode: int
    frames: tuple[FrameRange, ...]
    why: str

    @property
    def num_frames(self) -> int:
        """Number of frames left out."""
        return sum(frames.num_frames for frames in self.frames)

    def describe(self) -> str:
        """Return the frames and the reason in words."""
        place = f"episode {self.episode}" + (f" of {self.dataset!r}" if self.dataset else "")
        return f"{place}: {counted(self.num_frames, 'frame')}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochVerdict:
    """What happened to the frames of one epoch."""

    epoch: int
    is_finished: bool
    num_frames: int
    """Frames of the epoch according to the selection."""

    num_emitted: int
    num_repeated: int
    num_left_over: int = 0
    """Frames that could not be divided equally among the ranks, or that ``tail="drop"`` leaves."""

    num_to_come: int = 0
    num_rolled_back: int = 0
    """Frames handed over after a state to which the run went back; they were, or will be, handed over again. There may
    be more: a rank cannot record what it did in the last 2 s or so before a SIGKILL."""

    num_unrecorded: int = 0
    """Frames of steps that the state counts, but whose ranks died before they wrote their part of the checkpoint."""

    skipped: tuple[SkippedFrames, ...] = ()

    missing: tuple[FrameRange, ...] = ()
    doubled: tuple[FrameRange, ...] = ()
    foreign: tuple[FrameRange, ...] = ()
    """Frames that the dataset does not have, or that the selection leaves out."""

    out_of_order: tuple[str, ...] = ()
    missing_ranks: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    """Places where a part does not begin at the end of the one before."""

    unchecked: str = ""
    """Why the epoch cannot be checked, where the run chose its frames otherwise than the later epochs: then the counts
    are of what was recorded, and of what is wrong only that is told which needs no plan."""

    @property
    def num_skipped(self) -> int:
        """Frames left out as bad data."""
        return sum(skip.num_frames for skip in self.skipped)

    @property
    def is_wrong(self) -> bool:
        """Whether anything is not as it should be."""
        return any((self.missing, self.doubled, self.foreign, self.out_of_order, self.missing_ranks, self.gaps))

    @property
    def is_exact(self) -> bool:
        """Whether every frame is accounted for exactly once, and all were handed over in the order of the plan."""
        return not self.is_wrong and not self.unchecked

    def describe(self) -> tuple[str, ...]:
        """Return the verdict as lines: a summary, then what was skipped and what is wrong."""
        told: dict[str, Sequence[str | FrameRange | SkippedFrames]] = {
            "rolled back": [f"at least {counted(self.num_rolled_back, 'frame')}"] if self.num_rolled_back else [],
            "skipped": self.skipped,
            "missing": self.missing,
            "doubled": self.doubled,
            "foreign": self.foreign,
            "out of order": self.out_of_order,
            "missing ranks": self.missing_ranks,
            "gap": self.gaps,
        }
        lines = [f"epoch {self.epoch}: {self._summary()}"]
        for word, found in told.items():
            shown = [one if isinstance(one, str) else one.describe() for one in found[:_MAX_SHOWN]]
            shown += [f"and {len(found) - _MAX_SHOWN} more"] if len(found) > _MAX_SHOWN else []
            lines += [f"  {word}: {text}" for text in shown]
        return tuple(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        return {**asdict(self), "num_skipped": self.num_skipped, "is_exact": self.is_exact}

    def _summary(self) -> str:
        if self.unchecked and not self.is_wrong:
            return f"cannot be checked: {self.unchecked}"
        if self.is_exact:
            so_far = "" if self.is_finished else " so far"
            unproved = f", {self.num_unrecorded:,} without a record: a torn checkpoint" if self.num_unrecorded else ""
            emitted = f"{self.num_emitted:,} of {counted(self.num_frames, 'frame')} emitted"
            return f"exactly once{so_far}: {emitted}{unproved}"
        frames = {"missing": self.missing, "doubled": self.doubled, "foreign": self.foreign}
        lines = {"out of order": self.out_of_order, "without a rank": self.missing_ranks}
        found = [
            f"{counted(sum(one.num_frames for one in ones), 'frame')} {word}" for word, ones in frames.items() if ones
        ]
        found += [f"{len(ones)} {word}" for word, ones in lines.items() if ones]
        found += [counted(len(self.gaps), "gap")] if self.gaps else []
        rest = f"; the rest cannot be checked: {self.unchecked}" if self.unchecked else ""
        return f"NOT exactly once: {', '.join(found)}{rest}"


def check_account(
    index: EpisodeIndex, axis: FrameAxis, account: Account, attempts: Sequence[Part] = ()
) -> tuple[EpochVerdict, ...]:
    """Return a verdict for every epoch of an account, and for those that were begun and rolled back.

    Goes through every frame of the plan once more: four to eight million a second, in the memory of the runs.

    Args:
        index: the frames of an epoch, by the selection of the account.
        attempts: parts that ranks recorded while running, perhaps beyond the saved state. Frames in them that the
            account lacks were rolled back. Parts of an earlier mixture are ignored.

    Raises:
        ResumeError: the account is of other datasets, or its state or a part is damaged.
    """
    state = account.header.order_state
    if state.fingerprint != index.fingerprint:
        raise ResumeError(
            f"the account is of another dataset: its order fingerprint is {state.fingerprint!r}, and that of the "
            f"dataset is {index.fingerprint!r}. Give the dataset that the run read by --root."
        )
    replay = Replay(index, axis)
    since = index.shares.since if index.shares else 0
    rolled_back = _rolled_back(account.parts, [part for part in attempts if part.epoch >= since])
    parts, dropped = drop_later_epochs(account.parts, state)
    for part in dropped:
        rolled_back[part.epoch] = add_runs(rolled_back[part.epoch], part.emitted)
    begun = _begun_epochs(since, parts, state)
    last = max(begun, default=-1)
    # If no part of the last epoch has this selection, the account may give a wrong one: then check every epoch.
    is_borne_out = any(part.epoch == last and part.selection == replay.selection for part in parts)
    verdicts = []
    for epoch in sorted({*begun, *rolled_back}):
        own = tuple(part for part in parts if part.epoch == epoch)
        if is_borne_out and epoch < last and own and all(part.selection != replay.selection for part in own):
            verdicts.append(_unchecked(own, replay, rolled_back[epoch], state))
            continue
        chain = link_parts(own, replay)
        end_gap = _check_end(chain, state, replay) if epoch == last else ""
        is_left = epoch < max(*begun, state.epoch, -1)
        spec = chain.links[0].part.spec if chain.links else state.spec
        gaps = tuple(_find_other_seeds([link.part for link in chain.links], state)) + ((end_gap,) if end_gap else ())
        check = _EpochCheck(epoch=epoch, chain=chain, replay=replay, spec=spec, is_left=is_left, gaps=gaps)
        verdicts.append(check.verdict(rolled_back[epoch]))
    return tuple(verdicts)


def _begun_epochs(since: int, parts: Sequence[Part], state: OrderState) -> range:
    # Not from the epoch of the first part: a lost beginning would go unnoticed.
    stop = max([state.epoch + bool(state.legs), *(part.epoch + 1 for part in parts)])
    num_recorded = len({part.epoch for part in parts})
    if stop - since - num_recorded > _MOST_LOST_EPOCHS:
        raise ResumeError(
            f"the account leads up to epoch {stop - 1}, and has a record of {counted(num_recorded, 'epoch')}: it was "
            f"changed, or most of it is lost. Check an earlier checkpoint."
        )
    return range(since, stop)


def _unchecked(parts: Sequence[Part], replay: Replay, rolled_back: Runs, state: OrderState) -> EpochVerdict:
    """Return the verdict on an earlier epoch of other frames or weights: an account has the selection of its last.

    There is no plan of such an epoch. What is wrong by its parts alone is told.
    """
    num_emitted = sum(part.emitted.num_values for part in parts)
    told, kept = replay.chosen_otherwise(parts[-1]), keep_parts(parts)
    mixed = [other_order(part) for before, part in pairwise(kept) if order_of(part) != order_of(before)]
    return EpochVerdict(
        epoch=parts[0].epoch,
        is_finished=False,
        num_frames=num_emitted,
        num_emitted=num_emitted,
        num_repeated=sum(part.repeated.num_values for part in parts),
        num_rolled_back=rolled_back.num_values,
        missing_ranks=tuple(_name_missing_ranks(kept)),
        gaps=(*_find_other_seeds(kept, state), *mixed),
        unchecked=f"{told}. Check it by a checkpoint from before the change",
    )


@dataclass(frozen=True, kw_only=True)
class _EpochCheck:
    """One epoch, with everything that its verdict needs."""

    epoch: int
    chain: Chain
    replay: Replay
    spec: OrderSpec
    is_left: bool
    """Whether the run has moved on to a later epoch."""

    gaps: tuple[str, ...]
    """The problems between the parts and the state."""

    def verdict(self, attempted: Runs) -> EpochVerdict:
        replay, axis, links = self.replay, self.replay.axis, self.chain.links
        expected = axis.expected(replay.index, self.spec, self.epoch)
        left_over, to_come, unfinished = self._find_rest(expected)
        # Each part with the frames of the steps that do not count, because the run went back before them.
        parts = [(one.part, self._uncounted(one)) for one in links]
        emitted = add_runs(*(subtract_runs(part.emitted, out) for part, out in parts))
        every = [replace(skip, frames=subtract_runs(skip.frames, out)) for part, out in parts for skip in part.skipped]
        skips = [skip for skip in every if skip.frames]
        torn = [one for one in links if one.part.torn and not one.error]
        unrecorded = add_runs(*(replay.frames(one.part, 0, one.num_steps, one.part.torn) for one in torn))
        gone_back = [part.emitted for part in self.chain.rolled_back]
        gone_back += [part.emitted.intersect(out) for part, out in parts]
        total = add_runs(emitted, *(skip.frames for skip in skips), left_over, to_come, unrecorded)
        surplus = subtract_runs(total, expected)
        doubled = surplus.within(expected)
        gaps = [text for link in links for text in (link.gap, link.error)]
        return EpochVerdict(
            epoch=self.epoch,
            is_finished=bool(links) and not unfinished and not to_come,
            num_frames=expected.num_values,
            num_emitted=emitted.num_values,
            num_repeated=sum(part.repeated.num_values for part, _ in parts),
            num_left_over=left_over.num_values,
            num_unrecorded=unrecorded.num_values,
            num_to_come=to_come.num_values,
            num_rolled_back=add_runs(attempted, *gone_back).num_values,
            skipped=_name_skips(axis, skips),
            missing=axis.name_frames(subtract_runs(expected, total)),
            doubled=axis.name_frames(doubled),
            foreign=axis.name_frames(subtract_runs(surplus, doubled)),
            out_of_order=tuple(self._check_parts()),
            missing_ranks=tuple(_name_missing_ranks([part for part, _ in parts])),
            gaps=tuple(text for text in (*gaps, unfinished, *self.gaps) if text),
        )

    def _uncounted(self, link: Link) -> Runs:
        is_cut = link.num_steps < link.part.num_steps
        return self.replay.frames(link.part, link.num_steps, link.part.num_steps) if is_cut else empty_runs()

    def _find_rest(self, expected: Runs) -> tuple[Runs, Runs, str]:
        """Return the frames left over, those to come, and the problem at the end of the epoch, if any."""
        nothing = empty_runs()
        if not self.chain.links:
            told = f"nothing of epoch {self.epoch} was recorded, and the run has gone on to a later one"
            return (nothing, nothing, told) if self.is_left else (nothing, expected, "")
        last = self.chain.links[-1]
        if last.error:
            return nothing, nothing, ""
        rest = self.replay.frames_after(last.part, last.num_steps)
        if last.is_finished(self.replay):
            return rest, nothing, ""
        if self.is_left:
            return nothing, nothing, f"the run left epoch {self.epoch} before its end"
        return nothing, rest, ""

    def _check_parts(self) -> Iterator[str]:
        """Yield every difference of the parts from the plan."""
        skipped = add_runs(*(skip.frames for link in self.chain.links for skip in link.part.skipped))
        for link in self.chain.links:
            if not link.error:
                yield from self.replay.check(link.part, skipped)


def _find_other_seeds(parts: Sequence[Part], state: OrderState) -> Iterator[str]:
    for part in parts:
        if part.spec.seed != state.spec.seed:
            yield (
                f"{part.describe()} has the seed {part.spec.seed}, and the state of the account {state.spec.seed}: "
                f"it is of another run"
            )


def _check_end(chain: Chain, state: OrderState, replay: Replay) -> str:
    """Return the problem between the last part and the state at which the account claims to end."""
    ends: tuple[int, tuple[Any, ...]] = (state.epoch, ())
    last = chain.links[-1] if chain.links else None
    if last and last.error:
        return ""
    if last:
        ends = (last.part.epoch + 1, ()) if last.is_finished(replay) else (last.part.epoch, last.end_legs(replay))
    if ends != (state.epoch, state.legs):
        return (
            f"the parts lead up to epoch {ends[0]}, {_words(ends[1])}, and the state of the account is at epoch "
            f"{state.epoch}, {_words(state.legs)}"
        )
    if last and state.legs and order_of(last.part) != order_of(state):
        return f"the state of the account has another order or selection than {last.part.describe()}"
    return ""


def _words(legs: Sequence[Any]) -> str:
    words = ", then ".join(
        f"{counted(leg.frames_per_lane, 'frame')} of {either(leg.lanes, 'one lane', f'each of {leg.lanes} lanes')}"
        for leg in legs
    )
    return f"after {words}" if words else "at its start"


def _rolled_back(parts: Sequence[Part], attempts: Sequence[Part]) -> defaultdict[int, Runs]:
    """Return, by epoch, the frames that attempts handed over and the account lacks."""
    groups: defaultdict[tuple[Any, ...], Runs] = defaultdict(empty_runs)
    for part in attempts:
        # The same part may occur twice: as a rank recorded it, and merged, as a later attempt carries it along.
        groups[part.start_key] = groups[part.start_key].unite(part.emitted)
    kept: defaultdict[tuple[Any, ...], Runs] = defaultdict(empty_runs)
    for part in parts:
        kept[part.start_key] = add_runs(kept[part.start_key], part.emitted)
    found: defaultdict[int, Runs] = defaultdict(empty_runs)
    for key, emitted in groups.items():
        if beyond := subtract_runs(emitted, kept[key]):
            found[key[0]] = add_runs(found[key[0]], beyond)
    return found


def _name_skips(axis: FrameAxis, skips: Sequence[Skip]) -> tuple[SkippedFrames, ...]:
    return tuple(
        SkippedFrames(
            dataset=axis.name_of(skip.dataset), episode=skip.episode, frames=axis.name_frames(skip.frames), why=skip.why
        )
        for skip in merge_skips(skips)
    )


def _name_missing_ranks(parts: Sequence[Part]) -> Iterator[str]:
    for part in parts:
        if part.missing_ranks:
            ranks = ", ".join(map(str, part.missing_ranks))
            yield f"{part.describe()}: no record of rank {ranks}"
