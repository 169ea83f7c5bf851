"""Batches from the spans at hand on a rank, also where some of them are bad and left out.

::

    planned     a3  b0  c7  b2  a1        b is bad
    handed      a3      c7      a1        a shorter batch; the frames of b are holes
    planned     b4  b1
    handed      x0                        some good frame, marked as a repeat: no batch is empty
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypipe.account import Handed, Hole
from raypipe.batch import BatchBuilder, SpanErrors, span_columns
from raypipe.block import BlockContext, add_pixels, add_windows, open_block, read_rows
from raypipe.errors import DatasetError
from raypipe.loader_spec import LoaderSpec
from raypipe.packed import SpanRequest, span_request
from raypipe.plan import Batch, WorldPlan
from raypipe.shuffle import LiveWindow
from raypipe.skips import BadSpan, describe_spans


@dataclass(frozen=True, slots=True)
class Built:
    """A batch, and what it holds."""

    batch: dict[str, Any]
    """As the user's transform left it: nothing is known of its keys."""
    handed: Handed
    num_emitted: int
    """Frames of cameras that the samples' datasets have, windows not counted."""


class Assembler:
    """Builds the batches of one rank from its live window; used by one thread."""

    window: LiveWindow

    def __init__(self, context: BlockContext, world: WorldPlan, rank: int, spec: LoaderSpec) -> None:
        self.window = LiveWindow()
        self.bad_spans: list[BadSpan] = []
        """What was left out so far."""
        self.report_bad: Callable[[BadSpan], None] = _report_to_nobody
        """Called with every span that is left out; may raise."""
        self._context = context
        self._plan = world.rank(rank)
        self._lane = self._plan.queue.lane.astype(np.int64)
        self._first_laps = world.first_laps
        self._lap = self._plan.queue.lap - self._first_laps[self._plan.queue.dataset]
        members = context.batch_schema.members
        self._num_cameras = np.array([len(member.cameras) for member in members])[self._plan.queue.dataset]
        self._index = world.plan.index
        self._spec = spec
        self._bad: dict[int, str] = {}
        assert isinstance(spec.num_threads, int), "a run resolves it"
        self._builder = BatchBuilder(context, self._plan, self.window, spec.num_threads)

    def close(self) -> None:
        """End the threads that decode on exit."""
        self._builder.close()

    def leave_out(self, arrival: int, error: DatasetError) -> None:
        """Make holes of what is left of a span, where the policy says so; else raise the error."""
        if self._context.bad_data.on_bad_episode != "skip":
            raise error
        request = span_request(self._plan, arrival)
        why = "; ".join([str(error), *getattr(error, "__notes__", ())])
        span = BadSpan(
            epoch=request.epoch,
            dataset=request.dataset,
            root=str(self._context.datasets[request.dataset].meta.root),
            episode=request.episode,
            start=request.start,
            stop=request.stop,
            why=why,
        )
        self.report_bad(span)
        self.bad_spans.append(span)
        self.window.retire(np.array([arrival]))
        self._bad[arrival] = why

    def build(self, batch: Batch) -> Built:
        """Return the batch without the spans that are left out."""
        while True:
            is_hole = np.isin(batch.span, list(self._bad)) if self._bad else np.zeros(len(batch.span), dtype=np.bool_)
            kept = select_samples(batch, ~is_hole) if is_hole.any() else batch
            try:
                samples = self._builder.build(kept) if len(kept.row) else _copy(self._stand_in)
                break
            except SpanErrors as failed:
                for arrival, error in failed.errors.items():
                    self.leave_out(arrival, error)
        handed = Handed(
            numbers=self._context.frame_numbers(
                samples["dataset_index"].numpy(),
                samples["episode_index"].numpy(),
                samples["frame_index"].numpy(),
                self._lap[kept.span] if len(kept.row) else np.array([0]),
            ),
            is_repeat=kept.is_repeat if len(kept.row) else np.array([True]),
            lanes=self._lane[batch.span[~batch.is_repeat]],
            holes=self._holes(batch, is_hole & ~batch.is_repeat),
        )
        return Built(self._finish(samples), handed, int(self._num_cameras[kept.span].sum()))

    def _finish(self, samples: dict[str, Any]) -> dict[str, Any]:
        built = _move(samples, self._spec.device) if self._spec.device != "cpu" else samples
        built = self._builder.finish(built)
        return built if self._spec.transform is None else self._spec.transform(built, built["augment_seed"])

    def _holes(self, batch: Batch, is_hole: NDArray[np.bool_]) -> tuple[Hole, ...]:
        holes = []
        for arrival in np.unique(batch.span[is_hole]).tolist():
            request = span_request(self._plan, arrival)
            frames = batch.frame[is_hole & (batch.span == arrival)]
            dataset, episode = np.full(len(frames), request.dataset), np.full(len(frames), request.episode)
            lap = np.full(len(frames), self._lap[arrival])
            numbers = self._context.frame_numbers(dataset, episode, frames, lap)
            holes.append(Hole(request.dataset, request.episode, numbers, self._bad[arrival]))
        return tuple(holes)

    @cached_property
    def _stand_in(self) -> dict[str, Any]:
        """A batch of one sample, marked as a repeat: the first frame of the first episode that can be read.

        The same on every rank, on any number of ranks and after any restart.
        """
        decode = replace(self._context.decode, where="cluster", when="block", device="cpu")
        context = replace(self._context, decode=decode)
        for i in range(len(self._index)):
            request = SpanRequest(
                epoch=self._plan.keys.epoch,
                dataset=int(self._index.dataset[i]),
                lap=int(self._first_laps[self._index.dataset[i]]),
                episode=int(self._index.episode[i]),
                start=int(self._index.start[i]),
                stop=int(self._index.start[i]) + 1,
                lane=0,
                place=0,
            )
            (block,) = open_block(context, add_pixels(context, add_windows(context, read_rows(context, [request]))))
            if not block.error[0]:
                return self._as_batch(span_columns(context, block), request.lap)
        raise DatasetError(
            f"a batch without a frame cannot be trained on, and not one of {len(self._index)} episodes can be read; "
            f"those met so far:\n{describe_spans(self.bad_spans)}"
        )

    def _as_batch(self, columns: dict[str, Any], lap: int) -> dict[str, Any]:
        batch = {
            name: torch.from_numpy(np.array(values)) if isinstance(values, np.ndarray) else values
            for name, values in columns.items()
        }
        seeds = self._plan.keys.augment_seeds(
            columns["dataset_index"], np.array([lap]), columns["episode_index"], columns["frame_index"]
        )
        return {**batch, "augment_seed": torch.from_numpy(seeds), "is_repeat": torch.tensor([True])}


def select_samples(batch: Batch, is_kept: NDArray[np.bool_]) -> Batch:
    """Return a batch with some of its samples."""
    return replace(
        batch,
        span=batch.span[is_kept],
        row=batch.row[is_kept],
        frame=batch.frame[is_kept],
        is_repeat=batch.is_repeat[is_kept],
    )


def _copy(batch: dict[str, Any]) -> dict[str, Any]:
    # A transform or a training loop may write to its batch.
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def _report_to_nobody(_: BadSpan) -> None:
    pass


def _move(batch: dict[str, Any], device: str) -> dict[str, Any]:
    """Copy tensors to a device; torch keeps and reuses the pinned memory that they pass through."""
    is_pinned = device.startswith("cuda")
    moved = {}
    for key, value in batch.items():
        moved[key] = value
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            moved[key] = (value.pin_memory() if is_pinned else value).to(device, non_blocking=is_pinned)
    return moved
