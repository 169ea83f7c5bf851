"""Build batches from the spans at hand on a rank, leaving out the bad ones.

::

    planned     a3  b0  c7  b2  a1        b is bad: its rows, or the clip of these frames
    handed      a3      c7      a1        a shorter batch; the frames of b are holes
    planned     b4  b1
    handed      x0                        a good frame, marked as a repeat, so that no batch is empty

A batch has the keys, dtypes and shapes of LeRobot's collated samples. Cameras are ``(B, channels, height, width)``, or
``(B, T, channels, height, width)`` with a window of several frames. In memory the channels come last, as FFmpeg writes
them and as GPU convolutions prefer. Besides LeRobot's keys a batch has ``dataset_index`` and ``augment_seed``. It has
``is_repeat`` if frames may come twice: with ``tail="wrap"`` and with ``on_bad_episode="skip"``. A batch of a mixture
also has ``dataset`` and ``robot_type``, the names of every sample's dataset and robot, and the masks of its schema;
cameras that a robot lacks are black. If actions are relative, ``action_representation`` says for every sample relative
to what.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from raypipe.account import Handed, Skip
from raypipe.dataset import REPRESENTATION, Schema, window_rows
from raypipe.decode import ClipExecutor, ClipKey, decode_clip
from raypipe.errors import ConfigError, DatasetError
from raypipe.feed import (
    BadSpan,
    BlockContext,
    SpanBlock,
    SpanRequest,
    add_span,
    clip_request,
    describe_spans,
    open_block,
    read_block,
)
from raypipe.loader.at_hand import BatchClips, LiveRows, trim_memory
from raypipe.loader.job import LoaderSpec, RankJob
from raypipe.loader.transforms import SamplePool, SeededRandom, SideStream
from raypipe.plan import Batch, Ints, RankPlan, WorldPlan
from raypipe.text import counted

_TRIM_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Built:
    """A batch, with the record of its frames."""

    batch: dict[str, Any]
    """The return value of the user's transform; its keys can be anything."""
    handed: Handed
    num_emitted: int
    """Samples times the cameras of their datasets, without windows."""
    ready: Any
    """The CUDA event for `wait_for`; None on the CPU."""


