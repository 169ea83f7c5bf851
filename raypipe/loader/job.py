"""What a rank loads, and where its blocks come from."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol

from raypipe.dataset import ABSOLUTE, ActionMap, Dataset
from raypipe.decode import ClipExecutor
from raypipe.feed import BlockContext, LoaderStats, Meter, PassPlace
from raypipe.loader.epoch_run import BlockFeed
from raypipe.mixture import Mixture
from raypipe.plan import BatchSpec, EpisodeIndex, OrderSpec, OrderState, SelectionSpec, WorldPlan


class BlockSource(Protocol):
    """Where ranks get their blocks."""

    def assigned_cpus(self) -> int:
        """Return how many CPUs this process may use."""
        ...

    @property
    def attempt(self) -> str:
        """The name of this start of the ranks: later ones sort behind earlier ones."""
        ...

    def note_bad(self, episodes: Mapping[tuple[int, int], str]) -> None:
        """Count episodes, by dataset and number, as bad that were left out before this start, and say why."""
        ...

    def open(self, world: WorldPlan, rank: int, place: PassPlace | None) -> BlockFeed:
        """Return the blocks that the rest of a plan sends to one rank.

        Args:
            world: the plan, at the position from which it goes on.
            rank: the rank that asks.
            place: of this pass, where it follows one before; None where the rank begins: at its start, and when it has
                left its order by a break or a loaded state.
        """
        ...

    def open_executor(self, context: BlockContext, num_threads: int, meter: Meter) -> ClipExecutor:
        """Return what decodes the clips of a rank."""
        ...

    def go_on(self, rank: int, place: PassPlace) -> None:
        """Note that a rank begins the pass that follows its last one; raises where other ranks left the order."""
        ...

    def publish(self, name: str, rank: int, stats: LoaderStats) -> None:
        """Show the figures of a rank to those who watch the run."""
        ...

    def collect(self) -> dict[int, LoaderStats]:
        """Return the figures of all ranks, as they published them last."""
        ...


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What a rank loads: the frames, their order, and who it is among how many."""

    context: BlockContext
    index: EpisodeIndex
    order: OrderSpec
    batch: BatchSpec
    rank: int
    world_size: int
    selection: SelectionSpec
    """Which `index` was made with: for the account."""

    mixture: Mixture | None = None
    """Where the datasets are members of one; it has their selections."""

    live_bytes: int
    """Memory for decoded frames."""

    derived: frozenset[str] = frozenset()
    """Fields of `order` that were computed from the memory budget and not given: a state's own hold."""

    allow_mixture_change: bool = False
    """Whether a state of another mixture may be gone on from, between epochs."""

    @property
    def dataset(self) -> Dataset | Mixture:
        """What the batches are made of."""
        return self.mixture or self.context.datasets[0]

    def order_of(self, state: OrderState) -> OrderSpec:
        """Return the order to go on with from a state.

        What nobody gave is not computed again: with another batch size, memory budget or version of raypipe it would
        be something else, and the state belongs to its own.
        """
        saved = {name: getattr(state.spec, name) for name in self.derived}
        clips = saved.get("clip_frames")
        if isinstance(clips, tuple) and len(clips) != len(self.index.dataset_names):
            # Of another mixture, before which the run stands.
            del saved["clip_frames"]
        return replace(self.order, **saved)


SOURCE: Final = "source"
ACTIONS: Final = "actions"


def with_source(state: dict[str, Any], dataset: Dataset | Mixture) -> dict[str, Any]:
    """Return a state that also says where its dataset was read: root, commit and layout.

    That of a mixture has the revisions of its members already. It says how actions are represented, where it is not as
    the dataset stores them.
    """
    told = {} if isinstance(dataset, Mixture) else {SOURCE: asdict(dataset.meta.source)}
    representation = _representation(dataset)
    return {**state, **told, **({} if representation == ABSOLUTE else {ACTIONS: representation})}


def _representation(dataset: Dataset | Mixture) -> str:
    actions = dataset.actions.spec if isinstance(dataset.actions, ActionMap) else dataset.actions
    return ABSOLUTE if actions is None else str(actions)


def warn_of_other_actions(state: Mapping[str, Any], dataset: Dataset | Mixture) -> None:
    """Warn where a state was saved with actions in another representation: the policy has learned that one."""
    saved, now = state.get(ACTIONS, ABSOLUTE), _representation(dataset)
    if saved != now:
        warnings.warn(
            f"the state was saved with actions {saved!r}, and they are {now!r} now. The order goes on; the policy of "
            f"the checkpoint has learned the former, with its statistics. Give the pipeline the former actions=.",
            stacklevel=4,
        )


def warn_of_other_source(state: Mapping[str, Any], dataset: Dataset | Mixture) -> None:
    """Warn where a state was saved of the same frames in another place: a copy may have other pixels."""
    if isinstance(dataset, Mixture) or not isinstance(state.get(SOURCE), Mapping):
        return
    now = asdict(dataset.meta.source)
    changes = [
        f"{key} was {state[SOURCE].get(key)!r} and is {now[key]!r}" for key in now if state[SOURCE].get(key) != now[key]
    ]
    if changes:
        warnings.warn(
            f"the state was saved with another source of the dataset: {'; '.join(changes)}. Episodes, lengths and "
            f"features are the same, so the order goes on; whether the values are is not checked.",
            stacklevel=4,
        )
