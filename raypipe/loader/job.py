"""What a rank loads (`RankJob`), where a pass over it begins (`Stand`), and what to do with its blocks (`LoaderSpec`).

Here too are the hints for a setting that the user passed to the wrong call.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

from raypipe.account import Ledger, Page
from raypipe.dataset import ABSOLUTE, ActionMap, Dataset
from raypipe.decode import ASSIGNED_CPUS, DecodeSpec, device_name
from raypipe.errors import ConfigError, suggest
from raypipe.feed import BlockContext, FeedSpec
from raypipe.mixture import Mixture
from raypipe.plan import (
    BatchSpec,
    EpisodeIndex,
    OrderSpec,
    OrderState,
    Resumed,
    SelectionSpec,
    WorldPlan,
    plan_epoch,
    plan_world,
    start,
    state_after,
    state_of,
)
from raypipe.storage import CacheSpec

if TYPE_CHECKING:
    import torch

Transform = Callable[[dict[str, Any], "torch.Tensor"], dict[str, Any]]
"""A user's transform of a batch: takes the batch and the ``augment_seed`` of every sample, returns a batch."""

SampleTransform = Callable[[dict[str, Any], int], dict[str, Any]]
"""A user's transform of a sample: takes the sample and its ``augment_seed``, returns a sample. Several threads call it
concurrently."""


@dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """What a rank does with its blocks."""

    prefetch_batches: int = 4
    """How many batches ahead of the one being assembled to decode clips for; fewer if memory is short."""

    num_threads: int | Literal["assigned"] = ASSIGNED_CPUS
    """Decoding threads; see `DecodeSpec.num_threads`."""

    device: str = "cpu"
    """The torch device on which the training loop receives batches: its name, or a `torch.device`."""

    transform: Transform | None = None
    """A user's transform of every batch. It runs in the assembling thread, on `device`: on one CPU core, or with CUDA
    in a separate stream."""

    sample_transform: SampleTransform | None = None
    """A user's transform of every sample, before `transform` and before the copy to `device`; cameras are still uint8.
    It runs in `num_threads` threads. In both transforms torch draws random numbers from the samples' seeds."""

    num_epochs: int = 1
    """Epochs that you will iterate. While one ends, the loader already fetches the first blocks of the next."""

    progress: bool = True
    """Whether rank 0 shows a progress bar; it does so only in a terminal or a notebook."""

    def __post_init__(self) -> None:
        for name in ("prefetch_batches", "num_epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_threads != ASSIGNED_CPUS and self.num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1 or {ASSIGNED_CPUS!r}, got {self.num_threads}")
        object.__setattr__(self, "device", device_name(self.device))


class LoaderSettings(TypedDict, total=False):
    """The fields of `LoaderSpec` as keywords, so that editors complete them."""

    prefetch_batches: int
    num_threads: int | Literal["assigned"]
    device: str
    transform: Transform | None
    sample_transform: SampleTransform | None
    num_epochs: int
    progress: bool


def change_spec(spec: LoaderSpec, settings: Mapping[str, Any]) -> LoaderSpec:
    """Return the spec with some fields changed; raise `ConfigError` for an unknown one or a wrong type."""
    check_names(settings, LoaderSettings.__annotations__, "a loader has no setting")
    try:
        return replace(spec, **settings)
    except TypeError as error:
        raise ConfigError(f"a loader with {dict(settings)!r} has a value of a wrong type: {error}") from error


_PARTS: Final = {
    "order": OrderSpec,
    "selection": SelectionSpec,
    "decode": DecodeSpec,
    "feed": FeedSpec,
    "cache": CacheSpec,
}
_TRANSFORM: Final = "a change of samples is pipe.loader(sample_transform=...), of batches pipe.loader(transform=...)"
_ELSEWHERE: Final = {
    "num_workers": "a loader reads and decodes in threads of its own process, one for each CPU; "
    "decode={'num_threads': ...} sets how many",
    "drop_last": "the end of an epoch is order={'tail': 'drop'}",
    "prefetch_factor": "batches ahead are pipe.loader(prefetch_batches=...)",
    "pin_memory": "nothing is to be set: pipe.loader(device='cuda') hands batches over on the device",
    "persistent_workers": "nothing is to be set: pipe.loader(num_epochs=...) begins the next epoch while one ends",
    "sampler": "the order is a plan; order={...} and selection={...} say which",
    "batch_sampler": "the order is a plan; order={...} and batch_size={...} say which",
    **dict.fromkeys(("transforms", "image_transforms", "collate_fn", "augment"), _TRANSFORM),
    "epochs": "epochs are pipe.loader(num_epochs=...)",
    "offsets": "windows in frames are rp.Pipeline(ds.windowed(offsets=...), ...)",
    "world_size": "ranks are pipe.loaders(world_size), under torchrun rp.train.share_loader(pipe)",
    "weights": "weights are of a mixture: rp.Mixture([(root, 2.0), (other, 1.0)])",
    **{name: f"it is a part of the pipeline: rp.Pipeline(..., {name}=...)" for name in ("batch_size", "seed")},
    **{name: f"it is said on opening: rp.open_dataset(root, {name}=...)" for name in ("revision", "cameras")},
}
"""Names that users know from other libraries, mostly torch's DataLoader, and what to use instead."""


