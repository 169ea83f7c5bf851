"""Define `RankJob`, what a rank loads, and `BlockSource`, which supplies its blocks."""

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
    """Supplies the blocks of the ranks."""

    def assigned_cpus(self) -> int:
        """Return how many CPUs this process may use."""
        ...

    @property
    def attempt(self) -> str:
        """The name of this start of the ranks. Names sort by time of the start."""
        ...

    def note_bad(self, episodes: Mapping[tuple[int, int], str]) -> None:
        """Count episodes that an earlier start left out as bad. Maps (dataset, episode) to the reason."""
        ...

    def open(self, world: WorldPlan, rank: int, place: PassPlace | None) -> BlockFeed:
        """Return the blocks that the rest of a plan sends to one rank.

        Args:
            world: the plan, from the position where it continues.
            rank: the rank that asks.
            place: place of this pass if it follows the one before. None if the rank begins a series: at its start, and
                after a break or a loaded state.
        """
        ...

    def open_executor(self, context: BlockContext, num_threads: int, meter: Meter) -> ClipExecutor:
        """Return the executor that decodes the clips of a rank."""
        ...

    def go_on(self, rank: int, place: PassPlace) -> None:
        """Note that a rank begins the pass after its last one; raise if other ranks have left the order."""
        ...

    def publish(self, name: str, rank: int, stats: LoaderStats) -> None:
        """Publish the figures of a rank."""
        ...

    def collect(self) -> dict[int, LoaderStats]:
        """Return the latest published figures of all ranks."""
        ...


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What a rank loads: the frames, their order, its rank and the world size."""

    context: BlockContext
    index: EpisodeIndex
    order: OrderSpec
    batch: BatchSpec
    rank: int
    world_size: int
    selection: SelectionSpec
    """The selection behind `index`; the account records it."""

    mixture: Mixture | None = None
    """The mixture of which the datasets are members; it has their selections. None for a single dataset."""

    live_bytes: int
    """Memory for decoded frames."""

    derived: frozenset[str] = frozenset()
    """Fields of `order` that raypipe derived from the memory budget. A loaded state's own values replace them."""

    allow_mixture_change: bool = False
    """Whether a run may resume, between epochs, from a state of another mixture."""

    @property
    def dataset(self) -> Dataset | Mixture:
        """The dataset or mixture that the batches come from."""
        return self.mixture or self.context.datasets[0]

    def order_of(self, state: OrderState) -> OrderSpec:
        """Return the order with which to resume from a state.

        Derived fields come from the state. Computed again, they could differ with another batch size, memory budget or
        version of raypipe, and the state is only valid for its own values.
        """
        saved = {name: getattr(state.spec, name) for name in self.derived}
        clips = saved.get("clip_frames")
        if isinstance(clips, tuple) and len(clips) != len(self.index.dataset_names):
            # The state has the clip sizes of another mixture; the run is between epochs.
            del saved["clip_frames"]
        return replace(self.order, **saved)


SOURCE: Final = "source"
ACTIONS: Final = "actions"


def with_source(state: dict[str, Any], dataset: Dataset | Mixture) -> dict[str, Any]:
    """Return the state with the source of its dataset: root, commit and layout.

    The state of a mixture already has its members' revisions. If actions are not as stored, the state also names their
    representation.
    """
    told = {} if isinstance(dataset, Mixture) else {SOURCE: asdict(dataset.meta.source)}
    representation = _representation(dataset)
    return {**state, **told, **({} if representation == ABSOLUTE else {ACTIONS: representation})}


def _representation(dataset: Dataset | Mixture) -> str:
    actions = dataset.actions.spec if isinstance(dataset.actions, ActionMap) else dataset.actions
    return ABSOLUTE if actions is None else str(actions)


def warn_of_other_actions(state: Mapping[str, Any], dataset: Dataset | Mixture) -> None:
    """Warn if the state has actions in another representation, which is the one that the policy has learned."""
    saved, now = state.get(ACTIONS, ABSOLUTE), _representation(dataset)
    if saved != now:
        warnings.warn(
            f"the state was saved with actions {saved!r}, and they are {now!r} now. The order goes on; the policy of "
            f"the checkpoint has learned the former, with its statistics. Give the pipeline the former actions=.",
            stacklevel=4,
        )


def warn_of_other_source(state: Mapping[str, Any], dataset: Dataset | Mixture) -> None:
    """Warn if the state's frames came from another source: a copy may have other pixels."""
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
