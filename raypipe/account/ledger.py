"""`Ledger`: what one rank writes down as it hands batches over.

Records frames that are in batches; knows of the plan only where a pass begins. Costs about 10 us a batch: values are
kept as bytes, and some 65,536 of them at a time are turned into runs.

Ctrl-C may come between any two steps of the code. So every change here is one assignment that either happened or did
not, and a batch counts by `Page.num_handed` alone.
"""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.account.parts import Part, RankRecord, Skip, merge_skips
from raypipe.account.runs import Runs, add_runs, count_values, empty_runs
from raypipe.errors import RaypipeError
from raypipe.plan import Ints, WorldPlan

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

    def copy(self) -> "FrameDigest":
        """Return a digest that goes on from here, and leaves this one as it is."""
        copied = FrameDigest()
        copied._hash = self._hash.copy()
        return copied

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
        page = ledger.begin(world, rank)                    where a pass begins: a start, a resume, an epoch
        ledger.record(handed)                               for every batch, when it is handed over
        ledger.parts()                                      to be saved with the state
    """

    def __init__(self, prior: tuple[Part, ...] = (), *, attempt: str = "") -> None:
        """Begin with the parts of earlier starts.

        Args:
            prior: parts that lead up to where the next pass begins, of all ranks. One rank carries them for all.
            attempt: names this start of the run's processes; the same on all ranks.
        """
        self._attempt = attempt
        self._pages: tuple[tuple[Part, ...], Page | None] = (tuple(prior), None)
        """The parts that are closed, and the page that is written on."""
        self._lock = threading.Lock()

    def begin(self, world: WorldPlan, rank: int) -> "Page":
        """Note that a pass starts at ``world.plan.legs``, and return its page; what was recorded before is closed."""
        with self._lock:
            closed, last = self._pages
            page = Page(world, rank, self._attempt)
            key = page.part().start_key
            # A pass without a step counts when it begins: one that was interrupted there begins again.
            if last is not None and last.counts and (last.num_handed or last.part().start_key[:-1] != key[:-1]):
                closed = (*closed, last.part())
            page.turn = len({part.turn for part in closed if (*part.place_key, part.attempt) == key[:-1]})
            self._pages = (closed, page)
            return page

    def record(self, handed: Handed) -> None:
        """Note a batch that is handed over."""
        page = self._pages[1]
        if page is None:
            raise RaypipeError("a batch is recorded, and no pass has begun: call begin(world, rank) first")
        page.write(handed)
        page.num_handed += 1

    def parts(self) -> tuple[Part, ...]:
        """Return the prior parts, those that are closed, and the current one up to now."""
        with self._lock:
            closed, page = self._pages
            return (*closed, page.part()) if page is not None and page.counts else closed

    def __getstate__(self) -> dict[str, Any]:
        # A hash that is under way cannot be sent: the copy has the part as it is now, closed.
        return {"prior": self.parts(), "attempt": self._attempt}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Ledger.__init__(self, state["prior"], attempt=state["attempt"])


class Page:
    """The batches of one pass. A batch is written before it is handed over, and counts when it is.

    ::

        page.write(handed)
        page.num_handed = 3     with nothing between the two lines at which Python could raise KeyboardInterrupt:
        yield batch             the loop has the batch if and only if it counts
    """

    def __init__(self, world: WorldPlan, rank: int, attempt: str) -> None:
        self.num_handed = 0
        """Batches that the training loop has: the first so many that were written."""
        self.turn = 0
        self._start: dict[str, Any] = {
            "epoch": world.plan.epoch,
            "legs": world.plan.legs,
            "spec": world.plan.spec,
            "selection": world.plan.selection,
            "world_size": world.world_size,
            "per_lane": world.steps.per_lane,
            "attempt": attempt,
        }
        self._is_without_steps = world.num_steps == 0
        self._rank = rank
        self._lock = threading.Lock()
        self._num_buffered = 0
        self._written: tuple[_Sums, list[_Entry]] = (_Sums.nothing(world.plan.leg.lanes), [])
        """What was added up of the first batches, and the entries of later ones."""

    @property
    def counts(self) -> bool:
        """Whether something was done, or there is nothing to do: then it tells that the epoch is over."""
        return self.num_handed > 0 or self._is_without_steps

    def write(self, handed: Handed) -> None:
        """Take in the batch that is handed over next."""
        entry = _make_entry(handed)
        with self._lock:
            sums, entries = self._written
            entries.append(entry)
            self._num_buffered += len(handed.numbers)
            if self._num_buffered > max(_VALUES_TO_COMPACT, _VALUES_PER_RUN * len(sums.emitted)):
                self._compact()

    def part(self) -> Part:
        """Return what was handed over so far."""
        with self._lock:
            sums = self._compact()
        served = np.flatnonzero(sums.lanes)
        record = RankRecord(
            rank=self._rank,
            num_frames=sums.num_frames,
            lanes=tuple(zip(served.tolist(), sums.lanes[served].tolist(), strict=True)),
            digest=sums.digest.hexdigest(),
        )
        return Part(
            **self._start,
            turn=self.turn,
            num_steps=sums.num_steps,
            ranks=(record,),
            emitted=sums.emitted,
            repeated=sums.repeated,
            skipped=sums.skipped,
        )

    def _compact(self) -> "_Sums":
        sums, entries = self._written
        num_new = self.num_handed - sums.num_steps
        added = sums.plus(entries[:num_new])
        self._written = (added, entries[num_new:])
        self._num_buffered = 0
        return added


class _Entry(NamedTuple):
    """One batch, copied: a training loop may write over its own."""

    emitted: bytes
    repeated: bytes
    lanes: Ints
    skips: tuple[Skip, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """Batches added up."""

    digest: FrameDigest
    lanes: Ints
    num_steps: int = 0
    num_frames: int = 0
    emitted: Runs
    repeated: Runs
    skipped: tuple[Skip, ...] = ()

    @classmethod
    def nothing(cls, num_lanes: int) -> "_Sums":
        lanes = np.zeros(num_lanes, dtype=np.int64)
        return cls(digest=FrameDigest(), lanes=lanes, emitted=empty_runs(), repeated=empty_runs())

    def plus(self, entries: Sequence[_Entry]) -> "_Sums":
        """Return the sums with more batches; these stay as they are."""
        if not entries:
            return self
        digest = self.digest.copy()
        for entry in entries:
            digest.add(entry.emitted)
        lanes = np.concatenate([entry.lanes for entry in entries])
        return _Sums(
            digest=digest,
            lanes=self.lanes + np.bincount(lanes, minlength=len(self.lanes)),
            num_steps=self.num_steps + len(entries),
            num_frames=self.num_frames + sum(len(entry.emitted) for entry in entries) // _LITTLE.itemsize,
            emitted=_add_values(self.emitted, [entry.emitted for entry in entries]),
            repeated=_add_values(self.repeated, [entry.repeated for entry in entries]),
            skipped=merge_skips([*self.skipped, *(skip for entry in entries for skip in entry.skips)]),
        )


def _make_entry(handed: Handed) -> _Entry:
    numbers, repeated = np.asarray(handed.numbers, dtype=_LITTLE), b""
    if handed.is_repeat.any():
        numbers, repeated = numbers[~handed.is_repeat], numbers[handed.is_repeat].tobytes()
    return _Entry(numbers.tobytes(), repeated, handed.lanes, tuple(_skip(hole) for hole in handed.holes))


def _skip(hole: Hole) -> Skip:
    why = hole.why.strip().splitlines()[0] if hole.why.strip() else "no reason was given"
    return Skip(dataset=int(hole.dataset), episode=int(hole.episode), frames=count_values(hole.numbers), why=why)


def _add_values(runs: Runs, contents: list[bytes]) -> Runs:
    if not any(contents):
        return runs
    return add_runs(runs, count_values(np.frombuffer(b"".join(contents), dtype=_LITTLE)))