def check_names(given: Iterable[str], known: Iterable[str], wrong: str) -> None:
    """Raise `ConfigError` for a name that is not `known`, with the place of that setting or the nearest name.

    The message begins with `wrong`.
    """
    known = list(known)
    for name in given:
        if name not in known:
            lives = _ELSEWHERE.get(name) or _find_home(name)
            raise ConfigError(f"{wrong} {name!r}" + (f": {lives}." if lives else suggest(name, known)))


def _find_home(name: str) -> str:
    if name in LoaderSettings.__annotations__ and name != "num_threads":
        return f"it is a setting of the loader: pipe.loader({name}=...)"
    for part, spec in _PARTS.items():
        if name in (field.name for field in fields(spec)):
            return f"it is a field of {part}: rp.Pipeline(..., {part}={{{name!r}: ...}})"
    return ""


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


@dataclass(eq=False, kw_only=True)
class Stand:
    """A place in the order where a pass begins, and what the loader has handed over since.

    A loader moves by replacing its stand. So any thread that reads the stand gets a plan, a step and a ledger that
    belong together.
    """

    job: RankJob
    index: EpisodeIndex
    at: Resumed
    """Where the pass begins."""
    ledger: Ledger
    is_loaded: bool = False
    """Whether the pass begins here because of a loaded state."""
    page: Page | None = None
    """The ledger's page of the pass; None until it begins. `Page.num_handed` is the step."""

    @cached_property
    def world(self) -> WorldPlan:
        """The plan of the rest of the epoch, from where the pass begins."""
        plan = plan_epoch(self.index, self.at.spec, epoch=self.at.epoch, legs=self.at.legs)
        return plan_world(plan, world_size=self.job.world_size, batch=self.job.batch)

    @property
    def num_handed(self) -> int:
        """Batches of the pass that the training loop has received."""
        return self.page.num_handed if self.page is not None else 0

    @property
    def is_over(self) -> bool:
        """Whether the pass has reached the end of its epoch."""
        return self.page is not None and self.page.num_handed == self.world.num_steps

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.at.epoch + self.is_over

    @property
    def num_left(self) -> int:
        """Batches left in that epoch."""
        return self.following.world.num_steps if self.is_over else self.world.num_steps - self.num_handed

    @property
    def num_steps(self) -> int:
        """Batches of that whole epoch, if these ranks did it from its start."""
        here = self.following if self.is_over else self
        is_rest = any(leg.frames_per_lane for leg in here.at.legs)
        return (here.beginning if is_rest else here).world.num_steps

    def state(self) -> OrderState:
        """Return the state after the last batch handed over."""
        num_handed = self.num_handed
        if self.page is not None and num_handed == self.world.num_steps:
            return state_of(self.world.plan).next_epoch()
        return state_after(self.world, num_handed)

    @cached_property
    def following(self) -> "Stand":
        """The stand at the start of the next epoch; the same object each time."""
        return self.start_of(self.at.epoch + 1)

    @cached_property
    def beginning(self) -> "Stand":
        """The stand at the start of this epoch; the same object each time."""
        return self.start_of(self.at.epoch)

    def start_of(self, epoch: int, *, is_first: bool = False) -> "Stand":
        """Return the stand at the start of an epoch; the first one of a run keeps the lanes that the user gave."""
        batch = None if is_first else self.job.batch
        at = start(self.at.spec, world_size=self.job.world_size, batch=batch, epoch=epoch)
        return replace(self, at=at, is_loaded=False, page=None)

    def onward(self) -> "Stand":
        """Return a stand at the same place where another pass can begin; itself if no pass has begun."""
        if self.page is None:
            return self
        if self.is_over:
            return self.following
        if not self.num_handed:
            return replace(self, page=None)
        world = self.world.at(self.num_handed)
        moved = replace(self, at=replace(self.at, legs=world.plan.legs), is_loaded=False, page=None)
        # Avoid planning again.
        moved.world = world
        return moved

    def __getstate__(self) -> dict[str, Any]:
        # Leave out the page, which is valid only in this process, and the plan, which is cheap to make again.
        here = self.onward()
        kept = {name: getattr(here, name) for name in ("job", "index", "at", "ledger", "is_loaded")}
        return {**kept, "page": None}


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


def warn_of_other_origin(state: Mapping[str, Any], dataset: Dataset | Mixture) -> None:
    """Warn if the state's frames came from another source, or its actions were in another representation.

    A copy may have other pixels, and the policy has learned the former representation.
    """
    source, changes = state.get(SOURCE), []
    if isinstance(source, Mapping) and not isinstance(dataset, Mixture):
        now = asdict(dataset.meta.source)
        changes = [f"{key} was {source.get(key)!r} and is {now[key]!r}" for key in now if source.get(key) != now[key]]
    if changes:
        warnings.warn(
            f"the state was saved with another source of the dataset: {'; '.join(changes)}. Episodes, lengths and "
            f"features are the same, so the order goes on; whether the values are is not checked.",
            stacklevel=4,
        )
    saved, current = state.get(ACTIONS, ABSOLUTE), _representation(dataset)
    if saved != current:
        warnings.warn(
            f"the state was saved with actions {saved!r}, and they are {current!r} now. The order goes on; the policy "
            f"of the checkpoint has learned the former, with its statistics. Give the pipeline the former actions=.",
            stacklevel=4,
        )
