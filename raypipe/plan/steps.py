"""The steps of a leg: how many frames each takes from every lane, and how the epoch ends.

Every lane gives the same number of frames to every step but the last, so one integer is the position of all lanes.
In the last step, lanes with an extra frame may give one more.

::

    4 lanes with 11 11 10 10 frames left, 4 a step

    tail="short"    4 4 4 4 | 4 4 4 4 | 3 3 2 2
    tail="drop"     4 4 4 4 | 4 4 4 4 |               the rest is left over
    tail="wrap"     4 4 4 4 | 4 4 4 4 | 4 4 4 4       of which 1 1 2 2 repeat the lane's last frames

    4 lanes with 9 9 8 8 left: after full batches only the extras would remain, so tail="short" splits the last one

    tail="short"    4 4 4 4 | 2 2 2 2 | 3 3 2 2
"""

from dataclasses import dataclass

import numpy as np

from raypipe.plan.keyhash import Ints
from raypipe.plan.spec import Tail


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The remaining steps of a leg; step 0 is the next one."""

    position: int
    """Frames that every lane has emitted before step 0."""

    per_lane: int
    num_full: int

    short: tuple[int, ...] = ()
    """Frames per lane of the steps after the full ones."""

    extras: int = 0
    """Lanes, from lane 0 on, that give one more frame to the last step."""

    num_repeats: int = 0
    """Repeats with which a lane without an extra frame fills up the last step."""

    @property
    def num_steps(self) -> int:
        """Steps left."""
        return self.num_full + len(self.short)

    def position_after(self, num_steps: int) -> int:
        """Return how many frames every lane without an extra has emitted after the next `num_steps` steps."""
        full = min(num_steps, self.num_full)
        return self.position + full * self.per_lane + sum(self.short[: num_steps - full])

    def starts(self) -> Ints:
        """Return the position at which every step starts."""
        return self.position + np.cumsum([0, *[self.per_lane] * self.num_full, *self.short])[: self.num_steps]

    def extra(self, lane: int, step: int) -> int:
        """Return how many extra frames (0 or 1) the lane gives to `step`."""
        return int(lane < self.extras and step == self.num_steps - 1)

    def repeats(self, lane: int, step: int) -> int:
        """Return how many repeats the lane gives to `step`."""
        return self.num_repeats - self.extra(lane, step) if self.num_repeats and step == self.num_steps - 1 else 0

    def end(self, lane: int) -> int:
        """Return how many frames the lane has emitted after the last step."""
        return self.position_after(self.num_steps) + self.extra(lane, self.num_steps - 1)

    def send_start(self, share: int) -> int:
        """Return the position from which a rank needs frames: before `position` only if the last step repeats some.

        It is the same for every lane: lanes that sent different numbers of frames would upset Ray's split.
        """
        return min(self.position, max(0, share - self.num_repeats)) if self.num_repeats else self.position


def plan_steps(share: int, extras: int, *, position: int, per_lane: int, tail: Tail) -> Steps:
    """Return the steps from `position` on of lanes of `share` frames, the first `extras` of them with one more.

    A share of 0 (fewer frames than lanes, on a new leg near the end of an epoch) gives no step: the lanes cannot share
    those frames, so they are left over.
    """
    rest = share - position
    if tail == "drop" or not share or (not rest and (tail == "short" or not extras)):
        return Steps(position=position, per_lane=per_lane, num_full=rest // per_lane)
    if tail == "wrap":
        num_steps = -(-(rest + bool(extras)) // per_lane)
        last = rest - (num_steps - 1) * per_lane
        return Steps(
            position=position,
            per_lane=per_lane,
            num_full=num_steps - 1,
            short=(last,),
            extras=extras,
            num_repeats=per_lane - last,
        )
    num_full, last = divmod(rest - 1, per_lane)
    last += 1
    is_split = bool(extras) and last == per_lane > 1
    return Steps(
        position=position,
        per_lane=per_lane,
        num_full=num_full,
        short=(per_lane // 2, per_lane - per_lane // 2) if is_split else (last,),
        # A step of one frame has no room for an extra one.
        extras=extras if per_lane > 1 else 0,
    )
