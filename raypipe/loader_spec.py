"""`LoaderSpec`: what a rank does with its blocks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from raypipe.decode.spec import ASSIGNED_CPUS
from raypipe.errors import ConfigError, suggest

if TYPE_CHECKING:
    import torch

Transform = Callable[[dict[str, Any], "torch.Tensor"], dict[str, Any]]
"""A user's change of a batch: gets the batch and the ``augment_seed`` of every sample, returns a batch."""


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
    """A user's change of every batch; runs in the assembling thread, on `device`."""

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


def change_spec(spec: LoaderSpec, settings: Mapping[str, Any]) -> LoaderSpec:
    """Return a spec with some fields changed; an unknown one is a `ConfigError`."""
    known = [field.name for field in fields(LoaderSpec)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"a loader has no setting {name!r}{suggest(name, known)}")
    return replace(spec, **settings)
