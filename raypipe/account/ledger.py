"""`Ledger`: what one rank writes down as it hands batches over.

Records frames that are in batches; knows of the plan only where a pass begins. Costs about 10 us a batch: values are
kept as bytes, and some 65,536 of them at a time are turned into runs.
"""

import hashlib
import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.account.parts import Part, RankRecord, Skip, merge_skips
from raypipe.account.runs import Runs, add_runs, count_values, empty_runs
from raypipe.errors import RaypipeError
from raypipe.plan import WorldPlan
from raypipe.plan.keyhash import Ints

_VALUES_TO_COMPACT: Final = 1 << 16
_VALUES_PER_RUN: Final = 4
"""Where there are many runs, so many values for each are kept before all are sorted again: it is the costly part."""

_LITTLE: Final = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class Hole:
    """Planned frames of one episode that a batch does not have, since they are bad data."""

    dataset: int
    episode: int
    numbers: Ints
    """On the axis of accounts; without planned repeats."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What one batch holds."""

    numbers: Ints
    """(B,) frames on the axis of accounts, in the order of the batch."""

    is_repeat: NDArray[np.bool_]
    """(B,) frames that were emitted before: by the tail, or in the place of a batch of bad data."""

    lanes: Ints
    """Lane of every planned frame that is no repeat, holes included."""

    holes: tuple[Hole, ...] = ()

    @property
    def num_skipped(self) -> int:
        """Frames that were planned and are not there."""
        return sum(len(hole.numbers) for hole in self.holes)


