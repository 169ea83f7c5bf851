"""The contract of every resumable iterator, as a function that tests it."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np

from raypipe.text import counted


class Resumable(Protocol):
    """An iterator over batches that can save and restore its position."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the current position on."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch, as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a saved position."""
        ...


def assert_resumes_exactly(make: Callable[[], Resumable]) -> None:
    """Stop after every batch in turn, restore into a fresh iterator, and require the same rest.

    The state passes through JSON on the way, as it does in a checkpoint. Batches may be dicts, lists and tuples of
    tensors, arrays and plain values; arrays are equal if their dtype, shape and values are.

    Args:
        make: returns a fresh iterator at its start; called once for the whole, then twice per stop.

    Raises:
        AssertionError: a rest differs; names the batch that it stopped after, and the first one that differs.
    """
    whole = list(make())
    for stop in range(len(whole) + 1):
        stopped = make()
        list(islice(iter(stopped), stop))
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        _check_rest(list(resumed), whole[stop:], stop)


def _check_rest(rest: list[Any], wanted: list[Any], stop: int) -> None:
    for number, (found, batch) in enumerate(zip(rest, wanted, strict=False), start=stop):
        if not _is_same(found, batch):
            raise AssertionError(f"stopped after {counted(stop, 'batch')}: batch {number} is {found!r}, not {batch!r}")
    if len(rest) != len(wanted):
        raise AssertionError(f"stopped after {counted(stop, 'batch')}: {len(rest)} follow, not {len(wanted)}")


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(_is_same, left, right))
    if hasattr(left, "dtype") and hasattr(right, "dtype"):
        return bool(left.dtype == right.dtype) and _has_same_values(np.asarray(left), np.asarray(right))
    return bool(left == right)


def _has_same_values(left: Any, right: Any) -> bool:
    return np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
