"""Blocks as Ray Data sees them: one read task, one block, in the order in which they are fed.

The Ray Data settings that raypipe needs are all here, on the dataset's own context, each with its reason.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data import DataContext, Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from raypipe.block import BlockContext, add_pixels, add_windows, filler_block, open_block, read_rows
from raypipe.cluster_gate import share_gate
from raypipe.decode.journal import journal_scope
from raypipe.packed import SpanRequest, as_objects
from raypipe.source.placement import Placement

BlockRequest = tuple[SpanRequest, ...] | int
"""The spans of one block, or the number of rows of a filler."""


class SpanDatasource(Datasource):  # type: ignore[misc]
    """A list of blocks to read, in order."""

    def __init__(self, context: "ray.ObjectRef[BlockContext]", blocks: Sequence[BlockRequest]) -> None:
        self._context = context
        self._blocks = list(blocks)

    def get_name(self) -> str:
        """Return the name that Ray's logs show."""
        return "Spans"

    def estimate_inmemory_data_size(self) -> int | None:
        """Return None: sizes are not known before reading."""
        return None

    def get_read_tasks(
        self,
        parallelism: int,  # noqa: ARG002
        per_task_row_limit: int | None = None,  # noqa: ARG002
        data_context: DataContext | None = None,  # noqa: ARG002
    ) -> list[ReadTask]:
        """Return one task per block. Ray calls this several times, so it is cheap and always the same."""
        return [ReadTask(_ReadBlock(self._context, block), _metadata(block)) for block in self._blocks]


def build_dataset(
    context: "ray.ObjectRef[BlockContext]",
    blocks: Sequence[BlockRequest],
    *,
    is_decoding: bool,
    nodes: Sequence[str] = (),
) -> "ray.data.Dataset":
    """Return the Ray Dataset whose blocks are `blocks`, windowed, and decoded where `is_decoding`.

    Args:
        nodes: where each block is decoded, see `place_blocks`; none: wherever a CPU is free. Placed tasks are not fused
            with the read, which costs Ray some 20 ms of CPU a block.
    """
    with DataContext.current(data_context(DataContext.get_current())):
        dataset = ray.data.read_datasource(SpanDatasource(context, blocks), override_num_blocks=len(blocks))
        dataset = _map(dataset, _task(context, add_windows, "AddWindows"))
        if is_decoding:
            dataset = _map(dataset, _task(context, add_pixels, "AddPixels"), Placement(nodes) if nodes else None)
        return dataset


def as_samples(
    dataset: "ray.data.Dataset", context: "ray.ObjectRef[BlockContext]", columns: Callable[..., dict[str, Any]]
) -> "ray.data.Dataset":
    """Return the dataset with plain columns, one row per sample, for people who go on with Ray Data.

    Args:
        dataset: what `build_dataset` returns.
        context: the same as there.
        columns: makes the columns of one span.
    """

    def samples(table: pa.Table) -> dict[str, Any]:
        fetched = _fetch(context)
        spans = [columns(fetched, block) for block in open_block(fetched, table)]
        return {
            name: np.concatenate(
                [as_objects(span[name]) if isinstance(span[name], list) else span[name] for span in spans]
            )
            for name in spans[0]
        }

    return dataset.map_batches(samples, batch_size=None, batch_format="pyarrow", zero_copy_batch=True)


def data_context(current: DataContext) -> DataContext:
    """Return a context in which Ray keeps blocks as they are planned."""
    context = current.copy()
    # One block per task, however large: a block that is cut or merged is no span any more.
    context.target_max_block_size = None
    # Blocks reach the split in the order of the tasks: the feed order stands on it.
    context.execution_options.preserve_order = True
    # It would drop data without a word. Bad data travels inside its block.
    context.max_errored_blocks = 0
    # -1 is off: an evaluation may pause a loader for longer than any time-out.
    context.execution_no_progress_timeout_s = -1
    # -1 is off: what watches the memory of tasks asks `Placement` between them, as if it started one.
    context.issue_detectors_config.high_memory_detector_config.detection_time_interval_s = -1
    # The loader shows progress of its own.
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return context


def _map(
    dataset: "ray.data.Dataset", stage: Callable[[pa.Table], pa.Table], placement: Placement | None = None
) -> "ray.data.Dataset":
    options: dict[str, Any] = {}
    if placement is not None and "ray_remote_args_fn" in inspect.signature(dataset.map_batches).parameters:
        options["ray_remote_args_fn"] = placement
    with warnings.catch_warnings():
        # Ray 2.64 will be without it, and blocks are decoded wherever a CPU is free then.
        warnings.filterwarnings("ignore", message="`ray_remote_args_fn` is deprecated", category=DeprecationWarning)
        # batch_size=None keeps a block whole, and Ray fuses such a map with the read.
        return dataset.map_batches(stage, batch_size=None, batch_format="pyarrow", zero_copy_batch=True, **options)


def _task(
    context: "ray.ObjectRef[BlockContext]", stage: Callable[[BlockContext, pa.Table], pa.Table], name: str
) -> Callable[[pa.Table], pa.Table]:
    def run(table: pa.Table) -> pa.Table:
        # A task keeps its id when Ray tries it again: deaths of others are not its own.
        with journal_scope(ray.get_runtime_context().get_task_id()):
            return stage(_fetch(context), table)

    run.__name__ = run.__qualname__ = name
    return run


class _ReadBlock:
    def __init__(self, context: "ray.ObjectRef[BlockContext]", block: BlockRequest) -> None:
        self._context = context
        self._block = block

    def __call__(self) -> Iterable[pa.Table]:
        if isinstance(self._block, int):
            return [filler_block(self._block)]
        return [read_rows(_fetch(self._context), self._block)]


def _metadata(block: BlockRequest) -> BlockMetadata:
    num_rows = block if isinstance(block, int) else sum(len(span.anchors) for span in block)
    return BlockMetadata(num_rows=num_rows, size_bytes=None, exec_stats=None, input_files=None)


_fetched: dict[str, BlockContext] = {}
"""Contexts of this worker process, with their open files: tasks of the same pipeline follow each other here."""


def _fetch(context: "ray.ObjectRef[BlockContext]") -> BlockContext:
    key = context.hex()
    if key not in _fetched:
        while len(_fetched) >= 2:
            _fetched.pop(next(iter(_fetched)))
        _fetched[key] = ray.get(context)
        share_gate()
    return _fetched[key]


def split_dataset(dataset: "ray.data.Dataset", num_ranks: int) -> list[Any]:
    """Return an iterator per rank; blocks go to the rank with the fewest rows so far, ties to the lowest."""
    return list(dataset.streaming_split(num_ranks, equal=False))