class FrameDigest:
    """A digest of the frames of batches: of their order, and of where each batch ends.

    Repeats are left out. Which ones stand in for bad data is not known from the batch, and a check by the plan could
    not tell them from those of the tail; as a multiset they are checked all the same.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, content: bytes) -> None:
        """Take in one batch: its frames, repeats left out, as little-endian 64-bit integers."""
        self._hash.update(len(content).to_bytes(8, "little") + content)

    def add_equal(self, numbers: Ints) -> None:
        """Take in many batches of equal size, ``(S, B)``; the same as one after the other."""
        table = np.empty((numbers.shape[0], numbers.shape[1] + 1), dtype=_LITTLE)
        table[:, 0] = numbers.shape[1] * _LITTLE.itemsize
        table[:, 1:] = numbers
        self._hash.update(table.reshape(-1).data)

    def hexdigest(self) -> str:
        """Return the digest so far."""
        return self._hash.hexdigest()


class Ledger:
    """What one rank has handed over, part by part. Threads may share it.

    ::

        ledger = Ledger(prior=parts_of_the_checkpoint)      on one rank; the others begin with none
        ledger.begin(world, rank)                           where a pass begins: a start, a resume, an epoch
        ledger.record(handed)                               for every batch, when it is handed over
        ledger.parts()                                      to be saved with the state
    """

    def __init__(self, prior: tuple[Part, ...] = (), *, attempt: str = "") -> None:
        """Begin with the parts of earlier starts.

        Args:
            prior: parts that lead up to where the next pass begins, of all ranks. One rank carries them for all.
            attempt: names this start of the run's processes; the same on all ranks.
        """
        self._closed = list(prior)
        self._attempt = attempt
        self._open: _OpenPart | None = None
        self._lock = threading.Lock()

    def begin(self, world: WorldPlan, rank: int) -> None:
        """Note that a pass starts at ``world.plan.legs``; what was recorded before is closed."""
        with self._lock:
            self._close()
            opened = _OpenPart(world, rank, self._attempt)
            key = opened.part().start_key
            opened.turn = len({part.turn for part in self._closed if (*part.place_key, part.attempt) == key[:-1]})
            self._open = opened

    def record(self, handed: Handed) -> None:
        """Note a batch that is handed over."""
        with self._lock:
            if self._open is None:
                raise RaypipeError("a batch is recorded, and no pass has begun: call begin(world, rank) first")
            self._open.record(handed)

    def parts(self) -> tuple[Part, ...]:
        """Return the prior parts, those that are closed, and the current one up to now."""
        with self._lock:
            current = (self._open.part(),) if self._open is not None and self._open.counts else ()
            return (*self._closed, *current)

    def __getstate__(self) -> dict[str, Any]:
        # A hash that is under way cannot be sent: the copy has the part as it is now, closed.
        return {"prior": self.parts(), "attempt": self._attempt}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Ledger.__init__(self, state["prior"], attempt=state["attempt"])

    def _close(self) -> None:
        if self._open is not None and self._open.counts:
            self._closed.append(self._open.part())
        self._open = None


class _OpenPart:
    """A part that is being recorded."""

    def __init__(self, world: WorldPlan, rank: int, attempt: str) -> None:
        self._start: dict[str, Any] = {
            "epoch": world.plan.epoch,
            "legs": world.plan.legs,
            "spec": world.plan.spec,
            "selection": world.plan.selection,
            "world_size": world.world_size,
            "per_lane": world.steps.per_lane,
            "attempt": attempt,
        }
        self.turn = 0
        self._is_without_steps = world.num_steps == 0
        self._rank = rank
        self._num_steps = 0
        self._num_frames = 0
        self._digest = FrameDigest()
        self._lanes = np.zeros(world.plan.leg.lanes, dtype=np.int64)
        self._emitted, self._repeated = empty_runs(), empty_runs()
        self._skipped: list[Skip] = []
        self._num_buffered = 0
        self._buffers: tuple[list[bytes], list[bytes], list[Ints]] = ([], [], [])

    @property
    def counts(self) -> bool:
        """Whether something was done, or there is nothing to do: then it tells that the epoch is over."""
        return self._num_steps > 0 or self._is_without_steps

    def record(self, handed: Handed) -> None:
        """Take in one batch."""
        numbers, lanes = np.asarray(handed.numbers, dtype=_LITTLE), handed.lanes
        emitted, repeated, given = self._buffers
        if handed.is_repeat.any():
            repeated.append(numbers[handed.is_repeat].tobytes())
            numbers = numbers[~handed.is_repeat]
        # A copy: a training loop may write over its batch.
        content = numbers.tobytes()
        self._digest.add(content)
        emitted.append(content)
        given.append(lanes)
        self._num_steps += 1
        self._num_frames += len(numbers)
        self._num_buffered += len(handed.numbers)
        for hole in handed.holes:
            self._skipped.append(_skip(hole))
        if self._num_buffered > max(_VALUES_TO_COMPACT, _VALUES_PER_RUN * len(self._emitted)):
            self._compact()

    def part(self) -> Part:
        """Return what was recorded so far."""
        self._compact()
        served = np.flatnonzero(self._lanes)
        record = RankRecord(
            rank=self._rank,
            num_frames=self._num_frames,
            lanes=tuple(zip(served.tolist(), self._lanes[served].tolist(), strict=True)),
            digest=self._digest.hexdigest(),
        )
        return Part(
            **self._start,
            turn=self.turn,
            num_steps=self._num_steps,
            ranks=(record,),
            emitted=self._emitted,
            repeated=self._repeated,
            skipped=tuple(self._skipped),
        )

    def _compact(self) -> None:
        emitted, repeated, given = self._buffers
        if emitted:
            self._emitted = _add_values(self._emitted, emitted)
            self._lanes += np.bincount(np.concatenate(given), minlength=len(self._lanes))
        if repeated:
            self._repeated = _add_values(self._repeated, repeated)
        self._skipped = list(merge_skips(self._skipped))
        self._buffers, self._num_buffered = ([], [], []), 0


def _skip(hole: Hole) -> Skip:
    why = hole.why.strip().splitlines()[0] if hole.why.strip() else "no reason was given"
    return Skip(dataset=int(hole.dataset), episode=int(hole.episode), frames=count_values(hole.numbers), why=why)


def _add_values(runs: Runs, contents: list[bytes]) -> Runs:
    return add_runs(runs, count_values(np.frombuffer(b"".join(contents), dtype=_LITTLE)))
