"""Represent what ranks handed to the trainer as values: parts, which merge over ranks, and the account of all parts.

A *part* is what ranks handed over from the beginning of a pass of an epoch up to some state. It comes from the frames
in the batches, never from the plan: otherwise the two could not differ.

::

    epoch 0                                             epoch 1
    |---- part, 4 ranks ----|-- part, 4 ranks --|- part, 3 ranks -|---- part ...
    start                   restart             restart, new leg

    part    emitted   runs of frames, of all ranks together
            repeated  runs: repeats of the tail, and stand-ins for batches of bad data
            skipped   runs by episode, with the reason
            ranks     for each: frames, frames per lane, and a digest of their order

**Seals.** Digests chain the parts of an account, so that a reader detects changed or missing ones. A rank seals its
account when it takes it; a checkpoint has the head of rank 0's account beside the state.

::

    origin      digest of dataset and seed
    part 0      before = origin
    part 1      before = digest of (origin, part 0)
    part 2      before = digest of (part 1's before, part 1)
    header      head   = digest of (part 2's before, part 2, the header)

Changing, moving, removing or inserting a part breaks the chain from there on, and so does changing the header. The
chain has no secret: if someone rewrites all of it, only the check against the plan can find out, as far as the plan can
tell. Accounts from before the chain existed have none; they are read without this check.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

from raypipe.account.frames import Runs, add_runs, count_values
from raypipe.errors import RaypipeError
from raypipe.plan import Ints, Leg, OrderSpec, OrderState
from raypipe.text import counted

HEAD: Final = "account"
"""The key beside a state in a checkpoint that holds the head of rank 0's account chain."""


@dataclass(frozen=True, kw_only=True)
class Skip:
    """Frames of an episode that were left out."""

    dataset: int
    episode: int
    frames: Runs
    """Frames on the axis of accounts, each once."""

    why: str
    """The first line of the error."""

    @classmethod
    def of(cls, dataset: int, episode: int, numbers: Ints, why: str) -> "Skip":
        """Return the skip of frames on the axis of accounts, for the text of an error."""
        lines = why.strip().splitlines() or ["no reason was given"]
        return cls(dataset=dataset, episode=episode, frames=count_values(numbers), why=lines[0])


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one rank handed over in a part."""

    rank: int
    num_frames: int
    """Frames emitted, without repeats."""

    lanes: tuple[tuple[int, int], ...]
    """(lane, number of its frames, skipped ones included and repeats not), by lane."""

    digest: str
    """Digest of the frames of every batch in order, without repeats; see `begin_digest`."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What ranks handed over from the start of a pass up to one state."""

    epoch: int
    legs: tuple[Leg, ...]
    """The legs at the part's start."""

    spec: OrderSpec
    """The order at the part's start: tail and span length may change between epochs."""

    selection: str
    """Which frames are anchors, in the words of `describe_selection`."""

    world_size: int
    per_lane: int
    """Frames that a full step takes from every lane."""

    num_steps: int
    ranks: tuple[RankRecord, ...]
    """Records by rank: one in a rank's own part, all in a merged part."""

    emitted: Runs
    repeated: Runs
    skipped: tuple[Skip, ...] = ()

    attempt: str = ""
    """Name of the start that recorded the part; distinguishes a part carried along from one that was done again."""

    turn: int = 0
    """Number of earlier parts of the attempt with the same start; above 0 if it went back to repeat frames."""

    torn: tuple[int, ...] = ()
    """Ranks that died before they wrote the part although the state was saved. What they did cannot be proved."""

    before: str = field(default="", compare=False)
    """Digest of everything before it in its account: its seal."""

    listed: tuple[tuple[int, Runs], ...] = field(default=(), compare=False)
    """In a merged part: by rank, the frames in that rank's own file, including skipped ones."""

    @cached_property
    def digest(self) -> str:
        """Digest of everything in the part except `before`."""
        skips = [(skip.dataset, skip.episode, skip.why) for skip in self.skipped]
        runs = [self.emitted, self.repeated, *(skip.frames for skip in self.skipped)]
        legs, ranks = list(map(astuple, self.legs)), list(map(astuple, self.ranks))
        told = [self.epoch, legs, self.spec.to_dict(), self.selection, self.world_size, self.per_lane, self.num_steps]
        told += [ranks, self.attempt, self.turn, skips, self.torn]
        digest = hashlib.blake2b(json.dumps([*told, list(map(len, runs))], sort_keys=True).encode(), digest_size=16)
        for column in (column for one in runs for column in (one.start, one.stop, one.times)):
            digest.update(column.astype("<i8").tobytes())
        return digest.hexdigest()

    @property
    def key(self) -> tuple[Any, ...]:
        """Identifies the part: its start and its number of steps. Equal on all ranks."""
        return (*self.start_key, self.num_steps)

    @property
    def start_key(self) -> tuple[Any, ...]:
        """Identifies the start of the part: place, attempt and turn. Equal on all ranks and at every later state."""
        return (*self.place_key, self.attempt, self.turn)

    @property
    def place_key(self) -> tuple[Any, ...]:
        """Identifies the place where the part begins."""
        return (self.epoch, self.legs, self.spec, self.selection, self.world_size, self.per_lane)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks without a record here, except those in `torn`."""
        present = {*self.torn, *(record.rank for record in self.ranks)}
        return tuple(rank for rank in range(self.world_size) if rank not in present)

    def describe(self) -> str:
        """Return in words where the part begins and how far it goes."""
        leg = self.legs[-1]
        return (
            f"epoch {self.epoch}, leg {len(self.legs)} ({counted(leg.lanes, 'lane')}) from frame "
            f"{leg.frames_per_lane} of every lane, {counted(self.num_steps, 'step')} on "
            f"{counted(self.world_size, 'rank')}"
        )


@dataclass(frozen=True, kw_only=True)
class Header:
    """What an account covers, and up to which state."""

    root: str
    selection: dict[str, Any]
    """The fields of the `SelectionSpec`."""

    state: dict[str, Any]
    """The `OrderState` at which the account ends, as a JSON object."""

    name: str = "train"
    members: tuple[dict[str, Any], ...] = ()
    """Name, root and selection fields of every dataset of a mixture; then `root` and `selection` are empty."""

    head: str = field(default="", compare=False)
    """Digest of the account of one rank, this header included: its seal."""

    @property
    def order_state(self) -> OrderState:
        """The state at which the account ends."""
        return OrderState.from_dict(self.state)


@dataclass(frozen=True, kw_only=True)
class Account:
    """The parts of one rank or of all, in the order in which the run did them."""

    header: Header
    parts: tuple[Part, ...]

    @property
    def place(self) -> tuple[int, int]:
        """How far its state is: the epoch, and the frames emitted in it."""
        state = self.header.order_state
        return state.epoch, sum(leg.lanes * leg.frames_per_lane for leg in state.legs)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that lack a record in any part."""
        return tuple(sorted({rank for part in self.parts for rank in part.missing_ranks}))

    def find_break(self) -> str:
        """Return in words where the account differs from its seal; empty if nowhere, or if it never had a chain."""
        if not self.header.head and not any(part.before for part in self.parts):
            return ""
        sealed = seal_account(self.header, self.parts)
        for part, right in zip(self.parts, sealed.parts, strict=True):
            if part.before != right.before:
                return f"what comes before {part.describe()} is not what was recorded before it"
        return "" if self.header.head == sealed.header.head else "its header or its last part is not what was recorded"


