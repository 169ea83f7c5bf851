"""Give blocks to Ray Data: one read task per block, in feed order.

`data_context` has all Ray Data settings that raypipe needs, on the dataset's own context, each with its reason. A rank
imports this after it has met the others: Ray Data takes a second.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data import DataContext, Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from raypipe.decode import journal_scope
from raypipe.feed.block_context import BlockContext
from raypipe.feed.blocks import as_objects, filler_block, open_block, read_block
from raypipe.feed.order import BlockRequest
from raypipe.storage import share_gate

Blocks = Sequence[BlockRequest] | Callable[[], Sequence[BlockRequest]]


class SpanDatasource(Datasource):  # type: ignore[misc]
    """Blocks to read, in order: a list, or a function that returns those of each execution when it begins."""

    def __init__(self, context: "ray.ObjectRef[BlockContext]", blocks: Blocks) -> None:
        self._context = context
        self._blocks = blocks

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Runs in the split's actor before it executes anything.
        _quieten()

    def get_name(self) -> str:
        """Return the name that Ray's logs show."""
        return "Spans"

    def estimate_inmemory_data_size(self) -> int | None:
        """Return None: reading a block is the only way to know its size."""
        return None

    def get_read_tasks(
        self,
        parallelism: int,  # noqa: ARG002
        per_task_row_limit: int | None = None,  # noqa: ARG002
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        """Return one task per block. Ray calls this several times: with a context to execute, without one to count."""
        blocks = self._blocks
        if callable(blocks):
            blocks = [] if data_context is None else blocks()
        return [ReadTask(partial(_read, self._context, block), _metadata(block)) for block in blocks]


def build_dataset(context: "ray.ObjectRef[BlockContext]", blocks: Blocks) -> "ray.data.Dataset":
    """Return the Ray Dataset whose blocks are `blocks`: rows with their windows."""
    with DataContext.current(data_context(DataContext.get_current())):
        # Ask for 1 block: Ray splits the blocks if there are fewer tasks than the number, and accepts more tasks.
        return ray.data.read_datasource(SpanDatasource(context, blocks), override_num_blocks=1)


def as_samples(
    dataset: "ray.data.Dataset", context: "ray.ObjectRef[BlockContext]", columns: Callable[..., dict[str, Any]]
) -> "ray.data.Dataset":
    """Return a dataset of `build_dataset` with plain columns, one row per sample; `columns` gives those of one span."""

    def samples(table: pa.Table) -> dict[str, Any]:
        fetched = fetch_context(context)
        # A task keeps its id when Ray retries it, so its journal does not count deaths of other tasks.
        with journal_scope(ray.get_runtime_context().get_task_id()):
            spans = [columns(fetched, block) for block in open_block(fetched, table)]
        return {
            name: np.concatenate(
                [as_objects(span[name]) if isinstance(span[name], list) else span[name] for span in spans]
            )
            for name in spans[0]
        }

    return dataset.map_batches(samples, batch_size=None, batch_format="pyarrow", zero_copy_batch=True)


def data_context(current: DataContext) -> DataContext:
    """Return a context in which Ray keeps the blocks as planned."""
    context = current.copy()
    # One block per task, however large: Ray must not split or merge spans.
    context.target_max_block_size = None
    # Blocks reach the split in the order of the tasks, as the feed order requires.
    context.execution_options.preserve_order = True
    # Ray would drop a failed block silently. Bad data travels inside its block instead.
    context.max_errored_blocks = 0
    # -1 is off: an evaluation may pause a loader for longer than any time-out.
    context.execution_no_progress_timeout_s = -1
    # The loader has its own progress bar.
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return context


def _read(context: "ray.ObjectRef[BlockContext]", block: BlockRequest) -> Iterable[pa.Table]:
    return [filler_block(block) if isinstance(block, int) else read_block(fetch_context(context), block)]


def _quieten() -> None:
    """Make Ray Data log each execution only to its file, in the actor that runs our splits.

    Otherwise every validation pass would print lines into the user's log. Warnings still show.
    """
    if ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        return
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            handler.setLevel(max(handler.level, logging.WARNING))
    # Ray warns that its progress bars are off, which is what we want.
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    # Ray ends the actor by a signal. If that comes while Python cleans up, it would log a meaningless traceback.
    sys.unraisablehook = _tell_unless_ended


def _tell_unless_ended(raised: "sys.UnraisableHookArgs") -> None:
    if not issubclass(raised.exc_type, SystemExit):
        sys.__unraisablehook__(raised)


def _metadata(block: BlockRequest) -> BlockMetadata:
    num_rows = block if isinstance(block, int) else sum(len(span.anchors) for span in block)
    return BlockMetadata(num_rows=num_rows, size_bytes=None, exec_stats=None, input_files=None)


_fetched: dict[str, BlockContext] = {}
"""Contexts of this worker process, with their open files, for later tasks of the same pipeline."""


def fetch_context(context: "ray.ObjectRef[BlockContext]") -> BlockContext:
    """Return the context behind a reference; all tasks of this process share it."""
    key = context.hex()
    if key not in _fetched:
        while len(_fetched) >= 2:
            _fetched.pop(next(iter(_fetched)))
        _fetched[key] = ray.get(context)
        share_gate()
    return _fetched[key]


def split_dataset(dataset: "ray.data.Dataset", num_ranks: int) -> list[Any]:
    """Return an iterator per rank; a block goes to the rank with the fewest rows so far, ties to the lowest."""
    return list(dataset.streaming_split(num_ranks, equal=False))
