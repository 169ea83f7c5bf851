"""`Ledger`: what one rank records as it hands batches over.

Records the frames in batches; all it knows of the plan is where a pass begins. Costs about 10 us a batch: it keeps
values as bytes and turns at least 65,536 at a time into runs.

Ctrl-C may come between any two steps of the code. So every change here is one assignment that either happened or did
not, and only `Page.num_handed` decides which batches count.
"""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.account.frames import Runs, add_runs, count_values, empty_runs
from raypipe.account.parts import Part, RankRecord, Skip, merge_skips
from raypipe.errors import RaypipeError
from raypipe.plan import Ints, WorldPlan

_VALUES_TO_COMPACT: Final = 1 << 16
_VALUES_PER_RUN: Final = 4
"""With many runs, wait for this many values per run before the next sort, which is the costly part."""

_LITTLE: Final = np.dtype("<i8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """The frames of one batch."""

    numbers: Ints
    """(B,) frames on the axis of accounts, in the order of the batch."""

    is_repeat: NDArray[np.bool_]
    """(B,) frames that were emitted before: repeats of the tail, or a stand-in for a batch of bad data."""

    lanes: Ints
    """Lane of every planned frame, skipped ones included and repeats not."""

    skipped: tuple[Skip, ...] = ()
    """Planned frames that the batch lacks, without planned repeats."""

    @property
    def num_skipped(self) -> int:
        """Number of planned frames that the batch lacks."""
        return sum(skip.frames.num_values for skip in self.skipped)


def begin_digest() -> hashlib.blake2b:
    """Return the digest of no batches; it depends on the order of their frames, and on where each batch ends.

    It leaves repeats out. The batch does not say which of them stand in for bad data, and a check against the plan
    could not tell those from repeats of the tail. The check still covers repeats as a multiset.
    """
    return hashlib.blake2b(digest_size=16)


def add_batch(digest: hashlib.blake2b, content: bytes) -> None:
    """Add one batch to a digest: its frames without repeats, as little-endian 64-bit integers."""
    digest.update(len(content).to_bytes(8, "little") + content)


def add_equal_batches(digest: hashlib.blake2b, numbers: Ints) -> None:
    """Add many batches of equal size, ``(S, B)``; same result as adding them one by one."""
    table = np.empty((numbers.shape[0], numbers.shape[1] + 1), dtype=_LITTLE)
    table[:, 0] = numbers.shape[1] * _LITTLE.itemsize
    table[:, 1:] = numbers
    digest.update(table.reshape(-1).data)


class Ledger:
    """What one rank has handed over, part by part. Thread-safe.

    ::

        ledger = Ledger(prior=parts_of_the_checkpoint)      on one rank; the others begin with none
        page = ledger.begin(world, rank)                    where a pass begins: a start, a resume, an epoch
        ledger.record(handed)                               for every batch, when the rank hands it over
        ledger.parts()                                      to save with the state
    """

    def __init__(self, prior: tuple[Part, ...] = (), *, attempt: str = "") -> None:
        """Begin with the parts of earlier starts.

        Args:
            prior: parts of all ranks that lead to where the next pass begins. One rank carries them for all.
            attempt: name of this start of the run's processes; the same on all ranks.
        """
        self._attempt = attempt
        self._pages: tuple[tuple[Part, ...], Page | None] = (tuple(prior), None)
        """The closed parts, and the current page."""
        self._lock = threading.Lock()

    def begin(self, world: WorldPlan, rank: int) -> "Page":
        """Return the page of a pass that starts at ``world.plan.legs``, and close the part before."""
        with self._lock:
            closed, last = self._pages
            page = Page(world, rank, self._attempt)
            key = page.part().start_key
            # A pass without steps counts as soon as it begins. If it was interrupted and begins again, count it once.
            if last is not None and last.counts and (last.num_handed or last.part().start_key[:-1] != key[:-1]):
                closed = (*closed, last.part())
            page.turn = len({part.turn for part in closed if (*part.place_key, part.attempt) == key[:-1]})
            self._pages = (closed, page)
            return page

    def record(self, handed: Handed) -> None:
        """Record a batch as handed over."""
        page = self._pages[1]
        if page is None:
            raise RaypipeError("a batch is recorded, and no pass has begun: call begin(world, rank) first")
        page.write(handed)
        page.num_handed += 1

    def parts(self) -> tuple[Part, ...]:
        """Return the prior parts, the closed ones, and the current one up to now."""
        with self._lock:
            closed, page = self._pages
            return (*closed, page.part()) if page is not None and page.counts else closed

    def __getstate__(self) -> dict[str, Any]:
        # A running hash cannot be pickled, so close the current part in the copy.
        return {"prior": self.parts(), "attempt": self._attempt}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Ledger.__init__(self, state["prior"], attempt=state["attempt"])


class Page:
    """The batches of one pass. The loader writes a batch before handing it over; it counts once handed over.

    ::

        page.write(handed)
        page.num_handed = 3     Python cannot raise KeyboardInterrupt between these two lines:
        yield batch             the loop has the batch if and only if it counts
    """

    def __init__(self, world: WorldPlan, rank: int, attempt: str) -> None:
        self.num_handed = 0
        """Number of written batches that the training loop has received."""
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
        self._written: tuple[_Sums, list[_Entry]] = (_Sums(lanes=np.zeros(world.plan.leg.lanes, dtype=np.int64)), [])
        """The sums of the first batches, and the entries of later ones."""

    @property
    def counts(self) -> bool:
        """Whether the page is worth a part: it has batches, or no steps at all, which shows that the epoch is over."""
        return self.num_handed > 0 or self._is_without_steps

    def write(self, handed: Handed) -> None:
        """Write the batch that the loader hands over next."""
        numbers, repeated = np.asarray(handed.numbers, dtype=_LITTLE), b""
        if handed.is_repeat.any():
            numbers, repeated = numbers[~handed.is_repeat], numbers[handed.is_repeat].tobytes()
        entry = _Entry(numbers.tobytes(), repeated, handed.lanes, handed.skipped)
        with self._lock:
            sums, entries = self._written
            entries.append(entry)
            self._num_buffered += len(handed.numbers)
            if self._num_buffered > max(_VALUES_TO_COMPACT, _VALUES_PER_RUN * len(sums.emitted)):
                self._compact()

    def part(self) -> Part:
        """Return what the rank has handed over so far."""
        with self._lock:
            sums = self._compact()
        served = np.flatnonzero(sums.lanes)
        record = RankRecord(
            rank=self._rank,
            num_frames=sums.emitted.num_values,
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
    """One batch, copied because a training loop may overwrite its own."""

    emitted: bytes
    repeated: bytes
    lanes: Ints
    skipped: tuple[Skip, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """The sums of several batches."""

    lanes: Ints
    digest: hashlib.blake2b = field(default_factory=begin_digest)
    num_steps: int = 0
    emitted: Runs = field(default_factory=empty_runs)
    repeated: Runs = field(default_factory=empty_runs)
    skipped: tuple[Skip, ...] = ()

    def plus(self, entries: Sequence[_Entry]) -> "_Sums":
        """Return new sums that include more batches."""
        if not entries:
            return self
        digest = self.digest.copy()
        for entry in entries:
            add_batch(digest, entry.emitted)
        lanes = np.concatenate([entry.lanes for entry in entries])
        return _Sums(
            digest=digest,
            lanes=self.lanes + np.bincount(lanes, minlength=len(self.lanes)),
            num_steps=self.num_steps + len(entries),
            emitted=_add_values(self.emitted, [entry.emitted for entry in entries]),
            repeated=_add_values(self.repeated, [entry.repeated for entry in entries]),
            skipped=merge_skips([*self.skipped, *(skip for entry in entries for skip in entry.skipped)]),
        )


def _add_values(runs: Runs, contents: list[bytes]) -> Runs:
    if not any(contents):
        return runs
    return add_runs(runs, count_values(np.frombuffer(b"".join(contents), dtype=_LITTLE)))
