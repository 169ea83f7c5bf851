"""`LoaderSpec`: what a rank does with its blocks; and where a setting lives that was given to the wrong call."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

from raypipe.decode import ASSIGNED_CPUS, DecodeSpec
from raypipe.errors import ConfigError, suggest
from raypipe.feed import FeedSpec
from raypipe.plan import OrderSpec, SelectionSpec
from raypipe.storage import CacheSpec

if TYPE_CHECKING:
    import torch

Transform = Callable[[dict[str, Any], "torch.Tensor"], dict[str, Any]]
"""A user's change of a batch: gets the batch and the ``augment_seed`` of every sample, returns a batch."""

SampleTransform = Callable[[dict[str, Any], int], dict[str, Any]]
"""A user's change of a sample: gets it and its ``augment_seed``, returns a sample. Threads call it at once."""


@dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """What a rank does with its blocks."""

    prefetch_batches: int = 4
    """Batches ahead of the one that is put together whose clips are being decoded; fewer where memory is short."""

    num_threads: int | Literal["assigned"] = ASSIGNED_CPUS
    """Decoding threads; see `DecodeSpec.num_threads`."""

    device: str = "cpu"
    """Where batches are handed over."""

    transform: Transform | None = None
    """A user's change of every batch; runs in the assembling thread, on `device`: on one core, or with CUDA in a stream
    of its own."""

    sample_transform: SampleTransform | None = None
    """A user's change of every sample, before `transform` and before the copy to `device`, cameras still uint8; runs in
    `num_threads` threads. In both, torch's random numbers come from the samples' seeds."""

    num_epochs: int = 1
    """Epochs that will be iterated. The first blocks of an epoch that follows are fetched while this one ends."""

    progress: bool = True
    """Whether rank 0 shows a bar; only where a person looks, at a terminal or a notebook."""

    def __post_init__(self) -> None:
        for name in ("prefetch_batches", "num_epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_threads != ASSIGNED_CPUS and self.num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1 or {ASSIGNED_CPUS!r}, got {self.num_threads}")


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
    """Return a spec with some fields changed; an unknown one is a `ConfigError`."""
    check_names(settings, LoaderSettings.__annotations__, "a loader has no setting")
    return replace(spec, **settings)


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
    "weights": "weights are of a mixture: rp.Mixture([(root, 2.0), (other, 1.0)])",
    **{name: f"it is a part of the pipeline: rp.Pipeline(..., {name}=...)" for name in ("batch_size", "seed")},
    **{name: f"it is said on opening: rp.open_dataset(root, {name}=...)" for name in ("revision", "cameras")},
}
"""Names that people know from elsewhere, torch's DataLoader above all."""


def check_names(given: Iterable[str], known: Iterable[str], wrong: str) -> None:
    """Raise a `ConfigError` for a name that is not `known`: it says where that lives, or the nearest name.

    Args:
        wrong: the beginning of the message, before the name.
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
