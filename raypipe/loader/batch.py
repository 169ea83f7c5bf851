"""Build a batch for the training loop, with the keys, dtypes and shapes of LeRobot's collated samples.

Cameras are ``(B, channels, height, width)``, or ``(B, T, channels, height, width)`` with a window of several frames. In
memory the channels come last, as FFmpeg writes them and as GPU convolutions prefer. Besides LeRobot's keys a batch has
``dataset_index`` and ``augment_seed``. It has ``is_repeat`` if frames may come twice: with ``tail="wrap"`` and with
``on_bad_episode="skip"``. A batch of a mixture also has ``dataset`` and ``robot_type``, the names of every sample's
dataset and robot, and the masks of its schema; cameras that a robot lacks are black. If actions are relative,
``action_representation`` says for every sample relative to what.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypipe.dataset import REPRESENTATION, window_rows
from raypipe.decode import ClipKey, ClipStore
from raypipe.feed import BlockContext, RowFrames, SpanBlock
from raypipe.loader.live_rows import LiveRows
from raypipe.plan import Batch, RankPlan


class BatchBuilder:
    """Builds the batches of one rank from the rows and clips at hand."""

    def __init__(self, context: BlockContext, plan: RankPlan, rows: LiveRows, clips: ClipStore) -> None:
        self._context = context
        self._plan = plan
        self._rows = rows
        self._clips = clips
        self._length = _episode_lengths(context, plan)

    def build(self, batch: Batch, keys: list[ClipKey]) -> dict[str, Any]:
        """Return a batch as tensors on the CPU, cameras as uint8; `keys` gives the clip of every sample."""
        rows = self._rows.take_rows(batch)
        dataset_index = self._plan.queue.dataset[batch.span].astype(np.int64)
        built = self._cameras(batch, keys, dataset_index)
        for name, values in rows.items():
            built[name] = values.tolist() if values.dtype == object else torch.from_numpy(values)
        built["task"] = self._tasks(dataset_index, rows["task_index"])
        built["dataset_index"] = torch.from_numpy(dataset_index)
        built["augment_seed"] = torch.from_numpy(
            self._plan.keys.augment_seeds(
                dataset_index, self._plan.queue.lap[batch.span], rows["episode_index"], rows["frame_index"]
            )
        )
        for name, mask in self._context.batch_schema.masks(dataset_index).items():
            built[name] = torch.from_numpy(mask)
        built.update(_origins(self._context, dataset_index))
        if self._plan.steps.num_repeats or self._context.bad_data.on_bad_episode == "skip":
            built["is_repeat"] = torch.from_numpy(batch.is_repeat.copy())
        return built

    def finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with cameras in `camera_dtype`. Runs on the device, so that bytes are copied, not floats."""
        if self._context.decode.camera_dtype == "uint8":
            return batch
        return {
            key: value.to(torch.float32) / 255
            if isinstance(value, torch.Tensor) and value.dtype == torch.uint8
            else value
            for key, value in batch.items()
        }

    def _cameras(self, batch: Batch, keys: list[ClipKey], dataset_index: NDArray[np.int64]) -> dict[str, Any]:
        schema, built = self._context.batch_schema, {}
        for camera in schema.cameras:
            slots, padding = self._slots(camera, batch, dataset_index)
            blank = self._context.blanks[camera]
            pixels = self._context.batch_buffers.take(camera, (len(keys), *blank.shape), blank.dtype)
            for i, (key, frames) in enumerate(zip(keys, slots.tolist(), strict=True)):
                shown = self._clips.frames(key, camera)
                if shown is None:
                    pixels[i] = blank
                    continue
                for t, frame in enumerate(frames):
                    pixels[i, t] = shown[frame]
            tensor = torch.from_numpy(pixels).permute(0, 1, 4, 2, 3)
            built[camera] = tensor if camera in schema.time_axes else tensor[:, 0]
            if camera in schema.windows:
                built[f"{camera}_is_pad"] = torch.from_numpy(padding)
        return built

    def _slots(
        self, camera: str, batch: Batch, dataset_index: NDArray[np.int64]
    ) -> tuple[RowFrames, NDArray[np.bool_]]:
        """Return the frame behind every window slot of a camera ``(B, T)``, and which slots are padding.

        For a robot without the camera all slots are padding.
        """
        schema = self._context.batch_schema
        shape = (len(batch.frame), schema.windows.get(camera, 1))
        slots, padding = np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=np.bool_)
        for number in np.unique(dataset_index).tolist():
            own = schema.members[number].cameras.get(camera)
            if own is not None:
                mine = dataset_index == number
                offsets = self._context.datasets[number].window.offsets.get(own, (0,))
                wanted = batch.frame[mine][:, None] + np.asarray(offsets)
                slots[mine] = wanted.clip(0, self._length[batch.span[mine]][:, None] - 1)
                padding[mine] = slots[mine] != wanted
        return slots, padding

    def _tasks(self, dataset_index: NDArray[np.int64], task_index: NDArray[np.int64]) -> list[str]:
        tasks = [dataset.meta.tasks for dataset in self._context.datasets]
        pairs = zip(dataset_index.tolist(), task_index.tolist(), strict=True)
        return [tasks[number].text(index) if len(tasks[number]) else "" for number, index in pairs]


