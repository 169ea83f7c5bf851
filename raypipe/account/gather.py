"""Combine the files of a checkpoint into the account that leads to its state.

A checkpoint written over an earlier one may be torn: a rank died before it wrote its file, or rank 0 died before it
wrote the state. Every rank keeps the file that leads to the state in the folder, so a state that was not overwritten
has all its files. If the state is new, but the newest file of a rank leads to an earlier state of the same run, that
rank has no record of the last steps. The account notes this: only those steps cannot be proved. A death never makes a
rank lose its newest file, or leaves a file of another run, of a later state or of another rank. Those are problems.

::

    state     step 10                        step 20
    rank 0    before: 10    now: 20          before: 10    now: 20
    rank 1                  now: 10                        now: 10
              all of step 10 is there        rank 1 has no record of steps 10 to 19: torn
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from raypipe.account.parts import Account, merge_accounts, merge_parts
from raypipe.errors import RaypipeError
from raypipe.plan import OrderState

HEAD: Final = "account"
"""The key beside a state in a checkpoint that holds the head of rank 0's account chain."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """The accounts that ranks wrote for a checkpoint, by file name."""

    newest: Mapping[str, Account]
    before: Mapping[str, Account]
    """Those that the newest replaced, and those of another number of ranks that rank 0 put aside."""

    beside: Mapping[str, Account]
    """Those for its state by ranks that put nothing into the checkpoint."""

    @property
    def names(self) -> list[str]:
        """All file names, ascending."""
        return sorted({*self.newest, *self.before, *self.beside})

    def of(self, name: str) -> list[Account]:
        """Return the accounts with this file name, the newest first."""
        return [found[name] for found in (self.newest, self.before, self.beside) if name in found]


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """An account, and the problem with its files, if any."""

    account: Account
    world_size: int
    num_files: int
    """Ranks that have a file. A rank whose newest file is lost does not count, even if an earlier one is left."""

    problem: str = ""


def gather_account(files: CheckpointFiles, saved: Mapping[str, Any]) -> Gathered:
    """Return the account of all ranks that leads to a state.

    Args:
        files: all files, of any number of ranks.
        saved: the checkpoint's state with its head. Without a head the newest file decides the state.

    Raises:
        RaypipeError: no file of rank 0 leads to the state, or two files have the record of the same rank.
    """
    first = _find_first(files, state_of_saved(saved))
    if first is None:
        raise RaypipeError(
            "no file of rank 0 leads to the state of the checkpoint: it is lost, or one of the two was changed"
        )
    name, account = first
    mine = [other for other in files.names if _world_of(other) == _world_of(name)]
    state, head = account.header.state, account.header.head
    leading = {other: one for other in mine for one in files.of(other)[::-1] if one.header.state == state}
    left = [other for other in mine if other in files.newest] or mine
    torn = {other: files.of(other)[:1] for other in left if other not in leading}
    gathered = _add_torn(merge_accounts(leading.values()), [one for found in torn.values() for one in found])
    problems = [
        _find_other_head(saved, head) if _rank_of(name) == 0 else "",
        *(_find_other_rank(other, one) for other, one in leading.items()),
        *(_find_other_rank(other, one) or _find_untorn(other, one, account) for other, (one,) in torn.items()),
    ]
    return Gathered(
        account=gathered,
        world_size=int(_world_of(name).partition(".")[0]),
        num_files=len(leading) + len(torn),
        problem=next(filter(None, problems), ""),
    )


def state_of_saved(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a checkpoint without the head of its account; empty if it has no head."""
    return {key: value for key, value in saved.items() if key != HEAD} if saved.get(HEAD) else {}


def _find_first(files: CheckpointFiles, state: Mapping[str, Any]) -> tuple[str, Account] | None:
    """Return the file of the first rank; of two world sizes, the one that carries more earlier records."""
    firsts = {_world_of(name): name for name in reversed(files.names)}
    found = [
        (name, account)
        for name in firsts.values()
        for account in (files.of(name) if state else files.of(name)[:1])
        if account.header.state == (state or account.header.state)
    ]
    return max(found, key=lambda item: sum(len(part.ranks) for part in item[1].parts), default=None)


def _world_of(name: str) -> str:
    return name.rpartition("-of-")[2]


def _rank_of(name: str) -> int:
    return int(name.partition("-of-")[0].removeprefix("rank-"))


def _find_other_head(saved: Mapping[str, Any], head: str) -> str:
    """Return the problem if the checkpoint's head is missing or not that of its files; else an empty string."""
    told = saved.get(HEAD, "")
    if not saved or told == head:
        return ""
    if not told:
        return f"the state of the checkpoint lacks the head of its account, which is {head}: it was changed"
    return f"the checkpoint was saved with an account whose head is {told}, and that of its files is {head!r}"


def _find_other_rank(name: str, account: Account) -> str:
    """Return the problem if a rank's file has the record of another rank, which only rank 0's may; else empty."""
    mine = _rank_of(name)
    others = {record.rank for part in account.parts for record in part.ranks} - {mine} if mine else set()
    return f"{name} holds the record of rank {min(others)}: it is the file of another rank" if others else ""


def _find_untorn(name: str, account: Account, first: Account) -> str:
    """Return why a file that does not lead to the state cannot come from a dead rank; `first` leads to it."""
    mine, theirs = account.header, first.header
    # A mixture may change between epochs, which changes its fingerprint.
    for key in ("seed",) if "mixture" in theirs.state else ("seed", "fingerprint"):
        if mine.state.get(key) != theirs.state.get(key):
            return f"{name} is of another run: its {key} is {mine.state.get(key)!r}, not {theirs.state.get(key)!r}"
    if mine.name != theirs.name:
        return f"{name} is of a loader {mine.name!r}, not {theirs.name!r}"
    here, there = place_of(mine.order_state), place_of(theirs.order_state)
    if here > there:
        return f"{name} leads to a later state than that of the checkpoint"
    lasts = [{(*part.start_key, part.num_steps) for part in one.parts[-1:]} for one in (account, first)]
    if here < there and lasts[0] & lasts[1]:
        return f"{name} has all steps up to the state, and the header of an earlier one: it was changed"
    return ""


def place_of(state: OrderState) -> tuple[int, int]:
    """Return how far a state is: its epoch, and the frames emitted in it."""
    return state.epoch, sum(leg.lanes * leg.frames_per_lane for leg in state.legs)


def _add_torn(account: Account, torn: Sequence[Account]) -> Account:
    """Return the account with the records of the same parts from torn files; those ranks have no record of the rest."""
    known = {(*part.start_key, part.num_steps) for part in account.parts}
    theirs = [part for one in torn for part in one.parts]
    ranks = {record.rank for part in theirs for record in part.ranks if len(part.ranks) == 1}
    kept = [part for part in theirs if (*part.start_key, part.num_steps) in known]
    parts = merge_parts([*account.parts, *kept])
    return replace(
        account,
        parts=tuple(
            replace(part, torn=(*part.torn, *(rank for rank in part.missing_ranks if rank in ranks))) for part in parts
        ),
    )
