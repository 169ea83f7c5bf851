"""`EpochVerdict`: the result of a check for one epoch, with counts and a list of everything wrong."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from raypipe.account.axis import FrameRange
from raypipe.text import counted

_MAX_SHOWN: Final = 20
"""Most lines of each kind in `EpochVerdict.describe`; the JSON has all."""


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
    num_left_over: int
    """Frames that could not be divided equally among the ranks, or that ``tail="drop"`` leaves."""

    num_to_come: int
    num_rolled_back: int
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
        wrong = (self.missing, self.doubled, self.foreign, self.out_of_order, self.missing_ranks, self.gaps)
        return any(wrong)

    @property
    def is_exact(self) -> bool:
        """Whether every frame is accounted for exactly once, and all were handed over in the order of the plan."""
        return not self.is_wrong and not self.unchecked

    def describe(self) -> tuple[str, ...]:
        """Return the verdict as lines: a summary, then what was skipped and what is wrong."""
        return (
            f"epoch {self.epoch}: {self._summary()}",
            *_shown(
                "rolled back", [f"at least {counted(self.num_rolled_back, 'frame')}"] if self.num_rolled_back else []
            ),
            *_shown("skipped", [skip.describe() for skip in self.skipped]),
            *_shown("missing", [frames.describe() for frames in self.missing]),
            *_shown("doubled", [frames.describe() for frames in self.doubled]),
            *_shown("foreign", [frames.describe() for frames in self.foreign]),
            *_shown("out of order", self.out_of_order),
            *_shown("missing ranks", self.missing_ranks),
            *_shown("gap", self.gaps),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        return {**asdict(self), "num_skipped": self.num_skipped, "is_exact": self.is_exact}

    def _summary(self) -> str:
        if self.unchecked and not self.is_wrong:
            return f"cannot be checked: {self.unchecked}"
        if self.is_exact:
            so_far = "" if self.is_finished else " so far"
            unproved = f", {self.num_unrecorded:,} without a record: a torn checkpoint" if self.num_unrecorded else ""
            return (
                f"exactly once{so_far}: {self.num_emitted:,} of {counted(self.num_frames, 'frame')} emitted{unproved}"
            )
        found = []
        for word, frames in (("missing", self.missing), ("doubled", self.doubled), ("foreign", self.foreign)):
            if frames:
                found.append(f"{counted(sum(one.num_frames for one in frames), 'frame')} {word}")
        for word, lines in (("out of order", self.out_of_order), ("without a rank", self.missing_ranks)):
            if lines:
                found.append(f"{len(lines)} {word}")
        rest = f"; the rest cannot be checked: {self.unchecked}" if self.unchecked else ""
        gaps = [counted(len(self.gaps), "gap")] if self.gaps else []
        return "NOT exactly once: " + ", ".join([*found, *gaps]) + rest


def _shown(word: str, lines: Sequence[str]) -> list[str]:
    more = len(lines) - _MAX_SHOWN
    return [f"  {word}: {line}" for line in lines[:_MAX_SHOWN]] + ([f"  {word}: and {more} more"] if more > 0 else [])
