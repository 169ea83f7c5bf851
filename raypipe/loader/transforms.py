"""Run users' transforms: of single samples in a pool of threads, of whole batches on their device.

::

    samples  --sample_transform-->  stack  --copy-->  device  --transform-->  batch
               threads of the rank                     a separate CUDA stream

In both, torch draws random numbers from the seeds of the samples. So they do not depend on the thread, rank or attempt,
and training's generator stays untouched. Users seed Python's and numpy's generators themselves. Dropout and scripted
modules are not covered, because they draw where no generator can be passed.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from functools import cache, cached_property
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from raypipe.decode import check_device, use_one_core
from raypipe.errors import ConfigError, suggest
from raypipe.loader.job import SampleTransform

_SEED_MASK: Final = (1 << 63) - 1

_TAKE_GENERATOR: Final = frozenset(
    (
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial),
        *(torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.random_, torch.Tensor.bernoulli_),
        *(torch.Tensor.bernoulli, torch.Tensor.multinomial, torch.Tensor.exponential_, torch.Tensor.log_normal_),
        *(torch.Tensor.cauchy_, torch.Tensor.geometric_, torch.poisson, torch.binomial),
        # torch.distributions draws Beta, Dirichlet and Gamma from these.
        *(torch._standard_gamma, torch._sample_dirichlet),
    )
)
_OF_SHAPE: Final = {torch.rand_like: torch.rand, torch.randn_like: torch.randn, torch.randint_like: torch.randint}
"""Functions that take no generator, and the equivalent that does."""


class SeededRandom(TorchFunctionMode):
    """Makes torch draw this thread's random numbers from a separate generator per device."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed & _SEED_MASK
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, passing the generator if it takes one and the caller gave none."""
        kwargs = kwargs or {}
        if func in _OF_SHAPE:
            kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
            like = args[0] if args else kwargs.pop("input")
            func, args = _OF_SHAPE[func], args[1:]
            kwargs = {"size": like.shape, "dtype": like.dtype, "device": like.device, **kwargs}
        if func in _TAKE_GENERATOR and kwargs.get("generator") is None:
            tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            device = kwargs.get("device") or (tensors[0].device if tensors else torch.get_default_device())
            kwargs = {**kwargs, "generator": self._generator(torch.device(device))}
        return func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


class SamplePool:
    """Transforms the samples of a batch one by one, in as many threads as decode. For one calling thread."""

    def __init__(self, change: SampleTransform, num_threads: int) -> None:
        self._change = change
        self._num_threads = num_threads

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_threads, "raypipe-transform", initializer=use_one_core)

    def close(self) -> None:
        """End the threads."""
        if "_pool" in self.__dict__:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch of the transformed samples, in order. A feature that no sample changes stays as it is."""
        seeds = batch["augment_seed"].tolist()
        samples = [{name: value[i] for name, value in batch.items()} for i in range(len(seeds))]
        changed = list(self._pool.map(self._change_one, [dict(one) for one in samples], seeds))
        for one in changed:
            if not isinstance(one, Mapping) or one.keys() != changed[0].keys():
                raise ConfigError(_unlike_text(changed[0], one))
        return {name: _join(name, batch, samples, changed) for name in changed[0]}

    def _change_one(self, sample: dict[str, Any], seed: int) -> dict[str, Any]:
        with SeededRandom(seed):
            return self._change(sample, seed)


def _unlike_text(first: Any, other: Any) -> str:
    if not isinstance(other, Mapping):
        return f"sample_transform must return a sample, a dict by name; it has returned a {type(other).__name__}"
    odd = sorted(map(str, first.keys() ^ other.keys()))
    return (
        f"sample_transform must return the same names for every sample, and {odd[0]!r} is in some only"
        f"{suggest(odd[0], map(str, first))}"
    )


def _join(name: str, batch: dict[str, Any], samples: list[dict[str, Any]], changed: list[Any]) -> Any:
    values = [one[name] for one in changed]
    if name in batch and all(value is one[name] for value, one in zip(values, samples, strict=True)):
        return batch[name]
    if not all(isinstance(value, torch.Tensor) for value in values):
        is_number = all(isinstance(value, int | float) for value in values)
        return torch.tensor(values) if is_number else values
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) > 1:
        raise ConfigError(
            f"sample_transform gives {name!r} unlike shapes, {shapes[0]} and {shapes[1]}: a batch needs one; let it "
            f"crop or resize to a fixed size"
        )
    return torch.stack(values)


class SideStream:
    """A CUDA stream that copies and transforms batches while training runs. On the CPU it does nothing."""

    def __init__(self, device: str) -> None:
        # Not when the loader is made: a driver without a GPU may send it to a worker that has one.
        check_device(device)
        self._stream = _open_stream(device) if device.startswith("cuda") else None

    def run(self, work: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], Any]:
        """Return the result of `work`, and the event for `wait_for`, which is None on the CPU."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            batch = work()
            return batch, self._stream.record_event() if self._stream is not None else None


@cache
def _open_stream(device: str) -> Any:
    """Return the stream of a device. All epochs share it, because torch keeps free memory per stream."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # Wait for work that the user queued before for a transform, such as its weights.
    stream.wait_stream(torch.cuda.default_stream(device))
    return stream


def wait_for(batch: Any, ready: Any) -> None:
    """Make the calling thread's stream wait for a batch of a `SideStream`, and keep its memory until used there."""
    if ready is not None:
        stream = torch.cuda.current_stream(ready.device)
        stream.wait_event(ready)
        _note_use(batch, stream)


def _note_use(value: Any, stream: Any) -> None:
    if isinstance(value, torch.Tensor) and value.is_cuda:
        value.record_stream(stream)
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            _note_use(one, stream)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _note_use(getattr(value, field.name), stream)