def _episode_lengths(context: BlockContext, plan: RankPlan) -> RowFrames:
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
    schema, number = context.batch_schema, block.request.dataset
    columns: dict[str, Any] = {}
    for camera in schema.cameras:
        frames, padding = _span_camera(context, block, camera)
        frames = frames.transpose(0, 1, 4, 2, 3)
        columns[camera] = frames if camera in schema.time_axes else frames[:, 0]
        if camera in schema.windows:
            columns[f"{camera}_is_pad"] = padding
    columns.update(block.columns)
    tasks = context.datasets[number].meta.tasks
    columns["task"] = tasks.texts_of(block.columns["task_index"]) if len(tasks) else [""] * block.num_rows
    columns["dataset_index"] = np.full(block.num_rows, number)
    columns.update(schema.masks(columns["dataset_index"]))
    columns.update(_origins(context, columns["dataset_index"]))
    return columns


def _span_camera(context: BlockContext, block: SpanBlock, camera: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the frames of a camera in every window of a span, and which are padding: all if the camera is missing."""
    request = block.request
    dataset, row, length = context.find_episode(request)
    own, blank = context.member_of(request).cameras.get(camera), context.blanks[camera]
    if own is None:
        return np.zeros((block.num_rows, *blank.shape), blank.dtype), np.ones((block.num_rows, len(blank)), np.bool_)
    slots, padding = window_rows(request.anchors, length, dataset.window.offsets.get(own, (0,)))
    frames, places = np.unique(slots, return_inverse=True)
    decoder = context.decoders[request.dataset]
    if context.stores_images(request.dataset, own):
        stored = [block.stored_images[camera][frame] for frame in frames.tolist()]
        decoded = decoder.decode_images(row, own, stored, frames)
    else:
        decoded = decoder.decode_video(row, own, frames)
    return decoded.cpu().numpy()[places.reshape(slots.shape)], padding


def _origins(context: BlockContext, dataset_index: NDArray[np.int64]) -> dict[str, list[str]]:
    """Return the keys with the dataset and robot of every sample, and with the representation of its actions.

    A single dataset has no dataset and robot keys.
    """
    specs = {str(one.actions.spec): one.actions.spec for one in context.datasets if one.actions is not None}
    told = {f"{spec.feature}{REPRESENTATION}": [text] * len(dataset_index) for text, spec in specs.items()}
    if context.schema is None:
        return told
    numbers = dataset_index.tolist()
    named = {"dataset": [context.names[number] for number in numbers]} if context.names else {}
    return {**told, **named, "robot_type": [context.robots[number] for number in numbers]}