def merge_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts of several ranks, merging those with the same start and number of steps.

    Parts keep the order of their first appearance. Parts of ranks that stopped after different steps stay separate.

    Raises:
        RaypipeError: two parts hold the record of the same rank.
    """
    groups: dict[tuple[Any, ...], list[Part]] = {}
    for part in parts:
        groups.setdefault(part.key, []).append(part)
    return tuple(_merge_group(group) for group in groups.values())


def merge_accounts(accounts: Iterable[Account]) -> Account:
    """Return the accounts of ranks as one, with the header of the first. Merging ends their digest chains.

    Raises:
        RaypipeError: there is none, they are of different runs or states, or two hold the record of the same rank.
    """
    every = tuple(accounts)
    if not every:
        raise RaypipeError("there is no account to merge")
    header = every[0].header
    for account in every[1:]:
        if account.header != header:
            raise RaypipeError(
                f"these accounts are not of one state of one run: {header} and {account.header}. Give files of one "
                f"checkpoint or of one attempt."
            )
    parts = merge_parts(part for account in every for part in account.parts)
    return Account(header=replace(header, head=""), parts=tuple(replace(part, before="") for part in parts))


def merge_skips(skips: Iterable[Skip]) -> tuple[Skip, ...]:
    """Return one entry per dataset and episode, with its first reason and every frame once."""
    groups: dict[tuple[int, int], list[Skip]] = {}
    for skip in skips:
        groups.setdefault((skip.dataset, skip.episode), []).append(skip)
    return tuple(
        replace(group[0], frames=add_runs(*(skip.frames for skip in group)).once())
        for _, group in sorted(groups.items(), key=lambda item: item[0])
    )


def _merge_group(parts: list[Part]) -> Part:
    parts = _without_copies(parts)
    if len(parts) == 1:
        return parts[0]
    records = sorted((record for part in parts for record in part.ranks), key=lambda record: record.rank)
    for one, other in pairwise(records):
        if one.rank == other.rank:
            raise RaypipeError(
                f"rank {one.rank} is there twice in the account of {parts[0].describe()}: give every rank's file once, "
                f"and let one rank alone carry the parts of earlier starts"
            )
    return replace(
        parts[0],
        ranks=tuple(records),
        emitted=add_runs(*(part.emitted for part in parts)),
        repeated=add_runs(*(part.repeated for part in parts)),
        skipped=merge_skips(skip for part in parts for skip in part.skipped),
        listed=tuple(
            (part.ranks[0].rank, add_runs(part.emitted, *(skip.frames for skip in part.skipped)))
            for part in parts
            if len(part.ranks) == 1
        ),
    )


def _without_copies(parts: list[Part]) -> list[Part]:
    """Return the parts without those whose records another part also has.

    A rank that died before it updated its file left an earlier one, with a part that another rank carries since then.
    """
    kept: list[Part] = []
    for part in sorted(parts, key=lambda part: -len(part.ranks)):
        if not any(set(part.ranks) <= set(other.ranks) for other in kept):
            kept.append(part)
    return [part for part in parts if any(part is one for one in kept)]


def seal_account(header: Header, parts: Sequence[Part]) -> Account:
    """Return the account of these parts with their digest chain."""
    before = _digest("", [header.state.get("fingerprint"), header.state.get("seed"), header.name])
    chained = []
    for part in parts:
        chained.append(replace(part, before=before))
        before = _digest(before, part.digest)
    told = [header.root, header.selection, header.state, header.name, list(header.members)]
    return Account(header=replace(header, head=_digest(before, told)), parts=tuple(chained))


def _digest(before: str, content: Any) -> str:
    return hashlib.blake2b(json.dumps([before, content], sort_keys=True).encode(), digest_size=16).hexdigest()