class Assembler:
    """Builds the batches of one rank from the rows and clips at hand. For one thread."""

    def __init__(self, job: RankJob, world: WorldPlan, spec: LoaderSpec, executor: ClipExecutor) -> None:
        self.rows = LiveRows()
        self.bad_spans: list[BadSpan] = []
        """The spans left out so far."""
        self.report_bad: Callable[[BadSpan], None] = do_nothing
        """Called with the first bad span or clip of every episode; may raise."""
        self._context = context = job.context
        self._plan = world.rank(job.rank)
        self._bad: dict[int, BadSpan] = {}
        self.clips = BatchClips(context, self._plan, self.rows, self._bad, executor, job.live_bytes)
        self._lane = self._plan.queue.lane.astype(np.int64)
        self._first_laps = world.first_laps
        self._lap = self._plan.queue.lap - self._first_laps[self._plan.queue.dataset]
        members = context.batch_schema.members
        self._num_cameras = np.array([len(member.cameras) for member in members])[self._plan.queue.dataset]
        self._index = world.plan.index
        self._spec = spec
        self._stream = SideStream(spec.device)
        self._pool = SamplePool(spec.sample_transform, int(spec.num_threads)) if spec.sample_transform else None
        self._bad_clips: dict[ClipKey, BadSpan] = {}
        self._left_bytes = 0
        self._length = _episode_lengths(context, self._plan)
        # torch fixes a thread's number of cores when the thread first asks. Ask now for the calling thread, which may
        # train: after our threads call `use_one_core` it would get 1.
        torch.get_num_threads()

    def leave_out(self, arrival: int, error: DatasetError) -> None:
        """Turn the rest of a span into holes if the policy is "skip"; else raise the error."""
        request = self.clips.request(arrival)
        self._bad[arrival] = self._note_bad(request, request.start, request.stop, error)
        self.clips.store.drop_spans([arrival])

    def leave_out_clip(self, key: ClipKey, error: DatasetError) -> None:
        """Turn the frames of a clip into holes if the policy is "skip"; else raise the error."""
        self._bad_clips[key] = self._note_bad(self.clips.request(key[0]), *self.clips.frames_of(key), error)

    def _note_bad(self, request: SpanRequest, start: int, stop: int, error: DatasetError) -> BadSpan:
        if self._context.bad_data.on_bad_episode != "skip":
            raise error
        span = BadSpan(
            epoch=request.epoch,
            dataset=request.dataset,
            root=str(self._context.datasets[request.dataset].meta.root),
            episode=request.episode,
            start=start,
            stop=stop,
            why="; ".join([str(error), *getattr(error, "__notes__", ())]),
        )
        if not any((span.dataset, span.episode) == (one.dataset, one.episode) for one in self.bad_spans):
            self.report_bad(span)
        self.bad_spans = add_span(self.bad_spans, span)
        return span

    def build(self, batch: Batch) -> Built:
        """Return the batch without the frames left out. Call it when all its clips are ready."""
        keys = self.clips.keys(batch)
        is_hole = np.array([key[0] in self._bad or key in self._bad_clips for key in keys], dtype=np.bool_)
        kept = batch
        if is_hole.any():
            columns = ("span", "row", "frame", "is_repeat")
            kept = replace(batch, **{name: getattr(batch, name)[~is_hole] for name in columns})
        kept_keys = [key for key, is_bad in zip(keys, is_hole.tolist(), strict=True) if not is_bad]
        samples = self._samples(kept, kept_keys) if kept_keys else self._one_repeat()
        handed = Handed(
            numbers=self._context.frame_numbers(
                samples["dataset_index"].numpy(),
                samples["episode_index"].numpy(),
                samples["frame_index"].numpy(),
                self._lap[kept.span] if len(kept.row) else np.array([0]),
            ),
            is_repeat=kept.is_repeat if len(kept.row) else np.array([True]),
            lanes=self._lane[batch.span[~batch.is_repeat]],
            skipped=self._skips(batch, keys, is_hole & ~batch.is_repeat),
        )
        self.clips.leave(batch, keys)
        self._left_bytes += len(keys) * self._context.pixel_bytes
        if self._left_bytes > max(_TRIM_BYTES, self.clips.store.peak_bytes):
            # Rare enough that most freed memory is reused first, and often enough that memory stays flat.
            self._left_bytes = 0
            trim_memory()
        changed = samples if self._pool is None else self._pool.change(samples)
        finished, ready = self._stream.run(lambda: self._finish(changed, samples["augment_seed"]))
        return Built(finished, handed, int(self._num_cameras[kept.span].sum()), ready)

    def close(self) -> None:
        """Release all rows and frames; keep the list of bad spans."""
        self.rows.clear()
        self.clips.store.clear()
        if self._pool is not None:
            self._pool.close()
        # The callback refers to the feed, and so to the actors that serve it.
        self.report_bad = do_nothing

    def retire(self, arrivals: list[int]) -> None:
        """Release spans that no later batch needs."""
        self.rows.retire(arrivals)
        self.clips.retire(arrivals)
        if self._bad_clips:
            gone = set(arrivals)
            self._bad_clips = {key: bad for key, bad in self._bad_clips.items() if key[0] not in gone}

    def _finish(self, samples: dict[str, Any], seeds: torch.Tensor) -> dict[str, Any]:
        built = _move(samples, self._spec.device) if self._spec.device != "cpu" else samples
        if self._context.decode.camera_dtype != "uint8":
            # On the device, so that bytes are copied, not floats.
            for key, value in built.items():
                if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
                    built[key] = value.to(torch.float32) / 255
        if self._spec.transform is None:
            return built
        with SeededRandom(int(seeds.sum())):
            changed = self._spec.transform(built, built.get("augment_seed", seeds))
        # A transform that changes the batch in place easily lacks the return.
        if changed is None:
            raise ConfigError("transform must return a batch; it has returned None")
        return changed

    def _samples(self, batch: Batch, keys: list[ClipKey]) -> dict[str, Any]:
        """Return a batch as tensors on the CPU, cameras as uint8; `keys` gives the clip of every sample."""
        rows = self.rows.take_rows(batch)
        dataset_index = self._plan.queue.dataset[batch.span].astype(np.int64)
        columns = {**self._cameras(batch, keys, dataset_index), **rows}
        built = _as_tensors({**columns, **_label(self._context, dataset_index, rows["task_index"])})
        laps, episodes, frames = self._plan.queue.lap[batch.span], rows["episode_index"], rows["frame_index"]
        built["augment_seed"] = torch.from_numpy(self._plan.keys.augment_seeds(dataset_index, laps, episodes, frames))
        if self._plan.steps.num_repeats or self._context.bad_data.on_bad_episode == "skip":
            built["is_repeat"] = torch.from_numpy(batch.is_repeat.copy())
        return built

    def _cameras(self, batch: Batch, keys: list[ClipKey], dataset_index: Ints) -> dict[str, Any]:
        schema = self._context.batch_schema
        built: dict[str, Any] = {}
        for camera in schema.cameras:
            slots, padding = self._slots(camera, batch, dataset_index)
            blank = self._context.blanks[camera]
            pixels = self._context.batch_buffers.take(camera, (len(keys), *blank.shape), blank.dtype)
            for i, (key, frames) in enumerate(zip(keys, slots.tolist(), strict=True)):
                shown = self.clips.store.frames(key, camera)
                if shown is None:
                    pixels[i] = blank
                    continue
                for t, frame in enumerate(frames):
                    pixels[i, t] = shown[frame]
            built |= _camera_columns(schema, camera, pixels, padding)
        return built

    def _slots(self, camera: str, batch: Batch, dataset_index: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the frames behind the slots of a camera ``(B, T)``, and which are padding: all, without the camera."""
        schema = self._context.batch_schema
        shape = (len(batch.frame), schema.windows.get(camera, 1))
        slots, padding = np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=np.bool_)
        for number in np.unique(dataset_index).tolist():
            own = schema.members[number].cameras.get(camera)
            if own is not None:
                mine = dataset_index == number
                offsets = self._context.datasets[number].window.offsets.get(own, (0,))
                length = self._length[batch.span[mine]][:, None]
                slots[mine], padding[mine] = window_rows(batch.frame[mine], length, offsets)
        return slots, padding

    def _skips(self, batch: Batch, keys: list[ClipKey], is_hole: NDArray[np.bool_]) -> tuple[Skip, ...]:
        skips = []
        for arrival in np.unique(batch.span[is_hole]).tolist():
            mine, request = np.flatnonzero(is_hole & (batch.span == arrival)), self.clips.request(arrival)
            frames = batch.frame[mine]
            dataset, episode = np.full(len(frames), request.dataset), np.full(len(frames), request.episode)
            lap = np.full(len(frames), self._lap[arrival])
            numbers = self._context.frame_numbers(dataset, episode, frames, lap)
            bad = self._bad.get(arrival) or self._bad_clips[keys[mine[0]]]
            skips.append(Skip.of(bad.dataset, bad.episode, numbers, bad.why))
        return tuple(skips)

    def _one_repeat(self) -> dict[str, Any]:
        """Return a batch of one sample, marked as a repeat."""
        columns, lap = self._stand_in
        # Copied, because a transform or a training loop may write to its batch.
        copies = {name: np.array(one) if isinstance(one, np.ndarray) else list(one) for name, one in columns.items()}
        seeds = self._plan.keys.augment_seeds(
            columns["dataset_index"], np.array([lap]), columns["episode_index"], columns["frame_index"]
        )
        return {**_as_tensors(copies), "augment_seed": torch.from_numpy(seeds), "is_repeat": torch.tensor([True])}

    @cached_property
    def _stand_in(self) -> tuple[dict[str, Any], int]:
        """The columns of one sample, and its lap: the first frame of the first readable episode.

        It is the same on every rank, with any number of ranks and after any restart.
        """
        context = self._context
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
            with context.reading:
                table = read_block(context, [request])
            (block,) = open_block(context, table)
            with suppress(DatasetError):
                return span_columns(context, block), request.lap
        raise DatasetError(
            f"a batch without a frame cannot be trained on, and not one of {counted(len(self._index), 'episode')} can "
            f"be read; those met so far:\n{describe_spans(self.bad_spans)}\nMend the dataset: "
            f"`raypipe validate {self.bad_spans[0].root}` tells what is wrong with it, and what to do."
        )


def do_nothing(_: Any) -> None:
    """Do nothing."""


def _move(batch: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the batch with its tensors on a device. On the way torch uses pinned memory, which it keeps and reuses."""
    is_pinned = device.startswith("cuda")
    moved = {}
    for key, value in batch.items():
        moved[key] = value
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            moved[key] = (value.pin_memory() if is_pinned else value).to(device, non_blocking=is_pinned)
    return moved


def _episode_lengths(context: BlockContext, plan: RankPlan) -> Ints:
    """Return, by arrival number, how many frames the span's episode has."""
    length = np.zeros(len(plan.queue), dtype=np.int64)
    for number, dataset in enumerate(context.datasets):
        mine, episodes = plan.queue.dataset == number, dataset.meta.episodes
        length[mine] = episodes.length[np.searchsorted(episodes.episode_index, plan.queue.episode[mine])]
    return length


def span_columns(context: BlockContext, block: SpanBlock) -> dict[str, Any]:
    """Return a span as columns of samples, for users of Ray Data. Decodes the span's frames here, in one pass.

    Cameras are ``(rows, [T,] channels, height, width)``.
    """
    block.check()
    columns: dict[str, Any] = {}
    for camera in context.batch_schema.cameras:
        columns |= _camera_columns(context.batch_schema, camera, *_span_camera(context, block, camera))
    dataset_index = np.full(block.num_rows, block.request.dataset)
    return {**columns, **block.columns, **_label(context, dataset_index, block.columns["task_index"])}


def _camera_columns(
    schema: Schema, camera: str, pixels: NDArray[Any], padding: NDArray[np.bool_]
) -> dict[str, NDArray[Any]]:
    """Return the columns of a camera from its frames in every window slot ``(B, T, height, width, channels)``."""
    shown = pixels.transpose(0, 1, 4, 2, 3)
    columns = {camera: shown if camera in schema.time_axes else shown[:, 0]}
    return {**columns, f"{camera}_is_pad": padding} if camera in schema.windows else columns


def _as_tensors(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns of a batch as tensors, and those of texts, lists and structs as lists."""
    built = dict(columns)
    for name, values in columns.items():
        if isinstance(values, np.ndarray):
            built[name] = values.tolist() if values.dtype == object else torch.from_numpy(values)
    return built


def _span_camera(context: BlockContext, block: SpanBlock, camera: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the frames of a camera in every window of a span, and which are padding: all if the camera is missing."""
    request = block.request
    dataset, _, length = context.find_episode(request)
    own, blank = context.member_of(request).cameras.get(camera), context.blanks[camera]
    if own is None:
        return np.zeros((block.num_rows, *blank.shape), blank.dtype), np.ones((block.num_rows, len(blank)), np.bool_)
    slots, padding = window_rows(request.anchors, length, dataset.window.offsets.get(own, (0,)))
    frames, places = np.unique(slots, return_inverse=True)
    reach = (int(frames[0]), int(frames[-1]) + 1)
    clip = clip_request(context, request, camera, frames, reach, block.stored_images)
    decoded = decode_clip(context.decoders, clip)
    shown = np.stack([decoded[place] for place in places.ravel().tolist()])
    return shown.reshape(*slots.shape, *shown.shape[1:]), padding


def _label(context: BlockContext, dataset_index: Ints, task_index: Ints) -> dict[str, Any]:
    """Return the keys that a batch has besides features: the task, where each sample is from, and what masks it.

    A single dataset has no dataset and robot keys.
    """
    numbers, tasks = dataset_index.tolist(), [dataset.meta.tasks for dataset in context.datasets]
    pairs = zip(numbers, task_index.tolist(), strict=True)
    labels: dict[str, Any] = {
        "task": [tasks[number].text(index) if len(tasks[number]) else "" for number, index in pairs],
        "dataset_index": dataset_index,
        **context.batch_schema.masks(dataset_index),
    }
    specs = {str(dataset.actions.spec): dataset.actions.spec for dataset in context.datasets if dataset.actions}
    for text, spec in specs.items():
        labels[f"{spec.feature}{REPRESENTATION}"] = [text] * len(numbers)
    if context.schema is not None:
        if context.names:
            labels["dataset"] = [context.names[number] for number in numbers]
        labels["robot_type"] = [context.robots[number] for number in numbers]
    return labels
