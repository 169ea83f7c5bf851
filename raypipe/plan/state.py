"""The state of an order: a few integers from which a run resumes exactly.

Decides what a saved state must agree with, and with which legs a run resumes on a given world size. A state is the same
on every rank and counts the frames that the trainer received.

::

    {"order_version": 1, "fingerprint": "...", "seed": 0, "epoch": 3,
     "order": {"shuffle": true, "live_spans": 128, "span_frames": "episode", "clip_frames": 2, "tail": "short",
               "lanes": 8, "selection": "..."},
     "legs": [{"lanes": 8, "live_spans": 128, "frames_per_lane": 7680},
              {"lanes": 6, "live_spans": 128, "frames_per_lane": 512}]}

For a mixture it also has what every epoch takes of each dataset, and the position of each in its laps at epoch `since`:

::

     "mixture": {"since": 0, "members": [{"name": "aloha", "fingerprint": "...", "selection": "...", "size": 9000,
                                          "frames": 5000, "position": 0, "revision": "unversioned"}, ...]}
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from raypipe.errors import ConfigError, ResumeError, as_damage
from raypipe.plan.epoch import EpochPlan, WorldPlan, check_start
from raypipe.plan.index import DatasetShare, EpisodeIndex, Shares, describe_selection
from raypipe.plan.keyhash import ORDER_VERSION
from raypipe.plan.spans import UNVERSIONED
from raypipe.plan.spec import WORLD_SIZE, BatchSpec, Leg, OrderSpec, check_whole, check_world_size, first_leg, is_served
from raypipe.text import counted

_MAX_SHOWN: Final = 30

_COMPARED: Final = {
    "data": "fingerprint",
    "selected frames": "selection",
    "frames per epoch": "frames",
    "revision": "revision",
}
"""What is compared of two mixtures in words, with the fields of `DatasetShare`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderState:
    """The position of a run in its order."""

    order_version: int
    fingerprint: str
    spec: OrderSpec
    """The spec with the lanes, live spans and span length that the run's first start resolved."""

    selection: str
    epoch: int
    legs: tuple[Leg, ...] = ()
    """Legs of this epoch that have emitted something; none at the start of an epoch."""

    shares: Shares | None = None
    """What an epoch takes of each dataset of a mixture; None for a single dataset."""

    def next_epoch(self) -> "OrderState":
        """Return the state at the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, legs=())

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a JSON object."""
        order, shares = self.spec.to_dict(), self.shares
        seed = order.pop("seed")
        return {
            "order_version": self.order_version,
            "fingerprint": self.fingerprint,
            "seed": seed,
            "epoch": self.epoch,
            "order": {**order, "selection": self.selection},
            "legs": [asdict(leg) for leg in self.legs],
            **({"mixture": {**asdict(shares), "members": list(map(asdict, shares.members))}} if shares else {}),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "OrderState":
        """Return the state from a JSON object.

        Raises:
            ResumeError: the object is not a state of this order version.
        """
        if not isinstance(saved, Mapping):
            raise ResumeError(f"not a state of a raypipe order: {saved!r}")
        if saved.get("order_version") != ORDER_VERSION:
            raise ResumeError(_differs("order_version", saved.get("order_version"), ORDER_VERSION))

        def describe(error: Exception) -> ResumeError:
            return ResumeError(f"not a state of a raypipe order ({error!r}): {dict(saved)!r}")

        try:
            with as_damage(describe):
                order = dict(saved["order"])
                selection = order.pop("selection")
                return cls(
                    order_version=ORDER_VERSION,
                    fingerprint=saved["fingerprint"],
                    spec=OrderSpec(seed=saved["seed"], **order),
                    selection=selection,
                    epoch=check_whole("epoch", saved["epoch"], 0, (1 << 63) - 1),
                    legs=tuple(Leg(**leg) for leg in saved["legs"]),
                    shares=shares_from_dict(saved["mixture"]) if "mixture" in saved else None,
                )
        except ConfigError as error:
            raise describe(error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What to plan: ``plan_epoch(index, spec, epoch=epoch, legs=legs)``."""

    spec: OrderSpec
    epoch: int
    legs: tuple[Leg, ...]


def start(spec: OrderSpec, *, world_size: int, batch: BatchSpec | None = None, epoch: int = 0) -> Resumed:
    """Return what a run plans at its first start or, given its batch, at the start of any epoch; see `first_leg`."""
    check_world_size(world_size)
    lanes = world_size if spec.lanes == WORLD_SIZE else spec.lanes
    spec = replace(spec, lanes=lanes)
    return Resumed(spec=spec, epoch=epoch, legs=(first_leg(spec, world_size=world_size, batch=batch),))


def resume(
    state: OrderState, index: EpisodeIndex, spec: OrderSpec, *, world_size: int, batch: BatchSpec | None = None
) -> Resumed:
    """Return what to plan to resume from `state` on `world_size` ranks.

    The last leg continues if the ranks divide its lanes, the batch shares out over them and `live_spans` is unchanged;
    else a new leg takes the rest. ``lanes="world_size"`` keeps the lanes of the state. In the middle of an epoch only
    `live_spans` may change.

    Args:
        batch: of the ranks; None if the caller chooses it later, to fit the lanes.

    Raises:
        ResumeError: the state belongs to another order; the message shows both sides.
        ConfigError: the next epoch could not begin. It is raised now, not after the last batch of this one.
    """
    check_world_size(world_size)
    check_state(state, index, spec)
    spec = replace(spec, lanes=state.spec.lanes if spec.lanes == WORLD_SIZE else spec.lanes)
    fresh = start(spec, world_size=world_size, batch=batch, epoch=state.epoch)
    if batch is not None:
        lanes = fresh.legs[0].lanes
        check_start(index, lanes, spec.tail, batch.per_lane(lanes, world_size))
    if not state.legs:
        return fresh
    last = state.legs[-1]
    is_fitting = is_served(last.lanes, world_size, batch)
    if is_fitting and last.live_spans == spec.live_spans:
        return Resumed(spec=spec, epoch=state.epoch, legs=state.legs)
    leg = Leg(lanes=last.lanes if is_fitting else world_size, live_spans=spec.live_spans)
    return Resumed(spec=spec, epoch=state.epoch, legs=(*state.legs, leg))


def follow_state(
    state: OrderState, index: EpisodeIndex, *, allow_mixture_change: bool = False
) -> tuple[OrderState, EpisodeIndex]:
    """Return the state and the index with which a run resumes, a mixture's datasets at their positions in the state.

    For a single dataset both are returned unchanged. If the mixture has changed and may change, the datasets that it
    had before continue from their positions, and the others begin.

    Raises:
        ResumeError: the mixture is another one; the message lists every difference.
    """
    if state.shares is None or index.shares is None:
        return state, index
    changes = describe_changes(state.shares, index.shares)
    if changes and (state.legs or not allow_mixture_change):
        within = f"the state is within epoch {state.epoch}: go on with the mixture that it was saved with to its end"
        more = len(changes) - _MAX_SHOWN
        shown = [*changes[:_MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        remedy = within if state.legs else "allow_mixture_change=True lets the run go on with the new one"
        raise ResumeError(
            "the saved state belongs to another mixture:\n"
            + "\n".join(f"  {line}" for line in shown)
            + f"\nUse the mixture of the state; it may change between epochs only, and {remedy}."
        )
    index = replace(index, shares=go_on_with(state.shares, index.shares, epoch=state.epoch))
    if not changes:
        return state, index
    selection = describe_selection(index)
    return replace(state, fingerprint=index.fingerprint, selection=selection, shares=index.shares), index


def check_state(state: OrderState, index: EpisodeIndex, spec: OrderSpec) -> None:
    """Raise unless a run of `index` and `spec` may resume from `state`.

    Raises:
        ResumeError: the state belongs to another order; the message shows both sides.
    """
    if (state.shares is None) != (index.shares is None):
        kinds = ("a single dataset", "a mixture")
        raise ResumeError(_differs("the data", kinds[state.shares is not None], kinds[index.shares is not None]))
    never = [("order fingerprint", state.fingerprint, index.fingerprint), ("seed", state.spec.seed, spec.seed)]
    for name, saved, given in never:
        if saved != given:
            raise ResumeError(_differs(name, saved, given))
    if not state.legs:
        return
    within = ["shuffle", "span_frames", "clip_frames", "tail", *(["lanes"] if spec.lanes != WORLD_SIZE else [])]
    sides = [(name, getattr(state.spec, name), getattr(spec, name)) for name in within]
    for name, saved, given in [*sides, ("selection", state.selection, describe_selection(index))]:
        if saved != given:
            raise ResumeError(
                f"{_differs(name, saved, given)} It may change between epochs only, and the state is within "
                f"epoch {state.epoch}."
            )
    # The frames are the same, so no run can have saved more lanes than there are frames.
    lanes = max(leg.lanes for leg in state.legs)
    if lanes > index.num_frames:
        raise ResumeError(
            f"the saved state shares epoch {state.epoch} out over {counted(lanes, 'lane')}, and its selection has "
            f"{counted(index.num_frames, 'frame')}: it is damaged. Go back to an earlier checkpoint."
        )


def state_of(plan: EpochPlan) -> OrderState:
    """Return the state of a run at the position of `plan`."""
    return OrderState(
        order_version=ORDER_VERSION,
        fingerprint=plan.index.fingerprint,
        spec=plan.spec,
        selection=plan.selection,
        epoch=plan.epoch,
        legs=_emitted(plan.legs),
        shares=plan.index.shares,
    )


def state_after(world: WorldPlan, num_steps: int) -> OrderState:
    """Return the state after the next `num_steps` steps; after the last step, that of the start of the next epoch.

    If no step is left (fewer frames than lanes), the state does not move; `OrderState.next_epoch` moves on.
    """
    if not 0 <= num_steps <= world.num_steps:
        raise ConfigError(f"num_steps must be between 0 and the {world.num_steps} steps left, got {num_steps}")
    here = state_of(world.plan)
    if num_steps == 0:
        return here
    if num_steps == world.num_steps:
        return here.next_epoch()
    leg = replace(world.plan.leg, frames_per_lane=world.steps.position_after(num_steps))
    return replace(here, legs=(*_emitted(world.plan.legs[:-1]), leg))


def state_at(world: WorldPlan, step: int) -> OrderState:
    """Return the state after `step` steps of a run that began at `world` and never changed; rebuilds a lost state.

    `world` is the plan of an epoch's start; every epoch of such a run has the same number of steps.
    """
    epochs, rest = divmod(check_whole("step", step, 0, (1 << 63) - 1), world.num_steps)
    within = state_after(world, rest)
    return replace(within, epoch=within.epoch + epochs)


def _emitted(legs: Sequence[Leg]) -> tuple[Leg, ...]:
    return tuple(leg for leg in legs if leg.frames_per_lane)


def _differs(name: str, saved: object, given: object) -> str:
    return f"the saved state belongs to another order: {name} is {saved!r} in the state and {given!r} here."


def describe_changes(saved: Shares, given: Shares) -> tuple[str, ...]:
    """Return in words how two mixtures differ; empty if a run may pass from one to the other unchanged."""
    before, now = ({one.name: one for one in shares.members} for shares in (saved, given))
    lines = [f"{name!r} is in the state and not here" for name in before if name not in now]
    lines += [f"{name!r} is here and not in the state" for name in now if name not in before]
    for name in (name for name in before if name in now):
        for what, field in _COMPARED.items():
            one, other = getattr(before[name], field), getattr(now[name], field)
            is_known = what != "revision" or UNVERSIONED not in (one, other)
            if one != other and is_known:
                lines.append(f"{what} of {name!r}: {one} in the state, {other} here")
    # A damaged state may name a dataset twice.
    names, here = ([one.name for one in shares.members] for shares in (saved, given))
    if not lines and names != here:
        lines.append(f"the order of the datasets: {', '.join(names)} in the state, {', '.join(here)} here")
    return tuple(lines)


def go_on_with(saved: Shares, given: Shares, *, epoch: int) -> Shares:
    """Return `given` with every dataset that `saved` has with the same data at the position it had at `epoch`.

    A dataset with another selection of frames begins its next lap: the rest of the lap before is of another order.
    """
    if describe_changes(saved, given):
        since, positions = epoch, [_position(now, saved, epoch) for now in given.members]
    else:
        since, positions = saved.since, [was.position for was in saved.members]
    pairs = zip(given.members, positions, strict=True)
    return Shares(since=since, members=tuple(replace(now, position=position) for now, position in pairs))


def _position(now: DatasetShare, saved: Shares, epoch: int) -> int:
    was = next((one for one in saved.members if one.name == now.name), None)
    if was is None or was.fingerprint != now.fingerprint:
        return 0
    position = saved.begins(epoch)[saved.members.index(was)]
    if was.selection == now.selection:
        return position
    return -(-position // was.size) * now.size


def shares_from_dict(saved: Any) -> Shares:
    """Return the shares from a JSON object; raises `KeyError`, `TypeError`, `ValueError` or `ConfigError`."""
    kinds: dict[str, Any] = DatasetShare.__annotations__
    members = [DatasetShare(**{name: kind(one[name]) for name, kind in kinds.items()}) for one in saved["members"]]
    return Shares(since=int(saved["since"]), members=tuple(members))
